"""Moving several files at once: so many at a time, the first failure stops the others, nothing goes on past its
deadline.

Bounded waits: a transfer that hangs in the operating system or in a client library cannot be ended from outside. It is
left behind after a short grace, in a thread for which the process does not wait when it exits; what it still brings
about is an object under the prefix of an attempt that never acked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeVar

from state_ops.counts import agrees, counted
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

    Raises the first failure, or TransientError at the deadline; in both cases moves not yet begun never begin.

    Args:
        move: Looks at `cancelled` often and raises once it is set.
        at_once: Number of threads.
        deadline: On time.monotonic().
        grace: Seconds that running moves have to notice a cancellation.
    """
    if not items:
        return []
    if deadline is not None and time.monotonic() >= deadline:
        raise _late(0, len(items))
    cancelled = Event()
    futures = _begun([partial(move, item, cancelled) for item in items], at_once, after_failure=False)
    try:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, running = wait(futures, timeout=left, return_when=FIRST_EXCEPTION)
        failure = _first_failure(done)
        if failure is None and not running:
            return [future.result() for future in futures]
        cancelled.set()
        wait([future for future in running if not future.cancel()], timeout=grace)
    finally:  # also when this thread is interrupted
        cancelled.set()
        for future in futures:
            future.cancel()
    if failure is not None:
        raise failure
    raise _late(len(done), len(items))


def at_once(steps: Sequence[Callable[[], Moved]]) -> list[Moved]:
    """Return the results of a few steps that do not need each other, each of which waits for storage. Raises the first
    failure, after all have ended."""
    if len(steps) < 2:
        return [step() for step in steps]
    futures = _begun(steps, len(steps), after_failure=True)
    try:
        wait(futures)
    finally:  # also when this thread is interrupted
        wait(futures)
    return [future.result() for future in futures]


def _begun(steps: Sequence[Callable[[], Moved]], at_once: int, *, after_failure: bool) -> list[Future[Moved]]:
    """Let steps run in order, so many at a time, in daemon threads. An executor's threads would be joined at exit, and
    one that hangs would keep the process alive.

    after_failure: whether a thread whose step has failed goes on with the next.
    """
    futures: list[Future[Moved]] = [Future() for _ in steps]
    waiting: SimpleQueue[tuple[Future[Moved], Callable[[], Moved]]] = SimpleQueue()
    for begun in zip(futures, steps, strict=True):
        waiting.put(begun)
    for number in range(min(at_once, len(steps))):
        Thread(target=_work, args=(waiting, after_failure), name=f"transfer_{number}", daemon=True).start()
    return futures


def _work(waiting: SimpleQueue[tuple[Future[Moved], Callable[[], Moved]]], after_failure: bool) -> None:
    while True:
        try:
            future, step = waiting.get_nowait()
        except Empty:
            return
        if not future.set_running_or_notify_cancel():
            continue
        try:
            result = step()
        except BaseException as error:  # whoever asks for the result raises it again
            future.set_exception(error)
            if not after_failure:
                return
        else:
            future.set_result(result)


def _late(done: int, all: int) -> TransientError:
    return TransientError(
        f"{done} of {counted(all, 'file')} {agrees(done, 'was', 'were')} transferred when the epoch's time was up.",
        next="Raise checkpoints.timeout_seconds, cut smaller slices, or look at what slows the storage down.",
    )


def _first_failure(done: set[Future[Moved]]) -> BaseException | None:
    return next((error for future in done if (error := future.exception()) is not None), None)
