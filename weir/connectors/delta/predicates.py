"""The rows of a table that satisfy a condition, file by file: those that a checkpoint's rows replace.

A file whose rows all satisfy it goes; one with some of them is written anew without them. Where a file has one value of
each column that the condition names, by its partition or by the bounds that the log has, the file is not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from state_ops.arrow import frames
from state_ops.arrow.parquet import staged_writer
from state_ops.delta.log_entries import DataFile, add_actions, told
from state_ops.errors import PipelineError
from state_ops.ids import new_attempt_id
from state_ops.storage.storage import Storage
from state_ops.storage.temp_dirs import scratch as scratch_dir
from state_ops.storage.transfers import together
from weir import where
from weir.connectors.delta.statistics import is_ambiguous, statistics
from weir.connectors.delta.table_commit import local_file, table_path
from weir.connectors.formats.stored_rows import StoredRows, stored_rows

_ANY = pa.table([pa.nulls(1)], ["any"])  # a row, for a condition that names no column


@dataclass(frozen=True, slots=True)
class Predicate:
    """A condition on the rows of a version of a table.

    Attributes:
        table: The table's name.
        condition: As it was written.
        schema: The columns that it names.
        constants: By a file's path, their values, of files that have one of each.
    """

    table: str
    condition: str
    where: where.Where
    schema: pa.Schema
    constants: Mapping[str, tuple[Any, ...]]

    def keeps(self, rows: pa.Table, file: DataFile) -> np.ndarray[Any, Any]:
        """Return bool[n], the rows of a file that satisfy it."""
        rows, values = frames.canonical(rows), dict(file.partition)
        columns = {
            field.name: rows.column(field.name)
            if field.name in rows.column_names
            else pa.repeat(pa.scalar(values.get(field.name), pa.string()), rows.num_rows).cast(field.type)
            for field in self.schema
        }
        return self._asked(pa.table(columns, schema=self.schema) if columns else rows)

    def whole(self, file: DataFile) -> bool | None:
        """Return whether all rows of a file satisfy the condition (True) or none does (False).

        None: the file has to be read.
        """
        if not self.schema.names:
            return bool(self._asked(_ANY)[0])
        if file.path not in self.constants:
            return None
        of_each = zip(self.constants[file.path], self.schema, strict=True)
        values = [pa.array([value], field.type) for value, field in of_each]
        return bool(self._asked(pa.table(values, schema=self.schema))[0])

    def _asked(self, rows: pa.Table) -> np.ndarray[Any, Any]:
        try:
            return self.where.mask(rows)
        except (where.Fails, where.Refused) as error:
            raise PipelineError(
                f"A row of the table {self.table} can neither be kept nor replaced: {self.condition} fails over it: "
                f"{error}.",
                where=f"table {self.table}",
                next="Mend or delete that row in the table, then run again; and write the condition so that it holds "
                "or not of each row.",
            ) from error


def check_condition(table: str, condition: str, schema: pa.Schema) -> None:
    """Raise PipelineError unless a condition can be evaluated on rows of these columns."""
    try:
        where.compiled(condition, schema)
    except where.Refused as error:
        raise PipelineError(
            f"What rows for the table {table} replace cannot be evaluated: {error}",
            where=f"table {table}, where={condition!r}",
            next="Use comparisons, AND, OR, NOT, IN, BETWEEN and LIKE on columns of the rows.",
        ) from error


def predicate(table: str, condition: str, handle: DeltaTable) -> Predicate:
    """Return a condition on the version of a table that a handle shows. Raises PipelineError."""
    schema = frames.canonical_schema(pa.schema(handle.schema().to_arrow()))
    check_condition(table, condition, schema)
    compiled = where.compiled(condition, schema)
    columns = pa.schema([schema.field(name) for name in compiled.columns])
    return Predicate(table, condition, compiled, columns, _constants(handle, columns))


def apart(
    storage: Storage, rows: Predicate, directory: str, active: Sequence[DataFile], scratch: Path
) -> tuple[list[DataFile], list[DataFile]]:
    """Return the files that go, and what comes instead of those that have other rows as well.

    Args:
        directory: For new files, relative to the table.
        scratch: A directory for files, one for each transfer at a time.
    """
    parts = together(partial(_part, storage, rows, directory, scratch), list(active), at_once=storage.transfers)
    return [goes for goes, _ in parts if goes is not None], [rest for _, rest in parts if rest is not None]


def _part(
    storage: Storage, rows: Predicate, directory: str, scratch: Path, file: DataFile, _: object
) -> tuple[DataFile | None, DataFile | None]:
    whole = rows.whole(file)
    if whole is not None:
        return (file if whole else None), None
    with local_file(storage, rows.table, file, scratch) as local, stored_rows(local) as source:
        names = [name for name in source.schema.names if name in rows.schema.names]
        batches = source.batches(columns=names or source.schema.names[:1])
        number = sum(int(rows.keeps(batch, file).sum()) for batch in batches)
        if not number:
            return None, None
        if number == source.footer.num_rows:
            return file, None
        with scratch_dir(scratch, "weir-replace-") as place:
            target = place / "rest"
            with staged_writer(target, source.schema.remove_metadata()) as writer:
                for rest in _rest(rows, source, file):
                    writer.write_table(rest)
            path = f"{directory}/0-{new_attempt_id()}.parquet"
            size, _digest = storage.put_file(target, f"{table_path(rows.table)}/{path}")
            footer = pq.read_metadata(target)
            return file, DataFile(path, size, footer.num_rows, file.partition, statistics=statistics(footer))


def _rest(rows: Predicate, source: StoredRows, file: DataFile) -> Iterator[pa.Table]:
    for table in source.batches():
        yield table.filter(pc.invert(pa.array(rows.keeps(table, file))))


def _constants(handle: DeltaTable, columns: pa.Schema) -> dict[str, tuple[Any, ...]]:
    actions = add_actions(handle)
    if not columns.names:
        return {}
    values = [_constant(actions, field) for field in columns]
    return {
        path: tuple(value for _, value in row)
        for path, row in zip(actions.column("path").to_pylist(), zip(*values, strict=True), strict=True)
        if all(is_constant for is_constant, _ in row)
    }


def _constant(actions: pa.Table, field: pa.Field) -> list[tuple[bool, Any]]:
    """Return for each file whether it is known to have one value of a column, and that value."""
    partition = told(actions, "partition").get(field.name)
    if partition is not None:
        return [(True, value) for value in partition]
    bounds = [values for what in ("min", "max", "null_count") if (values := told(actions, what).get(field.name))]
    exact = pa.types.is_integer(field.type) or pa.types.is_string(field.type) or pa.types.is_date(field.type)
    if not exact or len(bounds) < 3:
        return [(False, None)] * actions.num_rows
    return [
        (least is not None and least == greatest and nulls == 0 and not is_ambiguous(least), least)
        for least, greatest, nulls in zip(*bounds, strict=True)
    ]
