"""Dates and times of files that Spark wrote by the Julian calendar, which it shifts when it reads them, and so does
Weir.

Spark before 3.0, and later Sparks in their mode LEGACY, count days before 15 October 1582 by the Julian calendar, and
times before 1900 by the offsets that Java's old time zones have. Such a file says so in its footer. Where it does,
Spark's reader is followed to the second (`org.apache.spark.sql.catalyst.util.RebaseDateTime`), by the table that Spark
itself brings."""

from __future__ import annotations

import functools
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from state_ops.arrow import frames
from state_ops.arrow.columns import array_of_fixed, fixed_values, nulls_of
from state_ops.errors import ConfigurationError

_VERSION, _ZONE = b"org.apache.spark.version", b"org.apache.spark.timeZone"
_DATES, _INT96 = b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96"
_GREGORIAN = -141_427  # days since 1970 of 15 October 1582; the day before it was the 4th
_DAY = 86_400  # seconds
_MICROS = 1_000_000
_CUSTOM_ZONE = re.compile(r"GMT([+-])(\d{1,2})(?::?(\d\d))?")

Shift = Callable[[pa.Array], pa.Array]


@dataclass(frozen=True, slots=True)
class OldCalendar:
    """Which values of a file are by the old calendar: dates and times, times of 96 bits.

    Attributes:
        zone: Of the session that wrote it.
    """

    dates: bool
    int96: bool
    zone: str

    def shifts(self, column: pq.ColumnSchema) -> Shift | None:
        """Return the shift of a stored column's values to the calendar of today, or None if they need none."""
        if column.physical_type == "INT96":
            return self._times if self.int96 else None
        kind = json.loads(column.logical_type.to_json())
        if not self.dates:
            return None
        if kind["Type"] == "Date":
            return _dates
        if kind["Type"] != "Timestamp" or kind["timeUnit"] == "nanoseconds":  # which no Spark writes
            return None
        return self._times if kind["isAdjustedToUTC"] else None

    def _times(self, times: pa.Array) -> pa.Array:
        times = times.cast(pa.timestamp("us", tz=times.type.tz))
        return array_of_fixed(times.type, shifted_micros(fixed_values(times), self.zone), nulls_of(times))


def old_calendar(footer: pq.FileMetaData) -> OldCalendar | None:
    """Return the parts of a file that are by the old calendar; None: there are none."""
    metadata: Mapping[bytes, bytes] = footer.metadata or {}
    if _VERSION not in metadata:
        return None
    version = metadata[_VERSION].decode()  # Spark too compares it as text
    calendar = OldCalendar(
        version < "3.0.0" or _DATES in metadata,
        version < "3.1.0" or _INT96 in metadata,
        metadata.get(
            _ZONE, b"UTC"
        ).decode(),  # where it is missing, Spark takes the JVM's, which is UTC in Weir's sessions
    )
    return calendar if calendar.dates or calendar.int96 else None


def _dates(days: pa.Array) -> pa.Array:
    return array_of_fixed(days.type, shifted_days(fixed_values(days)), nulls_of(days))


def shifted_days(days: np.ndarray) -> np.ndarray:
    """Days since 1970 that have the same year, month and day in today's calendar, also where it had not begun."""
    wide = days.astype(np.int64)
    return np.where(wide < _GREGORIAN, wide + _shift(wide), wide).astype(np.int32)


def shifted_micros(micros: np.ndarray, zone: str) -> np.ndarray:
    """Microseconds since 1970 UTC that show the same date and clock in a time zone in today's calendar."""
    switches, shifts = _switches(zone)
    seconds = micros // _MICROS
    at = np.searchsorted(switches, seconds, side="right") - 1
    shift = shifts[np.maximum(at, 0)]
    before = at < 0
    if before.any():  # before the year 1: Spark has no table for it either
        utc, shifts_utc = _switches("UTC")
        offset = utc[0] - switches[0]
        local = (seconds[before] + offset) // _DAY
        shift[before] = _shift(local) * _DAY + shifts[0] - shifts_utc[0]
    shifted: np.ndarray = micros + shift * _MICROS
    return shifted


def _shift(days: np.ndarray) -> np.ndarray:
    """Return the number of days by which days of the Julian calendar have to be shifted."""
    # Years begin in March, so that the day that today's calendar lacks in some of them is the last of its year.
    since = days + 719_470  # 1 March of the year 0, Julian
    year = (4 * since + 3) // 1461
    day = since - year * 1461 // 4
    gregorian = year * 365 + year // 4 - year // 100 + year // 400 - 719_468
    shift: np.ndarray = gregorian + day - days
    return shift


@functools.cache
def _switches(zone: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds from which on seconds are added, and how many; both ascend by the former."""
    tables = _tables()
    if zone in tables:
        return tables[zone]
    custom = _CUSTOM_ZONE.fullmatch(zone)
    offset = 0  # as Java has it for what it does not know
    if custom is not None:
        offset = (int(custom[2]) * 3600 + int(custom[3] or 0) * 60) * (-1 if custom[1] == "-" else 1)
    switches, shifts = tables["UTC"]
    return switches - offset, shifts


@functools.cache
def _tables() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found = find_spec("pyspark")  # it is not imported: another thread may be the one that does
    place = found.origin if found is not None and found.origin else "pyspark"
    # In a worker PySpark comes out of an archive that lies beside the jars.
    jar = next((jar for parent in Path(place).parents for jar in parent.glob("jars/spark-sql-api_*.jar")), None)
    if jar is None:
        raise ConfigurationError(
            "A file has dates by the calendar of old Sparks, and Spark's table of old time zones is not here.",
            where=place,
            next="Install pyspark with its jars, or have Spark write the file anew, with "
            "spark.sql.parquet.*RebaseModeInWrite=CORRECTED.",
        )
    with zipfile.ZipFile(jar) as packed:
        zones: Sequence[Mapping[str, list[int] | str]] = json.loads(packed.read("julian-gregorian-rebase-micros.json"))
    return {
        str(zone["tz"]): (np.array(zone["switches"], np.int64), np.array(zone["diffs"], np.int64)) for zone in zones
    }


def leaf_count(type: pa.DataType) -> int:
    """Return how many columns of a Parquet file a column of this Arrow type has."""
    if isinstance(type, pa.BaseExtensionType):
        return leaf_count(type.storage_type)
    return sum(leaf_count(type.field(part).type) for part in range(type.num_fields)) or 1


def shifts_of(parquet: pq.ParquetFile) -> dict[str, list[Shift | None]]:
    """Return for each column with values by an old calendar the shifts of its parts to today's calendar."""
    calendar = old_calendar(parquet.metadata)
    shifts_by_column: dict[str, list[Shift | None]] = {}
    if calendar is None:
        return shifts_by_column
    at = 0
    for field in parquet.schema_arrow:
        count = leaf_count(field.type)
        shifts_by_column[field.name] = [calendar.shifts(parquet.schema.column(at + part)) for part in range(count)]
        at += count
    return {name: shifts for name, shifts in shifts_by_column.items() if any(shifts)}


def shifted(column: pa.ChunkedArray, shifts: Sequence[Shift | None]) -> pa.ChunkedArray:
    """Return a column as today's calendar has it.

    Args:
        shifts: Of its parts.
    """

    def leaf(array: pa.Array, rest: Iterator[Shift | None]) -> pa.Array:
        shift = next(rest)
        return array if shift is None else shift(array)

    def whole(chunk: pa.Array) -> pa.Array:
        rest = iter(shifts)
        return frames.with_leaves(chunk, lambda array: leaf(array, rest))

    return pa.chunked_array([whole(chunk) for chunk in column.chunks])
