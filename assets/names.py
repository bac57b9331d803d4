"""Names that Dagster's side of a pipeline shares: asset keys, tags, jobs.

flights/landing   flights/aircraft_rotation   flights/tables/aircraft_legs   flights/checkpoint   flights/restore_drill
                  flights/backfill                                       flights/complete/aircraft_legs
cards/lookups/customers
"""

from __future__ import annotations

from typing import Any

import dagster as dg

from pipelines.runtime.connectors.source import default_name
from pipelines.runtime.definition import Lookup, Pipeline, Source, Stage
from state_ops.errors import PipelineError

AssetJob = Any  # what dg.define_asset_job returns has no public name

CHECKPOINT, DRILL, TABLES, BACKFILL, LOOKUPS = "checkpoint", "restore_drill", "tables", "backfill", "lookups"
COMPLETE = "complete"

# Runs that coordinate a pipeline carry the first tag; there is one at a time. Runs beside them carry the second.
PIPELINE, BESIDE = "weir/pipeline", "weir/beside"
TRIGGER, REASON, TICK, GENERATION = "weir/trigger", "weir/reason", "weir/tick", "weir/generation"
# Once it has begun, a run that coordinates records its pipeline and process in these tags, whatever its job. Dagster's
# pages do not show tags that begin with .dagster/.
COORDINATES, PROCESS = "weir/coordinates", ".dagster/weir_process"
PROCESS_ONCE = "weir/process"  # as earlier releases have it
# Dagster's tag of a materialization that says which data it has.
DATA_VERSION = "dagster/data_version"
# Which sensor asked for what follows a run that did not end well, and the id of that run: those that repeat it have its
# tags.
ANSWERED_BY = "weir/answered-by"


def key(pipeline: Pipeline, *names: str) -> dg.AssetKey:
    """The key of one of a pipeline's assets."""
    return dg.AssetKey([pipeline.name, *names])


def table_key(pipeline: Pipeline, table: str) -> dg.AssetKey:
    """The key of one of its Delta tables."""
    return key(pipeline, TABLES, table)


def lookup_key(pipeline: Pipeline, lookup: Lookup) -> dg.AssetKey:
    """The key of a table that rows are looked up in."""
    return key(pipeline, LOOKUPS, default_name(lookup.table).removesuffix(".parquet"))


def input_name(input: Source | Stage) -> str:
    """The name under which an input of a stage is an asset."""
    return input.name if isinstance(input, Source) else input.uid


def job_name(pipeline: Pipeline) -> str:
    """The name of the job that runs epochs."""
    return f"{pipeline.name}_job"


def restore_job_name(pipeline: Pipeline) -> str:
    """The name of the job that restores and resumes."""
    return f"{pipeline.name}_restore_job"


def pool(pipeline: Pipeline) -> str:
    """The pool that lets one run at a time coordinate the pipeline."""
    return f"weir_{pipeline.name}"


def check_names(pipeline: Pipeline) -> None:
    """Refuse a pipeline in which a source, a stage or the checkpoint would have the same asset key."""
    taken = {
        CHECKPOINT: "the checkpoint",
        DRILL: "the restore drill",
        TABLES: "the folder of its tables",
        BACKFILL: "its backfills",
        LOOKUPS: "the folder of tables that it looks up",
        COMPLETE: "the folder of complete days or hours of its tables",
    }
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
