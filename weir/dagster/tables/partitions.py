"""Days or hours of a table as partitions that are materialized once they are complete, and again when they change.

flights/complete/airport_hourly_days   a partition is a day (or an hour) of event time; batch assets start by it

An asset beside the table's, since the table itself is written by epochs, and an epoch knows no partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Any

import dagster as dg

from state_ops.ids import CheckpointId
from state_ops.moments import from_micros, to_micros
from state_ops.records.checkpoint import Checkpoint
from weir.dagster.names import COMPLETE, DATA_VERSION, key, table_key
from weir.definition import Pipeline, Stage, is_clocked, is_timed
from weir.definition.sink import Sink
from weir.inspection.completeness import Rows, changes, complete_until
from weir.operations.backfill import step
from weir.settings.configuration import PartitionSettings, Settings

KEYS = {"day": "%Y-%m-%d", "hour": "%Y-%m-%d-%H:%M"}


def definition(configured: PartitionSettings, *, begun: bool = False) -> dg.TimeWindowPartitionsDefinition:
    """Days or hours of event time in UTC, up to their end or up to now.

    Args:
        begun: Whether the one that is not over yet belongs to them.
    """
    start = f"{configured.start:%Y-%m-%d}"
    end, offset = None if configured.end is None else f"{configured.end:%Y-%m-%d}", int(begun)
    if configured.every == "hour":
        end = None if end is None else f"{end}-00:00"
        return dg.HourlyPartitionsDefinition(start_date=f"{start}-00:00", end_date=end, end_offset=offset)
    return dg.DailyPartitionsDefinition(start_date=start, end_date=end, end_offset=offset)


def tables(pipeline: Pipeline) -> list[tuple[Stage, Sink]]:
    """Return the tables whose rows have an event time that is over at some time. Rows of an upsert never are."""
    return [
        (stage, sink)
        for stage in pipeline.stages
        if is_timed(stage) and not is_clocked(stage)
        for output, sink in stage.sinks_by_output
        if output in stage.returned and sink in pipeline.tables and not sink.capabilities.newest_of
    ]


def complete_key(pipeline: Pipeline, sink: Sink, configured: PartitionSettings) -> dg.AssetKey:
    """Return the key of a table's complete days or hours."""
    return key(pipeline, COMPLETE, f"{sink.name}_{configured.every}s")


def specs(pipeline: Pipeline, settings: Settings) -> list[dg.AssetSpec]:
    """Return the assets of complete partitions; none unless `pipelines.<name>.partitions` is set."""
    configured = of(pipeline, settings)
    if configured is None:
        return []
    return [
        dg.AssetSpec(
            complete_key(pipeline, sink, configured),
            deps=[table_key(pipeline, sink.name)],
            description=(
                f"Each {configured.every} of {sink.name} once it is complete: {stage.uid} has handed out all of it. It"
                " is materialized anew when a backfill, a promotion or a rewind has changed it."
            ),
            kinds={"delta"},
            group_name=pipeline.name,
            owners=pipeline.owners or None,
            partitions_def=definition(configured),
        )
        for stage, sink in tables(pipeline)
    ]


def of(pipeline: Pipeline, settings: Settings) -> PartitionSettings | None:
    """Return the settings of a pipeline's partitions."""
    return settings.pipelines[pipeline.name].partitions if pipeline.name in settings.pipelines else None


@dataclass(frozen=True, slots=True)
class Shown:
    """The partitions of a table that Dagster has been shown.

    Attributes:
        until: All that end by then are shown as complete: microseconds since 1970 UTC.
        at: The newest checkpoint that was looked at; 0: none.
        anew: Bounds of partitions before `until` that a promotion or a rewind has changed, with the id of that.
        first, length: Where the partitions begin and how long they are, as the settings said; None: not known.
    """

    until: int
    at: int = 0
    anew: tuple[tuple[int, int, int], ...] = ()
    first: int | None = None
    length: int | None = None

    @classmethod
    def from_json(cls, raw: Sequence[Any] | None) -> Shown | None:
        """Return the record that `astuple` and JSON made a list of."""
        return cls(raw[0], raw[1], tuple((start, end, by) for start, end, by in raw[2]), *raw[3:]) if raw else None


def follow(
    configured: PartitionSettings,
    stage: Stage,
    sink: Sink,
    shown: Shown | None,
    head: Checkpoint,
    rows: Rows,
    now: datetime,
    most: int,
) -> tuple[Shown, list[tuple[str, int]], list[str]]:
    """Decide which partitions of a table Dagster is shown next.

    Args:
        shown: None: nothing was shown yet.
        rows: The retained checkpoints, by id.
        now: No partition that ends later is one for Dagster, whatever the watermark says.
        most: How many partitions at most; the rest comes with the next call.

    Returns:
        The new record; the partitions to materialize, each with the checkpoint that changed it last; and the partitions
        that were complete and are not any more.
    """
    first, length = to_micros(_start(configured)), step(configured) // timedelta(microseconds=1)
    if shown is None or shown.length not in (None, length):  # days are no hours: all are to be shown
        shown = Shown(first, int(head.id))
    reached, anew = max(shown.until, first), list(shown.anew)
    if shown.first is not None and first < shown.first:
        anew.append((first, shown.first, int(head.id)))
    for change in changes(stage, sink, rows, CheckpointId(shown.at)):
        start = first if change.start is None else max(change.start - (change.start - first) % length, first)
        if change.end is None:
            reached = min(reached, start)
        anew.append((start, min(reached, change.end or reached), int(change.by)))
    bound = complete_until(stage, head, rows)
    end = now if configured.end is None else min(now, datetime.combine(configured.end, time(), UTC))
    bound = reached if bound is None else min(bound, to_micros(end))
    until = max(reached, bound - (bound - first) % length)
    due = [(at, by) for start, stop, by in anew for at in range(max(start, first), min(stop, reached), length)]
    due += [(at, int(head.id)) for at in range(reached, until, length)]
    taken, left = due[:most], due[most:]
    complete = [(_key(configured, at), by) for at, by in taken]
    gone = [_key(configured, at) for at in range(until, shown.until, length)]
    waiting = tuple((at, at + length, by) for at, by in left if at < reached)
    new = sum(at >= reached for at, _ in taken)
    return Shown(reached + new * length, int(head.id), waiting, first, length), complete, gone


def events(
    asset: dg.AssetKey, complete: list[tuple[str, int]], gone: list[str], head: Checkpoint
) -> Iterator[dg.AssetMaterialization | dg.AssetObservation]:
    """Yield the events that show it in Dagster."""
    for partition, by in complete:
        yield dg.AssetMaterialization(
            asset,
            partition=partition,
            description=f"complete as of checkpoint {by}",
            metadata={"checkpoint": by},
            tags={DATA_VERSION: f"checkpoint {by}"},
        )
    for partition in gone:
        yield dg.AssetObservation(
            asset,
            partition=partition,
            description=f"not complete any more, since rows were taken back ({head.kind} {head.id}); it is materialized"
            " anew once it is",
        )


def _start(configured: PartitionSettings) -> datetime:
    return datetime.combine(configured.start, time(), UTC)


def _key(configured: PartitionSettings, micros: int) -> str:
    return f"{from_micros(micros):{KEYS[configured.every]}}"
