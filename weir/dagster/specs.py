"""A pipeline's assets: its sources, stages, tables and its checkpoint, from the `Pipeline` object alone."""

from __future__ import annotations

from datetime import timedelta

import dagster as dg

from state_ops.storage.storage import Storage
from weir.dagster import metadata
from weir.dagster.names import CHECKPOINT, input_key, key, lookup_key, stage_key, table_key
from weir.definition import LATE, MAIN, Pipeline, Source, Stage
from weir.definition.fingerprint import fingerprint_of_stage
from weir.definition.sink import Sink
from weir.settings.configuration import Settings


def sources(pipeline: Pipeline, settings: Settings) -> list[dg.AssetSpec]:
    """Return the sources: what arrives from elsewhere."""
    return [_of_source(pipeline, settings, source) for source in pipeline.sources]


def _of_source(pipeline: Pipeline, settings: Settings, source: Source) -> dg.AssetSpec:
    files, place = source.capabilities.files, source.capabilities.place
    what = f"Rows of {source.kind}" if files is None else f"Files that arrive as {files.pattern}"
    resolved = source.kind if place is None else settings.resolve(pipeline.name, place)
    return dg.AssetSpec(
        key(pipeline, source.name),
        description=f"{what}, each read {'at most' if pipeline.at_most_once else 'exactly'} once.",
        kinds={source.kind} if files is None else {"file", files.format},
        group_name=pipeline.name,
        owners=pipeline.owners or None,
        metadata=metadata.of_source(source, resolved),
    )


def lookups(pipeline: Pipeline, settings: Settings) -> list[dg.AssetSpec]:
    """Return the tables that rows are looked up in, which somebody else writes."""
    besides = [beside for stage in pipeline.stages if (beside := stage.operator.beside) is not None]
    tables = {lookup_key(pipeline, beside): beside.place for beside in besides}
    return [
        dg.AssetSpec(
            table,
            description=f"Rows are looked up in {place}, as of the version that each epoch's plan has.",
            kinds={"parquet"} if place.endswith(".parquet") else {"delta", "table"},
            group_name=pipeline.name,
            metadata={"dagster/uri": settings.resolve(pipeline.name, place)},
        )
        for table, place in tables.items()
    ]


def _read_by(pipeline: Pipeline, stage: Stage) -> list[dg.AssetKey]:
    """Return the assets that a stage reads, each once."""
    beside = stage.operator.beside
    looked_up = [] if beside is None else [lookup_key(pipeline, beside)]
    return list(dict.fromkeys([*(input_key(pipeline, input.origin) for input in stage.inputs), *looked_up]))


def stages(pipeline: Pipeline, storage: Storage) -> list[dg.AssetSpec]:
    """Return the stages, each downstream of what it reads."""
    return [
        dg.AssetSpec(
            stage_key(pipeline, stage.uid),
            deps=_read_by(pipeline, stage),
            description=_of_stage(stage),
            kinds={"pyspark", "rocksdb"} if stage.has_state else {"pyspark"},
            code_version=fingerprint_of_stage(stage),
            group_name=pipeline.name,
            owners=pipeline.owners or None,
            metadata=metadata.of_definition(stage, storage),
        )
        for stage in pipeline.stages
    ]


def _of_stage(stage: Stage) -> str:
    goes = [f"`{sink.name}`" for sink in stage.sinks]
    where = f"Its rows go to {', '.join(goes)}." if goes else "Its rows go to other stages alone."
    what = f"The stage `{stage.uid}`{' and its state' if stage.has_state else ''}: what each epoch did. {where}"
    return f"{stage.description}\n\n{what}" if stage.description else what


def tables(pipeline: Pipeline, settings: Settings, storage: Storage) -> list[dg.AssetSpec]:
    """Return the tables and other sinks that stages write to, which a project's own assets read."""
    return [
        dg.AssetSpec(
            table_key(pipeline, sink.name),
            deps=[stage_key(pipeline, stage.uid)],
            description=_of_sink(pipeline, stage, sink),
            kinds={"delta", "table"} if pipeline.capabilities(sink).has_versions else {sink.kind},
            code_version=fingerprint_of_stage(stage),
            group_name=pipeline.name,
            owners=pipeline.owners or None,
            metadata=metadata.of_sink(pipeline, sink, storage),
            freshness_policy=freshness(settings),
        )
        for stage in pipeline.stages
        for sink in stage.sinks
    ]


def checkpoint(pipeline: Pipeline, settings: Settings, storage: Storage) -> dg.AssetSpec:
    """Return the checkpoint: what all stages commit together."""
    return dg.AssetSpec(
        key(pipeline, CHECKPOINT),
        deps=[stage_key(pipeline, stage.uid) for stage in pipeline.stages],
        description=(
            "State, offsets and outputs of all stages, committed together, once an epoch. Each observation is one."
        ),
        kinds={"delta"},
        group_name=pipeline.name,
        owners=pipeline.owners or None,
        metadata={"registry": dg.MetadataValue.path(storage.full("registry/checkpoints"))},
        freshness_policy=freshness(settings),
    )


def freshness(settings: Settings) -> dg.FreshnessPolicy | None:
    """Return a freshness policy: stale if it was not materialized for so long, a warning at half of that."""
    hours = settings.dagster.freshness_hours
    if hours is None:
        return None
    return dg.FreshnessPolicy.time_window(fail_window=timedelta(hours=hours), warn_window=timedelta(hours=hours / 2))


def _of_sink(pipeline: Pipeline, stage: Stage, sink: Sink) -> str:
    output = next(name for name, other in stage.sinks_by_output if other == sink)
    if output in stage.returned:
        often, of = pipeline.delivery.replace("_", " "), "" if output == MAIN else f" as {output}"
        if sink.capabilities.newest_of:
            return f"The newest row of each key that {stage.uid} hands out{of}."
        return f"What {stage.uid} hands out{of}, {'appended ' if sink.capabilities.has_versions else ''}{often}."
    if output == LATE:
        return f"Rows that came too late for {stage.uid}, as they came."
    return f"Rows of the source that gates of {stage.uid} have set aside, each with the reason."
