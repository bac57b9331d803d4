"""The schemas of a stage: those of its operator, and the checks that hold for every operator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pyarrow as pa

from state_ops.errors import PipelineError
from state_ops.rows.sketches import DISTINCT
from state_ops.schema.key_codec import check_key_type
from weir.definition import MAIN, ROW, Shapes, Stage, check_changes
from weir.definition.change_feed import CHANGE_TYPE, CHANGES
from weir.operators import sides
from weir.operators.base import RENAME, check_known_to_polars, refuse_patterns, refuse_same_names

_OWN_NAMES = "__weir_"


def shapes(stage: Stage, rows: pa.Schema) -> Shapes:
    """Return a stage's schemas from its input's; the function is tried on an empty table. PipelineError if they do not
    fit."""
    for side, input in enumerate(stage.inputs):
        column = sides.names_in_table(stage, side)(CHANGE_TYPE)
        if column in rows.names:
            check_changes(stage, input)
            _check_type(stage, rows.field(column).type)
    fixed = _shapes(stage, rows)
    for output, sink in stage.sinks_by_output:
        if output in fixed.outputs:  # else it has columns of its own
            refuse_same_names(fixed.outputs[output], f"stage {stage.uid}, sink {sink.name}")
        names = (*sink.capabilities.newest_of, *sink.capabilities.newest_by)
        refuse_patterns(names, f"stage {stage.uid}, sink {sink.name}")
    for columns in fixed.outputs.values():
        _refuse_own_names(columns.names, f"What {stage.uid} hands out", f"stage {stage.uid}", "Give it another name.")
    if not (stage.quarantines and ROW in rows.names):
        return fixed
    main = fixed.outputs[MAIN]
    if ROW not in main.names or main.field(ROW).type != pa.int64():
        raise PipelineError(
            f"A gate of {stage.uid} is to quarantine rows of the source, but the stage does not hand on which they are:"
            f" its output has no column {ROW!r} of integers.",
            where=f"stage {stage.uid}",
            next=f"Keep the column, as with_columns does; a select has to name {ROW!r}. No table gets it.",
        )
    stripped = {
        name: pa.schema([field for field in schema if field.name != ROW]) for name, schema in fixed.outputs.items()
    }
    return replace(fixed, outputs=stripped, tracked=True)


def _check_type(stage: Stage, type: pa.DataType) -> None:
    if not pa.types.is_string(type):
        raise PipelineError(
            f"{CHANGE_TYPE} is {type}.", where=f"stage {stage.uid}", next=f"Cast it to text: {', '.join(CHANGES)}."
        )


def _shapes(stage: Stage, rows: pa.Schema) -> Shapes:
    operator = stage.operator
    names = [*stage.key, *stage.order_by, *([operator.time_column] if operator.time_column else [])]
    for name in names:
        if name not in rows.names:
            raise PipelineError(
                f"The input of {stage.uid} has no column {name!r}.",
                where=f"stage {stage.uid}",
                next=f"Its columns are: {', '.join(rows.names)}.",
            )
    _check_names(stage, rows)
    keys = pa.schema([rows.field(name) for name in stage.key])
    for field in keys:
        check_key_type(field.name, field.type, f"stage {stage.uid}")
    check_known_to_polars(stage, rows)
    counted = [(name, str(agg.value_type(rows))) for name, agg in operator.aggregates if agg.kind == DISTINCT]
    return replace(operator.shapes(stage, rows, keys), sketched=tuple(counted))


def _check_names(stage: Stage, rows: pa.Schema) -> None:
    """Refuse a column whose name is one that Weir gives, or that Polars does not take for a name.

    Args:
        rows: The columns of the input; of a stage with several, as `sides.wide` has them.
    """
    names = list(rows.names)
    if stage.is_of_several:
        names.remove(sides.SIDE)
        for side in range(len(stage.inputs)) if stage.key else ():
            names += sides.values_of(stage, side, rows).names
    _refuse_own_names(names, f"The input of {stage.uid}", f"stage {stage.uid}", RENAME)
    refuse_patterns(stage.operator.selected_by_polars(stage, rows), f"stage {stage.uid}")


def _refuse_own_names(names: Iterable[str], of: str, where: str, remedy: str) -> None:
    reserved = next((name for name in names if name.startswith(_OWN_NAMES)), None)
    if reserved is not None:
        raise PipelineError(
            f"{of} has a column {reserved!r}, and names that begin with {_OWN_NAMES} are Weir's own.",
            where=where,
            next=remedy,
        )
