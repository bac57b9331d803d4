"""What is told of a value without Arrow is what Arrow makes of it, by value and type, and what Arrow refuses is
refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from state_ops.errors import StageError
from state_ops.schema.python_rows import RowReader, as_stored, columns, tuples
from state_ops.schema.state_class import State
from state_ops.schema.state_schema import Field
from tests.tools.sampling import rounds

ZONES = [None, UTC, ZoneInfo("UTC"), ZoneInfo("Europe/Berlin"), timezone(timedelta(hours=5, minutes=30))]


class Leg(State):
    n: int = 0
    at: datetime | None = None


SCALARS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float32(), pa.float64(), pa.string(), pa.binary(), pa.bool_(), pa.date32()),
    *(pa.decimal128(5, 2), pa.decimal128(38, 0), pa.decimal128(38, 38), pa.decimal256(60, 10)),
    *(pa.timestamp(unit, zone) for unit in ("s", "ms", "us") for zone in (None, "UTC", "Europe/Berlin", "+05:30")),
    *(pa.time64("us"), pa.time32("ms"), pa.duration("us"), pa.duration("ms")),
]
SCALAR_TYPES = st.sampled_from(SCALARS)
TYPES = st.recursive(
    SCALAR_TYPES,
    lambda inner: st.one_of(
        st.builds(pa.list_, inner),
        st.builds(pa.map_, SCALAR_TYPES, inner),
        st.builds(lambda n, at: pa.struct([("n", n), ("at", at)]), inner, inner),
    ),
    max_leaves=4,
)

INTEGERS = st.one_of(
    st.integers(-3, 300), st.sampled_from([2**k + d for k in (7, 15, 31, 53, 63, 64, 70) for d in (-1, 0, 1)])
)
FLOATS = st.one_of(st.floats(), st.sampled_from([1.0, -0.0, 2.0**63, 1e39, 3.0]))
DECIMALS = st.one_of(
    st.decimals(-(10**40), 10**40),  # those with a million digits take long to look at
    st.decimals(-1000, 1000, places=2),
    st.sampled_from(
        [
            Decimal("-0"),
            Decimal("0E+90"),
            Decimal("0E-90"),
            Decimal("1E+2"),
            Decimal("999.99"),
            Decimal("1000.00"),
            Decimal("1.990"),
            Decimal("sNaN"),
            Decimal("NaN"),
            Decimal("-Infinity"),
        ]
    ),
)
MOMENTS = st.one_of(
    *(st.datetimes(timezones=st.just(zone), allow_imaginary=True) for zone in ZONES),
    st.sampled_from([datetime(2024, 10, 27, 2, 30, tzinfo=ZONES[3], fold=fold) for fold in (0, 1)]),
    st.sampled_from(
        [datetime(2024, 10, 27, 2, 30, fold=1), datetime.min, datetime.max, datetime.max.replace(tzinfo=ZONES[4])]
    ),
)
OF_NUMPY = st.one_of(
    *(st.builds(kind, st.integers(0, 127)) for kind in (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint64)),
    st.sampled_from(
        [
            np.uint64(2**64 - 1),
            np.int64(-1),
            np.longlong(5),
            np.ulonglong(5),
            np.bool_(True),
            *(np.str_(text) for text in ("ü", "a\0", "\0", "a\0b", "\ud800")),
            *(np.bytes_(data) for data in (b"a", b"a\0", b"\0")),
        ]
    ),
    *(st.builds(kind, FLOATS) for kind in (np.float32, np.float64)),
    st.builds(
        lambda moment, unit: np.datetime64(moment, "us").astype(f"M8[{unit}]"),
        st.datetimes(),
        st.sampled_from(["D", "s", "ms", "us"]),
    ),
    st.sampled_from(
        [
            np.datetime64("NaT"),
            np.datetime64(10**15, "s"),
            np.timedelta64(5, "s"),
            pd.NaT,
            pd.Timestamp("2024-05-01 09:00"),
        ]
    ),
)
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    INTEGERS,
    FLOATS,
    DECIMALS,
    st.text(max_size=4),
    st.sampled_from(["a\ud800", "\ud800"]),
    st.binary(max_size=3),
    st.dates(),
    MOMENTS,
    st.times(),
    st.timedeltas(),
    OF_NUMPY,
)


def of_type(type: pa.DataType) -> st.SearchStrategy[Any]:
    """Values that may fit the type, and some that do not."""
    if pa.types.is_list(type):
        return st.one_of(st.lists(of_type(type.value_type), max_size=4), ATOMS, st.tuples(of_type(type.value_type)))
    if pa.types.is_map(type):
        pairs = st.lists(st.tuples(of_type(type.key_type).filter(_may_be_key), of_type(type.item_type)), max_size=3)
        return st.one_of(pairs.map(dict), pairs, ATOMS)
    if pa.types.is_struct(type):
        parts = {part.name: of_type(part.type) for part in type}
        legs = st.builds(lambda n, at: Leg(n=n, at=at), *parts.values())
        return st.one_of(st.fixed_dictionaries({}, optional={**parts, "more": INTEGERS}), legs, ATOMS)
    return st.one_of(ATOMS, _natural(type), _natural(type))


def _natural(type: pa.DataType) -> st.SearchStrategy[Any]:
    kinds = [
        (pa.types.is_integer, st.one_of(INTEGERS, FLOATS, OF_NUMPY)),
        (pa.types.is_floating, st.one_of(FLOATS, INTEGERS, OF_NUMPY)),
        (pa.types.is_decimal, st.one_of(DECIMALS, INTEGERS)),
        (pa.types.is_timestamp, st.one_of(MOMENTS, OF_NUMPY)),
        (pa.types.is_date, st.one_of(st.dates(), MOMENTS)),
        (pa.types.is_string, st.one_of(st.text(max_size=4), OF_NUMPY)),
        (pa.types.is_binary, st.one_of(st.binary(max_size=3), OF_NUMPY)),
        (pa.types.is_duration, st.timedeltas()),
        (pa.types.is_time, st.times()),
    ]
    return next((values for is_kind, values in kinds if is_kind(type)), ATOMS)


def _may_be_key(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:  # a signalling NaN
        return False
    return True


def shown(make: Any) -> str:
    """The value with all that its types show, or that it is refused. (`repr` tells 1 from 1.0 and from NumPy's, zones
    and folds.)"""
    try:
        return repr(make())
    except (StageError, OverflowError):
        return "refused"


def both(type: pa.DataType, value: Any, nullable: bool) -> tuple[str, str]:
    field = Field("x", type, nullable, None)
    reader = RowReader([field], "here")
    by_arrow = shown(lambda: tuples(columns([field], [(value,)], lambda _: "it", "here"))[0])
    return shown(lambda: reader.read((value,), lambda: "it")), by_arrow


@rounds(12)
@settings(max_examples=34)
@given(st.data(), TYPES, st.booleans())
def test_a_value_is_read_as_arrow_reads_it(round_: int, data: st.DataObject, type: pa.DataType, nullable: bool) -> None:
    value = data.draw(of_type(type))
    in_python, by_arrow = both(type, value, nullable)
    assert in_python == by_arrow


@rounds(3)
@settings(max_examples=34)
@given(st.data(), TYPES)
def test_many_values_are_taken_as_arrow_gives_them_back(round_: int, data: st.DataObject, type: pa.DataType) -> None:
    rows = [(value,) for value in data.draw(st.lists(of_type(type), max_size=4))]
    field = Field("x", type, True, None)
    try:
        table = columns([field], rows, lambda number: f"row {number}", "here")
        by_arrow = tuples(table)
    except (StageError, OverflowError):
        return
    assert repr(as_stored(table, [field], rows)) == repr(by_arrow)
