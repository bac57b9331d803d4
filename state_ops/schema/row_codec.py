"""State rows as RocksDB values: a fixed binary format, packed and unpacked a whole Arrow batch at a time.

    version   1 byte    the format, FORMAT_VERSION
    schema    8 bytes   the id of the StateSchema that the row was written with
    nulls     1 bit per slot, in order, least significant bit first, padded to whole bytes; 1 is null
    fixed     per slot, little endian, all zero where null: integers and floats as they are, bool 1 byte, dates, times,
              timestamps and durations as their integers, decimals as their unscaled value, fixed-size binary as it is;
              string and binary the uint32 length of their bytes; list and map the uint32 count of their elements; of a
              struct, a fixed-size list and null nothing
    variable  per slot, in order: the bytes of a string or binary; of lists and maps one block of their elements (see
              `nested`)

The slots are the fields in their order, and after a struct its fields, which are null where it is.

The format is canonical: equal rows have equal bytes. It carries no checksum, RocksDB's blocks have theirs; what
decoding checks is that every byte has a meaning, so that damage or a foreign value is never read as a row of the wrong
shape.

No Python loop runs over rows or values, only over fields and what is nested in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import numpy as np
import pyarrow as pa

from state_ops.arrow.columns import (
    beside,
    contiguous,
    fixed_values,
    is_list,
    is_variable,
    items,
    join,
    nulls_of,
    plain,
    variable_values,
)
from state_ops.arrow.nested import (
    MAX_COUNT,
    Cursor,
    Segment,
    array_of,
    check_nulls,
    elements,
    elements_type,
    fixed_width,
    segments,
    struct_of,
)
from state_ops.arrow.types import stored_type, without_nullability
from state_ops.errors import DamageError, PipelineError, StageError
from state_ops.schema import evolution
from state_ops.schema.state_schema import StateSchema

FORMAT_VERSION = 1
SCHEMA_ID = slice(1, 9)  # where a value holds the id of its schema

_MAX_DECODED = (
    2**28
)  # bytes decoded at once: even of one bit each, their elements are in reach of Arrow's int32 offsets


@dataclass(frozen=True, slots=True)
class _Slot:
    """One column of a row: a field, or a field of the struct in slot `inside`. path: its name for people."""

    path: str
    field: pa.Field
    inside: int | None
    fixed: np.dtype | None


@dataclass(frozen=True, slots=True)
class _Layout:
    """The slots, and the part of every row before its variable part, as a packed numpy record; slot i is named by its
    number."""

    slots: tuple[_Slot, ...]
    record: np.dtype
    schema_id: np.uint64


@lru_cache(maxsize=256)
def _layout(schema: StateSchema) -> _Layout:
    slots: list[_Slot] = []

    def add(field: pa.Field, path: str, inside: int | None) -> None:
        here = len(slots)
        slots.append(_Slot(path, field, inside, fixed_width(field.type)))
        if pa.types.is_struct(field.type):
            for part in field.type:
                add(part, f"{path}.{part.name}", here)

    for field in schema.arrow:
        add(field, field.name, None)
    parts = [(str(i), slot.fixed) for i, slot in enumerate(slots) if slot.fixed is not None]
    record = np.dtype([("version", "u1"), ("schema", "<u8"), ("nulls", "u1", ((len(slots) + 7) // 8,)), *parts])
    return _Layout(tuple(slots), record, np.frombuffer(schema.schema_id, "<u8")[0])


# Writing


def encode_rows(schema: StateSchema, table: pa.Table | pa.RecordBatch) -> list[bytes]:
    """Return one value a row of `table`, whose columns are matched by name and may be chunked, sliced or dictionaries.

    Raises PipelineError, naming the field, where columns and fields do not match exactly (a name too many or too few,
    another Arrow type); StageError for a null where the schema allows none.
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
    variable: list[Segment] = []
    for i, (slot, array) in enumerate(zip(layout.slots, _slot_arrays(schema, batch), strict=True)):
        nulls = nulls_of(array)
        if nulls is not None:
            inside = None if slot.inside is None else _bit(rows, slot.inside)
            check_nulls(array, slot.field.nullable, inside, slot.path, _refuse)
            rows["nulls"][:, i // 8] |= nulls.astype(np.uint8) << (i % 8)
        type = slot.field.type
        if is_variable(type):
            data, starts, lengths = variable_values(array)
            rows[str(i)] = _counted(lengths, slot.path)
            variable.append((data, starts, lengths))
        elif is_list(type) or pa.types.is_fixed_size_list(type):
            inner, counts = elements(array)
            if slot.fixed is not None:
                rows[str(i)] = _counted(counts, slot.path)
            variable += segments(inner, counts, elements_type(type), f"{slot.path}[]", _refuse)
        elif slot.fixed is not None:
            rows[str(i)] = fixed_values(array)
            if nulls is not None:
                rows[str(i)][nulls] = np.zeros(1, slot.fixed)  # Arrow allows any bytes behind a null
    width = layout.record.itemsize
    packed = rows.view(f"V{width}")
    if not variable:
        fixed_only: list[bytes] = packed.tolist()
        return fixed_only
    fixed = rows.view(np.uint8), np.arange(0, n * width, width), np.full(n, width, np.int64)
    return beside([fixed, *variable])


def _slot_arrays(schema: StateSchema, batch: pa.RecordBatch) -> list[pa.Array]:
    arrays: list[pa.Array] = []

    def add(array: pa.Array) -> None:
        array = plain(contiguous(array))
        arrays.append(array)
        if pa.types.is_struct(array.type):
            for child in array.flatten():  # which makes them null where the struct is
                add(child)

    for f in schema.fields:
        add(batch.column(f.name))
    return arrays


def _bit(rows: np.ndarray, slot: int) -> np.ndarray:
    return (rows["nulls"][:, slot // 8] >> (slot % 8) & 1).astype(bool)


def _counted(lengths: np.ndarray, path: str) -> np.ndarray:
    if int(lengths.max()) > MAX_COUNT:
        raise StageError(
            f"A value of the state field {path!r} is longer than {MAX_COUNT} bytes or elements.",
            next="Keep less in one key's row: a map or list state has a row of its own for each element.",
        )
    return lengths


def _refuse(path: str, nulls: np.ndarray) -> NoReturn:
    raise StageError(
        f"The state field {path!r} is not nullable but was given {int(nulls.sum())} null(s).",
        where=f"value {int(nulls.argmax())} of {len(nulls)}",
        next="Fill the column before it is stored, or declare the field `| None`.",
    )


def _check_columns(schema: StateSchema, given: pa.Schema) -> None:
    for f in schema.fields:
        positions = given.get_all_field_indices(f.name)
        if len(positions) != 1:
            problem = "is missing" if not positions else "is there twice"
        elif not _holds(f.type, given.field(positions[0]).type):
            problem = f"is {given.field(positions[0]).type} but the state declares {f.type}"
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


def _holds(declared: pa.DataType, given: pa.DataType) -> bool:
    """Return whether a column's type is the declared one, apart from dictionaries, views and nullability.

    The values themselves are checked for nulls.
    """
    return bool(declared == given or without_nullability(declared) == without_nullability(stored_type(given)))


# Reading


def decode_rows(schema: StateSchema, values: Sequence[bytes]) -> pa.Table:
    """Return the rows of `values`, written with `schema` or with one of `schema.older`, as a table of `schema.arrow`.

    Raises:
        DamageError: For any value that `encode_rows` of these schemas cannot have written: cut short, too long, another
            format version, another schema, a null where none may be, text that is not UTF-8.
    """
    joined, starts, lengths = join(values)
    if len(joined) > _MAX_DECODED and len(values) > 1:
        half = len(values) // 2
        return pa.concat_tables([decode_rows(schema, values[:half]), decode_rows(schema, values[half:])])
    if schema.older and (written := _written_with(joined, starts, lengths, schema)) is not None:
        chain = (*schema.older, schema)
        rows = [np.flatnonzero(written == i).tolist() for i in range(len(chain))]
        tables = [
            _decode_joined(layout_of, *join([values[row] for row in indices]))
            for layout_of, indices in zip(chain, rows, strict=True)
        ]
        places = np.empty(len(values), np.int64)
        places[np.argsort(written, kind="stable")] = np.arange(len(values))
        return evolution.upgraded(tables, chain).take(pa.array(places))
    return _decode_joined(schema, joined, starts, lengths)


def stored_numbers(schema: StateSchema, values: Sequence[bytes], name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the field `name` of rows, a fixed-width one: its raw values and bool[n], which of them are null. Nothing
    else of the rows is decoded or checked. None if some of them were not written with this very schema."""
    joined, starts, lengths = join(values)
    layout = _layout(schema)
    width = layout.record.itemsize
    if not len(values) or int(lengths.min()) < width:
        return None
    rows = items(joined, width)[starts].view(layout.record)
    if not (np.equal(rows["version"], FORMAT_VERSION) & np.equal(rows["schema"], layout.schema_id)).all():
        return None
    slot = next(
        i for i, candidate in enumerate(layout.slots) if candidate.inside is None and candidate.field.name == name
    )
    return rows[str(slot)], _bit(rows, slot)


def _written_with(
    joined: np.ndarray, starts: np.ndarray, lengths: np.ndarray, schema: StateSchema
) -> np.ndarray | None:
    """Return for each value the number of its schema among the older ones and then `schema`.

    None: all values have `schema` or are damaged.
    """
    if not len(starts) or int(lengths.min()) < SCHEMA_ID.stop:
        return None
    ids = items(joined, 8)[starts + SCHEMA_ID.start].view("<u8")
    written = np.full(len(ids), len(schema.older), np.int64)
    for i, older in enumerate(schema.older):
        written[ids == np.frombuffer(older.schema_id, "<u8")[0]] = i  # of a schema that was come back to, the later era
    written[ids == np.frombuffer(schema.schema_id, "<u8")[0]] = len(schema.older)
    return written if (written < len(schema.older)).any() else None


def _decode_joined(schema: StateSchema, joined: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> pa.Table:
    layout = _layout(schema)
    width, n = layout.record.itemsize, len(starts)

    def sound(ok: np.ndarray, problem: str) -> None:
        if not ok.all():
            row = int(np.argmin(ok))
            first = f"first: number {row}, {lengths[row]} bytes"
            raise _damage(f"A state value {problem} ({int((~ok).sum())} of {n}, {first})", schema)

    sound(lengths >= width, "is cut short")
    alike = len(joined) == n * width  # then all are only their fixed part
    rows = (joined.view(f"V{width}") if alike else items(joined, width)[starts]).view(layout.record)
    sound(np.equal(rows["version"], FORMAT_VERSION), "has an unknown format version")
    sound(np.equal(rows["schema"], layout.schema_id), "was written with another schema")
    bits = _bits(rows["nulls"])
    if bits is not None:
        sound(np.equal(bits[:, len(layout.slots) :].sum(axis=1), 0), "has a damaged null bitmap")

    def broken(problem: str) -> NoReturn:
        raise _damage(f"A state value {problem}", schema)

    cursor = Cursor(joined, starts + width, starts + lengths, sound, broken)
    arrays: list[tuple[np.ndarray, pa.Array | None]] = []
    none = np.zeros(n, bool)
    for i, slot in enumerate(layout.slots):
        nulls = none if bits is None else bits[:, i]
        inside = none if slot.inside is None or bits is None else bits[:, slot.inside]
        arrays.append((nulls, _decode_slot(rows, i, slot, nulls, inside, cursor)))
    columns = [_column(layout, arrays, i) for i, slot in enumerate(layout.slots) if slot.inside is None]
    sound(np.equal(cursor.at, cursor.ends), "has bytes after its last field")
    return pa.Table.from_arrays(columns, schema=schema.arrow)


def _bits(bitmap: np.ndarray) -> np.ndarray | None:
    """Return bool[n, slots and padding]; None if no bit is set, as in most states."""
    return np.unpackbits(bitmap, axis=1, bitorder="little").view(bool) if bitmap.any() else None


def _decode_slot(
    rows: np.ndarray, i: int, slot: _Slot, nulls: np.ndarray, inside: np.ndarray, cursor: Cursor
) -> pa.Array | None:
    """Return the column of a slot; None of a struct, which is made of its fields' when they are all there."""
    type, path = slot.field.type, slot.path
    if inside.any():
        cursor.unsound_unless(nulls | ~inside, f"holds a value behind the null around {path!r}")
    if not slot.field.nullable and nulls.any():
        cursor.unsound_unless(~nulls | inside, f"holds a null in {path!r}, which is not nullable")
    if pa.types.is_struct(type):
        return None
    fixed = None if slot.fixed is None else np.ascontiguousarray(rows[str(i)])
    return array_of(cursor, type, nulls, fixed, path, cursor.unsound_unless)


def _column(layout: _Layout, arrays: list[tuple[np.ndarray, pa.Array | None]], i: int) -> pa.Array:
    nulls, array = arrays[i]
    if array is not None:
        return array
    inside = [j for j, slot in enumerate(layout.slots) if slot.inside == i]
    return struct_of(layout.slots[i].field.type, nulls, [_column(layout, arrays, j) for j in inside])


def _damage(what: str, schema: StateSchema) -> DamageError:
    return DamageError(
        f"{what}.",
        where=f"schema {schema.schema_id.hex()}: {', '.join(f.name for f in schema.fields)}",
        next="Restore from the last checkpoint; weir fsck finds what else is damaged.",
    )
