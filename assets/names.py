"""Names that Dagster's side of a pipeline shares: asset keys, tags, jobs.

flights/landing           flights/aircraft_rotation_stage        flights/tables/aircraft_legs
flights/checkpoint        flights/restore_drill                  flights/complete/aircraft_legs_days
flights/backfill          cards/lookups/customers

The last part of a key is what the graph shows of it, so that each says what it is: a stage and its table may have one
name in the pipeline (docs/adr/0094-names-and-checks-in-dagster.md).
"""

from __future__ import annotations

import re
from typing import Any

import dagster as dg

from pipelines.runtime.connectors.source import default_name
from pipelines.runtime.definition import Lookup, Pipeline, Source, Stage
from state_ops.errors import PipelineError

AssetJob = Any  # what dg.define_asset_job returns has no public name

CHECKPOINT, DRILL, TABLES, BACKFILL, LOOKUPS = "checkpoint", "restore_drill", "tables", "backfill", "lookups"
COMPLETE = "complete"

# Runs that coordinate a pipeline carry the first tag; there is one at a time. Runs beside them carry the second. The
# third says why a sensor asked for a run. These are for people.
PIPELINE, BESIDE, REASON = "weir/pipeline", "weir/beside", "weir/reason"
# The others are for sensors and runs. Dagster's pages do not show tags that begin with .dagster/.
#   TRIGGER       a sensor asked for the run
#   COORDINATES   the pipeline of a run that has begun to coordinate it, whatever its job
#   PROCESS       the process of that run
#   ANSWERED_BY   which sensor asked for what follows a run that did not end well, and the id of that run: those that
#                 repeat it have its tags
TRIGGER, COORDINATES = ".dagster/weir_trigger", ".dagster/weir_coordinates"
PROCESS, ANSWERED_BY = ".dagster/weir_process", ".dagster/weir_answered_by"
_ONCE = {  # as runs have them that earlier releases have begun
    TRIGGER: "weir/trigger",
    COORDINATES: "weir/coordinates",
    PROCESS: "weir/process",
    ANSWERED_BY: "weir/answered-by",
}
# Dagster's tag of a materialization that says which data it has.
DATA_VERSION = "dagster/data_version"


def key(pipeline: Pipeline, *names: str) -> dg.AssetKey:
    """The key of one of a pipeline's assets. Dagster makes names of inputs from it, which have no spaces and no letters
    beyond ASCII."""
    return dg.AssetKey([pipeline.name, *(re.sub(r"[^\w.-]", "_", name, flags=re.ASCII) for name in names)])


def table_key(pipeline: Pipeline, table: str) -> dg.AssetKey:
    """The key of one of its Delta tables."""
    return key(pipeline, TABLES, table)


def lookup_key(pipeline: Pipeline, lookup: Lookup) -> dg.AssetKey:
    """The key of a table that rows are looked up in: by its name, or by its place where another has that name too."""
    places = {stage.lookup.table for stage in pipeline.stages if stage.lookup is not None}
    name = _table_name(lookup.table)
    if sum(_table_name(place) == name for place in places) > 1:
        return key(pipeline, LOOKUPS, *filter(None, lookup.table.split("/")))
    return key(pipeline, LOOKUPS, name)


def _table_name(place: str) -> str:
    return default_name(place).removesuffix(".parquet")


def stage_key(pipeline: Pipeline, uid: str) -> dg.AssetKey:
    """The key of a stage."""
    return key(pipeline, f"{uid}_stage")


def input_key(pipeline: Pipeline, input: Source | Stage) -> dg.AssetKey:
    """The key of what a stage reads."""
    return key(pipeline, input.name) if isinstance(input, Source) else stage_key(pipeline, input.uid)


def tag_of(run: dg.DagsterRun, tag: str) -> str | None:
    """What a run has in one of the tags for sensors and runs; None if it has none."""
    return run.tags.get(tag, run.tags.get(_ONCE[tag]))


def coordinating(pipeline: Pipeline) -> list[dict[str, str]]:
    """The tags of runs that have begun to coordinate the pipeline: of this release, and of earlier ones."""
    return [{COORDINATES: pipeline.name}, {_ONCE[COORDINATES]: pipeline.name}]


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
    for kind, name, asset in [
        *[("stage", stage.uid, stage_key(pipeline, stage.uid)) for stage in pipeline.stages],
        *[("source", source.name, key(pipeline, source.name)) for source in pipeline.sources],
    ]:
        if asset.path[-1] in taken:
            raise PipelineError(
                f"In Dagster, the {kind} {name} of {pipeline.name} would be the same asset as {taken[asset.path[-1]]}.",
                where=f"pipeline {pipeline.name}",
                next=f"Rename the {kind}." if kind == "stage" else "Give the source another name=...",
            )
        taken[asset.path[-1]] = f"the {kind} {name}"
