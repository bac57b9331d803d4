"""A Dagster run that coordinates a pipeline: it runs epochs until it has caught up, and shows each as it completes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import dagster as dg

from state_ops import logs
from state_ops.coordination import processes
from state_ops.errors import BusyError, FencedError, GateError, StageError, WeirError, plainly
from state_ops.logs import Logger
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.triggers import Trigger
from state_ops.redaction import scrubbing
from state_ops.storage.storage import Storage
from weir.dagster import checks, history, metadata
from weir.dagster.metadata import Tally
from weir.dagster.names import (
    CHECKPOINT,
    COORDINATES,
    DATA_VERSION,
    PROCESS,
    REASON,
    TRIGGER,
    Place,
    key,
    stage_key,
    table_key,
    tag_of,
)
from weir.definition import Pipeline, Stage, sinks_shown
from weir.definition.sink import Sink
from weir.epoch.model import EpochReport
from weir.gates.evaluation import GateVerdict
from weir.markdown import as_code
from weir.ownership import backlog
from weir.run import progress
from weir.run import run as runtime
from weir.run.run import RunOptions
from weir.settings.configuration import Settings

log, lines = Logger("weir.dagster"), Logger("weir.run")

Context = dg.AssetExecutionContext | dg.OpExecutionContext

KIND = "kind"  # of the error that ended a run, in its failure's metadata
_STAGES_SECONDS = 60.0
_HISTORY_SECONDS = 900.0
# What Dagster notes on a run that no person has asked for.
_NO_PERSON = (
    "dagster/sensor_name",
    "dagster/schedule_name",
    "dagster/from_automation_condition",
    "dagster/auto_materialize",
)
_REPEATS, _RETRIES = "dagster/parent_run_id", "dagster/retry_number"


def coordinate(context: Context, pipeline: Pipeline, settings: Settings) -> Iterator[dg.AssetMaterialization]:
    """Run epochs until caught up, and show each as an observation and as a materialization of the tables that it has
    written to. Then yield a materialization of each asset of the pipeline.

    Yields nothing if a person has ended the pipeline and no person asked for this run.

    Raises:
        dagster.Failure: Weir raised an error; it says what happened, where, and what to do next.
    """
    if left_alone(context, pipeline, settings):
        return
    watcher = Watcher(context, pipeline, settings)
    try:
        run = runtime.run(pipeline, settings, _options(context, settings))
        with scrubbing(), closing(run) as reports:  # type: ignore[type-var]
            for report in reports:
                with showing("an epoch"):
                    watcher.see(report)
    except WeirError as error:
        with showing("the end of a failed run"):
            watcher.end()
            refused = error.verdicts if isinstance(error, GateError) else ()
            watcher.judge([GateVerdict.from_dict(str(facts["stage"]), facts) for facts in refused])
        told_of(context, pipeline, error)
        raise failure(error) from None  # the cause's trace is Weir's own; a stage's is in the metadata
    if watcher.run.newest is None and left_alone(context, pipeline, settings):
        return
    with showing("the end of a run"):
        watcher.end()
        ended = checks.verdict(pipeline, checks.LAST_RUN, True, metadata.of_run(watcher.run)["outcome"])
        show(context, [ended, checks.on_time(pipeline, settings), checks.input_is_there(pipeline, settings)])
    yield from watcher.materializations()


@contextmanager
def showing(what: str) -> Iterator[None]:
    """Log errors of the `with` block, and go on: the display must not end a run that does well.

    Dagster's database may be locked, a table may be gone, a source may not answer.
    """
    try:
        yield
    except Exception as error:
        log.warning("could not be shown in Dagster", what=what, error=plainly(error))


def introduce(context: Context, here: Place) -> None:
    """Record which pipeline a run coordinates, and the run's process. Sensors identify the run by that, whatever its
    job.
    """
    run_id = context.run.run_id
    with showing("whose run this is"):
        pid = _pid(context)
        process = f"{socket.gethostname()}|{pid}|{processes.born(pid)}|{processes.pid_namespace()}|{run_id}"
        tags = {COORDINATES: here.pipeline, here.tag: here.pipeline, PROCESS: process}
        context.instance.add_run_tags(run_id, tags)


def _pid(context: Context) -> int:
    """Return the run's process. Where each step has one of its own, this step's ends before other people's steps
    begin."""
    parent = multiprocessing.parent_process()
    of_a_step = dg.DagsterEventType.STEP_WORKER_STARTING
    if parent is None or not context.instance.get_records_for_run(context.run.run_id, of_type=of_a_step).records:
        return os.getpid()
    return parent.pid or os.getpid()


def left_alone(context: Context, pipeline: Pipeline, settings: Settings) -> bool:
    """Return whether this run has nothing to do because a person has ended the pipeline. The run's log says so."""
    why = runtime.suspended(pipeline, settings, _options(context, settings))
    if why is not None:
        context.log.warning(f"{pipeline.name} is left alone, since it was {why}")
    return why is not None


def show(context: Context, verdicts: Iterable[dg.AssetCheckEvaluation]) -> None:
    """Show verdicts as those of this run."""
    for verdict in verdicts:
        context.log_event(verdict)  # type: ignore[arg-type]  # Dagster takes it and does not say so


def told_of(context: Context, pipeline: Pipeline, error: WeirError) -> None:
    """Show that a run failed. If it failed because another coordinator is at work, that says nothing about the
    pipeline.
    """
    if not isinstance(error, BusyError | FencedError):
        with showing("why a run failed"):
            show(context, [checks.failed(pipeline, checks.LAST_RUN, error)])


class Watcher:
    """Shows epochs in Dagster.

    Epochs that come fast share an observation, and a materialization of each sink that they have written to; so do the
    stages' epochs of a minute. Gates become checks.
    """

    def __init__(self, context: Context, pipeline: Pipeline, settings: Settings) -> None:
        self._context, self._pipeline, self._settings = context, pipeline, settings
        self.run = Tally()
        self._epochs, self._stages = Tally(), Tally()
        self._epochs_at = self._stages_at = float("-inf")
        self._begun = self._history_at = time.monotonic()
        self._sinks_at: dict[str, float] = {}
        self._verdicts: list[GateVerdict] = []
        self._pace = progress.Pace()

    def see(self, report: EpochReport) -> None:
        """Show a completed epoch."""
        self._log(report)
        if self.run.newest is None:  # the run's first commit: what an earlier one left red is over
            with showing("what is no longer red"):
                show(
                    self._context,
                    checks.answers(self._context.instance, self._pipeline, self._settings, report.checkpoint),
                )
        for tally in (self.run, self._epochs, self._stages):
            tally.add(report)
        bad = [verdict for verdict in report.verdicts if not verdict.passed]
        self._verdicts += report.verdicts
        if bad:  # that is not to wait for the end of the run
            self._judge()
        now = time.monotonic()
        if now - self._epochs_at >= self._settings.dagster.observe_seconds:
            self._observe_epochs(report.checkpoint)
        if now - self._stages_at >= _STAGES_SECONDS:
            self._observe_stages()
            self._judge()

    def _log(self, report: EpochReport) -> None:
        """Write a line to the run's log; where log lines are JSON, also one with its fields to stderr."""
        seconds = self._pace.seconds(report.checkpoint)
        self._context.log.info(progress.line_of(report, seconds))
        if logs.is_json():
            lines.info("epoch", **progress.fields(self._pipeline, report, seconds))

    def judge(self, verdicts: list[GateVerdict]) -> None:
        """Report the verdicts of gates."""
        self._verdicts += verdicts
        self._judge()

    def end(self) -> None:
        """Show what has not been shown yet."""
        if self._epochs.newest is not None:
            self._observe_epochs(self._epochs.newest.checkpoint)
        if self._stages.newest is not None:
            self._observe_stages()
        self._judge()
        if self.run.newest is None:  # what stood there before still does
            head = runtime.open_storage(self._pipeline, self._settings)[1].head()
            for stage in self._pipeline.stages:
                show(self._context, checks.recorded(self._pipeline, head, stage))

    def materializations(self) -> Iterator[dg.AssetMaterialization]:
        """Yield one materialization of each asset for the whole run. Tables get one too, although they have had theirs:
        assets downstream in the same run wait for it.
        """
        pipeline, run = self._pipeline, self.run
        storage, registry = runtime.open_storage(pipeline, self._settings)
        head = run.newest.checkpoint if run.newest is not None else registry.head()
        for stage in pipeline.stages:
            shown: dict[str, Any] = {}
            with showing(f"the run of {stage.uid}"):
                shown = metadata.of_stage_run(pipeline, run, stage, storage)
            yield dg.AssetMaterialization(stage_key(pipeline, stage.uid), metadata=shown)
            for sink in sinks_shown(stage, head.sinks if head is not None else ()):
                yield self._of_sink(run, stage, sink, storage, time.monotonic() - self._begun)
        shown = metadata.of_run(run)
        with showing("the last epochs"):
            shown |= self._history() if run.newest is not None else {}
        yield dg.AssetMaterialization(key(pipeline, CHECKPOINT), metadata=shown)

    def _observe_epochs(self, row: Checkpoint) -> None:
        arrived = backlog.arrivals(self._pipeline, self._settings, row)
        shown = metadata.of_epochs(self._epochs, arrived)
        if time.monotonic() - self._history_at >= _HISTORY_SECONDS:
            shown |= self._history()
        several = f"{self._epochs.epochs} epochs up to " if self._epochs.epochs > 1 else ""
        description = f"{several}checkpoint {row.id}: {row.trigger}, {row.reason}"
        self._context.log_event(
            dg.AssetObservation(key(self._pipeline, CHECKPOINT), description=description, metadata=shown)
        )
        self._materialize_sinks(metadata.waiting(arrived))
        self._epochs, self._epochs_at = Tally(), time.monotonic()

    def _materialize_sinks(self, waiting: Mapping[str, int]) -> None:
        """Materialize each sink with new rows; at the run's first epochs all of them, since Dagster takes an asset for
        in progress until its run has materialized it, and starts nothing downstream meanwhile; and the stages before
        them, without which it calls a table out of step with what it is made of.
        """
        pipeline, is_first = self._pipeline, self.run.first == self._epochs.first
        storage, _ = runtime.open_storage(pipeline, self._settings)
        known = self._epochs.newest.checkpoint.sinks if self._epochs.newest is not None else {}
        for stage in pipeline.stages:
            if is_first:
                of_stage = metadata.of_stage_run(pipeline, self._epochs, stage, storage)
                self._context.log_event(dg.AssetMaterialization(stage_key(pipeline, stage.uid), metadata=of_stage))
            for sink in sinks_shown(stage, known):
                if self._epochs.tables[sink.name] or sink.name not in self._sinks_at:
                    seconds = time.monotonic() - self._sinks_at.get(sink.name, self._begun)
                    shown = self._of_sink(self._epochs, stage, sink, storage, seconds)
                    self._context.log_event(shown.with_metadata({**shown.metadata, **waiting}))
                    self._sinks_at[sink.name] = time.monotonic()

    def _of_sink(
        self, tally: Tally, stage: Stage, sink: Sink, storage: Storage, seconds: float
    ) -> dg.AssetMaterialization:
        shown: dict[str, Any] = {}
        tags: dict[str, str] = {}
        with showing(f"the sink {sink.name}"):
            head = tally.newest.checkpoint if tally.newest is not None else None
            written = tally.versions.get(sink.name)
            columns = tally.newest.columns if tally.newest is not None else None
            now, version = metadata.of_sink_now(self._pipeline, head, stage, sink, storage, written, columns)
            shown = metadata.of_sink_run(tally, stage, sink, seconds) | now
            tags = {} if version is None else {DATA_VERSION: version}
        return dg.AssetMaterialization(table_key(self._pipeline, sink.name), metadata=shown, tags=tags)

    def _observe_stages(self) -> None:
        for stage in self._pipeline.stages:
            shown = metadata.of_stage(self._stages, stage.uid)
            self._context.log_event(dg.AssetObservation(stage_key(self._pipeline, stage.uid), metadata=shown))
        assert self._stages.newest is not None, "there is something to observe"
        row = self._stages.newest.checkpoint
        for name, observed in backlog.observed(self._pipeline, self._settings, row).items():
            shown = metadata.of_source_read(row, name, observed)
            self._context.log_event(dg.AssetObservation(key(self._pipeline, name), metadata=shown))
        self._stages, self._stages_at = Tally(), time.monotonic()

    def _judge(self) -> None:
        for stage in self._pipeline.stages:
            show(self._context, checks.of_gates(self._pipeline, stage, self._verdicts))
        self._verdicts = []

    def _history(self) -> dict[str, dg.MetadataValue]:
        self._history_at = time.monotonic()
        points = history.points(self._context.instance, key(self._pipeline, CHECKPOINT))
        return {"history": history.as_plot(points), "last epochs": history.as_table(points)} if points else {}


def failure(error: WeirError) -> dg.Failure:
    """Return an error as Dagster shows it: what happened, where, what to do next, and the kind of error."""
    details: dict[str, dg.MetadataValue] = checks.of_error(error)
    details[KIND] = dg.MetadataValue.text(type(error).__name__)
    if isinstance(error, StageError) and error.traceback:
        details["traceback"] = dg.MetadataValue.md(as_code(error.traceback.rstrip()))
    return dg.Failure(description=str(error), metadata=details, allow_retries=False)


def _options(context: Context, settings: Settings) -> RunOptions:
    tags = context.run.tags
    # Dagster gives all tags of a run to those that repeat it, and numbers those that it asks for itself; the others a
    # person has executed again.
    retried = _RETRIES in tags
    again = _REPEATS in tags and not retried
    by_sensor = tag_of(context.run, TRIGGER) == Trigger.SENSOR.value and not again
    return RunOptions(
        trigger=Trigger.SENSOR if by_sensor else Trigger.MANUAL,
        reason=tags.get(REASON, "sensor") if by_sensor else "re-executed in Dagster" if again else "run in Dagster",
        # A sensor only makes it sooner: it may be off, and the daemon dead.
        interval=settings.checkpoints.interval_seconds,
        until_caught_up=True,
        linger_seconds=settings.run.linger_seconds,
        max_seconds=settings.run.max_run_seconds,
        run_id=context.run.run_id,
        automatic=retried or (not again and any(tag in tags for tag in _NO_PERSON)),
    )
