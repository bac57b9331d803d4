"""Slices of events for the property tests, and what a plain model knows of their event time. No Weir code.

Rows are out of order, skewed to one key, late by hours, with nulls, and tying in time.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import duckdb
import pyarrow as pa
from hypothesis import strategies as st

START = datetime(2024, 5, 1, tzinfo=UTC)

SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("ts", pa.timestamp("us", tz="UTC")),
        ("seq", pa.int64()),
        ("i", pa.int32()),
        ("f", pa.float64()),
        ("d", pa.decimal128(9, 2)),
        ("s", pa.string()),
        ("b", pa.bool_()),
    ]
)

# Rows come from a seed: what hypothesis draws one by one is mostly small and alike, and then nothing is late.
CUTS: dict[str, st.SearchStrategy] = {
    "sizes": st.lists(st.integers(0, 25), min_size=1, max_size=6),
    "seed": st.integers(0, 2**32),
    "parallelism": st.integers(1, 4),
    "batch_rows": st.sampled_from([1, 2, 7, 1000]),
}


def events(sizes: list[int], seed: int, most_behind: int = 240) -> list[list[dict]]:
    """Slices of so many rows. most_behind: minutes by which a row may be behind the newest one of its time."""
    chance, clock, seq, cut = random.Random(seed), 0, 0, []
    keys = ["hot", "hot", "hot", "süd", "", "日本", "b"]
    for size in sizes:
        rows = []
        for _ in range(size):
            clock += chance.randrange(25)
            seq += 1
            behind = chance.choice([0, 0, chance.randrange(30), chance.randrange(most_behind)])
            rows.append(
                {
                    "k": chance.choice(keys),
                    "ts": START + timedelta(minutes=clock - behind),
                    "seq": seq,
                    "i": chance.choice([None, chance.randrange(-(2**31), 2**31)]),
                    "f": chance.choice([None, chance.randrange(-40, 40) / 2]),  # halves: sums of them are exact
                    "d": chance.choice([None, Decimal(chance.randrange(-(10**9), 10**9)) / 100]),
                    "s": chance.choice([None, "", "a", "é", "zz"]),
                    "b": chance.choice([None, True, False]),
                }
            )
        cut.append(rows)
    return cut


def watermarks(cut: list[list[dict]], lateness: timedelta = timedelta()) -> list[datetime | None]:
    """W(0), W(1), ...: event time after each slice, by which the next one's rows are judged; None before the first
    row."""
    marks: list[datetime | None] = [None]
    for rows in cut:
        seen = [row["ts"] - lateness for row in rows] + ([marks[-1]] if marks[-1] is not None else [])
        marks.append(max(seen, default=None))
    return marks


def database(cut: list[list[dict]], lateness: timedelta = timedelta(), **columns: list) -> duckdb.DuckDBPyConnection:
    """All rows as the table `events`, with `slice` (from 1) and `before`, the watermark that judges the row.

    columns: further ones, each a value for every row in order.
    """
    marks = watermarks(cut, lateness)
    rows = [
        {**row, "slice": number, "before": marks[number - 1]} for number, slice_ in enumerate(cut, 1) for row in slice_
    ]
    table = pa.Table.from_pylist(
        rows, pa.schema([*SCHEMA, ("slice", pa.int64()), ("before", pa.timestamp("us", tz="UTC"))])
    )
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values, pa.int64()))
    connection = duckdb.connect(config={"threads": 1})
    connection.execute("SET TimeZone = 'UTC'")
    connection.register("events_in", table)
    connection.execute("CREATE TABLE events AS SELECT * FROM events_in")
    return connection


AGGREGATES = """
    count(*) AS n,
    coalesce(sum(i), 0)::BIGINT AS total,
    coalesce(sum(d), 0)::DECIMAL(38, 2) AS exact,
    avg(f) AS mean,
    min(s) AS low_text, max(d) AS high_decimal, bool_or(b) AS some, min(ts) AS since,
    (list(f ORDER BY {by}, f) FILTER (f IS NOT NULL))[1] AS opened,
    (list(f ORDER BY {down}, f DESC) FILTER (f IS NOT NULL))[1] AS closed,
    count(*) FILTER (i > 0) AS positive,
    coalesce(sum(d) FILTER (b AND s <> 'a'), 0)::DECIMAL(38, 2) AS of_some,
    avg(f) FILTER (b) AS mean_of_some,
    (list(f ORDER BY {down}, f DESC) FILTER (f IS NOT NULL AND (NOT b OR s IS NULL)))[1] AS newest_of_some
"""

DISTINCT_COUNTS = """
    count(DISTINCT f) AS floats, count(DISTINCT s) FILTER (b IS NOT NULL) AS texts, count(DISTINCT d) AS decimals,
    count(DISTINCT ts) AS moments, count(DISTINCT b) AS flags
"""


def aggregates(*by: str) -> str:
    """The SQL of `WANTED`; first and last by these columns."""
    return AGGREGATES.format(by=", ".join(by), down=", ".join(f"{column} DESC" for column in by))
