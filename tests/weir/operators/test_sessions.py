"""Sessions against a model in plain Python, epoch after epoch: what comes out, what is late, what is stored, wherever
open sessions are kept and however epochs are cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from state_ops.backends.base import Backend
from state_ops.backends.composite import clip
from state_ops.backends.memory import MemoryBackend
from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.keyed.keyed_state import GROUP
from state_ops.outputs import REST
from state_ops.rows import key_aggregation, time_index
from state_ops.rows.resident_table import Residence
from state_ops.schema.key_codec import group_prefix
from state_ops.schema.key_groups import key_groups, xxhash64
from tests.tools.sampling import sampled
from weir import agg, delta, files, testing, window
from weir.definition import LATE, MAIN, Progress
from weir.operators.functions.function import trial_of
from weir.operators.shapes import shapes
from weir.operators.windows import session_store, sessions

GAP, GROUPS = 10, range(8)  # microseconds; the key groups of the subtask
_FIRST = datetime(2024, 5, 1, tzinfo=UTC)
_SCHEMA = pa.schema(
    [("k", pa.string()), ("i", pa.int32()), ("at", pa.timestamp("us", tz="UTC")), ("v", pa.int64()), ("s", pa.string())]
)
_EVENTS = files("x/*.parquet", event_time="at")


@dataclass(frozen=True)
class Event:
    key: tuple
    at: int
    v: int
    s: str


Interval = list[Event]


@dataclass
class Model:
    """Open sessions as lists of their events, by key."""

    open: dict[tuple, list[Interval]] = field(default_factory=lambda: defaultdict(list))

    def epoch(self, events: list[Event], before: int | None, now: int | None) -> tuple[list[tuple], list[Event]]:
        """What closes, and which events are late."""
        closed, late = [], []
        fresh = defaultdict(list)
        for event in events:
            fresh[event.key].append(event)
        for key in {*fresh, *self.open}:
            stored = [event for interval in self.open[key] for event in interval]
            together: list[Interval] = []
            for event in sorted([*fresh[key], *stored], key=lambda event: event.at):
                if together and event.at - together[-1][-1].at < GAP:
                    together[-1].append(event)
                else:
                    together.append([event])
            self.open[key] = []
            for interval in together:
                end = interval[-1].at + GAP
                if (
                    before is not None
                    and end <= before
                    and not any(event is other for event in interval for other in stored)
                ):
                    late += interval
                elif now is not None and end <= now:
                    closed.append((key, *summed(interval)))
                else:
                    self.open[key].append(interval)
        self.open = defaultdict(list, {key: intervals for key, intervals in self.open.items() if intervals})
        return closed, late


def summed(interval: Interval) -> tuple:
    last = max(interval, key=lambda event: (event.at, event.v)).v
    texts, values = [event.s for event in interval], [event.v for event in interval]
    bounds = (interval[0].at, interval[-1].at + GAP)
    of_values = (len(set(values)), len({event.s for event in interval if event.v > 2}), len(set(texts)), min(values))
    return (*bounds, len(interval), sum(values), max(texts), last, sum(values) / len(values), *of_values)


class Subtask:
    """One subtask's operator, epoch after epoch, on one backend; a resident table is where the last change left it."""

    def __init__(self, key: list[str], backend: Backend, directory: Path) -> None:
        self.key, self.backend, self.directory = key, backend, directory
        self.stage = window(
            "visits", _EVENTS, key=key, on="at", gap=timedelta(microseconds=GAP), late=delta.append("late"),
            n=agg.count(), total=agg.sum("v"), top=agg.max("s"), newest=agg.last("v"), mean=agg.mean("v"),
            values=agg.count_distinct("v"), texts=agg.count_distinct("s", where="v > 2"),
            about=agg.approx_distinct("s"), least=agg.approx_quantile("v", 0.0),
            order_by=["at"],
        )  # fmt: skip
        self.shapes = shapes(self.stage, _SCHEMA)
        self.source: Path | None = None
        self.attempt = 0
        self.tables = 0

    def run(
        self,
        events: list[Event],
        progress: Progress,
        most_bytes: int | None,
        batch: int = 40,
        last: bool = True,
        groups: range = GROUPS,
    ) -> dict[str, list[pa.Table]]:
        """An attempt to the barrier, or to a pause."""
        self.attempt += 1
        target = self.directory / str(self.attempt)
        target.mkdir()
        self.backend.written = False
        residence = (
            None if most_bytes is None else Residence(self.source, target, most_bytes, groups, self.attempt == 1)
        )
        subtask = trial_of(self.stage, self.shapes)
        operator = self.stage.operator.build(
            replace(subtask, progress=progress, groups=groups, state=self.backend, resident=residence)
        )
        out: dict[str, list[pa.Table]] = {MAIN: [], LATE: [], REST: []}
        for at in range(0, len(events), batch):
            for name, table in operator.process(self.table(events[at : at + batch])):
                out[name].append(table)
        for name, table in operator.barrier() if last else operator.pause():
            out[name].append(table)
        if self.backend.written:
            self.source = target
        self.tables += any(target.glob("resident-*.json"))
        return out

    def table(self, events: list[Event]) -> pa.Table:
        columns = {
            "k": [f"k{event.key[0]}" for event in events],
            "i": [event.key[-1] for event in events],
            "at": [_FIRST + timedelta(microseconds=event.at) for event in events],
            "v": [event.v for event in events],
            "s": [event.s for event in events],
        }
        rows = pa.table(columns, schema=_SCHEMA)
        groups = key_groups([rows.column(name) for name in self.key], len(GROUPS))
        return rows.add_column(0, GROUP, pa.array(groups.astype(np.int32)))

    def keys(self, table: pa.Table | pl.DataFrame) -> list[tuple]:
        rows = pl.DataFrame(table).select(self.key)
        return [tuple(int(str(value).removeprefix("k")) for value in row) for row in rows.rows()]

    def stored(self) -> list[tuple]:
        parts = list(sessions.open_sessions(self.shapes.keys, self.shapes.state, self.backend, GROUPS))
        return [row for part in parts for row in zip(self.keys(part), _micros(part), part["n"], strict=True)]

    def indexed(self) -> list[tuple]:
        entries = [entry for group in GROUPS for entry in time_index.first(self.backend, group, None, 10_000)]
        _, owners = time_index.owners(entries, self.shapes.keys)
        ends = [int.from_bytes(entry[3:11], "big") - (1 << 63) for entry in entries]
        return list(zip(self.keys(owners), (end - _micro(_FIRST) for end in ends), strict=True))


def _micro(moment: datetime) -> int:
    return round(moment.timestamp() * 1_000_000)


def _micros(sessions_: pl.DataFrame) -> Iterator[tuple[int, int]]:
    for start, end in sessions_[["window_start", "window_end"]].rows():
        yield start - _micro(_FIRST), end - _micro(_FIRST)


def _rows(subtask: Subtask, tables: list[pa.Table]) -> list[tuple]:
    rows = []
    for table in tables:
        frame = pl.DataFrame(table)
        frame = frame.with_columns(pl.col("window_start", "window_end").dt.epoch("us") - _micro(_FIRST))
        results = ["n", "total", "top", "newest", "mean", "values", "texts", "about", "least"]
        fields = frame.select("window_start", "window_end", *results).rows()
        rows += [(key, *row) for key, row in zip(subtask.keys(frame), fields, strict=True)]
    return rows


def _late(subtask: Subtask, tables: list[pa.Table]) -> list[tuple]:
    return [
        (key, *row)
        for table in tables
        for key, row in zip(subtask.keys(table), pl.DataFrame(table)[["v", "s"]].rows(), strict=True)
    ]


def _events(rng: np.random.Generator, key: list[str], epoch: int, number: int, keys: int) -> list[Event]:
    at = epoch * 12 + rng.integers(-25, 40, number)  # some are far behind the watermark
    owners = rng.integers(0, keys, number)
    values, texts = rng.integers(0, 100, number), rng.integers(0, 9, number)
    return [
        Event((int(k) % 5, int(k)) if len(key) == 2 else (int(k),), int(t), int(v), "x" * int(s))
        for k, t, v, s in zip(owners, at, values, texts, strict=True)
    ]


_CASES = [
    ("alike", "k i", "by turns", "rocksdb"),
    *product(("own", "alike"), ("i", "k", "k i"), ("resident", "backend", "by turns"), ("memory", "rocksdb")),
]


@pytest.mark.parametrize(("hashes", "key", "kept", "backend"), sampled(dict.fromkeys(_CASES)))
def test_sessions_are_what_a_model_says_wherever_they_are_kept(monkeypatch, tmp_path, hashes, key, kept, backend):
    if hashes == "alike":
        for module in (sessions, session_store):
            monkeypatch.setattr(module, "xxhash64", lambda columns: xxhash64(columns) % np.uint64(5))
    key = key.split()
    # With these draws each case by turns has rows while its state is in memory, before a turn puts them into the backend.
    rng = np.random.default_rng(_CASES.index((hashes, " ".join(key), kept, backend)) + 2)
    opened = MemoryBackend() if backend == "memory" else RocksDBBackend(tmp_path / "db", 16)
    subtask, model = Subtask(key, opened, tmp_path), Model()
    newest, before = 0, None
    residences = {"resident": [1 << 20], "backend": [None], "by turns": [1 << 20, 1 << 20, None, 2_000]}[kept]
    fired = lateness = 0
    for epoch in range(16):
        drain = epoch == 15
        events = _events(rng, key, epoch, int(rng.choice([0, 3, 60, 120])), 25)
        newest = max([newest, *(event.at for event in events)])
        now = max(before or -100, newest - 15)
        closed, late = model.epoch(events, before, 10**9 if drain else now)
        monkeypatch.setattr(sessions, "_PARTIAL_ROWS", int(rng.choice([5, 1_000])))
        monkeypatch.setattr(sessions, "_FIRE_KEYS", int(rng.choice([3, 1_000])))
        monkeypatch.setattr(key_aggregation, "_WAITING_BYTES", int(rng.choice([1, 1 << 20])))
        monkeypatch.setattr(key_aggregation, "_PART_BYTES", int(rng.choice([500, 1 << 20])))
        monkeypatch.setattr(session_store, "_WRITE_KEYS", int(rng.choice([4, 1_000])))
        progress = Progress(*(None if mark is None else _micro(_FIRST) + mark for mark in (before, now)), drain)
        pauses = int(rng.integers(0, 2))
        out: dict[str, list[pa.Table]] = {MAIN: [], LATE: []}
        rest: list[pa.Table] = []
        parts = np.array_split(np.arange(len(events)), pauses + 1)
        for number, part in enumerate(parts):
            some = [events[at] for at in part]
            waiting = [event for table in rest for event in _again(subtask, table)]
            given = subtask.run(
                waiting + some, progress, residences[int(rng.integers(len(residences)))], 40, number == pauses
            )
            rest = given[REST]
            for name, tables in out.items():
                tables += given[name]
        assert not rest
        assert sorted(_rows(subtask, out[MAIN])) == sorted(closed), epoch
        assert sorted(_late(subtask, out[LATE])) == sorted((event.key, event.v, event.s) for event in late), epoch
        intervals = [(owner, interval) for owner, all_ in model.open.items() for interval in all_]
        assert sorted(subtask.stored()) == sorted((owner, summed(one)[:2], len(one)) for owner, one in intervals)
        firsts = [(owner, all_[0][-1].at + GAP) for owner, all_ in model.open.items()]
        assert sorted(subtask.indexed()) == sorted(firsts), epoch
        before = now
        fired, lateness = fired + len(closed), lateness + len(late)
    assert fired > 100 and lateness > 10 and list(opened.scan(b"", b"\xff" * 9)) == []
    assert (subtask.tables > 0) == (kept != "backend")
    opened.close()


def _again(subtask: Subtask, table: pa.Table) -> list[Event]:
    rows = pl.DataFrame(table).with_columns(pl.col("at").dt.epoch("us") - _micro(_FIRST))
    return [
        Event(owner, at, v, s)
        for owner, (at, v, s) in zip(subtask.keys(table), rows[["at", "v", "s"]].rows(), strict=True)
    ]


def test_a_table_of_more_key_groups_than_a_subtask_has_closes_nothing_of_theirs(tmp_path):
    subtask = Subtask(["i"], MemoryBackend(), tmp_path)
    events = [Event((number,), number, 1, "x") for number in range(50)]
    subtask.run(events, Progress(None, None, False), 1 << 20)
    assert subtask.tables == 1
    half = range(4)
    clip(subtask.backend, group_prefix(half.start, 0), group_prefix(half.stop, 0))
    mine = [row[0] for row in subtask.stored()]
    out = subtask.run([], Progress(None, None, True), 1 << 20, groups=half)
    assert sorted(row[0] for row in _rows(subtask, out[MAIN])) == sorted(mine) and 0 < len(mine) < 50


class Scanned(MemoryBackend):
    """How many entries scans have read."""

    entries = 0

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        for entry in super().scan(start, end):
            self.entries += 1
            yield entry


@pytest.mark.parametrize(("most_bytes", "read"), [(10_000, 0), (1 << 20, 50)])
def test_all_sessions_are_read_for_a_table_only_where_they_may_fit(tmp_path, most_bytes, read):
    backend = Scanned()
    subtask = Subtask(["i"], backend, tmp_path)
    events = [Event((number,), number, 1, "x" * 1_000) for number in range(50)]
    subtask.run(events, Progress(None, None, False), None)
    subtask.run(events, Progress(None, None, False), most_bytes)
    assert backend.entries == read
    assert [row[2] for row in subtask.stored()] == [2] * 50


@pytest.mark.parametrize("included", [False, True])
def test_rows_exactly_a_gap_apart_are_one_session_if_that_is_asked_for(included):
    start = datetime(2026, 1, 1, tzinfo=UTC)
    source = files("s", event_time="at")
    asked = window(
        "s", source, key="k", on="at", gap="10s", gap_included=included, n=agg.count(), sink=delta.append("s")
    )
    rows = [{"k": 1, "at": start + timedelta(seconds=second)} for second in (0, 10, 20)]
    rows.append({"k": 1, "at": rows[-1]["at"] + timedelta(seconds=10, microseconds=1)})

    def of(slices: list[list[dict]]) -> list[tuple]:
        run = testing.run(asked)
        out = [run.epoch(some) for some in slices]
        assert run.open_windows["window_end"].to_list() == [rows[-1]["at"] + timedelta(seconds=10)]
        assert run.late.is_empty()
        return pl.concat([*out, run.epoch([], drain=True)]).select("window_start", "window_end", "n").rows()

    first, last, tick = rows[0]["at"], rows[3]["at"], timedelta(seconds=10)
    each = [(row["at"], row["at"] + tick, 1) for row in rows]
    wanted = [(first, rows[2]["at"] + tick, 3), (last, last + tick, 1)] if included else each
    assert of([rows]) == of([[row] for row in rows]) == wanted
