"""Columns whose values stand in a file's directories, as Hive and Spark write them: `date=2026-01-31/hour=7/a.csv`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from urllib.parse import unquote

import pyarrow as pa

Partition = tuple[str, str | None]
"""A column, and the text of its value; None: null."""

TYPES = {"string": pa.string(), "int": pa.int64(), "date": pa.date32()}
"""By the name that authors write."""

_NULL = "__HIVE_DEFAULT_PARTITION__"
_INT = re.compile(r"-?[0-9]{1,18}")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def partitions_of(name: str) -> tuple[Partition, ...]:
    """Return the columns of a file by its path below its source's directory, each once: of two the one that is
    deeper."""
    pairs = (part.partition("=") for part in name.split("/")[:-1] if "=" in part[1:])
    values = {_unescaped(column): None if text == _NULL else _unescaped(text) for column, _, text in pairs}
    return tuple(values.items())


def _unescaped(text: str) -> str:
    """Return a text without its escapes; as it stands where they are no UTF-8."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        return text


def type_of(text: str | None) -> pa.DataType:
    """Return the type that a value has by itself: int64, date or text; that of null is null."""
    if text is None:
        return pa.null()
    return next((type for type in (pa.int64(), pa.date32()) if fits(text, type)), pa.string())


def fits(text: str | None, type: pa.DataType) -> bool:
    """Return whether a value is of a type."""
    if text is None or pa.types.is_string(type):
        return True
    if pa.types.is_int64(type):
        return _INT.fullmatch(text) is not None
    return pa.types.is_date32(type) and _DATE.fullmatch(text) is not None and _is_date(text)


def with_columns(table: pa.Table, partitions: Sequence[Partition], columns: Sequence[str] | None) -> pa.Table:
    """Return the rows of a file with the columns of its directories, as text; a column of the file that has the same
    name is not seen.

    Args:
        columns: Those that are wanted, in this order; None: all.
    """
    for name, text in partitions:
        values = pa.nulls(len(table)) if text is None else pa.repeat(text, len(table))
        if name in table.column_names:
            table = table.drop_columns([name])
        table = table.append_column(name, values)
    return table if columns is None else table.select(list(columns))


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True
