from __future__ import annotations

import json
import pickle
from decimal import Decimal
from typing import Annotated, Any

import pyarrow as pa
import pytest

from state_ops.errors import DamageError
from state_ops.schema import evolution
from state_ops.schema.annotations import renamed_from
from state_ops.schema.descriptors import Collection
from state_ops.schema.row_codec import decode_rows, encode_rows
from state_ops.schema.state_class import State
from state_ops.schema.state_schema import StateSchema


def _schema_of(type: pa.DataType, nullable: bool = True) -> StateSchema:
    return StateSchema.build([("x", type, nullable, None)])


@pytest.mark.parametrize(
    ("old", "new", "value", "becomes"),
    [
        (pa.int8(), pa.int64(), -128, -128),
        (pa.uint8(), pa.int16(), 255, 255),
        (pa.uint32(), pa.uint64(), 2**32 - 1, 2**32 - 1),
        (pa.int32(), pa.float64(), 2**31 - 1, float(2**31 - 1)),
        (pa.int16(), pa.float32(), -(2**15), float(-(2**15))),
        (pa.float32(), pa.float64(), 0.25, 0.25),
        (pa.decimal128(5, 2), pa.decimal128(38, 2), Decimal("-999.99"), Decimal("-999.99")),
        (pa.decimal32(5, 2), pa.decimal128(6, 2), Decimal("1.25"), Decimal("1.25")),
        (pa.string(), pa.large_string(), "é", "é"),
        (pa.list_(pa.int8()), pa.large_list(pa.int32()), [1, None], [1, None]),
        (pa.list_(pa.int8(), 2), pa.list_(pa.int16(), 2), [1, None], [1, None]),
        (pa.map_(pa.int8(), pa.float32()), pa.map_(pa.int64(), pa.float64()), [(1, 0.5)], [(1, 0.5)]),
        (
            pa.struct([("a", pa.int8()), ("gone", pa.string())]),
            pa.struct([pa.field("new", pa.int8(), False), ("a", pa.int64())]),
            {"a": 1, "gone": "x"},
            {"new": 0, "a": 1},
        ),
        (
            pa.map_(pa.string(), pa.list_(pa.struct([("a", pa.int8())]))),
            pa.map_(pa.string(), pa.list_(pa.struct([("b", pa.string()), ("a", pa.int16())]))),
            [("k", [{"a": 1}, None]), ("l", None)],
            [("k", [{"b": None, "a": 1}, None]), ("l", None)],
        ),
    ],
)
def test_what_is_wider_reads_what_was_written(old, new, value, becomes):
    before, after = _schema_of(old), _schema_of(new)
    assert evolution.obstacles(before, after) == []
    written = encode_rows(before, pa.table({"x": pa.array([value, None, value], old)}))
    newest = encode_rows(after, pa.table({"x": pa.array([becomes], new)}))
    read = decode_rows(after.reading([before]), [written[0], newest[0], *written[1:]])
    assert read.schema.equals(after.arrow)
    assert read["x"].to_pylist() == [becomes, becomes, None, becomes]
    assert encode_rows(after, read)[1] == newest[0]
    assert evolution.obstacles(after, before), "the way back is none"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (pa.int64(), pa.int32()),
        (pa.int64(), pa.float64()),
        (pa.int32(), pa.float32()),
        (pa.int8(), pa.uint16()),
        (pa.uint32(), pa.int32()),
        (pa.float64(), pa.float32()),
        (pa.float64(), pa.int64()),
        (pa.decimal128(10, 2), pa.decimal128(12, 3)),
        (pa.decimal128(10, 2), pa.decimal128(9, 2)),
        (pa.string(), pa.binary()),
        (pa.large_string(), pa.string()),
        (pa.bool_(), pa.int8()),
        (pa.date32(), pa.timestamp("us")),
        (pa.timestamp("ms"), pa.timestamp("us")),
        (pa.timestamp("us"), pa.timestamp("us", tz="UTC")),
        (pa.list_(pa.int8()), pa.int8()),
        (pa.list_(pa.int8()), pa.list_(pa.int8(), 1)),
        (pa.list_(pa.int8(), 1), pa.list_(pa.int8(), 2)),
        (pa.map_(pa.string(), pa.int8()), pa.struct([("key", pa.string()), ("value", pa.int8())])),
        (pa.struct([("a", pa.int64())]), pa.struct([("a", pa.int8())])),
        (pa.list_(pa.int8()), pa.list_(pa.field("item", pa.int8(), False))),
    ],
)
def test_what_could_lose_a_value_is_an_obstacle(old, new):
    assert evolution.obstacles(_schema_of(old), _schema_of(new))


def test_an_obstacle_names_the_innermost_field():
    def nested(type: pa.DataType) -> StateSchema:
        return _schema_of(pa.list_(pa.struct([("a", pa.map_(pa.string(), type))])))

    (obstacle,) = evolution.obstacles(nested(pa.int64()), nested(pa.int8()))
    assert obstacle == "field x.item.a.value changed its type from int64 to int8"
    (obstacle,) = evolution.obstacles(_schema_of(pa.int8()), _schema_of(pa.int8(), nullable=False))
    assert obstacle == "field x was nullable and no longer is"


class Old(State):
    a: int = 0
    b: str = "b"
    stops: list[Annotated[dict, pa.struct([("at", pa.string()), ("by", pa.int8())])]]


class Stop(State):
    place: Annotated[str | None, renamed_from("at", "where")] = None
    by: int | None = None
    gate: str = "A1"


class New(State):
    b: Annotated[int, renamed_from("a")] = 5
    c: str | None = "c"
    stops: list[Stop]


def test_an_old_name_that_is_another_fields_now_is_not_taken_for_the_renamed_one():
    assert evolution.obstacles(StateSchema.of(Old), StateSchema.of(New)) == [
        "field b changed its type from string to int64"
    ]

    class Beside(State):
        b: str = "b"
        d: Annotated[int, renamed_from("b")] = 5

    assert evolution.obstacles(StateSchema.of(Old), StateSchema.of(Beside)) == []


def test_a_field_that_may_be_either_of_two_old_ones_is_refused():
    class Both(State):
        a: int = 0
        b: int = 0
        legs: list[Annotated[dict, pa.struct([("at", pa.string()), ("place", pa.string())])]]

    class Either(State):
        b: Annotated[int, renamed_from("a")] = 0
        legs: list[Stop]

    both, either = StateSchema.of(Both), StateSchema.of(Either)
    first, second = evolution.obstacles(both, either)
    assert first.startswith("field b is ambiguous, since the state has b and a") and "renamed_from('a')" in first
    assert second.startswith("field legs.item.place is ambiguous, since the state has place and at")

    class Neither(State):
        c: Annotated[int, renamed_from("a", "b")] = 0

    (obstacle,) = evolution.obstacles(both, StateSchema.of(Neither))
    assert "since the state has a and b" in obstacle

    class Kept(State):
        """Its declaration was left standing, and another field has the old name now."""

        a: int = 0
        b: Annotated[int, renamed_from("a")] = 0
        legs: list[Annotated[dict, pa.struct([("at", pa.string()), ("place", pa.string())])]]

    kept = StateSchema.of(Kept)
    assert evolution.obstacles(both, kept) == []
    values = encode_rows(both, pa.table({"a": [1], "b": [2], "legs": pa.array([[]], both.arrow.field("legs").type)}))
    assert decode_rows(kept.reading([both]), values).select(["a", "b"]).to_pylist() == [{"a": 1, "b": 2}]
    on_record = either.reading([both])  # as an earlier release went on: what it has written is read as it read it
    assert decode_rows(on_record, values)["b"].to_pylist() == [2]


class Renamed(State):
    total: Annotated[int, renamed_from("a")] = 5
    c: str | None = "c"
    stops: list[Stop]


def _row(**values: Any) -> pa.Table:
    return pa.Table.from_pylist([Old(**values).as_dict()], StateSchema.of(Old).arrow)


def test_renamed_and_added_fields_also_inside_of_lists():
    old, new = StateSchema.of(Old), StateSchema.of(Renamed)
    assert evolution.obstacles(old, new) == []
    values = encode_rows(old, _row(a=3, stops=[{"at": "EWR", "by": 1}, {"at": None, "by": None}]))
    expected = {
        "total": 3,
        "c": "c",
        "stops": [{"place": "EWR", "by": 1, "gate": "A1"}, {"place": None, "by": None, "gate": "A1"}],
    }
    reading = new.reading([old])
    on_record = evolution.from_record(evolution.recorded(reading))
    for schema in (reading, pickle.loads(pickle.dumps(reading)), on_record):
        assert schema == new and schema.schema_id == new.schema_id and hash(schema) == hash(new)
        assert decode_rows(schema, values).to_pylist() == [expected]
    assert "field a is called total now" in old.differences(new)


def test_a_field_that_was_dropped_and_added_again_is_a_new_one():
    with_, without = (
        StateSchema.build([("k", pa.int8(), False, 0), *more]) for more in ([("x", pa.int8(), False, 1)], [])
    )
    again = StateSchema.build([("k", pa.int8(), False, 0), ("x", pa.int8(), False, 9)])
    (value,) = encode_rows(with_, pa.table({"k": pa.array([4], pa.int8()), "x": pa.array([7], pa.int8())}))
    assert decode_rows(again.reading([with_, without]), [value]).to_pylist() == [{"k": 4, "x": 9}]
    assert decode_rows(again.reading([with_]), [value]).to_pylist() == [{"k": 4, "x": 7}]


def test_a_chain_grows_only_where_the_schema_changes():
    old, new = _schema_of(pa.int8()), _schema_of(pa.int16())
    first = evolution.successor(evolution.from_record([{"schema": old.to_json()}]), old)
    assert first.older == ()
    second = evolution.successor(evolution.from_record(evolution.recorded(first)), new)
    assert second.older == (old,)
    third = evolution.successor(evolution.from_record(evolution.recorded(second)), new)
    assert third.older == (old,)


def test_a_value_of_a_schema_outside_of_the_chain_is_damage():
    (value,) = encode_rows(_schema_of(pa.int64()), pa.table({"x": [1]}))
    (old,) = encode_rows(_schema_of(pa.int8()), pa.table({"x": pa.array([1], pa.int8())}))
    with pytest.raises(DamageError, match="another schema"):
        decode_rows(_schema_of(pa.int16()).reading([_schema_of(pa.int8())]), [old, value])


@pytest.mark.parametrize("parts", [{"x": [{}]}, {"x": [{"path": ["no"], "default": 1, "renamed": []}]}, {"x": 5}])
def test_a_record_that_cannot_be_read_is_damage(parts):
    entry = {"schema": _schema_of(pa.list_(pa.int8())).to_json(), "parts": parts}
    with pytest.raises(DamageError, match="What a checkpoint says"):
        evolution.from_record([entry])


_KEYS = (
    pa.bool_(),
    pa.int8(),
    pa.string(),
    pa.binary(),
    pa.date32(),
    pa.timestamp("us"),
    pa.timestamp("us", tz="UTC"),
    pa.decimal128(20, 3),
)


@pytest.mark.parametrize("key", [None, *_KEYS], ids=str)
def test_a_list_or_map_is_on_record_with_its_key_and_all_schemas(key):
    schema = _schema_of(pa.int16()).reading([_schema_of(pa.int8())])
    declared = Collection("spent", "list" if key is None else "map", key, schema, None)
    again = Collection.from_json("spent", json.loads(json.dumps(declared.to_json())))
    assert again == declared and again.schema.older == schema.older and str(again) == str(declared)
