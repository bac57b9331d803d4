"""The checkpoint sensor: in Dagster, its ticks are what triggers epochs. The decisions are in `pipelines.runtime.sensor`."""

from collections.abc import Sequence

import dagster as dg

from configs.settings import Settings
from pipelines.runtime import sensor as decisions
from pipelines.runtime.definition import Pipeline
from pipelines.runtime.sensor import Action, Memory

TRIGGER, REASON, TICK = "weir/trigger", "weir/reason", "weir/tick"

_UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def checkpoint_sensor(
    pipeline: Pipeline, settings: Settings, job_name: str, keys: Sequence[dg.AssetKey]
) -> dg.SensorDefinition:
    """The sensor of one pipeline. keys: the assets that its runs materialize."""

    @dg.sensor(
        name=f"{pipeline.name}_checkpoint_sensor",
        job_name=job_name,
        minimum_interval_seconds=settings.dagster.sensor_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Lets {pipeline.name} work: asks its running coordinator for a barrier when files wait, or for a run "
        "when no coordinator is alive.",
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        unfinished = _unfinished(context.instance, job_name, set(keys))
        sight = decisions.observe(pipeline, settings, unfinished)
        decision = decisions.decide(sight, Memory.from_json(context.cursor), settings.dagster.max_lag_files)
        context.update_cursor(decision.memory.to_json())
        if decision.gone is not None:
            _end(context, decision.gone)
        if decision.action is Action.WAIT:
            return dg.SkipReason(decision.reason)
        if decision.action is Action.BARRIER:
            decisions.ask(pipeline, settings, decision)
            return dg.SkipReason(f"asked the running coordinator for a barrier: {decision.reason}")
        tags = {TRIGGER: "sensor", REASON: decision.reason, TICK: str(decision.memory.tick)}
        return dg.RunRequest(run_key=f"{pipeline.name}-{decision.key}", tags=tags)

    return tick


def _unfinished(instance: dg.DagsterInstance, job_name: str, keys: set[dg.AssetKey]) -> list[str]:
    """Runs that materialize the pipeline and have not ended: of its job, or started from its assets."""
    runs = instance.get_runs(dg.RunsFilter(statuses=_UNFINISHED), limit=100)
    return [run.run_id for run in runs if run.job_name == job_name or keys & (run.asset_selection or set())]


def _end(context: dg.SensorEvaluationContext, run_id: str) -> None:
    """Mark a run as failed whose process is gone. The default launcher cannot tell, but the lease can."""
    run = context.instance.get_run_by_id(run_id)
    if run is not None and not run.is_finished:
        context.log.warning(f"run {run_id} is marked as failed: the process of its coordinator is gone")
        context.instance.report_run_failed(run, "The process of its coordinator is gone, says the pipeline's lease.")
