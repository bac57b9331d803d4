"""Fields of every type through the state handle: what is put is what is got, from the next batch and from the
backend."""

from __future__ import annotations

import tracemalloc
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from state_ops.arrow import frames
from state_ops.backends.memory import MemoryBackend
from state_ops.errors import DamageError, PipelineError, StageError
from state_ops.keyed.keyed_state import GROUP, ValueState, scan_values
from state_ops.schema.annotations import renamed_from
from state_ops.schema.key_groups import key_groups
from state_ops.schema.row_codec import decode_rows, encode_rows
from state_ops.schema.state_class import State
from state_ops.schema.state_schema import Part, StateSchema

KEYS = pa.schema([("k", pa.string())])


class Address(State):
    street: str = "unknown"
    number: Annotated[int | None, renamed_from("house")] = None


class Person(State):
    home: Address
    work: Address | None = None
    seen: list[Address]
    scores: dict[str, float]
    tags: list[list[str | None]] = [["a"]]  # noqa: RUF012  # a default, of which every instance gets a copy
    price: Annotated[Decimal, pa.decimal128(12, 2)] = Decimal("1.5")
    at: time
    took: timedelta | None = None
    small: Annotated[int, pa.uint8()] = 3


def test_annotations_become_nested_arrow_fields():
    address = pa.struct([pa.field("street", pa.string(), False), pa.field("number", pa.int64())])
    assert StateSchema.of(Person).arrow.equals(
        pa.schema(
            [
                pa.field("home", address, False),
                pa.field("work", address),
                pa.field("seen", pa.list_(pa.field("item", address, False)), False),
                pa.field("scores", pa.map_(pa.string(), pa.field("value", pa.float64(), False)), False),
                pa.field("tags", pa.list_(pa.field("item", pa.list_(pa.string()), False)), False),
                pa.field("price", pa.decimal128(12, 2), False),
                pa.field("at", pa.time64("us"), False),
                pa.field("took", pa.duration("us")),
                pa.field("small", pa.uint8(), False),
            ]
        )
    )
    assert StateSchema.of(Person).fields[2].parts == (
        Part(("item", "street"), "unknown"),
        Part(("item", "number"), None, ("house",)),
    )
    assert StateSchema.from_json(StateSchema.of(Person).to_json()) == StateSchema.of(Person)


def test_instances_have_defaults_of_their_own_and_nested_states():
    person, other = Person(), Person(home={"street": "Elm"}, work=Address(number=3))
    person.tags[0].append("b")
    person.home.street = "Oak"
    assert Person().tags == [["a"]] and Person().home == Address() == Person.home
    assert (person.scores, person.seen, person.at, person.took) == ({}, [], time(), None)
    assert other.home.street == "Elm" and isinstance(other.home, Address)
    assert other.as_dict()["work"] == {"street": "unknown", "number": 3}
    assert Person(scores=[("a", 1.0)]) == Person(scores={"a": 1.0}), "as a table's rows have a map"
    assert Person(work=Address()) == Person(work={"street": "unknown", "number": None})


@pytest.mark.parametrize(
    ("annotation", "default", "message"),
    [
        (list[int], [1, None], "it holds a None where none may be"),
        (list[int], ["a"], "it is a str, not a int"),
        (list[int], None, "its default is None"),
        (dict[str, int], {"a": 1.5}, "it is a float, not a int"),
        (Address, {"town": "X"}, "it has no field 'town'"),
        (dict[str | None, int], ..., "the keys of .* cannot be None"),
        (list[set], ..., "the type set cannot be stored"),
        (Annotated[Decimal, pa.decimal256(60, 2)], ..., "no frame can hold decimal256"),
        (Annotated[int, pa.uint64()], ..., "no frame can hold uint64"),
        (Annotated[datetime, pa.timestamp("ns")], ..., "no frame can hold timestamp"),
        (Annotated[timedelta, pa.duration("ns")], ..., "no frame can hold duration"),
        (Annotated[list, pa.list_(pa.month_day_nano_interval())], ..., "no frame can hold month_day_nano"),
        (Annotated[dict, pa.list_(pa.int8())], ..., "cannot be stored"),
    ],
)
def test_what_does_not_fit_is_refused_where_the_class_is_defined(annotation, default, message):
    given = {} if default is ... else {"x": default}
    with pytest.raises(PipelineError, match=message):
        type("Bad", (State,), {"__annotations__": {"x": annotation}, **given})


EVERY: list[tuple[pa.DataType, list[Any]]] = [
    (pa.uint8(), [0, 255]),
    (pa.uint16(), [65535]),
    (pa.uint32(), [2**32 - 1]),
    (pa.uint64(), [2**64 - 1]),
    (pa.float16(), [1.5]),
    (pa.float32(), [0.25]),
    (pa.date32(), [date(2024, 2, 29)]),
    (pa.date64(), [date(1969, 12, 31)]),
    (pa.time32("s"), [time(23, 59, 59)]),
    (pa.time32("ms"), [time(0, 0, 0, 1000)]),
    (pa.time64("us"), [time(1, 2, 3, 4)]),
    (pa.time64("ns"), [time(1, 2, 3, 4)]),
    (pa.timestamp("s"), [datetime(2024, 1, 1)]),
    (pa.timestamp("ms"), [datetime(2024, 1, 1, 0, 0, 0, 1000)]),
    (pa.timestamp("us"), [datetime(1900, 1, 1, 0, 0, 0, 1)]),
    (pa.timestamp("ns"), [1_700_000_000_000_000_001]),
    (pa.timestamp("us", tz="Europe/Berlin"), [datetime(2024, 7, 1, tzinfo=UTC)]),
    (pa.duration("s"), [timedelta(days=-1)]),
    (pa.duration("ns"), [1]),
    (pa.decimal32(5, 2), [Decimal("-123.45")]),
    (pa.decimal64(12, 0), [Decimal("123456789012")]),
    (pa.decimal128(38, 10), [Decimal("-1e-10")]),
    (pa.large_string(), ["ü\0"]),
    (pa.binary(), [b"\0\xff"]),
    (pa.large_binary(), [b""]),
    (pa.binary(3), [b"abc"]),
    (pa.null(), [None]),
    (pa.list_(pa.int8()), [[], [1, None]]),
    (pa.large_list(pa.string()), [["a", None, ""]]),
    (pa.list_(pa.int16(), 2), [[1, None]]),
    (pa.map_(pa.string(), pa.int64()), [[], [("a", 1), ("b", None)]]),
    (pa.list_(pa.map_(pa.int8(), pa.list_(pa.string()))), [[[(1, ["x"])], None, []]]),
    (
        pa.struct([("a", pa.int8()), ("b", pa.struct([("c", pa.list_(pa.float64()))]))]),
        [{"a": None, "b": {"c": [0.5]}}],
    ),
]


@pytest.mark.parametrize(("type", "values"), EVERY, ids=[str(type) for type, _ in EVERY])
def test_every_type_survives_the_handle(type, values):
    backend, schema = MemoryBackend(), StateSchema.build([("n", pa.int64(), False, 0), ("x", type, True, None)])
    column = pa.array([*values, None], type)
    n = len(column)
    table = pa.table({"k": [f"k{i}" for i in range(n)], "n": [7] * n, "x": column})

    def batch(names: list[str]) -> tuple[ValueState, pl.DataFrame]:
        state = ValueState(backend, schema, KEYS, "stage tried", lambda table: table)
        keys = pl.DataFrame({"k": names})
        groups = key_groups([pa.array(names)], 8).astype(np.int32)
        state.begin(keys.with_columns(pl.Series(GROUP, groups)))
        return state, keys

    state, _ = batch(table["k"].to_pylist())
    state.put(frames.from_arrow(table))
    state.flush()
    state.barrier()
    stored = pa.concat_tables(scan_values(backend, schema, KEYS, range(8))).sort_by("k")
    assert stored["x"].combine_chunks().equals(column) and stored["n"].to_pylist() == [7] * n

    state, keys = batch([f"k{i}" for i in range(n)] + ["new"])
    if type not in (
        pa.uint64(),
        pa.timestamp("ns"),
        pa.duration("ns"),
        pa.date64(),
    ):  # the first three no State class may have
        assert state.get(keys)["x"].to_pylist() == [*column.cast(frames.canonical_type(type)).to_pylist(), None]
    state.put(keys.head(n).with_columns(n=pl.lit(8)))  # the other field is read and written again
    state.flush()
    state.barrier()
    again = pa.concat_tables(scan_values(backend, schema, KEYS, range(8))).sort_by("k")
    assert again["x"].combine_chunks().equals(column) and again["n"].to_pylist() == [8] * n


def test_a_null_inside_a_list_that_may_hold_none_is_the_stages_error():
    class Strict(State):
        numbers: list[int]

    state = ValueState(MemoryBackend(), StateSchema.of(Strict), KEYS, "stage tried")
    frame = pl.DataFrame({"k": ["a"], "numbers": [[1, None]]})
    state.begin(frame.select("k").with_columns(pl.Series(GROUP, [1])))
    with pytest.raises(StageError, match=r"'numbers\[\]' is not nullable"):
        state.put(frame)
        state.flush()
        state.barrier()


def test_fields_of_another_shape_are_not_taken_for_the_declared_ones():
    state = ValueState(MemoryBackend(), StateSchema.of(Person), KEYS, "stage tried")
    frame = pl.DataFrame({"k": ["a"], "home": [{"street": "Elm", "floor": 3}]})
    state.begin(frame.select("k").with_columns(pl.Series(GROUP, [1])))
    with pytest.raises((StageError, pl.exceptions.InvalidOperationError), match=r"home|struct"):
        state.put(frame)


def test_a_count_that_cannot_be_is_damage_before_anything_is_made_of_that_size():
    schema = StateSchema.build([("x", pa.list_(pa.int64()), False, None)])
    (value,) = encode_rows(schema, pa.table({"x": pa.array([[5] * 3], pa.list_(pa.int64()))}))
    count = value.index(b"\x03\0\0\0", 9)
    damaged = value[:count] + (2**31 - 1).to_bytes(4, "little") + value[count + 4 :]
    tracemalloc.start()
    with pytest.raises(DamageError, match="cut short"):
        decode_rows(schema, [damaged])
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
