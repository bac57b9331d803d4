"""The input of a stage in one epoch, with its event time.

The input is rows of sources, of stages before it, and rows that the stage has left before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from state_ops.counts import agrees, counted
from state_ops.errors import (
    DamageError,
)
from state_ops.ids import epoch_dir
from state_ops.moments import to_micros
from state_ops.records.acks import Ack
from state_ops.records.snapshot_files import StagedFile, StateFile
from state_ops.snapshots.stage_upload import read_by_next
from weir.definition import Input, Source, Stage, sources_of
from weir.epoch.in_flight_data import InFlightData, Rows, Work, joined, work
from weir.epoch.model import InFlightEpoch, StageProgress
from weir.epoch.stage_shapes import source_schema
from weir.execution.executor import Channel, Landed
from weir.operators import watermarks
from weir.ownership.context import RunContext


def plan_stage(context: RunContext, epoch: InFlightEpoch, stage: Stage, progress: StageProgress) -> Work:
    """Return the rows that a stage applies in this epoch: rows that it has left before, or this epoch's rows.

    The stages upstream have acked.
    """
    if stage.is_of_several:
        return _plan_sides(context, epoch, stage, progress)
    (input,) = stage.inputs
    if isinstance(input.origin, Source):
        planned = epoch.plan.slices.get(input.name)
        newest = planned.newest if planned else None
        return Work(InFlightData(epoch.pending.id, stage.uid, epoch.now, newest, (), None, lookups=epoch.plan.lookups))
    upstream, output, more = input.name, input.output, None
    at = epoch.applied.get(upstream)
    if at is not None:
        rows = tuple(file for ack in epoch.acks[upstream] for file in read_by_next(ack, output))
        schema, layers = context.shapes[upstream].outputs[output] if rows else None, (rows,) if rows else ()
        arrived = InFlightData(at.epoch, upstream, at.now, at.watermark, layers, schema, output=output)
        more = replace(arrived, closed=at.whole, lookups=at.lookups)
    return work(joined(progress.waiting, more), progress.pace)


def _plan_sides(context: RunContext, epoch: InFlightEpoch, stage: Stage, progress: StageProgress) -> Work:
    """Return the work as `plan_stage` does, for a stage with several inputs.

    Such a stage leaves no rows, and no stage before it does (`Pipeline.must_finish`).
    """
    arriving: list[int | None] = []
    for side, input in enumerate(stage.inputs):
        if isinstance(input.origin, Source):
            planned = epoch.plan.slices.get(input.name)
            made = context.made_times.get(stage.uid)
            # As long as nobody has looked at the columns that SQL or a transform makes, their rows alone tell.
            is_made = input.may_make_time if made is None else side in made
            arriving.append(planned.newest if planned and not is_made else None)
            continue
        at = epoch.applied.get(input.name)
        arriving.append(at.watermark if at is not None else None)
    files = epoch.ahead_of(stage)
    now = to_micros(epoch.now)
    epoch.sides[stage.uid] = inputs = progress.sides.after(arriving, _quiet(epoch, stage, progress.sides.quiet, now))
    layers = (tuple(files),) if files else ()
    watermark, lookups = inputs.least(stage, now), epoch.plan.lookups
    arrived = InFlightData(epoch.pending.id, stage.uid, epoch.now, watermark, layers, None, lookups=lookups)
    return Work(arrived, layers)


def _quiet(epoch: InFlightEpoch, stage: Stage, before: Mapping[str, int], now: int) -> dict[str, int]:
    """Since when sources of a stage have been quiet, as `SidesTime.quiet`. A source that is held back, or whose slice
    was cut, may have rows, so it is not quiet."""
    slices = epoch.plan.slices
    if not slices:  # no source was looked at
        return dict(before)
    quiet = {}
    for name in dict.fromkeys(source.name for input in stage.inputs for source in sources_of(input)):
        planned = slices.get(name)
        if planned is not None and not planned.limited:
            quiet[name] = now if planned.rows else before.get(name, now)
    return quiet


def parts_of(context: RunContext, epoch: InFlightEpoch, stage: Stage) -> dict[int, Landed | Channel]:
    """Return the rows that a stage reads in this epoch, by the number of the input.

    Inputs without rows are left out.
    """
    parts: dict[int, Landed | Channel] = {}
    for side, input in enumerate(stage.inputs):
        is_source = isinstance(input.origin, Source)
        rows = landed(context, epoch, stage, input) if is_source else _handed_on(context, epoch, stage, input)
        if rows is not None:
            parts[side] = rows
    return parts


def landed(context: RunContext, epoch: InFlightEpoch, stage: Stage, input: Input) -> Landed | None:
    """Return the rows of a source that a stage reads in this epoch, or None if it reads none."""
    planned = epoch.plan.slices.get(input.name)
    if planned is None or not planned.files:
        return None
    assert planned.schema is not None
    schema, reader = source_schema(stage, input, planned.schema), context.readers[input.name]
    return Landed(schema, reader, planned.files, tuple(planned.positions_left_out()))


def _staged(epoch: InFlightEpoch, stage: Stage, input: Input) -> list[Rows]:
    """Return the rows for a stage that one upstream hands out in this epoch."""
    acks, output = epoch.acks[input.name], input.output
    staged = [file for ack in acks for file in read_by_next(ack, output)]
    rows_out = sum(ack.rows_of(output) for ack in acks)
    if (rows_staged := sum(file.rows or 0 for file in staged)) != rows_out:
        raise DamageError(
            f"{input.name} has handed out {counted(rows_out, 'row')}, of which {rows_staged} "
            f"{agrees(rows_staged, 'is', 'are')} staged for {stage.uid}.",
            where=f"epoch {epoch.pending.id}",
            next="Nothing was applied. If it happens again, report it: it must not.",
        )
    return staged


def _handed_on(context: RunContext, epoch: InFlightEpoch, stage: Stage, input: Input) -> Channel | None:
    """Return the rows of a stage before that a stage reads in this epoch, or None if it reads none."""
    staged, done = _staged(epoch, stage, input), epoch.work[stage.uid]
    if stage.is_of_several:  # which leaves none for later
        schema = context.shapes[input.name].outputs[input.output] if staged else None
        return None if schema is None else Channel(schema, context.storage, tuple(staged))
    if done.first is None or not done.files:
        return None
    _check_digests(context, epoch, done.files)
    assert done.first.schema is not None
    # What makes other columns is not applied twice. Else they go through where once more, so that rows which fail for
    # ever can be left out.
    as_seen = done.first.begun and (input.transform is not None or bool(input.columns))
    return Channel(done.first.schema, context.storage, done.files, as_seen=as_seen)


def _check_digests(context: RunContext, epoch: InFlightEpoch, files: Sequence[StagedFile | StateFile]) -> None:
    """Raise DamageError unless the rows that are read from a checkpoint have the digests that it names."""
    of_this_epoch = f"/{epoch_dir(epoch.pending.generation, epoch.pending.id)}/"
    for file in files:
        if isinstance(file, StateFile) and of_this_epoch not in file.path:
            data = context.storage.read_bytes(file.path)
            if data is None or hashlib.sha256(data).hexdigest() != file.digest:
                raise DamageError(
                    f"Rows that {file.operator} has left in front of a stage"
                    f" {'are gone' if data is None else 'have changed'}.",
                    where=context.storage.full(file.path),
                    next="Nothing was applied. `weir fsck` says what else is damaged; put the object back, or rewind.",
                )


def rows_offered(epoch: InFlightEpoch, stage: Stage) -> int:
    if stage.is_of_several or stage.reads_source:
        return sum(_rows_of(epoch, input) for input in stage.inputs)
    first = epoch.work[stage.uid].first
    return first.rows if first is not None and not first.begun else 0


def _rows_of(epoch: InFlightEpoch, input: Input) -> int:
    """Return how many rows an epoch has of an input."""
    if isinstance(input.origin, Stage):
        return sum(ack.rows_of(input.output) for ack in epoch.acks[input.name])
    planned = epoch.plan.slices.get(input.name)
    return planned.rows_offered if planned else 0


def known_watermark(epoch: InFlightEpoch, stage: Stage, progress: StageProgress) -> int | None:
    """Return the stage's watermark as far as it is known before its job: from file statistics or from the stage
    upstream; of windows by processing time, from the clock of the epoch that it applies. Where another time is in place
    of the source's event time, the rows tell it."""
    first = epoch.work[stage.uid].first
    arriving = to_micros(first.now) if first and stage.by_clock else first.arriving if first else None
    if not stage.is_of_several and makes_time(epoch, stage):
        arriving = None
    return watermarks.before_job(stage, progress.watermark, arriving)


def makes_time(epoch: InFlightEpoch, stage: Stage, side: int = 0) -> bool:
    """Return whether SQL or a transform puts another time in place of the event time of an input's source."""
    return not stage.by_clock and side in epoch.made_times.get(stage.uid, ())


def watermark_by_rows(epoch: InFlightEpoch, stage: Stage, watermark: int | None, acks: Sequence[Ack]) -> int | None:
    """Return the stage's watermark after its job, from the one that was known before it.

    Files without statistics, and what has another event time than its source, tell only now what their newest is.
    """
    newest = []
    for side, input in enumerate(stage.inputs):
        planned = epoch.plan.slices.get(input.name) if isinstance(input.origin, Source) else None
        seen = [ack.newest[side] for ack in acks if ack.newest]
        arriving = planned.newest if planned else None
        newest.append(watermarks.newest_time(input, arriving, seen, makes_time(epoch, stage, side)))
    if not stage.is_of_several:
        return watermarks.before_job(stage, watermark, None if stage.by_clock else newest[0])
    before = epoch.sides[stage.uid]
    epoch.sides[stage.uid] = inputs = before.after(newest, before.quiet)
    return watermarks.before_job(stage, watermark, inputs.least(stage, to_micros(epoch.now)))
