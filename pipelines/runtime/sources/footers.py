"""What the footers of Parquet files tell: of event times, and of what Spark reads in a way of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

_MICROS = {"days": 86_400_000_000, "milliseconds": 1000, "microseconds": 1}
_OLD_CALENDAR = frozenset({b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96"})


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
    # The stored numbers, since rows may have times that no datetime has: an OverflowError here would end the run.
    unit = json.loads(footer.schema.column(places[0]).logical_type.to_json()).get("timeUnit", "days")
    return Times(
        _micros(min(one.min_raw for one in groups), unit),
        _micros(max(one.max_raw for one in groups), unit),
        any(not one.has_null_count or one.null_count > 0 for one in groups),
    )


def nanos(stored: pa.Schema) -> tuple[str, ...]:
    """The columns of times in nanoseconds."""
    return tuple(field.name for field in stored if pa.types.is_timestamp(field.type) and field.type.unit == "ns")


def shifts_dates(footer: pq.FileMetaData) -> bool:
    """Whether Spark shifts dates of before 1582 and times of before 1900 that it reads here: a Spark has written them by the old calendar."""
    told = footer.metadata or {}
    written_by = told.get(b"org.apache.spark.version", b"").partition(b".")[0]
    return written_by in (b"1", b"2") or not told.keys().isdisjoint(_OLD_CALENDAR)


def _micros(stored: int, unit: str) -> int:
    return stored // 1000 if unit == "nanoseconds" else stored * _MICROS[unit]
