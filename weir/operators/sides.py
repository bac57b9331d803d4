"""Rows of several inputs as rows of one table, in which they reach a stage's subtasks. Those of one stay as they are.

    key columns | SIDE | "0_price", "0_at" ... of the first input | "1_name" ... of the second
    SIDE | columns                                                  of a union, whose inputs have the same

A row has the values of its own side, and nulls elsewhere. So one exchange serves any number of inputs, and whatever
holds for rows of one input on their way, order, retries and limits of memory, holds for these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from state_ops.errors import PipelineError
from state_ops.keyed.keyed_state import GROUP
from state_ops.records.operator_stats import OperatorStats
from weir.definition import MAIN, Input, Source, Stage

SIDE = "__weir_side"


def name_of(stage: Stage, side: int) -> str:
    """Return an input of a stage, for people."""
    input = stage.inputs[side]
    return f"the source {input.name}" if isinstance(input.origin, Source) else f"the stage {input.name}"


def inputs_of(stage: Stage) -> list[str]:
    """Return the inputs of a stage, as its checkpoint records which is which."""
    outputs = ["" if input.output == MAIN else f", output {input.output}" for input in stage.inputs]
    return [f"{name_of(stage, side)}{output}" for side, output in enumerate(outputs)]


def sql_of(input: Input) -> dict[str, Any]:
    """Return the SQL that makes a stage's rows of one input, as its checkpoint records it."""
    return {"where": input.where, "columns": list(input.columns)}


def places_before(stage: Stage, recorded: OperatorStats) -> list[int | None]:
    """Return the place that each input of a stage had when a checkpoint recorded the stage; None for an input that is
    new.

    Inputs are found by their names. Of two that read the same, each is found by its SQL, then in order.
    """
    now, sql = inputs_of(stage), [*map(sql_of, stage.inputs)]
    if recorded.inputs is None:  # an earlier release, which recorded no names: as many inputs are taken to be the same
        was_many = len(recorded.sides["newest"]) if recorded.sides else 0
        return [*range(len(now))] if was_many == len(now) else [None] * len(now)
    had = recorded.sql or [dict[str, Any]()] * len(recorded.inputs)
    was = [{part: sql_before.get(part) for part in ("where", "columns")} for sql_before in had]
    left, places = [*range(len(recorded.inputs))], list[int | None]([None] * len(now))
    for by_sql in (True, False):
        for number, name in enumerate(now):
            alike = (at for at in left if recorded.inputs[at] == name and (not by_sql or was[at] == sql[number]))
            if places[number] is None and (found := next(alike, None)) is not None:
                places[number] = found
                left.remove(found)
    return places


def wide(stage: Stage, columns: Sequence[pa.Schema]) -> pa.Schema:
    """Return the columns of the table. columns: by side, those that its where, select and transform leave.

    Raises PipelineError where a side has no such key column, or one of another type than the first side's; and of a
    union where columns differ.
    """
    if not stage.is_of_several:
        return columns[0]
    if not stage.key:
        return pa.schema([pa.field(SIDE, pa.int8()), *_common(stage, columns)])
    keys = []
    for side, (input, seen) in enumerate(zip(stage.inputs, columns, strict=True)):
        for number, name in enumerate(input.key):
            if name not in seen.names:
                raise PipelineError(
                    f"The input of {stage.uid}, {name_of(stage, side)}, has no column {name!r}.",
                    where=f"stage {stage.uid}",
                    next=f"Its columns are: {', '.join(seen.names)}.",
                )
            if not side:
                keys.append(pa.field(stage.key[number], seen.field(name).type))
            elif seen.field(name).type != keys[number].type:
                raise PipelineError(
                    f"The key {keys[number].name!r} of {stage.uid} is {keys[number].type} in {name_of(stage, 0)}, and"
                    f" {name!r} is {seen.field(name).type} in {name_of(stage, side)}.",
                    where=f"stage {stage.uid}",
                    next="Cast one of the two in the select of its side.",
                )
    values = [
        pa.field(column(side, field.name), field.type)
        for side, (input, seen) in enumerate(zip(stage.inputs, columns, strict=True))
        for field in seen
        if field.name not in input.key
    ]
    whole = pa.schema([*keys, pa.field(SIDE, pa.int8()), *values])
    if len(set(whole.names)) < len(whole):
        taken = next((field.name for field in values if field.name in stage.key), SIDE)
        raise PipelineError(
            f"The key of {stage.uid} cannot be called {taken!r}: so is a column of an input on its way.",
            where=f"stage {stage.uid}",
            next="Rename the key column in the select of its side.",
        )
    return whole


def _common(stage: Stage, columns: Sequence[pa.Schema]) -> pa.Schema:
    """Return the columns that all inputs of a union have, in the order of the first."""
    first = columns[0]
    for side, seen in enumerate(columns):
        of = {field.name: field.type for field in seen}
        problems = [
            *(f"has no {field.name!r}" for field in first if field.name not in of),
            *(f"has {name!r} besides" for name in seen.names if name not in first.names),
            *(
                f"has {field.name!r} as {of[field.name]}, not {field.type}"
                for field in first
                if field.name in of and of[field.name] != field.type
            ),
        ]
        if problems:
            raise PipelineError(
                f"The rows of {stage.uid} would have no common columns: beside {name_of(stage, 0)},"
                f" {name_of(stage, side)} {', '.join(problems)}.",
                where=f"stage {stage.uid}",
                next="Give the inputs the same columns: side(..., select=[...]), or a select(...) of each.",
            )
    return first


def column(side: int, name: str) -> str:
    """Return the name that a column of one side has in the table."""
    return f"{side}_{name}"


def names_in_table(stage: Stage, side: int) -> Callable[[str], str]:
    """Return the function that gives a column of one side its name in the table.

    Keys are named as the stage names them.
    """
    if not stage.key or not stage.is_of_several:
        return lambda name: name
    keys = dict(zip(stage.inputs[side].key, stage.key, strict=True))
    return lambda name: keys.get(name, column(side, name))


def widened(stage: Stage, side: int, rows: pa.Table, columns: pa.Schema) -> pa.Table:
    """Return the rows of one side in the table's columns, behind their key group if they have it."""
    if not stage.is_of_several:
        return rows
    count, names = rows.num_rows, names_in_table(stage, side)
    given = {names(name): rows.column(name) for name in rows.column_names if name != GROUP}
    given[SIDE] = pa.array(np.full(count, side, np.int8))
    arrays = [given[field.name] if field.name in given else pa.nulls(count, field.type) for field in columns]
    if GROUP not in rows.column_names:
        return pa.Table.from_arrays(arrays, schema=columns)
    schema = pa.schema([rows.schema.field(GROUP), *columns])
    return pa.Table.from_arrays([rows.column(GROUP), *arrays], schema=schema)


def values_of(stage: Stage, side: int, columns: pa.Schema) -> pa.Schema:
    """Return the columns of one side in the table that are no key, by their own names."""
    mark = column(side, "")
    values = (field for field in columns if field.name.startswith(mark) and field.name not in stage.key)
    return pa.schema([field.with_name(field.name[len(mark) :]) for field in values])


def narrowed(stage: Stage, side: int, rows: pa.Table) -> pa.Table:
    """Return the rows of one side: key columns and key group, then the side's own columns under their names in the
    table."""
    if not stage.is_of_several:
        return rows
    mine = rows.column(SIDE).to_numpy() == side
    if stage.key:
        kept = [GROUP, *stage.key]
        rows = rows.select([name for name in rows.column_names if name in kept or name.startswith(column(side, ""))])
    if mine.all():
        return rows
    places = np.flatnonzero(mine)
    first, count = (int(places[0]), len(places)) if len(places) else (0, 0)
    if count == 0 or places[-1] - first + 1 == count:  # in one piece, as inputs that are read one after the other are
        return rows.slice(first, count)
    return rows.filter(pa.array(mine))
