"""An epoch's rows for a table with keys, netted to what becomes of each key: its newest row, or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.runtime.connectors.delta_sink import CHANGE_TYPE, CHANGES, DELETE, UPDATE_BEFORE, UpsertSink
from state_ops.errors import PipelineError

ROW, _GROUP = "__weir_row", "__weir_group"


@dataclass(frozen=True, slots=True)
class Changes:
    """What becomes of keys. rows: those that come, one a key; deleted: keys alone that go."""

    rows: pa.Table
    deleted: pa.Table

    def keys(self, key: Sequence[str]) -> pl.DataFrame:
        """All keys, each once, as plain columns; `ROW` says which of `rows` it gets, null for those that go."""
        comes = _frame(self.rows.select(key)).with_row_index(ROW).with_columns(pl.col(ROW).cast(pl.Int64))
        goes = _frame(self.deleted.select(key)).with_columns(pl.lit(None, pl.Int64).alias(ROW))
        return pl.concat([comes, goes], how="diagonal")


def columns_of(schema: pa.Schema) -> pa.Schema:
    """The table's columns, by those of the rows that are handed out."""
    return pa.schema([field for field in schema if field.name != CHANGE_TYPE])


def check_columns(sink: UpsertSink, schema: pa.Schema) -> None:
    """Whether rows of these columns can be netted. Raises PipelineError."""
    where = f"table {sink.name}"
    for name, what in (*((name, "key") for name in sink.key), *((name, "order_by") for name in sink.order_by)):
        if name not in columns_of(schema).names:
            raise PipelineError(
                f"The table {sink.name} has the {what} {name}, and its rows have no such column.",
                where=where,
                next=f"They have: {', '.join(columns_of(schema).names)}.",
            )
    for name in sink.key:
        type = schema.field(name).type
        if not (pa.types.is_string(type) or pa.types.is_integer(type) or _is_plain(type)):
            raise PipelineError(
                f"{name} is {type}, which is no key of the table {sink.name}.",
                where=where,
                next="Use texts, integers, booleans, bytes, decimals, dates or timestamps: floats and nested values do "
                "not tell what is equal.",
            )
    if CHANGE_TYPE in schema.names and not pa.types.is_string(schema.field(CHANGE_TYPE).type):
        raise PipelineError(
            f"{CHANGE_TYPE} is {schema.field(CHANGE_TYPE).type}.", where=where, next=f"Say {', '.join(CHANGES)}."
        )


def _is_plain(type: pa.DataType) -> bool:
    tests = (pa.types.is_boolean, pa.types.is_binary, pa.types.is_decimal, pa.types.is_date, pa.types.is_timestamp)
    return any(test(type) for test in tests)


def net(sink: UpsertSink, schema: pa.Schema, groups: Iterable[Iterator[pa.RecordBatch]], *, ordered: bool) -> Changes:
    """Net rows to one change per key.

    Args:
        schema: Of the rows.
        groups: Of one epoch each, one after the other; a later one's rows are newer than all of an earlier one's.
        ordered: The newest row of a key is found by the sink's `order_by` within a group; else it is the last.
    """
    keys, key = pl.DataFrame(), list(sink.key)
    parts: list[pa.Table] = [schema.empty_table()]
    frames: list[pl.DataFrame] = []
    at = 0
    for number, group in enumerate(groups):
        for batch in group:
            rows = pa.Table.from_batches([batch])
            if CHANGE_TYPE in rows.column_names:
                rows = rows.filter(pc.not_equal(rows.column(CHANGE_TYPE), UPDATE_BEFORE))
            order = list(sink.order_by) if ordered else []
            frame = _frame(rows.select(dict.fromkeys([*key, *order])))
            frames.append(frame.with_row_index(ROW, at).with_columns(pl.lit(number).alias(_GROUP)))
            parts.append(rows)
            at += rows.num_rows
    table = pa.concat_tables(parts)
    if not at:
        return Changes(_without_change(table), table.select(key))
    keys = pl.concat(frames)
    if ordered and sink.order_by:
        keys = keys.sort([_GROUP, *sink.order_by], maintain_order=True, nulls_last=False)
    newest = keys.unique(key, keep="last", maintain_order=True)[ROW].sort()
    table = table.take(pa.array(newest.to_arrow()))
    if CHANGE_TYPE not in table.column_names:
        return Changes(table, table.select(key).slice(0, 0))
    deleted = pc.equal(table.column(CHANGE_TYPE), DELETE)
    return Changes(_without_change(table.filter(pc.invert(deleted))), table.filter(deleted).select(key))


def _without_change(table: pa.Table) -> pa.Table:
    return table.drop_columns([CHANGE_TYPE]) if CHANGE_TYPE in table.column_names else table


def _frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame
