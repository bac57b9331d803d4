"""Asset checks: gates on the tables that get the rows, and on the checkpoint whether the pipeline would come back.

A gate that looks at state or figures, or at rows that go to no sink, is a check of its stage.

Runs and sensors report verdicts as they learn of them. Executing a check from Dagster's pages asks again: a gate's
check shows what the newest checkpoint recorded, the others look at the pipeline.
"""

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import dagster as dg

from state_ops.coordination import gate_hold, lease
from state_ops.counts import agrees, counted
from state_ops.errors import WeirError, plainly
from state_ops.fsck.findings import Report
from state_ops.records.checkpoint import Checkpoint, stats_of
from weir.dagster import metadata
from weir.dagster.names import CHECKPOINT, DRILL, key, stage_key, table_key
from weir.definition import HOLD, QUARANTINE, ROWS, Gate, Pipeline, Stage
from weir.gates.evaluation import GateVerdict
from weir.inspection.state_reader import chosen
from weir.markdown import as_text
from weir.ownership import backlog
from weir.ownership.pipeline_storage import open_storage, readers
from weir.restore import restore
from weir.run import fsck
from weir.settings.configuration import Settings
from weir.sources.positions import Arrivals, in_words

LAST_RUN, ON_TIME, RESTORABLE, INPUT, WHOLE = "last_run", "on_time", "restorable", "input_is_there", "storage_is_whole"

# A run answers the first ones at its end, beside what it materializes: Dagster shows a verdict only until there is
# something newer. So what is proven less often stands on the drill, which is as rare.
_ON = {
    LAST_RUN: (CHECKPOINT, "The last run ended without an error."),
    ON_TIME: (CHECKPOINT, "No input waits longer than dagster.overdue_seconds without a checkpoint."),
    INPUT: (CHECKPOINT, "Sources are where they were read, and nothing has arrived where it would never be read."),
    RESTORABLE: (
        DRILL,
        "A checkpoint was fetched, every digest checked, opened, its keys where they belong, expectations met.",
    ),
    WHOLE: (DRILL, "Registry, snapshots and published tables hold what they say (weir fsck)."),
}
_SHOWN = 10


def specs(pipeline: Pipeline) -> list[dg.AssetCheckSpec]:
    """Return all checks of a pipeline except those of drills."""
    evaluations = [
        dg.AssetCheckSpec(name, asset=key(pipeline, asset), description=text) for name, (asset, text) in _ON.items()
    ]
    for stage in pipeline.stages:
        evaluations += [
            dg.AssetCheckSpec(
                name,
                asset=gate_asset(pipeline, stage, gate),
                description=f"`{gate.title}`: a gate of {stage.uid} on {gate.of}, before each commit.",
            )
            for name, gate in gate_names(stage)
        ]
    return evaluations


def gate_asset(pipeline: Pipeline, stage: Stage, gate: Gate) -> dg.AssetKey:
    """Return the asset that a gate is a check of: what gets the rows that it looks at; else the stage."""
    if gate.of == ROWS and stage.sink is not None:
        return table_key(pipeline, stage.sink.name)
    return stage_key(pipeline, stage.uid)


def gate_names(stage: Stage) -> list[tuple[str, Gate]]:
    """Return a name for each gate of a stage, from its expectation and column: column_values_to_be_between_dep_delay.
    Dagster takes letters and digits of ASCII alone."""
    named: dict[str, Gate] = {}
    for gate in stage.gates:
        column = next((str(value) for name, value in gate.arguments if name == "column"), "")
        snake = re.sub(r"(?<!^)(?=[A-Z])", "_", gate.expectation.removeprefix("Expect")).lower()
        base = re.sub(r"\W+", "_", f"{snake}_{column}".strip("_"), flags=re.ASCII)
        same = sum(name == base or re.fullmatch(rf"{base}_\d+", name) is not None for name in named)
        numbered = (f"{base}_{number}" if number > 1 else base for number in itertools.count(same + 1))
        named[next(name for name in numbered if name not in named)] = gate
    return list(named.items())


def definition(pipeline: Pipeline, settings: Settings) -> dg.AssetChecksDefinition:
    """Yield the checks, each of which can be asked again by itself."""
    described = specs(pipeline)
    where = {spec.key: spec for spec in described}

    @dg.multi_asset_check(
        name=f"{pipeline.name}_checks",
        specs=described,
        can_subset=True,
        description=f"Asks again what is known of {pipeline.name}'s checkpoint and gates.",
    )
    def checks(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        for check in sorted(context.selected_asset_check_keys, key=str):
            evaluation = _asked(pipeline, settings, where[check])
            yield dg.AssetCheckResult(
                passed=evaluation.passed,
                asset_key=evaluation.asset_key,
                check_name=evaluation.check_name,
                metadata=evaluation.metadata,
                severity=evaluation.severity,
                description=evaluation.description,
            )

    return checks


def report(instance: dg.DagsterInstance, evaluations: Iterable[dg.AssetCheckEvaluation]) -> None:
    """Show verdicts that were reached outside of any run."""
    for evaluation in evaluations:
        instance.report_runless_asset_event(evaluation)


def newest(instance: dg.DagsterInstance, check: dg.AssetCheckKey) -> dg.AssetCheckEvaluation | None:
    """Return the last evaluation of a check; None if it never had one.

    A planned check of a run is no evaluation yet.
    """
    history = instance.event_log_storage.get_asset_check_execution_history(check, limit=20)
    events = [record.event.dagster_event for record in history if record.event is not None]
    evaluated = dg.DagsterEventType.ASSET_CHECK_EVALUATION
    evaluations = [event for event in events if event is not None and event.event_type == evaluated]
    return evaluations[0].asset_check_evaluation_data if evaluations else None


def red(instance: dg.DagsterInstance, pipeline: Pipeline, name: str) -> dg.AssetCheckEvaluation | None:
    """Return the last evaluation of one of the checks that every pipeline has, if it failed; else None."""
    evaluation = newest(instance, dg.AssetCheckKey(key(pipeline, _ON[name][0]), name))
    return evaluation if evaluation is not None and not evaluation.passed else None


# -- verdicts


def _asked(pipeline: Pipeline, settings: Settings, spec: dg.AssetCheckSpec) -> dg.AssetCheckEvaluation:
    """Evaluate a check as `again` does; red if that raises, so that the other checks are evaluated all the same."""
    try:
        return again(pipeline, settings, spec)
    except (OSError, WeirError) as error:
        return dg.AssetCheckEvaluation(
            asset_key=spec.asset_key,
            check_name=spec.name,
            passed=False,
            description=error.what if isinstance(error, WeirError) else plainly(error),
            metadata=of_error(error) if isinstance(error, WeirError) else {},
        )


def again(pipeline: Pipeline, settings: Settings, spec: dg.AssetCheckSpec) -> dg.AssetCheckEvaluation:
    """Evaluate one check by looking now."""
    ask: dict[str, Callable[[Pipeline, Settings], dg.AssetCheckEvaluation]] = {
        LAST_RUN: of_last_run,
        ON_TIME: on_time,
        RESTORABLE: restorable,
        INPUT: input_is_there,
        WHOLE: storage_is_whole,
    }
    if spec.name in ask and spec.asset_key == key(pipeline, _ON[spec.name][0]):
        return ask[spec.name](pipeline, settings)
    storage, registry = open_storage(pipeline, settings)
    head = registry.head()
    holds = gate_hold.read(storage, head.id if head is not None else None)
    refused = (
        [GateVerdict.from_dict(str(facts["stage"]), facts) for facts in holds.verdicts] if holds is not None else []
    )
    verdicts = [
        evaluation
        for stage in pipeline.stages
        for evaluation in (*recorded(pipeline, head, stage), *of_gates(pipeline, stage, refused))
    ]
    by_check = {evaluation.asset_check_key: evaluation for evaluation in verdicts}  # what holds the pipeline is newer
    if spec.key in by_check:
        return by_check[spec.key]
    description = "the newest checkpoint handed out no rows for it to look at"
    return dg.AssetCheckEvaluation(asset_key=spec.asset_key, check_name=spec.name, passed=True, description=description)


def verdict(
    pipeline: Pipeline, name: str, passed: bool, description: str, shown: Mapping[str, Any] | None = None
) -> dg.AssetCheckEvaluation:
    """Return a verdict of one of the checks that every pipeline has."""
    return dg.AssetCheckEvaluation(
        asset_key=key(pipeline, _ON[name][0]),
        check_name=name,
        passed=passed,
        description=description,
        metadata=dict(shown or {}),
    )


def failed(pipeline: Pipeline, name: str, error: WeirError) -> dg.AssetCheckEvaluation:
    """Return the verdict of a check that ended with an error."""
    return verdict(pipeline, name, False, error.what, of_error(error))


def of_error(error: WeirError) -> dict[str, dg.MetadataValue]:
    """Return the error as metadata: what happened, where, and what to do next."""
    shown = {"what": error.what, "where": error.where, "next": error.next}
    return {name: dg.MetadataValue.text(text) for name, text in shown.items() if text}


def of_gates(pipeline: Pipeline, stage: Stage, verdicts: Iterable[GateVerdict]) -> list[dg.AssetCheckEvaluation]:
    """Return the verdicts of a stage's gates. Verdicts of one gate from several epochs are shown as one."""
    mine = [each for each in verdicts if each.stage == stage.uid]
    evaluations = []
    for name, gate in gate_names(stage):
        several = [each for each in mine if each.of == gate.of and gate.is_titled(each.gate)]
        if several:
            bad = [each for each in several if not each.passed]
            evaluations.append(_of_gate(pipeline, stage, name, gate, several, bad))
    return evaluations


def _of_gate(
    pipeline: Pipeline, stage: Stage, name: str, gate: Gate, several: list[GateVerdict], bad: list[GateVerdict]
) -> dg.AssetCheckEvaluation:
    rows, unexpected = sum(each.rows for each in several), sum(each.unexpected for each in bad)
    shown: dict[str, Any] = {
        "expectation": dg.MetadataValue.text(gate.title),
        "looks at": f"{gate.of} of {stage.uid}",
        "if it fails": gate.on_failure,
        "epochs": len(several),
        "rows": rows,
        "rows unexpected": unexpected,
    }
    if bad:
        shown["sample"] = dg.MetadataValue.json(list(bad[-1].sample))
    return dg.AssetCheckEvaluation(
        asset_key=gate_asset(pipeline, stage, gate),
        check_name=name,
        passed=not bad,
        severity=dg.AssetCheckSeverity.ERROR if gate.on_failure == "hold" else dg.AssetCheckSeverity.WARN,
        description=_failed_in_words(stage, gate, replace(bad[-1], rows=rows, unexpected=unexpected))
        if bad
        else counted(rows, "row"),
        metadata=shown,
    )


def _failed_in_words(stage: Stage, gate: Gate, bad: GateVerdict) -> str:
    became = {
        HOLD: "the epoch is declined, and nothing of it is in the table or in state",
        QUARANTINE: f"such rows of its source are in {stage.uid}_quarantine",
    }.get(gate.on_failure, "the epoch went on")
    return f"{bad.outcome}; {became}"


def recorded(pipeline: Pipeline, row: Checkpoint | None, stage: Stage) -> list[dg.AssetCheckEvaluation]:
    """Return the verdicts of a stage's gates that a checkpoint, usually the newest, has recorded."""
    return of_gates(pipeline, stage, [GateVerdict.from_dict(stage.uid, raw) for raw in stats_of(row, stage.uid).gates])


def of_last_run(pipeline: Pipeline, settings: Settings) -> dg.AssetCheckEvaluation:
    """Evaluate how the last coordinator ended, as the lease says."""
    storage, _ = open_storage(pipeline, settings)
    holder = lease.read(storage)
    if holder is None:
        return verdict(pipeline, LAST_RUN, True, "it has not run yet")
    if not holder.stopped:
        alive = lease.alive(holder)
        who = f"process {holder.pid} on {holder.host}"
        state = {
            True: "is running",
            False: "died",
            None: "runs on another host or in another container, or died there",
        }[alive]
        return verdict(pipeline, LAST_RUN, alive is not False, f"generation {holder.generation} ({who}) {state}")
    return verdict(pipeline, LAST_RUN, holder.outcome != "failed", f"generation {holder.generation}: {holder.outcome}")


def on_time(pipeline: Pipeline, settings: Settings, since: float | None = None) -> dg.AssetCheckEvaluation:
    """Evaluate whether input waits for longer than it may. This lists the sources, and starts no JVM.

    Args:
        since: The moment, in seconds since 1970, from which on input has been seen to wait beside the newest
            checkpoint. Rows of a connector count from then, since they say no time. None: nobody has watched.
    """
    _, registry = open_storage(pipeline, settings)
    head = registry.head()
    try:
        arrived = {
            name: reader.look((head.offsets if head else {}).get(name))
            for name, reader in readers(pipeline, settings).items()
        }
    except WeirError as error:  # nobody can tell
        return failed(pipeline, ON_TIME, error)
    waiting = [file for of in arrived.values() for file in of.fresh]
    times = [file.mtime_ns / 1e9 if file.mtime_ns else since for file in waiting]
    oldest = min((moment for moment in times if moment is not None), default=None)
    for_seconds = 0.0 if oldest is None else max(0.0, time.time() - oldest)
    limit = settings.dagster.overdue_seconds
    count = sum(of.waiting for of in arrived.values())
    age = "nobody has watched for how long" if oldest is None else f"the oldest for {for_seconds:.0f} s"
    description = f"{_waiting(arrived)}, {age}" if waiting else "nothing is waiting"
    shown: dict[str, Any] = {**metadata.waiting(arrived)}
    if oldest is not None or not waiting:
        shown["seconds that the oldest waits"] = round(for_seconds, 1)
    return verdict(
        pipeline,
        ON_TIME,
        for_seconds <= limit or count <= settings.dagster.max_lag_files,
        description,
        {**shown, "dagster.overdue_seconds": limit},
    )


def restorable(pipeline: Pipeline, settings: Settings, at: int | str | None = None) -> dg.AssetCheckEvaluation:
    """Prove a checkpoint, by default the newest, and leave it on this host.

    Args:
        at: A checkpoint's id or a savepoint's name.
    """
    storage, registry = open_storage(pipeline, settings)
    if registry.head() is None:
        return verdict(pipeline, RESTORABLE, True, "there is no checkpoint yet")
    try:
        done = restore.restore(pipeline, settings, storage, registry, chosen(pipeline, registry, at), stored=True)
    except WeirError as error:
        return failed(pipeline, RESTORABLE, error)
    return verdict(
        pipeline,
        RESTORABLE,
        True,
        f"checkpoint {done.checkpoint_id}: {counted(done.files, 'file')}, {done.bytes_total:,} bytes",
        {
            "checkpoint": int(done.checkpoint_id),
            "files": done.files,
            "bytes": done.bytes_total,
            "bytes fetched": done.bytes_fetched,
            "bytes that were here": done.bytes_local + done.bytes_cached,
            "seconds": round(done.fetch_ms / 1000, 3),
            "expectations": done.expectations,
        },
    )


def answers(
    instance: dg.DagsterInstance, pipeline: Pipeline, settings: Settings, row: Checkpoint
) -> list[dg.AssetCheckEvaluation]:
    """Return new evaluations of red checks that a later checkpoint answers.

    The checks are that the last run failed, or that a checkpoint could not be restored.
    """
    given = []
    if red(instance, pipeline, LAST_RUN) is not None:
        goes_on = f"a run goes on since: checkpoint {row.id} is committed"
        given.append(verdict(pipeline, LAST_RUN, True, goes_on, {"checkpoint": int(row.id)}))
    damaged = red(instance, pipeline, RESTORABLE)
    repaired = _no_longer_damaged(pipeline, settings, row, damaged) if damaged is not None else None
    if repaired is not None:
        given.append(verdict(pipeline, RESTORABLE, True, repaired, {"checkpoint": int(row.id)}))
    return given


def _no_longer_damaged(
    pipeline: Pipeline, settings: Settings, row: Checkpoint, damaged: dg.AssetCheckEvaluation
) -> str | None:
    """Return why a red verdict on a checkpoint says nothing of this one; None if the damage is still here."""
    where = str(damaged.metadata["where"].value) if "where" in damaged.metadata else ""
    storage, registry = open_storage(pipeline, settings)
    named = [file for file in registry.files(row) if storage.full(file.path) in where]
    try:
        for file in named:
            storage.prove(file.path, file.digest)
    except WeirError:
        return None
    what = "names what was damaged, and that is whole again" if named else "does not name what was damaged"
    return f"checkpoint {row.id} is committed; it {what}"


def input_is_there(pipeline: Pipeline, settings: Settings) -> dg.AssetCheckEvaluation:
    """Evaluate whether sources can be read from the newest checkpoint on."""
    _, registry = open_storage(pipeline, settings)
    head = registry.head()
    try:
        for name, reader in readers(pipeline, settings).items():
            reader.check((head.offsets if head else {}).get(name))
    except WeirError as error:
        return failed(pipeline, INPUT, error)
    arrived = backlog.arrivals(pipeline, settings, head)
    gone = backlog.missing(readers(pipeline, settings), {name: of.waiting for name, of in arrived.items()})
    parts = [_waiting(arrived), *(f"{path} does not exist" for path in gone.values())]
    return verdict(pipeline, INPUT, True, "; ".join(parts), metadata.waiting(arrived))


def _waiting(arrived: Mapping[str, Arrivals]) -> str:
    """Return the beginning of a sentence about the waiting input of all sources: "3 files are waiting"."""
    return f"{in_words(arrived.values())} {agrees(sum(of.waiting for of in arrived.values()), 'is', 'are')} waiting"


def storage_is_whole(pipeline: Pipeline, settings: Settings, quick: bool = False) -> dg.AssetCheckEvaluation:
    """Run `weir fsck` as a check.

    Args:
        quick: Compare sizes only.
    """
    try:
        return of_report(pipeline, fsck.examine_and_note(pipeline, settings, quick=quick))
    except WeirError as error:
        return failed(pipeline, WHOLE, error)


def of_report(pipeline: Pipeline, report: Report) -> dg.AssetCheckEvaluation:
    """Evaluate a report of fsck. Leftovers and foreign files are no damage."""
    lines = [
        f"- {finding.kind} ({finding.severity}): {as_text(finding.path or finding.what)}"
        for finding in report.findings[:_SHOWN]
    ]
    more = len(report.findings) - _SHOWN
    damage = len(report.damage)
    shown: dict[str, Any] = {
        "checkpoints": len(report.checkpoints),
        "checkpoints intact": sum(checkpoint.intact for checkpoint in report.checkpoints),
        "damaged": damage,
        "findings": len(report.findings),
        "contents read": not report.quick,
    }
    if lines:
        shown["what"] = dg.MetadataValue.md("\n".join(lines + ([f"- ... and {more} more"] if more > 0 else [])))
        shown["next"] = dg.MetadataValue.text(f"weir fsck {pipeline.name} says what can be done about each")
    description = f"{damage} damaged" if damage else "whole"
    return verdict(pipeline, WHOLE, not damage, description, shown)
