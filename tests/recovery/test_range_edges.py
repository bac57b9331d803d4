"""A range that is replaced while rows lie at its edges and come late: in it is what an independent replay of the
corrected files says, by operator, and outside of it what there was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from weir import (
    Pipeline,
    agg,
    as_of,
    deduplicate,
    delta,
    desc,
    files,
    join,
    select,
    top_n,
    union,
    window,
)
from weir.execution.in_process import InMemoryExecutor
from weir.operations.backfill import backfill
from weir.run.run import RunOptions, run

FIRST, HOUR, US = datetime(2026, 1, 1, tzinfo=UTC), timedelta(hours=1), timedelta(microseconds=1)
DAYS, LATENESS = 6, 5 * HOUR
TIME = pa.timestamp("us", "UTC")
COLUMNS = pa.schema([("seq", pa.int64()), ("k", pa.int64()), ("at", TIME), ("v", pa.int64()), ("until", TIME)])
A, B = (files(f"{{landing}}/{name}/*.parquet", name=name, event_time="at") for name in "ab")
PAST = datetime(1, 1, 1, tzinfo=UTC)
Row = dict[str, Any]


def day(number: int) -> datetime:
    return FIRST + timedelta(days=number - 1)


def end_of(at: datetime) -> datetime:
    """Of its day."""
    return at - (at - FIRST) % (24 * HOUR) + 24 * HOUR


def given(name: str) -> dict[str, Any]:
    return {"sink": delta.append(name, event_time="at"), "late": delta.append(f"{name}_late", event_time="at")}


def pipeline() -> Pipeline:
    late = given("windows") | {"sink": delta.append("windows")}
    within = {"on": "k", "within": ("-2h", "5h"), "lateness": LATENESS}
    return Pipeline(
        "edges",
        (
            select("rows", A, "*", where="v < 7", sink=delta.append("rows")),
            union("both", A, B, sink=delta.append("both")),
            window("windows", A, key="k", on="at", every="6h", size="18h", lateness=LATENESS, n=agg.sum("v"), **late),
            deduplicate("unique", A, key=["k", "v"], on="at", order_by=["at", "seq"], ttl="1d", **given("unique")),
            join("left", A, B, how="left", **within, sink=delta.append("left"), late=delta.append("left_late")),
            join("anti", A, B, how="anti", **within, sink=delta.append("anti")),
            as_of("versions", A, B, on="k", lateness=LATENESS, sink=delta.append("versions")),
            top_n("best", A, key="k", by=[desc("v"), "seq"], n=2, until="until", lateness=LATENESS, **given("best")),
        ),
        max_parallelism=6,
    )


def rows_of(number: int, chance: random.Random) -> list[Row]:
    """A file's: of its day, of the two before, and at the very edges of days, on time and late."""
    newest = day(number + 1) - chance.choice([4 * HOUR, US, 0 * US])
    times = [day(number) + chance.uniform(0, 19) * HOUR for _ in range(14)]
    times += [day(number) - chance.uniform(0, 40) * HOUR for _ in range(10)]
    times += [
        day(edge) + shift for edge in range(2, number + 1) for shift in (-US, 0 * US, US) if chance.random() < 0.6
    ]
    times.append(newest)
    return [
        {
            "seq": 1000 * number + place,
            "k": chance.randrange(3),
            "at": at,
            "v": chance.randrange(9),
            "until": end_of(at),
        }
        for place, at in enumerate(times)
    ]


class Replay:
    """Plain loops over the files, of which each is an epoch."""

    def __init__(self, a: Sequence[list[Row]], b: Sequence[list[Row]]) -> None:
        self.a, self.b = a, b
        self.by_a = [PAST, *self._newest(a)]  # watermarks: before the first epoch, and after each
        self.by_both = [PAST, *map(min, self._newest(a), self._newest(b))]

    @staticmethod
    def _newest(files: Sequence[list[Row]]) -> list[datetime]:
        ends = [max(row["at"] for row in rows) for rows in files]
        return [max(ends[: number + 1]) - LATENESS for number in range(len(ends))]

    def rows(self) -> Iterator[tuple]:
        return ((row["seq"], row["at"]) for rows in self.a for row in rows if row["v"] < 7)

    def both(self) -> Iterator[tuple]:
        return ((row["seq"], row["at"]) for rows in (*self.a, *self.b) for row in rows)

    def _windows(self, late: bool) -> Iterator[tuple]:
        sums: dict[tuple, int] = {}
        for before, rows in zip(self.by_a, self.a, strict=False):
            for row in rows:
                newest = row["at"] - (row["at"] - FIRST) % (6 * HOUR)
                starts = [start for start in (newest - n * 6 * HOUR for n in range(3)) if start + 18 * HOUR > before]
                if late and not starts:
                    yield row["seq"], row["at"]
                for start in starts:
                    sums[row["k"], start] = sums.get((row["k"], start), 0) + row["v"]
        if not late:
            closed = self.by_a[-1]
            yield from ((k, start, n) for (k, start), n in sums.items() if start + 18 * HOUR <= closed)

    def windows(self) -> Iterator[tuple]:
        return self._windows(late=False)

    def windows_late(self) -> Iterator[tuple]:
        return self._windows(late=True)

    def _unique(self, late: bool) -> Iterator[tuple]:
        ends: dict[tuple, datetime] = {}
        for before, rows in zip(self.by_unique(), self.a, strict=False):
            for row in sorted(rows, key=lambda row: (row["at"], row["seq"])):
                key, end = (row["k"], row["v"]), row["at"] + 24 * HOUR
                if end <= before:
                    if late:
                        yield row["seq"], row["at"]
                elif ends.get(key, PAST) <= before:
                    ends[key] = end
                    if not late:
                        yield row["seq"], row["at"]

    def by_unique(self) -> list[datetime]:
        return [PAST, *(moment + LATENESS for moment in self.by_a[1:])]

    def unique(self) -> Iterator[tuple]:
        return self._unique(late=False)

    def unique_late(self) -> Iterator[tuple]:
        return self._unique(late=True)

    def _kept(self, files: Sequence[list[Row]]) -> list[Row]:
        return [row for before, rows in zip(self.by_both, files, strict=False) for row in rows if row["at"] >= before]

    def _partners(self) -> Iterator[tuple[Row, list[Row]]]:
        kept = self._kept(self.b)
        for row in self._kept(self.a):
            first, last = row["at"] - 2 * HOUR, row["at"] + 5 * HOUR
            yield row, [other for other in kept if other["k"] == row["k"] and first <= other["at"] <= last]

    def left(self) -> Iterator[tuple]:
        for row, partners in self._partners():
            yield from ((row["seq"], row["at"], other["seq"]) for other in partners)
            if not partners and row["at"] + 5 * HOUR < self.by_both[-1]:
                yield row["seq"], row["at"], None

    def anti(self) -> Iterator[tuple]:
        for row, partners in self._partners():
            if not partners and row["at"] + 5 * HOUR < self.by_both[-1]:
                yield row["seq"], row["at"]

    def left_late(self) -> Iterator[tuple]:
        for before, left, right in zip(self.by_both, self.a, self.b, strict=False):
            yield from ((row["seq"], row["at"], None) for row in left if row["at"] < before)
            yield from ((None, row["at"], row["seq"]) for row in right if row["at"] < before)

    def versions(self) -> Iterator[tuple]:
        for row in self._kept(self.a):
            out = next((n for n, after in enumerate(self.by_both) if after > row["at"]), None)
            if out is not None:
                known = [other for rows in self.b[:out] for other in rows if other["k"] == row["k"]]
                yield row["seq"], row["at"], max((o["at"] for o in known if o["at"] <= row["at"]), default=None)

    def _best(self, late: bool) -> Iterator[tuple]:
        ranks: dict[tuple, list[tuple]] = {}
        for before, rows in zip(self.by_a, self.a, strict=False):
            for row in rows:
                if row["until"] > before:
                    ranks.setdefault((row["k"], row["until"]), []).append((-row["v"], row["seq"], row["at"]))
                elif late:
                    yield row["seq"], row["at"]
        for (_, until), rows in ranks.items() if not late else ():
            if until <= self.by_a[-1]:
                yield from (row[1:] for row in sorted(rows)[:2])

    def best(self) -> Iterator[tuple]:
        return self._best(late=False)

    def best_late(self) -> Iterator[tuple]:
        return self._best(late=True)


TABLES = {
    **dict.fromkeys(("rows", "both", "unique", "anti", "best"), ("seq", "at")),
    **dict.fromkeys(("windows_late", "unique_late", "best_late"), ("seq", "at")),
    "windows": ("k", "window_start", "n"),
    "left": ("seq", "at", "seq_right"),
    "left_late": ("seq", "event_time", "seq_right"),
    "versions": ("seq", "at", "at_right"),
}


class Edges:
    def __init__(self, root: Path, seed: int) -> None:
        options = {
            "WEIR_EPOCH__MAX_FILES": "1", "WEIR_CHECKPOINTS__NUM_RETAINED": "20", "WEIR_SPARK__PARALLELISM": "2",
        }  # fmt: skip
        self.site, self.chance = Site(root, options, pipeline(), __name__), random.Random(seed)
        self.files = {name: [rows_of(number, self.chance) for number in range(1, DAYS + 1)] for name in "ab"}
        for name in self.files:
            (self.site.landing / name).mkdir(parents=True)
            for number in range(1, DAYS + 1):
                self.land(name, number)
        list(run(self.site.pipeline, self.site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))

    def land(self, name: str, number: int) -> None:
        table = pa.Table.from_pylist(self.files[name][number - 1], COLUMNS)
        pq.write_table(table, self.site.landing / name / f".{number}")
        (self.site.landing / name / f".{number}").rename(self.site.landing / name / f"{number}.parquet")

    def correct(self, first: int) -> None:
        """Values, keys and rows are others from a file on, but for the newest of each."""
        for name, of in self.files.items():
            for number in range(first, DAYS + 1):
                *rows, newest = of[number - 1]
                kept = [row for row in rows if self.chance.random() < 0.9]
                of[number - 1] = [{**row, "v": self.chance.randrange(9)} for row in kept] + [newest]
                self.land(name, number)

    def shown(self, name: str, is_in: Callable[[datetime], bool]) -> list[tuple]:
        table, columns = self.site.storage / "tables" / name, TABLES[name]
        rows = pl.read_delta(str(table)).select(columns).rows() if table.exists() else []
        return sorted((row for row in rows if is_in(row[1])), key=repr)


@pytest.mark.parametrize(
    ("seed", "first", "last", "hours"), sampled([(1, 3, 3, 0), (2, 3, 4, 0), (3, 4, 5, 7), (4, 3, 4, 6), (5, 5, 6, 0)])
)
def test_a_range_has_the_rows_of_its_time_however_late_they_came_and_no_others(tmp_path, seed, first, last, hours):
    edges = Edges(tmp_path, seed)
    start, end = day(first) + hours * HOUR, day(last + 1) + hours * HOUR

    def is_in(at: datetime) -> bool:
        return start <= at < end

    before = {name: edges.shown(name, lambda at: not is_in(at)) for name in TABLES}
    newest = [max(row["at"] for rows in edges.files.values() for row in rows[n]) for n in range(DAYS)]
    base = max(n for n in range(DAYS) if max(newest[: n + 1]) < start) + 1
    edges.correct(base + 1)
    site = edges.site
    done = backfill(
        site.pipeline, site.settings, start, end, replaces="range", promote=True, executor=InMemoryExecutor()
    )
    assert done.base == base and done.promoted is not None
    replay = Replay(edges.files["a"], edges.files["b"])
    assert {name: edges.shown(name, lambda at: not is_in(at)) for name in TABLES} == before
    for name in TABLES:
        wanted = sorted((row for row in getattr(replay, name)() if is_in(row[1])), key=repr)
        assert edges.shown(name, is_in) == wanted, name
    assert any(edges.shown(name, is_in) for name in TABLES if name.endswith("_late"))
