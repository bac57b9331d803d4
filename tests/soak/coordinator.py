"""A coordinator as a process of its own: the real one, but that stages run in it instead of in Spark.

It imports everything, says that it is ready, and waits for one line on stdin: an `Order` in JSON. So a driver can keep
one in reserve. What it does it says on stdout, a JSON object a line. When its stdin ends, because the driver has died,
so does it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psutil
import structlog

from state_ops.errors import BusyError, FencedError, WeirError
from tests.soak.accounts import pipeline
from weir.execution.in_process import InMemoryExecutor
from weir.ownership.backlog import unapplied
from weir.run.run import RunOptions, open_storage, run
from weir.settings import configuration as settings
from weir.sources import positions


@dataclass(frozen=True)
class Order:
    """What a child is to do.

    env: WEIR_ variables. host: the name that this machine has for it; under another name a process is watched by its
    counter. batch_rows: largest batch of a stage. until_files: try again and again, also after others won, until a run
    has found that so many files are read; None: one run, until it is stopped. remembered: names that a file position
    lists, so that it reaches its floor within a soak.
    """

    env: dict[str, str]
    host: str
    batch_rows: int = 65_536
    until_files: int | None = None
    remembered: int = 10_000


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    _say(ready=os.getpid())
    line = sys.stdin.readline()
    if not line:
        return
    threading.Thread(target=_die_with_the_driver, daemon=True).start()
    order = Order(**json.loads(line))
    socket.gethostname = lambda: order.host
    positions._REMEMBERED = order.remembered
    if order.until_files is None:
        _say(end=_once(order, RunOptions(interval=0.01)))
        return
    while True:
        end = _once(order, RunOptions(until_caught_up=True))
        _say(end=end)
        if end["kind"] not in ("BusyError", "FencedError", "done"):
            return
        if end["kind"] == "done" and _files_read(order) >= order.until_files:
            return
        time.sleep(0.05)


def _files_read(order: Order) -> int:
    head = open_storage(pipeline, settings.load(order.env))[1].head()
    return head.offsets["landing"]["files"] if head else 0


def _once(order: Order, options: RunOptions) -> dict[str, Any]:
    """One run, and how it ended."""
    process = psutil.Process()
    try:
        with closing(_reports(order, options)) as reports:
            for checkpoint in reports:
                _say(
                    epoch=checkpoint.id,
                    parent=checkpoint.parent_id,
                    generation=checkpoint.generation,
                    trigger=checkpoint.trigger,
                    epoch_now=checkpoint.epoch_now.timestamp(),
                    waiting=sum(unapplied(checkpoint).values()),
                    files=checkpoint.offsets.get("landing", {}).get("files", 0),
                    rss=process.memory_info().rss,
                )
    except (BusyError, FencedError) as error:
        return {"kind": type(error).__name__, "said": str(error)}
    except WeirError as error:
        return {"kind": type(error).__name__, "said": f"{error} {getattr(error, 'traceback', '')}"}
    return {"kind": "done", "said": ""}


def _reports(order: Order, options: RunOptions) -> Iterator[Any]:
    executor = InMemoryExecutor(order.batch_rows)
    for report in run(pipeline, settings.load(order.env), options, executor):
        yield report.checkpoint


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _die_with_the_driver() -> None:
    sys.stdin.read()
    os._exit(3)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without teardown: Arrow's threads may abort a process that tears down (apache/arrow#34314)
