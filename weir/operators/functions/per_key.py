"""A function that is called once per key, made one over batches: convenient, and much slower than columns."""

from __future__ import annotations

import inspect
import traceback
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.arrow.types import zero_of
from state_ops.errors import InputError, PipelineError, StageError, WeirError
from state_ops.keyed.keyed_state import KeyedState
from state_ops.keyed.per_key.key_state import KeyState, KeyStates, no_cache, row_store
from state_ops.keyed.ttl import Expiry
from state_ops.schema.python_rows import columns
from state_ops.schema.state_schema import Field
from weir.definition import Epoch, Stage, Subtask
from weir.operators.functions import Function
from weir.operators.functions.returned import returned

_CODE = "__weir_code"

Slicer = Callable[[int, int], Any]
"""The rows from one number up to another, as the function wants them."""


@dataclass(frozen=True, slots=True)
class Fired:
    """A timer of a key that is due.

    Attributes:
        at: The moment that the timer was set for, in UTC.
        domain: "event" or "processing": the time by which it is due.

    Example:
        >>> import polars as pl
        >>> from weir import Epoch, Fired, KeyState, State, files, stage, testing
        >>> class Order(State):
        ...     paid: bool = False
        >>> def remind(order: int, fired: Fired, state: KeyState, epoch: Epoch) -> list[dict] | None:
        ...     return [{"order": order, "reminder": fired.domain}]
        >>> @stage(
        ...     "reminders",
        ...     source=files("{landing}/*.parquet"),
        ...     key="order",
        ...     state=Order,
        ...     per_key=True,
        ...     output={"order": int, "reminder": str},
        ...     on_timer=remind,
        ... )
        ... def reminders(order: int, rows: list[dict], state: KeyState, epoch: Epoch) -> list[dict] | None:
        ...     state.timers.set(after="30s")
        >>> run = testing.run(reminders)
        >>> run.epoch([{"order": 7}]).to_dicts()
        []
        >>> run.epoch().to_dicts()
        [{'order': 7, 'reminder': 'processing'}]
    """

    at: datetime
    domain: str


class PerKey:
    """The functions of a stage as functions over batches: `process` for its rows, `fire` for its timers."""

    def __init__(self, function: Function, subtask: Subtask, expiry: Expiry | None) -> None:
        assert function.state is not None, "its stage has a key"
        schema = subtask.shapes.state
        self._stage, self._keys, self._function = subtask.stage, subtask.shapes.keys, function.function
        self._declared, self._on_timer = dict(function.declared), function.on_timer
        self._where = f"stage {self._stage.uid}"
        self._sliced = slicer_of(function.function)
        cache = (subtask.open_cache or no_cache)(row_store(subtask.backend, schema, self._where, expiry), schema)
        self._states = KeyStates(function.state, schema, self._where, cache)
        self._state = KeyState(self._states)

    def process(self, rows: pa.Table, state: KeyedState, epoch: Epoch) -> dict[str, pa.Table]:
        """Call the function with each key's rows; what it returned, as one table for each output."""
        if not rows.num_rows:
            return self._tried(rows, epoch)
        batch = state.batch
        codes = batch.codes(frames.from_arrow(rows.select(self._keys.names)), self._where)
        if (codes[1:] < codes[:-1]).any():
            rows = rows.take(np.argsort(codes, kind="stable"))
        edges = np.concatenate(([0], np.cumsum(np.bincount(codes, minlength=len(batch))))).tolist()
        part = self._sliced(rows)
        return self._each(
            state,
            epoch,
            lambda index, key: self._function(key, part(edges[index], edges[index + 1]), self._state, epoch),
        )

    def fire(self, fired: pa.Table, state: KeyedState, epoch: Epoch) -> dict[str, pa.Table]:
        """Call `on_timer` for each timer, of which a key has one at most."""
        function = self._on_timer
        assert function is not None
        if not fired.num_rows:
            return {}
        timers = [Fired(*timer) for timer in zip(fired["at"].to_pylist(), fired["domain"].to_pylist(), strict=True)]
        return self._each(state, epoch, lambda index, key: function(key, timers[index], self._state, epoch))

    def _each(self, state: KeyedState, epoch: Epoch, call: Callable[[int, Any], Any]) -> dict[str, pa.Table]:
        try:
            parts = [column.to_pylist() for column in state.batch.columns]
        except OverflowError as error:
            raise _too_far(pa.table(state.batch.columns, names=self._keys.names), self._where) from error
        keys = parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))
        self._states.begin(state, keys)
        results: dict[str, tuple[list[Any], list[Any]]] = {}  # by output, what calls returned, and for which keys
        for index, key in enumerate(keys):
            self._states.at(index)
            try:
                handed = returned(self._stage, call(index, key))
            except WeirError:
                raise
            except Exception as error:
                raise self._authors(error, key, epoch) from error
            for output, rows in handed:
                of_output = results.setdefault(output, ([], []))
                of_output[0].append(rows)
                of_output[1].append(key)
        self._states.end()
        tables = {name: self._together(*given, self._declared.get(name)) for name, given in results.items()}
        return {name: table for name, table in tables.items() if table.column_names}  # else nothing but empty lists

    def _tried(self, rows: pa.Table, epoch: Epoch) -> dict[str, pa.Table]:
        """Return outputs without rows, for an input without rows.

        Their columns are as declared, or as the function returns for no rows of a made-up key.
        """
        if self._declared:
            return {name: columns.empty_table() for name, columns in self._declared.items()}
        key = tuple(zero_of(field.type) for field in self._keys)
        try:
            result = self._function(
                key if len(key) > 1 else key[0], self._sliced(rows)(0, 0), _NoState(self._stage), epoch
            )
            parts = returned(self._stage, result)
        except StageError:
            raise
        except Exception as error:
            raise PipelineError(
                f"The function of the stage {self._stage.uid} raised {type(error).__name__}: {error}",
                where=f"{self._where}, called with no rows to learn its output's columns, before the first epoch",
                next=f"{_DECLARE} Or let it take no rows.",
            ) from error
        tables = {name: self._together([rows], [key], None) for name, rows in parts}
        if not all(table.column_names for table in tables.values()):
            raise PipelineError(
                f"The columns that {self._stage.uid} returns cannot be told from an empty list.",
                where=self._where,
                next=_DECLARE,
            )
        return tables

    def _authors(self, error: Exception, key: Any, epoch: Epoch) -> StageError:
        trace = error.__traceback__
        ours = (__file__, returned.__code__.co_filename)
        while trace is not None and trace.tb_frame.f_code.co_filename in ours:  # the author's own frames only
            trace = trace.tb_next
        return StageError(
            f"The function of the stage {self._stage.uid} raised {type(error).__name__}: {error}",
            where=f"{self._where}, epoch {epoch.id}, subtask {epoch.subtask}, key {key!r}",
            next="Correct the function; the epoch was declined, and state, offsets and tables are as they were.",
            traceback="".join(traceback.format_exception(type(error), error, trace)),
        )

    def _together(self, results: Sequence[Any], owners: Sequence[Any], output: pa.Schema | None) -> pa.Table:
        """Return the results of the calls as one table. `owners` has the key of each call."""
        if all(isinstance(result, list) for result in results):
            return self._of_dicts(results, owners, output)
        if all(isinstance(result, pl.DataFrame) for result in results):
            try:  # much faster than one by one; but a column may have another type for one key than for another
                return frames.arrow(pl.concat(results))
            except pl.exceptions.PolarsError:
                pass
        tables = [frames.arrow(result, self._where) for result in results]
        self._check_columns(tables, owners)
        try:
            return pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            raise StageError(
                f"The stage {self._stage.uid} returned columns of different types for different keys: {error}.",
                where=self._where,
                next="Return the same columns and types whatever the rows are.",
            ) from error

    def _of_dicts(self, results: Sequence[list[Any]], owners: Sequence[Any], output: pa.Schema | None) -> pa.Table:
        rows = [row for result in results for row in result]
        named = ((key, row) for key, result in zip(owners, results, strict=True) for row in result)
        self._check_names(named, dict.fromkeys(output.names).keys() if output is not None else None)
        if output is not None:
            of_rows = [key for key, result in zip(owners, results, strict=True) for _ in result]
            return self._as_declared(rows, of_rows, output)
        try:
            return pa.Table.from_pylist(rows)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise StageError(
                f"The stage {self._stage.uid} returned values that do not fit its columns: {error}.",
                where=self._where,
                next="Return the same types whatever the rows are.",
            ) from error

    def _as_declared(self, rows: Sequence[Mapping[str, Any]], owners: Sequence[Any], output: pa.Schema) -> pa.Table:
        """Return rows in the declared columns.

        owners: The key of each row.
        """
        fields = [Field(field.name, field.type, field.nullable, None) for field in output]
        values = [tuple([row[name] for name in output.names]) for row in rows]
        try:
            return columns(fields, values, lambda number: f"the key {owners[number]!r}", self._where)
        except StageError as error:
            raise StageError(
                f"The stage {self._stage.uid} returned values that do not fit its columns: {error.what}",
                where=self._where,
                next=f"They are: {', '.join(f'{field.name} {field.type}' for field in output)}.",
            ) from error

    def _check_columns(self, tables: Sequence[pa.Table], owners: Sequence[Any]) -> None:
        """Raise StageError unless all frames have the same columns: Arrow would fill a missing one with nulls.

        A frame without any column counts as no rows.
        """
        first = None
        for key, table in zip(owners, tables, strict=True):
            names = sorted(table.column_names)
            if not names:
                continue
            if first is None:
                first = key, names
            elif names != first[1]:
                raise StageError(
                    f"The stage {self._stage.uid} returned the columns {', '.join(names)} for the key {key!r}, "
                    f"and {', '.join(first[1])} for {first[0]!r}.",
                    where=self._where,
                    next="Return the same columns and types whatever the rows are.",
                )

    def _check_names(self, rows: Iterable[tuple[Any, Any]], names: Set[str] | None) -> None:
        """Raise StageError unless all dicts have the same names.

        Arrow takes the names of the first one, and drops any others that a later one has.

        rows: each with the key that it was returned for. names: as declared; None: those of the first row.
        """
        by = "its rows have"
        for key, row in rows:
            if names is None and isinstance(row, Mapping):
                names, by = row.keys(), f"a row of the key {key!r} has"
            if not isinstance(row, Mapping) or row.keys() != names:
                wanted = f"{by}: {', '.join(map(str, names))}" if names is not None else "rows are dicts"
                raise StageError(
                    f"The stage {self._stage.uid} returned {row!r:.300} for the key {key!r}, but {wanted}.",
                    where=self._where,
                    next="Return dicts with all of these, and no others, whatever the rows are; None for what is "
                    "missing.",
                )


_DECLARE = 'Declare them: @stage(..., output={"column": pa.int64()}). Nothing was started.'


class _NoState:
    """The state of the made-up key: nothing is there, and nothing is kept."""

    def __init__(self, stage: Stage) -> None:
        self._state, self.timers = stage.state, self

    def get(self, *_: Any) -> Any:
        assert self._state is not None
        return self._state()

    def update(self, *_: Any) -> None: ...
    def clear(self) -> None: ...
    def set(self, *_: Any, **__: Any) -> None: ...


def slicer_of(function: Callable[..., Any]) -> Callable[[pa.Table], Slicer]:
    """Return the function that makes, for a batch sorted by key, the slicer into the rows of one key.

    The slices are as the author's second parameter is annotated: pl.DataFrame, pd.DataFrame, pa.Table or list[dict].
    Raises PipelineError for a function of another shape.
    """
    parameters = check_parameters(function, "rows")
    if _wants_dicts(function, parameters[1]):
        where = f"{function.__module__}.{function.__qualname__}"
        return lambda rows: _list_slicer(_dicts(rows, where))
    convert = frames.converter(function, parameter=1)
    return lambda rows: _frame_slicer(convert(rows))


def check_parameters(function: Callable[..., Any], second: str) -> list[inspect.Parameter]:
    """Return the parameters of a function that is called once per key.

    Args:
        second: What the second one is. PipelineError unless they are four.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) != 4:
        raise PipelineError(
            f"{function.__name__}() takes {len(parameters)} parameters.",
            where=f"{function.__module__}.{function.__qualname__}",
            next=f"A per-key function takes four: (key, {second}, state, epoch).",
        )
    return parameters


def _wants_dicts(function: Callable[..., Any], parameter: inspect.Parameter) -> bool:
    try:
        hint = typing.get_type_hints(function).get(parameter.name)
    except NameError:  # names imported for type checking only
        hint = parameter.annotation
    if isinstance(hint, str):
        return hint == "list" or hint.startswith("list[dict")
    return hint is list or (typing.get_origin(hint) is list and _is_dict(typing.get_args(hint)))


def _is_dict(arguments: tuple[Any, ...]) -> bool:
    return len(arguments) == 1 and (arguments[0] is dict or typing.get_origin(arguments[0]) is dict)


def _dicts(rows: pa.Table, where: str) -> list[dict[str, Any]]:
    try:
        return list(rows.to_pylist())
    except OverflowError as error:
        raise _too_far(rows, where) from error


def _too_far(rows: pa.Table, where: str) -> InputError:
    far = next(name for name in rows.column_names if _overflows(rows.column(name)))
    return InputError(
        f"A row has a time in {far!r} that is before the year 1 or after 9999, which no datetime of Python's can be.",
        where=where,
        next="Leave such rows out and count them with where=, or take frames instead of list[dict]; as a key it "
        "needs a stage that is not per_key.",
    )


def _overflows(column: pa.ChunkedArray) -> bool:
    try:
        column.to_pylist()
    except OverflowError:
        return True
    return False


def _list_slicer(rows: list[Any]) -> Slicer:
    return lambda start, end: rows[start:end]


def _frame_slicer(frame: Any) -> Slicer:
    if isinstance(frame, (pa.Table, pl.DataFrame)):
        return lambda start, end: frame.slice(start, end - start)
    return lambda start, end: frame.iloc[start:end].reset_index(drop=True)
