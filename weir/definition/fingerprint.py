"""A fingerprint of what a run ships to Spark: the pipeline's definition, the code of its functions, and Weir's own
code.

    the definition            stages, keys, windows, gates, sources, sinks: every field except descriptions for people
    functions and classes     of the project: bytecode, constants, defaults, annotations, closures, and the globals that
                              they name if these are the project's too; whole modules by their source
    libraries                 by name: they are part of the executors' environment, and are not shipped

Two processes give the same fingerprint for the same code. Comments, and lines that only moved, do not change it. If an
object cannot be looked into (a lock, a client of some service, a long chain of objects), the source of the whole
module that has it counts.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from weir.definition.pipeline import Pipeline
from weir.definition.stage import Stage

# Weir's own packages, which are shipped whole.
PACKAGES = ("weir", "state_ops")
_FOR_PEOPLE = frozenset({"description", "descriptions", "owners", "branch"})
# What a stage's fingerprint has, by the names and in the order of the first checkpoints that recorded one. An operator
# stands at its `slot`; a function's parts are there one by one.
_OF_STAGE = (
    *("uid", "key", "function", "state"),
    *("window", "aggregation", "deduplication", "join", "top_n", "lookup"),
    *("order_by", "where", "transform", "columns", "null_keys", "per_key", "declared", "outputs"),
    *("on_timer", "ttl", "accepts_changes", "from_output"),
)
_OF_FUNCTIONS = {"function": None, "state": None, "per_key": False, "declared": (), "on_timer": None, "ttl": None}
_OF_FUNCTIONS |= {"accepts_changes": False}
_OF_CLASSES = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__static_attributes__"}
)
_DEPTH = 150  # of values in values; whoever asks may have used up some of the calls that Python lets nest
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
_LIBRARIES = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
HOME = Path(__file__).resolve().parents[2]  # the folder with both packages
# Names by which checkpoints know modules of Weir that have moved since: a module that moves changes no stage's code.
_RECORDED = {
    **{f"weir.api.{name}": "pipelines.api" for name in ("delta_tables", "expectations", "file_sources", "stages")},
    "weir.operators.windows.calendars": "pipelines.runtime.definition.calendars",
    **{
        f"weir.operators.{name}": "pipelines.runtime.definition.operators"
        for name in ("aggregation", "deduplication", "joins", "lookups", "top_n", "windows")
    },
    **{f"weir.{name}": f"pipelines.{name}" for name in ("api", "testing", "state_reader", "state_writer")},
    "weir.connectors.delta.sink": "pipelines.runtime.connectors.delta_sink",
    "weir.definition.delta_sink": "pipelines.runtime.connectors.delta_sink",
    "weir.definition.change_feed": "pipelines.runtime.connectors.delta.change_feed",
    **{f"weir.definition.{name}": f"pipelines.runtime.connectors.{name}" for name in ("source", "sink")},
    "weir.replay": "pipelines.runtime.debugging",
    "weir": "pipelines.runtime",
}


def fingerprint(pipeline: Pipeline) -> str:
    """Hex digits that change with what a run of the pipeline would ship."""
    walk = _Walk()
    walk.add(pipeline)
    walk.write("weir", _shipped())
    return walk.digest.hexdigest()


def fingerprint_of_stage(stage: Stage) -> str:
    """Hex digits that change with what one stage does: its definition and the code of its functions, without the stages
    and the source before it and without Weir's own code."""
    walk = _Walk()
    walk.write(stage.uid)
    for input in stage.inputs:
        walk.write(isinstance(input.origin, Stage), input.name)
    operator, first = stage.operator, stage.inputs[0]
    alone: dict[str, Any] = {"from_output": first.output, "where": None, "transform": None, "columns": ()}
    if not stage.is_of_several:
        alone |= {"where": first.where, "transform": first.transform, "columns": first.columns}
    for name in _OF_STAGE:
        walk.write(name)
        if name in _OF_FUNCTIONS:
            walk.add(_OF_FUNCTIONS[name] if operator.slot else getattr(operator, name, _OF_FUNCTIONS[name]))
        elif name in alone:
            walk.add(alone[name])
        else:
            walk.add(getattr(stage, name) if hasattr(stage, name) else operator if name == operator.slot else None)
    if operator.slot and operator.slot not in _OF_STAGE:
        walk.add(operator)
    for input in stage.inputs if stage.is_of_several else ():
        walk.add((input.key, input.where, input.transform, input.columns))
    return walk.digest.hexdigest()[:16]


def fingerprint_of(value: object) -> str:
    """Hex digits that change with a value: of functions, with their code and that of the project which they name."""
    walk = _Walk()
    walk.add(value)
    return walk.digest.hexdigest()[:16]


@functools.cache
def _shipped() -> str:
    """Return the code of Weir's own packages, as this process saw it at the first call."""
    digest = hashlib.sha256()
    for file in sorted(file for package in PACKAGES for file in (HOME / package).rglob("*.py")):
        digest.update(file.relative_to(HOME).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


class _Walk:
    """Walks through values and what they hold, and visits each object once."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._depth = 0
        self._opaque = False
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # an id is of one object only as long as that lives

    def write(self, *words: object) -> None:
        for word in words:
            text = str(word).encode("utf-8", "surrogatepass")
            self.digest.update(f"{len(text)}:".encode() + text)

    def add(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self.write(type(value).__name__, repr(value))
            return
        if not isinstance(value, tuple | frozenset | types.CodeType):  # which are one object is up to the compiler
            if id(value) in self._seen:
                self.write("again", self._seen[id(value)])
                return
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)
        self.write(type(value).__qualname__)
        if self._depth == _DEPTH:
            self._opaque = True
            return
        self._depth += 1
        try:
            self._look_into(value)
        except Exception:  # of an author's class: what it raises where its attributes are asked for
            self._opaque = True
        finally:
            self._depth -= 1

    def _look_into(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif isinstance(value, types.ModuleType):
            self._module(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.MethodType):
            self._all(value.__self__, value.__func__)
        elif isinstance(value, staticmethod | classmethod):
            self.add(value.__func__)
        elif isinstance(value, property):
            self._all(value.fget, value.fset, value.fdel)
        elif isinstance(value, functools.partial):
            self._all(value.func, value.args, value.keywords)
        elif isinstance(value, Mapping):
            self._mapping(value)
        elif isinstance(value, set | frozenset):
            self._in_any_order((item,) for item in value)
        elif isinstance(value, list | tuple):
            self._all(*value)
        elif is_dataclass(value):
            self._class(type(value))
            for field in fields(value):
                if field.name not in _FOR_PEOPLE:
                    self.write(field.name)
                    self.add(getattr(value, field.name))
        elif inspect.getattr_static(value, "__wrapped__", None) is not None:  # functools has wrapped a function in C
            self.add(value.__wrapped__)
        else:
            self._object(value)

    def _all(self, *values: Any) -> None:
        self.write(len(values))
        for value in values:
            self.add(value)

    def _mapping(self, value: Mapping[Any, Any]) -> None:
        if all(isinstance(key, str) for key in value):
            for key in sorted(value):
                self.write(key)
                self.add(value[key])
        else:
            self._in_any_order((key, value[key]) for key in value)

    def _in_any_order(self, items: Iterator[tuple[Any, ...]]) -> None:
        """Items whose order differs between processes. Each item is walked as if it stood alone."""
        digests = []
        for item in items:
            if all(isinstance(part, _PLAIN) for part in item):
                digests.append(f"{[type(part).__name__ for part in item]} {item!r}")
                continue
            alone = _Walk()
            alone._seen, alone._kept, alone._depth = dict(self._seen), list(self._kept), self._depth
            alone._all(*item)
            self._opaque |= alone._opaque
            digests.append(alone.digest.hexdigest())
        self.write(*sorted(digests))

    def _function(self, function: types.FunctionType) -> None:
        self.write(_recorded(function.__module__), function.__qualname__)
        self._all(function.__defaults__, function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # it is not filled yet
                self.write("empty")
        if not _of_project(function.__module__, function.__code__.co_filename):
            return
        self._code(function.__code__)
        self._mapping(function.__annotations__)
        before, self._opaque = self._opaque, False
        for name in sorted(_names(function.__code__) & function.__globals__.keys()):
            self.write(name)
            self.add(function.__globals__[name])
        if self._opaque and function.__module__ in sys.modules:
            self._module(sys.modules[function.__module__])
        self._opaque |= before

    def _code(self, code: types.CodeType) -> None:
        self.write(code.co_code.hex(), code.co_flags, code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount)
        self.write(code.co_exceptiontable.hex())
        self._all(code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._all(*code.co_consts)

    def _module(self, module: types.ModuleType) -> None:
        self.write(_recorded(module.__name__))
        file = getattr(module, "__file__", None)
        if file is not None and _of_project(module.__name__, file):
            self.write(hashlib.sha256(Path(file).read_bytes()).hexdigest())

    def _class(self, kind: type) -> None:
        self.write(_recorded(kind.__module__), kind.__qualname__)
        module = sys.modules.get(kind.__module__)
        if id(kind) in self._seen and self._seen[id(kind)] != len(self._seen) - 1:
            return
        self._seen.setdefault(id(kind), len(self._seen))
        if not _of_project(kind.__module__, getattr(module, "__file__", None)):
            return
        self._all(*kind.__bases__)
        # What the annotations of a state class say, but for people, its schema has.
        beside = {"__annotations__"} if "__weir_schema__" in vars(kind) else set()
        for name, value in sorted(vars(kind).items()):
            if name not in _OF_CLASSES | beside and not name.startswith("_abc_"):
                self.write(name)
                self.add(value)

    def _object(self, value: Any) -> None:
        """Hash an object by the parts from which pickle would rebuild it."""
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):
            self.write(reduced)
            return
        for part in reduced:
            self.add(list(part) if isinstance(part, Iterator) else part)


def _names(code: types.CodeType) -> set[str]:
    """Return the names that code may look up among the globals, nested functions included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _recorded(module: str | None) -> str | None:
    """Return the name by which checkpoints know a module.

    Example:
        >>> from weir.definition.fingerprint import _recorded
        >>> _recorded("weir.definition.stage")
        'pipelines.runtime.definition.stage'
    """
    for now, then in _RECORDED.items():
        if module is not None and f"{module}.".startswith(f"{now}."):
            return then + module[len(now) :]
    return module


def _of_project(module: str | None, file: str | None) -> bool:
    """Return whether code belongs to the project. Weir's own code (see `_shipped`) and libraries do not.

    Code without a file was typed in or generated. It belongs to the project if its module is `__main__`.
    """
    if file is None:
        return module == "__main__"
    path = str(Path(file).resolve())
    if any(path.startswith(library) for library in _LIBRARIES) or file.startswith("<frozen"):
        return False
    return not any(path.startswith(f"{HOME}/{package}/") for package in PACKAGES)
