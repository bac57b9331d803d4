"""A pipeline with every operator that needs no function, stages without a key and one with several outputs, and what
DuckDB says of each table and of each state, from the files that have landed.

No row is late. The table of the lookups never changes, and no source is quiet before the end, but for `quiet`, which has
rows in its first file alone.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake

from state_ops.records.checkpoint import Checkpoint
from tests.recovery.harness import Site
from weir import (
    Pipeline,
    State,
    agg,
    aggregate,
    as_of,
    deduplicate,
    delta,
    desc,
    files,
    join,
    lookup,
    select,
    side,
    stage,
    top_n,
    union,
    window,
)

START = datetime(2026, 1, 1, tzinfo=UTC)
TIME = pa.timestamp("us", tz="UTC")
LATENESS = timedelta(hours=2)
NAMES = "{landing}/names"
bids = files("{landing}/bids/*.parquet", name="bids", event_time="made")
asks = files("{landing}/asks/*.parquet", name="asks", event_time="since")
quiet = files("{landing}/quiet/*.parquet", name="quiet", event_time="made", idle_after="1ms")


class Seen(State):
    """Of one key."""

    rows: int = 0


@stage("plain", source=bids, key=None, sink=delta.append("plain"))
def plain(rows: pl.DataFrame, epoch) -> pl.DataFrame:
    """Bids of an odd price."""
    return rows.filter(pl.col("v") % 2 == 1)


@stage("split", source=bids, key="k", state=Seen, outputs={"high": delta.append("high")}, sink=delta.append("low"))
def split(rows: pl.DataFrame, state, epoch) -> dict[str, pl.DataFrame]:
    """High bids, and all others."""
    state.fold(rows, rows=agg.count())
    return {"main": rows.filter(pl.col("v") < 40), "high": rows.filter(pl.col("v") >= 40).select("k", "v")}


def _joined(uid: str, **options):
    sink = delta.append(uid, event_time="made" if uid == "full" else None)
    return join(uid, bids, side(asks, where="p > 10"), on={"k": "ask"}, sink=sink, **options)


HOWS = ("inner", "left", "right", "full", "semi", "anti")
joins = [_joined(how, how=how, within=("-5m", "10m"), lateness=LATENESS) for how in HOWS]
chosen = select("chosen", bids, "k", "v * 2 AS v", "made", where="v < 60", sink=delta.append("chosen"))
both = union("both", chosen, side(plain, where="v > 9"), quiet, sink=delta.append("both"))
offers = select("offers", asks, "ask", where="p > 10", sink=delta.append("offers"))
windowed = window(
    "windowed", both, key="k", on="made", every="1h", lateness=LATENESS, sink=delta.append("windowed"),
    n=agg.count(), few=agg.count(where="v < 30"), kinds=agg.count_distinct("v"), about=agg.approx_distinct("v"),
    middle=agg.approx_quantile("v", 0.5),
)  # fmt: skip
counts = aggregate("counts", chosen, key="k", n=agg.count(), changes=True)
counted = {
    "n": agg.count(where="v % 3 = 0"),
    "kinds": agg.count_distinct("v"),
    "about": agg.approx_distinct("v"),
    "middle": agg.approx_quantile("v", 0.5),
    "last": agg.last("v"),
}
of_keys = {"keys": agg.count(), "least": agg.min("k"), "most": agg.max("k"), "kinds": agg.count_distinct("k")}
final = top_n(
    "final", windowed, key="window_start", by=[desc("n"), "k"], n=2, until="window_end", sink=delta.append("final")
)
pipeline = Pipeline(
    "every",
    (
        chosen,
        plain,
        both,
        split,
        aggregate("highs", split.output("high"), key="k", n=agg.count(), v=agg.sum("v"), sink=delta.append("highs")),
        *joins,
        _joined("ever", ttl=None),
        offers,
        join("any", chosen, offers, on={"k": "ask"}, ttl="30d", how="semi", sink=delta.append("any")),
        as_of("rated", bids, side(asks, where="p > 10"), on={"k": "ask"}, lateness=LATENESS, sink=delta.append("rated")),
        lookup("named", chosen, table=NAMES, on="k", sink=delta.append("named")),
        lookup("strictly", chosen, table=NAMES, on="k", how="inner", broadcast=False, sink=delta.append("strictly")),
        top_n("best", split, key="k", by=[desc("v"), "made"], n=3, sink=delta.upsert("best", key=["k", "rank_number"])),
        windowed,
        final,
        counts,
        aggregate("alike", counts, key="n", **of_keys, changes=True, sink=delta.upsert("alike", key="n")),
        aggregate("sums", chosen, key="k", order_by=["made", "v"], sink=delta.append("sums"), **counted),
        window("lately", split, key="k", on=None, every="1ms", n=agg.count(), sink=delta.append("lately")),
        deduplicate("unique", split, key=["k", "v"], on="made", ttl="30d", sink=delta.append("unique")),
        window("visits", split, key="k", on="made", gap="5m", lateness=LATENESS, n=agg.count(), sink=delta.append("visits")),
    ),
    max_parallelism=6,
)  # fmt: skip

_PAIR = "b.k = a.ask AND a.since BETWEEN b.made - INTERVAL 5 MINUTE AND b.made + INTERVAL 10 MINUTE"
_VERSIONS = "a AS (SELECT * FROM asks WHERE p > 10), c AS (SELECT k, v * 2 AS v, made FROM bids WHERE v < 60)"
_BOTH = "low AS (FROM bids WHERE v < 40), u AS (FROM c UNION ALL SELECT k, v, made FROM bids WHERE v % 2 = 1 AND v > 9 UNION ALL FROM quiet)"
_HOURLY = """h AS (
    SELECT k, time_bucket(INTERVAL 1 HOUR, made) AS window_start, count(*) AS n, count(*) FILTER (WHERE v < 30) AS few,
        count(DISTINCT v) AS kinds FROM u GROUP BY ALL
)"""
_WITH = f"WITH {_VERSIONS}, {_BOTH}, {_HOURLY} "
TABLES = {
    "chosen": "FROM c",
    "plain": "SELECT k, v, made FROM bids WHERE v % 2 = 1",
    "both": "FROM u",
    "low": "FROM low",
    "high": "SELECT k, v FROM bids WHERE v >= 40",
    **{
        how: f"SELECT coalesce(b.k, a.ask) AS k, b.v, b.made, a.since, a.p FROM bids b {how} JOIN a ON {_PAIR}"
        for how in ("inner", "left", "right", "full")
    },
    **{how: f"SELECT k, v, made FROM bids b {how} JOIN a ON {_PAIR}" for how in ("semi", "anti")},
    "ever": "SELECT b.k, b.v, b.made, a.since, a.p FROM bids b JOIN a ON b.k = a.ask",
    "offers": "SELECT ask FROM a",
    "any": "SELECT k, v, made FROM c b SEMI JOIN a ON b.k = a.ask",
    "rated": "SELECT b.k, b.v, b.made, a.since, a.p FROM bids b ASOF LEFT JOIN a ON b.k = a.ask AND b.made >= a.since",
    "named": "SELECT c.k, v, made, name FROM c LEFT JOIN names USING (k)",
    "strictly": "SELECT c.k, v, made, name FROM c JOIN names USING (k)",
    "windowed": "SELECT *, kinds AS about FROM h",
    "final": "SELECT k, window_start, row_number() OVER (PARTITION BY window_start ORDER BY n DESC, k) AS rank_number"
    " FROM h QUALIFY rank_number < 3",
    "best": "SELECT k, v, made, row_number() OVER (PARTITION BY k ORDER BY v DESC, made) AS rank_number FROM low"
    " QUALIFY rank_number < 4",
    "alike": "SELECT n, count(*) AS keys, min(k) AS least, max(k) AS most, count(DISTINCT k) AS kinds"
    " FROM (SELECT k, count(*) AS n FROM c GROUP BY k) GROUP BY n",
    "unique": "SELECT DISTINCT k, v FROM low",
    "visits": """
        SELECT k, min(made) AS window_start, count(*) AS n FROM (
            SELECT k, made, count(*) FILTER (WHERE gap >= INTERVAL 5 MINUTE) OVER (PARTITION BY k ORDER BY made) AS visit FROM (
                SELECT k, made, made - lag(made) OVER (PARTITION BY k ORDER BY made) AS gap
                FROM low
            )
        ) GROUP BY k, visit""",
}  # fmt: skip
"""By table, all that it has once the pipeline has been drained."""
STATES = {
    "split": "SELECT k, count(*) AS rows FROM bids GROUP BY k",
    "highs": "SELECT k, count(*) AS n, sum(v)::BIGINT AS v FROM bids WHERE v >= 40 GROUP BY k",
    "counts": "SELECT k, count(*) AS n FROM c GROUP BY k",
    "alike": TABLES["alike"],
    "sums": "SELECT k, count(*) FILTER (WHERE v % 3 = 0) AS n, count(DISTINCT v) AS kinds, arg_max(v, (made, v)) AS last"
    " FROM c GROUP BY k",
    "unique": TABLES["unique"],
    "windowed": "FROM h WHERE window_start + INTERVAL 1 HOUR > $windowed",
    "inner": """
        SELECT k, sum(b)::BIGINT AS left_rows, sum(a)::BIGINT AS right_rows FROM (
            SELECT k, 1 AS b, 0 AS a FROM bids WHERE made + INTERVAL 10 MINUTE >= $inner
            UNION ALL SELECT ask, 0, 1 FROM a WHERE since + INTERVAL 5 MINUTE >= $inner
        ) GROUP BY k""",
    "ever": """
        SELECT k, sum(b)::BIGINT AS left_rows, sum(a)::BIGINT AS right_rows FROM (
            SELECT k, 1 AS b, 0 AS a FROM bids UNION ALL SELECT ask, 0, 1 FROM a
        ) GROUP BY k""",
    "rated": """
        SELECT k, sum(b)::BIGINT AS left_rows, sum(a)::BIGINT AS right_rows FROM (
            SELECT k, 1 AS b, 0 AS a FROM bids WHERE made >= $rated
            UNION ALL SELECT ask, 0, 1 FROM a WHERE since >= $rated
            UNION ALL SELECT DISTINCT ask, 0, 1 FROM a WHERE since < $rated
        ) GROUP BY k""",
}  # fmt: skip
"""By stage, what its state has at a checkpoint, whose watermarks are parameters by stage."""


def site_at(root: Path, **options: str) -> Site:
    """A site whose files are an epoch each, with its table of names."""
    kept = {
        "WEIR_EPOCH__MAX_FILES": "1",
        "WEIR_CHECKPOINTS__NUM_RETAINED": "50",
        "WEIR_STATE__BACKEND": "memory",
        "WEIR_SPARK__PARALLELISM": "2",
    }
    site = Site(root, {**kept, **options}, pipeline, __name__)
    for name in ("bids", "asks", "quiet"):
        (site.landing / name).mkdir(parents=True)
    names = pa.table({"k": ["k0", "k1", "k1", "k3"], "name": ["nobody", "one", "uno", "three"]})
    write_deltalake(str(site.landing / "names"), names)
    return site


def land(site: Site, *numbers: int) -> None:
    """An hour of bids and asks each, no two at one time, of which some are as old as half an hour before it."""
    for number in numbers:
        chance = random.Random(number)
        moments = [
            START + timedelta(hours=number, minutes=minutes, microseconds=number)
            for minutes in chance.sample(range(-30, 60), 60)
        ]
        keys = [f"k{chance.randrange(5 if place < 40 else 7)}" for place in range(60)]
        prices = pa.array([chance.randrange(80) for _ in moments])
        bids = pa.table({"k": keys[:40], "v": prices[:40], "made": pa.array(moments[:40], TIME)})
        asks = pa.table({"ask": keys[40:], "p": prices[40:], "since": pa.array(moments[40:], TIME)})
        pq.write_table(bids, site.landing / "bids" / f"{number}.parquet")
        pq.write_table(asks, site.landing / "asks" / f"{number}.parquet")
        if number == 1:
            pq.write_table(bids, site.landing / "quiet" / f"{number}.parquet")


def said_by_duckdb(
    site: Site, queries: dict[str, str], upto: int | None = None, at: Checkpoint | None = None
) -> dict[str, pl.DataFrame]:
    """What queries make of the files.

    Args:
        upto: Of the first so many alone.
        at: Whose watermarks the queries ask for.
    """
    with duckdb.connect() as db:
        db.sql("SET TimeZone = 'UTC'")
        for name in ("bids", "asks", "quiet"):
            some = sorted((site.landing / name).glob("*.parquet"), key=lambda file: int(file.stem))[:upto]
            db.read_parquet([str(file) for file in some]).create_view(name)
        names = pl.read_delta(str(site.landing / "names"))
        db.register("names", names)
        marks = {uid: START + timedelta(0) for uid in queries}
        if at is not None:
            marks |= {uid: datetime.fromtimestamp(micros / 1e6, UTC) for uid, micros in at.watermarks.items()}
        return {
            name: db.sql(_WITH + query, params={name: marks[name]} if f"${name}" in query else None).pl()
            for name, query in queries.items()
        }
