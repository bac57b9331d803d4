from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from state_ops.arrow.unfit_values import FIRST_DAY, FIRST_MICRO, LAST_DAY, LAST_MICRO, unfit


def unchecked(values: list[bytes]) -> pa.Array:
    ends = np.cumsum([0, *map(len, values)]).astype(np.int32)
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(values)))


def wide(unscaled: list[int], type: pa.DataType) -> pa.Array:
    data = b"".join(number.to_bytes(type.byte_width, "little", signed=True) for number in unscaled)
    return pa.Array.from_buffers(type, len(unscaled), [None, pa.py_buffer(data)])


DATES = pa.array([FIRST_DAY, FIRST_DAY - 1, None, LAST_DAY, LAST_DAY + 1], pa.int32()).view(pa.date32())
MICROS = pa.array([FIRST_MICRO, FIRST_MICRO - 1, None, LAST_MICRO, LAST_MICRO + 1], pa.int64())
TEXTS = unchecked([b"a", b"he\xfflo", "é".encode(), b"", b"\xed\xa0\x80"])


@pytest.mark.parametrize(
    "column, at",
    [
        (DATES, [1, 4]),
        (MICROS.view(pa.timestamp("us")), [1, 4]),
        (MICROS.view(pa.timestamp("us", tz="UTC")), [1, 4]),
        (TEXTS, [1, 4]),
        (wide([9999, 10_000, -10_000], pa.decimal128(4, 2)), [1, 2]),
        (pa.array([0, 86_400_000_000_000, -1], pa.int64()).view(pa.time64("ns")), [1, 2]),
    ],
    ids=["date", "timestamp", "timestamp-utc", "text", "decimal", "time"],
)
def test_values_that_no_table_holds_are_found_by_row(column, at):
    assert [value.row for value in unfit(pa.table({"c": column}))] == at
    assert [value.row for value in unfit(pa.table({"c": pa.chunked_array([column, column])}))] == [
        *at,
        *(len(column) + row for row in at),
    ]
    cut = column.slice(1)  # an array with an offset
    assert [value.row for value in unfit(pa.table({"c": cut}))] == [row - 1 for row in at if row]


def test_values_inside_of_structs_lists_and_maps_are_found_with_their_path():
    struct = pa.StructArray.from_arrays([TEXTS, DATES], ["t", "d"])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 1, 5], pa.int32()), struct)
    maps = pa.MapArray.from_arrays(pa.array([0, 1, 5], pa.int32()), pa.array(list("abcde")), TEXTS)
    table = pa.table({"l": lists})
    assert [(value.row, value.column) for value in unfit(table)] == [(2, "l.t"), (2, "l.t"), (2, "l.d"), (2, "l.d")]
    assert [(value.row, value.column) for value in unfit(pa.table({"m": maps}))] == [(1, "m.value"), (1, "m.value")]
    assert [value.row for value in unfit(table.slice(2))] == [0, 0, 0, 0]


def test_what_lies_below_a_null_is_not_looked_at():
    hidden = pa.StructArray.from_arrays([TEXTS], ["t"], mask=pa.array([False, True, False, False, True]))
    assert not list(unfit(pa.table({"s": hidden})))


def test_the_problem_names_the_value():
    far = pa.array([2**31 - 1], pa.int32()).view(pa.date32())
    (day,) = unfit(pa.table({"d": far}))
    assert day.problem == "is 5881580-07-11, outside of the years 1 to 9999"
    (text,) = unfit(pa.table({"t": unchecked([b"he\xfflo"])}))
    assert text.problem == r"is not UTF-8: b'he\xfflo'"
    (number,) = unfit(pa.table({"n": wide([12_345_678], pa.decimal128(4, 2))}))
    assert number.problem == f"has more digits than decimal128(4, 2): {Decimal('123456.78')}"


def test_legal_values_of_every_type_pass():
    table = pa.table(
        {"a": [1, None], "b": ["x", None], "c": [1.5, float("nan")], "d": [b"\xff", None], "e": [[1], None]}
    )
    assert not list(unfit(table))
    assert not list(unfit(table.slice(0, 0)))


@pytest.mark.parametrize("at", range(20))
def test_a_byte_beyond_ascii_is_seen_wherever_it_stands(at):
    text = b"a" * at + b"\xff" + b"a" * (19 - at)
    column = unchecked([b"xyz", text, b""])
    assert [value.row for value in unfit(pa.table({"t": column.slice(1)}))] == [0]
    assert not list(unfit(pa.table({"t": column.slice(2)})))
