"""Functions that are called once per key: rows in and out by annotation, state, errors, and the cache behind them."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from state_ops.errors import ConfigurationError, PipelineError, StageError
from state_ops.keyed.per_key.state_cache import CacheFigures, CacheSizes
from weir import (
    Epoch,
    Fired,
    KeyState,
    ListOf,
    MapOf,
    Stage,
    State,
    Timestamp,
    delta,
    files,
    stage,
    testing,
)
from weir.task import worker_cache

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
EVENTS = files("x/*.parquet", event_time="at")
COLUMNS = {"k": pa.string(), "v": pa.int64(), "before": pa.int64()}


class Total(State):
    rows: int = 0
    amount: int = 0
    last: int | None = None


def a_run(
    keyed: Stage, sizes: CacheSizes | None = None, batch_rows: int = 65_536, parallelism: int = 1
) -> testing.StageRun:
    """A run, whose subtasks have a state cache of these sizes."""
    run = testing.run(keyed, batch_rows=batch_rows, parallelism=parallelism)
    if sizes is not None:
        run.epochs.context.settings.state.caches[keyed.uid] = sizes
    return run


def made_of(function: Any, **options: Any) -> Stage:
    return stage("totals", source=EVENTS, key="k", state=Total, per_key=True, sink=delta.append("out"), **options)(
        function
    )


def rows(*values: tuple[str, int]) -> list[dict]:
    return [{"k": k, "v": v, "at": NOON} for k, v in values]


def _dicts(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> list[dict]:
    assert all(row["k"] == key for row in rows)
    total, out = state.get(), []
    for row in rows:
        out.append({"k": key, "v": row["v"], "before": total.last})
        total.rows, total.amount, total.last = total.rows + 1, total.amount + row["v"], row["v"]
    state.update(total)
    return out


def _polars(key: str, rows: pl.DataFrame, state: KeyState, epoch: Epoch) -> pl.DataFrame:
    assert isinstance(rows, pl.DataFrame) and rows["k"].unique().to_list() == [key][: len(rows)]
    total = state.get()
    before = rows["v"].shift(1, fill_value=total.last)
    if len(rows):
        state.update(Total(rows=total.rows + len(rows), amount=total.amount + rows["v"].sum(), last=rows["v"][-1]))
    return rows.select("k", "v", before=before)


def _pandas(key: str, rows: pd.DataFrame, state: KeyState, epoch: Epoch) -> pd.DataFrame:
    assert isinstance(rows, pd.DataFrame) and list(rows.index) == list(range(len(rows)))
    total = state.get()
    before = rows["v"].shift(1)
    if len(rows):
        before[0] = total.last
        last = int(rows["v"].iloc[-1])
        state.update(Total(rows=total.rows + len(rows), amount=total.amount + int(rows["v"].sum()), last=last))
    return rows[["k", "v"]].assign(before=before.astype("Int64"))


def _arrow(key: str, rows: pa.Table, state: KeyState, epoch: Epoch) -> pa.Table:
    assert isinstance(rows, pa.Table)
    return pa.Table.from_pylist(_dicts(key, rows.to_pylist(), state, epoch), pa.schema(list(COLUMNS.items())))


def _text(key: str, rows: "pl.DataFrame", state: "KeyState", epoch: "Epoch"):  # noqa: UP037
    return _polars(key, rows, state, epoch)


FLAVOURS = [(_dicts, COLUMNS), (_dicts, None), (_polars, None), (_pandas, None), (_arrow, None), (_text, None)]


@pytest.mark.parametrize(("function", "output"), [f for f in FLAVOURS if f != (_dicts, None)])
@pytest.mark.parametrize("sizes", [None, CacheSizes(2), CacheSizes(1, 2)])
def test_each_key_is_called_with_its_rows_and_its_state(function: Any, output: Any, sizes: CacheSizes | None) -> None:
    run = a_run(made_of(function, output=output), sizes)
    first = run.epoch(rows(("a", 1), ("b", 10), ("a", 2), ("c", 100)))
    assert sorted(first.rows(), key=str) == [("a", 1, None), ("a", 2, 1), ("b", 10, None), ("c", 100, None)]
    second = run.epoch(rows(("b", 20), ("a", 3)))
    assert sorted(second.rows()) == [("a", 3, 2), ("b", 20, 10)]
    assert dict(run.state) == {
        "a": Total(rows=3, amount=6, last=3),
        "b": Total(rows=2, amount=30, last=20),
        "c": Total(rows=1, amount=100, last=100),
    }


def test_a_list_of_dicts_needs_its_columns_declared() -> None:
    with pytest.raises(PipelineError, match="cannot be told from an empty list") as caught:
        testing.run(made_of(_dicts)).epoch(rows(("a", 1)))
    assert "output=" in str(caught.value.next)


def test_rows_come_in_the_order_of_order_by_and_a_composite_key_is_a_tuple() -> None:
    seen = []

    @stage("t", source=EVENTS, key=["k", "v"], state=Total, order_by=["at"], per_key=True)
    def function(key: tuple, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        seen.append((key, [row["at"].minute for row in rows]))

    late = {"k": "a", "v": 1, "at": NOON + timedelta(minutes=5)}
    run = testing.run(function)
    run.epoch([late, *rows(("b", 1), ("a", 1))])
    assert seen[0] == (("", 0), [])  # before the first epoch, to learn the columns
    assert sorted(seen[1:]) == [(("a", 1), [0, 5]), (("b", 1), [0])]


def test_a_function_may_return_nothing() -> None:
    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        state.update(Total(rows=len(rows)))

    run = testing.run(made_of(function))
    assert len(run.epoch(rows(("a", 1), ("a", 2)))) == 0
    assert run.state["a"].rows == 2


@pytest.mark.parametrize("sizes", [None, CacheSizes(4), CacheSizes(1, 4)])
def test_clear_forgets_and_what_is_changed_without_update_is_not_kept(sizes: CacheSizes | None) -> None:
    class Seen(State):
        n: int = 0
        names: list[str]

    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        mine = state.get()
        mine.n += 1
        mine.names.append(key)
        assert state.get() != mine
        if rows[0]["v"] > 0:
            state.update(mine)
            mine.names.append("after")
            assert state.get().names[-1] == key
        if rows[0]["v"] < 0:
            state.clear()
            assert state.get() == Seen()

    keyed = stage("t", source=EVENTS, key="k", state=Seen, per_key=True, output={})(function)
    run = a_run(keyed, sizes)
    for v in (1, 0, 1, 0):
        run.epoch(rows(("a", v), ("b", 1)))
    assert run.state["a"] == Seen(n=2, names=["a", "a"])
    run.epoch(rows(("a", -1)))
    assert set(run.state) == {"b"}
    run.epoch(rows(("a", 1)))
    assert run.state["a"] == Seen(n=1, names=["a"])


class Everything(State):
    i: int = 0
    small: Annotated[int, pa.int8()] = 0
    f: float = 0.0
    f32: Annotated[float, pa.float32()] = 0.0
    s: str = ""
    b: bytes = b""
    flag: bool = False
    at: datetime | None = None
    day: date | None = None
    price: Annotated[Decimal, pa.decimal128(10, 2)] = Decimal(0)
    names: list[str]
    counts: dict[str, int]
    inner: Total | None = None


@pytest.mark.parametrize("sizes", [None, CacheSizes(4)])
def test_state_of_every_type_is_the_same_with_a_cache_as_without(sizes: CacheSizes | None) -> None:
    given = Everything(
        i=1.0,  # what Arrow makes of it is what comes back, from a cache too
        small=7,
        f=1,
        f32=0.1,
        s="é",
        b=b"\0",
        flag=True,
        at=datetime(2024, 1, 1, tzinfo=UTC),
        day=date(2024, 1, 1),
        price=Decimal("1.5"),
        names=["x"],
        counts={"a": 1},
        inner=Total(rows=3),
    )
    values = []

    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        values.append(state.get())
        state.update(given)

    keyed = stage("t", source=EVENTS, key="k", state=Everything, per_key=True, output={})(function)
    run = a_run(keyed, sizes)
    run.epoch(rows(("a", 1)))
    run.epoch(rows(("a", 1)))
    assert values[0] == Everything()
    assert values[1].f32 == pytest.approx(0.1) and values[1].f32 != 0.1
    assert values[1] == Everything(**{**given.as_dict(), "f32": values[1].f32})
    assert type(values[1].i) is int and type(values[1].f) is float


# -- errors


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (Total(rows=1.5), "'rows' of the key 'bad' cannot be 1.5"),
        (Total(rows=None), "'rows' of the key 'bad' cannot be None"),
        (Total(rows="1"), "'rows' of the key 'bad' cannot be '1'"),
        (Total(rows=True), "'rows' of the key 'bad' cannot be True"),
        (Total(amount=1 << 63), "'amount' of the key 'bad' cannot be 9223372036854775808"),
        ({"rows": 1}, "state.update was given {'rows': 1} for the key 'bad'"),
        (None, "state.update was given None for the key 'bad'"),
    ],
)
@pytest.mark.parametrize("sizes", [None, CacheSizes(1)])
def test_a_value_that_its_field_cannot_hold_is_named_with_its_key(value: Any, problem: str, sizes: Any) -> None:
    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        state.update(value if key == "bad" else Total(rows=1))

    run = a_run(made_of(function, output={}), sizes)
    with pytest.raises(StageError) as caught:
        run.epoch(rows(("a", 1), ("bad", 1), ("c", 1)))
    assert problem in caught.value.what
    assert dict(run.state) == {}


def test_what_the_function_raises_is_shown_with_the_key() -> None:
    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        raise KeyError("typo")

    with pytest.raises(StageError, match="typo") as caught:
        testing.run(made_of(function, output={})).epoch(rows(("a", 1)))
    assert "key 'a'" in str(caught.value.where)
    assert "/function.py" not in caught.value.traceback


def test_rows_with_other_columns_are_refused() -> None:
    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> list[dict]:
        return [{"k": key, "w": 1}]

    with pytest.raises(StageError, match="its rows have: k, v"):
        testing.run(made_of(function, output={"k": pa.string(), "v": pa.int64()})).epoch(rows(("a", 1)))


def test_dicts_of_different_columns_are_refused_whichever_key_comes_first() -> None:
    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> list[dict]:
        return [{"k": key, "n": len(rows)} | ({"many": True} if len(rows) > 1 else {})]

    for values in ((("a", 1), ("a", 2), ("b", 3)), (("b", 3), ("a", 1), ("a", 2))):
        with pytest.raises(StageError, match=r"a row of the key .* has: k, n") as caught:
            testing.run(made_of(function)).epoch(rows(*values))
        assert "many" in str(caught.value)


def test_a_column_that_a_frame_lacks_for_one_key_is_no_null() -> None:
    def function(key: str, rows: pl.DataFrame, state: KeyState, epoch: Epoch) -> pl.DataFrame:
        return rows.select("k") if len(rows) > 1 else rows.select("k", "v")

    with pytest.raises(StageError, match="returned the columns k for the key 'a', and k, v for 'b'"):
        testing.run(made_of(function)).epoch(rows(("b", 3), ("a", 1), ("a", 2)))


def test_what_is_no_dict_is_refused() -> None:
    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> list:
        return [key] if rows else [{"k": key}]

    with pytest.raises(StageError, match="returned 'a' for the key 'a', but rows are dicts"):
        testing.run(made_of(function)).epoch(rows(("a", 1)))


def test_a_batch_without_any_row_needs_no_columns_declared() -> None:
    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> list[dict]:
        return [{"k": key}] if not rows or len(rows) > 1 else []

    run = testing.run(made_of(function))
    assert run.epoch(rows(("a", 1))).is_empty()
    assert run.epoch(rows(("a", 1), ("a", 2)))["k"].to_list() == ["a"]


def test_values_that_do_not_fit_the_columns_are_refused() -> None:
    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> list[dict]:
        return [{"k": key, "v": "text"}]

    with pytest.raises(StageError, match="do not fit its columns"):
        testing.run(made_of(function, output={"k": pa.string(), "v": pa.int64()})).epoch(rows(("a", 1)))


_NOON_ONCE = datetime(2024, 5, 1, 12, tzinfo=UTC)
_MIDNIGHT = datetime(2024, 5, 1, tzinfo=UTC)


def returned(type: pa.DataType, value: Any) -> Any:
    """What a dict with this value becomes in a declared column."""

    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> list[dict]:
        return [{"x": value if key == "b" else None}]

    column = testing.run(made_of(function, output={"x": type})).epoch(rows(("a", 1), ("b", 1)))["x"]
    assert column[0] is None
    return column.to_arrow().to_pylist()[1]


@pytest.mark.parametrize(
    ("type", "value"),
    [
        (pa.int64(), 1.5),
        (pa.int64(), Decimal("1.5")),
        (pa.int64(), np.float64(2.7)),
        (pa.int64(), np.datetime64("2024-05-01", "us")),
        (pa.date32(), _NOON_ONCE),
        (pa.date32(), _MIDNIGHT.replace(tzinfo=timezone(timedelta(hours=2)))),
        (pa.date32(), 5),
        (pa.timestamp("us", "UTC"), 5),
        (pa.timestamp("us", "UTC"), True),
        (pa.timestamp("us", "UTC"), date(2024, 5, 1)),
        (pa.float32(), 1e300),
        (pa.decimal128(9, 2), Decimal("1.999")),
        (pa.struct([("a", pa.int64())]), {"a": 1, "b": 2}),
        (pa.struct([("a", pa.date32())]), {"a": _NOON_ONCE}),
        (pa.list_(pa.int64()), [1.5]),
        (pa.list_(pa.timestamp("us", "UTC")), [5]),
        (pa.list_(pa.string()), "abc"),
        (pa.map_(pa.date32(), pa.int64()), {_NOON_ONCE: 1}),
        (pa.map_(pa.string(), pa.float32()), {"a": 1e300}),
        (pa.map_(pa.string(), pa.int64()), [("a", 1), ("a", 2)]),
    ],
    ids=str,
)
def test_a_value_that_arrow_would_alter_is_refused_with_key_and_field(type: pa.DataType, value: Any) -> None:
    with pytest.raises(StageError) as caught:
        returned(type, value)
    assert f"do not fit its columns: 'x' of the key 'b' cannot be {value!r}" in caught.value.what


@pytest.mark.parametrize(
    ("type", "value", "kept"),
    [
        (pa.int64(), 2.0, 2),
        (pa.int64(), np.int32(2), 2),
        (pa.int64(), Decimal("2.0"), 2),
        (pa.float64(), 3, 3.0),
        (pa.float32(), np.float64(1.5), 1.5),
        (pa.float32(), float("inf"), float("inf")),
        (pa.bool_(), np.True_, True),
        (pa.date32(), _MIDNIGHT, date(2024, 5, 1)),
        (pa.date32(), pd.NaT, None),
        (pa.timestamp("us", "UTC"), pd.Timestamp(_NOON_ONCE), _NOON_ONCE),
        (pa.timestamp("us", "UTC"), pd.NaT, None),
        (pa.decimal128(9, 2), Decimal("1.990"), Decimal("1.99")),
        (pa.decimal128(9, 2), 7, Decimal("7.00")),
        (pa.list_(pa.int64()), np.array([1, 2]), [1, 2]),
        (pa.list_(pa.date32()), [date(2024, 5, 1), None], [date(2024, 5, 1), None]),
        (pa.struct([("a", pa.int64())]), {"a": 1}, {"a": 1}),
        (pa.map_(pa.string(), pa.int64()), {"a": 1.0}, [("a", 1)]),
    ],
    ids=str,
)
def test_a_value_that_its_column_holds_goes_in(type: pa.DataType, value: Any, kept: Any) -> None:
    assert returned(type, value) == kept


class Kept(State):
    day: date | None = None
    at: datetime | None = None
    f32: Annotated[float | None, pa.float32()] = None
    took: Annotated[timedelta | None, pa.duration("ms")] = None
    days: list[date]
    by_day: dict[date, int]


@pytest.mark.parametrize(
    "fields",
    [
        {"day": _NOON_ONCE},
        {"at": 5},
        {"f32": 1e300},
        {"took": timedelta(microseconds=1999)},
        {"took": 5},
        {"days": [_NOON_ONCE]},
        {"by_day": {_NOON_ONCE: 1}},
    ],
    ids=str,
)
def test_a_field_is_not_altered_either(fields: dict[str, Any]) -> None:
    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        state.update(Kept(**fields))

    keyed = stage("t", source=EVENTS, key="k", state=Kept, per_key=True, output={})(function)
    with pytest.raises(StageError, match=f"'{next(iter(fields))}' of the key 'a' cannot be"):
        testing.run(keyed).epoch(rows(("a", 1)))


def test_a_function_that_needs_rows_is_told_to_declare_its_columns() -> None:
    def function(key: str, rows: pl.DataFrame, state: KeyState, epoch: Epoch) -> pl.DataFrame:
        assert rows["v"][0] >= 0
        return rows.select("k")

    with pytest.raises(PipelineError) as caught:
        testing.run(made_of(function)).epoch(rows(("a", 1)))
    assert "output=" in str(caught.value.next)
    assert testing.run(made_of(function, output={"k": pa.string()})).epoch(rows(("a", 1)))["k"].to_list() == ["a"]


def test_a_key_whose_frame_has_another_type_is_cast() -> None:
    def function(key: str, rows: pl.DataFrame, state: KeyState, epoch: Epoch) -> pl.DataFrame:
        return pl.DataFrame({"k": [key], "v": [None if key == "a" else 1]})

    keyed = made_of(function, output={"k": pa.string(), "v": pa.int64()})
    assert sorted(testing.run(keyed).epoch(rows(("a", 1), ("b", 1))).rows()) == [("a", None), ("b", 1)]


def _no_hint(key, rows, state, epoch): ...
def _three(rows: pl.DataFrame, state: KeyState, epoch: Epoch) -> None: ...


@pytest.mark.parametrize(
    ("function", "problem"), [(_no_hint, "cannot tell which frame"), (_three, "takes 3 parameters")]
)
def test_a_function_of_the_wrong_shape_is_refused_when_it_is_defined(function: Any, problem: str) -> None:
    with pytest.raises(PipelineError, match=problem):
        made_of(function)
    if function is _three:
        with pytest.raises(PipelineError, match=r"takes four: \(key, fired, state, epoch\)"):
            made_of(_dicts, output=COLUMNS, on_timer=function)


# -- the cache


def test_the_figures_of_an_epoch_come_with_the_ack_and_the_next_epoch_begins_warm() -> None:
    run = a_run(made_of(_dicts, output=COLUMNS), CacheSizes(2))
    figures = []
    for values in ([("a", 1), ("b", 1)], [("a", 1), ("b", 1)], [("a", 1), ("c", 1)]):
        run.epoch(rows(*values))
        (ack,) = run.acks
        figures.append(CacheFigures(**ack.cache))
    assert figures[0] == CacheFigures(misses=2, flushed=2)
    assert figures[1] == CacheFigures(l1_hits=2, flushed=2)
    assert figures[2] == CacheFigures(l1_hits=1, misses=1, flushed=2)
    assert all(ack.cache is None for ack in _acks_without_a_cache())


def _acks_without_a_cache() -> tuple:
    run = a_run(made_of(_dicts, output=COLUMNS))
    run.epoch(rows(("a", 1)))
    return run.acks


def test_a_declined_epoch_leaves_nothing_warm_and_its_replay_sees_the_base() -> None:
    broken = []

    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        total = state.get()
        state.update(Total(rows=total.rows + len(rows)))
        if broken and key == "b":
            raise RuntimeError("once")

    run = a_run(made_of(function, output={}), CacheSizes(10), batch_rows=1)
    run.epoch(rows(("a", 1), ("b", 1)))
    broken.append(True)
    with pytest.raises(StageError, match="once"):
        run.epoch(rows(("a", 1), ("b", 1)))
    broken.clear()
    run.epoch(rows(("a", 1), ("b", 1)))
    (ack,) = run.acks
    assert ack.cache["misses"] == 2  # cold: the declined attempt had the entries, and they are gone with it
    assert {key: total.rows for key, total in run.state.items()} == {"a": 2, "b": 2}


def test_an_epoch_that_changes_nothing_keeps_the_cache_for_the_snapshot_that_stays() -> None:
    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        if rows[0]["v"]:
            state.update(Total(rows=state.get().rows + 1))
        else:
            state.get()

    run = a_run(made_of(function, output={}), CacheSizes(10))
    for v in (1, 0, 0, 1):
        run.epoch(rows(("a", v)))
    (ack,) = run.acks
    assert CacheFigures(**ack.cache) == CacheFigures(l1_hits=1, flushed=1)
    assert run.state["a"].rows == 2


def test_entries_of_another_state_class_are_not_taken_over() -> None:
    run = a_run(made_of(_dicts, output=COLUMNS), CacheSizes(10))
    run.epoch(rows(("a", 1)))
    held = worker_cache.claim("totals", 0, "cache", run.acks[0].files[0].snapshot)
    worker_cache.keep("totals", 0, "cache", run.acks[0].files[0].snapshot, (b"another", held[1]), 1, 1)
    run.epoch(rows(("a", 2)))
    assert run.acks[0].cache["misses"] == 1
    assert run.state["a"].amount == 3


def test_subtasks_have_a_cache_each() -> None:
    run = a_run(made_of(_dicts, output=COLUMNS), CacheSizes(100), parallelism=3)
    values = [(str(number), number) for number in range(30)]
    for _ in range(2):
        run.epoch(rows(*values))
    assert sum((CacheFigures(**ack.cache) for ack in run.acks), CacheFigures()) == CacheFigures(l1_hits=30, flushed=30)
    assert Counter(total.rows for total in run.state.values()) == {2: 30}


# -- lists, maps, timers, time to live


class Ride(State):
    to: str = ""
    fare: float = 0.0


class Rider(State):
    rides: int = 0
    recent: ListOf[Ride]
    tags: ListOf[str]
    spent: MapOf[str, float]
    last: MapOf[int, Ride]


def a_rider(function: Any, **options: Any) -> Stage:
    return stage("riders", source=EVENTS, key="k", state=Rider, per_key=True, output={}, **options)(function)


@pytest.mark.parametrize("sizes", [None, CacheSizes(10)])
def test_lists_of_a_key(sizes: CacheSizes | None) -> None:
    seen = []

    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        before = list(state.recent)
        for row in rows:
            if row["v"] < 0:
                state.recent.clear()
                state.tags.clear()
            state.recent.append(Ride(to=key, fare=row["v"]))
            state.tags.append(f"{key}{row['v']}")
        seen.append((key, [ride.fare for ride in before], [ride.fare for ride in state.recent.get()], state.tags.get()))
        state.recent.get().clear()  # a list of the caller's own
        assert len(state.recent) == len(state.recent.get()) > 0

    run = a_run(a_rider(function), sizes)
    run.epoch(rows(("a", 1), ("b", 10), ("a", 2)))
    run.epoch(rows(("a", 3), ("c", 7)))
    run.epoch(rows(("a", 4), ("a", -5), ("b", 20)))
    assert sorted(seen[:2]) == [("a", [], [1, 2], ["a1", "a2"]), ("b", [], [10], ["b10"])]
    assert sorted(seen[2:4]) == [("a", [1, 2], [1, 2, 3], ["a1", "a2", "a3"]), ("c", [], [7], ["c7"])]
    assert sorted(seen[4:]) == [("a", [1, 2, 3], [-5], ["a-5"]), ("b", [10], [10, 20], ["b10", "b20"])]


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (lambda state: state.recent.append({"to": "x"}), "Give an instance of Ride"),
        (lambda state: state.tags.append(7), "state.tags of the key 'a' cannot be 7"),
        (lambda state: state.spent.__setitem__("x", "y"), "state.spent of the key 'a' cannot be 'y'"),
        (lambda state: state.spent.__setitem__(1, 1.0), "state.spent of the key 'a' cannot be 1"),
        (lambda state: state.update(Rider(tags=["x"])), "state.tags"),
        (lambda state: state.recnt.append(Ride()), "no list or map 'recnt'"),
        (lambda state: state.timers.set(after="5m"), "on_timer"),
        (lambda state: state.timers.set(), "needs a moment"),
    ],
)
def test_misuse_of_lists_maps_and_timers_is_named(act: Any, problem: str) -> None:
    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        act(state)

    with pytest.raises(StageError) as caught:
        testing.run(a_rider(function)).epoch(rows(("a", 1)))
    assert problem in f"{caught.value.what} {caught.value.next}"


@pytest.mark.parametrize("unit", ["D", "s", "us", "ns"])
def test_a_timer_may_be_a_moment_of_numpys(unit: str) -> None:
    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        state.timers.set(np.datetime64("2124-05-01", unit))

    def on_timer(key: str, fired: Fired, state: KeyState, epoch: Epoch) -> None: ...

    run = testing.run(made_of(function, on_timer=on_timer, output={}))
    run.epoch(rows(("a", 1)))
    assert [row[1] for row in run.timers.rows()] == [datetime(2124, 5, 1, tzinfo=UTC)]


@pytest.mark.parametrize("moment", ["tomorrow", date(2024, 5, 1), pd.NaT, 5], ids=str)
def test_a_timer_at_what_is_no_moment_is_refused_with_its_key(moment: Any) -> None:
    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        state.timers.set(moment if key == "b" else NOON)

    def on_timer(key: str, fired: Fired, state: KeyState, epoch: Epoch) -> None: ...

    keyed = made_of(function, on_timer=on_timer, output={})
    with pytest.raises(StageError, match=f"state.timers.set was given .*{str(moment)[:4]}.* for the key 'b'"):
        testing.run(keyed).epoch(rows(("a", 1), ("b", 2), ("c", 3)))


@pytest.mark.parametrize("sizes", [None, CacheSizes(10), CacheSizes(1, 1)])
def test_timers_call_a_function_per_key(sizes: CacheSizes | None) -> None:
    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> list[dict]:
        total = state.get()
        state.update(Total(rows=total.rows + len(rows)))
        for row in rows:
            if row["v"] < 0:
                state.timers.clear()
            else:
                state.timers.set(row["at"] + timedelta(minutes=row["v"]))
        if key == "p":
            state.timers.set(after="90s")
        return []

    def on_timer(key: str, fired: Fired, state: KeyState, epoch: Epoch) -> list[dict]:
        total = state.get()
        state.clear()
        return [{"k": key, "at": fired.at, "domain": fired.domain, "rows": total.rows}]

    output = {"k": pa.string(), "at": pa.timestamp("us", tz="UTC"), "domain": pa.string(), "rows": pa.int64()}
    run = a_run(made_of(function, output=output, on_timer=on_timer), sizes)
    assert len(run.epoch(rows(("a", 5), ("a", 6), ("b", 60), ("c", 7), ("p", 600)))) == 0
    run.epoch(rows(("c", -1)))
    fired = run.epoch([{"k": "b", "v": 600, "at": NOON + timedelta(minutes=10)}])
    assert sorted((row["k"], row["domain"], row["rows"]) for row in fired.to_dicts()) == [
        ("a", "event", 0),
        ("a", "event", 2),
        ("p", "processing", 1),
    ]
    assert [row["at"].minute for row in fired.to_dicts() if row["k"] == "a"] == [5, 6]
    assert {key: total.rows for key, total in run.state.items()} == {"b": 2, "c": 2}


def test_state_of_a_key_expires_and_such_a_stage_has_no_cache() -> None:
    seen = []

    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        total = state.get()
        seen.append(total.rows)
        state.update(Total(rows=total.rows + 1))

    run = a_run(made_of(function, output={}, ttl="10m"))
    for minute in (0, 5, 14, 24):
        run.epoch(rows(("a", 1)), now=NOON + timedelta(minutes=minute))
    assert seen == [0, 1, 2, 0]
    cached = a_run(made_of(function, output={}, ttl="10m"), CacheSizes(4))
    with pytest.raises(ConfigurationError, match="TTL"):
        cached.epoch(rows(("a", 1)))


@pytest.mark.parametrize("sizes", [None, CacheSizes(2)])
def test_a_state_of_lists_alone_has_rows_without_fields(sizes: CacheSizes | None) -> None:
    class Log(State):
        lines: ListOf[int]

    def log(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        assert state.get() == Log()
        state.lines.append(rows[0]["v"])
        state.update(Log())

    keyed = stage("logs", source=EVENTS, key="k", state=Log, per_key=True, output={})(log)
    run = a_run(keyed, sizes)
    run.epoch(rows(("a", 1), ("b", 2)))
    run.epoch(rows(("a", 3)))
    assert dict(run.state) == {"a": Log(lines=[1, 3]), "b": Log(lines=[2])}


class Colour(StrEnum):
    RED = "red"


BERLIN = ZoneInfo("Europe/Berlin")
NINE = datetime(2024, 5, 1, 9, tzinfo=UTC)
TWICE = datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN)  # an hour that Berlin has twice equals no moment of another zone
ZONELESS = Annotated[datetime, pa.timestamp("us")]
CENTS = Annotated[Decimal, pa.decimal128(10, 2)]


@pytest.mark.parametrize(
    ("kind", "spellings"),
    [
        (datetime, [NINE.replace(tzinfo=None), NINE, NINE.astimezone(BERLIN), pd.Timestamp(NINE)]),
        (datetime, [pd.Timestamp("2024-05-01 09:00"), np.datetime64("2024-05-01T09", "h"), NINE]),
        (datetime, [TWICE, TWICE.astimezone(UTC), TWICE.astimezone(UTC).replace(tzinfo=None)]),
        (ZONELESS, [NINE.replace(tzinfo=None), NINE, NINE.astimezone(BERLIN), np.datetime64("2024-05-01T09", "ns")]),
        (date, [date(2024, 5, 1), datetime(2024, 5, 1), datetime(2024, 5, 1, tzinfo=UTC)]),
        (date, [pd.Timestamp("2024-05-01"), np.datetime64("2024-05-01"), date(2024, 5, 1)]),
        (int, [1, np.int64(1), 1.0, np.float32(1), Decimal(1)]),
        (bool, [True, np.True_]),
        (str, [Colour.RED, "red", np.str_("red")]),
        (bytes, [b"a", bytearray(b"a"), np.bytes_(b"a")]),
        (CENTS, [Decimal("1"), Decimal("1.00"), 1]),
    ],
)
def test_an_entry_of_a_map_is_the_same_under_every_spelling_of_its_key(kind: Any, spellings: list[Any]) -> None:
    kept = type("Kept", (State,), {"__annotations__": {"seen": MapOf[kind, int]}})
    equal = []

    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        seen = state.seen
        if epoch.id == 1:
            for write in spellings:
                for read in spellings:
                    seen[write] = 1
                    equal.append((seen.get(read), read in seen, seen[read], len(seen.items())) == (1, True, 1, 1))
                    seen[read] = seen.get(read, 0) + 1
                    equal.append(seen.get(write) == 2 and [value for _, value in seen.items()] == [2])
                    del seen[read]
                    equal.append(write not in seen and not seen.items())
                    seen.clear()
            seen[spellings[0]] = 3
        else:
            equal.extend(seen.get(read) == 3 for read in spellings)
            del seen[spellings[-1]]
            equal.extend(read not in seen for read in spellings)

    keyed = stage("totals", source=EVENTS, key="k", state=kept, per_key=True, output={})(function)
    run = testing.run(keyed)
    run.epoch(rows(("a", 1)))
    assert list(run.state["a"].seen.values()) == [3]
    run.epoch(rows(("a", 1)))
    assert all(equal) and len(equal) > 3 * len(spellings)


class Hired(State):
    at: datetime = NINE
    fare: CENTS = Decimal("0.00")


class Hires(State):
    at: datetime | None = None
    day: date | None = None
    n: int = 0
    rides: ListOf[Hired]
    moments: ListOf[datetime]
    days: MapOf[str, date]


def test_what_a_call_has_written_it_reads_as_later_calls_do() -> None:
    read = []

    def function(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
        if epoch.id == 1:
            naive, midnight = NINE.replace(tzinfo=None), datetime(2024, 5, 1)
            state.update(Hires(at=naive, day=midnight, n=1.0))
            state.rides.append(Hired(at=naive, fare=Decimal(1)))
            state.moments.append(np.datetime64("2024-05-01T09", "s"))
            state.days["x"] = midnight
        read.append(
            [repr(state.get().as_dict()), repr([ride.as_dict() for ride in state.rides]), repr(state.days.items())]
        )
        read[-1] += [repr(state.moments.get()), repr(state.days["x"])]

    keyed = stage("totals", source=EVENTS, key="k", state=Hires, per_key=True, output={})(function)
    run = testing.run(keyed)
    for _ in range(2):
        run.epoch(rows(("a", 1)))
    written, later = (
        [text.replace("datetime.timezone.utc", "zoneinfo.ZoneInfo(key='UTC')") for text in some] for some in read
    )
    assert written == later


def test_columns_may_be_declared_with_types_as_a_state_class_has_them():
    def counted(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> list[dict]:
        return [{"k": key, "rows": len(rows), "first": None}]

    declared = made_of(counted, output={"k": str, "rows": int, "first": Timestamp | None})
    assert testing.run(declared).epoch(rows(("a", 1), ("a", 2))).schema == {
        "k": pl.String, "rows": pl.Int64, "first": pl.Datetime("us", "UTC")
    }  # fmt: skip
    with pytest.raises(PipelineError, match="output= says of the column 'k' what is no type"):
        made_of(counted, output={"k": object})
