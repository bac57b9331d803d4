"""The operators that work on the rows of one subtask between two barriers, one module for each.

They are a stage's function, windows, sessions, running aggregates, deduplication, joins, ranks, and stages without
state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from state_ops.backends.base import Backend
from state_ops.errors import PipelineError
from state_ops.ids import CheckpointId
from state_ops.keyed.per_key.key_state import OpenCache
from state_ops.keyed.ttl import Forgotten
from state_ops.records.acks import Ack
from state_ops.rows.aggregates import Agg
from state_ops.rows.resident_table import Residence
from state_ops.rows.sketches import DISTINCT
from state_ops.schema.key_codec import check_key_type
from state_ops.schema.state_schema import StateSchema
from weir.connectors.delta.change_feed import CHANGE_TYPE, CHANGES, EPOCH
from weir.definition import (
    ROW,
    Aggregation,
    AsOf,
    CalendarWindow,
    Deduplication,
    Epoch,
    Join,
    Lookup,
    SessionWindow,
    Stage,
    TopN,
    Window,
    check_changes,
)
from weir.operators.aggregation import AggregationOperator, aggregation_shapes
from weir.operators.base import (
    LATE,
    MAIN,
    RENAME,
    Operator,
    Progress,
    Shapes,
    check_known_to_polars,
    event_time_of,
    refuse_patterns,
    refuse_same_names,
)
from weir.operators.deduplication import (
    EXPIRES,
    SEEN,
    DeduplicationOperator,
    deduplication_shapes,
    index_changes,
    remembered,
)
from weir.operators.event_time import END, START, shown
from weir.operators.functions.function import FunctionOperator, function_shapes
from weir.operators.joins import sides
from weir.operators.joins.as_of import AsOfOperator
from weir.operators.joins.join import KEPT_UNTIL, JoinOperator, join_shapes, names_in_state
from weir.operators.joins.lookup import LookupOperator, lookup_shapes
from weir.operators.session_store import no_sessions
from weir.operators.sessions import SessionOperator, open_sessions, session_shapes
from weir.operators.stateless import StatelessOperator, stateless_shapes
from weir.operators.top_n import TopNOperator, open_ranks, open_ranks_schema, top_n_shapes
from weir.operators.windows import WindowOperator, no_windows, window_shapes
from weir.operators.windows import open_windows as open_sized_windows

_OWN_NAMES = "__weir_"

__all__ = [
    "EPOCH",
    "LATE",
    "MAIN",
    "FunctionOperator",
    "Operator",
    "Progress",
    "Shapes",
    "build",
    "clocked_output",
    "clocked_state",
    "duplicates",
    "event_time_of",
    "index_changes",
    "open_windows",
    "open_windows_schema",
    "remembered",
    "shapes",
    "stateless",
]


def shapes(stage: Stage, rows: pa.Schema) -> Shapes:
    """Return a stage's schemas from its input's; the function is tried on an empty table. PipelineError if they do not
    fit."""
    for number, lane in enumerate(stage.lanes):
        column = sides.column(number, CHANGE_TYPE) if stage.sides else CHANGE_TYPE
        if column in rows.names:
            check_changes(stage, lane.input)
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
    names = [*stage.key, *stage.order_by, *([stage.on] if stage.on else [])]
    for name in names:
        if name not in rows.names:
            raise PipelineError(
                f"The input of {stage.uid} has no column {name!r}.",
                where=f"stage {stage.uid}",
                next=f"Its columns are: {', '.join(rows.names)}.",
            )
    _check_names(stage, rows)
    if not stage.key and stage.lookup is None:
        return stateless_shapes(stage, rows)
    keys = pa.schema([rows.field(name) for name in stage.key])
    for field in keys:
        check_key_type(field.name, field.type, f"stage {stage.uid}")
    check_known_to_polars(stage, rows)
    operator = stage.window or stage.aggregation or stage.deduplication or stage.join or stage.top_n or stage.lookup
    if operator is None:
        return function_shapes(stage, rows, keys)
    fixed = _SHAPES[type(operator)](stage, operator, rows, keys)
    of_rows = stage.window or stage.aggregation
    return fixed if of_rows is None else replace(fixed, sketched=_sketched(of_rows.aggregates, rows))


def _sketched(aggregates: Sequence[tuple[str, Agg]], rows: pa.Schema) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(agg.value_type(rows))) for name, agg in aggregates if agg.kind == DISTINCT)


def _check_names(stage: Stage, rows: pa.Schema) -> None:
    """Raise PipelineError for a column whose name is one that Weir gives, or that Polars does not take for a name.

    Args:
        rows: The columns of the input; of a stage with several, as `sides.wide` has them.
    """
    names = list(rows.names)
    if stage.sides:
        names.remove(sides.SIDE)
        for side in range(len(stage.sides)) if stage.key else ():
            names += sides.values_of(stage, side, rows).names
    _refuse_own_names(names, f"The input of {stage.uid}", f"stage {stage.uid}", RENAME)
    if stage.lookup is None:
        refuse_patterns(stage.key if stage.top_n is None else rows.names, f"stage {stage.uid}")


def _refuse_own_names(names: Iterable[str], of: str, where: str, remedy: str) -> None:
    reserved = next((name for name in names if name.startswith(_OWN_NAMES)), None)
    if reserved is not None:
        raise PipelineError(
            f"{of} has a column {reserved!r}, and names that begin with {_OWN_NAMES} are Weir's own.",
            where=where,
            next=remedy,
        )


_SHAPES: dict[type, Callable[[Stage, Any, pa.Schema, pa.Schema], Shapes]] = {
    Window: window_shapes,
    CalendarWindow: window_shapes,
    SessionWindow: session_shapes,
    Aggregation: aggregation_shapes,
    Deduplication: deduplication_shapes,
    Join: join_shapes,
    AsOf: join_shapes,
    TopN: top_n_shapes,
    Lookup: lookup_shapes,
}


def build(
    stage: Stage,
    fixed: Shapes,
    backend: Backend,
    epoch: Epoch,
    progress: Progress,
    groups: range,
    max_parallelism: int,
    swept: str | None,
    open_cache: OpenCache,
    residence: Residence,
    checkpoint: CheckpointId,
    forgotten: Forgotten | None = None,
) -> Operator:
    """Return the operator of one subtask for one epoch.

    Args:
        groups: The subtask's key groups.
        max_parallelism: How many there are.
        swept: Where its sweep of expired state goes on.
        open_cache: For state that is used key by key.
        residence: Where tables of its rows come from and go to, and what does not fit into memory.
        checkpoint: The one that its state will be part of: a later one than the epoch whose rows have waited.
        forgotten: What a TTL has let expire before this epoch.
    """
    fixed = fixed.handed_out
    if isinstance(stage.window, Window):
        return WindowOperator(stage, stage.window, fixed, backend, progress, groups, residence)
    if isinstance(stage.window, SessionWindow):
        return SessionOperator(stage, stage.window, fixed, backend, progress, groups, residence)
    if stage.aggregation is not None:
        return AggregationOperator(stage, stage.aggregation, fixed, backend, checkpoint, residence)
    if stage.deduplication is not None:
        return DeduplicationOperator(stage, stage.deduplication, fixed, backend, epoch, progress, groups, residence)
    if isinstance(stage.join, AsOf):
        return AsOfOperator(stage, stage.join, fixed, backend, epoch, progress, groups, residence)
    if stage.join is not None:
        return JoinOperator(stage, stage.join, fixed, backend, epoch, progress, groups, residence)
    if stage.top_n is not None:
        return TopNOperator(stage, stage.top_n, fixed, backend, epoch, progress, groups, residence)
    if stage.lookup is not None:
        return LookupOperator(stage, stage.lookup, fixed, groups, max_parallelism)
    return FunctionOperator(
        stage, fixed, backend, epoch, progress, groups, swept, open_cache, residence, forgotten=forgotten
    )


def stateless(stage: Stage, fixed: Shapes, epoch: Epoch) -> Operator:
    """Return the operator of one subtask of a stage without a key."""
    if stage.lookup is not None:
        return LookupOperator(stage, stage.lookup, fixed.handed_out)
    return StatelessOperator(stage, fixed.handed_out, epoch)


def open_windows(
    stage: Stage, keys: pa.Schema, state: StateSchema, backend: Backend, groups: range
) -> Iterator[pa.Table]:
    """Return the windows that are still open in some key groups: key columns, window_start, window_end, aggregates so
    far. Of ranks that are not final: key columns, until, rows."""
    if stage.top_n is not None:
        return open_ranks(stage.top_n, keys, state, backend, groups)
    window = stage.window
    assert window is not None
    if isinstance(window, SessionWindow):
        opened = open_sessions(keys, state, backend, groups)
    else:
        opened = open_sized_windows(window, keys, state, backend, groups)
    return (shown(stage, window, windows) for windows in opened)


def open_windows_schema(stage: Stage, keys: pa.Schema, state: StateSchema) -> pa.Schema:
    """Return the columns of `open_windows`, whether or not one is open."""
    if stage.top_n is not None:
        return open_ranks_schema(stage.top_n, keys, state)
    window = stage.window
    assert window is not None
    none = no_sessions(keys, state) if isinstance(window, SessionWindow) else no_windows(window, keys, state)
    return shown(stage, window, none).schema


def clocked_state(stage: Stage) -> tuple[str, ...]:
    """Return the fields of a stage's state that say when it was processed, by the epoch's clock: they differ wherever
    the same rows are read again. A part of what lists hold is called LIST.PART."""
    if stage.by_clock:
        return (START, END)
    if isinstance(stage.join, Join) and not isinstance(stage.join, AsOf) and stage.join.times is None:
        return tuple(f"{name}.{KEPT_UNTIL}" for name in names_in_state(stage.key))
    by_clock = stage.deduplication is not None and stage.deduplication.on is None
    by_clock_too = stage.top_n is not None and stage.top_n.ttl is not None
    return (SEEN, EXPIRES) if by_clock else (EXPIRES,) if by_clock_too else ()


def clocked_output(stage: Stage) -> tuple[str, ...]:
    """Return the columns of what a stage hands out that say in which epoch it did, or when, and so where its input was
    cut."""
    if stage.by_clock:
        return (START, END)
    if stage.function is None and not stage.key:  # it hands on what it reads
        return tuple(dict.fromkeys(name for before in stage.stages_before for name in clocked_output(before)))
    return (EPOCH,) if stage.aggregation is not None else ()


def duplicates(acks: Iterable[Ack]) -> int:
    """Return how many rows a deduplication dropped."""
    return sum(ack.rows_in - ack.rows_out - ack.rows_late for ack in acks)
