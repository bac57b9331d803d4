"""The jobs of a pipeline beside its epochs.

    restore_job            prove the newest checkpoint, then resume: what sensors start after a death
    savepoint_job          name a checkpoint
    rewind_job             take a bad deploy back; shows what it would do unless told to do it
    stop_job               end at a barrier, perhaps after a drain: what cancelling a run does not do
    resume_job             let sensors begin runs again after that
    retention_and_fsck     prune, and check all storage
    data_docs              pages of all gates and restore expectations, by Great Expectations

Each is launched from the Launchpad with typed configuration; the first coordinates, the others may run while epochs do.
"""

import time
from collections.abc import Mapping
from typing import Any

import dagster as dg
from pydantic import Field

from state_ops.coordination import lease, requests
from state_ops.coordination.requests import Request
from state_ops.errors import ConfigurationError, DamageError, WeirError
from weir.dagster import backfills, checks
from weir.dagster.coordination import coordinate, failure, introduce, left_alone, show, showing, told_of
from weir.dagster.names import place, restore_job_name
from weir.dagster.operations import job, job_of
from weir.definition import Pipeline
from weir.gates import data_docs
from weir.markdown import as_text
from weir.operations.declared import every
from weir.ownership import hold_causes
from weir.ownership.ownership import raise_if_busy
from weir.ownership.pipeline_storage import open_storage
from weir.run import maintenance
from weir.settings.configuration import Settings


class RestoreConfig(dg.Config):
    """The options of the restore job."""

    resume: bool = Field(default=True, description="Then run epochs until caught up, as the pipeline's own job does.")
    checkpoint: int | None = Field(
        default=None,
        description="Prove this checkpoint instead of the newest; without resume. To go on from it: the rewind job.",
    )
    savepoint: str | None = Field(default=None, description="Prove the savepoint of this name instead; without resume.")
    generation: int | None = Field(
        default=None,
        description="Do nothing unless this is still the newest generation. Sensors fill it in; leave it out.",
    )


class DataDocsConfig(dg.Config):
    """The options of the job for data docs."""

    directory: str | None = Field(
        None,
        description=("The directory for the pages: empty, or with earlier ones. By default below local.work_dir."),
    )


class UpkeepConfig(dg.Config):
    """The options of the job for retention and fsck."""

    prune: bool = Field(
        True, description="Drop the checkpoints that nothing keeps, and the files that dead attempts left."
    )
    quick: bool = Field(False, description="Compare sizes only; read no contents.")


def restore_job(pipeline: Pipeline, settings: Settings) -> dg.JobDefinition:
    """Prove a checkpoint, report the result as checks, and resume.

    The job coordinates the pipeline, so it does not run beside another job that does.
    """

    here = place(pipeline, settings)

    @dg.op(name=f"{pipeline.name}_restore", pool=here.pool, out=dg.Out(dg.Nothing))
    def restore(context: dg.OpExecutionContext, config: RestoreConfig) -> None:
        introduce(context, here)
        try:
            if config.resume and left_alone(context, pipeline, settings):
                return
            if _outdated(pipeline, settings, config):
                context.log.info(f"generation {config.generation} has a successor already: there is nothing to restore")
                return
            _prove(context, pipeline, settings, config)
        except WeirError as error:
            told_of(context, pipeline, error)
            raise failure(error) from None
        if config.resume:
            done = list(coordinate(context, pipeline, settings))
            for shown in done:
                context.log_event(shown)
            if not done:
                return
            with showing("that a run went on"):  # the run may go on from an earlier checkpoint than was proven
                description = "a run went on from it, or from the newest one that is whole"
                show(context, [checks.verdict(pipeline, checks.RESTORABLE, True, description)])

    @dg.job(
        name=restore_job_name(pipeline),
        description=f"Proves the newest checkpoint of {pipeline.name}, with verdicts as checks, then resumes from it.",
        executor_def=dg.in_process_executor,
        tags=here.tags,
    )
    def job() -> None:
        restore()

    return job


def _outdated(pipeline: Pipeline, settings: Settings, config: RestoreConfig) -> bool:
    """Return whether another coordinator has begun since a sensor asked for this run."""
    if config.generation is None:
        return False
    storage, _ = open_storage(pipeline, settings)
    holder = lease.read(storage)
    return holder is not None and holder.generation != config.generation


def _prove(context: dg.OpExecutionContext, pipeline: Pipeline, settings: Settings, config: RestoreConfig) -> None:
    """Prove that the pipeline can go on.

    Registry and storage agree, the checkpoint is whole, and sources can be read from there.
    """
    storage, registry = open_storage(pipeline, settings)
    at = config.checkpoint if config.savepoint is None else config.savepoint
    if config.resume and at is not None:
        raise ConfigurationError(
            "A run goes on from the newest checkpoint, not from another one.",
            where="the restore job's configuration",
            next="Leave checkpoint and savepoint out; or set resume: false; or go back with the rewind job.",
        )
    if config.resume:
        raise_if_busy(pipeline, storage)
    evaluations = [
        checks.storage_is_whole(pipeline, settings, quick=True),
        checks.restorable(pipeline, settings, at),
        checks.input_is_there(pipeline, settings),
    ]
    # A check of sizes alone does not clear damage that a full check has reported, and an older checkpoint does not
    # speak for the newest.
    kept = [
        evaluation for evaluation in evaluations if not (evaluation.check_name == checks.WHOLE and evaluation.passed)
    ]
    with showing("what was proven"):
        show(context, [evaluation for evaluation in kept if at is None or evaluation.check_name != checks.RESTORABLE])
    for evaluation in evaluations:
        context.log.info(
            f"{evaluation.check_name}: {'passed' if evaluation.passed else 'FAILED'}: {evaluation.description}"
        )
    proven = {evaluation.check_name: evaluation for evaluation in evaluations}
    if not proven[checks.RESTORABLE].passed and not (config.resume and settings.restore.on_invalid == "rewind"):
        metadata: Mapping[str, Any] = proven[checks.RESTORABLE].metadata
        text = {name: metadata[name].value for name in ("what", "where", "next") if name in metadata}
        damage = DamageError(text["what"], where=text.get("where"), next=text.get("next"))
        if config.resume:  # nobody runs the pipeline, and nobody should before this has changed
            holder = lease.read(storage)
            generation = holder.generation if holder is not None else None
            hold_causes.note(storage, registry.head(), generation, context.run.run_id, damage)
        raise damage


def beside(pipeline: Pipeline, settings: Settings) -> list[dg.JobDefinition]:
    """Return the jobs that may run while epochs do."""
    after = {"promote": backfills.approved(pipeline, settings)}
    return [
        *(job(pipeline, settings, of, after.get(of.name)) for of in every() if of.job is not None),
        _upkeep_job(pipeline, settings),
        _data_docs_job(pipeline, settings),
    ]


def schedules(pipeline: Pipeline, settings: Settings, among: list[dg.JobDefinition]) -> list[dg.ScheduleDefinition]:
    """Return the schedules on which jobs run by themselves."""
    jobs = {job.name: job for job in among}
    wanted = [
        (_upkeep_name(pipeline), settings.dagster.upkeep_cron, "Prunes and checks by itself: dagster.upkeep_cron."),
        (
            _data_docs_name(pipeline),
            settings.dagster.data_docs_cron,
            "Makes the pages by itself: dagster.data_docs_cron.",
        ),
    ]
    return [
        dg.ScheduleDefinition(
            name=f"{name}_schedule",
            job=jobs[name],
            cron_schedule=cron,
            default_status=dg.DefaultScheduleStatus.RUNNING,
            description=description,
        )
        for name, cron, description in wanted
        if cron is not None
    ]


def _upkeep_name(pipeline: Pipeline) -> str:
    return f"{pipeline.name}_retention_and_fsck"


def _upkeep_job(pipeline: Pipeline, settings: Settings) -> dg.JobDefinition:
    @dg.op(name=f"{pipeline.name}_prune_and_check", out=dg.Out(dg.Nothing))
    def prune_and_check(context: dg.OpExecutionContext, config: UpkeepConfig) -> None:
        started = time.monotonic()
        try:
            if config.prune:
                freed = sum(fate.bytes for fate in maintenance.explain(pipeline, settings)[1] if not fate.stays)
                asked = Request(requests.UPKEEP, reason="retention and fsck")
                patience = settings.checkpoints.timeout_seconds
                # Taking ownership prunes and removes leftovers before anything else.
                maintenance.asked(pipeline, settings, asked, lambda _: None, patience)
                context.log.info(f"pruned; {freed:,} bytes were not needed")
        except WeirError as error:
            raise failure(error) from None
        evaluation = checks.storage_is_whole(pipeline, settings, quick=config.quick)
        show(context, [evaluation])
        context.add_output_metadata({**evaluation.metadata, "seconds": round(time.monotonic() - started, 1)})
        if not evaluation.passed:
            raise dg.Failure(
                description=f"{pipeline.name}: {evaluation.description}."
                f" weir fsck {pipeline.name} says what can be done.",
                metadata=evaluation.metadata,
                allow_retries=False,
            )

    return job_of(
        pipeline,
        _upkeep_name(pipeline),
        prune_and_check,
        "Drops checkpoints that nothing keeps, then checks registry, snapshots and tables (weir prune, weir fsck).",
    )


def _data_docs_name(pipeline: Pipeline) -> str:
    return f"{pipeline.name}_data_docs"


def _data_docs_job(pipeline: Pipeline, settings: Settings) -> dg.JobDefinition:
    @dg.op(name=f"{pipeline.name}_make_data_docs", out=dg.Out(dg.Nothing))
    def make_data_docs(context: dg.OpExecutionContext, config: DataDocsConfig) -> None:
        try:
            docs = data_docs.build(pipeline, settings, config.directory)
        except WeirError as error:
            raise failure(error) from None
        failed = [f"{verdict.stage}: {verdict}" for verdict in docs.verdicts if not verdict.passed]
        shown = {"failed": failed, "left out": list(docs.left_out)}
        lists = {
            name: dg.MetadataValue.md("\n".join(f"- {as_text(line)}" for line in lines))
            for name, lines in shown.items()
            if lines
        }
        counts = {"expectations": len(docs.verdicts), "expectations failed": len(failed)}
        context.add_output_metadata({"pages": dg.MetadataValue.path(str(docs.index)), **counts, **lists})
        context.log.info(f"{len(docs.verdicts)} expectations, {len(failed)} failed: {docs.index}")

    return job_of(
        pipeline,
        _data_docs_name(pipeline),
        make_data_docs,
        "Pages of all gates and restore expectations, asked of what is there now.",
    )
