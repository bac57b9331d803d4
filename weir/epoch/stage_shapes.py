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
from weir.definition import ROW, Input, Shapes, Source, Stage
from weir.definition.sink import Sink
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
    context: RunContext,
    epoch: InFlightEpoch,
    stage: Stage,
    parts: Mapping[int, Landed | Channel],
    pinned: Pinned | None,
) -> Shapes | None:
    """Return the schemas of a stage, or None as long as none of its inputs has had rows and no columns are known.

    Args:
        parts: By the number of an input that has rows, these.

    Raises:
        PipelineError: Only some inputs have rows, and nothing tells the columns of the others.
    """
    first, known = epoch.work[stage.uid].first, context.shapes.get(stage.uid)
    seen = {} if first is not None and first.begun else {side: part.schema for side, part in parts.items()}
    if known is not None and not seen:
        return known
    raw = [
        seen[side] if side in seen else _columns_of(context, epoch, stage, input)
        for side, input in enumerate(stage.inputs)
    ]
    compared = (*raw, *(() if pinned is None else (pinned.version.columns,)))
    if known is not None and compared == context.reads.get(stage.uid):  # else a column of nulls has got its type
        return known
    if not seen and None in raw:
        return None
    columns, read = [], list[pa.Schema]()
    for side, (input, given) in enumerate(zip(stage.inputs, raw, strict=True)):
        if given is None:
            raise PipelineError(
                f"T{sides.name_of(stage, side)[1:]} has had no row yet, so nothing tells its columns, and"
                f" {stage.uid} has rows of another input that wait for them.",
                where=f"stage {stage.uid}",
                next="Say them at the source (schema=...), or run again when it has a first file.",
            )
        direct_read.check_where(stage, input, given, context.settings.spark.conf)
        where = parts[side].where if side in parts else "what was read before"
        columns.append(context.executor.columns(stage, input, given, where))
        read.append(given)
    context.made_times[stage.uid] = watermarks.made_times(stage, columns)
    schema = sides.wide(stage, [of_input.remove_metadata() for of_input in columns])
    whole = stage if pinned is None else stage.pinned(pinned)
    return _fixed(context, stage, shapes_of(whole, schema, *read), compared, schema)


def _columns_of(context: RunContext, epoch: InFlightEpoch, stage: Stage, input: Input) -> pa.Schema | None:
    """Return the columns of an input without rows in this epoch; None if nothing tells them yet."""
    if isinstance(input.origin, Source):
        expected = epoch.source_offsets.expected.get(input.name)
        if expected is None and context.pipeline.is_beside_others(stage):  # which may have rows of another input
            expected = input.origin.declared_columns
        return None if expected is None else source_schema(stage, input, expected)
    upstream = context.shapes.get(input.name)
    return upstream.outputs[input.output] if upstream else None


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


def source_schema(stage: Stage, input: Input, files: pa.Schema) -> pa.Schema:
    """Return the schema in which a stage reads a source whose files have these columns.

    It has the rows' positions too if the stage's gates may set rows aside.
    """
    if not stage.quarantines and not input.takes_bad_rows:
        quarantine.refuse_row(stage, files)
        return files
    assert isinstance(input.origin, Source), "only such a stage may quarantine"
    quarantine.refuse_own_column(input.origin, files)
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
    for output, input, sink in stage.tables_aside:
        columns = read[stage.inputs.index(input)]
        kept = quarantine.table_schema(input, pa.schema([field for field in columns if field.name != ROW]))
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
    (input,) = stage.inputs
    now = context.inputs[stage.uid] if first.begun else context.shapes[input.name].outputs[input.output]
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
