"""Names that Dagster's side of a pipeline shares: asset keys, tags, jobs. `Runs` finds a pipeline's runs by them.

flights/landing           flights/aircraft_rotation_stage        flights/tables/aircraft_legs
flights/checkpoint        flights/restore_drill                  flights/complete/aircraft_legs_days
flights/backfill          cards/lookups/customers

The last part of a key is what the graph shows of it, so that each says what it is: a stage and its table may have one
name in the pipeline (docs/adr/0094-names-and-checks-in-dagster.md).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
from dagster import DagsterRunStatus

from state_ops.errors import PipelineError
from state_ops.redaction import redacted
from weir.definition import Pipeline, Source, Stage, TableBeside
from weir.definition.source import default_name
from weir.ownership.pipeline_storage import open_storage
from weir.settings.configuration import Settings

AssetJob = Any  # what dg.define_asset_job returns has no public name

CHECKPOINT, DRILL, TABLES, BACKFILL, LOOKUPS = "checkpoint", "restore_drill", "tables", "backfill", "lookups"
COMPLETE = "complete"

# Runs that coordinate a pipeline carry the first two tags: its name and the place of its storage. There is one such run
# at a time for a storage. Runs beside them carry the third. The fourth says why a sensor asked for a run. These are for
# people, and the second is the one by which weir/local/dagster.yaml limits runs.
PIPELINE, STORAGE, BESIDE, REASON = "weir/pipeline", "weir/storage", "weir/beside", "weir/reason"
# The others are for sensors and runs. Dagster's pages do not show tags that begin with .dagster/.
#   TRIGGER       a sensor asked for the run
#   COORDINATES   the pipeline of a run that has begun to coordinate it, whatever its job. A second tag has a digest of
#                 the storage's place behind this one's name (`Place.tag`), since several code locations may have a
#                 pipeline of the same name, and one run may coordinate several pipelines
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
_UNFINISHED = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]
_FROM_ASSETS = "__ASSET_JOB"  # Dagster's name for the job behind the button Materialize
_NEWEST = 20  # runs that are looked at by each filter: some may be those of another code location
# Dagster's tag of a materialization that says which data it has.
DATA_VERSION = "dagster/data_version"


def key(pipeline: Pipeline, *names: str) -> dg.AssetKey:
    """Return the key of one of a pipeline's assets. Dagster makes names of inputs from it, which have no spaces and no
    letters beyond ASCII."""
    return dg.AssetKey([pipeline.name, *(re.sub(r"[^\w.-]", "_", name, flags=re.ASCII) for name in names)])


def table_key(pipeline: Pipeline, table: str) -> dg.AssetKey:
    """Return the key of one of its Delta tables."""
    return key(pipeline, TABLES, table)


def lookup_key(pipeline: Pipeline, table: TableBeside) -> dg.AssetKey:
    """Return the key of a table that rows are looked up in: by its name, or by its place where another has that name
    too."""
    places = {beside.place for stage in pipeline.stages if (beside := stage.operator.beside) is not None}
    name = _table_name(table.place)
    if sum(_table_name(place) == name for place in places) > 1:
        return key(pipeline, LOOKUPS, *filter(None, table.place.split("/")))
    return key(pipeline, LOOKUPS, name)


def _table_name(place: str) -> str:
    return default_name(place).removesuffix(".parquet")


def stage_key(pipeline: Pipeline, uid: str) -> dg.AssetKey:
    """Return the key of a stage."""
    return key(pipeline, f"{uid}_stage")


def input_key(pipeline: Pipeline, input: Source | Stage) -> dg.AssetKey:
    """Return the key of what a stage reads."""
    return key(pipeline, input.name) if isinstance(input, Source) else stage_key(pipeline, input.uid)


def tag_of(run: dg.DagsterRun, tag: str) -> str | None:
    """Return the value that a run has in one of the tags for sensors and runs; None if it has none."""
    return run.tags.get(tag, run.tags.get(_ONCE[tag]))


def job_name(pipeline: Pipeline) -> str:
    """Return the name of the job that runs epochs."""
    return f"{pipeline.name}_job"


def restore_job_name(pipeline: Pipeline) -> str:
    """Return the name of the job that restores and resumes."""
    return f"{pipeline.name}_restore_job"


@dataclass(frozen=True, slots=True)
class Place:
    """A pipeline and the place of its storage. Pipelines of one name in several code locations differ in the place.

    Attributes:
        pipeline: The pipeline's name.
        uri: The root of the pipeline's storage.
    """

    pipeline: str
    uri: str

    @property
    def _digest(self) -> str:
        return hashlib.sha256(self.uri.encode()).hexdigest()[:12]

    @property
    def tag(self) -> str:
        """The tag of runs that have begun to coordinate the pipeline here. Its value is the pipeline's name."""
        return f"{COORDINATES}_{self._digest}"

    @property
    def pool(self) -> str:
        """The pool that lets one run at a time coordinate the pipeline."""
        return f"weir_{self.pipeline}_{self._digest}"

    @property
    def tags(self) -> dict[str, str]:
        """The tags of jobs that coordinate the pipeline."""
        return {PIPELINE: self.pipeline, STORAGE: redacted(self.uri)}


def place(pipeline: Pipeline, settings: Settings) -> Place:
    """Return the place of a pipeline's storage. Nothing is read."""
    return Place(pipeline.name, open_storage(pipeline, settings)[0].uri)


def location(run: dg.DagsterRun) -> str | None:
    """Return the code location that a run was launched from; None: a run of this process, without a code location."""
    origin = run.remote_job_origin
    return None if origin is None else origin.repository_origin.code_location_origin.location_name


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of Dagster's that coordinate a pipeline.

    A run is known by the place of the storage in its tags. A run that has no such tag is one of an earlier release, or
    one of the button Materialize that has not begun: it is the pipeline's if its code location is, too.

    Attributes:
        keys: The pipeline's assets.
        location: The code location of the sensor that asks; None: unknown.
    """

    instance: dg.DagsterInstance
    pipeline: Pipeline
    place: Place
    keys: frozenset[dg.AssetKey]
    location: str | None

    @classmethod
    def seen_by(
        cls, context: dg.SensorEvaluationContext, pipeline: Pipeline, settings: Settings, keys: Sequence[dg.AssetKey]
    ) -> Runs:
        """Return the runs as a sensor's tick sees them."""
        origin = context.code_location_origin
        where = None if origin is None else origin.location_name
        return cls(context.instance, pipeline, place(pipeline, settings), frozenset(keys), where)

    def has(self, run: dg.DagsterRun) -> bool:
        """Return whether a run coordinates the pipeline.

        The run says so, its job is one of the pipeline's, or the run was started from the pipeline's assets. A job of
        that name may be another pipeline's, which the run's tag then says: `flights_restore` in a code location of its
        own has the job `flights_restore_job`.
        """
        name, begun = self.pipeline.name, tag_of(run, COORDINATES)
        if self.place.tag in run.tags:
            return True
        named = (
            begun == name
            or (run.job_name in self._jobs and run.tags.get(PIPELINE, name) == name)
            or bool(self.keys & (run.asset_selection or set()))
        )
        if not named or any(tag.startswith(f"{COORDINATES}_") and of == name for tag, of in run.tags.items()):
            return False  # what it has begun to coordinate lies elsewhere
        if STORAGE in run.tags:
            return run.tags[STORAGE] == self.place.tags[STORAGE]
        return location(run) in (None, self.location)

    def unfinished(self) -> list[str]:
        """Return the ids of the runs that have not ended."""
        runs = [run for where in self._filters(_UNFINISHED) for run in self.instance.get_runs(where, limit=100)]
        return list(dict.fromkeys(run.run_id for run in runs if self.has(run)))

    def newest(self) -> dg.RunRecord | None:
        """Return the run that was requested last."""
        found = (record for where in self._filters() for record in self.instance.get_run_records(where, limit=_NEWEST))
        mine = (record for record in found if self.has(record.dagster_run))
        return max(mine, key=lambda record: record.storage_id, default=None)

    @property
    def _jobs(self) -> tuple[str, str]:
        return job_name(self.pipeline), restore_job_name(self.pipeline)

    def _filters(self, statuses: Sequence[DagsterRunStatus] = ()) -> Iterator[dg.RunsFilter]:
        """Return filters that find such runs without a look at all others.

        The last three find runs without the place of a storage in their tags, among those of pipelines of the same
        name.
        """
        yield dg.RunsFilter(statuses=statuses, tags={self.place.tag: self.pipeline.name})
        yield dg.RunsFilter(statuses=statuses, tags=self.place.tags)
        for tag in (COORDINATES, _ONCE[COORDINATES]):
            yield dg.RunsFilter(statuses=statuses, tags={tag: self.pipeline.name})
        for name in (*self._jobs, _FROM_ASSETS):
            yield dg.RunsFilter(statuses=statuses, job_name=name)


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
