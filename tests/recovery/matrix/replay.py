"""The input of the crash matrix, and what its pipeline means, a row at a time. Nothing of Weir is imported here.

A slice is one file, whatever happens in between: so lateness, which is judged by the slices before, is fixed too.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

FILES = 3
START = datetime(2024, 5, 1, tzinfo=UTC)
LATENESS, HOUR = timedelta(minutes=20), timedelta(hours=1)
SCHEMA = pa.schema(
    [
        ("site", pa.string()),
        ("meter", pa.int32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("seq", pa.int64()),
        ("value", pa.int64()),
        ("gone", pa.bool_()),
    ]
)

Row = dict[str, Any]


def slices() -> list[list[Row]]:
    """The rows of each file. The second has one key only, so that most subtasks have nothing to do in its epoch."""
    chance = random.Random(20240501)
    slices = []
    for number in range(FILES):
        rows = []
        for index in range(40 if number != 1 else 7):
            at = START + 2 * HOUR * number + timedelta(minutes=chance.randrange(150))
            if number == 2 and index % 9 == 4:
                at -= 3 * HOUR  # its window closed in an epoch before: late
            rows.append(
                {
                    "site": chance.choice("abcd") if number != 1 else "b",
                    "meter": chance.randrange(3) if number != 1 else 1,
                    "at": at,
                    "seq": 100 * number + index,
                    "value": chance.randrange(1000),
                    "gone": number != 1 and index % 13 == 6,
                }
            )
        slices.append(rows)
    return slices


def land(directory: Path, first: int, last: int) -> None:
    """Write the files `first` up to `last` (not included)."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, rows in list(enumerate(slices()))[first:last]:
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), directory / f"{number:03d}.parquet")


@dataclass
class Replay:
    """tables, states: rows as tuples, each table a multiset: a row that is there twice counts twice."""

    meters: dict[tuple, dict] = field(default_factory=dict)
    windows: dict[tuple, dict] = field(default_factory=dict)
    sites: dict[str, dict] = field(default_factory=dict)
    hourly: list[tuple] = field(default_factory=list)
    late: list[tuple] = field(default_factory=list)
    peaks: list[tuple] = field(default_factory=list)
    newest: datetime | None = None
    closed: datetime | None = None

    def slice(self, rows: list[Row], drain: bool = False) -> None:
        judged_by, gone = self.closed, set()
        for row in sorted(rows, key=lambda row: (row["at"], row["seq"])):
            self._reading(row, judged_by)
            if row["gone"]:
                gone.add((row["site"], row["meter"]))
        for key in gone:
            del self.meters[key]
        self.newest = max([row["at"] for row in rows] + ([self.newest] if self.newest else []))
        self.closed = max(self.newest - LATENESS, self.closed or self.newest - LATENESS)
        for site, start in sorted(self.windows):
            if drain or start + HOUR <= self.closed:
                self._close(site, start, self.windows.pop((site, start)))

    def _reading(self, row: Row, judged_by: datetime | None) -> None:
        meter = self.meters.setdefault(
            (row["site"], row["meter"]), {"readings": 0, "total": 0, "last": None, "last_at": None}
        )
        step = None if meter["last"] is None else row["value"] - meter["last"]
        meter["readings"] += 1
        meter["total"] += row["value"]
        meter["last"], meter["last_at"] = row["value"], row["at"]
        start = row["at"].replace(minute=0, second=0, microsecond=0)
        if judged_by is not None and start + HOUR <= judged_by:
            self.late.append((row["site"], row["meter"], row["at"], row["seq"], row["value"], step))
            return
        window = self.windows.setdefault((row["site"], start), {"values": [], "steps": 0})
        window["values"].append(row["value"])
        window["steps"] += step or 0

    def _close(self, site: str, start: datetime, window: dict) -> None:
        total = sum(window["values"])
        self.hourly.append(
            (site, start, start + HOUR, len(window["values"]), total, max(window["values"]), window["steps"])
        )
        totals = self.sites.setdefault(site, {"hours": 0, "best": None, "last": None})
        self.peaks.append((site, start, total, totals["last"]))
        totals["hours"] += 1
        totals["best"] = total if totals["best"] is None else max(totals["best"], total)
        totals["last"] = total


@dataclass(frozen=True)
class Expected:
    """By name of the table, and of the stage: its rows, each a tuple in the order of the columns."""

    tables: dict[str, Counter]
    states: dict[str, Counter]


def expected(files: int = FILES, deployed: int | None = None) -> Expected:
    """After the first so many files and a drain.

    Args:
        deployed: The number of epochs before a deploy, the drain among them. Before it, the table `peaks` has a row per
            site, the newest. After it, rows are appended there.
    """
    replay, before = Replay(), 0
    for number, rows in enumerate([*slices()[:files], []], 1):
        replay.slice(rows, drain=number > files)
        if number == deployed:
            before = len(replay.peaks)
    newest = {row[0]: row for row in sorted(replay.peaks[:before], key=lambda row: row[1])}
    peaks = [*newest.values(), *replay.peaks[before:]]
    return Expected(
        {"hourly": Counter(replay.hourly), "hourly_late": Counter(replay.late), "peaks": Counter(peaks)},
        {
            "meters": Counter((*key, *meter.values()) for key, meter in replay.meters.items()),
            "hourly": Counter(),
            "peaks": Counter((site, *totals.values()) for site, totals in replay.sites.items()),
        },
    )
