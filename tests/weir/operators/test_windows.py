"""Hopping windows and sessions: which rows are in which, what is late, what a barrier reads."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from state_ops.backends.memory import MemoryBackend
from state_ops.errors import InputError, PipelineError
from state_ops.keyed.keyed_state import GROUP
from state_ops.rows import key_aggregation, time_index
from state_ops.rows.resident_table import Residence
from state_ops.rows.row_store import RowStore
from tests.tools.sampling import sampled
from weir import Stage, agg, delta, files, testing, window
from weir.definition import Progress
from weir.operators.functions.function import trial_of
from weir.operators.shapes import shapes
from weir.operators.windows import sessions
from weir.operators.windows import sized as windows

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
EVENTS = files("x/*.parquet", event_time="at")
ROWS = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", tz="UTC")), ("v", pa.int64())])


def at(minutes: float, key: str = "a", **other: object) -> dict:
    return {"k": key, "at": NOON + timedelta(minutes=minutes), **other}


def bounds(frame: pl.DataFrame) -> list[tuple]:
    """(key, start and end in minutes after noon, n) of each window."""
    moments_ = [
        frame["k"],
        *([(m - NOON) / timedelta(minutes=1) for m in frame[c]] for c in ("window_start", "window_end")),
    ]
    return sorted(zip(*moments_, frame["n"], strict=True))


def nothing_is_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residence, "load", lambda *_: None)
    monkeypatch.setattr(RowStore, "_worth_a_scan", lambda *_: False)


def counted(**arguments) -> Stage:
    return window("counted", EVENTS, key="k", on="at", **{"n": agg.count(), **arguments})


# -- hopping


def test_rows_are_handed_out_to_so_many_windows_in_parts(monkeypatch):
    spread, sizes = windows._spread, []

    def watched(partials: pl.DataFrame, every: int) -> pl.DataFrame:
        groups = spread(partials, every)
        sizes.append(len(groups))
        return groups

    monkeypatch.setattr(windows, "_PARTIAL_ROWS", 120)
    monkeypatch.setattr(windows, "_spread", watched)
    run = testing.run(counted(every="1m", size="1h"))
    out = run.epoch([at(minute, key) for minute in (0, 1) for key in "abcde"], drain=True)
    assert max(sizes) <= 120 and sum(sizes) == 600
    assert len(out) == 5 * 61 and out["n"].sum() == 600


@pytest.mark.parametrize("size", ["1h", "3h"])
def test_what_has_gathered_goes_to_state_in_parts(monkeypatch, size):
    monkeypatch.setattr(key_aggregation, "_PART_BYTES", 100)
    merge, sizes = key_aggregation.merged, []
    monkeypatch.setattr(key_aggregation, "merged", lambda *given: (sizes.append(len(given[2])), merge(*given))[1])
    run = testing.run(counted(every="1h", size=size))
    hours = int(size[0])
    run.epoch([at(minute, f"k{key}") for minute in (0, 1) for key in range(50)])
    out = run.epoch([], drain=True)
    assert max(sizes) <= 5 * hours and sum(sizes) == 50 * hours
    assert len(out) == 50 * hours and set(out["n"]) == {2}


LIMITS = {"through state": 1, "mixed": 20, "in memory": 500_000}
SIZES = {"tumbling": "10m", "hopping": "25m"}


@pytest.mark.parametrize(
    ("limit", "size", "resident"),
    sampled(
        [
            pytest.param(LIMITS[limit], SIZES[size], kept == "resident", id=f"{limit}-{size}-{kept}")
            for kept, size, limit in itertools.product(("stored", "resident"), SIZES, LIMITS)
        ],
        lambda case: case.id in ("mixed-tumbling-stored", "in memory-hopping-resident"),
    ),
)
def test_windows_count_each_row_once_whether_its_rows_close_in_state_or_before_it(monkeypatch, size, limit, resident):
    """Compared with a group_by over all rows. Barriers close some of a key's windows and leave others open."""
    if not resident:
        nothing_is_resident(monkeypatch)
    monkeypatch.setattr(windows, "_PARTIAL_ROWS", limit)
    monkeypatch.setattr(windows, "_FIRE_ROWS", 7)
    monkeypatch.setattr(windows, "_ROWS_PER_LOOK", 0)
    monkeypatch.setattr(key_aggregation, "_WAITING_BYTES", 0 if limit == 20 else 1 << 20)
    rng = np.random.default_rng(limit)
    sums = {"total": agg.sum("v"), "least": agg.min("v"), "newest": agg.last("v"), "mean": agg.mean("v")}
    sums |= {
        "values": agg.count_distinct("w"),
        "about": agg.approx_distinct("w"),
        "top": agg.approx_quantile("v", 1.0),
    }
    run = testing.run(counted(every="10m", size=size, lateness="7m", **sums), parallelism=2, batch_rows=30)
    count = 60 if limit == 1 else 120  # each row goes to state by itself, or many at once
    rows: list[dict] = []
    out: list[pl.DataFrame] = []
    for epoch in range(8):
        minutes = epoch * 7 + rng.integers(0, 14, count)
        fresh = [
            at(int(m), f"k{key}", v=int(v), w=int(v) % 7, seq=len(rows) + i)
            for i, (m, key, v) in enumerate(
                zip(minutes, rng.integers(0, 30, count), rng.integers(0, 99, count), strict=True)
            )
        ]
        fresh = [{**row, "at": row["at"] + timedelta(microseconds=row["seq"])} for row in fresh]
        rows += fresh
        out.append(run.epoch(fresh))
    early = sum(map(len, out))
    out.append(run.epoch([], drain=True))
    assert early and len(out[-1])
    result = pl.concat(out).sort("k", "window_start")
    assert result.equals(replayed(rows, "10m", size).select(result.columns))


def replayed(rows: list[dict], every: str, size: str) -> pl.DataFrame:
    """The windows of all rows, by Polars' own."""
    length = int(size[:-1])
    frame = pl.DataFrame(rows).with_columns(pl.col("at").dt.truncate(every).alias("newest_start"))
    steps = pl.DataFrame({"back": [timedelta(minutes=back) for back in range(0, length, int(every[:-1]))]})
    spread = frame.join(steps, how="cross").with_columns(
        (pl.col("newest_start") - pl.col("back")).alias("window_start")
    )
    spread = spread.with_columns((pl.col("window_start") + timedelta(minutes=length)).alias("window_end"))
    by = ["k", "window_start", "window_end"]
    aggregates = [
        pl.len().cast(pl.Int64).alias("n"),
        pl.col("v").sum().alias("total"),
        pl.col("v").min().alias("least"),
        pl.col("w").n_unique().cast(pl.Int64).alias("values"),
        pl.col("w").n_unique().cast(pl.Int64).alias("about"),
        pl.col("v").max().cast(pl.Float64).alias("top"),
    ]
    aggregates += [pl.col("v").sort_by("at").last().alias("newest"), pl.col("v").mean().alias("mean")]
    inside = spread.filter(pl.col("at") < pl.col("window_end"))
    return inside.group_by(by).agg(aggregates).sort("k", "window_start")


def test_a_value_that_comes_in_several_parts_of_a_closing_window_counts_once(monkeypatch):
    monkeypatch.setattr(key_aggregation, "_PART_BYTES", 1)
    run = testing.run(counted(every="10m", size="20m", values=agg.count_distinct("v")))
    run.epoch([at(2, v=7)])
    closed = run.epoch([at(1, v=8), at(5, v=7), at(15, v=8), at(17, v=9)], drain=True)
    assert closed["values"].to_list() == [2, 3, 2]


def test_a_window_of_nulls_beside_those_that_close_has_no_distinct_values():
    run = testing.run(counted(every="10m", about=agg.approx_distinct("v")), schema=ROWS)
    run.epoch([at(1, v=None)])
    closed = run.epoch([at(11, v=None), *(at(5, key, v=4) for key in "abcdefghijklmnop")])
    assert closed["about"].to_list() == [1] * 16
    assert run.epoch(drain=True)["about"].to_list() == [0]


def test_windows_that_state_does_not_have_are_not_looked_up_key_by_key(monkeypatch):
    nothing_is_resident(monkeypatch)
    monkeypatch.setattr(windows, "_ROWS_PER_LOOK", 0)
    asked: list[int] = []
    get = RowStore.get
    monkeypatch.setattr(RowStore, "get", lambda self, keys: (asked.append(len(keys)), get(self, keys))[1])
    run = testing.run(counted(every="10m"))
    run.epoch([at(1, f"k{key}") for key in range(50)])
    assert asked == []
    run.epoch([at(5, f"k{key}") for key in range(20)])
    assert asked == [20]
    out = run.epoch([at(20, "k0"), at(9, "k1")])
    assert asked == [20] and dict(out[["k", "n"]].rows())["k1"] == 3


def test_a_negative_offset_is_one_that_begins_earlier():
    assert counted(every="1h", offset="-15m").operator == counted(every="1h", offset="45m").operator
    assert counted(every="1h", offset=-timedelta(minutes=15)).operator.offset == 45 * 60_000_000


def test_of_overlapping_windows_a_row_counts_in_those_that_are_open():
    run = testing.run(counted(every="1h", size="2h", late=delta.append("late")))
    assert bounds(run.epoch([at(30), at(61)])) == [("a", -60, 60, 1)]
    assert run.epoch([at(45)]).is_empty()  # [-60, 60) has closed, [0, 120) has not
    assert run.late.is_empty()
    assert bounds(run.epoch([at(120)])) == [("a", 0, 120, 3)]
    assert run.epoch([at(50)]).is_empty()
    assert [row["at"] for row in run.late.to_dicts()] == [NOON + timedelta(minutes=50)]


def test_first_and_last_of_a_window_are_by_its_event_time():
    run = testing.run(counted(every="1h", opened=agg.first("v"), closed=agg.last("v")), batch_rows=1)
    run.epoch([at(30, v=3), at(10, v=1)])
    run.epoch([at(50, v=5), at(20, v=2), at(5, v=None)])
    assert run.epoch([], drain=True)[["opened", "closed"]].rows() == [(1, 5)]
    by = counted(every="1h", order_by=["seq"], closed=agg.last("v"))
    assert testing.run(by).epoch([at(1, v=1, seq=9), at(2, v=2, seq=3)], drain=True)["closed"].to_list() == [1]


def test_a_window_may_drop_rows_without_key():
    run = testing.run(counted(every="1h", null_keys="drop"))
    assert run.epoch([at(0), {**at(0), "k": None}], drain=True)["n"].to_list() == [1]
    assert run.acks[0].rows_null_key == 1


# -- sessions


@pytest.mark.parametrize(("rows", "size"), [(1_000, 100_000), (30, 1 << 30)], ids=["by size", "by number"])
def test_sessions_that_wait_for_the_barrier_are_bounded(monkeypatch, rows, size):
    folds, merged = [], sessions.SessionOperator._fold

    def watched(operator, stored: pl.DataFrame, fresh: pl.DataFrame, upto: int | None) -> pl.DataFrame:
        folds.append((len(fresh), fresh.estimated_size()))
        return merged(operator, stored, fresh, upto)

    monkeypatch.setattr(key_aggregation, "_WAITING_BYTES", 1)
    monkeypatch.setattr(sessions, "_PARTIAL_ROWS", rows)
    monkeypatch.setattr(key_aggregation, "PARTIAL_BYTES", size)
    monkeypatch.setattr(sessions.SessionOperator, "_fold", watched)
    run = testing.run(counted(gap="30m", text=agg.max("text")), batch_rows=10)
    given = [at(minute, f"{key}", text=f"{key:04d}" * 500) for minute in (0, 10) for key in range(100)]
    out = run.epoch(given, drain=True)
    assert len(folds) > 3 and all(number <= rows + 10 and held <= size + 30_000 for number, held in folds)
    assert (
        len(out) == 100
        and set(out["n"]) == {2}
        and out.sort("k")["text"][7] == f"{int(out.sort('k')['k'][7]):04d}" * 500
    )


def test_a_row_that_belongs_to_an_open_session_is_not_late():
    run = testing.run(counted(gap="30m", late=delta.append("late")), batch_rows=1)
    run.epoch([at(10), at(25), at(39)])  # the watermark is 39
    assert run.epoch([at(5)]).is_empty()  # alone it had ended at 35
    assert run.late.is_empty()
    assert bounds(run.open_windows) == [("a", 5, 69, 4)]


def test_a_sum_that_does_not_fit_into_a_session_declines_the_epoch():
    run = testing.run(counted(gap="30m", total=agg.sum("v")))
    run.epoch([at(0, v=2**62)])
    with pytest.raises(InputError, match="'total' has become larger than int64"):
        run.epoch([at(1, v=2**62)])
    assert run.open_windows["total"].to_list() == [2**62]


class Counting(MemoryBackend):
    """How many entries are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def multi_get(self, keys):
        self.read += len(keys)
        return super().multi_get(keys)

    def scan(self, start, end):
        for entry in super().scan(start, end):
            self.read += 1
            yield entry


def _barrier(
    windowed: Stage, backend: MemoryBackend, rows: list[dict], before: int | None, now: int | None
) -> pl.DataFrame:
    table = pa.Table.from_pylist(rows, pa.schema([("k", pa.string()), ("at", pa.timestamp("us", tz="UTC"))]))
    fixed = shapes(windowed, table.schema)
    micros = [None if minute is None else int((NOON.timestamp() + 60 * minute) * 10**6) for minute in (before, now)]
    progress = Progress(*micros, False)
    subtask = replace(trial_of(windowed, fixed), progress=progress, groups=range(8), state=backend)
    operator = windowed.operator.build(subtask)
    if rows:
        groups = pa.array([len(row["k"]) % 8 for row in rows], pa.int32())
        assert list(operator.process(table.append_column(GROUP, groups))) == []
    return pl.concat([pl.from_arrow(out) for _, out in operator.barrier()] or [pl.DataFrame()])


def test_a_barrier_reads_what_closes_and_not_what_is_open():
    sessions, backend = counted(gap="30m"), Counting()
    rows = [at(minute, f"{minute}-{i}") for minute in (0, 100, 200) for i in range(50)]
    assert _barrier(sessions, backend, rows, None, 10).is_empty()
    backend.read = 0
    assert _barrier(sessions, backend, [], 10, 20).is_empty()
    assert backend.read == 0
    assert len(_barrier(sessions, backend, [], 20, 130)) == 100
    assert backend.read == 2 * 100  # the index's entry and the row of each
    assert len(_barrier(sessions, backend, [], 130, 1000)) == 50
    assert list(backend.scan(b"", b"\xff" * 8)) == []  # nothing is left, in the index either


def test_the_index_has_one_entry_for_each_key_with_open_sessions():
    sessions, backend = counted(gap="30m"), MemoryBackend()
    _barrier(sessions, backend, [at(0), at(50), at(100, "b")], None, None)
    _barrier(sessions, backend, [at(25), at(70, "b")], None, None)
    entries = [entry for group in range(8) for entry in time_index.first(backend, group, None, 99)]
    assert len(entries) == 2
    assert len(_barrier(sessions, backend, [], None, 81)) == 1


# -- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "does not say which windows"),
        ({"every": "1x"}, "every='1x' is no duration"),
        ({"every": "0s"}, "no time at all"),
        ({"every": "1h", "size": "30m"}, "smaller than the time between them"),
        ({"every": "1s", "size": "1d"}, "would be in 86400 windows"),
        ({"every": "1h", "offset": "1h"}, "offset of counted"),
        ({"every": "1h", "lateness": 5}, "lateness=5 is no duration"),
        ({"gap": "30m", "every": "1h"}, "has a gap, which makes sessions"),
        ({"gap": "30m", "offset": "5m"}, "has a gap, which makes sessions"),
        ({"gap": "0m"}, "no time at all"),
        ({"every": "1h", "window_end": agg.count()}, "'window_end', which is taken"),
        ({"every": timedelta(hours=-1)}, "is negative"),
        ({"every": "1h", "lateness": timedelta(hours=-1)}, "is negative"),
        ({"every": "1h", "late": agg.count()}, "is no sink that counted could write to"),
    ],
)
def test_windows_that_make_no_sense_are_refused_when_they_are_defined(arguments, message):
    with pytest.raises(PipelineError, match=message) as raised:
        counted(**arguments)
    assert "counted" in f"{raised.value.where} {raised.value}"


@pytest.mark.parametrize("kind", [{"every": "1h"}, {"gap": "1h"}])
def test_fields_of_the_state_cannot_be_named_alike(kind):
    rows = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", tz="UTC")), ("v", pa.float64())])
    keyed = window("w", EVENTS, key="v__sum", on="at", v=agg.mean("v"), **kind)
    with pytest.raises(PipelineError, match="'v__sum' is a key column of w"):
        shapes(keyed, rows.append(pa.field("v__sum", pa.string())))
    with pytest.raises(PipelineError, match="Two aggregates would keep a field 'v__sum'"):
        shapes(window("w", EVENTS, key="k", on="at", v=agg.mean("v"), v__sum=agg.sum("v"), **kind), rows)


def test_a_session_needs_a_timestamp_and_event_time():
    rows = pa.schema([("k", pa.string()), ("at", pa.string())])
    with pytest.raises(PipelineError, match="'at' is string, not a timestamp"):
        shapes(counted(gap="30m"), rows)
    with pytest.raises(PipelineError, match="has no event time"):
        window("w", files("x/*.parquet"), key="k", on="at", gap="30m", n=agg.count())
    run = testing.run(counted(gap="30m"))
    run.epoch([at(0)])
    with pytest.raises(InputError, match="1 row has no event time"):
        run.epoch([{"k": "a", "at": None}])
