"""State rows as RocksDB values: a fixed binary format, packed and unpacked a whole Arrow batch at a time.

    version   1 byte    the format, FORMAT_VERSION
    schema    8 bytes   the id of the StateSchema that the row was written with
    nulls     1 bit per field, in field order, least significant bit first, padded to whole bytes; 1 is null
    fixed     per field, little endian: int8..int64, float32, float64 as they are, bool 1 byte, date32 as int32 days,
              timestamp as int64 microseconds, decimal128 as 16 bytes of its unscaled value, string and binary the uint32
              length of their bytes; all zero where null
    variable  the bytes of the string and binary fields, in field order

The format is canonical: equal rows have equal bytes. It carries no checksum, RocksDB's blocks have theirs; what decoding
checks is that every byte has a meaning, so that damage or a foreign value is never read as a row of the wrong shape.

No Python loop runs over values: rows of unequal length are gathered and scattered by numpy, as unaligned overlapping views
of one-element items (`items`), which moves whole rows with memcpy and needs no index per byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from state_ops.errors import DamageError, PipelineError, StageError
from state_ops.schema import StateSchema

FORMAT_VERSION = 1
SCHEMA_ID = slice(1, 9)  # where a value holds the id of its schema

_MAX_VARIABLE_BYTES = 2**31 - 1  # the reach of the int32 offsets of Arrow's string and binary


# Arrow columns as numpy arrays, also used by keys and key_groups


def is_variable(type: pa.DataType) -> bool:
    """Whether values of this type have a length of their own: string and binary."""
    return pa.types.is_string(type) or pa.types.is_binary(type)


def numpy_type(type: pa.DataType) -> np.dtype:
    """The dtype of `fixed_values`: little-endian; bool as uint8, date32 as int32, timestamp as int64, decimal as V16."""
    if pa.types.is_boolean(type):
        return np.dtype("u1")
    if pa.types.is_decimal128(type):
        return np.dtype("V16")
    kind = "f" if pa.types.is_floating(type) else "i"
    return np.dtype(f"<{kind}{type.bit_width // 8}")


def contiguous(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The column as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def nulls_of(array: pa.Array) -> np.ndarray | None:
    """bool[n], true where null; None if nothing is."""
    return array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None


def fixed_values(array: pa.Array) -> np.ndarray:
    """The raw values of a fixed-width array, slices respected; undefined where null. A view where Arrow has whole bytes."""
    dtype, buffer = numpy_type(array.type), array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array), dtype)
    if pa.types.is_boolean(array.type):
        bits = np.frombuffer(buffer, np.uint8)[array.offset // 8 : (array.offset + len(array) + 7) // 8]
        first = array.offset % 8
        return np.unpackbits(bits, bitorder="little")[first : first + len(array)]
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


def variable_values(array: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of a string or binary array: its bytes, and each value's int64 start in them and length; length 0 where null."""
    _, offsets, data = array.buffers()
    if offsets is None or not len(array):
        return np.zeros(0, np.uint8), np.zeros(len(array), np.int64), np.zeros(len(array), np.int64)
    ends = np.frombuffer(offsets, "<i4", len(array) + 1, array.offset * 4).astype(np.int64)
    lengths = np.diff(ends)
    if (nulls := nulls_of(array)) is not None:
        lengths[nulls] = 0  # Arrow allows any bytes behind a null
    return np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8), ends[:-1], lengths


def array_of_fixed(type: pa.DataType, values: np.ndarray, nulls: np.ndarray | None = None) -> pa.Array:
    """The inverse of `fixed_values` and `nulls_of`."""
    n = len(values)
    if pa.types.is_boolean(type):
        values = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(type, n, [_validity(nulls), _buffer(values)])


def array_of_variable(
    type: pa.DataType, data: np.ndarray, lengths: np.ndarray, nulls: np.ndarray | None = None
) -> pa.Array:
    """A string or binary array from its values' bytes, one after the other, and their lengths."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return pa.Array.from_buffers(type, len(lengths), [_validity(nulls), _buffer(ends.astype(np.int32)), _buffer(data)])


def items(buffer: np.ndarray, width: int) -> np.ndarray:
    """All runs of `width` bytes in a uint8 array, one at every offset, as V<width>: index it to gather or scatter."""
    return np.ndarray((max(len(buffer) - width + 1, 0),), f"V{width}", buffer, strides=(1,))


def copy_ranges(
    source: np.ndarray, starts: np.ndarray, target: np.ndarray, to: np.ndarray, lengths: np.ndarray
) -> None:
    """Copy source[starts[i] : starts[i] + lengths[i]] to target[to[i] :], for all i; uint8 arrays, int64 positions.

    One numpy call per distinct length. Long values have many lengths but few rows, so that the calls never outnumber the
    bytes: rows of k distinct lengths hold at least k * k / 2 of them.
    """
    if not len(lengths):
        return
    longest = int(lengths.max())
    if longest == int(lengths.min()):
        if longest:
            items(target, longest)[to] = items(source, longest)[starts]
        return
    order = np.argsort(lengths.astype(np.uint16) if longest < 1 << 16 else lengths, kind="stable")
    ordered = lengths[order]
    edges = np.flatnonzero(np.diff(ordered)) + 1
    for rows in np.split(order, edges):
        width = int(lengths[rows[0]])
        if width:
            items(target, width)[to[rows]] = items(source, width)[starts[rows]]


def join(values: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The values' bytes as one uint8 array, with each value's int64 start and length."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    return np.frombuffer(b"".join(values), np.uint8), np.cumsum(lengths) - lengths, lengths


def split(buffer: np.ndarray, ends: np.ndarray) -> list[bytes]:
    """The inverse of `join`: one bytes object up to each of the ascending ends."""
    raw, start, values = buffer.tobytes(), 0, []
    for end in ends.tolist():
        values.append(raw[start:end])
        start = end
    return values


def _validity(nulls: np.ndarray | None) -> pa.Buffer | None:
    return None if nulls is None or not nulls.any() else _buffer(np.packbits(~nulls, bitorder="little"))


def _buffer(values: np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.ascontiguousarray(values).view(np.uint8))


# Rows


@dataclass(frozen=True, slots=True)
class _Layout:
    """The part of every row before its variable part, as a packed numpy record; field i is named by its position."""

    record: np.dtype
    schema_id: np.uint64
    bitmap: int  # bytes


@lru_cache(maxsize=256)
def _layout(schema: StateSchema) -> _Layout:
    bitmap = (len(schema.fields) + 7) // 8
    fixed = [(str(i), "<u4" if is_variable(f.type) else numpy_type(f.type)) for i, f in enumerate(schema.fields)]
    record = np.dtype([("version", "u1"), ("schema", "<u8"), ("nulls", "u1", (bitmap,)), *fixed])
    return _Layout(record, np.frombuffer(schema.schema_id, "<u8")[0], bitmap)


def encode_rows(schema: StateSchema, table: pa.Table | pa.RecordBatch) -> list[bytes]:
    """One value per row of `table`, whose columns are matched by name and may be chunked or sliced.

    Raises PipelineError, naming the field, where columns and fields do not match exactly (a name too many or too few, another
    Arrow type); StageError for a null in a field that is not nullable.
    """
    _check_columns(schema, table.schema)
    if isinstance(table, pa.RecordBatch):
        return _encode_batch(schema, table)
    values: list[bytes] = []
    for batch in table.combine_chunks().to_batches():
        values += _encode_batch(schema, batch)
    return values


def _encode_batch(schema: StateSchema, batch: pa.RecordBatch) -> list[bytes]:
    n = batch.num_rows
    if not n:
        return []
    layout = _layout(schema)
    rows = np.zeros(n, layout.record)
    rows["version"], rows["schema"] = FORMAT_VERSION, layout.schema_id
    variable = []
    for i, f in enumerate(schema.fields):
        array = batch.column(f.name)
        nulls = nulls_of(array)
        if nulls is not None:
            if not f.nullable:
                raise StageError(
                    f"The state field {f.name!r} is not nullable but was given {array.null_count} null(s).",
                    where=f"row {int(nulls.argmax())} of {n}",
                    next="Fill the column before it is stored, or declare the field `| None`.",
                )
            rows["nulls"][:, i // 8] |= nulls.astype(np.uint8) << (i % 8)
        if is_variable(f.type):
            data, starts, lengths = variable_values(array)
            rows[str(i)] = lengths
            variable.append((data, starts, lengths))
        else:
            rows[str(i)] = fixed_values(array)
            if nulls is not None:
                rows[str(i)][nulls] = np.zeros(1, numpy_type(f.type))  # Arrow allows any bytes behind a null
    width = layout.record.itemsize
    packed = rows.view(f"V{width}")
    if not variable:
        return packed.tolist()
    ends = np.cumsum(sum((lengths for _, _, lengths in variable), np.full(n, width, np.int64)))
    out = np.empty(ends[-1], np.uint8)
    at = np.concatenate(([0], ends[:-1]))
    items(out, width)[at] = packed
    at += width
    for data, starts, lengths in variable:
        copy_ranges(data, starts, out, at, lengths)
        at += lengths
    return split(out, ends)


def _check_columns(schema: StateSchema, given: pa.Schema) -> None:
    for f in schema.fields:
        found = given.get_all_field_indices(f.name)
        if len(found) != 1:
            problem = "is missing" if not found else "is there twice"
        elif given.field(found[0]).type != f.type:
            problem = f"is {given.field(found[0]).type} but the state declares {f.type}"
        else:
            continue
        raise PipelineError(
            f"The column of the state field {f.name!r} {problem}.",
            where=f"columns: {', '.join(given.names)}",
            next="Give every field one column of exactly its type; cast it where it differs.",
        )
    if extra := set(given.names) - {f.name for f in schema.fields}:
        raise PipelineError(
            f"The column {min(extra)!r} is not a field of the state.",
            where=f"fields: {', '.join(f.name for f in schema.fields)}",
            next="Drop the column, or add a field to the state class.",
        )


def decode_rows(schema: StateSchema, values: Sequence[bytes]) -> pa.Table:
    """The rows of `values`, all of them written with `schema`, as a table of `schema.arrow`.

    Raises DamageError for any value that `encode_rows` of this schema cannot have written: cut short, too long, another
    format version, another schema, a null where none may be, text that is not UTF-8.
    """
    joined, starts, lengths = join(values)
    if len(joined) > _MAX_VARIABLE_BYTES and len(values) > 1:
        half = len(values) // 2
        return pa.concat_tables([decode_rows(schema, values[:half]), decode_rows(schema, values[half:])])
    layout = _layout(schema)
    width = layout.record.itemsize
    _sound(lengths >= width, "is cut short", lengths, schema)
    rows = items(joined, width)[starts].view(layout.record) if len(values) else np.zeros(0, layout.record)
    _sound(np.equal(rows["version"], FORMAT_VERSION), "has an unknown format version", lengths, schema)
    _sound(np.equal(rows["schema"], layout.schema_id), "was written with another schema", lengths, schema)
    bits = np.unpackbits(rows["nulls"], axis=1, bitorder="little").view(bool)
    _sound(np.equal(bits[:, len(schema.fields) :].sum(axis=1), 0), "has a damaged null bitmap", lengths, schema)
    at = starts + width
    ends = starts + lengths
    columns = []
    for i, f in enumerate(schema.fields):
        nulls, fixed = bits[:, i], np.ascontiguousarray(rows[str(i)])
        if nulls.any():
            _sound(
                np.logical_or(~nulls, f.nullable), f"holds a null in {f.name!r}, which is not nullable", lengths, schema
            )
            filled = fixed.view(np.uint8).reshape(len(fixed), -1).any(axis=1)
            _sound(~(nulls & filled), f"holds bytes behind the null in {f.name!r}", lengths, schema)
        if is_variable(f.type):
            sizes = fixed.astype(np.int64)
            _sound(at + sizes <= ends, f"is cut short in {f.name!r}", lengths, schema)
            data = np.empty(sizes.sum(), np.uint8)
            copy_ranges(joined, at, data, np.cumsum(sizes) - sizes, sizes)
            array = array_of_variable(f.type, data, sizes, nulls)
            at = at + sizes
        else:
            if pa.types.is_boolean(f.type):
                _sound(fixed <= 1, f"holds neither true nor false in {f.name!r}", lengths, schema)
            array = array_of_fixed(f.type, fixed, nulls)
        if pa.types.is_string(f.type) or pa.types.is_decimal(f.type):
            try:
                array.validate(full=True)
            except pa.ArrowInvalid as error:
                raise _damage(f"A state value holds what is no {f.type} in {f.name!r}: {error}", schema) from error
        columns.append(array)
    _sound(at == ends, "has bytes after its last field", lengths, schema)
    return pa.Table.from_arrays(columns, schema=schema.arrow)


def _sound(ok: np.ndarray, problem: str, lengths: np.ndarray, schema: StateSchema) -> None:
    if not ok.all():
        row = int(np.argmin(ok))
        raise _damage(
            f"A state value {problem} ({int((~ok).sum())} of {len(ok)}, first: number {row}, {lengths[row]} bytes)",
            schema,
        )


def _damage(what: str, schema: StateSchema) -> DamageError:
    return DamageError(
        f"{what}.",
        where=f"schema {schema.schema_id.hex()}: {', '.join(f.name for f in schema.fields)}",
        next="Restore from the last checkpoint; weir fsck finds what else is damaged.",
    )
