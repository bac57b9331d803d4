"""Weir pipelines as Dagster definitions: `weir_definitions`, to load alone or to merge into a project's own.

    landing -> aircraft_rotation -> airport_hourly -> checkpoint -> restore_drill
                     |                   |
                     +-> tables/...      +-> tables/...

A pipeline is one multi-asset: its stages advance together, epoch by epoch, whichever of them was asked for. One run
coordinates many epochs in one process. Each epoch is an observation of its assets and a materialization of its tables,
each run one materialization of the stages and the checkpoint.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg

from state_ops import logs
from weir.dagster import backfills, checks, drills, jobs, names, specs
from weir.dagster.coordination import coordinate, introduce
from weir.dagster.sensors import checkpoint_sensor, lease_watchdog, run_failure_sensor
from weir.dagster.tables import partitions
from weir.dagster.tables.sensor import tables_sensor
from weir.definition import Pipeline
from weir.run import run as runtime
from weir.settings.configuration import Settings


def weir_definitions(pipelines: Sequence[Pipeline], settings: Settings) -> dg.Definitions:
    """Return the assets, checks, jobs, sensors and schedules of each pipeline.

    To merge them into a project: `Definitions.merge(own, weir_definitions([...], settings))`. Nothing is read or
    started.
    """
    logs.adopt(settings.logging.format)
    return dg.Definitions.merge(*[_definitions(pipeline, settings.of(pipeline.name)) for pipeline in pipelines])


def _definitions(pipeline: Pipeline, settings: Settings) -> dg.Definitions:
    names.check_names(pipeline)
    here, (storage, _) = names.place(pipeline, settings), runtime.open_storage(pipeline, settings)
    asset_specs = [
        *specs.stages(pipeline, storage),
        *specs.tables(pipeline, settings, storage),
        specs.checkpoint(pipeline, settings, storage),
    ]

    @dg.multi_asset(
        name=f"{pipeline.name}_epochs",
        # Where a person has ended the pipeline, a sensor's run makes nothing.
        specs=[spec.replace_attributes(skippable=True) for spec in asset_specs],
        # Who asks for one table gets it by an epoch, which makes all others as well.
        can_subset=True,
        description=pipeline.description or f"Runs epochs of {pipeline.name} until it has caught up.",
        pool=here.pool,
    )
    def epochs(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[Any]]:
        introduce(context, here)
        for done in coordinate(context, pipeline, settings):
            if done.asset_key not in context.selected_asset_keys:
                context.log_event(done)
                continue
            version = dg.DataVersion(done.tags[names.DATA_VERSION]) if done.tags else None
            yield dg.MaterializeResult(asset_key=done.asset_key, metadata=done.metadata, data_version=version)

    keys = [spec.key for spec in asset_specs]
    epochs_job = dg.define_asset_job(
        names.job_name(pipeline),
        # Without checks: those run only when somebody asks for them again.
        selection=dg.AssetSelection.assets(*keys).without_checks(),
        description=pipeline.description or None,
        executor_def=dg.in_process_executor,
        tags=here.tags,
    )
    restore_job = jobs.restore_job(pipeline, settings)
    beside = jobs.beside(pipeline, settings)
    scheduled = jobs.schedules(pipeline, settings, beside)
    drill_job, drill_schedules = drills.job_and_schedules(pipeline, settings)
    definitions = dg.Definitions(
        assets=[
            *specs.sources(pipeline, settings),
            *specs.lookups(pipeline, settings),
            epochs,
            *partitions.specs(pipeline, settings),
            drills.spec(pipeline),
        ],
        asset_checks=[checks.definition(pipeline, settings), drills.checks(pipeline, settings)],
        jobs=[epochs_job, restore_job, drill_job, *beside],
        schedules=[*scheduled, *drill_schedules],
        sensors=[
            checkpoint_sensor(pipeline, settings, epochs_job, restore_job, keys),
            run_failure_sensor(pipeline, settings, restore_job, keys),
            lease_watchdog(pipeline, settings, keys),
            tables_sensor(pipeline, settings, keys),
        ],
    )
    return dg.Definitions.merge(definitions, backfills.definitions(pipeline, settings))
