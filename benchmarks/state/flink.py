"""PyFlink SQL, and what `flink_process` shares with it: the environment, the Parquet source, and following a job by
Flink's own counters.

Runs in the peers' environment (see `peers.py`). Flink has no micro-batches: one bounded job reads the whole input and
takes incremental checkpoints by time; progress is the records that the aggregating operator has read, asked for over
REST.
"""

from __future__ import annotations

import json
import platform
import sys
import time
import urllib.request
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from threading import Event, Thread
from typing import Any

from benchmarks.state.engine import Result, Task, serve

_POLL_SECONDS = 0.1


def run(task: Task, result: Result) -> None:
    """PyFlink SQL: a grouped aggregation that runs in the JVM alone.

    The sink is `blackhole`, the peer's best case: Flink's file sinks take updates only as a change log in JSON. A run
    of its own with that sink, which is not measured, shows that the same query computes the right thing.
    """
    tables = environment(task, result)
    source(tables, task)
    last = ", MAX(payload) AS payload" if task.payload else ""
    grouped = (
        "SELECT `key`, COUNT(*) AS n, SUM(`value`) AS total, MAX(`value`) AS top" + last + " FROM events GROUP BY `key`"
    )
    text = ", payload STRING" if task.payload else ""
    sink = "'connector' = 'blackhole'"
    if task.options.get("checked"):
        sink = f"'connector' = 'filesystem', 'path' = 'file://{task.durable}/output', 'format' = 'debezium-json'"
        result.output, result.form = [f"{task.durable}/output/*"], "debezium-json"
    tables.execute_sql(f"CREATE TABLE changed (`key` BIGINT, n BIGINT, total DOUBLE, top DOUBLE{text}) WITH ({sink})")
    result.settings["sink"] = "blackhole"
    run_to_end(task, result, tables.execute_sql(f"INSERT INTO changed {grouped}"), "GroupAggregate")


def configured(task: Task) -> dict[str, str]:
    """Every option that differs from Flink's defaults."""
    return {
        "parallelism.default": "2",
        "restart-strategy.type": "none",  # a failure is to be seen, not repeated
        "python.executable": sys.executable,
        "python.client.executable": sys.executable,
        "execution.runtime-mode": "STREAMING",
        "pipeline.object-reuse": "true",
        "state.backend.type": "rocksdb",
        "execution.checkpointing.incremental": "true",
        "state.backend.rocksdb.memory.managed": "true",
        "taskmanager.memory.managed.size": "1g",
        "taskmanager.memory.network.min": "128m",
        "taskmanager.memory.network.max": "128m",
        "taskmanager.numberOfTaskSlots": "2",
        "execution.checkpointing.interval": f"{task.options.get('checkpoint_seconds', 3)} s",
        "execution.checkpointing.mode": "EXACTLY_ONCE",
        "execution.checkpointing.dir": f"file://{task.durable}/checkpoints",
        "state.backend.rocksdb.localdir": f"{task.local}/rocksdb",
        "io.tmp.dirs": f"{task.local}/tmp",
        "metrics.fetcher.update-interval": "100",
        "rest.bind-port": str(task.options["port"]),
        "rest.bind-address": "127.0.0.1",
        "rest.address": "127.0.0.1",
        **task.options.get("conf", {}),
    }


def environment(task: Task, result: Result) -> Any:
    """A table environment in streaming mode on a cluster inside this process's JVM."""
    from pyflink.common import Configuration
    from pyflink.datastream import StreamExecutionEnvironment
    from pyflink.table import StreamTableEnvironment

    for directory in ("tmp", "rocksdb"):
        Path(task.local, directory).mkdir(parents=True, exist_ok=True)
    configuration = Configuration()
    for key, value in configured(task).items():
        configuration.set_string(key, value)
    tables = StreamTableEnvironment.create(StreamExecutionEnvironment.get_execution_environment(configuration))
    result.ready = time.time()
    result.settings = {key: value for key, value in configured(task).items() if "/" not in value}
    result.versions = {"apache-flink": version("apache-flink"), "python": platform.python_version()}
    return tables


def source(tables: Any, task: Task) -> None:
    """The table `events`: all files of the task's inputs."""
    text = ", payload STRING" if task.payload else ""
    tables.execute_sql(
        f"CREATE TABLE events (`key` BIGINT, `value` DOUBLE{text}) WITH ("
        f"'connector' = 'filesystem', 'path' = 'file://{task.inputs[0]}', 'format' = 'parquet')"
    )


def run_to_end(task: Task, result: Result, submitted: Any, operator: str) -> None:
    """Wait for a job; note how many records the operator whose name contains `operator` has read meanwhile."""
    job = str(submitted.get_job_client().get_job_id())
    ended = Event()
    poller = Thread(target=_follow, args=(_address(task), job, operator, result, ended), daemon=True)
    poller.start()
    submitted.wait()
    at = time.time()
    ended.set()
    poller.join()
    result.progress.append((at, task.preload + task.epochs * task.events))


def _follow(address: str, job: str, operator: str, result: Result, ended: Event) -> None:
    seen = 0
    while not ended.wait(_POLL_SECONDS):
        with suppress(OSError, ValueError):  # the cluster is not up yet, or goes down with its job
            vertices = _ask(address, f"/jobs/{job}")["vertices"]
            records = next(vertex["metrics"]["read-records"] for vertex in vertices if operator in vertex["name"])
            if records > seen:
                seen = records
                result.progress.append((time.time(), records))
            result.figures["checkpoints"] = _ask(address, f"/jobs/{job}/checkpoints")["counts"]["completed"]


def _address(task: Task) -> str:
    return f"http://127.0.0.1:{task.options['port']}"


def _ask(address: str, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}{path}", timeout=5) as answer:
        figures: dict[str, Any] = json.load(answer)
        return figures


if __name__ == "__main__":
    serve(run)
