"""Rows that a test gives: as a table of the input's columns, and as a source whose slices they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.errors import InputError, PipelineError
from weir.definition import Source, Stage
from weir.operators.base import event_time_of
from weir.sources.slices import Slice, SourceFile

Rows = Any
"""A list of dicts, or a Polars, pandas or pyarrow frame."""

Schema = pa.Schema | Mapping[str, pa.DataType] | Mapping[str, pa.Schema] | None
"""The columns of every source, or those of each by its name; None: the first rows tell them."""


class GivenSource:
    """A source that hands out what a test gives it: each epoch's rows are a slice of one file.

    Args:
        schema: The columns, if they are known before the first rows. These tell them otherwise.
        source: The source.
        stage: A stage that reads it. Tested alone, it may be one that reads another stage: the rows then have that
            stage's columns.
    """

    def __init__(self, schema: pa.Schema | None, source: Source, stage: Stage) -> None:
        self._schema, self._where = schema, f"stage {stage.uid}"
        self._event_times = [source.event_time, None if stage.reads_source else stage.on]
        self._rows: pa.Table | None = None

    def plan(self, rows: Rows, newest: int | None) -> Slice:
        """Return the slice of these rows, possibly none.

        Args:
            newest: Their newest event time, by default as their columns say.
        """
        self._rows = table_of(rows, self._schema)
        if self._rows is None:
            return Slice((), False, newest, self._schema)
        for field in self._rows.schema if self._schema is None else ():
            if pa.types.is_null(field.type):
                raise PipelineError(
                    f"The type of the column {field.name!r} cannot be told from rows that are null in it.",
                    where=self._where,
                    next="Give testing.run the input's schema=, e.g. {'arr_delay': pa.float64(), ...}.",
                )
        self._schema = self._rows.schema
        column = next((name for name in self._event_times if name in self._schema.names), None)
        if newest is None and column is not None:
            newest = event_time_of(self._rows, column)
        files = (SourceFile("rows", 0, 0, self._rows.num_rows),) if self._rows.num_rows else ()
        return Slice(files, False, newest, self._schema)

    # What the steps of an epoch ask of a source.

    def advance(self, position: dict[str, Any] | None, *_: object) -> dict[str, Any] | None:
        """Return the position unchanged: nothing has to be remembered, because no row comes twice."""
        return position

    def batches(self, _: SourceFile, columns: pa.Schema, *__: object) -> Iterator[tuple[np.ndarray, pa.Table]]:
        """Yield the slice's rows with their numbers."""
        assert self._rows is not None, "the slice has a file"
        yield np.arange(self._rows.num_rows), self._rows.select(columns.names)

    def uri(self, _: SourceFile) -> str:
        """Return where the rows are, for errors."""
        return self._where


def table_of(rows: Rows, schema: pa.Schema | None) -> pa.Table | None:
    """Return rows as a canonical table, of `schema` if there is one; None if there are neither rows nor columns."""
    if isinstance(rows, list | tuple):
        names = dict.fromkeys(name for row in rows for name in row)
        given: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
        if rows and schema is not None:  # a column that no row has is null in all
            given = {**dict.fromkeys(schema.names, [None] * len(rows)), **given}
    elif isinstance(rows, Mapping):
        raise InputError(
            f"The rows are a mapping with the keys {', '.join(map(repr, rows))}.",
            next="Give a list of rows, each a dict, or a frame. Only `run_pipeline` takes rows by source name.",
        )
    else:
        try:
            table = frames.arrow(rows)
        except pa.ArrowInvalid as error:
            raise InputError(
                f"A value of the rows does not fit: {error}",
                next="Integers are of 64 bits with a sign; larger numbers are decimals, decimal(20,0).",
            ) from error
        given = dict(zip(table.column_names, table.columns, strict=True))
    if not given:
        return None
    strange = [name for name in given if schema is not None and name not in schema.names]
    if strange:
        assert schema is not None
        raise InputError(
            f"The rows have a column {strange[0]!r}, which the input has not.",
            next=f"Its columns are: {', '.join(schema.names)}.",
        )
    columns = {}
    for name, type in (
        [(name, None) for name in given] if schema is None else zip(schema.names, schema.types, strict=True)
    ):
        if name not in given:
            raise _misfit(name, "it is missing")
        values = given[name]
        try:
            column = pa.array(values, type) if isinstance(values, list) else values.cast(type or values.type)
            columns[name] = frames.canonical(pa.table({name: column})).column(0)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise _misfit(name, str(error)) from error
    return pa.table(columns)


def _misfit(column: str, problem: str) -> InputError:
    return InputError(
        f"The column {column!r} of the rows does not fit: {problem}",
        next="Give rows of one shape, or say which it is with schema=; without that, the first rows of a run do.",
    )


def canonical(schema: pa.Schema | Mapping[str, pa.DataType] | None) -> pa.Schema | None:
    """Return the columns of an input in canonical types."""
    return None if schema is None else frames.canonical(pa.schema(schema).empty_table()).schema
