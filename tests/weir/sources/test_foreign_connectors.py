"""Positions and errors that are not what a source expects: another kind of source, a person's typing, a third party's
connector."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from state_ops.errors import ConfigurationError, PipelineError, TransientError, WeirError
from tests.recovery.harness import Site
from tests.weir.sources.partitions import Partitions, PartitionsSource, put, row
from tests.weir.sources.test_connector_reader import SOURCE, epochs, of, position, site_of, totals
from weir import Pipeline, Source, agg, aggregate, chain, delta, files, generator
from weir.cli import status
from weir.execution.in_process import InMemoryExecutor
from weir.operations import plan
from weir.ownership import backlog
from weir.ownership.pipeline_storage import open_storage
from weir.run import maintenance, sensor
from weir.run.run import RunOptions, run

# -- another kind of source under the same name


def counted(source: Any) -> Pipeline:
    stage = aggregate("sums", source, key="id", sink=delta.append("sums"), n=agg.count(), total=agg.sum("n"))
    return Pipeline("clicks", (stage,), max_parallelism=4)


LINES = files("{landing}/*.json", format="json", name="clicks")


def test_a_source_that_becomes_another_kind_is_refused_by_name_and_sought_on(tmp_path):
    site = Site(tmp_path, {"WEIR_SPARK__PARALLELISM": "2"}, counted(LINES), __name__)
    site.landing.mkdir(parents=True)
    for number, key in ((1, "a"), (2, "b")):
        line = json.dumps({"id": key, "n": number, "at": "2026-05-01T12:00:00+00:00"})
        (site.landing / f"{number}.json").write_text(f"{line}\n")
        epochs(site)
    put(site.landing, "p", row("a", 10, 1))
    other = replace(site, pipeline=counted(replace(SOURCE, event_time=None)))
    for asked in (lambda: epochs(other), lambda: maintenance.rewind(other.pipeline, other.settings, 1)):
        with pytest.raises(WeirError) as refused:
            asked()
    with pytest.raises(
        PipelineError, match="was a file source when it was read, and is a partitions source"
    ) as refused:
        epochs(other)
    assert "retired=" in str(refused.value) and "weir seek" in str(refused.value)
    assert "was a file source" in status.status_of(other.pipeline, other.settings)["unreachable"]["clicks"]
    assert any("was a file source" in finding.what for finding in plan.plan(other.pipeline, other.settings).findings)
    maintenance.seek(other.pipeline, other.settings, "clicks", "earliest")
    put(site.landing, "p", row("a", 100, 1))
    epochs(other)
    assert totals(other) == {"a": (3, 111), "b": (1, 2)}

    with pytest.raises(
        PipelineError, match="was a partitions source when it was read, and is a file source"
    ) as refused:
        epochs(site)
    assert "weir seek" not in str(refused.value)
    with pytest.raises(WeirError, match="was a partitions source"):
        site.pipeline and backlog_of(site)


def backlog_of(site: Site) -> None:
    head = open_storage(site.pipeline, site.settings)[1].head()
    problem = backlog.arrivals(site.pipeline, site.settings, head)["clicks"].problem
    if problem is not None:
        raise WeirError(problem)


def test_a_source_goes_on_where_it_was_when_a_history_comes_before_it(tmp_path):
    site = site_of(tmp_path)
    put(site.landing, "p", row("a", 1, 1))
    epochs(site)
    history = replace(SOURCE, name="old", root="{landing}/old")
    put(site.landing / "old", "q", row("a", 1000, 1))
    put(site.landing, "p", row("a", 10, 2))
    later = replace(site, pipeline=of(chain(history, SOURCE)))
    epochs(later)
    assert totals(later) == {"a": (2, 11)}, "the history is over, and what was read stays read"


# -- what a person seeks


def sums_of(root: Path, source: Source) -> Site:
    stage = aggregate("sums", source, key="key", sink=delta.append("sums"), n=agg.count())
    return Site(root, {"WEIR_SPARK__PARALLELISM": "2"}, Pipeline("clicks", (stage,), max_parallelism=4), __name__)


def test_a_position_that_is_none_is_refused_before_anything_is_committed(tmp_path):
    site = sums_of(tmp_path, generator(name="clicks", end=10))
    epochs(site)
    before = site.head()
    for to in ({}, {"next": "5"}, {"next": -1}, {"next": 1.5}, {"next": True}, {"next": 1, "more": 2}, {"p": 1}):
        with pytest.raises(ConfigurationError, match="no position of the source") as refused:
            maintenance.seek(site.pipeline, site.settings, "clicks", to)
        assert '{"next": 0}' in str(refused.value) and site.head() == before
    maintenance.seek(site.pipeline, site.settings, "clicks", {"next": 5})
    assert position(site)["at"] == {"next": 5}


def test_a_position_of_a_chain_is_checked_by_those_that_it_chains(tmp_path):
    site = sums_of(tmp_path, chain(generator(name="old", end=10), generator(name="clicks", end=10)))
    epochs(site)
    before, at = site.head(), {"next": 1}
    for to in (
        {"of": "live"},
        {"of": "both", "at": at},
        {"of": "history", "at": at},
        {"of": "live", "at": 5},
        {"of": "live", "at": {"next": "x"}},
        {"of": "history", "at": at, "live": {}},
    ):
        with pytest.raises(ConfigurationError, match="no position of the source"):
            maintenance.seek(site.pipeline, site.settings, "clicks", to)
        assert site.head() == before
    maintenance.seek(site.pipeline, site.settings, "clicks", {"of": "history", "at": at, "live": at})
    assert position(site)["at"] == {"of": "history", "at": at, "live": at}


# -- errors of a third party's connector


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenSource(PartitionsSource):
    """Its connector raises what no connector may."""


BROKEN: dict[str, Exception] = {}


def broken(method: str) -> Any:
    def call(self: Partitions, *given: Any) -> Any:
        if method in BROKEN:
            raise BROKEN[method]
        return getattr(Partitions, method)(self, *given)

    return call


class BrokenPartitions(Partitions):
    pass


for _method in ("begin", "plan", "read", "verify", "lag", "committed", "close", "where"):
    setattr(BrokenPartitions, _method, broken(_method))


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.weir.sources.partitions.Partitions", BrokenPartitions)
    BROKEN.clear()
    site_there = site_of(tmp_path, options={"WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "0"})
    put(site_there.landing, "p", row("a", 1, 1))
    yield site_there
    BROKEN.clear()


def test_who_looks_is_told_of_a_connector_that_fails_and_sees_the_rest(site):
    epochs(site)
    BROKEN["plan"] = BROKEN["lag"] = KeyError("topics")
    shown = status.status_of(site.pipeline, site.settings)
    assert "connector has failed: KeyError: 'topics'" in shown["unreachable"]["clicks"] and shown["last_checkpoint"]
    assert "KeyError" in sensor.observe(site.pipeline, site.settings).unreachable[0]
    head = open_storage(site.pipeline, site.settings)[1].head()
    assert "KeyError" in backlog.observed(site.pipeline, site.settings, head)["clicks"]["not known"]


@pytest.mark.parametrize("method", ["begin", "plan", "read", "verify"])
def test_a_connector_that_fails_ends_a_run_by_its_sources_name(site, method):
    BROKEN[method] = ValueError("bad cursor")
    with pytest.raises(PipelineError, match="connector has failed: ValueError: bad cursor") as failed:
        epochs(site)
    assert failed.value.where == "partitions clicks" and failed.value.__cause__ is BROKEN[method]
    BROKEN[method] = ConnectionResetError("reset by peer")
    with pytest.raises(TransientError, match="could not be asked: ConnectionResetError"):
        epochs(site)
    BROKEN.clear()
    epochs(site)
    assert totals(site) == {"a": (1, 1)}


def test_a_connector_that_cannot_be_told_of_a_checkpoint_or_closed_ends_nothing(site, capsys):
    BROKEN["committed"] = RuntimeError("no such group")
    BROKEN["close"] = RuntimeError("closed already")
    assert len(list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))) == 1
    assert totals(site) == {"a": (1, 1)}
    printed = capsys.readouterr()
    assert "no such group" in printed.out + printed.err and "closed already" in printed.out + printed.err


def test_whether_input_is_overdue_cannot_be_told_of_a_source_that_fails(site):
    from weir.dagster import checks  # loads Dagster

    assert checks.on_time(site.pipeline, site.settings).passed
    BROKEN["plan"] = KeyError("topics")
    verdict = checks.on_time(site.pipeline, site.settings)
    assert not verdict.passed and "KeyError" in (verdict.description or "")
