"""Moving several files at once: so many at a time, the first failure stops the others, nothing goes on past its deadline.

Bounded waits: a transfer that hangs in the operating system or in a client library cannot be ended from outside. It is
left behind after a short grace; what it still brings about is an object under the prefix of an attempt that never acked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from threading import Event
from typing import TypeVar

from state_ops.errors import TransientError

_GRACE_SECONDS = 5.0

Item = TypeVar("Item")
Moved = TypeVar("Moved")


def together(
    move: Callable[[Item, Event], Moved],
    items: Sequence[Item],
    *,
    at_once: int,
    deadline: float | None = None,
    grace: float = _GRACE_SECONDS,
) -> list[Moved]:
    """Call `move(item, cancelled)` for every item in threads; returns the results in the items' order.

    move: looks at `cancelled` often and raises once it is set. at_once: number of threads. deadline: on time.monotonic().
    grace: seconds that running moves have to notice a cancellation.
    Raises the first failure, or TransientError at the deadline; in both cases moves not yet begun never begin.
    """
    if not items:
        return []
    if deadline is not None and time.monotonic() >= deadline:
        raise _late(0, len(items))
    cancelled = Event()
    pool = ThreadPoolExecutor(min(at_once, len(items)), thread_name_prefix="transfer")
    try:
        futures = [pool.submit(move, item, cancelled) for item in items]
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, running = wait(futures, timeout=left, return_when=FIRST_EXCEPTION)
        failure = _first_failure(done)
        if failure is None and not running:
            return [future.result() for future in futures]
        cancelled.set()
        for future in running:
            future.cancel()
        wait(running, timeout=grace)
    finally:  # also when this thread is interrupted
        cancelled.set()
        pool.shutdown(wait=False, cancel_futures=True)
    if failure is not None:
        raise failure
    raise _late(len(done), len(items))


def at_once(steps: Sequence[Callable[[], Moved]]) -> list[Moved]:
    """The results of a few steps that do not need each other, each of which waits for storage. Raises the first failure,
    after all have ended."""
    if len(steps) < 2:
        return [step() for step in steps]
    with ThreadPoolExecutor(len(steps), thread_name_prefix="transfer") as pool:
        futures = [pool.submit(step) for step in steps]
    return [future.result() for future in futures]


def _late(done: int, all: int) -> TransientError:
    return TransientError(
        f"{done} of {all} files were transferred when the epoch's time was up.",
        next="Raise checkpoints.timeout_seconds, cut smaller slices, or look at what slows the storage down.",
    )


def _first_failure(done: set[Future[Moved]]) -> BaseException | None:
    return next((error for future in done if (error := future.exception()) is not None), None)
