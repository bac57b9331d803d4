"""Find out from the code of a stage's function whether it uses timers.

A function that sets timers for some rows only shows nothing of it when it is tried on none, before the first epoch.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_READS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")


def uses_timers(function: Callable[..., Any]) -> bool:
    """Return whether a function calls `state.timers.set` or `.clear`.

    The call may also be in a function of its own package that it names.
    """
    return any(_mentions_timers(code) for reached in _reached(function) for code in _with_inner(reached.__code__))


def _mentions_timers(code: CodeType) -> bool:
    read = {step.argval for step in dis.get_instructions(code) if step.opname in _READS_ATTRIBUTE}
    return "timers" in read and bool(read & {"set", "clear"})


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _reached(function: Callable[..., Any]) -> Iterator[FunctionType]:
    """Yield the function, and those of its own package that it may call: by a global name, out of a module, or from its
    closure."""
    waiting: list[Any] = [function]
    seen, package = set[FunctionType](), None
    while waiting:
        candidate = waiting.pop()
        while isinstance(candidate, functools.partial | MethodType):
            candidate = candidate.func if isinstance(candidate, functools.partial) else candidate.__func__
        candidate = getattr(candidate, "__wrapped__", candidate)
        if not isinstance(candidate, FunctionType) or candidate in seen:
            continue
        package = _package(candidate) if package is None else package
        if _package(candidate) != package:
            continue
        seen.add(candidate)
        yield candidate
        names = {name for code in _with_inner(candidate.__code__) for name in code.co_names}
        named = [candidate.__globals__[name] for name in names if name in candidate.__globals__]
        modules = [value for value in named if isinstance(value, ModuleType) and value.__name__.startswith(package)]
        waiting += [*named, *(vars(module).get(name) for module in modules for name in names)]
        waiting += [cell.cell_contents for cell in candidate.__closure__ or () if _is_filled(cell)]


def _package(function: FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  the access is what tells
    except ValueError:
        return False
    return True
