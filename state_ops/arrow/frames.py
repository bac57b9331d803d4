"""Frames in and out: any frame becomes one canonical Arrow table, and an Arrow table becomes what a function asked
for."""

from __future__ import annotations

import base64
import inspect
import re
import sys
import typing
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow.columns import array_of_fixed, fixed_values, nulls_of
from state_ops.arrow.nested import elements
from state_ops.arrow.types import mapped, parts, with_parts
from state_ops.errors import PipelineError, StageError

if TYPE_CHECKING:
    import pandas as pd

_SIGNED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.int64(),
}
_OFFSET = re.compile(r"[zZ]|[+-]\d\d(:?\d\d)?")
_STORABLE = frozenset(
    {
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.float32(),
        pa.float64(),
        pa.bool_(),
        pa.string(),
        pa.binary(),
        pa.date32(),
        pa.timestamp("us"),
        pa.timestamp("us", tz="UTC"),
    }
)


_DEEPEST = 110  # levels of JSON; delta-rs reads up to 128
_PASSABLE = _STORABLE | {pa.time64("ns"), pa.duration("us"), pa.null()}


_CANONICAL: tuple[tuple[Callable[[pa.DataType], bool], pa.DataType], ...] = (
    (pa.types.is_timestamp, pa.timestamp("us", tz="UTC")),
    (pa.types.is_large_string, pa.string()),
    (pa.types.is_string_view, pa.string()),
    (pa.types.is_large_binary, pa.binary()),
    (pa.types.is_binary_view, pa.binary()),
    (pa.types.is_fixed_size_binary, pa.binary()),
    (pa.types.is_date64, pa.date32()),
    (pa.types.is_time, pa.time64("ns")),
    (pa.types.is_duration, pa.duration("us")),
)


def canonical_type(type: pa.DataType) -> pa.DataType:
    """Return the type that Weir stores for `type`: no views, dictionaries, extensions, large offsets, fixed sizes,
    unsigned numbers or units but microseconds. A time of day, which no table holds, has nanoseconds, as Spark hands it
    out."""
    if isinstance(type, pa.BaseExtensionType):
        return canonical_type(type.storage_type)
    if pa.types.is_dictionary(type):
        return canonical_type(type.value_type)
    if pa.types.is_decimal(type) and type.precision <= 38:
        return pa.decimal128(type.precision, type.scale)
    if not pa.types.is_nested(type):
        return _canonical_leaf(type)
    if _is_sequence(type):
        return pa.list_(canonical_type(type.value_type))
    return mapped(type, canonical_type, loose=True)


@cache
def _canonical_leaf(type: pa.DataType) -> pa.DataType:
    return _SIGNED.get(type) or next((stored for is_kind, stored in _CANONICAL if is_kind(type)), type)


def common_type(type: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the type that both canonical types fit; None if they differ.

    A null type, at any depth, fits every type: the column, or the part of it, is all null there.
    """
    if type == other or pa.types.is_null(other):
        return type
    if pa.types.is_null(type):
        return other
    if type.id != other.id or type.num_fields != other.num_fields or not pa.types.is_nested(type):
        return None
    pairs = list(zip(parts(type), parts(other), strict=True))
    common = [common_type(part.type, another.type) for part, another in pairs]
    if None in common or (pa.types.is_struct(type) and any(part.name != another.name for part, another in pairs)):
        return None
    return with_parts(type, [pa.field(part.name, kind) for (part, _), kind in zip(pairs, common, strict=True)])


_WIDER = {
    pa.int8(): (pa.int16(), pa.int32(), pa.int64()),
    pa.int16(): (pa.int32(), pa.int64()),
    pa.int32(): (pa.int64(),),
    pa.float32(): (pa.float64(),),
    pa.date32(): (pa.timestamp("us"), pa.timestamp("us", "UTC")),
}


def wider_type(type: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the wider of two canonical types, as which every value of both can be read: of integers, of floats, of a
    date and a timestamp, for which it is midnight; None if neither is."""
    if other in _WIDER.get(type, ()):
        return other
    return type if type in _WIDER.get(other, ()) else None


def _is_sequence(type: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(kind(type) for kind in (*kinds, pa.types.is_list_view, pa.types.is_large_list_view))


def unreadable(type: pa.DataType) -> pa.DataType | None:
    """Return the canonical type itself, or the part of it, that cannot pass from a file to a stage; None if all of it
    can."""
    return unstorable(type, storable=_PASSABLE)


def unstorable(
    type: pa.DataType, in_map: bool = False, storable: frozenset[pa.DataType] = _STORABLE
) -> pa.DataType | None:
    """Return the canonical type itself, or the part of it, that neither Delta nor Spark has; None if all of it can be
    stored.

    Args:
        storable: The types without parts that can be, beside decimals of up to 38 digits.
    """
    if _depth(type) > _DEEPEST:
        return type
    if in_map and type == pa.timestamp("us"):
        return type  # delta-rs does not declare the table feature that it needs there, and then refuses the table
    if type in storable or (pa.types.is_decimal128(type) and 0 <= type.scale <= type.precision):
        return None
    if not (pa.types.is_map(type) or pa.types.is_list(type) or pa.types.is_struct(type)):
        return type
    inside = in_map or pa.types.is_map(type)
    refused = (unstorable(part.type, inside, storable) for part in parts(type))
    return next((kind for kind in refused if kind is not None), None)


def _depth(type: pa.DataType) -> int:
    """Return how deep a type is nested where a Delta table notes it as JSON."""
    within = max((_depth(part.type) for part in parts(type)), default=0) if pa.types.is_nested(type) else 0
    return within + (3 if pa.types.is_struct(type) else 1)


def canonical_schema(schema: pa.Schema) -> pa.Schema:
    """Return `schema` with canonical types, same names and order, no metadata."""
    return pa.schema([(field.name, canonical_type(field.type)) for field in schema])


def canonical(table: pa.Table) -> pa.Table:
    """Return `table` with canonical types, same names and order, no metadata. Nanoseconds are cut to microseconds."""
    schema = canonical_schema(table.schema)
    if table.schema.equals(schema, check_metadata=True):
        return table
    for at, field in enumerate(table.schema):
        if _is_cut(field.type):
            chunks = [with_leaves(chunk, _cut) for chunk in table.column(at).chunks]
            table = table.set_column(
                at, field.name, pa.chunked_array(chunks, None if chunks else schema.field(at).type)
            )
    return table.cast(schema)


def aligned(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of a canonical schema by name, in its order and types, of rows that may have them in another
    one.

    Files of one table may: a deploy can hand out the same columns in another order, and a compaction writes other Arrow
    types. Columns that the rows lack are null; those that the schema lacks are left out.
    """
    rows = canonical(table)
    there = set(rows.column_names)
    columns = [
        rows.column(field.name) if field.name in there else pa.nulls(rows.num_rows, field.type) for field in schema
    ]
    return pa.table(columns, names=schema.names).cast(schema)


def with_leaves(array: pa.Array, leaf: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Return the array with all that is no list, map or struct replaced, in the order in which a Parquet file has its
    columns.

    Dictionaries, extensions and views of lists become what they hold; the names and the nullability of what lists and
    maps hold are lost."""
    type = array.type
    if isinstance(type, pa.BaseExtensionType):
        return with_leaves(array.storage, leaf)
    if pa.types.is_dictionary(type):
        return with_leaves(array.dictionary_decode(), leaf)
    mask = array.is_null() if array.null_count else None
    if pa.types.is_struct(type):
        children = [with_leaves(part, leaf) for part in array.flatten()]
        fields = [pa.field(field.name, part.type) for field, part in zip(type, children, strict=True)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=mask)
    if not _is_sequence(type) and not pa.types.is_map(type):
        return leaf(array)
    values, counts = elements(array)
    values = with_leaves(values, leaf)
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    if pa.types.is_map(type):
        return pa.MapArray.from_arrays(offsets, *values.flatten(), mask=mask)
    return pa.ListArray.from_arrays(offsets, values, mask=mask)


def _is_cut(type: pa.DataType) -> bool:
    """Return whether Arrow's own cast does not know the way to the canonical type, or refuses to lose digits."""
    if pa.types.is_timestamp(type) or pa.types.is_duration(type):
        return bool(type.unit == "ns")
    if isinstance(type, pa.BaseExtensionType) or pa.types.is_list_view(type) or pa.types.is_large_list_view(type):
        return True
    if pa.types.is_dictionary(type):
        return _is_cut(type.value_type)
    return any(_is_cut(type.field(part).type) for part in range(type.num_fields))


def _cut(leaf: pa.Array) -> pa.Array:
    """Nanoseconds cut down to microseconds. Arrow refuses to lose any, or cuts up before 1970."""
    type = leaf.type
    if not ((pa.types.is_timestamp(type) or pa.types.is_duration(type)) and type.unit == "ns"):
        return leaf
    cut = pa.timestamp("us", tz=type.tz) if pa.types.is_timestamp(type) else pa.duration("us")
    return array_of_fixed(cut, fixed_values(leaf) // 1000, nulls_of(leaf))


def schema_to_json(schema: pa.Schema) -> dict[str, Any]:
    """Return a schema as people read it (`columns`) and as programs read it back exactly (`ipc`, Arrow's own bytes in
    base64)."""
    columns = {field.name: str(field.type) for field in schema}
    return {"columns": columns, "ipc": base64.b64encode(schema.serialize().to_pybytes()).decode()}


def schema_from_json(raw: dict[str, Any]) -> pa.Schema:
    """Return the inverse of `schema_to_json`, in the types that are canonical now."""
    written = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(raw["ipc"])))
    return canonical_schema(written)


def arrow(frame: Any, where: str = "") -> pa.Table:
    """Return a canonical Arrow table from a pyarrow, Polars or pandas frame, or from anything with the Arrow PyCapsule
    interface."""
    if isinstance(frame, pa.Table):
        return canonical(frame)
    if isinstance(frame, pa.RecordBatch):
        return canonical(pa.Table.from_batches([frame]))
    if isinstance(frame, pl.DataFrame):
        return canonical(exported(frame))
    if is_pandas(frame):
        return canonical(pa.Table.from_pandas(frame, preserve_index=False))
    if hasattr(frame, "__arrow_c_stream__"):
        return canonical(pa.table(frame))
    raise StageError(
        f"A frame was expected, not {type(frame).__name__}.",
        where=where,
        next="Return a polars.DataFrame, a pandas.DataFrame or a pyarrow.Table.",
    )


def exported(frame: pl.DataFrame) -> pa.Table:
    """Return a Polars frame as an Arrow table, in the types in which Polars hands its columns out.

    Of a column without rows that was cut out of another one, and of the elements of lists that are all empty, Polars
    says where they began and hands out no bytes. Arrow fails when it copies such arrays, so they are taken anew.
    """
    table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    for at, column in enumerate(table.columns):
        if any(map(_begins_beyond, column.chunks)):
            chunks = [chunk.take(pa.array(np.arange(len(chunk)))) for chunk in column.chunks]
            table = table.set_column(at, table.field(at), pa.chunked_array(chunks))
    return table


def _begins_beyond(array: pa.Array) -> bool:
    """Return whether an array, or a part of it, has no elements and yet an offset."""
    if not len(array) and array.offset:
        return True
    if pa.types.is_struct(array.type):
        return any(_begins_beyond(array.field(number)) for number in range(array.type.num_fields))
    return pa.types.is_nested(array.type) and _begins_beyond(array.values)


def is_pandas(frame: Any) -> bool:
    """Return whether a value is a pandas DataFrame, without an import of pandas, which takes a third of a second.

    In a process that has not imported pandas, nobody has such a frame.
    """
    kind = _pandas_frame()
    return kind is not None and isinstance(frame, kind)


def _pandas_frame() -> type | None:
    return getattr(sys.modules.get("pandas"), "DataFrame", None)


def polars(frame: Any) -> pl.DataFrame:
    """Return a Polars frame from any frame."""
    return frame if isinstance(frame, pl.DataFrame) else pl.from_arrow(arrow(frame))  # type: ignore[return-value]


def from_arrow(table: pa.Table) -> pl.DataFrame:
    """Return an Arrow table as a Polars frame. Times with a fixed offset are in UTC there: Polars knows only zones that
    have names."""
    schema = pa.schema([field.with_type(_named_zones(field.type)) for field in table.schema])
    return pl.from_arrow(table if schema == table.schema else table.cast(schema))  # type: ignore[return-value]


def _named_zones(type: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(type):
        return pa.timestamp(type.unit, tz="UTC") if type.tz and _OFFSET.fullmatch(type.tz) else type
    return mapped(type, _named_zones)


def polars_type(type: pa.DataType) -> pl.DataType:
    """Return the Polars type of a column of an Arrow type."""
    return from_arrow(pa.table({"": pa.array([], type)})).dtypes[0]


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Return a column for people: as `to_pylist` gives it, but text for a time or date that Python's years 1 to 9999 do
    not reach, and, where pandas is not loaded, for nanoseconds. Of a text that is not UTF-8 the other bytes are
    escaped."""
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError):
        return [_python_value(value) for value in column]


def python_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return a table for people, a dict a row; see `python_values`."""
    columns = [python_values(column) for column in table.columns]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _python_value(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except (OverflowError, ValueError):  # Python has no such year, or no nanoseconds: pandas has, where it is loaded
        if isinstance(value, pa.StructScalar):
            return {name: _python_value(part) for name, part in value.items()}
        if isinstance(value, pa.MapScalar):
            return [(_python_value(entry["key"]), _python_value(entry["value"])) for entry in value.values]
        if isinstance(value, pa.ListScalar):
            return [_python_value(part) for part in value.values]
        if pa.types.is_string(value.type) or pa.types.is_large_string(value.type):
            return value.as_buffer().to_pybytes().decode(errors="backslashreplace")
        # By NumPy: the text of Arrow has years of 16 bits.
        if pa.types.is_timestamp(value.type):
            text = str(np.datetime64(value.value, value.type.unit)).replace("T", " ")
            return text + "Z" if value.type.tz else text
        if pa.types.is_date(value.type):
            return str(np.datetime64(value.value, "D" if pa.types.is_date32(value.type) else "ms").astype("M8[D]"))
        if pa.types.is_time(value.type):
            return value.cast(pa.time64("us"), safe=False).as_py()
        if pa.types.is_duration(value.type):
            return str(np.timedelta64(value.value, value.type.unit))
        return value.cast(pa.string()).as_py()


def stored(frame: pl.DataFrame, schema: pa.Schema) -> pa.Table:
    """Return the columns of `schema` in exactly its types, which need not be canonical: state keeps unsigned numbers,
    nanoseconds, time zones and fixed sizes. Raises ArrowInvalid for a value that its type cannot hold."""
    return exported(frame.select(schema.names)).cast(schema)


def _to_pandas(table: pa.Table) -> pd.DataFrame:
    return table.to_pandas(types_mapper=_pandas_type)


def _pandas_type(type: pa.DataType) -> Any:
    """Return the pandas dtype of a column; None for NumPy's own (floats, timestamps).

    With NumPy's, an integer or boolean column changes its dtype, and integers above 2**53 their value, where a batch
    holds a null; and a column of objects has no type where a batch is empty. The same rows would not give the same
    results. Floats stay NumPy's, in which a null is NaN, so a NaN comes back as a null: dtypes that tell the two apart
    fail in np.where, and their isna and fillna pass over NaN.
    """
    import pandas as pd

    if pa.types.is_signed_integer(type):
        return {8: pd.Int8Dtype, 16: pd.Int16Dtype, 32: pd.Int32Dtype, 64: pd.Int64Dtype}[type.bit_width]()
    if pa.types.is_boolean(type):
        return pd.BooleanDtype()
    if pa.types.is_string(type):
        return pd.StringDtype("pyarrow")
    return None if pa.types.is_floating(type) or pa.types.is_timestamp(type) else pd.ArrowDtype(type)


def _to_arrow(table: pa.Table) -> pa.Table:
    return table


_BY_ANNOTATION: dict[Any, Callable[[pa.Table], Any]] = {
    pl.DataFrame: from_arrow,
    pa.Table: _to_arrow,
}
_BY_TEXT = {
    "pl.DataFrame": from_arrow,
    "polars.DataFrame": from_arrow,
    "pd.DataFrame": _to_pandas,
    "pandas.DataFrame": _to_pandas,
    "pa.Table": _to_arrow,
    "pyarrow.Table": _to_arrow,
}


def is_given_polars(function: Callable[..., Any]) -> bool:
    """Return whether a function's first parameter is a Polars frame."""
    return converter(function) is from_arrow


def converter(function: Callable[..., Any], parameter: int = 0) -> Callable[[pa.Table], Any]:
    """Return the function that turns an Arrow table into the frame that a parameter of `function` is annotated with.

    By default that is the first parameter.
    """
    parameters = list(inspect.signature(function).parameters.values())[parameter:]
    written = parameters[0].annotation if parameters else inspect.Parameter.empty
    try:
        hint = typing.get_type_hints(function).get(parameters[0].name, written) if parameters else written
    except NameError:  # names imported for type checking only
        hint = written
    by_annotation = {**_BY_ANNOTATION, _pandas_frame(): _to_pandas}
    convert = _BY_TEXT.get(hint) if isinstance(hint, str) else by_annotation.get(hint)
    if convert is None:
        raise PipelineError(
            f"Weir cannot tell which frame {function.__name__}() wants.",
            where=f"{function.__module__}.{function.__qualname__}",
            next=f"Annotate its {'second' if parameter else 'first'} parameter with pl.DataFrame, pd.DataFrame or "
            "pa.Table"
            f"{', or with list[dict]' if parameter else ''}.",
        )
    return convert
