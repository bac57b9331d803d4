"""Weir pipelines as Dagster definitions: `weir_definitions`, to load alone or to merge into a project's own.

    landing -> aircraft_rotation -> airport_hourly
                     |                   |
                     +----> checkpoint <-+

A pipeline is one multi-asset that cannot be subset: its stages advance together, epoch by epoch. One run coordinates many
epochs in one process. Each epoch is an observation of its assets, each run one materialization.
"""

from collections.abc import Iterator, Sequence

import dagster as dg

from assets import metadata
from assets.sensors import REASON, TICK, TRIGGER, checkpoint_sensor
from configs.settings import Settings
from pipelines.runtime import run as runtime
from pipelines.runtime.definition import FileSource, Pipeline, Stage
from pipelines.runtime.run import RunOptions
from pipelines.runtime.workshop import EpochReport
from state_ops.errors import PipelineError, StageError, WeirError
from state_ops.pending import Trigger

CHECKPOINT = "checkpoint"
PIPELINE = "weir/pipeline"


def weir_definitions(pipelines: Sequence[Pipeline], settings: Settings) -> dg.Definitions:
    """Assets, job and checkpoint sensor of each pipeline.

    To merge into a project: `Definitions.merge(own, weir_definitions([...], settings))`. Nothing is read or started.
    """
    return dg.Definitions.merge(*[_definitions(pipeline, settings) for pipeline in pipelines])


def _definitions(pipeline: Pipeline, settings: Settings) -> dg.Definitions:
    _check_names(pipeline)
    storage, _ = runtime.open_storage(pipeline, settings)
    sources = [
        dg.AssetSpec(
            _key(pipeline, source.name),
            description=f"Files that arrive as {source.pattern}, each read exactly once.",
            kinds={"file", "parquet"},
            group_name=pipeline.name,
            metadata=metadata.of_source(source, settings.resolve(pipeline.name, source.pattern)),
        )
        for source in pipeline.sources
    ]
    stages = [
        dg.AssetSpec(
            _key(pipeline, stage.uid),
            deps=[_key(pipeline, _input_name(stage))],
            description=stage.description or None,
            kinds={"pyspark", "rocksdb", "delta"} if stage.sink else {"pyspark", "rocksdb"},
            group_name=pipeline.name,
            owners=pipeline.owners or None,
            metadata=metadata.of_definition(pipeline, stage, storage),
        )
        for stage in pipeline.stages
    ]
    checkpoint = dg.AssetSpec(
        _key(pipeline, CHECKPOINT),
        deps=[spec.key for spec in stages],
        description="State, offsets and outputs of all stages, committed together, once an epoch. Each observation is one.",
        kinds={"delta"},
        group_name=pipeline.name,
        owners=pipeline.owners or None,
        metadata={"registry": dg.MetadataValue.path(storage.full("registry/checkpoints"))},
    )

    @dg.multi_asset(
        name=f"{pipeline.name}_epochs",
        specs=[*stages, checkpoint],
        can_subset=False,
        description=pipeline.description or f"Runs epochs of {pipeline.name} until it has caught up.",
        pool=f"weir_{pipeline.name}",
    )
    def epochs(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult]:
        yield from _coordinate(context, pipeline, settings)

    keys = [spec.key for spec in (*stages, checkpoint)]
    job = dg.define_asset_job(
        f"{pipeline.name}_job",
        selection=dg.AssetSelection.assets(*keys),
        description=pipeline.description or None,
        executor_def=dg.in_process_executor,
        tags={PIPELINE: pipeline.name},
    )
    return dg.Definitions(
        assets=[*sources, epochs], jobs=[job], sensors=[checkpoint_sensor(pipeline, settings, job.name, keys)]
    )


def _coordinate(
    context: dg.AssetExecutionContext, pipeline: Pipeline, settings: Settings
) -> Iterator[dg.MaterializeResult]:
    """One run: an observation for each epoch as it completes, at the end a materialization of each asset."""
    reports: list[EpochReport] = []
    try:
        for report in runtime.run(pipeline, settings, _options(context, settings)):
            reports.append(report)
            _observe(context, pipeline, settings, report)
    except WeirError as error:
        raise _failure(error) from None  # the cause's trace is Weir's own; a stage's is in the metadata
    storage, _ = runtime.open_storage(pipeline, settings)
    for stage in pipeline.stages:
        yield dg.MaterializeResult(
            asset_key=_key(pipeline, stage.uid), metadata=metadata.of_stage_run(reports, stage, storage)
        )
    yield dg.MaterializeResult(asset_key=_key(pipeline, CHECKPOINT), metadata=metadata.of_run(reports))


def _options(context: dg.AssetExecutionContext, settings: Settings) -> RunOptions:
    tags = context.run.tags
    by_sensor = tags.get(TRIGGER) == Trigger.SENSOR.value
    return RunOptions(
        trigger=Trigger.SENSOR if by_sensor else Trigger.MANUAL,
        reason=f"{tags.get(REASON, 'sensor')} (tick {tags.get(TICK, '?')})" if by_sensor else "run in Dagster",
        until_caught_up=True,
        linger_seconds=settings.run.linger_seconds,
        max_seconds=settings.run.max_run_seconds,
        run_id=context.run.run_id,
    )


def _observe(context: dg.AssetExecutionContext, pipeline: Pipeline, settings: Settings, report: EpochReport) -> None:
    row = report.checkpoint
    for stage in pipeline.stages:
        context.log_event(dg.AssetObservation(_key(pipeline, stage.uid), metadata=metadata.of_stage(report, stage.uid)))
    lag = runtime.lag(pipeline, settings, row)
    context.log_event(
        dg.AssetObservation(
            _key(pipeline, CHECKPOINT),
            description=f"checkpoint {row.id}: {row.trigger}, {row.reason}",
            metadata=metadata.of_epoch(report, lag),
        )
    )


def _failure(error: WeirError) -> dg.Failure:
    shown = {"what": error.what, "where": error.where, "next": error.next}
    details: dict[str, dg.MetadataValue] = {name: dg.MetadataValue.text(text) for name, text in shown.items() if text}
    if isinstance(error, StageError) and error.traceback:
        details["traceback"] = dg.MetadataValue.md(f"```\n{error.traceback.rstrip()}\n```")
    return dg.Failure(description=str(error), metadata=details, allow_retries=False)


def _key(pipeline: Pipeline, name: str) -> dg.AssetKey:
    return dg.AssetKey([pipeline.name, name])


def _input_name(stage: Stage) -> str:
    return stage.input.name if isinstance(stage.input, FileSource) else stage.input.uid


def _check_names(pipeline: Pipeline) -> None:
    """Sources, stages and the checkpoint share the pipeline's prefix, so their names must differ."""
    taken = {CHECKPOINT: "the checkpoint"}
    for kind, name in [
        *[("source", source.name) for source in pipeline.sources],
        *[("stage", stage.uid) for stage in pipeline.stages],
    ]:
        if name in taken:
            raise PipelineError(
                f"In Dagster, the {kind} {name!r} of {pipeline.name} would be the same asset as {taken[name]}.",
                where=f"pipeline {pipeline.name}",
                next=f"Rename the {kind}." if kind == "stage" else "Give the source another name=...",
            )
        taken[name] = f"the {kind} {name!r}"
