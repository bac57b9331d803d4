"""The statistics in a Delta log of a data file's columns, by which readers skip files. They come from Parquet's footer.

They come from Parquet's footer.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from state_ops.delta.log_entries import as_json
from weir.connectors.parquet.footers import places

_COLUMNS = 32  # as many as Delta looks at by default, so that entries of wide tables stay small
_TEXT = 32  # characters of a bound
_LAST = "\U0010ffff"
_PLANE = 0x10000


def statistics(footer: pq.FileMetaData) -> str:
    """Return the `stats` of a file's add action, as JSON: rows, nulls, least and greatest values.

    It never raises, whatever the values are, for the rows may be committed: a bound that Python or JSON cannot hold is
    left out. So are the bounds of floats: Parquet's leave out NaN, which is the greatest value for Spark. And those of
    times, which Delta writes in milliseconds. A text's are cut; the greatest one is made greater than what it stands
    for.
    """
    schema = footer.schema.to_arrow_schema()
    stats: dict[str, Any] = {"numRecords": footer.num_rows}
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    at_of = places(footer)
    for field in list(schema)[:_COLUMNS]:
        at = at_of.get(field.name)
        if at is None or not footer.num_rows:  # nested, or without rows
            continue
        groups = [footer.row_group(group).column(at).statistics for group in range(footer.num_row_groups)]
        if any(group is None or group.null_count is None for group in groups):
            continue
        nulls[field.name] = sum(group.null_count for group in groups)
        bounded = [group for group in groups if group.has_min_max]
        if not _has_bounds(field.type) or any(group.num_values for group in groups if group not in bounded):
            continue
        if not bounded:
            continue
        low, high = _bounds(bounded)
        if low is not None and high is not None:
            least[field.name], greatest[field.name] = low, high
    return as_json(stats | {"minValues": least, "maxValues": greatest, "nullCount": nulls})


def _has_bounds(type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type) or pa.types.is_string(type) or pa.types.is_date(type))


def _bounds(groups: Sequence[pq.Statistics]) -> tuple[Any, Any]:
    """Return the bounds of all row groups; None where Python has no such date, or the bytes are no text."""
    try:
        return _lower(min(group.min for group in groups)), _upper(max(group.max for group in groups))
    except (ValueError, OverflowError, pa.ArrowException):
        return None, None


def _lower(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_TEXT]
    return value.isoformat() if isinstance(value, date) else value


def _upper(value: Any) -> Any:
    if isinstance(value, str):
        if len(value) <= _TEXT:
            return value
        return value[:_TEXT] + _LAST if value[_TEXT] != _LAST else None
    return value.isoformat() if isinstance(value, date) else value


def not_below(greatest: Any) -> Any:
    """Return a bound that is not below the one that was written, by what delta-rs reads of it: in entries whose
    characters are escaped by number, as those of earlier releases are, it takes the ones of an even plane, from U+20000
    on, for those of the plane below."""
    if not isinstance(greatest, str):
        return greatest
    return "".join(chr(ord(char) + _PLANE) if ord(char) // _PLANE % 2 else char for char in greatest)


def is_ambiguous(text: Any) -> bool:
    """Return whether a text that delta-rs reads may stand for another one, as `not_below` says."""
    return isinstance(text, str) and any(ord(char) // _PLANE % 2 for char in text)
