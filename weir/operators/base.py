"""Checks and schemas that operators share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.arrow.types import unknown_to_polars
from state_ops.counts import agrees, counted
from state_ops.errors import InputError, PipelineError
from state_ops.rows.aggregates import Agg
from state_ops.rows.distinct_values import collections
from state_ops.schema.descriptors import Collection
from state_ops.schema.state_schema import StateSchema
from weir.definition import Stage
from weir.operators.filtered_rows import check_condition

_FARTHEST = 1 << 62  # microseconds
_PATTERN = re.compile(r"|\*|\^.*\$", re.DOTALL)
RENAME = "Rename it in a select before, or in transform=."
"""What to do about a column of the input whose name cannot be used."""


def check_storable(schema: pa.Schema, where: str, remedy: str) -> None:
    """Refuse types that no Delta table can have, nor the rows between two stages.

    Args:
        remedy: Where the author can do something about one.
    """
    for field in schema:
        kind = frames.unstorable(field.type)
        if kind is None:
            continue
        if pa.types.is_null(kind):
            raise PipelineError(
                f"The type of the output column {field.name!r} cannot be told from an empty input, or from a column "
                f"of nulls.",
                where=where,
                next=f"{remedy}, e.g. pl.lit(None, pl.String).",
            )
        raise PipelineError(
            f"The output column {field.name!r} is {field.type}; a Delta table cannot have "
            f"that{_part(kind, field.type)}.",
            where=where,
            next=f"{remedy}: {_instead(kind)}.",
        )


def check_known_to_polars(stage: Stage, rows: pa.Schema) -> None:
    """Raise PipelineError for a column whose type Polars does not have, if Polars does the stage's work.

    A function that takes pa.Table or a frame of pandas is given any column. Aggregates look at their own columns alone
    and check them themselves.
    """
    for name in stage.operator.given_to_polars(stage, rows):
        type = rows.field(name).type
        if (strange := unknown_to_polars(type)) is not None:
            raise PipelineError(
                f"The column {name!r} is {type}, and Polars, with which {stage.uid} works, has no {strange}.",
                where=f"stage {stage.uid}",
                next="Leave the column out or cast it in transform=: a decimal to one of at most 38 digits with a scale"
                " of 0 or more, any other to text or a number.",
            )


def refuse_patterns(names: Iterable[str], where: str) -> None:
    """Raise PipelineError for a name that Polars takes for a pattern of names, or for none."""
    strange = next((name for name in names if _PATTERN.fullmatch(name)), None)
    if strange is not None:
        raise PipelineError(
            f"A column is called {strange!r}, which Polars, with which Weir works, takes for a pattern of names.",
            where=where,
            next=RENAME,
        )


def refuse_same_names(columns: Iterable[pa.Field], where: str, within: str = "") -> None:
    """Refuse columns of a table, and fields of structs, that Delta takes for one: it does not tell capital letters from
    small ones."""
    taken: dict[str, str] = {}
    for field in columns:
        other = taken.setdefault(field.name.lower(), field.name)
        if other != field.name:
            raise PipelineError(
                f"The output columns {within + other!r} and {within + field.name!r} differ in capital letters alone, "
                f"and a Delta table takes "
                "them for one.",
                where=where,
                next="Give one of them another name.",
            )
        kind = field.type
        parts = [kind.field(number) for number in range(kind.num_fields)]
        refuse_same_names(parts if pa.types.is_struct(kind) else (), where, f"{within}{field.name}.")
        for part in () if pa.types.is_struct(kind) else parts:  # items of a list, keys and values of a map
            refuse_same_names([part], where, f"{within}{field.name}.")


def _part(kind: pa.DataType, whole: pa.DataType) -> str:
    return "" if kind == whole else f", for the {kind} in it"


def _instead(kind: pa.DataType) -> str:
    if pa.types.is_float16(kind):
        return "as Float32"
    if pa.types.is_duration(kind):
        return "as a number of microseconds, e.g. pl.col(...).dt.total_microseconds()"
    if pa.types.is_time(kind):
        return "as text, or as a number of microseconds since midnight"
    if pa.types.is_timestamp(kind):
        return "with the time zone UTC, since it stands in a map"
    if pa.types.is_decimal(kind):
        return "as a decimal of at most 38 digits, with a scale from 0 to its precision"
    return "as a number, a text, a timestamp, or lists, maps and structs of such"


def refuse_clash(stage: Stage, taken: set[str], by: str) -> None:
    clash = [name for name in stage.key if name in taken]
    if clash:
        raise PipelineError(
            f"{clash[0]!r} is a key column of {stage.uid} and the name of {by}.",
            where=f"stage {stage.uid}",
            next="Rename one of the two: rows of keys and values have both.",
        )


def state_of(aggregates: Sequence[tuple[str, Agg]], rows: pa.Schema, where: str) -> StateSchema:
    """Return the state that holds aggregates of such rows. Raises PipelineError if they do not fit or cannot be
    stored."""
    fields = []
    for name, agg in aggregates:
        refuse_patterns([name, *agg.columns], where)
        agg.check(name, rows, where)
        check_condition(name, agg, rows, where)
        fields += agg.parts(name, rows)
    names = [field[0] for field in fields]
    if twice := [field for field in names if names.count(field) > 1]:
        raise PipelineError(
            f"Two aggregates would keep a field {twice[0]!r} in state.",
            where=where,
            next="Rename one: a mean x keeps x__sum and x__count, a first or last x keeps x__by1 and so on.",
        )
    try:
        return StateSchema.build(fields)
    except PipelineError as error:
        advice = "Leave it out, or cast its column in select= or transform=."
        raise PipelineError(error.what, where=where, next=advice) from error


def values_of(
    stage: Stage,
    aggregates: Sequence[tuple[str, Agg]],
    rows: pa.Schema,
    state: StateSchema,
    made: Callable[..., tuple[Collection, ...]] = collections,
) -> tuple[Collection, ...]:
    """Return the maps with the values that aggregates of a stage count.

    Args:
        rows: The columns of the input.
        state: The fields of `state_of`, which may not be named like key columns either.
        made: Makes the maps of the aggregates, the columns and the names of these fields.
    """
    fields = [field.name for field in state.fields]
    maps = made(aggregates, rows, fields)
    refuse_clash(stage, {*fields, *(column for kept in maps for column in kept.columns)}, "a field of its state")
    return maps


def check_event_time(rows: pa.Schema, on: str, where: str) -> None:
    """Raise PipelineError unless `on` is a column of timestamps."""
    if not pa.types.is_timestamp(rows.field(on).type):
        raise PipelineError(
            f"The column {on!r} is {rows.field(on).type}, not a timestamp.",
            where=where,
            next="Name a timestamp column.",
        )


def event_times(rows: pa.Table, on: str, where: str) -> np.ndarray:
    """Return int64[n], the rows' event times in microseconds since 1970 UTC.

    Raises InputError if a time is missing, or so far away that a window's size added to it does not fit into an int64:
    it would wrap around to the other end of time.
    """
    if rows.column(on).null_count:
        raise InputError(
            f"{counted(rows.column(on).null_count, 'row', 'has', 'have')} no event time in {on!r}.",
            where=where,
            next="Leave them out by the stage's where=, which counts them.",
        )
    times: np.ndarray = (
        rows.column(on).cast(pa.timestamp("us", rows.schema.field(on).type.tz)).cast(pa.int64()).to_numpy()
    )
    far = (times > _FARTHEST) | (times < -_FARTHEST)
    if far.any():
        raise InputError(
            f"{counted(int(far.sum()), 'row')} {agrees(int(far.sum()), 'has', 'have')} an event time in "
            f"{on!r} that is more than 146,000 years from now.",
            where=where,
            next="Correct them in the file, or take it away. A where= would leave them out, but not out of the "
            "file's statistics, "
            "by which all that comes after them would be late.",
        )
    return times


def event_time_of(rows: pa.Table, column: str) -> int | None:
    """Return the newest event time in microseconds since 1970 UTC; None if there is none, as where SQL or a transform
    has made a text or a number of the column."""
    if not (pa.types.is_timestamp(rows.field(column).type) or pa.types.is_date(rows.field(column).type)):
        return None
    return cast("int | None", pl.Series(pl.from_arrow(rows.column(column))).dt.epoch("us").max())
