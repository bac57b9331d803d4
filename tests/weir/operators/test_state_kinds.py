"""Stages with lists, maps, timers and a TTL, and what their authors are told."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from state_ops.errors import PipelineError, StageError, WeirError
from state_ops.moments import from_micros
from state_ops.schema.descriptors import collections_of
from tests.tools.sampling import sampled
from tests.tools.stages import with_input
from weir import Epoch, KeyedState, ListOf, MapOf, Stage, State, agg, files, stage, testing
from weir.operators.functions import function

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)


class Ride(State):
    city: str | None = None
    fare: float = 0.0


class Rider(State):
    rides: int = 0
    recent: ListOf[Ride]
    fares: ListOf[float]
    spent: MapOf[str, float]
    best: MapOf[int, Ride]


def ride(rider: str, minutes: float, city: str = "Oslo", fare: float = 1.0) -> dict:
    return {"rider": rider, "at": NOON + timedelta(minutes=minutes), "city": city, "fare": fare, "n": int(minutes)}


def staged(work: Callable[..., Any], **arguments: Any) -> Stage:
    source = files("x/*.parquet", event_time="at")
    arguments = {"key": "rider", "state": Rider, "order_by": "at", **arguments}
    return stage("riding", source=source, **arguments)(work)


def _polars(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
    state.recent.append(rows)
    state.spent.fold(rows, spent_key="city", spent=agg.sum("fare"))
    rides = state.recent.get(rows)
    assert isinstance(rides, pl.DataFrame) and isinstance(state.spent.contains(rows, spent_key="city"), pl.Series)
    return state.join(rides)


def _pandas(rows: pd.DataFrame, state: KeyedState, epoch: Epoch) -> pd.DataFrame:
    state.recent.append(rows)
    state.spent.fold(rows, spent_key="city", spent=agg.sum("fare"))
    rides = state.recent.get(rows)
    assert isinstance(rides, pd.DataFrame) and isinstance(state.spent.contains(rows, spent_key="city"), pd.Series)
    return state.join(rides)


def _arrow(rows: pa.Table, state: KeyedState, epoch: Epoch) -> pa.Table:
    state.recent.append(rows)
    state.spent.fold(rows, spent_key="city", spent=agg.sum("fare"))
    rides = state.recent.get(rows)
    assert isinstance(rides, pa.Table) and state.spent.contains(rows, spent_key="city").to_pylist() == [True] * len(
        rows
    )
    return state.join(rides)


@pytest.mark.parametrize("work", [_polars, _pandas, _arrow])
def test_handles_speak_the_library_of_the_function(work):
    started = {"b": Rider(rides=9, recent=[Ride(city="Rome")], fares=[1.0, 2.0], best={7: Ride(fare=3.0)})}
    run = testing.run(staged(work), state=started, parallelism=2)
    out = run.epoch([ride("a", 0), ride("b", 1, "Bonn", 2.0), ride("a", 2)])
    assert sorted(out.rows()) == [
        ("a", "Oslo", 1.0, 0),
        ("a", "Oslo", 1.0, 0),
        ("b", "Bonn", 2.0, 9),
        ("b", "Rome", 0.0, 9),
    ]
    ann, bob = run.state["a"], run.state["b"]
    assert ann == Rider(recent=[Ride(city="Oslo", fare=1.0)] * 2, spent={"Oslo": 2.0})
    assert bob.fares == [1.0, 2.0] and bob.best == {7: Ride(fare=3.0)} and bob.spent == {"Bonn": 2.0}


def test_a_state_may_be_lists_alone():
    class Log(State):
        lines: ListOf[str]

    def log(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        state.lines.append(rows, lines="city")
        return state.lines.last(rows, 2)

    run = testing.run(staged(log, state=Log), state={"a": Log(lines=["x"])})
    assert run.epoch([ride("a", 0, "y"), ride("a", 1, "z")])["lines"].to_list() == ["y", "z"]
    assert run.state["a"].lines == ["x", "y", "z"] and run.state["a"] == Log(lines=["x", "y", "z"])
    assert Log().lines == [] and Log().lines is not Log().lines


def test_key_columns_of_any_name_can_have_lists():
    class Log(State):
        seen: int = 0
        lines: ListOf[str]

    def log(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        state.lines.append(rows, lines="city")
        return state.lines.last(rows)

    run = testing.run(staged(log, state=Log, key=["first", "next"]))
    out = run.epoch([{**ride("", minutes, city), "first": "a", "next": 7} for minutes, city in enumerate("xy")])
    assert out.rows() == [("a", 7, "y")]
    assert run.state["a", 7].lines == ["x", "y"]


def test_clear_forgets_everything_of_a_key():
    def forget(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
        state.fold(rows, rides=agg.count())
        state.fares.append(rows, fares="fare")
        state.best.put(rows, best_key="n")
        state.timers.set(rows, after="1h")
        state.clear(rows.filter(pl.col("rider") == "a"))

    run = testing.run(staged(forget, on_timer=lambda_free), parallelism=3)
    run.epoch([ride("a", 0), ride("b", 0)])
    assert dict(run.state) == {"b": Rider(rides=1, fares=[1.0], best={0: Ride(city="Oslo", fare=1.0)})}
    assert run.timers["rider"].to_list() == ["b"]


def lambda_free(fired: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
    """Does nothing."""


def test_a_stage_without_timers_forgets_everything_of_a_key_too():
    def work(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
        state.fold(rows, rides=agg.count())
        state.recent.append(rows)
        state.clear(rows.filter(pl.col("rider") == "a"))

    run = testing.run(staged(work))
    run.epoch([ride("a", 0), ride("b", 0)])
    assert list(run.state) == ["b"]


@pytest.mark.parametrize("trials", sampled([2, 4]))
def test_slicing_does_not_matter_to_lists_and_maps(trials):
    def work(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        before = state.lag(rows, rides="n")
        state.recent.append(rows)
        state.spent.fold(rows, spent_key="city", spent=agg.sum("fare"))
        state.timers.set(rows.with_columns(due=pl.col("at") + pl.duration(minutes=90)), at="due")
        return rows.select("rider", "n", before=before["rides"])

    def due(fired: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        return fired.select("rider", n=pl.col("at").dt.epoch("s"), before=pl.lit(-1))

    rows = [ride("abc"[n % 3], n, "xy"[n % 2], float(n)) for n in range(40)]
    testing.assert_slicing_does_not_matter(staged(work, on_timer=due), rows, trials=trials)

    def batchwise(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
        state.fares.append(rows.unique("rider", maintain_order=True), fares="fare")

    with pytest.raises(AssertionError, match="fares"):
        testing.assert_slicing_does_not_matter(staged(batchwise), rows, trials=2)


# -- timers


def reminded(fired: pd.DataFrame, state: KeyedState, epoch: Epoch) -> pd.DataFrame:
    """Another library than the stage's function."""
    assert isinstance(fired, pd.DataFrame) and isinstance(state.get(fired), pd.DataFrame)
    return fired.assign(rides=state.get(fired)["rides"])


def remind(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
    state.fold(rows, rides=agg.count())
    state.timers.set(rows, at="at")
    state.timers.set(rows.head(1), after=timedelta(minutes=5))


def test_timers_fire_by_their_own_clocks_a_key_at_most_once_a_call():
    run = testing.run(staged(remind, on_timer=reminded))
    out = run.epoch([ride("a", 0), ride("a", 3), ride("b", 1)], now=NOON)
    expected = [("a", NOON), ("b", NOON + timedelta(minutes=1)), ("a", NOON + timedelta(minutes=3))]
    assert out.select("rider", "at").rows() == expected and out["domain"].unique().to_list() == ["event"]
    assert out["rides"].to_list() == [2, 1, 2]
    assert run.epoch(now=NOON + timedelta(minutes=4)).is_empty()
    out = run.epoch(now=NOON + timedelta(minutes=5))
    assert out.rows() == [("a", NOON + timedelta(minutes=5), "processing", 2)]
    assert run.epoch(now=NOON + timedelta(minutes=9)).is_empty() and run.timers.is_empty()


def test_timers_wait_for_the_watermark_and_a_drain_does_not():
    run = testing.run(staged(remind, on_timer=reminded))
    assert run.epoch([ride("a", 10)], watermark=NOON, now=NOON).is_empty()
    out = run.epoch(drain=True, now=NOON)
    assert out["at"].to_list() == [NOON + timedelta(minutes=10)]
    assert run.acks[0].closed_upto is not None, "the watermark moves to what a drain has fired"


def test_a_timer_that_sets_its_next_one_catches_up_in_one_barrier_and_does_not_drain_for_ever():
    def tick(fired: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        state.timers.set(fired.with_columns(next=pl.col("at") + pl.duration(minutes=1)), at="next")
        return fired.select("rider", "at")

    def begin(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        state.timers.set(rows.filter(pl.col("n") == 0), at="at")
        return rows.select("rider", "at").clear()

    run = testing.run(staged(begin, on_timer=tick))
    assert len(run.epoch([ride("a", 0), ride("b", 3)])) == 4
    assert len(run.epoch([ride("b", 5)])) == 2
    assert len(run.epoch(drain=True)) == 1
    assert run.timers["at"].to_list() == [NOON + timedelta(minutes=7)]


def test_a_drain_does_not_fire_what_it_had_set_itself_however_often_it_is_set():
    midnight = NOON + timedelta(hours=12)

    def late(fired: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        state.timers.set(fired.with_columns(at=pl.lit(midnight)), at="at")
        return fired.select("rider", "at")

    def begin(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        state.timers.set(rows, at="at")
        return rows.select("rider", "at").clear()

    run = testing.run(staged(begin, on_timer=late))
    run.epoch([ride("a", 0), ride("a", 1)], watermark=NOON - timedelta(hours=1))
    assert run.epoch(drain=True)["at"].to_list() == [NOON, NOON + timedelta(minutes=1)]
    assert run.timers["at"].to_list() == [midnight]


def test_a_timer_that_is_taken_back_while_it_waits_does_not_fire_and_nothing_of_it_stays():
    def once(fired: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        state.timers.clear(fired.filter(pl.col("rider") == "a"))
        return fired.select("rider", "at")

    def begin(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        state.timers.set(rows, at="at")
        state.timers.set(rows, after="1d")
        return rows.select("rider", "at").clear()

    run = testing.run(staged(begin, on_timer=once))
    out = run.epoch([ride("a", 0), ride("a", 1), ride("b", 0), ride("b", 1), ride("b", 2)], now=NOON)
    assert out["rider"].to_list() == ["a", "b", "b", "b"]
    assert run.epoch(now=NOON + timedelta(days=1))["rider"].to_list() == ["b"]
    assert sum(len(list(backend.scan(b"\0", b"\xff"))) for _, backend in run.backends()) == 0


# -- TTL


@pytest.mark.parametrize(("ttl_on", "left"), [("write", []), ("read_and_write", ["a"])])
def test_reading_keeps_state_alive_if_it_is_to(ttl_on, left):
    def work(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
        if len(rows.filter(pl.col("n") == 0)):
            state.fold(rows, rides=agg.count())
            state.recent.append(rows)
            state.spent.put(rows, spent_key="city", spent="fare")
        state.get(rows)
        state.recent.get(rows)
        state.spent.all(rows)

    run = testing.run(staged(work, ttl="10m", ttl_on=ttl_on))
    run.epoch([ride("a", 0), ride("b", 0)], now=NOON)
    run.epoch([ride("a", 9)], now=NOON + timedelta(minutes=9))
    assert sorted(run.state) == ["a", "b"]
    run.epoch(now=NOON + timedelta(minutes=10))
    assert sorted(run.state) == left
    if left:
        assert run.state["a"] == Rider(rides=1, recent=[Ride(city="Oslo", fare=1.0)], spent={"Oslo": 1.0})
    run.epoch(now=NOON + timedelta(minutes=19))
    assert not run.state


def test_the_sweep_is_bounded_goes_on_where_it_stood_and_writes_nothing_for_nothing(monkeypatch):
    monkeypatch.setattr(function, "_SWEEP_ENTRIES", 4)

    def work(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
        state.fold(rows, rides=agg.count())

    run = testing.run(staged(work, ttl="1h"))
    run.epoch([ride(f"r{n}", n) for n in range(10)], now=NOON)
    positions = [run.acks[0].swept]
    for _ in range(3):
        run.epoch(now=NOON)
        positions.append(run.acks[0].swept)
        assert not any(file.new for file in run.acks[0].files), "an epoch without data leaves state as it is"
    assert positions[0] != positions[1] and positions[2] is None and positions[3] == positions[0]
    sizes = []
    for _ in range(4):
        run.epoch(now=NOON + timedelta(hours=1))
        assert not run.state, "what has expired is not seen, whether it was swept or not"
        sizes.append(sum(len(list(backend.scan(b"\0", b"\xff"))) for _, backend in run.backends()))
    assert sizes[-1] == 0 and sizes[0] > 0


# -- misuse


def _misused(call: Callable[[KeyedState, pl.DataFrame], Any]) -> Callable[..., None]:
    def work(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
        if len(rows):
            call(state, rows)

    return work


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda state, rows: state.recnt.append(rows), "no list or map 'recnt'"),
        (lambda state, rows: state.fares.append(rows), "state.fares.append got no column"),
        (lambda state, rows: state.fares.append(rows, fares="fair"), "has no column 'fair'"),
        (lambda state, rows: state.fares.append(rows, fares="city"), "'city' does not fit 'fares'"),
        (
            lambda state, rows: state.fares.append(rows.with_columns(fares=None)),
            r"given 2 null\(s\) \(keys: \[\('a',\)",
        ),
        (
            lambda state, rows: state.fares.append(rows.drop("rider"), fares="fare"),
            "state.fares.append needs the key column",
        ),
        (lambda state, rows: state.fares.last(rows, 0), "asks for nothing"),
        (lambda state, rows: state.spent.get(rows), "state.spent.get needs the map keys"),
        (lambda state, rows: state.spent.put(rows, spent_key="city", fare="fare"), "state.spent.put knows no 'fare'"),
        (lambda state, rows: state.spent.put(rows, spent_key="city", spent="fare"), "several rows for one entry"),
        (lambda state, rows: state.spent.get(rows.with_columns(spent_key=None)), r"2 null\(s\) for map keys"),
        (lambda state, rows: state.spent.fold(rows, spent_key="city", spent=agg.min("fare")), "cannot be null"),
        (lambda state, rows: state.spent.fold(rows, spent_key="city"), "got no aggregate"),
        (lambda state, rows: state.join(rows.with_columns(rides=1)), "state.join adds a column 'rides'"),
        (
            lambda state, rows: state.put(rows.select("rider", rides="n")),
            r"several rows for one key \(keys: \[\('a',\)\]",
        ),
        (
            lambda state, rows: state.get(rows.with_columns(rider=pl.lit("z"))),
            r"keys that are not in this batch: \[\('z',\)",
        ),
        (lambda state, rows: state.timers.set(rows, at="at"), "nothing is called when a timer fires"),
    ],
)
def test_misuse_names_method_field_and_keys(call, message):
    with pytest.raises(StageError, match=message):
        testing.run(staged(_misused(call))).epoch([ride("a", 0), ride("a", 1)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda state, rows: state.rooms.append(rows), "state.rooms.append: the column 'rooms' .* 1.9 would become 1"),
        (
            lambda state, rows: state.spent.fold(rows, spent_key="rooms", spent=agg.sum("fare")),
            "state.spent.fold: the column 'rooms' does not fit 'spent_key', which is Int64: 1.9 would become 1",
        ),
        (
            lambda state, rows: state.spent.fold(rows, spent_key="n", spent=agg.sum("city")),
            r"state.spent.fold: spent=sum\('city'\), but that column is String",
        ),
        (lambda state, rows: state.put(rows.with_columns(nights=pl.lit("3"))), "'3' is String"),
        (
            lambda state, rows: state.get(rows.with_columns(n=pl.col("n") + 0.5)),
            "state.get: the key column 'n' does not fit the stage's, which is Int64: 0.5 would become 0",
        ),
    ],
)
def test_a_value_that_would_change_is_refused_wherever_it_goes(call, message):
    class Hotel(State):
        nights: int = 0
        rooms: ListOf[int]
        spent: MapOf[int, float]

    def work(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
        call(state, rows.with_columns(rooms=pl.lit(1.9)))

    with pytest.raises(StageError, match=message):
        testing.run(staged(work, state=Hotel, key="n")).epoch([ride("a", 0)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda state, rows: state.timers.set(rows), "needs a moment"),
        (lambda state, rows: state.timers.set(rows, at="city"), "not a timestamp"),
        (lambda state, rows: state.timers.set(rows, at="due"), "has no column 'due'"),
    ],
)
def test_timers_need_a_moment(call, message):
    with pytest.raises(StageError, match=message):
        testing.run(staged(_misused(call), on_timer=lambda_free)).epoch([ride("a", 0)])


def test_event_time_timers_need_an_event_time():
    misused = staged(_misused(lambda state, rows: state.timers.set(rows, at="at")), on_timer=lambda_free)
    with pytest.raises(StageError, match="nothing would ever fire at='at'"):
        testing.run(with_input(misused, files("x/*.parquet"))).epoch([ride("a", 0)])


def test_a_stage_is_refused_before_its_first_row():
    def other(fired: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        return fired.select("rider")

    def nothing(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        return rows

    with pytest.raises(StageError, match=r"other\(\) of the stage riding returned other columns .*: at is missing"):
        testing.run(staged(nothing, on_timer=other)).epoch([ride("a", 0)])
    for arguments, message in (
        ({"ttl": "soon"}, "ttl='soon' is no duration"),
        ({"ttl": "0s"}, "would keep nothing"),
        ({"ttl": "1h", "ttl_on": "read"}, "no policy"),
        ({"ttl": "99999999d"}, "is too long"),
        ({"key": ["rider", "rider"]}, "names a column twice"),
        ({"output": {"rider": pa.string()}}, "works on whole batches"),
    ):
        with pytest.raises(PipelineError, match=message):
            staged(nothing, **arguments)
    with pytest.raises(PipelineError, match="'city' is a key column and a column of the list 'recent'"):
        testing.run(staged(nothing, key="city")).epoch([ride("a", 0)])
    with pytest.raises(PipelineError, match="'at' is a key column"):
        testing.run(staged(nothing, key="at", on_timer=lambda_free)).epoch([ride("a", 0)])


def test_a_class_with_a_list_that_cannot_be_is_refused():
    with pytest.raises(PipelineError, match="begins empty"):

        class Begun(State):
            rides: ListOf[int] = []  # noqa: RUF012

    with pytest.raises(PipelineError, match="cannot be a key"):

        class Floating(State):
            rides: MapOf[float, int]

    with pytest.raises(PipelineError, match="nested"):

        class Nested(State):
            riders: ListOf[Rider]

    with pytest.raises(PipelineError, match="cannot be stored"):

        class Strange(State):
            rides: ListOf[complex]

    class Hidden(State):
        fold: ListOf[int]

    with pytest.raises(PipelineError, match=r"hide state\.fold"):
        testing.run(staged(_polars, state=Hidden)).epoch([ride("a", 0)])


def test_a_tag_depends_on_the_name_alone():
    class One(State):
        recent: MapOf[str, int]

    class Other(State):
        rides: int = 0
        before: ListOf[str]
        recent: ListOf[float]

    tags = {collection.name: collection.tag for collection in collections_of(Other)}
    assert collections_of(One)[0].tag == tags["recent"] == 534960158 != tags["before"]


def given_back(empty: pa.DataType, given: pa.Array) -> list:
    """What a column becomes that a stage returns for rows, where it returned another type for none."""

    def work(rows: pa.Table, state: KeyedState, epoch: Epoch) -> pa.Table:
        return pa.table({"x": given if len(rows) else pa.array([], empty)})

    return testing.run(staged(work, state=Ride, key="n")).epoch([ride("a", 0)])["x"].to_arrow().to_pylist()


_HALF_PAST = datetime(2024, 5, 1, 13, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("type", "given", "message"),
    [
        (pa.date32(), pa.array([_HALF_PAST], pa.timestamp("us", "UTC")), "13, 30.* would become"),
        (pa.int64(), pa.array(["1"]), "'1' is String"),
        (pa.string(), pa.array([1.5]), "1.5 is Float64"),
        (pa.float32(), pa.array([None, 1e300]), "would become inf"),
        (pa.bool_(), pa.array([7]), "7 would become True"),
        (pa.decimal128(9, 2), pa.array([1.999]), "1.999 would become"),
        (pa.timestamp("us", "UTC"), pa.array([5]), "5 is Int64"),
        (pa.struct([("a", pa.int64())]), pa.array([{"a": 1, "b": 2}]), "cast from .struct"),
        (pa.list_(pa.int64()), pa.array([[1.5]]), "1.5 would become 1"),
        (pa.float64(), pa.array([2**53 + 1]), "9007199254740993 not in range"),
        (pa.int64(), pa.array([1.5]), "1.5"),
    ],
)
def test_what_a_stage_returns_is_refused_where_its_column_would_change_it(type, given, message):
    with pytest.raises(StageError, match=f"stage riding returned other columns .*'x' does not fit .*{message}"):
        given_back(type, given)


@pytest.mark.parametrize(
    ("type", "given", "kept"),
    [
        (pa.int32(), pa.array([7], pa.int64()), [7]),
        (pa.float64(), pa.array([2**53]), [2.0**53]),
        (pa.string(), pa.array(["a"], pa.large_string()), ["a"]),
        (pa.string(), pa.array(["a"], pa.string_view()), ["a"]),
        (pa.string(), pa.array(["a"]).dictionary_encode(), ["a"]),
        (pa.timestamp("us", "UTC"), pa.array([1_000_000], pa.timestamp("ns", "UTC")), [from_micros(1_000)]),
        (pa.int64(), pa.array([None]), [None]),
        (pa.int64(), pa.array([None], pa.float64()), [None]),
        (pa.int64(), pa.array([], pa.float64()), []),
        (pa.struct([("a", pa.int64()), ("b", pa.float64())]), pa.array([{"b": 1, "a": 2}]), [{"a": 2, "b": 1.0}]),
        (pa.decimal128(9, 2), pa.array([0.1 + 0.2]), [Decimal("0.30")]),
    ],
)
def test_what_a_stage_returns_goes_into_its_column_where_it_fits(type, given, kept):
    assert given_back(type, given) == kept


@pytest.mark.parametrize(
    ("type", "message"),
    [(pa.bool_(), "count.*but the field is Boolean"), (pa.int8(), "The count 'n' has become larger than Int8")],
)
def test_a_count_goes_into_a_number_that_holds_it(type, message):
    class InstrumentedStore(State):
        n: Annotated[bool if type == pa.bool_() else int, type] = 0 if type == pa.int8() else False

    def work(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
        state.fold(rows, n=agg.count())

    with pytest.raises(WeirError, match=message):
        testing.run(staged(work, state=InstrumentedStore, key="city")).epoch([ride("a", 0)] * 200)
