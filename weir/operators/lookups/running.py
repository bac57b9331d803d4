"""Lookup: each row with the rows of a table that have its key, as of the version that the plan of its epoch has.

It has no state. The table is read by the process that needs it, once for a version (`key_index`): as a whole, for all
subtasks, or, of a stage whose rows are exchanged by key, the part of a subtask's key groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pyarrow as pa

from state_ops.arrow.frames import wider_type
from state_ops.errors import ConfigurationError, PipelineError
from state_ops.keyed.keyed_state import GROUP
from state_ops.schema.key_codec import check_key_type
from state_ops.schema.key_groups import key_groups
from state_ops.schema.state_schema import StateSchema
from weir.connectors.lookups import key_index
from weir.connectors.lookups.key_index import KeyIndex, TooLargeError
from weir.connectors.lookups.lookup_table import Pinned
from weir.definition import MAIN, Shapes, Stage, Subtask
from weir.operators.base import check_storable
from weir.operators.joins import LEFT
from weir.operators.lookups import Lookup


class LookupOperator:
    """One subtask's lookups of one epoch."""

    def __init__(self, lookup: Lookup, subtask: Subtask) -> None:
        assert lookup.pinned is not None, "the epoch's plan has its version"
        self._stage, self._lookup, self._pinned, self._shapes = subtask.stage, lookup, lookup.pinned, subtask.shapes
        self._groups, self._max_parallelism = subtask.groups, subtask.max_parallelism
        self._index: KeyIndex | None = None
        self.rows_late = self.rows_deferred = 0
        self.closed_upto: int | None = None
        self.due: int | None = None
        self.swept: str | None = None
        self.has_timers: bool | None = None

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        rows = rows.drop_columns([GROUP]) if GROUP in rows.column_names else rows
        keys = rows.select(self._lookup.keys)
        if self._index is None:
            self._index = self._read(keys.schema)
        shape, values = self._shapes.outputs[MAIN], _values(self._lookup, rows.column_names)
        for of, found in self._index.pairs(keys, outer=self._lookup.how == LEFT):
            joined = rows.take(of)
            for name, field in values.items():
                joined = joined.append_column(name, self._index.rows.column(field.name).take(found))
            yield MAIN, joined.select(shape.names).cast(shape)

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        return iter(())

    pause = barrier

    def _read(self, keys: pa.Schema) -> KeyIndex:
        """Return the table in memory. keys: the columns of rows, whose types its keys get."""
        pinned, names = self._pinned, self._lookup.table_keys
        columns = pa.schema(
            [
                field.with_type(keys.field(names.index(field.name)).type) if field.name in names else field
                for field in pinned.version.columns
            ]
        )
        part = (self._groups, self._max_parallelism) if self._stage.key else None
        name = (pinned.table.uri, pinned.version.same, str(columns), names, part)

        def read() -> KeyIndex:
            parts = (self._mine(rows.cast(columns)) for rows in _rows(pinned))
            try:
                return KeyIndex.of(parts, columns, names, pinned.most_bytes)
            except TooLargeError as error:
                raise self._too_large(error.bytes) from None

        return key_index.get(name, read, pinned.most_bytes)

    def _mine(self, rows: pa.Table) -> pa.Table:
        """Return the rows of a table that the subtask may need."""
        if not self._stage.key:
            return rows
        groups = key_groups([rows.column(name) for name in self._lookup.table_keys], self._max_parallelism)
        mine = (groups >= self._groups.start) & (groups < self._groups.stop)
        return rows if mine.all() else rows.filter(pa.array(mine))

    def _too_large(self, bytes: int) -> ConfigurationError:
        pinned, most = self._pinned, self._pinned.most_bytes >> 20
        whole, more = "The table", "say broadcast=False, by which each subtask has a part,"
        if self._stage.key:
            whole, more = "The part of the table that belongs to a subtask", "raise the parallelism"
        return ConfigurationError(
            f"{whole} takes {bytes >> 20} MiB or more in memory, and {most} are allowed.",
            where=f"lookup {self._stage.uid}, {pinned.table.uri}, {pinned.version}",
            next=f"Name the columns that are wanted (columns=[...]), {more} or raise state.lookup_mb.",
        )


def _values(lookup: Lookup, taken: Collection[str]) -> dict[str, pa.Field]:
    """Return each column of the table by the name under which it comes out.

    taken: The names that rows have.
    """
    assert lookup.pinned is not None, "nobody asks before the table was looked at"
    values = [field for field in lookup.pinned.version.columns if field.name not in lookup.table_keys]
    return {field.name + lookup.suffix if field.name in taken else field.name: field for field in values}


def _rows(pinned: Pinned) -> Iterator[pa.Table]:
    return pinned.table.rows(pinned.version, pinned.version.columns, fresh=pinned.fresh)


def lookup_shapes(stage: Stage, lookup: Lookup, rows: pa.Schema, keys: pa.Schema) -> Shapes:
    """Return the output: the row's columns, then the table's without its keys."""
    where = f"lookup {stage.uid}"
    assert lookup.pinned is not None, "nobody asks before the table was looked at"
    table = lookup.pinned.version.columns
    for name, theirs in lookup.on:
        if name not in rows.names:
            raise PipelineError(
                f"The input of {stage.uid} has no column {name!r}.",
                where=where,
                next=f"Its columns are: {', '.join(rows.names)}.",
            )
        kind, other = rows.field(name).type, table.field(theirs).type
        check_key_type(name, kind, where)
        if kind != other and wider_type(kind, other) != kind:
            raise PipelineError(
                f"The key {name!r} of {stage.uid} is {kind}, and {theirs!r} of the table is {other}.",
                where=where,
                next="Cast the column in select=, to the table's type or to a wider one.",
            )
    values = _values(lookup, rows.names)
    twice = [name for name in values if name in rows.names]
    if twice or len(values) < len(table) - len(lookup.on):
        raise PipelineError(
            f"{stage.uid} would hand out {(twice or list(values))[0]!r} twice.",
            where=where,
            next="Say another suffix=, or name the columns that are wanted: columns=[...].",
        )
    output = pa.schema([*rows, *(field.with_name(name) for name, field in values.items())])
    check_storable(output, where, "Leave it out (columns=[...]), or cast it in select=")
    return Shapes(keys, StateSchema.build([]), {MAIN: output})
