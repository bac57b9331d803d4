"""Queries that pages print, run on the pipeline that they name; their answers are what the registry's objects and the
tables say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from infra import flights_input
from state_ops.checkpoints.registry import JSON_COLUMNS
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.recorded import Recorded
from tests.recovery.harness import Site
from weir.cli.main import app
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run
from weir.settings.configuration import PROJECT

_QUERY = re.compile(r'weir\s+state\s+sql\s+(\w+)\s+"([^"]+)"')
Rows = list[dict[str, Any]]


def printed(pipeline: str) -> list[str]:
    pages = [*(PROJECT / "docs").rglob("*.md"), PROJECT / "README.md"]
    found = [_QUERY.findall(page.read_text("utf-8")) for page in sorted(pages)]
    queries = [" ".join(query.split()) for page in found for name, query in page if name == pipeline]
    return [query for query in dict.fromkeys(queries) if query != "SELECT ..."]


class Flights:
    def __init__(self, site: Site) -> None:
        self.site = site
        reports = list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
        self.checkpoints = [report.checkpoint for report in reports]

    def ask(self, query: str, monkeypatch: pytest.MonkeyPatch) -> Rows:
        for name, value in self.site.env.items():
            monkeypatch.setenv(name, value)
        done = CliRunner().invoke(app, ["state", "sql", "flights", query, "--json"])
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def flights(tmp_path_factory) -> Flights:
    root = tmp_path_factory.mktemp("queries")
    gates = {"aircraft_rotation": [{"expect": "ExpectColumnValuesToNotBeNull", "column": "dest", "on_failure": "warn"}]}
    more = {"WEIR_EPOCH__MAX_FILES": "2", "WEIR_PIPELINES__FLIGHTS__GATES": json.dumps(gates)}
    site = Site(root / "site", more)
    site.land(flights_input.prepare(root / "days")[:4])
    return Flights(site)


def gates(flights: Flights, answer: Rows) -> None:
    expected = {c.id: c.operators["aircraft_rotation"].gates for c in flights.checkpoints}
    assert {row["id"]: json.loads(row["gates"]) for row in answer} == expected
    assert all(gate["title"] for given in expected.values() for gate in given) and all(expected.values())


def keys(flights: Flights, answer: Rows) -> None:
    assert answer == [{"count_star()": len(flights.site.state("aircraft_rotation"))}]


def last_seen(flights: Flights, answer: Rows) -> None:
    state = flights.site.state("aircraft_rotation")
    assert {row["last_seen"]: row["keys"] for row in answer} == {
        day.isoformat(): len(rows) for day, rows in state.groupby(state["last_departure"].dt.date)
    }


def totals(flights: Flights, answer: Rows) -> None:
    newest = flights.checkpoints[::-1][:5]
    columns = {"epochs": "epochs", "puts": "requests_put", "bytes_up": "bytes_up"}
    assert answer == [{"id": c.id} | {n: str(c.totals[of]) for n, of in columns.items()} for c in newest]


def versions(flights: Flights, answer: Rows) -> None:
    assert {row["checkpoint_id"] for row in answer} == {c.id for c in flights.checkpoints}
    assert all(isinstance(row["delta_version"], int) for row in answer)


ANSWERS: dict[str, Callable[[Flights, Rows], None]] = {
    "SELECT count(*) FROM aircraft_rotation": keys,
    "SELECT id, json_extract(operators, '$.aircraft_rotation.gates') AS gates FROM registry.checkpoints": gates,
    "SELECT last_departure::DATE AS last_seen, count(*) AS keys FROM aircraft_rotation GROUP BY 1 ORDER BY 1": last_seen,
    "SELECT id, totals->>'epochs' AS epochs, totals->>'requests_put' AS puts, totals->>'bytes_up' AS bytes_up FROM "
    "checkpoints ORDER BY id DESC LIMIT 5": totals,
    "SELECT checkpoint_id, sink, delta_version FROM publications": versions,
}


def test_every_query_that_a_page_prints_has_an_answer_here():
    assert set(printed("flights")) == set(ANSWERS)


@pytest.mark.parametrize("query", ANSWERS)
def test_a_query_of_a_page_gives_its_answer(flights, query, monkeypatch):
    ANSWERS[query](flights, flights.ask(query, monkeypatch))


@pytest.mark.parametrize("column", JSON_COLUMNS)
def test_every_nested_column_of_the_registry_is_json(flights, column, monkeypatch):
    answer = flights.ask(f"SELECT id, {column} FROM registry.checkpoints ORDER BY id", monkeypatch)
    assert [_loaded(row[column]) for row in answer] == [_stored(c, column) for c in flights.checkpoints]


def _stored(checkpoint: Checkpoint, column: str) -> Any:
    return json.loads(json.dumps(getattr(checkpoint, column), default=Recorded.to_json))


def _loaded(value: str | None) -> Any:
    return None if value is None else json.loads(value)


def test_whole_numbers_that_64_bits_hold_are_numbers(flights, monkeypatch):
    query = (
        f"SELECT sum(n) AS s, sum(n) * {1 << 62} AS t, sum(NULL::INT) AS u, 1::DECIMAL(9, 0) AS d FROM range(5) r(n)"
    )
    assert flights.ask(query, monkeypatch) == [{"s": 10, "t": str(10 * (1 << 62)), "u": None, "d": "1"}]
