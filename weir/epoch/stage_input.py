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
from weir.definition import Source, Stage, keeps_event_time, sources_of
from weir.epoch.in_flight_data import InFlightData, Rows, Work, joined, work
from weir.epoch.model import InFlightEpoch, StageProgress
from weir.epoch.stage_shapes import source_schema
from weir.execution.executor import Channel, Landed
from weir.operators import watermarks
from weir.operators.watermarks import SidesTime
from weir.ownership.context import RunContext


def plan_stage(context: RunContext, epoch: InFlightEpoch, stage: Stage, progress: StageProgress) -> Work:
    """Return the rows that a stage applies in this epoch: rows that it has left before, or this epoch's rows.

    The stages upstream have acked.
    """
    if stage.sides:
        return _plan_sides(context, epoch, stage, progress)
    if isinstance(stage.input, Source):
        planned = epoch.plan.slices.get(stage.input.name)
        newest = planned.newest if planned else None
        return Work(InFlightData(epoch.pending.id, stage.uid, epoch.now, newest, (), None, lookups=epoch.plan.lookups))
    upstream, output, more = stage.input.uid, stage.from_output, None
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
        if isinstance(input, Source):
            planned = epoch.plan.slices.get(input.name)
            made = context.made_times.get(stage.uid)
            # As long as nobody has looked at the columns that SQL or a transform makes, their rows alone tell.
            is_made = _may_make_time(stage.sides[side]) if made is None else side in made
            arriving.append(planned.newest if planned and not is_made else None)
            continue
        at = epoch.applied.get(input.uid)
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
    """Return the rows that a stage with several inputs reads in this epoch, by the number of the input.

    Inputs without rows are left out.
    """
    parts: dict[int, Landed | Channel] = {}
    for side, lane in enumerate(stage.sides):
        if isinstance(lane.input, Source):
            from_source = landed(context, epoch, lane, lane.input)
            if from_source is not None:
                parts[side] = from_source
            continue
        staged = _staged(epoch, lane, lane.input)
        if staged:
            schema = context.shapes[lane.input.uid].outputs[lane.from_output]
            parts[side] = Channel(schema, context.storage, tuple(staged))
    return parts


def landed(context: RunContext, epoch: InFlightEpoch, stage: Stage, source: Source) -> Landed | None:
    """Return the rows of a source that a stage reads in this epoch, or None if it reads none."""
    planned = epoch.plan.slices.get(source.name)
    if planned is None or not planned.files:
        return None
    assert planned.schema is not None
    schema, reader = source_schema(stage, planned.schema), context.readers[source.name]
    return Landed(schema, reader, planned.files, tuple(planned.positions_left_out()))


def _staged(epoch: InFlightEpoch, stage: Stage, upstream: Stage) -> list[Rows]:
    """Return the rows for a stage that one upstream hands out in this epoch."""
    acks, output = epoch.acks[upstream.uid], stage.from_output
    staged = [file for ack in acks for file in read_by_next(ack, output)]
    rows_out = sum(ack.rows_of(output) for ack in acks)
    if (rows_staged := sum(file.rows or 0 for file in staged)) != rows_out:
        raise DamageError(
            f"{upstream.uid} has handed out {counted(rows_out, 'row')}, of which {rows_staged} "
            f"{agrees(rows_staged, 'is', 'are')} staged for {stage.uid}.",
            where=f"epoch {epoch.pending.id}",
            next="Nothing was applied. If it happens again, report it: it must not.",
        )
    return staged


def input_of(context: RunContext, epoch: InFlightEpoch, stage: Stage) -> Landed | Channel | None:
    """Return the rows that the stage reads in this epoch, or None if it reads none."""
    if isinstance(stage.input, Source):
        return landed(context, epoch, stage, stage.input)
    _staged(epoch, stage, stage.input)
    done = epoch.work[stage.uid]
    if done.first is None or not done.files:
        return None
    _check_digests(context, epoch, done.files)
    assert done.first.schema is not None
    # What makes other columns is not applied twice. Else they go through where once more, so that rows which fail for
    # ever can be left out.
    as_seen = done.first.begun and (stage.transform is not None or bool(stage.columns))
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
    if stage.sides:
        return sum(_rows_of(epoch, lane) for lane in stage.sides)
    if isinstance(stage.input, Source):
        return _rows_of(epoch, stage)
    first = epoch.work[stage.uid].first
    return first.rows if first is not None and not first.begun else 0


def _rows_of(epoch: InFlightEpoch, lane: Stage) -> int:
    """Return how many rows an epoch has for a stage that reads a single input."""
    if isinstance(lane.input, Stage):
        return sum(ack.rows_of(lane.from_output) for ack in epoch.acks[lane.input.uid])
    planned = epoch.plan.slices.get(lane.input.name)
    return planned.rows_offered if planned else 0


def known_watermark(epoch: InFlightEpoch, stage: Stage, progress: StageProgress) -> int | None:
    """Return the stage's watermark as far as it is known before its job: from file statistics or from the stage
    upstream; of windows by processing time, from the clock of the epoch that it applies. Where another time is in place
    of the source's event time, the rows tell it."""
    first = epoch.work[stage.uid].first
    arriving = to_micros(first.now) if first and stage.by_clock else first.arriving if first else None
    if not stage.sides and makes_time(epoch, stage):
        arriving = None
    return watermarks.before_job(stage, progress.watermark, arriving)


def _may_make_time(lane: Stage) -> bool:
    return lane.transform is not None or not keeps_event_time(lane)


def makes_time(epoch: InFlightEpoch, stage: Stage, side: int = 0) -> bool:
    """Return whether SQL or a transform puts another time in place of the event time of an input's source."""
    return not stage.by_clock and side in epoch.made_times.get(stage.uid, ())


def watermark_of_sides(
    epoch: InFlightEpoch, stage: Stage, watermark: int | None, acks: Sequence[Ack]
) -> tuple[int | None, SidesTime]:
    """Return the watermark of a stage with several inputs after its job: files without statistics, and what has another
    event time than its source, tell only now what their newest is."""
    now, inputs = to_micros(epoch.now), epoch.sides[stage.uid]
    if any(ack.newest_by_side for ack in acks):
        newest = []
        for side, lane in enumerate(stage.sides):
            planned = epoch.plan.slices.get(lane.input.name) if isinstance(lane.input, Source) else None
            seen = [ack.newest_by_side[side] for ack in acks if ack.newest_by_side]
            arriving = planned.newest if planned else None
            newest.append(watermarks.newest_time(lane, arriving, seen, makes_time(epoch, stage, side)))
        epoch.sides[stage.uid] = inputs = inputs.after(newest, inputs.quiet)
    return watermarks.before_job(stage, watermark, inputs.least(stage, now)), inputs
