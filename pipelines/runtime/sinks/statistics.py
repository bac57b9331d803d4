"""What a Delta log says of a data file's columns, so that readers skip files. It is taken from Parquet's footer."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_COLUMNS = 32  # as many as Delta looks at by default, so that entries of wide tables stay small
_TEXT = 32  # characters of a bound
_LAST = "\U0010ffff"


def statistics(footer: pq.FileMetaData) -> str:
    """The `stats` of a file's add action, as JSON: rows, nulls, least and greatest values.

    Of floats bounds are left out: Parquet's leave out NaN, which is the greatest value for Spark. Of times too, whose
    bounds Delta writes in milliseconds. A text's are cut; the greatest one is made greater than what it stands for.
    """
    schema = footer.schema.to_arrow_schema()
    stats: dict[str, Any] = {"numRecords": footer.num_rows}
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    places = {footer.schema.column(at).path: at for at in range(len(footer.schema))}
    for field in list(schema)[:_COLUMNS]:
        at = places.get(field.name)
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
        low, high = min(group.min for group in bounded), max(group.max for group in bounded)
        low, high = _lower(low), _upper(high)
        if low is not None and high is not None:
            least[field.name], greatest[field.name] = low, high
    return json.dumps(stats | {"minValues": least, "maxValues": greatest, "nullCount": nulls})


def _has_bounds(type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type) or pa.types.is_string(type) or pa.types.is_date(type))


def _lower(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_TEXT]
    return value.isoformat() if isinstance(value, date) else value


def _upper(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _TEXT else value[:_TEXT] + _LAST
    return value.isoformat() if isinstance(value, date) else value
