"""The footers of Parquet files: event times, and columns that Spark cannot read."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from weir.connectors.formats.old_calendar import OldCalendar, leaf_count, old_calendar

_FOREIGN = frozenset({"BROTLI", "BYTE_STREAM_SPLIT"})
_WHICH = ", so nobody can tell which of them is meant"
_MICROS = {"days": 86_400_000_000, "milliseconds": 1000, "microseconds": 1}


@dataclass(frozen=True, slots=True)
class Times:
    """The least and the greatest value of a column in microseconds since 1970 UTC.

    Attributes:
        nulls: Whether it has, or may have, some.
    """

    least: int
    greatest: int
    nulls: bool


def times(footer: pq.FileMetaData, column: str) -> Times | None:
    """Return the least and greatest time of a column, by the statistics of the row groups; None if they do not tell.

    The column is of timestamps or dates. None too if there is no row.

    Those of times of 96 bits, and of values by an old calendar, do not.
    """
    place = places(footer).get(column)
    if place is None or footer.schema.column(place).physical_type == "INT96" or old_calendar(footer) is not None:
        return None
    groups = [footer.row_group(group).column(place).statistics for group in range(footer.num_row_groups)]
    if not groups or any(statistics is None or not statistics.has_min_max for statistics in groups):
        return None
    # The stored numbers, since rows may have times that no datetime has: an OverflowError here would end the run.
    unit = json.loads(footer.schema.column(place).logical_type.to_json()).get("timeUnit", "days")
    return Times(
        _micros(min(statistics.min_raw for statistics in groups), unit),
        _micros(max(statistics.max_raw for statistics in groups), unit),
        any(not statistics.has_null_count or statistics.null_count > 0 for statistics in groups),
    )


def places(footer: pq.FileMetaData) -> dict[str, int]:
    """Return where a file has its columns that are not nested. Their paths do not tell: a column "a.b" and the field b
    of a struct a have the same."""
    found, at = dict[str, int](), 0
    for field in footer.schema.to_arrow_schema():
        count = leaf_count(field.type)
        if not pa.types.is_nested(field.type):
            found.setdefault(field.name, at)
        at += count
    return found


def nanos(footer: pq.FileMetaData, stored: pa.Schema) -> tuple[str, ...]:
    """Return the columns of times in nanoseconds. A time of 96 bits, which Arrow takes for one, is none: Spark reads it
    as a time."""
    return tuple(
        field.name
        for field, (first, *_) in _leaves(footer, stored)
        if pa.types.is_timestamp(field.type) and _is_nanos(first)
    )


def enums(footer: pq.FileMetaData, stored: pa.Schema) -> dict[str, pa.DataType]:
    """Return the columns that are, or hold, names of an enum, with the type that they have for Spark: text. Arrow takes
    such names for bytes."""
    return {
        field.name: _with_texts(field.type, iter(leaves))
        for field, leaves in _leaves(footer, stored)
        if any(_is_enum(leaf) for leaf in leaves)
    }


def _is_foreign(footer: pq.FileMetaData, names: Collection[str]) -> bool:
    """Return whether a column chunk is encoded or compressed in a way that Spark does not know."""
    chunks = (
        chunk
        for group in range(footer.num_row_groups)
        for at in range(footer.num_columns)
        if (chunk := footer.row_group(group).column(at)).path_in_schema.partition(".")[0] in names
    )
    return any(chunk.compression in _FOREIGN or not _FOREIGN.isdisjoint(chunk.encodings) for chunk in chunks)


def _with_texts(type: pa.DataType, leaves: Iterator[pq.ColumnSchema]) -> pa.DataType:
    if pa.types.is_struct(type):
        return pa.struct([(field.name, _with_texts(field.type, leaves)) for field in type])
    if pa.types.is_map(type):
        return pa.map_(_with_texts(type.key_type, leaves), _with_texts(type.item_type, leaves))
    if pa.types.is_list(type):
        return pa.list_(_with_texts(type.value_type, leaves))
    return pa.string() if _is_enum(next(leaves)) else type


def by_arrow(footer: pq.FileMetaData, stored: pa.Schema, names: Collection[str]) -> bool:
    """Return whether Arrow has to read one of these columns, because Spark cannot, or reads other values."""
    calendar = old_calendar(footer)
    return _is_foreign(footer, names) or any(
        _of_arrow(field.type) or any(_beside_spark(leaf, calendar, pa.types.is_nested(field.type)) for leaf in leaves)
        for field, leaves in _leaves(footer, stored)
        if field.name in names
    )


def unnameable(stored: pa.Schema) -> dict[str, str]:
    """Return the columns that nobody can name, and why, as a clause: there are two of the name, or two fields of one
    name within, or a name has a character NUL, at which libraries cut it off."""
    problems = {name: f"two columns {name!r}{_WHICH}" for name, count in Counter(stored.names).items() if count > 1}
    for field in stored:
        if (within := _twice_within(field.type)) is not None:
            problems.setdefault(field.name, f"two fields {within!r} within the column {field.name!r}{_WHICH}")
        if (name := _with_nul(field)) is not None:
            problems.setdefault(field.name, f"a column or field {name!r}, and no name can have the character NUL")
    return problems


def _twice_within(type: pa.DataType) -> str | None:
    fields = [type.field(number) for number in range(type.num_fields)]
    if pa.types.is_struct(type):
        doubled: list[str] = [name for name, count in Counter(field.name for field in fields).items() if count > 1]
        if doubled:
            return doubled[0]
    return next(filter(None, (_twice_within(field.type) for field in fields)), None)


def _with_nul(field: pa.Field) -> str | None:
    """Return the first name with a NUL of a field and those within it."""
    parts = (field.type.field(number) for number in range(field.type.num_fields))
    return field.name if "\0" in field.name else next(filter(None, map(_with_nul, parts)), None)


def unknown(end: bytes) -> list[str]:
    """Return the columns of a file, by its last bytes, whose schema Arrow does not take: those with numbers of more
    than 64 bits."""
    try:
        return [name for name, type in pl.read_parquet_schema(io.BytesIO(end)).items() if "128" in str(type)]
    except pl.exceptions.PolarsError:
        return []


def _leaves(footer: pq.FileMetaData, stored: pa.Schema) -> Iterator[tuple[pa.Field, list[pq.ColumnSchema]]]:
    """Return each column with the columns that it has in the file: a nested one may have several."""
    at = 0
    for field in stored:
        count = leaf_count(field.type)
        yield field, [footer.schema.column(at + part) for part in range(count)]
        at += count


def _of_arrow(type: pa.DataType) -> bool:
    """Return whether Arrow alone knows what the file means, since it has noted these types beside it."""
    if isinstance(type, pa.BaseExtensionType) or pa.types.is_duration(type):
        return True
    return any(_of_arrow(type.field(part).type) for part in range(type.num_fields))


def _beside_spark(column: pq.ColumnSchema, calendar: OldCalendar | None, nested: bool) -> bool:
    kind = json.loads(column.logical_type.to_json())
    if kind["Type"] == "Int":
        return kind["bitWidth"] == 64 and not kind["isSigned"]
    if kind["Type"] == "Timestamp":
        # A time without a zone never is by the old calendar, but Weir has Spark read it as one with a zone.
        return (nested and _is_nanos(column)) or (calendar is not None and not kind["isAdjustedToUTC"])
    if column.physical_type == "BYTE_ARRAY" and kind["Type"] == "Decimal":
        return True
    if column.physical_type == "FIXED_LEN_BYTE_ARRAY":
        return kind["Type"] not in ("None", "Decimal")
    return kind["Type"] not in ("None", "Decimal", "Date", "String", "Enum", "JSON", "BSON")


def _is_enum(column: pq.ColumnSchema) -> bool:
    return bool(json.loads(column.logical_type.to_json())["Type"] == "Enum")


def _is_nanos(column: pq.ColumnSchema) -> bool:
    return bool(json.loads(column.logical_type.to_json()).get("timeUnit") == "nanoseconds")


def _micros(stored: int, unit: str) -> int:
    return stored // 1000 if unit == "nanoseconds" else stored * _MICROS[unit]
