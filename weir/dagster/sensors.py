"""A pipeline's sensors.

    checkpoint_sensor    its ticks trigger epochs: a barrier where a coordinator lives, a run where none does, a restore
                         after a death
    run_failure_sensor   a run failed: restore and resume if another attempt can help, else say who has to do what
    lease_watchdog       ends runs and leases whose process is gone, and says when input is overdue

The decisions are in `weir.run.sensor`; here they meet Dagster's runs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg
from dagster import DagsterRunStatus

from state_ops.coordination import lease, processes, requests, suspension
from state_ops.coordination.requests import Request
from state_ops.records.checkpoint import EPOCH
from state_ops.redaction import redacted
from state_ops.storage.storage import Storage
from weir.dagster import checks
from weir.dagster.coordination import KIND
from weir.dagster.jobs import RestoreConfig
from weir.dagster.names import (
    ANSWERED_BY,
    PROCESS,
    REASON,
    TRIGGER,
    AssetJob,
    Runs,
    job_name,
    location,
    place,
    restore_job_name,
    tag_of,
)
from weir.definition import Pipeline
from weir.ownership import hold_causes
from weir.ownership.pipeline_storage import open_storage, readers
from weir.run import sensor as decisions
from weir.run.sensor import Action, Decision, SensorMemory, restore_key
from weir.settings.configuration import Settings

_WATCH_SECONDS = 30
_ENDED = re.compile(r"was terminated by signal \d+ \(\w+\)|unexpectedly exited with code -?\d+")  # Dagster's wording
_BY_CODE = "USER_CODE_ERROR"  # Dagster's word for what the code of a step has raised

# What a replay would only repeat, and what somebody else has taken over. By the error's own class: the next run plans
# without input that vanished, so a VanishedError is no InputError here.
_FOR_A_PERSON = {
    "ConfigurationError": "correct the configuration",
    "GateError": "repair the input or correct the gate",
    "InputError": "repair or move the input",
    "PipelineError": "correct the pipeline's code",
    "StageError": "correct the stage's function",
    "StateSizeError": "choose another backend",
}
_BESIDE_SECONDS = 0.3  # between a sensor's look at a run and its mark on it, at most
_ELSEWHERE = ("BusyError", "FencedError")


def checkpoint_sensor(
    pipeline: Pipeline,
    settings: Settings,
    epochs_job: AssetJob,
    restore_job: dg.JobDefinition,
    keys: Sequence[dg.AssetKey],
) -> dg.SensorDefinition:
    """Return the sensor that triggers epochs.

    Args:
        keys: The assets that its runs materialize.
    """
    name = f"{pipeline.name}_checkpoint_sensor"

    @dg.sensor(
        name=name,
        jobs=[epochs_job, restore_job],
        minimum_interval_seconds=settings.dagster.sensor_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            f"Lets {pipeline.name} work: asks its running coordinator for a barrier when files wait, for a run when "
            "no coordinator is alive, for a restore when one died."
        ),
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        memory = SensorMemory.from_json(context.cursor)
        runs = Runs.seen_by(context, pipeline, settings, keys)
        newest, running = runs.newest(), runs.unfinished()
        if newest is not None and newest.dagster_run.status is DagsterRunStatus.CANCELED:
            memory = _note_cancelled(context.instance, pipeline, settings, memory, newest, alone=not running)
        sight = decisions.observe(pipeline, settings, running)
        decision = decisions.decide(sight, memory, settings.dagster.max_lag_files)
        context.update_cursor(decision.memory.to_json())
        if decision.gone is not None:
            _end(context, decision.gone)
        if decision.action is Action.WAIT:
            return dg.SkipReason(decision.reason)
        if decision.action is Action.BARRIER:
            decisions.ask(pipeline, settings, decision)
            return dg.SkipReason(f"asked the running coordinator for a barrier: {decision.reason}")
        if (
            sight.failed_run is not None and decision.memory.runs == 1
        ):  # after a pause it asks itself, whoever answered before
            other = _answers(context.instance, sight.failed_run, name)
            if other is not None:
                return dg.SkipReason(f"{other} sees to run {sight.failed_run[:8]}: {decision.reason}")
        tags = {TRIGGER: "sensor", REASON: f"{decision.reason} (tick {decision.memory.tick})"}
        if decision.action is Action.RUN:
            return dg.RunRequest(run_key=_run_key(pipeline, decision), job_name=job_name(pipeline), tags=tags)
        assert sight.holder is not None, "somebody died"
        return _restore(pipeline, sight.holder.generation, tags, _run_key(pipeline, decision))

    return tick


def run_failure_sensor(
    pipeline: Pipeline, settings: Settings, restore_job: dg.JobDefinition, keys: Sequence[dg.AssetKey]
) -> dg.SensorDefinition:
    """Return the sensor that answers failed runs of the pipeline, from its jobs or from Materialize."""

    @dg.run_failure_sensor(
        name=_failure_sensor_name(pipeline),
        request_job=restore_job,
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=settings.dagster.sensor_seconds,
        description=(
            f"Restores and resumes {pipeline.name} after a failed run, if that can help; else says what to do."
        ),
    )
    def failed(context: dg.RunFailureSensorContext) -> dg.RunRequest | dg.SkipReason:
        run = context.dagster_run
        runs = Runs(context.instance, pipeline, place(pipeline, settings), frozenset(keys), location(run))
        if not runs.has(run):
            return dg.SkipReason(f"{run.job_name} is none of {pipeline.name}'s")
        what = context.failure_event.message or "it failed"
        kind = raised = None
        for event in context.get_step_failure_events():
            failure = event.step_failure_data.user_failure_data
            kind = str(failure.metadata[KIND].value) if failure is not None and KIND in failure.metadata else kind
            raised = _raised(event.step_failure_data) or raised
            what = (failure.description if failure is not None else raised) or what
        what = what.splitlines()[0]
        answer = _answer_to_failure(runs, settings, run, kind, what)
        newest = runs.newest()
        # Of an error that is none of Weir's, and of its end by a signal, a run cannot report itself.
        if kind is None and newest is not None and newest.dagster_run.run_id == run.run_id:
            asked = f"{answer.job_name} was asked for" if isinstance(answer, dg.RunRequest) else answer.skip_message
            ended = _how_it_ended(context.instance, run) if raised is None else f"run {run.run_id[:8]} failed: {raised}"
            description = f"{ended}. {asked}"
            checks.report(
                context.instance, [checks.verdict(pipeline, checks.LAST_RUN, False, description, {"run": run.run_id})]
            )
        return answer

    return failed


def _answer_to_failure(
    runs: Runs, settings: Settings, run: dg.DagsterRun, kind: str | None, what: str
) -> dg.RunRequest | dg.SkipReason:
    """Return a request for a restore, or the reason why a failed run of the pipeline gets none.

    Args:
        runs: The pipeline's runs.
        kind: The class of the error, if the run could report it.
        what: What happened, on one line.
    """
    pipeline, instance = runs.pipeline, runs.instance
    if kind in _FOR_A_PERSON:
        return dg.SkipReason(f"nothing that a restore could mend: {what} A person has to {_FOR_A_PERSON[kind]}")
    if kind in _ELSEWHERE:
        return dg.SkipReason(f"another coordinator has it: {what}")
    storage, registry = open_storage(pipeline, settings)
    holder = lease.read(storage)
    noted = hold_causes.standing(storage, registry.head(), readers(pipeline, settings))
    if noted is not None and hold_causes.is_since(noted, holder):
        return dg.SkipReason(f"the pipeline is held, a person has to repair or rewind: {what}")
    if run.job_name == restore_job_name(pipeline):
        return dg.SkipReason(f"the restore itself failed; the checkpoint sensor tries again, ever more rarely: {what}")
    others = [other for other in runs.unfinished() if other != run.run_id]
    if others:
        return dg.SkipReason(f"run {others[0][:8]} follows already")
    if holder is None:
        return dg.SkipReason(f"it had not begun, so there is nothing to restore: {what}")
    if lease.watch(storage):
        return dg.SkipReason(f"the coordinator of generation {holder.generation} is alive")
    ended = suspension.read(storage)
    if ended is not None:
        return dg.SkipReason(f"{ended.how} by a person ({ended.why})")
    if holder.run_id != run.run_id:
        return dg.SkipReason(f"generation {holder.generation} was not its own: the checkpoint sensor sees to it")
    other = _answers(instance, run.run_id, _failure_sensor_name(pipeline))
    if other is not None:
        return dg.SkipReason(f"{other} sees to it: {what}")
    tags = {TRIGGER: "sensor", REASON: f"run {run.run_id[:8]} failed: {what}"}
    return _restore(pipeline, holder.generation, tags, f"{pipeline.name}-{restore_key(holder.generation)}")


def _failure_sensor_name(pipeline: Pipeline) -> str:
    return f"{pipeline.name}_run_failure_sensor"


def lease_watchdog(pipeline: Pipeline, settings: Settings, keys: Sequence[dg.AssetKey]) -> dg.SensorDefinition:
    """Return the sensor that compares the lease with Dagster's runs, and the age of waiting input with what is
    allowed."""

    @dg.sensor(
        name=f"{pipeline.name}_lease_watchdog",
        minimum_interval_seconds=_WATCH_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            f"Marks runs of {pipeline.name} as failed whose coordinator is gone, ends a coordinator whose run was taken"
            " from it, and says when input is overdue."
        ),
    )
    def watch(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        seen = json.loads(context.cursor) if context.cursor else {}
        sight = decisions.observe(pipeline, settings, Runs.seen_by(context, pipeline, settings, keys).unfinished())
        if not sight.waiting:
            seen["waits"] = None
        elif not seen.get("waits") or seen["waits"][0] != sight.head:
            seen["waits"] = [sight.head, time.time()]
        memory, alive = decisions.watched(sight, SensorMemory.from_json(seen.get("memory")))
        holder, reasons = sight.holder, [*_end_dead(context, sight.unfinished)]
        if holder is None:
            reasons.append("there was no coordinator yet")
        elif alive:
            reasons.append(f"generation {holder.generation} is alive (process {holder.pid} on {holder.host})")
            silent = decisions.silent_for(sight, memory)
            if silent:
                reasons.append(
                    f"but its heart has not beaten for {silent:.0f} s: it hangs (docs/playbooks/coordinator-hung.md)"
                )
            orphan = _is_over(context.instance, holder.run_id)
            if (
                orphan and seen.get("orphan") == holder.generation
            ):  # seen twice in a row, so it is not just about to end
                _ask_to_end(open_storage(pipeline, settings)[0])
                reasons.append("its run in Dagster is over: asked it to end")
            seen["orphan"] = holder.generation if orphan and "asked it to end" not in reasons[-1] else None
        elif holder.stopped:
            reasons.append(f"generation {holder.generation} {holder.outcome}")
        else:
            reasons.append(f"generation {holder.generation} died")
            if holder.run_id in sight.unfinished:
                _end(context, holder.run_id)
                reasons.append(f"run {holder.run_id[:8]} is marked as failed")
        overdue = checks.on_time(pipeline, settings, seen["waits"] and seen["waits"][1])
        before = checks.newest(context.instance, overdue.asset_check_key)
        if overdue.passed != (before is None or before.passed):  # a check that never said anything has not failed
            checks.report(context.instance, [overdue])
        reasons += _answer_red(context.instance, pipeline, settings, sight, seen)
        reasons.append(overdue.description or "")
        seen |= {"memory": memory.to_json()}
        context.update_cursor(json.dumps(seen))
        return dg.SkipReason("; ".join(reasons))

    return watch


def _ask_to_end(storage: Storage) -> None:
    """Ask a coordinator for its end whose run is over; one that hangs does not come to it, and is asked once."""
    if all(request.kind != requests.STOP for request in requests.pending(storage)):
        requests.send(storage, Request(requests.STOP, trigger="watchdog", reason="its run in Dagster is over"))


def _answer_red(
    instance: dg.DagsterInstance,
    pipeline: Pipeline,
    settings: Settings,
    sight: decisions.Sight,
    seen: dict[str, Any],
) -> list[str]:
    """Answer checks that this sensor has seen red, if a newer checkpoint does, and describe the answers.

    Dagster's own runs answer red checks themselves; other runs cannot.

    Args:
        seen: The watchdog's memory.
    """
    if all(checks.red(instance, pipeline, name) is None for name in (checks.LAST_RUN, checks.RESTORABLE)):
        seen.pop("red_at", None)
        return []
    head = open_storage(pipeline, settings)[1].head()
    at = int(head.id) if head is not None else 0
    if at <= seen.setdefault("red_at", at) or head is None or head.kind != EPOCH or sight.held is not None:
        return []
    given = checks.answers(instance, pipeline, settings, head)
    checks.report(instance, given)
    return [f"{evaluation.check_name} is green: {evaluation.description}" for evaluation in given]


def _run_key(pipeline: Pipeline, decision: Decision) -> str:
    return f"{pipeline.name}-{decision.key}"


def _restore(pipeline: Pipeline, generation: int, tags: dict[str, str], run_key: str) -> dg.RunRequest:
    config = dg.RunConfig(ops={f"{pipeline.name}_restore": RestoreConfig(generation=int(generation))})
    return dg.RunRequest(
        run_key=run_key,
        job_name=restore_job_name(pipeline),
        run_config=config,
        tags=tags,
    )


def _note_cancelled(
    instance: dg.DagsterInstance,
    pipeline: Pipeline,
    settings: Settings,
    memory: SensorMemory,
    cancelled: dg.RunRecord,
    *,
    alone: bool,
) -> SensorMemory:
    """Note, once, that a person has cancelled the newest run of the pipeline: then nobody but a person begins again.

    The tick may come long after: the sensor was off, or the daemon dead. Whoever has begun again meanwhile did so
    without Dagster, since the run is its newest. While such a coordinator has not committed an epoch nothing is noted.

    Args:
        alone: No other run of Dagster's is queued or running.
    """
    run_id = cancelled.dagster_run.run_id
    if memory.cancelled == run_id:
        return memory
    storage, registry = open_storage(pipeline, settings)
    ended, holder, head = cancelled.end_time, lease.read(storage), registry.head()
    goes_on = (
        ended is not None
        and head is not None
        and head.kind == EPOCH
        and head.completed_at.timestamp() > ended
        and _is_foreign(instance, head.run_id)
    )
    if not goes_on and holder is not None and lease.alive(holder) and _is_foreign(instance, holder.run_id):
        return memory
    return decisions.note_cancelled(pipeline, settings, memory, run_id, alone=alone and not goes_on)


def _is_foreign(instance: dg.DagsterInstance, run_id: str | None) -> bool:
    """Return whether a coordinator is none of this Dagster's runs."""
    return run_id is None or instance.get_run_by_id(run_id) is None


def _answers(instance: dg.DagsterInstance, run_id: str, sensor: str) -> str | None:
    """Return the sensor that follows up a run that did not end well; None if this sensor does.

    Sensors tick beside each other, and what one asks for becomes a run only once its tick is over. If two have looked
    before either wrote its name, both read the same name a moment later: the last one written.
    """
    run = instance.get_run_by_id(run_id)
    if run is not None and _answered_by(run) is None:
        instance.add_run_tags(run_id, {ANSWERED_BY: f"{sensor}|{run_id}"})
        time.sleep(_BESIDE_SECONDS)
        run = instance.get_run_by_id(run_id)
        if run is not None and _answered_by(run) == sensor:
            instance.report_engine_event(f"{sensor} sees to what follows this run.", run)
    other = _answered_by(run) if run is not None else None
    return None if other == sensor else other


def _answered_by(run: dg.DagsterRun) -> str | None:
    """Return the sensor that answers a run. A mark that the run has copied from the run that it repeats does not
    count."""
    sensor, _, answered = (tag_of(run, ANSWERED_BY) or "").partition("|")
    return sensor if answered == run.run_id else None


def _end_dead(context: dg.SensorEvaluationContext, run_ids: Sequence[str]) -> Iterator[str]:
    """Mark runs as failed whose process on this host is gone, including runs that held no lease. Yields what was done,
    in words.
    """
    for run_id in run_ids:
        run = context.instance.get_run_by_id(run_id)
        if run is not None and _is_gone(_process(run)):
            _end(context, run_id)
            yield f"run {run_id[:8]} is marked as failed: its process is gone"


def _process(run: dg.DagsterRun) -> tuple[str, str, str, str]:
    """Host, pid, birth and pid namespace of a run's process, each empty if the run has not recorded it.

    Dagster copies all tags of a run to those that repeat it, so a record of another run does not count.
    """
    process = tag_of(run, PROCESS) or ""
    host, pid, born, pids, whose = [*process.split("|"), "", "", "", "", ""][:5]
    return (host, pid, born, pids) if whose in ("", run.run_id) else ("", "", "", "")


def _is_gone(process: tuple[str, str, str, str]) -> bool:
    """Return whether a run's process is gone.

    A process of an earlier boot is: without a lease no heartbeat would ever tell.
    """
    host, pid, born, pids = process
    if not pid.isdigit():
        return False
    return processes.process_lives(host, int(pid), born, pids) is False or processes.is_of_earlier_boot(host, born)


def _raised(failed: Any) -> str | None:
    """Return the unforeseen error that ended a step, on one line; None if it was one of Weir's, or a signal."""
    if failed.user_failure_data is not None or failed.error_source.value != _BY_CODE or failed.error.cause is None:
        return None
    return next(iter(redacted(failed.error.cause.message).strip().splitlines()), None)


def _how_it_ended(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """Describe in which process a run was, and which signal ended it if Dagster's code server saw that."""
    host, pid, *_ = _process(instance.get_run_by_id(run.run_id) or run)
    process = f"run {run.run_id[:8]}, process {pid} on {host}," if pid else f"run {run.run_id[:8]}"
    records = instance.get_records_for_run(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT).records
    for record in reversed(records):
        event = record.event_log_entry.dagster_event
        ended = _ENDED.search((event.message if event is not None else None) or "")
        if ended is not None:
            return f"{process} {ended[0]}"
    return f"{process} is gone; by which signal nobody saw"


def _is_over(instance: dg.DagsterInstance, run_id: str | None) -> bool:
    """Return whether Dagster regards a run as ended. A coordinator that Dagster did not start has no run."""
    run = instance.get_run_by_id(run_id) if run_id else None
    return run is not None and run.is_finished


def _end(context: dg.SensorEvaluationContext, run_id: str) -> None:
    """Mark a run as failed whose process is gone. The default launcher cannot tell, but the lease can."""
    run = context.instance.get_run_by_id(run_id)
    if run is not None and not run.is_finished:
        context.log.warning(f"run {run_id} is marked as failed: the process of its coordinator is gone")
        context.instance.report_run_failed(run, "The process of its coordinator is gone, says the pipeline's lease.")
