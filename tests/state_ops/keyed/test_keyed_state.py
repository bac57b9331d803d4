from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state_ops.backends.memory import MemoryBackend
from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.errors import InputError, PipelineError, StageError
from state_ops.keyed.keyed_state import GROUP, ValueState, scan_values
from state_ops.rows import aggregates as agg
from state_ops.schema.descriptors import ListOf
from state_ops.schema.key_groups import key_groups
from state_ops.schema.state_class import State
from state_ops.schema.state_schema import StateSchema
from tests.tools.sampling import rounds

GROUPS = 16
KEYS = pa.schema([("k", pa.string())])


class Account(State):
    """Fields of every sort of default."""

    number: int = 0
    amount: float = 1.5
    name: str | None = None
    low: float | None = None


SCHEMA = StateSchema.of(Account)
FRESH = Account().as_dict()


class Handle:
    """A value state over a backend, batch by batch, as an operator drives it."""

    def __init__(self, backend) -> None:
        self.backend = backend
        self.state = ValueState(backend, SCHEMA, KEYS, "stage tried")

    def batch(self, frame: pl.DataFrame, work: Callable[[ValueState, pl.DataFrame], object]) -> object:
        keys = frame.select("k").to_arrow(compat_level=pl.CompatLevel.oldest()).cast(KEYS)
        groups = key_groups(keys.columns, GROUPS).astype(np.int32)
        self.state.begin(frame.select("k").with_columns(pl.Series(GROUP, groups)))
        result = work(self.state, frame)
        self.state.flush()
        self.state.barrier()
        return result

    def stored(self) -> dict[str, dict]:
        tables = list(scan_values(self.backend, SCHEMA, KEYS, range(GROUPS)))
        return {row.pop("k"): row for table in tables for row in table.to_pylist()}


@pytest.fixture(params=["memory", "rocksdb"])
def handle(request, tmp_path: Path):
    if request.param == "memory":
        yield Handle(MemoryBackend())
        return
    backend = RocksDBBackend(tmp_path / "db", 16)
    yield Handle(backend)
    backend.close()


def keyed(**columns: list) -> pl.DataFrame:
    return pl.DataFrame(columns)


# -- get, put, delete


def test_frames_of_any_library_go_in(handle):
    for make in (pa.table, pd.DataFrame, pl.DataFrame):
        frame = make({"k": ["a", "b"], "number": [1, 2]})
        handle.batch(keyed(k=["a", "b"]), lambda state, _, frame=frame: state.put(frame))
    assert {key: row["number"] for key, row in handle.stored().items()} == {"a": 1, "b": 2}


def test_an_empty_frame_changes_nothing(handle):
    def work(state: ValueState, rows: pl.DataFrame) -> None:
        none = rows.clear()
        state.put(none)
        state.delete(none)
        state.fold(none, number=agg.count())
        state.lag(none, name="name")
        assert state.get(none).is_empty()

    handle.batch(keyed(k=["a"], number=[1], name=["x"]), work)
    assert handle.stored() == {}


def test_a_batch_writes_the_keys_that_it_changed_and_no_others():
    class Watched(MemoryBackend):
        puts: list[int]

        def write(self, puts, deletes=()):
            self.puts.append(len(puts))
            super().write(puts, deletes)

    backend = Watched()
    backend.puts = []
    handle = Handle(backend)
    handle.batch(keyed(k=["a", "b", "c"], number=[1, 2, 3]), lambda state, rows: state.put(rows))

    def work(state: ValueState, rows: pl.DataFrame) -> None:
        state.get(rows)
        state.put(rows.filter(pl.col("k") == "b"))

    handle.batch(keyed(k=["a", "b", "c"], number=[4, 5, 6]), work)
    handle.batch(keyed(k=["a"]), lambda state, rows: state.get(rows))
    assert backend.puts == [3, 1]


# -- fold


def test_a_sum_that_its_field_cannot_hold_is_refused_by_name(handle):
    schema = StateSchema.build([("n", pa.int64(), False, 0), ("spent", pa.decimal128(4, 2), False, None)])
    handle.state = ValueState(handle.backend, schema, KEYS, "stage tried")
    rows = pl.DataFrame({"k": ["a", "a"], "fare": [Decimal("60.00"), Decimal("50.00")]})
    with pytest.raises(InputError, match="The sum 'spent' has become larger than Decimal") as raised:
        handle.batch(rows, lambda state, rows: state.fold(rows, n=agg.count(), spent=agg.sum("fare")))
    assert raised.value.where == "stage tried"


@pytest.mark.parametrize("slices", [[[0.6] * 10], [[0.6]] * 10])
@pytest.mark.parametrize("column", [agg.sum("fare"), agg.last("fare")])
def test_fold_cuts_no_float_down_to_an_integer_however_rows_are_sliced(handle, slices, column):
    with pytest.raises(StageError, match=r"number=(sum|last)\('fare'\), but that column .* 0.6 would become 0"):
        for fares in slices:
            rows = keyed(k=["a"] * len(fares), fare=fares)
            handle.batch(rows, lambda state, rows: state.fold(rows, number=column))
    assert handle.stored() == {}


def test_fold_adds_whole_floats_and_floats_of_few_digits_exactly(handle):
    schema = StateSchema.build([("n", pa.int64(), False, 0), ("spent", pa.decimal128(20, 2), False, None)])
    handle.state = ValueState(handle.backend, schema, KEYS, "stage tried")
    for fares in ([2.0**53], [1.0, 1.0], [None, 3.0]):
        rows = keyed(k=["a"] * len(fares), fare=fares)
        kept = handle.batch(rows, lambda state, rows: state.fold(rows, n=agg.sum("fare")))
    assert kept["n"].to_list() == [2**53 + 5]
    for fares in ([0.1, 0.2], [0.1] * 7):
        rows = keyed(k=["b"] * len(fares), fare=fares)
        kept = handle.batch(rows, lambda state, rows: state.fold(rows, spent=agg.sum("fare")))
    assert kept["spent"].to_list() == [Decimal("1.00")]


def test_a_sum_that_becomes_infinite_in_its_field_is_refused(handle):
    schema = StateSchema.build([("spent", pa.float32(), False, 0.0)])
    handle.state = ValueState(handle.backend, schema, KEYS, "stage tried")
    rows = keyed(k=["a"] * 4, fare=[1e38] * 4)
    with pytest.raises(InputError, match="The sum 'spent' has become larger than Float32"):
        handle.batch(rows, lambda state, rows: state.fold(rows, spent=agg.sum("fare")))


def test_fold_merges_every_aggregate_across_batches(handle):
    class Folded(State):
        n: int = 0
        total: float = 0.0
        low: float | None = None
        high: float | None = None
        head: float | None = None
        end: float | None = None

    schema = StateSchema.of(Folded)
    handle.state = ValueState(handle.backend, schema, KEYS, "stage tried")
    aggregates = {
        "n": agg.count(), "total": agg.sum("v"), "low": agg.min("v"), "high": agg.max("v"), "head": agg.first("v"),
        "end": agg.last("v"),
    }  # fmt: skip
    work = lambda state, rows: state.fold(rows, **aggregates)  # noqa: E731 - one line, used thrice below
    handle.batch(keyed(k=["a", "b", "a"], v=[None, None, 3.0]), work)
    handle.batch(keyed(k=["a", "b"], v=[-1.0, None]), work)
    result = handle.batch(keyed(k=["a", "b"], v=[2.0, None]), work)
    expected = {
        "a": {"n": 4, "total": 4.0, "low": -1.0, "high": 3.0, "head": 3.0, "end": 2.0},
        "b": {"n": 3, "total": 0.0, "low": None, "high": None, "head": None, "end": None},
    }
    tables = list(scan_values(handle.backend, schema, KEYS, range(GROUPS)))
    assert {row.pop("k"): row for table in tables for row in table.to_pylist()} == expected
    assert {row.pop("k"): row for row in result.to_dicts()} == expected


def test_a_sum_starts_from_nothing_where_the_field_is_null(handle):
    work = lambda state, rows: state.fold(rows, low=agg.sum("v"))  # noqa: E731 - used twice
    handle.batch(keyed(k=["a"], v=[1.0]), work)
    handle.batch(keyed(k=["a"], v=[2.5]), work)
    assert handle.stored()["a"]["low"] == 3.5


# -- misuse


def _put(**columns: list) -> Callable:
    return lambda state, _: state.put(keyed(**columns))


MISUSE = {
    "several rows for one key": _put(k=["a", "a"], number=[1, 2]),
    "no column named like a field": _put(k=["a"], other=[1]),
    "needs the key column k": _put(number=[1]),
    "keys that are not in this batch: \\[\\('c',\\)\\]": _put(k=["a", "c"], number=[1, 2]),
    "not nullable but was given 1 null": _put(k=["a"], number=pl.Series([None], dtype=pl.Int64)),
    "The state has no field 'x'": lambda state, rows: state.fold(rows, x=agg.count()),
    "has no field 'y'": lambda state, rows: state.lag(rows, y="v"),
    "has no column 'w'": lambda state, rows: state.fold(rows, number=agg.sum("w")),
    "no column 'u'": lambda state, rows: state.lag(rows, number="u"),
    "cannot keep amount = mean": lambda state, rows: state.fold(rows, amount=agg.mean("v")),
    "number = min\\(...\\) in a field that cannot be null": lambda state, rows: state.fold(rows, number=agg.min("v")),
    "number = first\\(...\\) in a field": lambda state, rows: state.fold(rows, number=agg.first("v")),
    r"number=sum\('d'\), but that column is Duration": lambda state, rows: state.fold(
        rows.select("k", d=pl.duration(hours=1)), number=agg.sum("d")
    ),
    r"low=min\('l'\), but that column is List\(Int32\), which has no order": lambda state, rows: state.fold(
        rows.select("k", l=pl.concat_list(pl.lit(1))), low=agg.min("l")
    ),
    "A frame was expected, not list": lambda state, _: state.get(["a"]),
}


@pytest.mark.parametrize("message", MISUSE)
def test_misuse_is_told_and_stores_nothing(handle, message):
    with pytest.raises(StageError, match=message):
        handle.batch(keyed(k=["a", "b"], v=[1, 2]), MISUSE[message])
    assert handle.stored() == {}


def test_a_nan_that_pandas_takes_for_a_null_is_said_to_be_one(handle):
    with pytest.raises(StageError, match="'amount' is not nullable") as raised:
        given = pd.DataFrame({"k": ["a"], "amount": [float("nan")]})
        handle.batch(keyed(k=["a"]), lambda state, _: state.put(given))
    assert "a NaN in a pandas frame is a null" in raised.value.next
    handle.batch(keyed(k=["a"], amount=[float("nan")]), lambda state, rows: state.put(rows))
    assert np.isnan(handle.stored()["a"]["amount"])


# -- against a model

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "delete", "fold", "lag"]),
        st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-5, 5) | st.none()), min_size=1, max_size=6),
    ),
    max_size=4,
)


@rounds(3)
@given(st.lists(OPERATIONS, max_size=4))
@settings(max_examples=20)
def test_any_sequence_gives_what_a_dict_gives(round_, batches):
    handle, model = Handle(MemoryBackend()), {}
    for operations in batches:
        frame = keyed(k=list("abcd"))

        def work(state: ValueState, rows: pl.DataFrame, operations=operations) -> None:
            for name, pairs in operations:
                if name == "put":
                    pairs = list({key: (key, value) for key, value in pairs}.values())
                given = keyed(k=[key for key, _ in pairs], v=pl.Series([value for _, value in pairs], dtype=pl.Int64))
                if name == "put":
                    state.put(given.select("k", low="v"))
                    for key, value in pairs:
                        model[key] = {**model.get(key, FRESH), "low": value}
                elif name == "delete":
                    state.delete(given)
                    for key, _ in pairs:
                        model.pop(key, None)
                elif name == "fold":
                    state.fold(given, number=agg.count(), amount=agg.sum("v"))
                    for key, value in pairs:
                        old = model.get(key, FRESH)
                        model[key] = {**old, "number": old["number"] + 1, "amount": old["amount"] + (value or 0)}
                else:
                    lags = state.lag(given, low="v")["low"].to_list()
                    expected = []
                    for key, value in pairs:
                        expected.append(model.get(key, FRESH)["low"])
                        model[key] = {**model.get(key, FRESH), "low": value}
                    assert lags == expected
            assert state.get(rows).to_dicts() == [model.get(key, FRESH) for key in "abcd"]

        handle.batch(frame, work)
        assert handle.stored() == model


@pytest.mark.parametrize("method", ["get", "join", "put"])
def test_rows_without_fields_are_said_to_have_none(method: str):
    class Bare(State):
        lines: ListOf[int]

    state = ValueState(MemoryBackend(), StateSchema.of(Bare), KEYS, "stage tried")
    frame = pl.DataFrame({"k": ["a"]})
    state.begin(frame.with_columns(pl.Series(GROUP, [0], pl.Int32)))
    with pytest.raises(StageError, match="has no fields, only lists"):
        getattr(state, method)(frame)


_ZONES = {
    "UTC": "UTC",
    "Z": "UTC",
    "utc": "utc",
    "Europe/Berlin": "Europe/Berlin",
    "Etc/GMT+5": "Etc/GMT+5",
    "+05:30": "+05:30",
    "-08:00": "-08:00",
    "+0530": "+05:30",
    "+05": "+05:00",
}


@pytest.mark.parametrize("zone", _ZONES)
def test_times_of_every_zone_are_kept_and_come_back_in_it(handle, zone):
    """Also within lists, structs and maps. Polars has no zones without names: functions see such times in UTC."""
    type, kept = pa.timestamp("us", tz=zone), pa.timestamp("us", tz=_ZONES[zone])
    moment = datetime(2024, 7, 1, 1, 30, 0, 7, tzinfo=UTC)
    nested = {
        "at": (type, moment),
        "list": (pa.list_(type), [moment, None]),
        "struct": (pa.struct([("at", type)]), {"at": moment}),
        "map": (pa.map_(pa.string(), type), [("a", moment)]),
    }
    schema = StateSchema.build([(name, given, True, None) for name, (given, _) in nested.items()])
    assert schema.arrow.field("at").type == kept
    handle.state = ValueState(handle.backend, schema, KEYS, "stage tried")
    columns = {name: pa.array([value, None], in_utc(given)) for name, (given, value) in nested.items()}
    batch = keyed(k=["a", "b"])
    handle.batch(batch, lambda state, _: state.put(pa.table({"k": ["a", "b"], **columns})))
    rows = handle.batch(batch, lambda state, frame: state.get(frame))
    assert rows["at"].dt.epoch("us").to_list() == [round(moment.timestamp()) * 1_000_000 + 7, None]
    stored = pa.concat_tables(scan_values(handle.backend, schema, KEYS, range(GROUPS))).sort_by("k")
    for name, (_, value) in nested.items():
        assert stored.column(name).to_pylist() == [value, None], name
        assert stored.schema.field(name).type == schema.arrow.field(name).type


def in_utc(type: pa.DataType) -> pa.DataType:
    """Times of a fixed offset cannot be made from Python everywhere; they are the same ones."""
    if pa.types.is_list(type):
        return pa.list_(in_utc(type.value_type))
    if pa.types.is_map(type):
        return pa.map_(type.key_type, in_utc(type.item_type))
    if pa.types.is_struct(type):
        return pa.struct([(field.name, in_utc(field.type)) for field in type])
    return pa.timestamp("us", tz="UTC")


@pytest.mark.parametrize("zone", ["Mars/Base", "+5:30", "Berlin"])
def test_a_zone_that_there_is_not_is_refused_with_its_field(zone):
    with pytest.raises(PipelineError, match=f"'seen' .* no time zone {re.escape(repr(zone))}"):
        StateSchema.build([("seen", pa.list_(pa.timestamp("us", tz=zone)), True, None)])
