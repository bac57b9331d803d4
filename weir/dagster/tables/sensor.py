"""The sensor that shows in Dagster what no run of Dagster's shows: complete partitions, and tables that were changed by
`weir run`, a rewind or a promotion."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from datetime import UTC, datetime
from typing import Any

import dagster as dg
from deltalake.exceptions import DeltaError

from state_ops.counts import counted
from state_ops.errors import WeirError, first_line
from state_ops.records.checkpoint import Checkpoint
from state_ops.storage.storage import Storage
from weir.connectors.delta.table_commit import table_path
from weir.dagster import checks, metadata
from weir.dagster.names import CHECKPOINT, DATA_VERSION, TABLES, Runs, key, stage_key, table_key
from weir.dagster.tables import partitions
from weir.definition import Pipeline, sinks_shown
from weir.ownership import backlog
from weir.ownership.pipeline_storage import open_storage
from weir.ownership.publish import unpublished
from weir.settings.configuration import Settings

_SECONDS = 30
_AT_ONCE = 200  # partitions a tick: each event takes Dagster's database some milliseconds

Event = dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation


def tables_sensor(pipeline: Pipeline, settings: Settings, keys: Sequence[dg.AssetKey]) -> dg.SensorDefinition:
    """Return the sensor.

    Args:
        keys: The pipeline's assets, by which its runs are recognized: while one goes on it shows the tables itself.
    """

    @dg.sensor(
        name=f"{pipeline.name}_tables_sensor",
        minimum_interval_seconds=_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            f"Materializes days or hours of {pipeline.name}'s tables once they are complete, and tables that something"
            " else than Dagster's runs has changed: weir run, a rewind, a promotion."
        ),
    )
    def look(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        storage, registry = open_storage(pipeline, settings)
        rows = _published(registry.checkpoints(), unpublished(registry))
        if not rows:
            return dg.SkipReason("there is no checkpoint yet")
        seen, head = json.loads(context.cursor) if context.cursor else {}, rows[-1]
        events: list[Event] = list(_partitions(pipeline, settings, rows, seen))
        counts = [counted(len(events), "partition")] if events else []
        if seen.get("tables") != int(head.id) and not Runs.seen_by(context, pipeline, settings, keys).unfinished():
            try:
                changed = list(_changed(context.instance, pipeline, settings, head, storage))
            except WeirError as error:  # a table that is damaged keeps nobody waiting for the days of others
                if not events:
                    raise
                changed = []
                context.log.warning(f"{error.what} The next tick tries again.")
            else:
                seen["tables"] = int(head.id)
            events += changed
            tables = sum(
                isinstance(event, dg.AssetMaterialization) and TABLES in event.asset_key.path[1:2] for event in changed
            )
            counts += [counted(tables, "table")] if tables else []
        what = f"shown: {', '.join(counts)}" if counts else "nothing is new"
        return dg.SensorResult(
            asset_events=events, cursor=json.dumps(seen), skip_reason=f"{what}, as of checkpoint {head.id}"
        )

    return look


def _published(rows: Sequence[Checkpoint], lacking: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints whose rows all sinks have, oldest first: a run that starts by a table's day reads the
    table.

    Args:
        rows: The retained checkpoints.
        lacking: Those whose rows a sink lacks. It may be looked up after `rows`: newer ones do no harm.
    """
    first = min((row.id for row in lacking), default=None)
    return [row for row in rows if first is None or row.id < first]


def _partitions(
    pipeline: Pipeline, settings: Settings, rows: Sequence[Checkpoint], seen: dict[str, Any]
) -> Iterator[Event]:
    """Partitions that are complete, were changed, or are not complete any more since the last look.

    Args:
        rows: As `_published` has them.
        seen: What the sensor remembers; it is brought up to date.
    """
    configured, head = partitions.of(pipeline, settings), rows[-1]
    if configured is None:
        return
    now = datetime.now(UTC)
    # By the hour: what the watermark has passed before it was over comes once it is, with or without a new checkpoint.
    look = f"{head.id}, {configured.every} from {configured.start} to {configured.end}, in {now:%Y-%m-%dT%H}"
    if seen.get("partitions") == look:
        return
    by_id = {row.id: row for row in rows}
    marks, most = seen.setdefault("until", {}), _AT_ONCE
    for stage, sink in partitions.tables(pipeline):
        asset = partitions.complete_key(pipeline, sink, configured)
        mark = asset.path[-1]  # so that an asset of another name is shown all of them
        before = partitions.Shown.from_json(marks.get(mark))
        shown, complete, gone = partitions.follow(configured, stage, sink, before, head, by_id, now, most)
        marks[mark], most = astuple(shown), most - len(complete)
        yield from partitions.events(asset, complete, gone, head)
    if most > 0:  # else some are left for the next tick
        seen["partitions"] = look


def _changed(
    instance: dg.DagsterInstance, pipeline: Pipeline, settings: Settings, head: Checkpoint, storage: Storage
) -> Iterator[Event]:
    """Materializations of the tables whose data are others than Dagster has seen last, and what the checkpoint says of
    their gates: Dagster shows a verdict only until its asset is materialized anew."""
    is_foreign = head.run_id is None or instance.get_run_by_id(head.run_id) is None  # others show stages themselves
    for stage in pipeline.stages:
        if is_foreign:  # before its tables, which Dagster else calls out of step with what they are made of
            yield _as_of(stage_key(pipeline, stage.uid), head)
        gates = checks.recorded(pipeline, head, stage)
        for sink in sinks_shown(stage, head.sinks):
            asset = table_key(pipeline, sink.name)
            try:
                now, version = metadata.of_sink_now(pipeline, head, stage, sink, storage)
            except DeltaError as error:  # which names no table
                raise WeirError(
                    f"The table {sink.name} cannot be read: {first_line(error)}.",
                    where=storage.full(table_path(sink.name)),
                    next=f"Look at the storage; weir fsck {pipeline.name} says whether the table is damaged.",
                ) from error
            newest = instance.get_latest_materialization_event(asset)
            materialization = newest.asset_materialization if newest is not None else None
            if version is not None and (
                materialization is None or (materialization.tags or {}).get(DATA_VERSION) != version
            ):
                yield dg.AssetMaterialization(
                    asset,
                    description=f"as of checkpoint {head.id}, {head.reason}",
                    metadata={"checkpoint": int(head.id), **now},
                    tags={DATA_VERSION: version},
                )
                yield from (verdict for verdict in gates if verdict.asset_key == asset)
        if is_foreign:
            yield from (verdict for verdict in gates if verdict.asset_key == stage_key(pipeline, stage.uid))
    if is_foreign:
        yield _as_of(key(pipeline, CHECKPOINT), head)
        for name, observed in backlog.observed(pipeline, settings, head).items():
            yield dg.AssetObservation(key(pipeline, name), metadata=metadata.of_source_read(head, name, observed))


def _as_of(asset: dg.AssetKey, head: Checkpoint) -> dg.AssetMaterialization:
    """Return a materialization of a stage or of the checkpoint, for what a run outside of Dagster has made."""
    shown: dict[str, Any] = {
        "checkpoint": int(head.id),
        "made by": dg.MetadataValue.text(f"{head.trigger}: {head.reason}"),
    }
    return dg.AssetMaterialization(asset, description=f"as of checkpoint {head.id}, {head.reason}", metadata=shown)
