"""The queries of Nexmark that Spark Structured Streaming expresses with operators of its own, and their runs.

    python -m benchmarks.nexmark.spark --input DIR --queries q3,q7 --out DIR

They read the same files, as many in a micro-batch as Weir takes in an epoch, and write Parquet. A query in append mode
writes by Spark's file sink, exactly once; one in update mode writes what has changed by `foreachBatch`, without the
transaction that would make that exactly once. Spark has no watermark at the end of the input: queries with windows get
one more row a stream, far in the future, which closes them.

It has no operator for q4, q6 and q9 (the best rows of a join without windows: what is behind a join works in append
mode alone), for q15 and q16 (distinct counts of a stream), and for q19 (the first ten).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.nexmark.clock import Clock, Took
from benchmarks.nexmark.content import schema_of
from benchmarks.nexmark.generate import STREAMS
from benchmarks.nexmark.truth import database, names

_PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_FAR = datetime(2200, 1, 1, tzinfo=UTC)
_CLOSER = {pa.int64(): -1, pa.string(): ""}  # nothing is null: a join drops nulls before they move the watermark
_BATCH = "__batch"
APPEND, UPDATE = "append", "update"
_BIDS_OF_WINDOWS = "explode(filter(bids, bid -> bid.price = highest)) AS bid"


@dataclass(frozen=True, slots=True)
class Query:
    """A query in Spark's SQL over the streams person, auction and bid, and the table side_input.

    Attributes:
        sql: What it says.
        mode: Of its output, "append" or "update".
        key: In update mode, the columns whose newest row counts.
        final: The content, from the rows that count; by default all of them.
        windows: Whether windows must be closed when there is no more input.
    """

    sql: str
    mode: str = APPEND
    key: str = ""
    final: str = "FROM rows"
    windows: bool = False


def _ranks() -> str:
    rank = {"rank1": "price < 10000", "rank2": "price >= 10000 AND price < 1000000", "rank3": "price >= 1000000"}
    counts = (f"count(*) FILTER (WHERE {condition}) AS {name}_bids" for name, condition in rank.items())
    return ", ".join(["count(*) AS total_bids", *counts])


QUERIES = {
    "q0": Query("SELECT auction, bidder, price, date_time, extra FROM bid"),
    "q1": Query("SELECT auction, bidder, price * 0.908D AS price, date_time, extra FROM bid"),
    "q2": Query("SELECT auction, price FROM bid WHERE auction % 123 = 0"),
    "q3": Query(
        "SELECT p.name, p.city, p.state, a.id FROM auction a JOIN person p ON p.id = a.seller"
        " WHERE a.category = 10 AND lower(p.state) IN ('or', 'id', 'ca')"
    ),
    "q5": Query(
        "WITH counted AS (SELECT auction, count(*) AS num, window"
        " FROM bid GROUP BY auction, window(date_time, '10 seconds', '2 seconds')),"
        " most AS (SELECT window, max(num) AS highest, collect_list(struct(auction, num)) AS auctions"
        " FROM counted GROUP BY window)"
        " SELECT a.auction, a.num, window_start FROM (SELECT window.start AS window_start,"
        " explode(filter(auctions, a -> a.num = highest)) AS a FROM most)",
        windows=True,
    ),
    "q7": Query(
        "WITH best AS (SELECT window, max(price) AS highest,"
        " collect_list(struct(auction, price, bidder, date_time, extra)) AS bids"
        " FROM bid GROUP BY window(date_time, '10 seconds'))"
        " SELECT bid.auction, bid.price, bid.bidder, bid.date_time, bid.extra"
        f" FROM (SELECT {_BIDS_OF_WINDOWS} FROM best)",
        windows=True,
    ),
    "q8": Query(
        "WITH joined AS (SELECT id, name, window FROM person GROUP BY id, name, window(date_time, '10 seconds')),"
        " opened AS (SELECT seller, window FROM auction GROUP BY seller, window(date_time, '10 seconds'))"
        " SELECT joined.id, joined.name, joined.window.start AS starttime"
        " FROM joined JOIN opened ON opened.seller = joined.id AND opened.window = joined.window",
        windows=True,
    ),
    "q10": Query(
        "SELECT auction, bidder, price, date_time, extra, date_format(date_time, 'yyyy-MM-dd') AS dt,"
        " date_format(date_time, 'HH:mm') AS hm FROM bid"
    ),
    "q11": Query(
        "SELECT bidder, count(*) AS bid_count, session_window.start AS starttime, session_window.end AS endtime"
        " FROM bid GROUP BY bidder, session_window(date_time, '10 seconds')",
        windows=True,
    ),
    "q12": Query(
        "SELECT bidder, count(*) AS bid_count, window.start AS began"
        " FROM (SELECT *, current_timestamp() AS now FROM bid) GROUP BY bidder, window(now, '10 seconds')",
        UPDATE,
        "bidder, began",
        "SELECT bidder, sum(bid_count)::BIGINT AS bid_count FROM rows GROUP BY bidder",
    ),
    "q13": Query(
        "SELECT b.auction, b.bidder, b.price, b.date_time, s.value"
        " FROM bid b JOIN side_input s ON s.key = b.auction % 10000"
    ),
    "q14": Query(
        "SELECT auction, bidder, 0.908D * price AS price, CASE WHEN hour(date_time) BETWEEN 8 AND 18 THEN 'dayTime'"
        " WHEN hour(date_time) <= 6 OR hour(date_time) >= 20 THEN 'nightTime' ELSE 'otherTime' END AS bid_time_type,"
        " date_time, extra, CAST(length(extra) - length(replace(extra, 'c', '')) AS bigint) AS c_counts"
        " FROM bid WHERE 0.908D * price > 1000000 AND 0.908D * price < 50000000"
    ),
    "q17": Query(
        f"SELECT auction, date_format(date_time, 'yyyy-MM-dd') AS day, {_ranks()}, min(price) AS min_price,"
        " max(price) AS max_price, avg(price) AS avg_price, sum(price) AS sum_price FROM bid GROUP BY 1, 2",
        UPDATE,
        "auction, day",
    ),
    "q18": Query(
        "SELECT auction, bidder, last.* FROM (SELECT auction, bidder, max_by("
        "struct(price, channel, url, date_time, extra), struct(date_time, seq)) AS last FROM bid GROUP BY 1, 2)",
        UPDATE,
        "auction, bidder",
    ),
    "q20": Query(
        "SELECT b.auction, b.bidder, b.price, b.seq AS bid_seq, a.item_name, a.seller, a.category"
        " FROM bid b JOIN auction a ON a.id = b.auction WHERE a.category = 10"
    ),
    "q21": Query(
        "SELECT auction, bidder, price, channel, CASE lower(channel)"
        " WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3'"
        " ELSE regexp_extract(url, '(&|^)channel_id=([^&]*)', 2) END AS channel_id, seq FROM bid"
        " WHERE lower(channel) IN ('apple', 'google', 'facebook', 'baidu') OR url RLIKE '(&|^)channel_id='"
    ),
    "q22": Query(
        "SELECT auction, bidder, price, channel, split_part(url, '/', 4) AS dir1, split_part(url, '/', 5) AS dir2,"
        " split_part(url, '/', 6) AS dir3, seq FROM bid"
    ),
    "q23": Query(
        "SELECT b.bidder, b.price, b.seq AS bid_seq, p.name, a.id AS auction, a.item_name"
        " FROM bid b JOIN person p ON p.id = b.bidder JOIN auction a ON a.seller = b.bidder"
    ),
}


def session(scratch: Path) -> Any:
    """Spark with two cores, as many partitions, and RocksDB for state."""
    from pyspark.sql import SparkSession

    from weir.execution.spark.java import java_home
    from weir.settings.configuration import load

    os.environ["JAVA_HOME"] = str(java_home(load({}).cache_dir))
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").appName("nexmark")
    for key, value in {
        "spark.driver.memory": "4g",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": str(scratch / "spark"),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.streaming.stateStore.providerClass": _PROVIDER,
        "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    }.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def run_query(spark: Any, query: str, source: Path, out: Path, scratch: Path, files: int) -> Took:
    """Run a query until the input is used up, and write its final content.

    Args:
        spark: The session.
        query: Its name.
        source: The directory of the input.
        out: Where the content is written.
        scratch: A directory for its checkpoints and output.
        files: Of each folder in one micro-batch.

    Returns:
        What it took without the writing of the content.
    """
    asked = QUERIES[query]
    if asked.windows:
        source = _closing(source, scratch / "input")
    for name in STREAMS:
        rows = spark.readStream.schema(spark.read.parquet(str(source / name)).schema)
        stream = rows.option("maxFilesPerTrigger", files).parquet(str(source / name))
        stream.withWatermark("date_time", "1 minute").createOrReplaceTempView(name)
    spark.read.parquet(str(source / "side_input.parquet")).createOrReplaceTempView("side_input")
    clock, output = Clock(), scratch / "output"
    writer = spark.sql(asked.sql).writeStream.outputMode(asked.mode)
    writer = writer.option("checkpointLocation", str(scratch / "checkpoint")).trigger(availableNow=True)
    if asked.mode == APPEND:
        running = writer.format("parquet").start(str(output))
    else:
        running = writer.foreachBatch(lambda rows, number: _write(rows, number, output)).start()
    while not running.awaitTermination(0.02):
        if running.lastProgress is not None:
            clock.epoch()
    took = clock.took()
    _hand_out(query, asked, output, out)
    return took


def _write(rows: Any, number: int, output: Path) -> None:
    from pyspark.sql import functions as F

    rows.withColumn(_BATCH, F.lit(number)).write.mode("append").parquet(str(output))


def _hand_out(query: str, asked: Query, output: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    newest = f"QUALIFY row_number() OVER (PARTITION BY {asked.key} ORDER BY {_BATCH} DESC) = 1" if asked.key else ""
    columns = ", ".join(schema_of(query).names)
    with database(output.parent) as db:
        db.execute(f"CREATE VIEW rows AS FROM read_parquet('{output}/*.parquet') {newest}")
        db.execute(f"COPY (SELECT {columns} FROM ({asked.final})) TO '{out}/{query}.parquet' (FORMAT parquet)")


def _closing(source: Path, target: Path) -> Path:
    """The same input, linked, with a last file of each stream that has one row far in the future."""
    for name in STREAMS:
        (target / name).mkdir(parents=True)
        files = sorted((source / name).glob("*.parquet"))
        for file in files:
            os.link(file, target / name / file.name)
        schema = pq.read_schema(files[0])
        row = {field.name: _CLOSER.get(field.type, _FAR) for field in schema}
        pq.write_table(pa.Table.from_pylist([row], schema), target / name / "part-99999.parquet")
    os.link(source / "side_input.parquet", target / "side_input.parquet")
    return target


def run(source: Path, out: Path, queries: Sequence[str], files: int) -> None:
    """Run queries one after the other in one session."""
    with tempfile.TemporaryDirectory(prefix="spark-nexmark-") as scratch:
        spark = session(Path(scratch))
        for query in queries:
            directory = Path(scratch) / query
            directory.mkdir()
            took = run_query(spark, query, source, out, directory, files)
            print(f"{query}: {took.seconds:.1f} s, {took.cpu:.1f} s of processors", flush=True)
        spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="what benchmarks.nexmark.generate has written")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--queries", type=names, default=list(QUERIES), help="without it all that Spark expresses")
    parser.add_argument("--files", type=int, default=4, help="of each folder in one micro-batch")
    given = parser.parse_args()
    missing = [query for query in given.queries if query not in QUERIES]
    if missing:
        parser.error(f"Spark has no operators for {', '.join(missing)}.")
    run(given.input, given.out, given.queries, given.files)


if __name__ == "__main__":
    main()
