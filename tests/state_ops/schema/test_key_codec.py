from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state_ops.errors import DamageError, PipelineError
from state_ops.schema.key_codec import (
    check_key_type,
    decode_floats,
    decode_keys,
    encode_floats,
    encode_int64,
    encode_keys,
    group_prefix,
)
from tests.state_ops.schema.test_row_codec import VALUES

# Few letters, so that prefixes, zeros and 0xFF meet often.
TRICKY = {
    pa.string(): st.text("\0\x01a\u00ff", max_size=5) | st.text(max_size=8),
    pa.binary(): st.lists(st.sampled_from([0, 1, 0xFE, 0xFF]), max_size=5).map(bytes) | st.binary(max_size=8),
}
KEYS = {type: TRICKY.get(type, values) for type, values in VALUES.items() if not pa.types.is_floating(type)}


@st.composite
def keys(draw) -> tuple[list[pa.DataType], list[tuple]]:
    types = draw(st.lists(st.sampled_from(list(KEYS)), min_size=1, max_size=4))
    row = st.tuples(*(KEYS[type] for type in types))
    rows = draw(st.lists(row, min_size=1, max_size=12))
    # Rows that share their first columns, so that the later ones decide.
    shared = [(*rows[0][:-1], other[-1]) for other in rows]
    return types, rows + shared


def _columns(types, rows):
    # An offset and two chunks, as a slice of a shuffled batch has them.
    columns = []
    for i, type in enumerate(types):
        values = [row[i] for row in rows]
        column = pa.array(values[:1] + values, type).slice(1) if values else pa.array([], type)
        columns.append(pa.chunked_array([column.slice(0, len(rows) // 2), column.slice(len(rows) // 2)], type))
    return columns


def _sortable(row):
    return tuple(value.encode() if isinstance(value, str) else value for value in row)


@given(keys(), st.data())
@settings(max_examples=300)
def test_keys_come_back_and_sort_as_their_tuples(case, data):
    types, rows = case
    groups = np.array(data.draw(st.lists(st.integers(0, 32767), min_size=len(rows), max_size=len(rows))), np.uint16)
    encoded = encode_keys(_columns(types, rows), groups, 3)
    assert len(encoded) == len(rows)
    again, columns = decode_keys(encoded, types)
    assert again.dtype == np.uint16
    assert again.tolist() == groups.tolist()
    assert [column.type for column in columns] == types
    assert list(zip(*(column.to_pylist() for column in columns), strict=True)) == rows

    same_group = encode_keys(_columns(types, rows), np.zeros(len(rows), np.uint16), 3)
    by_key = sorted(zip(same_group, map(_sortable, rows), strict=True))
    assert [row for _, row in by_key] == sorted(map(_sortable, rows))
    assert all((a == b) == (x == y) for (a, x), (b, y) in pairwise(by_key))
    # Self-delimiting: no key begins another, so that what follows a key (a list's or a map's part) stays its own.
    assert not any(b != a and b.startswith(a) for a in same_group for b in same_group)


def test_a_group_and_state_is_one_range():
    for group in (0, 1, 127, 255, 32767):
        for state_id in (0, 1, 255):
            low, high = group_prefix(group, state_id), group_prefix(group, state_id + 1)
            for value in (-(1 << 63), -1, 0, (1 << 63) - 1):
                key = encode_keys([pa.array([value])], np.array([group], np.uint16), state_id)[0]
                assert low <= key < high
                assert key == low + encode_int64(value)
    assert group_prefix(3, 256) == group_prefix(4, 0)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_int64_order(values):
    assert sorted(values, key=encode_int64) == sorted(values)


def test_no_rows():
    assert encode_keys([pa.array([], pa.string())], np.array([], np.uint16), 0) == []
    groups, (column,) = decode_keys([], [pa.string()])
    assert (groups.dtype, len(groups), column) == (np.uint16, 0, pa.array([], pa.string()))


@pytest.mark.parametrize(
    "type", [pa.float32(), pa.float64(), pa.timestamp("ns"), pa.uint8(), pa.large_string(), pa.list_(pa.int8())]
)
def test_other_types_are_no_keys(type):
    with pytest.raises(PipelineError, match=r"'tail' is .*, which cannot be a key"):
        check_key_type("tail", type)
    with pytest.raises(PipelineError, match="cannot be a key"):
        encode_keys([pa.array([None], type)], np.zeros(1, np.uint16), 0)


def test_a_null_is_no_key():
    with pytest.raises(PipelineError, match="Key column 2 of 2 holds 1 null"):
        encode_keys([pa.array([1, 2]), pa.array(["a", None])], np.zeros(2, np.uint16), 0)


TYPES = [pa.int16(), pa.string(), pa.bool_(), pa.decimal128(5, 2), pa.binary(), pa.timestamp("us")]
ROW = (1, "a\0é", True, Decimal("1.25"), b"\0\0", datetime(2020, 1, 1))
KEY = encode_keys([pa.array([v], t) for v, t in zip(ROW, TYPES, strict=True)], np.array([5], np.uint16), 1)[0]


def test_every_key_cut_short_or_too_long_is_damage():
    for size in range(len(KEY)):
        with pytest.raises(DamageError):
            decode_keys([KEY, KEY[:size], KEY], TYPES)
    for size in range(len(KEY)):
        with pytest.raises(DamageError):
            decode_keys([KEY[:size]], TYPES)
    with pytest.raises(DamageError, match="after its last column"):
        decode_keys([KEY + b"\0"], TYPES)


@given(st.integers(0, len(KEY) - 1), st.integers(1, 255), st.binary(max_size=60))
@settings(max_examples=300)
def test_any_byte_flipped_is_another_key_or_damage(offset, mask, noise):
    flipped = bytearray(KEY)
    flipped[offset] ^= mask
    for bad in (bytes(flipped), noise, KEY[:5] + noise):
        try:
            groups, columns = decode_keys([bad], TYPES)
        except DamageError:
            continue
        for column in columns:
            column.validate(full=True)
        assert encode_keys(columns, groups, bad[2]) == [bad]


def test_utc_and_local_timestamps_have_the_same_bytes():
    at = datetime(2020, 1, 1)
    local, utc = pa.array([at], pa.timestamp("us")), pa.array([at.replace(tzinfo=UTC)], pa.timestamp("us", tz="UTC"))
    assert encode_keys([local], np.zeros(1, np.uint16), 0) == encode_keys([utc], np.zeros(1, np.uint16), 0)


@given(st.lists(st.floats(), min_size=1))
def test_floats_by_value_are_whole_numbers_in_their_order(values):
    encoded = encode_floats(np.array(values))
    again = decode_floats(encoded).tolist()
    assert [repr(value) for value in again] == [
        repr(0.0 if value == 0 else abs(value) if value != value else value) for value in values
    ]
    ordered = sorted(again, key=lambda value: (value != value, value))
    assert [repr(value) for value in decode_floats(np.sort(encoded)).tolist()] == [repr(value) for value in ordered]
    assert len(set(encoded.tolist())) == len({repr(value) for value in again})
