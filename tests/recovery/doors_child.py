"""Runs of one source, one stage and one sink, each in a process of its own that dies at its n-th request of storage or
of a sink.

`python -m tests.recovery.doors_child` reads an `Order` per line of stdin and carries it out in a fork of itself: the
imports, which take longer than a run, happen once. It starts no thread, or its forks could not use the libraries.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import polars as pl
import pyarrow as pa

from state_ops.checkpoints.registry import Registry
from state_ops.storage.storage import Storage
from tests.recovery.ledger import Ledger, LedgerSink, transaction
from tests.recovery.queue_source import QueueSource
from tests.weir.sources.partitions import PartitionsSource
from weir import Epoch, Pipeline, State, ValueState, agg, delta, files, foreach, kafka, stage
from weir.connectors.generator import GeneratorSource
from weir.epoch import positions, steps
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run
from weir.settings import configuration as settings

SCHEMA = {"seq": pa.int64(), "id": pa.int64()}


class Count(State):
    """Of one key."""

    rows: int = 0


def source_of(kind: str, place: dict[str, str]) -> Any:
    match kind:
        case "parquet":
            return files("{landing}/*.parquet", name="in")
        case "csv" | "json" | "avro":
            return files(f"{{landing}}/*.{kind}", name="in", format=kind, schema=SCHEMA)
        case "generator":
            return GeneratorSource(name="in", end=int(place["rows"]), keys=7, seed=3)
        case "delta":  # what the first 15 versions left, then the others
            return delta.table("{landing}", name="in", start={"version": 14, "snapshot": True})
        case "changes":
            return delta.table("{landing}", name="in", start={"version": 0}, changes=True)
        case "partitions" | "archived":
            return PartitionsSource(name="in", archive=kind == "archived")
        case "queue":
            return QueueSource(name="in")
        case "kafka":
            return kafka(place["topic"], name="in", servers=place["servers"], schema=SCHEMA)
        case _:
            raise ValueError(kind)


def sink_of(kind: str, place: dict[str, str]) -> Any:
    match kind:
        case "append":
            return delta.append("out")
        case "partitioned":
            return delta.append("out", partition_by="id")
        case "upsert":
            return delta.upsert("out", key=["id", "amount"], order_by="nth")
        case "ledger":
            return LedgerSink(name="out", path=place["ledger"])
        case "foreach":
            return foreach(partial(call, place["ledger"]), name="out")
        case "kafka":
            return kafka.sink(place["out"], name="out", servers=place["servers"], key="id")
        case "postgres":
            from weir.connectors.postgres.sink import PostgresSink

            return PostgresSink(name="out", table=place["table"], key=("id", "amount"), connection="rows")
        case _:
            raise ValueError(kind)


def call(path: str, rows: pa.Table, checkpoint: int) -> None:
    """Keep what a function as a sink is called with, each call in a transaction of its own."""
    Ledger(path, "").prepare(rows.schema)
    with transaction(path) as connection:
        given = [(checkpoint, row["id"], row["amount"]) for row in rows.to_pylist()]
        connection.executemany("INSERT INTO booked VALUES (?, ?, ?)", given)


def pipeline_of(config: dict[str, Any]) -> Pipeline:
    """Rows with their number among those of their key."""
    source = source_of(config["source"], config["place"])
    key = {"generator": "key", "partitions": "id", "archived": "id"}.get(config["source"], "id")
    number = {"partitions": "n", "archived": "n", "queue": "n"}.get(config["source"], "seq")

    @stage(
        "all",
        source=source,
        key=key,
        state=Count,
        order_by=[number],
        sink=sink_of(config["sink"], config["place"]),
        accepts_changes=True,
    )
    def everything(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        before = state.get(rows)["rows"].fill_null(0)
        within = rows.select(pl.int_range(1, pl.len() + 1).over(key)).to_series()
        state.fold(rows, rows=agg.count())
        return pl.DataFrame(
            {"id": rows[key].cast(pl.String), "amount": rows[number], "nth": (before + within).cast(pl.Int64)}
        )

    return Pipeline("doors", (everything,), max_parallelism=8, delivery=config["delivery"])


REQUESTS: dict[str, tuple[tuple[Any, tuple[str, ...]], ...]] = {
    "all": (
        (Storage, ("put_bytes", "put_file", "delete")),
        (Registry, ("commit",)),
        (Ledger, ("publish",)),
    ),
    "commit": ((Registry, ("commit",)),),
    "delivery": ((steps, ("deliver_stage",)),),
    "positions": ((positions, ("commit",)),),
    "publication": ((Registry, ("record_publications",)),),
}


def mortal(at: int, requests: tuple[tuple[Any, tuple[str, ...]], ...]) -> None:
    """Let the process die at its n-th request: half of them before, half after it was carried out."""
    count = 0

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            mine = count
            if mine == at and at % 2:  # of those below 0 none
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **named)
            if mine == abs(at):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for owner, names in requests:
        for name in names:
            setattr(owner, name, dying(getattr(owner, name)))


@dataclass(frozen=True)
class Order:
    """A run.

    Attributes:
        config: Path of a JSON file with the source, the sink and the settings.
        said: Path of the file that gets what the run writes to stdout and stderr.
        env: The environment of the process.
        dies_at: Number of the request at which it dies; 0: it lives, below 0: it dies after the request.
        requests: Which requests count, a name in `REQUESTS`.
    """

    config: str
    said: str
    env: dict[str, str]
    dies_at: int
    requests: str = "all"

    def run(self) -> None:
        config = json.loads(Path(self.config).read_text())
        if self.dies_at:
            mortal(self.dies_at, REQUESTS[self.requests])
        loaded = settings.load(config["env"])
        executor = None if config["spark"] else InMemoryExecutor()
        for _ in run(pipeline_of(config), loaded, RunOptions(until_caught_up=True), executor=executor):
            pass


def carried_out(order: Order) -> int:
    """Carry out an order, and return the exit code of its process: below 0, the signal that ended it."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(asdict(order)) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())


@cache
def _server() -> Popen[str]:
    """The process that forks. It ends when this one does, which closes its stdin."""
    return Popen([sys.executable, "-m", __name__], cwd=settings.PROJECT, stdin=PIPE, stdout=PIPE, text=True)


def serve() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _fork(Order(**json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _fork(order: Order) -> None:
    """Carry out an order, and end as `weir` does: native libraries may abort while they are torn down."""
    signal.alarm(300)
    os.environ.clear()
    os.environ.update(order.env)
    said, nothing = os.open(order.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(fd, target)
    code = 1
    try:
        order.run()
        code = 0
    except BaseException:  # it must not come back to the loop of the server
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
