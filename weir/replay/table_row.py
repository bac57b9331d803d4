"""A row of a sink's table, and the epoch that put it there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from deltalake.exceptions import TableNotFoundError

from state_ops.arrow import frames
from state_ops.checkpoints.registry import Registry
from state_ops.delta import fenced_table
from state_ops.delta.log_entries import active_files
from state_ops.errors import ConfigurationError, WeirError
from state_ops.facts import HIDDEN, Facts, Named
from state_ops.ids import parse_epoch_dir
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.snapshot_files import OUTPUT, StateFile
from state_ops.storage.storage import Storage
from weir import where
from weir.connectors.delta.table_commit import local_file, table_path, with_partition
from weir.connectors.formats.stored_rows import stored_rows
from weir.definition import Pipeline, Stage
from weir.definition.change_feed import CHANGE_TYPE
from weir.definition.sink import Sink
from weir.execution.executor import staged_table
from weir.inspection.comparison.rows import canonical_text

_STAGED = re.compile(r"/(g\d+-e\d+)/(\d+)-[^/]+(?:/\d+)?\.parquet$")


@dataclass(frozen=True, slots=True)
class TableRow(Facts):
    """A row that fits what was asked for.

    Attributes:
        values: By column.
        file: The table's file that has it, as its log names it.
        number: The row's number in that file.
        matches: How many rows of the table fit, this one among them.
        table_version: The version of the table that was read.
    """

    values: Annotated[dict[str, Any], Named("row")]
    file: str
    number: Annotated[int, Named("file_row")]
    matches: int
    table_version: Annotated[int, HIDDEN]


@dataclass(frozen=True, slots=True)
class Origin(Facts):
    """The epoch that handed a row out, as far as it can be told.

    Attributes:
        epoch: None: it is not known.
        subtask: Of the stage; None: not known.
        recorded: Whether a record says so; else it is inferred.
        how: What says so, in words.
    """

    epoch: int | None
    subtask: int | None
    recorded: Annotated[bool, HIDDEN]
    how: Annotated[str, HIDDEN]


def writer_of(pipeline: Pipeline, table: str) -> tuple[Stage, str, Sink]:
    """Return the stage and output that a sink gets its rows from. Raises ConfigurationError for a sink that is not
    there."""
    for stage in pipeline.stages:
        for output, sink in stage.sinks_by_output:
            if sink.name == table:
                return stage, output, sink
    names = ", ".join(sink.name for sink in pipeline.sinks)
    raise ConfigurationError(f"{pipeline.title} has no table {table!r}.", next=f"It writes to: {names}.")


def row_of(storage: Storage, table: str, condition: str, scratch: Path) -> TableRow:
    """Return the first row of a table that satisfies a condition.

    Args:
        condition: As a stage's `where`, of columns of the table.
        scratch: A directory for files that are read.

    Raises:
        ConfigurationError: It is no condition on the table's columns, or no row satisfies it.
    """
    try:
        handle = fenced_table.open_table(storage, table_path(table))
    except TableNotFoundError as error:
        raise WeirError(
            f"The table {table} does not exist yet.",
            where=storage.full(table_path(table)),
            next="It is made by the first epoch that has rows for it.",
        ) from error
    columns = frames.canonical_schema(pa.schema(handle.schema().to_arrow()))
    matches, first = 0, None
    for file in active_files(handle):
        with local_file(storage, table, file, scratch) as local, stored_rows(local) as stored:
            rows = frames.aligned(with_partition(stored.read(), file), columns)
        at = np.flatnonzero(_mask(condition, rows, table))
        if len(at) and first is None:
            (values,) = frames.python_rows(rows.slice(int(at[0]), 1))
            first = values, file.path, int(at[0])
        matches += len(at)
    if first is None:
        raise ConfigurationError(
            f"No row of {table} satisfies {condition!r}.",
            where=f"version {handle.version()} of {handle.table_uri}",
            next=f"Its columns are: {', '.join(columns.names)}.",
        )
    return TableRow(*first, matches, int(handle.version()))


def _mask(condition: str, rows: pa.Table, table: str) -> np.ndarray:
    try:
        return where.compiled(condition, rows.schema).mask(rows)
    except (where.Refused, where.Fails) as error:
        raise ConfigurationError(
            f"{condition!r} is no condition on rows of {table}: {error}",
            where="--row",
            next=f"""Write it as SQL, e.g. "id = 'a' AND n = 3"; the columns are: {", ".join(rows.column_names)}.""",
        ) from error


def origin(
    storage: Storage, registry: Registry, line: Sequence[Checkpoint], stage: Stage, sink: Sink, row: TableRow
) -> Origin:
    """Return which epoch handed a row of a table out.

    Args:
        line: The retained checkpoints that lead to the newest, oldest first.
    """
    staged = _STAGED.search(f"/{row.file}")
    written = parse_epoch_dir(staged[1]) if staged is not None else None
    if sink.capabilities.newest_of or written is None or staged is None:
        return _searched(storage, registry, line, stage, sink, row)
    epoch, subtask = int(written[1]), int(staged[2])
    listing = next((at for at in line if at.id == epoch), None)
    if listing is None:
        how = f"the file's name says epoch {epoch}, whose checkpoint is not retained"
        return Origin(epoch, subtask, False, how)
    names = {file.path.removeprefix(f"{table_path(sink.name)}/") for file in registry.files(listing)}
    if row.file in names:
        return Origin(epoch, subtask, True, f"checkpoint {epoch} lists the file {row.file}")
    return Origin(epoch, subtask, False, f"the file's name says epoch {epoch}, whose checkpoint does not list it")


def _searched(
    storage: Storage, registry: Registry, line: Sequence[Checkpoint], stage: Stage, sink: Sink, row: TableRow
) -> Origin:
    """Return the newest retained epoch that staged the row, or the row's key: its table's file may be of a later epoch,
    or of somebody who has rewritten the table."""
    key = sink.capabilities.newest_of
    names = list(key or row.values)
    wanted = canonical_text({name: row.values[name] for name in names})
    for checkpoint in reversed(line):
        for file in _outputs(registry, checkpoint, stage, sink):
            for values in _rows(storage, file, names):
                if canonical_text(values) == wanted:
                    of = f"with its key ({', '.join(names)})" if key else "with its values"
                    how = f"it is the newest epoch that handed out a row {of}, among those that are retained"
                    return Origin(int(checkpoint.id), file.subtask, bool(key), how)
    oldest = line[0].id if line else None
    return Origin(None, None, False, f"no retained epoch handed it out; the oldest is {oldest}")


def _outputs(registry: Registry, checkpoint: Checkpoint, stage: Stage, sink: Sink) -> list[StateFile]:
    files = registry.files(checkpoint)
    return [file for file in files if file.kind == OUTPUT and file.operator == stage.uid and file.sink == sink.name]


def _rows(storage: Storage, file: StateFile, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a staged file that are to be seen; none: it is not there any more."""
    try:
        table = frames.canonical(staged_table(storage, file, [*names, CHANGE_TYPE]))
    except WeirError:
        return
    for row in frames.python_rows(table):
        if row.pop(CHANGE_TYPE, None) not in ("delete", "update_preimage"):
            yield {name: row.get(name) for name in names}
