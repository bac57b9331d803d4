"""The schemas of a stage, fixed before its first row, and whether they fit what is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa

from state_ops.backends import loader as backends
from state_ops.counts import agrees, counted
from state_ops.errors import (
    ConfigurationError,
    PipelineError,
)
from state_ops.logs import Logger
from state_ops.records.checkpoint import stats_of
from weir.connectors.lookups.lookup_table import Pinned
from weir.connectors.sink import Sink
from weir.definition import ROW, Shapes, Source, Stage
from weir.epoch.model import InFlightEpoch
from weir.execution import direct_read
from weir.execution.executor import Channel, Landed
from weir.gates import quarantine
from weir.operators import sides, watermarks
from weir.operators.base import check_storable, refuse_same_names
from weir.operators.compatibility import fit
from weir.operators.shapes import shapes
from weir.ownership.context import RunContext

log = Logger("weir.epoch")


def fixed_shapes(
    context: RunContext, epoch: InFlightEpoch, stage: Stage, rows: Landed | Channel | None, pinned: Pinned | None
) -> Shapes | None:
    first = epoch.work[stage.uid].first
    seen = rows.schema if rows is not None and not (first is not None and first.begun) else None
    looked_up = () if pinned is None else (pinned.version.columns,)
    has_other_types = (  # a column of nulls has got its type
        seen is not None and (seen, *looked_up) != context.reads.get(stage.uid)
    )
    if stage.uid in context.shapes and not has_other_types:
        return context.shapes[stage.uid]
    if seen is not None:
        raw: pa.Schema | None = seen
    elif isinstance(stage.input, Source):  # no rows, but the schema may be known: from the files read before,
        known_files = epoch.source_offsets.expected.get(stage.input.name)
        if known_files is None and context.pipeline.is_before_several(stage):  # which may have rows of another input
            known_files = stage.input.declared_columns
        raw = None if known_files is None else source_schema(stage, known_files)
    else:  # or from the stage before
        upstream = context.shapes.get(stage.input.uid)
        raw = upstream.outputs[stage.from_output] if upstream else None
    if raw is None:
        return None
    direct_read.check_where(stage, raw, context.settings.spark.conf)
    schema = context.executor.columns(stage, raw, "what was read before" if rows is None else rows.where)
    context.made_times[stage.uid] = watermarks.made_times(stage, [schema])
    schema = schema.remove_metadata()
    fixed = shapes_of(stage if pinned is None else stage.pinned(pinned), schema, raw)
    return _fixed(context, stage, fixed, (raw, *looked_up), schema)


def shapes_of_sides(
    context: RunContext, epoch: InFlightEpoch, stage: Stage, parts: Mapping[int, Landed | Channel]
) -> Shapes | None:
    """Return the schemas of a stage with several inputs, or None as long as none of them has had rows.

    Raises PipelineError where only some have, and nothing tells the columns of the others.
    """
    raw = [_columns_of(context, epoch, lane, parts.get(side)) for side, lane in enumerate(stage.sides)]
    if stage.uid in context.shapes and tuple(raw) == context.reads.get(stage.uid):
        return context.shapes[stage.uid]
    if not parts and None in raw:
        return context.shapes.get(stage.uid)
    seen = []
    for side, (lane, columns) in enumerate(zip(stage.sides, raw, strict=True)):
        if columns is None:
            raise PipelineError(
                f"T{sides.name_of(stage, side)[1:]} has had no row yet, so nothing tells its columns, and"
                f" {stage.uid} has rows of another input that wait for them.",
                where=f"stage {stage.uid}",
                next="Say them at the source (schema=...), or run again when it has a first file.",
            )
        part = parts.get(side)
        direct_read.check_where(lane, columns, context.settings.spark.conf)
        seen.append(context.executor.columns(lane, columns, "what was read before" if part is None else part.where))
    context.made_times[stage.uid] = watermarks.made_times(stage, seen)
    schema = sides.wide(stage, [columns.remove_metadata() for columns in seen])
    read = [columns for columns in raw if columns is not None]
    return _fixed(context, stage, shapes_of(stage, schema, *read), tuple(raw), schema)


def _columns_of(
    context: RunContext, epoch: InFlightEpoch, lane: Stage, part: Landed | Channel | None
) -> pa.Schema | None:
    """Return the columns of an input; None if nothing tells them yet."""
    if part is not None:
        return part.schema
    if isinstance(lane.input, Source):
        expected = epoch.source_offsets.expected.get(lane.input.name)
        return lane.input.declared_columns if expected is None else expected
    upstream = context.shapes.get(lane.input.uid)
    return upstream.outputs[lane.from_output] if upstream else None


def _fixed(
    context: RunContext, stage: Stage, fixed: Shapes, raw: tuple[pa.Schema | None, ...], seen: pa.Schema
) -> Shapes:
    """Keep a stage's shapes, once they fit its state, its backend and its sinks.

    Args:
        raw: By input, the columns that it has; of a lookup those of its table too.
        seen: Those that the stage's function sees.
    """
    _check_backend(context, stage)
    fixed = _fitted_to_head(context, stage, fixed)
    for sink, output in sinks_of(stage, fixed):
        context.sinks.check(sink, output)
    context.reads[stage.uid], context.inputs[stage.uid], context.shapes[stage.uid] = raw, seen, fixed
    return fixed


def source_schema(stage: Stage, files: pa.Schema) -> pa.Schema:
    """Return the schema in which a stage reads a source whose files have these columns.

    It has the rows' positions too if the stage's gates may set rows aside.
    """
    if stage.quarantine is None:
        quarantine.refuse_row(stage, files)
        return files
    assert isinstance(stage.input, Source), "only such a stage may quarantine"
    quarantine.refuse_own_column(stage.input, files)
    return files if not stage.quarantines else pa.schema([*files, pa.field(ROW, pa.int64())])


def shapes_of(stage: Stage, seen: pa.Schema, *read: pa.Schema) -> Shapes:
    """Return a stage's schemas, those of all its tables among them.

    Args:
        seen: The columns that its function sees.
        read: By input, those before its transform.

    Raises:
        PipelineError: Where they do not fit.
    """
    where = f"stage {stage.uid}"
    if stage.quarantines and ROW not in seen.names:
        raise PipelineError(
            f"A gate of {stage.uid} is to quarantine rows of the source, but the transform drops {ROW!r}, by which they"
            " are known.",
            where=where,
            next="Let the transform keep that column.",
        )
    aside = {}
    for output, lane, sink in stage.tables_aside:
        columns = read[stage.lanes.index(lane)]
        kept = quarantine.table_schema(lane, pa.schema([field for field in columns if field.name != ROW]))
        check_storable(kept, f"{where}, the table {sink.name}", "Cast it in what writes the files")
        refuse_same_names(kept, f"{where}, the table {sink.name}")
        aside[output] = kept
    fixed = shapes(stage, seen)
    return replace(fixed, outputs={**fixed.outputs, **aside}) if aside else fixed


def sinks_of(stage: Stage, fixed: Shapes) -> list[tuple[Sink, pa.Schema]]:
    """Return the sinks that a stage writes to, with the columns of their rows."""
    return [(sink, fixed.outputs[output]) for output, sink in stage.sinks_by_output]


def _check_backend(context: RunContext, stage: Stage) -> None:
    """Refuse, before the first row, a backend that is not there or cannot read the state in the newest checkpoint."""
    configured = context.settings.state.backend
    backends.named(configured)
    head, recorded = context.head, stats_of(context.head, stage.uid)
    if head is None or not recorded.has_state:
        return
    problem = backends.misfit(recorded.backend, configured)
    if problem is not None:
        raise ConfigurationError(
            f"The state of {stage.uid} cannot be opened: {problem}.",
            where=f"stage {stage.uid}, checkpoint {head.id}",
            next="Set state.backend back, or give the stage a new uid: it then starts with empty state.",
        )


def _fitted_to_head(context: RunContext, stage: Stage, fixed: Shapes) -> Shapes:
    """Return the shapes with a state schema that also reads the rows in the newest checkpoint; refuses, before the
    first row, code that does not fit them."""
    head, recorded = context.head, stats_of(context.head, stage.uid)
    if head is None or not recorded.has_state:
        return fixed
    fitted = fit(stage, fixed, recorded, context.pipeline)
    if fitted.problems:
        raise PipelineError(
            f"The stage {stage.uid} does not fit its stored state: " + "; ".join(fitted.problems) + ".",
            where=f"stage {stage.uid}, checkpoint {head.id}",
            next=fitted.remedies,
        )
    if fitted.migrations:
        log.info("state_schema_changed", stage=stage.uid, checkpoint=int(head.id), changes=fitted.migrations)
    for loss in fitted.losses:
        log.warning("state_is_lost", stage=stage.uid, checkpoint=int(head.id), change=loss.what)
    return fitted.shapes


def check_columns(context: RunContext, epoch: InFlightEpoch, stage: Stage) -> None:
    """Refuse rows that were left under another definition of this stage or of the one upstream."""
    first = epoch.work[stage.uid].first
    if first is None or first.schema is None:
        return
    assert isinstance(stage.input, Stage), "only such a stage leaves rows"
    now = context.inputs[stage.uid] if first.begun else context.shapes[stage.input.uid].outputs[stage.from_output]
    if not first.schema.equals(now):
        raise PipelineError(
            f"{counted(first.rows, 'row')} of epoch {first.epoch} {agrees(first.rows, 'waits', 'wait')} "
            f"for {stage.uid} with other columns than it has now: "
            f"{', '.join(map(str, first.schema))}; now {', '.join(map(str, now))}.",
            where=f"stage {stage.uid}",
            next=(
                "Put the definition back and let the run catch up, or end it with `weir stop --savepoint NAME`, which"
                " lets the stages apply all rows first; then change it."
            ),
        )
