from __future__ import annotations

import math
import pickle
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Annotated, ClassVar, Optional

import pyarrow as pa
import pytest

from state_ops.errors import DamageError, PipelineError
from state_ops.schema.state_class import State, Timestamp
from state_ops.schema.state_schema import StateSchema


class Aircraft(State):
    legs: int = 0
    dep_delay_min: float = 0.0
    last_dest: str | None = None
    last_departure: Timestamp | None = None


class Everything(State):
    VERSION: ClassVar[int] = 3
    a: int
    b: float
    c: str
    d: bytes
    e: bool
    f: datetime
    g: date
    h: Timestamp
    i: Optional[int]  # noqa: UP045  # the older spelling is as good
    j: Annotated[int, pa.int8()] = 7
    k: Annotated[float, pa.float32()] | None = 0.5
    l: Annotated[Decimal, pa.decimal128(10, 2)] = Decimal("1.50")  # noqa: E741
    m: Annotated[str | None, pa.string()]
    n: Annotated[datetime, pa.timestamp("us")] = datetime(2020, 1, 2)
    date: date | None = None


def test_annotations_become_arrow_fields():
    assert StateSchema.of(Aircraft).arrow.equals(
        pa.schema(
            [
                pa.field("legs", pa.int64(), False),
                pa.field("dep_delay_min", pa.float64(), False),
                pa.field("last_dest", pa.string()),
                pa.field("last_departure", pa.timestamp("us", tz="UTC")),
            ]
        )
    )


def test_fields_without_default_get_null_or_the_zero_of_their_type():
    row = Everything().as_dict()
    assert list(row) == [*"abcdefghijklmn", "date"]
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert list(row.values())[:9] == [0, 0.0, "", b"", False, epoch, date(1970, 1, 1), epoch, None]
    assert list(row.values())[9:] == [7, 0.5, Decimal("1.50"), None, datetime(2020, 1, 2), None]
    assert [f.name for f in StateSchema.of(Everything).fields if f.nullable] == ["i", "k", "m", "date"]


def test_rows_compare_print_and_change_like_dataclasses():
    row = Aircraft(legs=1, last_dest="IAH")
    assert row == Aircraft(legs=1, last_dest="IAH") != Aircraft(legs=2)
    assert repr(row) == "Aircraft(legs=1, dep_delay_min=0.0, last_dest='IAH', last_departure=None)"
    row.legs += 1
    assert row.legs == 2
    assert Aircraft.legs == 0
    assert pickle.loads(pickle.dumps(row)) == row


@pytest.mark.parametrize("misspell", [lambda: Aircraft(leg=1), lambda: setattr(Aircraft(), "leg", 1)])
def test_a_misspelt_field_is_named_with_those_there_are(misspell):
    with pytest.raises(PipelineError, match=r"Aircraft has no field 'leg'(.|\n)*legs, dep_delay_min"):
        misspell()


def test_a_class_in_a_function_sees_the_functions_names():
    Small = Annotated[int, pa.int16()]

    class Local(State):
        n: Small = 0

    assert StateSchema.of(Local).fields[0].type == pa.int16()


def test_a_subclass_adds_fields_and_may_change_a_default():
    class Tracked(Aircraft):
        legs = 10
        hub: str = "EWR"

    assert Tracked() == Tracked(legs=10, hub="EWR")
    assert StateSchema.of(Tracked).fields[-1].name == "hub"
    assert Aircraft().legs == 0


def _define(annotation, **attributes):
    return type("Bad", (State,), {"__annotations__": {"x": annotation}, **attributes})


@pytest.mark.parametrize(
    ("annotation", "attributes", "message"),
    [
        (set[int], {}, r"Bad.x: the type set\[int\] cannot be stored"),
        (int | str, {}, r"Bad.x: the type int \| str cannot be stored"),
        (Decimal, {}, "Bad.x: the type Decimal cannot be stored"),
        (Annotated[int, pa.string()], {}, "Bad.x: .*cannot be stored"),
        (Annotated[datetime, pa.date32()], {}, "Bad.x: .*cannot be stored"),
        ("NoSuchName", {}, r"Bad.x: the annotation 'NoSuchName' cannot be resolved"),
        (int, {"x": None}, r"Bad.x: its default is None but its type is not nullable"),
        (int, {"x": "1"}, r"Bad: The default '1' of the state field 'x' does not fit int64"),
        (int, {"x": True}, "does not fit int64: it is a bool"),
        (int, {"x": 1 << 63}, "does not fit int64"),
        (Annotated[int, pa.int8()], {"x": 128}, "does not fit int8"),
        (datetime, {"x": datetime(2020, 1, 1)}, "it has no time zone"),
    ],
)
def test_what_cannot_be_stored_is_refused_where_the_class_is_defined(annotation, attributes, message):
    with pytest.raises(PipelineError, match=message):
        _define(annotation, **attributes)


@pytest.mark.parametrize("name", ["_hidden", "''", "as_dict"])
def test_refused_names(name):
    with pytest.raises(PipelineError, match=name):
        type("Bad", (State,), {"__annotations__": {name.strip("'"): int}})


def test_no_schema_without_fields_or_of_another_class():
    with pytest.raises(PipelineError, match="no fields"):
        StateSchema.of(type("Empty", (State,), {}))
    with pytest.raises(PipelineError, match="not a state class"):
        StateSchema.of(dict)
    with pytest.raises(PipelineError, match="'a' is defined twice"):
        StateSchema.build([("a", pa.int64(), False, 0), ("a", pa.int64(), False, 0)])


def test_json_is_canonical_and_its_id_is_stable():
    schema = StateSchema.build(
        [("n", pa.int32(), False, None), ("s", pa.string(), True, None), ("b", pa.binary(), False, b"\0")]
    )
    assert (
        schema.to_json() == '{"fields":[{"default":0,"name":"n","nullable":false,"type":"int32"},'
        '{"default":null,"name":"s","nullable":true,"type":"string"},'
        '{"default":"00","name":"b","nullable":false,"type":"binary"}]}'
    )
    # State on storage is found by this id: if it changes, all of it is unreadable.
    assert schema.schema_id.hex() == "98ed9e3175034602"


@pytest.mark.parametrize(
    ("type", "default"),
    [
        (pa.float64(), math.nan),
        (pa.float64(), -math.inf),
        (pa.float32(), 0.1),
        (pa.decimal128(38, 3), Decimal("-12345678901234567890.125")),
        (pa.timestamp("us", tz="UTC"), datetime(1900, 1, 1, tzinfo=UTC)),
        (pa.timestamp("us", tz="UTC"), datetime(2020, 1, 1, tzinfo=timezone(timedelta(hours=2)))),
        (pa.timestamp("us"), datetime(2020, 1, 1, 1, 2, 3, 4)),
        (pa.date32(), date(1969, 12, 31)),
        (pa.string(), "ü\0"),
    ],
)
def test_json_round_trip(type, default):
    for schema in (StateSchema.build([("x", type, False, default)]), StateSchema.build([("x", type, True, None)])):
        again = StateSchema.from_json(schema.to_json())
        assert again == schema
        assert again.schema_id == schema.schema_id == pickle.loads(pickle.dumps(schema)).schema_id
        assert hash(again) == hash(schema)


def test_all_fields_round_trip_through_json():
    schema = StateSchema.of(Everything)
    assert StateSchema.from_json(schema.to_json()) == schema


def test_zero_and_negative_zero_are_different_schemas():
    a, b = (StateSchema.build([("x", pa.float64(), False, zero)]) for zero in (0.0, -0.0))
    assert a != b
    assert a.schema_id != b.schema_id


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"fields":[{"name":"x"}]}',
        '{"fields":[{"name":"x","type":"list","nullable":true,"default":null}]}',
        '{"fields":[{"name":"x","type":"decimal128(99, 2)","nullable":true,"default":null}]}',
        '{"fields":[{"name":"x","type":"int64","nullable":false,"default":"one"}]}',
        '{"fields":[{"name":"x","type":"binary","nullable":false,"default":"zz"}]}',
        '{"fields":[{"name":"x","type":"int64","nullable":1,"default":0}]}',
    ],
)
def test_damaged_json_is_damage(text):
    with pytest.raises(DamageError):
        StateSchema.from_json(text)


def test_differences_are_said_field_by_field():
    old = StateSchema.build(
        [
            ("a", pa.int32(), False, 0),
            ("b", pa.string(), False, ""),
            ("c", pa.int64(), False, 1),
            ("d", pa.int64(), True, None),
        ]
    )
    new = StateSchema.build(
        [
            ("c", pa.int64(), False, 2),
            ("a", pa.int64(), False, 0),
            ("b", pa.string(), True, ""),
            ("e", pa.bool_(), True, None),
        ]
    )
    assert old.differences(new) == [
        "field a changed its type from int32 to int64",
        "field b became nullable",
        "field c changed its default from 1 to 2",
        "field d (int64) was removed",
        "field e (bool, nullable) was added",
        "the order of the fields changed from a, b, c to c, a, b",
    ]
    assert old.differences(old) == []


def test_a_class_defined_in_a_notebook_travels_to_workers():
    # cloudpickle sends such a class by value: it builds an empty subclass first and fills it in afterwards.
    from pyspark import cloudpickle

    namespace: dict = {"State": State, "__name__": "__main__"}
    exec("class Seen(State):\n    count: int = 3\n    last: str | None", namespace)
    worker = (
        "import pickle, sys; seen = pickle.load(sys.stdin.buffer); print(seen(last='x'),"
        " seen.__weir_schema__.to_json())"
    )
    sent = cloudpickle.dumps(namespace["Seen"])
    there = subprocess.run([sys.executable, "-c", worker], input=sent, capture_output=True, check=True)
    assert there.stdout.decode().split(" {") == [
        "Seen(count=3, last='x')",
        StateSchema.of(namespace["Seen"]).to_json()[1:] + "\n",
    ]
