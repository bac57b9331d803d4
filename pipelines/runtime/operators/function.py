"""A stage's function over batches, with value state at its side."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import pyarrow as pa

from pipelines.runtime.definition import Epoch, Stage
from pipelines.runtime.operators.base import MAIN, Shapes, check_storable, refuse_clash
from state_ops import frames
from state_ops.backends.base import Backend
from state_ops.backends.memory import MemoryBackend
from state_ops.checkpoint import from_micros
from state_ops.errors import StageError, WeirError
from state_ops.schema import StateSchema
from state_ops.state import GROUP, ValueState


def function_shapes(stage: Stage, rows: pa.Schema, keys: pa.Schema) -> Shapes:
    """The schemas of a stage with a function, which is tried on an empty table."""
    where = f"stage {stage.uid}"
    assert stage.state is not None
    state = StateSchema.of(stage.state)
    refuse_clash(stage, {field.name for field in state.fields}, "a field of its state")
    epoch = Epoch(id=0, now=from_micros(0), watermark=None, subtask=0, parallelism=1)  # type: ignore[arg-type]
    empty = rows.empty_table().append_column(GROUP, pa.array([], pa.int32()))
    trial = FunctionOperator(stage, keys, state, MemoryBackend(), epoch, None)
    try:
        produced = [table for _, table in trial.process(empty)]
    except StageError as error:
        error.where = f"{where}, called with no rows to learn its output's columns, before the first epoch"
        error.next = "Correct the function; it must take an empty frame too. Nothing was started."
        raise
    output = produced[0].schema if produced else pa.schema([])
    check_storable(output, where, "Cast it in the function")
    return Shapes(keys, state, {MAIN: output})


class FunctionOperator:
    """A stage's function over batches. output: the schema its rows must have; None while that is being found out."""

    def __init__(
        self,
        stage: Stage,
        keys: pa.Schema,
        state: StateSchema,
        backend: Backend,
        epoch: Epoch,
        output: pa.Schema | None,
    ) -> None:
        assert stage.function is not None
        self._stage, self._keys, self._epoch, self._output = stage, keys, epoch, output
        self._convert = frames.converter(stage.function)
        self._where = f"stage {stage.uid}"
        self._state = ValueState(backend, state, keys, self._where, self._convert)
        self.rows_late = 0
        self.closed_upto: int | None = None

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        self._state.begin(frames.from_arrow(rows.select([*self._keys.names, GROUP])))
        assert self._stage.function is not None
        try:
            result = self._stage.function(self._convert(rows.drop_columns([GROUP])), self._state, self._epoch)
        except WeirError:
            raise
        except Exception as error:
            raise authors_error(error, self._stage, self._epoch, rows.select(self._keys.names)) from error
        self._state.flush()
        if result is not None:
            yield MAIN, fitted(self._stage, frames.arrow(result, self._where), self._output)

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        return iter(())


def authors_error(error: Exception, stage: Stage, epoch: Epoch, keys: pa.Table) -> StageError:
    """What to raise for what a stage's function raised when it was called with rows of these keys."""
    # The author's own frames only: what lies between Spark and the function is noise to who wrote it.
    trace = error.__traceback__
    shown = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    return StageError(
        f"The function of the stage {stage.uid} raised {type(error).__name__}: {error}",
        where=f"stage {stage.uid}, epoch {epoch.id}, subtask {epoch.subtask}, first keys of the batch: {keys.slice(0, 3).to_pylist()}",
        next="Correct the function; the epoch was declined, and state, offsets and tables are as they were.",
        traceback="".join(traceback.format_exception(type(error), error, shown)),
    )


def fitted(stage: Stage, rows: pa.Table, output: pa.Schema | None) -> pa.Table:
    """What a stage's function returned, in the columns and types of `output`; as it is while these are being found out."""
    if output is None or rows.schema.equals(output):
        return rows
    problems = [f"{field.name} is missing" for field in output if field.name not in rows.column_names]
    problems += [f"{name} is new" for name in rows.column_names if name not in output.names]
    if not problems:
        try:
            return rows.select(output.names).cast(output)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            problems = [str(error)]
    raise StageError(
        f"The stage {stage.uid} returned other columns than for an empty input: {'; '.join(problems)}.",
        where=f"stage {stage.uid}",
        next="Return the same columns and types whatever the rows are.",
    )
