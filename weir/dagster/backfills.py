"""Backfills as a partitioned asset: choose days on Dagster's backfill page, and one run replays them on a branch.

flights/backfill          a partition is a day (or an hour) of event time; it is materialized once it was replayed and
                          promoted, or waits for approval
flights_backfill_job      the same as a job, and as a nightly schedule for the newest days
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import dagster as dg
from dagster import BackfillPolicy
from pydantic import Field

from state_ops.errors import WeirError
from weir.dagster.coordination import failure, show
from weir.dagster.names import BACKFILL, BESIDE, CHECKPOINT, AssetJob, key, place
from weir.dagster.operations import After
from weir.dagster.tables.partitions import KEYS, definition
from weir.definition import Pipeline
from weir.epoch.model import EpochReport
from weir.operations import backfill as backfills
from weir.operations.backfill import Backfilled
from weir.operations.branch_diff import BranchDiff
from weir.operations.operation import Done
from weir.settings.configuration import BackfillSettings, Settings

SAME = "production_is_the_same"
_FIRST, _LAST = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"


class Promote(Enum):
    """The ways to promote a backfill. Dagster shows the names, and refuses others before a run begins."""

    approval = "approval"
    automatic = "automatic"


class Replaces(Enum):
    """The rows that a backfill replaces. Dagster shows the names, and refuses others before a run begins."""

    since = backfills.SINCE
    range = backfills.RANGE


# Dagster's error names the type of a refused value but not the type's values, so the type's name lists them.
for _choice in (Promote, Replaces):
    _choice.__name__ = "_or_".join(choice.value for choice in _choice)


class BackfillConfig(dg.Config):
    """The options of one backfill; the settings give the defaults."""

    promote: Promote | None = Field(
        None, description="approval or automatic; by default pipelines.<name>.backfill.promote in the settings."
    )
    replaces: Replaces | None = Field(
        None, description="since or range; by default pipelines.<name>.backfill.replaces in the settings."
    )


def asset(pipeline: Pipeline, settings: Settings, configured: BackfillSettings) -> dg.AssetsDefinition:
    """Yield the asset `flights/backfill`. A single run replays the whole range that was chosen."""
    asset = key(pipeline, BACKFILL)

    @dg.multi_asset(
        name=f"{pipeline.name}_backfill",
        specs=[
            dg.AssetSpec(
                asset,
                deps=[key(pipeline, CHECKPOINT)],
                description=(
                    "Replays days of event time with today's code and input, on a branch; production is not touched"
                    " before it is promoted. One run for all days that are chosen."
                ),
                kinds={"spark", "rocksdb"},
                group_name=pipeline.name,
                owners=pipeline.owners or None,
            )
        ],
        partitions_def=definition(configured, begun=True),
        backfill_policy=BackfillPolicy.single_run(),
        check_specs=[
            dg.AssetCheckSpec(SAME, asset=asset, description="Production has what a replay of the range gives."),
        ],
        pool=f"{place(pipeline, settings).pool}_backfill",
    )
    def backfill(context: dg.AssetExecutionContext, config: BackfillConfig) -> Iterator[dg.MaterializeResult[Any]]:
        window = context.partition_time_window

        def on_epoch(report: EpochReport) -> None:
            context.log.info(backfills.epoch_line(report))

        try:
            done = backfills.backfill(
                pipeline,
                settings,
                window.start.astimezone(UTC),
                window.end.astimezone(UTC),
                replaces=configured.replaces if config.replaces is None else config.replaces.value,
                promote=(config.promote or Promote(configured.promote)) is Promote.automatic,
                on_epoch=on_epoch,
            )
        except WeirError as error:
            raise failure(error) from None
        yield dg.MaterializeResult(asset_key=asset, metadata=_shown(done), check_results=[_verdict(asset, done)])

    return backfill


def _shown(done: Backfilled) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "branch": done.branch,
        "replayed from checkpoint": done.base,
        "epochs": done.epochs,
        "went on with an earlier try": done.resumed,
        **_figures(done.difference),
    }
    if done.note is not None:
        shown["note"] = dg.MetadataValue.text(done.note)
    if done.promoted is not None:
        shown["promoted as checkpoint"] = int(done.promoted.id)
    elif not done.difference.same:
        shown["waits for"] = f"weir promote {done.difference.pipeline} {done.branch}, or the promote job"
    return shown


def _figures(difference: BranchDiff) -> dict[str, Any]:
    """Return the changes of a promotion as sums and as a report."""
    counts = {
        f"rows {kind}": sum(table.counts[kind] for table in difference.tables)
        for kind in ("added", "removed", "changed")
    }
    keys = sum(sum(state.counts.values()) for state in difference.states if state.counts is not None)
    return {**counts, "state keys that differ": keys, "report": dg.MetadataValue.md(difference.to_markdown())}


def _verdict(asset: dg.AssetKey, done: Backfilled) -> dg.AssetCheckResult:
    """Green if production has what the replay gives: because nothing differed, or because it was promoted."""
    differing = [table.table for table in done.difference.tables if not table.same or table.columns]
    description = "nothing differs" if done.difference.same else f"rows differ in {', '.join(differing) or 'no table'}"
    if done.promoted is not None:
        description += f"; promoted as checkpoint {done.promoted.id}"
    elif not done.difference.same:
        description += f"; waits for approval: weir promote {done.difference.pipeline} {done.branch}"
    return dg.AssetCheckResult(
        asset_key=asset,
        check_name=SAME,
        passed=done.promoted is not None or done.difference.same,
        severity=dg.AssetCheckSeverity.WARN,
        description=description,
    )


def approved(pipeline: Pipeline, settings: Settings) -> After:
    """Return what shows, after the promote job, that production has what a backfill's replay gave."""

    def shows(context: dg.OpExecutionContext, options: dict[str, Any], done: Done) -> None:
        if settings.pipelines[pipeline.name].backfill is None or backfills.range_of(options["branch"]) is None:
            return
        description = f"promoted as checkpoint {done.result.checkpoint}"
        asset = key(pipeline, BACKFILL)
        show(
            context,
            [dg.AssetCheckEvaluation(asset_key=asset, check_name=SAME, passed=True, description=description)],
        )

    return shows


def job_and_schedules(pipeline: Pipeline, configured: BackfillSettings) -> tuple[AssetJob, list[dg.ScheduleDefinition]]:
    """Return the job that backfills, and the schedule on which it runs by itself."""
    asset = key(pipeline, BACKFILL)
    job = dg.define_asset_job(
        f"{pipeline.name}_backfill_job",
        selection=dg.AssetSelection.assets(asset),
        description=f"Replays days of {pipeline.name} on a branch. All days that are chosen together are one run.",
        executor_def=dg.in_process_executor,
        tags={BESIDE: pipeline.name},
    )
    if configured.cron is None:
        return job, []

    @dg.schedule(
        name=f"{pipeline.name}_backfill_schedule",
        job=job,
        cron_schedule=configured.cron,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description=(
            f"The newest {configured.last} {configured.every}s, for late or corrected data:"
            " pipelines.<name>.backfill.cron."
        ),
    )
    def nightly(context: dg.ScheduleEvaluationContext) -> dg.RunRequest:
        at = context.scheduled_execution_time
        return newest_request(configured, at)

    return job, [nightly]


def newest_request(configured: BackfillSettings, now: datetime) -> dg.RunRequest:
    """Return a run request for the newest whole days, or hours, at a moment."""
    start, end = backfills.newest(configured, now)
    step, form = backfills.step(configured), KEYS[configured.every]
    first, last = f"{start:{form}}", f"{end - step:{form}}"
    return dg.RunRequest(run_key=f"{first}-{last}-{now:%Y%m%dT%H%M}", tags={_FIRST: first, _LAST: last})


def definitions(pipeline: Pipeline, settings: Settings) -> dg.Definitions:
    """Return all definitions for backfills; without `pipelines.<name>.backfill` in the settings there are none."""
    configured = settings.pipelines[pipeline.name].backfill if pipeline.name in settings.pipelines else None
    if configured is None:
        return dg.Definitions()
    job, schedules = job_and_schedules(pipeline, configured)
    return dg.Definitions(
        assets=[asset(pipeline, settings, configured)],
        jobs=[job],
        schedules=schedules,
    )
