"""Timers against a model: a set of moments a key. Epochs, batches, parallelism and what is set when are chance."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl
import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from state_ops.keyed.keyed_state import scan_values
from state_ops.keyed.timers import scan_timers
from state_ops.schema.descriptors import EVENT_TIMERS_OF_KEY, PROCESSING_TIMERS_OF_KEY
from tests.tools.sampling import rounds
from tests.weir.driven import Driven
from weir import Epoch, KeyedState, State, files, stage
from weir.operators.functions import function

ROWS = pa.schema([("k", pa.int64()), ("do", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])


class Fired(State):
    """How often a key was called."""

    times: int = 0


def _again(moment: pl.Expr, key: pl.Expr, salt: int) -> pl.Expr:
    return (moment * 7 + key * 3) % salt


def fire(fired: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
    """Sets, clears and lets be, as the key and the moment say; `later` and `earlier` are its rules, in the model
    too."""
    assert fired["k"].is_unique().all()
    moment = pl.col("at").dt.epoch("us")
    rows = fired.with_columns(moment=moment, rule=_again(moment, pl.col("k"), 6))
    state.timers.clear(rows.filter(pl.col("rule") == 0))
    for rule, shift in ((1, 2), (2, -3), (3, 0), (4, 11)):
        some = rows.filter((pl.col("rule") == rule) & (pl.col("moment") < 60))
        state.timers.set(some.with_columns(next=(pl.col("moment") + shift).cast(pl.Datetime("us", "UTC"))), at="next")
    times = state.get(rows)["times"]
    state.put(rows.select("k", times=times + 1))
    return rows.select("k", at="moment", nth=times, domain="domain")


@stage("timed", source=files("x/*.parquet", event_time="at"), key="k", state=Fired, order_by=["at"], on_timer=fire)
def timed(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
    state.timers.set(rows.filter(pl.col("do") == "set"), at="at")
    state.timers.clear(rows.filter(pl.col("do") == "clear"), at="at")
    state.timers.clear(rows.filter(pl.col("do") == "forget"))
    state.timers.set(rows.filter(pl.col("do") == "after"), after="1ms")
    state.timers.set(rows.filter(pl.col("do") == "at once"), after="0s")
    nothing = rows.clear()
    return nothing.select("k", at=pl.col("at").dt.epoch("us"), nth=pl.col("k"), domain=pl.lit("row"))


class Model:
    """What should happen, one key and one timer at a time."""

    def __init__(self) -> None:
        self.event: dict[int, set[int]] = {}
        self.processing: dict[int, set[int]] = {}
        self.times: dict[int, int] = {}

    def rows(self, rows: list[tuple[int, str, int]], now: int) -> None:
        for do in (
            "set",
            "clear",
            "forget",
            "after",
            "at once",
        ):  # as the stage does it: all of one sort, then the next
            for key, what, at in rows:
                mine, other = self.event.setdefault(key, set()), self.processing.setdefault(key, set())
                if what != do:
                    continue
                if do == "set":
                    mine.add(at)
                elif do == "clear":
                    mine.discard(at)
                elif do == "forget":
                    mine.clear()
                    other.clear()
                else:
                    other.add(now + (1000 if do == "after" else 0))

    def barrier(self, now: int, watermark: int | None, drain: bool) -> Iterator[tuple[int, int, int, str]]:
        for key in self.event:
            yield from self._fire(key, "event", watermark, drain)
        for key in self.event:
            yield from self._fire(key, "processing", now, False)

    def _fire(self, key: int, domain: str, clock: int | None, drain: bool) -> Iterator[tuple[int, int, int, str]]:
        timers = self.event[key] if domain == "event" else self.processing[key]
        held: set[int] = set()
        before = set(timers)
        while True:
            due = [at for at in timers - held if (drain and at in before) or (clock is not None and at <= clock)]
            if not due:
                return
            at = min(due)
            timers.discard(at)
            before.discard(at)
            yield key, at, self.times.setdefault(key, 0), domain
            self.times[key] += 1
            rule = (at * 7 + key * 3) % 6
            if rule == 0:
                self.event[key].clear()
                self.processing[key].clear()
                held.clear()
                before.clear()
            elif at < 60 and rule in (1, 2, 3, 4):
                new = at + {1: 2, 2: -3, 3: 0, 4: 11}[rule]
                if domain == "event" and new not in timers and not (new > at and clock is not None and new <= clock):
                    held.add(new)
                self.event[key].add(new)


ACTIONS = st.sampled_from(["set", "set", "set", "set", "clear", "forget", "after", "at once"])
EPOCHS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 5), ACTIONS, st.integers(0, 40)), max_size=14),
        st.integers(0, 15),  # by how much the watermark moves on
        st.sampled_from([0, 500, 1000]),  # by how much the clock does
        st.booleans(),  # whether the stage is drained
    ),
    min_size=1,
    max_size=5,
)


@rounds(3)
@given(EPOCHS, st.integers(1, 3), st.sampled_from([1, 3, 1 << 20]))
@example([([(1, "set", 3), (1, "set", 9), (1, "set", 5)], 15, 0, False)], 1, 2)
@settings(max_examples=20)
def test_timers_fire_once_and_in_order(round_, epochs, parallelism, piece):
    old, function._FIRE_ROWS = function._FIRE_ROWS, piece
    try:
        _compared(epochs, parallelism)
    finally:
        function._FIRE_ROWS = old


def _compared(epochs, parallelism: int) -> None:
    driven, model = Driven(timed, ROWS, parallelism), Model()
    now, watermark = 0, None
    for rows, further, later, drain in epochs:
        now, watermark = now + later, (watermark or 0) + further
        given_ = [{"k": key, "do": do, "at": at} for key, do, at in rows]
        model.rows(rows, now)
        fired = driven.epoch(given_, now=now, watermark=watermark, drain=drain)
        expected = list(model.barrier(now, watermark, drain))
        assert sorted(fired.select("k", "at", "nth", "domain").rows()) == sorted(expected)
        left = [
            (row["k"], row["domain"], row["at"])
            for subtask, backend in enumerate(driven.backends)
            for table in scan_timers(backend, driven.shapes.keys, driven.groups(subtask))
            for row in table.set_column(1, "at", table.column("at").cast(pa.int64())).to_pylist()
        ]
        kept = [(key, "event", at) for key, ats in model.event.items() for at in ats]
        kept += [(key, "processing", at) for key, ats in model.processing.items() for at in ats]
        assert sorted(left) == sorted(kept)
        assert _of_key(driven) == len(kept), "each timer is in the index by key, and nothing else"
        assert model.times == {key: count for key, count in _times(driven).items() if count}


def _times(driven: Driven) -> dict[int, int]:
    return {
        row["k"]: row["times"]
        for subtask, backend in enumerate(driven.backends)
        for table in scan_values(backend, driven.shapes.state, driven.shapes.keys, driven.groups(subtask))
        for row in table.to_pylist()
    }


def _of_key(driven: Driven) -> int:
    entries = 0
    for backend in driven.backends:
        for key, _ in backend.scan(b"", b"\xff"):
            entries += key[2] in (EVENT_TIMERS_OF_KEY, PROCESSING_TIMERS_OF_KEY)
    return entries
