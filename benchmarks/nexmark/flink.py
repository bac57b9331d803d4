"""The queries of Nexmark in Flink SQL, by the operators of those that nexmark/nexmark publishes, and their runs.

    python -m benchmarks.nexmark.flink --input DIR --queries q3,q7 --out DIR

They say what the truths say where the published text is vaguer: equal prices, the columns that are handed out, means
that are floats. q13 joins its side input as a stream that ends, since Flink looks no rows up in Parquet. q6 is missing,
as Flink's windows over rows take no rows back, which the best bid so far has to do, and q12 is, as Flink drops the
windows of processing time that are open when the input ends.

Flink writes Parquet by its file sink, exactly once at its checkpoints. That sink takes rows that are never taken back,
so a query with results that change hands out its log of changes (`TO_CHANGELOG`), and its content is the newest row of
each key. Flink reads the files of a folder in no order, so it gets the same rows as one file, or
two alternating ones of bids: one for each of its two readers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.nexmark.clock import Took
from benchmarks.nexmark.content import schema_of
from benchmarks.nexmark.generate import STREAMS
from benchmarks.nexmark.truth import database, names
from benchmarks.state.peers import environment
from benchmarks.state.report import SCRATCH

CHECKPOINT_SECONDS = 3
_JOB = Path(__file__).with_name("flink_job.py")
_TYPES = {"int64": "BIGINT", "double": "DOUBLE", "string": "STRING", "timestamp[us, tz=UTC]": "TIMESTAMP(6)"}
_ROWS_OF_A_COPY = 65_536
_LIMIT_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Query:
    """A query in Flink SQL over person, auction, bid and side_input.

    Streams have one more column, `event_time`: date_time to the millisecond, as Flink's windows take no finer one.

    Attributes:
        sql: What it says.
        key: If rows that were handed out change, the columns whose newest row counts.
        event_time: Whether it needs a watermark.
    """

    sql: str
    key: str = ""
    event_time: bool = False


def _ranks(*counted: str) -> str:
    conditions = ("", "price < 10000", "price >= 10000 AND price < 1000000", "price >= 1000000")
    filters = [f" FILTER (WHERE {condition})" if condition else "" for condition in conditions]
    return ", ".join(f"COUNT({what}){rows}" for what in counted for rows in filters)


_DAY = "DATE_FORMAT(date_time, 'yyyy-MM-dd')"
_DISTINCT = _ranks("*", "DISTINCT bidder", "DISTINCT auction")
_HOPS = "TABLE(HOP(TABLE bid, DESCRIPTOR(event_time), INTERVAL '2' SECOND, INTERVAL '10' SECOND))"
_COUNTS = (
    f"SELECT auction, COUNT(*) AS num, window_start, window_end FROM {_HOPS} GROUP BY auction, window_start, window_end"
)
_WINNING = (
    "SELECT * FROM (SELECT a.id, a.seller, a.category, b.bidder, b.price, b.date_time AS bid_date_time,"
    " b.extra AS bid_extra, ROW_NUMBER() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.date_time, b.seq) AS place"
    " FROM auction a, bid b WHERE a.id = b.auction AND b.date_time BETWEEN a.date_time AND a.expires) WHERE place <= 1"
)


def _windows(stream: str, columns: str) -> str:
    tumbling = f"TABLE(TUMBLE(TABLE {stream}, DESCRIPTOR(event_time), INTERVAL '10' SECOND))"
    return f"SELECT {columns}, window_start, window_end FROM {tumbling} GROUP BY {columns}, window_start, window_end"


QUERIES = {
    "q0": Query("SELECT auction, bidder, price, date_time, extra FROM bid"),
    "q1": Query("SELECT auction, bidder, price * 0.908E0, date_time, extra FROM bid"),
    "q2": Query("SELECT auction, price FROM bid WHERE MOD(auction, 123) = 0"),
    "q3": Query(
        "SELECT p.name, p.city, p.state, a.id FROM auction a JOIN person p ON a.seller = p.id"
        " WHERE a.category = 10 AND LOWER(p.state) IN ('or', 'id', 'ca')"
    ),
    "q4": Query(
        "SELECT category, AVG(CAST(final AS DOUBLE)) FROM (SELECT MAX(b.price) AS final, a.category"
        " FROM auction a, bid b WHERE a.id = b.auction AND b.date_time BETWEEN a.date_time AND a.expires"
        " GROUP BY a.id, a.category) GROUP BY category",
        key="category",
    ),
    "q5": Query(
        f"SELECT c.auction, c.num, c.window_start FROM ({_COUNTS}) c JOIN (SELECT MAX(num) AS most, window_start,"
        f" window_end FROM ({_COUNTS}) GROUP BY window_start, window_end) m"
        " ON c.window_start = m.window_start AND c.window_end = m.window_end AND c.num >= m.most",
        event_time=True,
    ),
    "q7": Query(
        "SELECT b.auction, b.price, b.bidder, b.date_time, b.extra FROM bid b JOIN (SELECT MAX(price) AS most,"
        " window_start, window_end FROM TABLE(TUMBLE(TABLE bid, DESCRIPTOR(event_time), INTERVAL '10' SECOND))"
        " GROUP BY window_start, window_end) m ON b.price = m.most"
        " WHERE b.date_time >= m.window_start AND b.date_time < m.window_end",
        event_time=True,
    ),
    "q8": Query(
        f"SELECT p.id, p.name, p.window_start FROM ({_windows('person', 'id, name')}) p"
        f" JOIN ({_windows('auction', 'seller')}) a"
        " ON p.id = a.seller AND p.window_start = a.window_start AND p.window_end = a.window_end",
        event_time=True,
    ),
    "q9": Query(f"SELECT id, seller, category, bidder, price, bid_date_time, bid_extra FROM ({_WINNING})", key="id"),
    "q10": Query(f"SELECT auction, bidder, price, date_time, extra, {_DAY}, DATE_FORMAT(date_time, 'HH:mm') FROM bid"),
    "q11": Query(
        "SELECT bidder, COUNT(*), SESSION_START(event_time, INTERVAL '10' SECOND),"
        " SESSION_END(event_time, INTERVAL '10' SECOND) FROM bid"
        " GROUP BY bidder, SESSION(event_time, INTERVAL '10' SECOND)",
        event_time=True,
    ),
    "q13": Query(
        "SELECT b.auction, b.bidder, b.price, b.date_time, s.`value`"
        " FROM bid b JOIN side_input s ON MOD(b.auction, 10000) = s.`key`"
    ),
    "q14": Query(
        "SELECT auction, bidder, 0.908E0 * price, CASE WHEN HOUR(date_time) >= 8 AND HOUR(date_time) <= 18"
        " THEN 'dayTime' WHEN HOUR(date_time) <= 6 OR HOUR(date_time) >= 20 THEN 'nightTime' ELSE 'otherTime' END,"
        " date_time, extra, CAST(CHAR_LENGTH(extra) - CHAR_LENGTH(REPLACE(extra, 'c', '')) AS BIGINT)"
        " FROM bid WHERE 0.908E0 * price > 1000000 AND 0.908E0 * price < 50000000"
    ),
    "q15": Query(f"SELECT {_DAY}, {_DISTINCT} FROM bid GROUP BY {_DAY}", key="day"),
    "q16": Query(
        f"SELECT channel, {_DAY}, MAX(DATE_FORMAT(date_time, 'HH:mm')), {_DISTINCT} FROM bid GROUP BY channel, {_DAY}",
        key="channel, day",
    ),
    "q17": Query(
        f"SELECT auction, {_DAY}, {_ranks('*')}, MIN(price), MAX(price), AVG(CAST(price AS DOUBLE)), SUM(price)"
        f" FROM bid GROUP BY auction, {_DAY}",
        key="auction, day",
    ),
    "q18": Query(
        "SELECT auction, bidder, price, channel, url, date_time, extra FROM (SELECT *, ROW_NUMBER() OVER"
        " (PARTITION BY bidder, auction ORDER BY date_time DESC, seq DESC) AS place FROM bid) WHERE place <= 1",
        key="bidder, auction",
    ),
    "q19": Query(
        "SELECT auction, bidder, price, date_time, seq, rank_number FROM (SELECT *, ROW_NUMBER() OVER"
        " (PARTITION BY auction ORDER BY price DESC, seq) AS rank_number FROM bid) WHERE rank_number <= 10",
        key="auction, rank_number",
    ),
    "q20": Query(
        "SELECT b.auction, b.bidder, b.price, b.seq, a.item_name, a.seller, a.category"
        " FROM bid b JOIN auction a ON b.auction = a.id WHERE a.category = 10"
    ),
    "q21": Query(
        "SELECT * FROM (SELECT auction, bidder, price, channel, CASE WHEN LOWER(channel) = 'apple' THEN '0'"
        " WHEN LOWER(channel) = 'google' THEN '1' WHEN LOWER(channel) = 'facebook' THEN '2'"
        " WHEN LOWER(channel) = 'baidu' THEN '3' ELSE REGEXP_EXTRACT(url, '(&|^)channel_id=([^&]*)', 2) END"
        " AS channel_id, seq FROM bid) WHERE channel_id IS NOT NULL"
    ),
    "q22": Query(
        "SELECT auction, bidder, price, channel, SPLIT_INDEX(url, '/', 3), SPLIT_INDEX(url, '/', 4),"
        " SPLIT_INDEX(url, '/', 5), seq FROM bid"
    ),
    "q23": Query(
        "SELECT b.bidder, b.price, b.seq, p.name, a.id, a.item_name"
        " FROM bid b JOIN person p ON p.id = b.bidder JOIN auction a ON a.seller = b.bidder"
    ),
}


def copied(source: Path, target: Path) -> Path:
    """The same rows in one file a stream, and of bids in two that alternate. One that is there already is taken."""
    if (target / "side_input.parquet").exists():
        return target
    for name in STREAMS:
        (target / name).mkdir(parents=True, exist_ok=True)
        files = sorted((source / name).glob("*.parquet"))
        schema = pq.read_schema(files[0])
        number = 2 if name == "bid" else 1
        writers = [
            pq.ParquetWriter(target / name / f"part-{at}.parquet", schema, compression="zstd") for at in range(number)
        ]
        for file in files:
            for batch in pq.ParquetFile(file).iter_batches(_ROWS_OF_A_COPY):
                for at, writer in enumerate(writers):
                    writer.write_batch(batch.take(pa.array(range(at, batch.num_rows, number))))
        for writer in writers:
            writer.close()
    shutil.copyfile(source / "side_input.parquet", target / "side_input.parquet")
    return target


def run_query(query: str, source: Path, out: Path, scratch: Path) -> Took:
    """Run a query until the input is used up, and write its final content.

    Args:
        query: Its name.
        source: The directory of an input that was `copied`.
        out: Where the content is written.
        scratch: A directory for Flink's checkpoints, state and output.

    Returns:
        What it took without the writing of the content. All of it is the first epoch, as Flink has none.

    Raises:
        RuntimeError: Flink has failed; the message is its own.
    """
    job = _job(query, source, scratch)
    done = _start([job])
    if done.returncode:
        raise RuntimeError(f"Flink has failed at {query}: {done.stderr.strip()[-2000:]}")
    hand_out(query, scratch / "output", out)
    return _took(scratch)


def _took(scratch: Path) -> Took:
    took = json.loads((scratch / "took.json").read_text())
    return Took(took["seconds"], took["cpu"], 0.0, 0.0)


def _job(query: str, source: Path, scratch: Path) -> Path:
    """The file that says what is run."""
    asked, schema = QUERIES[query], schema_of(query)
    columns = ", ".join(f"`{field.name}` {_TYPES[str(field.type)]}" for field in schema)
    names_of_columns = ", ".join(f"`{name}`" for name in schema.names)
    job = {
        "input": str(source.absolute()),
        "output": str((scratch / "output").absolute()),
        "took": str((scratch / "took.json").absolute()),
        "event_time": asked.event_time,
        "columns": f"op STRING, {columns}" if asked.key else columns,
        "partitions": ["dt", "hm"] if query == "q10" else [],
        "view": f"CREATE VIEW content ({names_of_columns}) AS {asked.sql}",
        "sql": "SELECT * FROM TO_CHANGELOG(input => TABLE content)" if asked.key else "SELECT * FROM content",
        "options": _options(scratch.absolute()),
    }
    (scratch / "job.json").write_text(json.dumps(job))
    return scratch / "job.json"


def _start(jobs: Sequence[Path]) -> subprocess.CompletedProcess[str]:
    """Run jobs in Flink's environment, with the reader of zstd that its Parquet format lacks."""
    flink = environment("flink", SCRATCH)
    pyspark = find_spec("pyspark")
    assert pyspark is not None and pyspark.origin is not None, "a dependency of the project"
    jars = [flink.variables["HADOOP_CLASSPATH"], *map(str, Path(pyspark.origin).parent.glob("jars/zstd-jni-*.jar"))]
    return subprocess.run(
        [flink.python, str(_JOB), *map(str, jobs)],
        env={**os.environ, **flink.variables, "HADOOP_CLASSPATH": ":".join(jars)},
        capture_output=True, text=True, timeout=_LIMIT_SECONDS,
    )  # fmt: skip


def _options(scratch: Path) -> dict[str, str]:
    """Every option that differs from Flink's defaults."""
    for name in ("tmp", "rocksdb"):
        (scratch / name).mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {
        "parallelism.default": "2",
        "restart-strategy.type": "none",
        "execution.runtime-mode": "STREAMING",
        "pipeline.object-reuse": "true",
        "state.backend.type": "rocksdb",
        "taskmanager.memory.managed.size": "1g",
        "taskmanager.memory.network.min": "128m",
        "taskmanager.memory.network.max": "128m",
        "taskmanager.numberOfTaskSlots": "2",
        "table.local-time-zone": "UTC",
        "execution.checkpointing.incremental": "true",
        "execution.checkpointing.interval": f"{CHECKPOINT_SECONDS} s",
        "execution.checkpointing.mode": "EXACTLY_ONCE",
        "execution.checkpointing.dir": f"file://{scratch}/checkpoints",
        "state.backend.rocksdb.localdir": f"{scratch}/rocksdb",
        "io.tmp.dirs": f"{scratch}/tmp",
        "rest.bind-port": port,
        "rest.bind-address": "127.0.0.1",
        "rest.address": "127.0.0.1",
    }


def hand_out(query: str, output: Path, out: Path) -> None:
    """Write the final content of a query.

    Args:
        query: Its name.
        output: The directory that Flink has written.
        out: Where the content is written.
    """
    out.mkdir(parents=True, exist_ok=True)
    asked, schema = QUERIES[query], schema_of(query)
    columns = ", ".join(
        f"timezone('UTC', {field.name}::TIMESTAMP) AS {field.name}" if pa.types.is_timestamp(field.type) else field.name
        for field in schema
    )
    written = f"read_parquet('{output}/**/*', hive_partitioning = true, hive_types_autocast = false)"
    if asked.key:  # one subtask hands out all rows of a key, in files that it numbers
        number = "string_split(filename, '-')[-1]::INT"
        written = (
            f"(FROM read_parquet('{output}/*', filename = true, file_row_number = true) QUALIFY row_number() OVER"
            f" (PARTITION BY {asked.key} ORDER BY {number} DESC, file_row_number DESC) = 1) WHERE op <> 'DELETE'"
        )
    with database(output.parent) as db:
        db.execute(f"COPY (SELECT {columns} FROM {written}) TO '{out}/{query}.parquet' (FORMAT parquet)")


def run(source: Path, out: Path, queries: Sequence[str]) -> str:
    """Run queries one after the other in one process.

    Returns:
        What Flink says of those that have failed; empty if none has.
    """
    with tempfile.TemporaryDirectory(prefix="flink-nexmark-") as scratch:
        copy = copied(source, Path(scratch) / "input")
        places = {query: Path(scratch) / query for query in queries}
        for place in places.values():
            place.mkdir()
        done = _start([_job(query, copy, place) for query, place in places.items()])
        for query, place in places.items():
            if (place / "took.json").exists():
                took = _took(place)
                hand_out(query, place / "output", out)
                print(f"{query}: {took.seconds:.1f} s, {took.cpu:.1f} s of processors", flush=True)
    return done.stderr if done.returncode else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="what benchmarks.nexmark.generate has written")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--queries", type=names, default=list(QUERIES), help="without it all that Flink expresses")
    given = parser.parse_args()
    missing = [query for query in given.queries if query not in QUERIES]
    if missing:
        parser.error(f"Flink SQL cannot say {', '.join(missing)}.")
    sys.exit(run(given.input, given.out, given.queries) or 0)


if __name__ == "__main__":
    main()
