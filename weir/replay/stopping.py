"""Stopping in an author's function, in the debugger of Python's library, where it gets the rows in question."""

from __future__ import annotations

import inspect
import pdb
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from state_ops.arrow import frames
from weir.definition import Epoch, Stage
from weir.replay.recording import Wrapping

Debugger = Callable[[], pdb.Pdb]


def stopping(stage: Stage, key: Sequence[pa.Array] | None, debugger: Debugger = pdb.Pdb) -> Wrapping:
    """Return what stops at the first line of a stage's functions, and where they raise.

    Args:
        key: Of which rows, an array of one value for each key column; None: of any.
        debugger: Makes the debugger.
    """

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def stops(*arguments: Any) -> Any:
            epoch = arguments[-1]
            if not isinstance(epoch, Epoch) or not epoch.id or not _concerns(stage, key, arguments[0]):
                return function(*arguments)
            try:
                return _called(debugger(), function, arguments)
            except Exception as error:
                after = debugger()
                after.reset()
                after.interaction(None, _authors(error.__traceback__, function))
                raise

        return stops

    return wrapped


def _called(debugger: pdb.Pdb, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Return what a function returns, called in a debugger. Raises KeyboardInterrupt where somebody quits there, for
    which the debugger itself returns None as if the function had."""
    quits, ends = False, debugger.set_quit

    def set_quit() -> None:
        nonlocal quits
        quits = True
        ends()

    debugger.set_quit = set_quit  # type: ignore[method-assign]
    result = debugger.runcall(function, *arguments)
    if quits:
        raise KeyboardInterrupt
    return result


def _authors(trace: TracebackType | None, function: Callable[..., Any]) -> TracebackType | None:
    """Return a trace up to its innermost line in the file of the function."""
    steps = [(step.tb_frame, step.tb_lasti, step.tb_lineno) for step in _steps(trace)]
    file = inspect.unwrap(function).__code__.co_filename
    last = max((at for at, (frame, *_) in enumerate(steps) if frame.f_code.co_filename == file), default=len(steps) - 1)
    until = None
    for step in reversed(steps[: last + 1]):
        until = TracebackType(until, *step)
    return until


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _concerns(stage: Stage, key: Sequence[pa.Array] | None, given: Any) -> bool:
    """Return whether a call is about the key. given: the key of a function per key, else a frame."""
    if key is None:
        return True
    if stage.operator.per_key:
        values = tuple(column[0].as_py() for column in key)
        return bool(given == (values if len(values) > 1 else values[0]))
    return bool(of_key(frames.arrow(given), stage.key, key).num_rows)


def of_key(rows: pa.Table, names: Sequence[str], key: Sequence[pa.Array]) -> pa.Table:
    """Return the rows of one key."""
    for name, column in zip(names, key, strict=True):
        rows = rows.filter(pc.equal(rows.column(name), column[0].cast(rows.schema.field(name).type)))
    return rows
