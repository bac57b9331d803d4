"""What the footers of Parquet files tell of event times."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

import pyarrow.parquet as pq

from state_ops.checkpoint import to_micros


@dataclass(frozen=True, slots=True)
class Times:
    """The least and the greatest value of a column in microseconds since 1970 UTC; nulls: whether it has, or may have, some."""

    least: int
    greatest: int
    nulls: bool


def times(footer: pq.FileMetaData, column: str) -> Times | None:
    """Of a column of timestamps or dates, by the statistics of the row groups; None where they do not tell, or there is no row."""
    # By path: a field of the same name inside a struct is another column. Two of one path are a column "a.b" and a struct's.
    places = [index for index in range(footer.num_columns) if footer.schema.column(index).path == column]
    if len(places) != 1:
        return None
    groups = [footer.row_group(group).column(places[0]).statistics for group in range(footer.num_row_groups)]
    if not groups or any(one is None or not one.has_min_max for one in groups):
        return None
    return Times(
        min(_micros(one.min) for one in groups),
        max(_micros(one.max) for one in groups),
        any(not one.has_null_count or one.null_count > 0 for one in groups),
    )


def _micros(moment: Any) -> int:
    if isinstance(moment, date) and not isinstance(moment, datetime):
        moment = datetime(moment.year, moment.month, moment.day, tzinfo=UTC)
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return aware.value // 1000 if hasattr(aware, "value") else to_micros(aware)  # pandas gives nanoseconds whole
