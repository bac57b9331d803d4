"""Statements of Flink SQL over the three streams, each of which writes Parquet. Runs in Flink's own environment.

python flink_job.py job.json ...
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_STREAMS = {
    "person": "id BIGINT, name STRING, email_address STRING, credit_card STRING, city STRING, state STRING,"
    " date_time TIMESTAMP(6), extra STRING, seq BIGINT",
    "auction": "id BIGINT, item_name STRING, description STRING, initial_bid BIGINT, reserve BIGINT,"
    " date_time TIMESTAMP(6), expires TIMESTAMP(6), seller BIGINT, category BIGINT, extra STRING, seq BIGINT",
    "bid": "auction BIGINT, bidder BIGINT, price BIGINT, channel STRING, url STRING, date_time TIMESTAMP(6),"
    " extra STRING, seq BIGINT",
}
_OPTIONS = (
    "'connector' = 'filesystem', 'format' = 'parquet', 'parquet.utc-timezone' = 'true',"
    " 'parquet.write.int64.timestamp' = 'true', 'parquet.timestamp.time.unit' = 'micros'"
)


def main() -> None:
    """Run one job after the other; what fails has no figures, and stderr says why."""
    failed = 0
    for file in sys.argv[1:]:
        try:
            _run(json.loads(Path(file).read_text()))
        except Exception as error:
            failed += 1
            print(f"{file}: {error}", file=sys.stderr)
    sys.exit(failed > 0)


def _run(job: dict[str, Any]) -> None:
    from pyflink.common import Configuration
    from pyflink.datastream import StreamExecutionEnvironment
    from pyflink.table import StreamTableEnvironment

    configuration = Configuration()
    for key, value in job["options"].items():
        configuration.set_string(key, value)
    tables = StreamTableEnvironment.create(StreamExecutionEnvironment.get_execution_environment(configuration))
    tables.execute_sql("SELECT 1").wait()  # a first cluster, whose classes are loaded then
    _declare(tables, job)
    began = time.perf_counter(), _cpu()
    tables.execute_sql(f"INSERT INTO handed_out {job['sql']}").wait()
    took = {"seconds": time.perf_counter() - began[0], "cpu": _cpu() - began[1]}
    Path(job["took"]).write_text(json.dumps(took))


def _declare(tables: Any, job: dict[str, Any]) -> None:
    for name, columns in _STREAMS.items():
        more = f"{columns}, event_time AS CAST(date_time AS TIMESTAMP(3))"
        if job["event_time"]:
            more += ", WATERMARK FOR event_time AS event_time - INTERVAL '1' MINUTE"
        tables.execute_sql(f"CREATE TABLE {name} ({more}) WITH ({_OPTIONS}, 'path' = 'file://{job['input']}/{name}')")
    side = f"{_OPTIONS}, 'path' = 'file://{job['input']}/side_input.parquet'"
    tables.execute_sql(f"CREATE TABLE side_input (`key` BIGINT, `value` STRING) WITH ({side})")
    partitioned = f" PARTITIONED BY ({', '.join(job['partitions'])})" if job["partitions"] else ""
    written = f"{_OPTIONS}, 'path' = 'file://{job['output']}'"
    tables.execute_sql(f"CREATE TABLE handed_out ({job['columns']}){partitioned} WITH ({written})")
    tables.execute_sql(job["view"])


def _cpu() -> float:
    """Processor seconds of this process and of its JVM."""
    processes = {int(entry.name): _stat(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    ours, last = {os.getpid()}, set()
    while ours != last:
        last = set(ours)
        ours |= {pid for pid, stat in processes.items() if stat and int(stat[1]) in ours}
    ticks = sum(int(stat[11]) + int(stat[12]) for pid, stat in processes.items() if stat and pid in ours)
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(process: Path) -> list[str]:
    try:
        return (process / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []  # it has ended meanwhile


if __name__ == "__main__":
    main()
