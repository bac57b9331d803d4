"""The restore drill: a job of which every run materializes an asset of its own, with what it measured and how that has
changed.
"""

from collections.abc import Iterator
from typing import Any

import dagster as dg

from state_ops.errors import WeirError
from weir.dagster import history
from weir.dagster.coordination import failure, show, showing
from weir.dagster.names import BESIDE, CHECKPOINT, DRILL, AssetJob, key
from weir.definition import Pipeline
from weir.operations import drill as drills
from weir.operations.drill import Drilled
from weir.settings.configuration import Settings

COMES_BACK, IN_TIME = "comes_back_as_it_was", "meets_objectives"


def spec(pipeline: Pipeline) -> dg.AssetSpec:
    """Return the asset `flights/restore_drill`, downstream of the checkpoint.

    Only drills materialize it: *Materialize all* does not.
    """
    return dg.AssetSpec(
        key(pipeline, DRILL),
        deps=[key(pipeline, CHECKPOINT)],
        description=(
            "Restores the newest checkpoint on scratch, replays its epoch, compares the state, and measures how long"
            f" that takes: {job_name(pipeline)}."
        ),
        kinds={"rocksdb"},
        group_name=pipeline.name,
        owners=pipeline.owners or None,
    )


def checks(pipeline: Pipeline, settings: Settings) -> dg.AssetChecksDefinition:
    """Yield the drill, whose two verdicts are the checks of that asset."""
    asset = key(pipeline, DRILL)

    @dg.multi_asset_check(
        name=f"{pipeline.name}_restore_drill",
        specs=[
            dg.AssetCheckSpec(
                COMES_BACK,
                asset=asset,
                description="The checkpoint was restored and its epoch replayed, with the same state.",
            ),
            dg.AssetCheckSpec(
                IN_TIME, asset=asset, description="Within the objectives in the settings (restore.recovery_*)."
            ),
        ],
        description=f"Would {pipeline.name} come back, and how fast?",
    )
    def restore_drill(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        try:
            done = drills.drill(pipeline, settings)
        except WeirError as error:
            with showing("that a drill failed"):
                evaluation = dg.AssetCheckEvaluation(
                    asset_key=asset, check_name=COMES_BACK, passed=False, description=error.what
                )
                show(context.op_execution_context, [evaluation])
            raise failure(error) from None
        shown = _shown(context.instance, asset, done)
        context.op_execution_context.log_event(dg.AssetMaterialization(asset, metadata=shown))
        yield from _verdicts(asset, done)

    return restore_drill


def job_name(pipeline: Pipeline) -> str:
    """Return the name of the job that drills."""
    return f"{pipeline.name}_restore_drill_job"


def job_and_schedules(pipeline: Pipeline, settings: Settings) -> tuple[AssetJob, list[dg.ScheduleDefinition]]:
    """Return the job that drills, and the schedule on which it runs by itself."""
    asset = key(pipeline, DRILL)
    job = dg.define_asset_job(
        job_name(pipeline),
        selection=dg.AssetSelection.checks(*[dg.AssetCheckKey(asset, name) for name in (COMES_BACK, IN_TIME)]),
        description=f"Would {pipeline.name} come back, and how fast?",
        executor_def=dg.in_process_executor,
        tags={BESIDE: pipeline.name},
    )
    cron = settings.dagster.drill_cron
    if cron is None:
        return job, []
    return job, [
        dg.ScheduleDefinition(
            name=f"{pipeline.name}_restore_drill_schedule",
            job=job,
            cron_schedule=cron,
            default_status=dg.DefaultScheduleStatus.RUNNING,
            description="Drills by itself: dagster.drill_cron.",
        )
    ]


def _shown(instance: dg.DagsterInstance, asset: dg.AssetKey, done: Drilled) -> dict[str, Any]:
    took, loss = done.recovery_seconds, round(done.loss_seconds, 3)
    shown: dict[str, Any] = {
        "checkpoint": int(done.checkpoint),
        "restore seconds": round(done.restore_seconds, 3),
        "data-loss window seconds": loss,
    }
    if took is not None:  # without a recovery there is no time to plot
        shown["recovery seconds"] = round(took, 3)
        with showing("the last drills"):
            shown["history"] = history.drills_plot(instance, asset, (done.drilled_at, round(took, 3), loss))
    if done.restored is not None:
        shown |= {"bytes": done.restored.bytes_total, "files": done.restored.files}
    if done.replay is not None:
        shown |= {
            "replayed from checkpoint": int(done.replay.parent),
            "replay seconds": round(done.replay.seconds, 3),
            "rows replayed": done.replay.rows,
            "entries compared": done.replay.entries,
        }
    if done.not_replayed is not None:
        shown["not replayed"] = dg.MetadataValue.text(done.not_replayed)
    return shown


def _verdicts(asset: dg.AssetKey, done: Drilled) -> list[dg.AssetCheckResult]:
    missed, took = done.missed, done.recovery_seconds
    to_recover = "it does not come back as it was" if took is None else f"{took:.1f} s to recover"
    compared = "and replayed" if done.replay is not None else f"not replayed: {done.not_replayed}"
    return [
        dg.AssetCheckResult(
            asset_key=asset,
            check_name=COMES_BACK,
            passed=not done.problems and done.replay is not None,
            severity=dg.AssetCheckSeverity.ERROR if done.problems else dg.AssetCheckSeverity.WARN,
            description="; ".join(done.problems) or f"checkpoint {done.checkpoint} was restored, {compared}",
        ),
        dg.AssetCheckResult(
            asset_key=asset,
            check_name=IN_TIME,
            passed=not missed and took is not None,
            description="; ".join(missed) or f"{to_recover}, input waits for {done.loss_seconds:.0f} s",
        ),
    ]
