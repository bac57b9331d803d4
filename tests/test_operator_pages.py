"""The page of each operator has one form, and its example gives the rows that the page shows."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, time
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from weir import Stage, api, testing
from weir.operators.compatibility import meaning
from weir.settings.configuration import PROJECT

INDEX = PROJECT / "docs" / "reference" / "operators.md"
PAGES = sorted((INDEX.parent / "operators").glob("*.md"))
SECTIONS = ["Example", "Arguments", "When rows come out", "Late rows", "State", "What may change later"]
FUNCTIONS = {
    "aggregate": api.aggregate,
    "as_of": api.as_of,
    "deduplicate": api.deduplicate,
    "join": api.join,
    "lookup": api.lookup,
    "select": api.select,
    "stage": api.stage,
    "top_n": api.top_n,
    "union": api.union,
    "window": api.window,
}
VARIANTS = {
    "calendar-windows": api.window,
    "processing-time-windows": api.window,
    "session-windows": api.window,
    "stage-without-a-key": api.stage,
}
_NO_ROW = "-"


@dataclass(frozen=True)
class Table:
    """A table of an example: its first column is the epoch.

    Attributes:
        caption: The line in front of it.
        columns: Without the epoch's.
        rows: By epoch.
    """

    caption: str
    columns: tuple[str, ...]
    rows: dict[int, list[dict[str, Any]]]

    @property
    def of(self) -> str:
        """The source, the stage or the table that its rows are of."""
        return re.findall(r"`([^`]+)`", self.caption)[0]


def section(page: Path, title: str) -> str:
    return page.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def tables(text: str) -> Iterator[Table]:
    for caption, table in re.findall(r"^([^\n|]+)\n\n((?:\|[^\n]*\n)+)", text, re.MULTILINE):
        header, _, *lines = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in table.splitlines()]
        if header[0] != "epoch":
            continue
        rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for number, *cells in lines:
            some = {name: _value(cell) for name, cell in zip(header[1:], cells, strict=True) if cell != _NO_ROW}
            rows[int(number)] += [some] if some else []
        yield Table(caption, tuple(header[1:]), rows)


def _value(cell: str) -> Any:
    """A value as a table shows it. 12:05 is a moment of the first day of 2026, in UTC."""
    if cell == "null":
        return None
    if re.fullmatch(r"\d\d:\d\d", cell):
        return datetime.combine(datetime(2026, 1, 1), time.fromisoformat(cell), UTC)
    if re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", cell):
        return datetime.fromisoformat(cell).replace(tzinfo=UTC)
    if re.fullmatch(r"-?\d+\.\d+", cell):
        return float(cell)
    return int(cell) if re.fullmatch(r"-?\d+", cell) else cell


def shown(frame: pl.DataFrame) -> list[list[tuple[str, Any]]]:
    """Rows, in an order that does not depend on where they came from."""
    return sorted((list(row.items()) for row in frame.to_dicts()), key=repr)


def played(page: Path) -> Iterator[tuple[int, Table, pl.DataFrame]]:
    """Run the example of a page; yields of each epoch every table of rows that come out, and what came out."""
    text = section(page, "Example")
    code = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    defined: dict[str, Any] = {}
    exec(compile(code, page.name, "exec"), defined)
    run = testing.run_pipeline(defined["pipeline"])
    given = list(tables(text))
    assert {table.caption.split(",")[0] for table in given} >= {"Rows in", "Rows out"}
    for epoch in range(1, 1 + max(number for table in given for number in table.rows)):
        arriving, looked_up = dict[str, Any](), dict[str, Any]()
        moments = set[datetime]()
        for table in given:
            if table.caption.startswith("Rows in"):
                rows = [dict(row) for row in table.rows.get(epoch, [])]
                moments |= {row.pop("now") for row in rows if "now" in row}
                arriving[table.of] = [row for row in rows if row]
            elif table.caption.startswith("The table") and epoch in table.rows:
                looked_up[table.of] = table.rows[epoch]
        run.epoch(arriving, tables=looked_up, now=moments.pop() if moments else None)
        for table in given:
            if table.caption.startswith(("Rows out", "Late rows")):
                stage = run.stages[table.of]
                yield epoch, table, stage.late if table.caption.startswith("Late") else stage.rows("main")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_of_an_operator_gives_the_rows_of_its_page(page):
    for epoch, table, came in played(page):
        expected = table.rows.get(epoch, [])
        assert not len(came) or tuple(came.columns) == table.columns, (epoch, table.caption)
        assert shown(came) == sorted((list(row.items()) for row in expected), key=repr), (epoch, table.caption)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_of_operators_have_one_form(page):
    text = page.read_text()
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == SECTIONS
    introduction = text.split("\n## ")[0].split("\n", 1)[1].strip()
    assert 1 <= len(introduction.splitlines()) <= 3
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).splitlines()
    assert [line for line in prose if len(line) > 120 and not line.startswith("|")] == []
    assert f"(operators/{page.name}" in INDEX.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_all_arguments_of_its_operator_and_no_others(page):
    table = section(page, "Arguments").split("| argument | meaning | default |")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    named = {name.lstrip("*") for cell in cells for name in re.findall(r"`([*\w]+)`", cell)}
    function = FUNCTIONS.get(page.stem) or VARIANTS[page.stem]
    taken = set(inspect.signature(function).parameters)
    assert named == taken if page.stem in FUNCTIONS else named <= taken


OTHERWISE = {
    "aggregate": {"total": api.agg.mean("v"), "where": "v > 1", "changes": True},
    "window": {"on": "other", "every": "2h", "size": "3h", "offset": "5m", "lateness": "1m", "where": "v > 1"},
    "calendar-windows": {"every": "3mo", "zone": "Europe/Berlin", "offset": "1mo"},
    "session-windows": {"gap": "1h", "gap_included": True},
    "deduplicate": {"on": None, "ttl": "2h", "order_by": "v", "where": "v > 1"},
    "join": {"how": "left", "within": ("0s", "2h"), "lateness": "1m", "suffix": "_2"},
    "as_of": {"how": "inner", "tolerance": "2h", "wait": False, "lateness": "1m", "suffix": "_2"},
    "top_n": {"by": api.desc("v"), "n": 3, "ties": True, "until": None, "rank": None, "where": "v > 1"},
}


def defined(page: str, **otherwise: Any) -> Stage:
    """A stage with the operator of a page."""
    source, other = (api.files("{x}/*.parquet", event_time="at", name=name) for name in ("one", "two"))
    usual: dict[str, Any] = {
        "aggregate": {"key": "k", "total": api.agg.sum("v")},
        "window": {"key": "k", "on": "at", "every": "1h", "total": api.agg.sum("v")},
        "calendar-windows": {"key": "k", "on": "at", "every": "6mo", "total": api.agg.sum("v")},
        "session-windows": {"key": "k", "on": "at", "gap": "30m", "total": api.agg.sum("v")},
        "deduplicate": {"key": "k", "on": "at", "ttl": "1h"},
        "join": {"on": "k", "within": ("0s", "1h")},
        "as_of": {"on": "k", "tolerance": "1h"},
        "top_n": {"key": "k", "by": "v", "n": 2, "until": "end"},
    }[page]
    function = FUNCTIONS.get(page) or VARIANTS[page]
    inputs = (source, other) if page in ("join", "as_of") else (source,)
    return function("uid", *inputs, **{**usual, **otherwise})


@pytest.mark.parametrize("page", OTHERWISE)
def test_what_a_page_calls_refused_is_what_the_state_means(page):
    changes = section(INDEX.parent / "operators" / f"{page}.md", "What may change later")
    rows = [line.strip("|").split("|") for line in changes.splitlines() if line.startswith("| ")]
    refused = {name for cells in rows if cells[1].strip() == "refused" for name in re.findall(r"`(\w+)`", cells[0])}
    for argument, value in OTHERWISE[page].items():
        means_other = meaning(defined(page)) != meaning(defined(page, **{argument: value}))
        assert means_other == (argument in {*refused, "total"}), argument


def test_every_operator_has_a_page():
    assert {page.stem for page in PAGES} == {*FUNCTIONS, *VARIANTS}
