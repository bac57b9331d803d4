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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dagster as dg
import yaml
from pydantic import Field

from state_ops.coordination import lease, requests, suspension
from state_ops.coordination.requests import Request
from state_ops.errors import ConfigurationError, DamageError, WeirError
from weir.dagster import checks
from weir.dagster.coordination import coordinate, failure, introduce, left_alone, show, showing, told_of
from weir.dagster.names import BESIDE, place, restore_job_name
from weir.definition import Pipeline
from weir.gates import data_docs
from weir.inspection.state_reader import chosen
from weir.markdown import as_text
from weir.ownership import hold_causes, savepoints
from weir.ownership.ownership import raise_if_busy
from weir.ownership.pipeline_storage import open_storage
from weir.restore import rewind as rewinding
from weir.run import maintenance
from weir.run.stopping import ask_to_stop, end
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


class SavepointConfig(dg.Config):
    """The options of the savepoint job."""

    name: str = Field(description="Required. The savepoint's name: letters, digits, dots, dashes and underscores.")
    drop: bool = Field(
        False, description="Remove the savepoint instead; checkpoints and files that only it kept are deleted."
    )
    reason: str = Field("savepoint job", description="A note that the list of savepoints shows.")


class RewindConfig(dg.Config):
    """The options of the rewind job."""

    # The Launchpad writes down what has a default but null, so that nobody has to look for these.
    checkpoint: int | None = Field(
        0, description="Required, or a savepoint: the checkpoint to go back to. 0: not said."
    )
    savepoint: str | None = Field("", description="Required, or a checkpoint: the savepoint's name. Empty: not said.")
    beginning: bool = Field(False, description="Instead of both: go back to before the first checkpoint.")
    dry_run: bool = Field(True, description="Only show what would change: state, files read again, rows that go.")
    stop: bool = Field(
        False, description="End the running coordinator at its barrier first, and let sensors go on afterwards."
    )
    accept: list[str] = Field(
        [],
        description=(
            "Obstacles to go on despite, word for word as a dry run has shown them. Any other obstacle ends the run."
        ),
    )
    reason: str = Field("rewind job", description="A note that the list of checkpoints shows.")


class StopConfig(dg.Config):
    """The options of the stop job."""

    drain: bool = Field(False, description="First apply all rows that have arrived and close every window.")
    savepoint: str | None = Field(None, description="At the end, make the newest checkpoint a savepoint of this name.")


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
    return [
        _savepoint_job(pipeline, settings),
        _rewind_job(pipeline, settings),
        _stop_job(pipeline, settings),
        _resume_job(pipeline, settings),
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


def _savepoint_job(pipeline: Pipeline, settings: Settings) -> dg.JobDefinition:
    @dg.op(name=f"{pipeline.name}_savepoint", out=dg.Out(dg.Nothing))
    def savepoint(context: dg.OpExecutionContext, config: SavepointConfig) -> None:
        patience = settings.checkpoints.timeout_seconds
        try:
            if config.drop:
                pin = maintenance.drop_savepoint(pipeline, settings, config.name, patience)
            else:
                pin = maintenance.savepoint(pipeline, settings, config.name, config.reason, patience)
        except WeirError as error:
            raise failure(error) from None
        done = "is dropped" if config.drop else "stays until it is dropped"
        context.log.info(f"savepoint {pin.name} is checkpoint {pin.checkpoint_id} and {done}")
        context.add_output_metadata(
            {"savepoint": pin.name, "checkpoint": int(pin.checkpoint_id), "dropped": config.drop}
        )

    return job_of(pipeline, f"{pipeline.name}_savepoint_job", savepoint, "Names the next checkpoint, or drops a name.")


def _rewind_job(pipeline: Pipeline, settings: Settings) -> dg.JobDefinition:
    @dg.op(name=f"{pipeline.name}_rewind", out=dg.Out(dg.Nothing))
    def rewind(context: dg.OpExecutionContext, config: RewindConfig) -> None:
        try:
            if [bool(config.checkpoint), bool(config.savepoint), config.beginning].count(True) != 1:
                raise ConfigurationError(
                    "Say which checkpoint to go back to.",
                    where="the rewind job's configuration",
                    next="Set checkpoint, savepoint or beginning; `weir checkpoints` and the checkpoint's history list "
                    "them.",
                )
            for line in _rewound(pipeline, settings, config, context):
                context.log.info(line)
        except WeirError as error:
            raise failure(error) from None

    return job_of(
        pipeline,
        f"{pipeline.name}_rewind_job",
        rewind,
        "Takes state, source positions and all tables back to one checkpoint. Only shows what would change unless"
        " dry_run is false.",
    )


def _rewound(
    pipeline: Pipeline, settings: Settings, config: RewindConfig, context: dg.OpExecutionContext
) -> Iterator[str]:
    storage, registry = open_storage(pipeline, settings)
    to = rewinding.BEGINNING
    if not config.beginning:
        to = int(chosen(pipeline, registry, config.savepoint or config.checkpoint).id)
    plan = rewinding.plan(pipeline, settings, to)
    context.add_output_metadata({"plan": dg.MetadataValue.json(plan.to_dict())})
    lives = not config.dry_run and lease.watch(storage)
    if not plan.takes_back and not lives:
        yield rewinding.nothing_to_take_back(plan, pipeline.name)
        return
    gone = ", ".join(map(str, plan.abandoned)) or "nothing yet"
    yield f"from checkpoint {plan.head.id} back {rewinding.named(plan.to)}; abandoned: {gone}"
    for source in plan.sources:
        yield f"source {source.source}: {source}"
    for table in plan.tables:
        yield f"table {table.table}: {table.in_words}"
    for obstacle in plan.obstacles:
        yield f"obstacle: {obstacle}"
    if config.dry_run:
        if plan.obstacles:
            yield f"to rewind in spite of these: {to_accept(plan.obstacles)}"
        yield "nothing was changed: dry_run"
        return
    rewinding.check(plan, pipeline.name, config.accept)
    with suspension.during(storage, "rewind job"):
        if config.stop and lives:
            ask_to_stop(pipeline, settings, Request(requests.STOP, trigger="job", reason=config.reason))
        done = maintenance.rewind(pipeline, settings, to, accepted=config.accept, reason=config.reason)
    if done.id == plan.to.id:
        yield rewinding.nothing_to_take_back(plan, pipeline.name)
    else:
        yield f"{pipeline.name} is at checkpoint {done.id}, back {done.reason}; the next run goes on from there"


def _stop_job(pipeline: Pipeline, settings: Settings) -> dg.JobDefinition:
    @dg.op(name=f"{pipeline.name}_stop", out=dg.Out(dg.Nothing))
    def stop(context: dg.OpExecutionContext, config: StopConfig) -> None:
        reason = "stop job"
        try:
            if config.savepoint is not None:
                savepoints.check_free(pipeline, settings, config.savepoint)
            if config.drain and not lease.watch(open_storage(pipeline, settings)[0]):
                raise WeirError(
                    f"No coordinator of {pipeline.name} is running, so nobody drains.",
                    next=f"Materialize first, or `weir stop {pipeline.name} --drain`, which drains by itself.",
                )
            request = Request(requests.STOP, reason=reason, drain=config.drain, savepoint=config.savepoint or "")
            stopped = end(pipeline, settings, request)
            if config.savepoint is not None and not stopped:
                patience = settings.checkpoints.timeout_seconds
                maintenance.savepoint(pipeline, settings, config.savepoint, reason, patience)
        except WeirError as error:
            raise failure(error) from None
        ended = "ended at a barrier" if stopped else "was not running; sensors begin nothing"
        context.log.info(
            f"{pipeline.name} {ended}. Materialize, the resume job, `weir run` or `weir resume` begin again"
        )

    return job_of(
        pipeline,
        f"{pipeline.name}_stop_job",
        stop,
        "Ends the running coordinator at its next barrier; sensors begin none until a person does. Nothing is lost.",
    )


def _resume_job(pipeline: Pipeline, settings: Settings) -> dg.JobDefinition:
    @dg.op(name=f"{pipeline.name}_resume", out=dg.Out(dg.Nothing))
    def resume(context: dg.OpExecutionContext) -> None:
        cleared = suspension.clear(open_storage(pipeline, settings)[0])
        outcome = "goes on as soon as files wait" if cleared else "was not stopped by a person"
        context.log.info(f"{pipeline.name} {outcome}")

    return job_of(
        pipeline,
        f"{pipeline.name}_resume_job",
        resume,
        "Lets sensors begin runs again after the stop job, `weir stop` or a run that was cancelled.",
    )


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


def to_accept(obstacles: Sequence[str]) -> str:
    """Obstacles as the Launchpad takes them: a line of YAML to copy."""
    listed = yaml.safe_dump(
        list(obstacles), default_flow_style=True, default_style='"', allow_unicode=True, width=float("inf")
    )
    return f"accept: {listed.strip()}"


def job_of(pipeline: Pipeline, name: str, op: dg.OpDefinition, description: str) -> dg.JobDefinition:
    return dg.GraphDefinition(name=name, node_defs=[op], description=description).to_job(
        executor_def=dg.in_process_executor, tags={BESIDE: pipeline.name}
    )
