"""The commands that look at a pipeline: `status`, `checkpoints`, `savepoints`. They are asked often, so they import little."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, TypedDict

from rich.markup import escape

from state_ops.checkpoints.registry import Registry
from state_ops.coordination import gate_hold, lease, publishing_refused, restore_progress, suspension
from state_ops.coordination.gate_hold import GateHold
from state_ops.coordination.lease import Lease
from state_ops.coordination.publishing_refused import RefusedPublication
from state_ops.coordination.restore_progress import Restoring
from state_ops.coordination.suspension import Suspension
from state_ops.counts import counted
from state_ops.facts import FLAT, Facts
from state_ops.ids import CheckpointId
from state_ops.moments import from_micros, to_the_second
from state_ops.records.checkpoint import ROWS_LOST, ROWS_QUARANTINED, Checkpoint, rows_lost
from state_ops.records.pins import SAVEPOINT, Pin
from state_ops.records.publications import before_first, unpublished
from state_ops.storage.storage import Storage
from weir.cli.console import Json, Name, answer, no_directory, out, print_json, print_table, prints, short, waiting
from weir.connectors.delta.table_commit import table_path
from weir.definition import Pipeline
from weir.loading import find
from weir.ownership import backlog, hold_causes
from weir.ownership.pipeline_storage import open_storage, readers
from weir.settings.configuration import Settings
from weir.sources.directory_watch import DELIVERED_AGAIN
from weir.timings import bottleneck

_FILES_SHOWN = 10


class CoordinatorFacts(TypedDict):
    """The run that coordinates a pipeline, or the last one that did.

    Attributes:
        alive: Whether it runs; null: that cannot be told from this host.
        outcome: How the last run ended: drained, stopped or cancelled.
        died: Whether the last run ended without a word, as a killed process does.
        generation: Of the newest owner; it alone may commit.
    """

    alive: bool | None
    host: str | None
    pid: int | None
    run_id: str | None
    outcome: str | None
    died: bool
    generation: int


def coordinator_facts(holder: Lease | None, alive: bool | None, generation: int) -> CoordinatorFacts:
    """Return who coordinates a pipeline, for programs."""
    return {
        "alive": alive,
        "host": holder.host if holder else None,
        "pid": holder.pid if holder else None,
        "run_id": holder.run_id if holder else None,
        "outcome": holder.outcome if holder else None,
        "died": holder is not None and alive is False and not holder.stopped,
        "generation": generation,
    }


class LastCheckpoint(TypedDict):
    """The newest checkpoint.

    Attributes:
        bottleneck: What took most of the time between triggering and commit.
        totals: Counters since the pipeline's first epoch.
    """

    id: int
    completed_at: str
    age_seconds: float
    trigger: str
    reason: str
    generation: int
    bottleneck: str | None
    bytes_total: int
    bytes_new: int
    totals: dict[str, Any]


class Unpublished(TypedDict):
    """Rows that are committed and not in a sink, as far as the registry knows.

    Attributes:
        checkpoints: Of these rows, oldest first.
        why: Why the last try to publish them failed; null: nobody knows.
        since: When it failed.
    """

    checkpoints: list[int]
    why: str | None
    since: str | None


class Published(TypedDict):
    """The rows that a sink has.

    Attributes:
        last_published: The newest checkpoint whose rows are in it.
    """

    last_published: int | None
    unpublished: Unpublished | None


class TableFacts(Published):
    """A table."""

    name: str
    path: str


class SinkFacts(Published):
    """A sink that is no table."""

    name: str
    kind: str


class Status(TypedDict):
    """A pipeline as it is now.

    Attributes:
        halted: That a person has ended the pipeline.
        restoring: Fetches of state that are going on.
        held: What holds the pipeline: a gate, or an input that cannot be read.
        lag: By source, how much waits: null where that cannot be told.
        units: By source, what is counted there where it is not files.
        missing: By source, a directory that does not exist.
        unapplied: By stage, rows of the newest checkpoint that it has still to apply.
    """

    pipeline: str
    storage: str
    coordinator: CoordinatorFacts
    halted: Suspension | None
    last_checkpoint: LastCheckpoint | None
    rows_lost: int
    rows_quarantined: int
    restoring: list[dict[str, Any]]
    held: dict[str, Any] | None
    lag: dict[str, int]
    units: dict[str, str]
    unreachable: dict[str, str]
    missing: dict[str, str]
    delivered_again: dict[str, list[str]]
    set_aside: dict[str, Any]
    sources: dict[str, str]
    unapplied: dict[str, int]
    watermarks: dict[str, str]
    tables: list[TableFacts]
    sinks: list[SinkFacts]


@dataclass(frozen=True, slots=True)
class Listed(Facts):
    """A completed checkpoint that is retained.

    Attributes:
        bottleneck: What took most of the time between triggering and commit.
        named: Its savepoints and branches.
    """

    checkpoint: Annotated[Checkpoint, FLAT]
    bottleneck: str | None
    named: list[str]


@prints(Status)
def status(pipeline: Name, json: Json = False) -> None:
    """Show whether a coordinator lives, the last checkpoint, what waits, and where the tables are."""
    definition, settings = find(pipeline)
    with waiting("asking the storage and the sources"):
        facts = status_of(definition, settings)
    if json:
        print_json(facts)
        return
    print_table((title, escape(text)) for title, text in _lines(pipeline, facts))
    if facts["delivered_again"]:
        out.print(f"\n{escape(DELIVERED_AGAIN)}")
    if facts["held"] is not None:
        out.print(f"\n{escape(facts['held']['message'])}")
        for name, files in facts["held"]["files"].items():
            directory = short(facts["sources"].get(name, name))
            piece = "part" if name in facts["units"] else "file"
            out.print(escape(f"  {piece}s: {counted(len(files), piece)} in {directory}: {_listed(files)}"))


_ALIVE = {True: "running", False: "not running", None: "unknown (on another host or in another container)"}


def _lines(pipeline: str, facts: Status) -> Iterator[tuple[str, str]]:
    """Return the facts of `status_of` as lines for people: the subject of each line, and its text."""
    head, holder, suspended = facts["last_checkpoint"], facts["coordinator"], facts["halted"]
    if facts["held"] is not None:
        yield "held", _held(facts["held"])
    where = f"  (process {holder['pid']} on {holder['host']})" if holder["alive"] else ""
    yield "coordinator", _ALIVE[holder["alive"]] + where
    if holder["died"]:
        whose = f"process {holder['pid']} on {holder['host']}, generation {holder['generation']}"
        yield "died", f"the last run ended without a word ({whose}): weir run {pipeline} goes on where it was"
    if suspended is not None:
        how = f"{suspended.how} by a person at {to_the_second(suspended.when)} ({suspended.why})"
        yield "halted", f"{how}: weir resume {pipeline}"
    if head is None:
        yield "checkpoint", f"none yet: weir run {pipeline}"
    else:
        yield "checkpoint", f"{head['id']}, {head['age_seconds']:.0f} s ago, by {head['trigger']} ({head['reason']})"
        yield "state", f"{head['bytes_total']:,} bytes, of which {head['bytes_new']:,} new"
        ended = " (of the last run)" if holder["alive"] is False else ""
        yield "bottleneck", f"{head['bottleneck']}{ended}" if head["bottleneck"] else "none"
    if facts["rows_lost"]:
        yield (
            "lost",
            f"{counted(facts['rows_lost'], 'row', 'was', 'were')} read, and lost with epochs that failed "
            f"(at most once)",
        )
    if facts["rows_quarantined"]:
        rows = counted(facts["rows_quarantined"], "row")
        yield "quarantined", f"{rows}, set aside since the pipeline began: they are in tables <stage>_quarantine"
    for restoring in facts["restoring"]:
        whose = f"{restoring['stage']}, subtask {restoring['subtask']}, on" if restoring["stage"] else "on"
        progress = restore_progress.described([Restoring(**restoring)])
        yield "restoring", f"{whose} {restoring['host']}: {progress} at {to_the_second(restoring['at'])}"
    for name, number in facts["lag"].items():
        place = short(facts["sources"][name])
        missing, problem = name in facts["missing"], facts["unreachable"].get(name)
        unit = facts["units"].get(name, "file")
        seen = no_directory(place) if missing else f"{counted(number, unit)} in {place}"
        yield "waiting", f"not known in {place}: {problem}" if problem else seen
    for name, files in facts["delivered_again"].items():
        place = short(facts["sources"][name])
        again = f"{counted(len(files), 'file')} in {place}, delivered again after being read: {_listed(files)}"
        yield "not read", again
    for name, aside in facts["set_aside"].items():
        last = f"the last: {aside['last']['name']}: {aside['last']['reason']}"
        yield "set aside", f"{counted(aside['files'], 'file')} of {name}, {last}"
    for uid, number in facts["unapplied"].items():
        if number:  # with 0 rows only barriers are left to pass on
            yield "unapplied", f"{counted(number, 'row')} in front of {uid}"
    for uid, moment in facts["watermarks"].items():
        yield "watermark", f"{uid}: {moment}"
    for sink in (*facts["tables"], *facts["sinks"]):
        if sink["unpublished"] is not None:
            ids, why = sink["unpublished"]["checkpoints"], sink["unpublished"]["why"]
            because = f": {why}" if why is not None else ", or that is not recorded yet"
            some = f"since checkpoint {ids[0]}, {counted(len(ids), 'checkpoint')}"
            yield "unpublished", f"{sink['name']} lacks committed rows {some}{because}"
    for table in facts["tables"]:
        yield "table", f"{table['name']}: {short(table['path'])}"
    for sink in facts["sinks"]:
        yield "sink", f"{sink['name']}: {sink['kind']}, {sink['last_published'] or 'nothing'} published last"


def _listed(names: Sequence[str]) -> str:
    """Return the first names, with an ellipsis if there are more."""
    return ", ".join(names[:_FILES_SHOWN]) + (", ..." if len(names) > _FILES_SHOWN else "")


def _held(note: dict[str, Any]) -> str:
    """Return what holds the pipeline, on one line.

    Args:
        note: A gate hold as `GateHold.to_dict` gives it.
    """
    if note["error"] == gate_hold.GATE:
        by = f" by a gate of {note['stage']}" if note["stage"] else ""
        return f"since {to_the_second(note['when'])}, epoch {note['epoch']}{by}: see below"
    return f"{GateHold.from_dict(note).subject}, since {to_the_second(note['when'])}: see below"


def status_of(pipeline: Pipeline, settings: Settings) -> Status:
    """Return what `weir status` says, JSON-ready. It only reads, and starts no JVM."""
    storage, registry = open_storage(pipeline, settings)
    head, holder = registry.head(), lease.read(storage)
    sources = readers(pipeline, settings)
    tables, sinks = _sinks(pipeline, storage, registry, head)
    holds, suspended = hold_causes.standing(storage, head, sources), suspension.read(storage)
    arrived = backlog.arrivals(pipeline, settings, head)
    waiting = {name: arrivals.waiting for name, arrivals in arrived.items()}
    unreachable = {name: arrivals.problem for name, arrivals in arrived.items() if arrivals.problem is not None}
    return {
        "pipeline": pipeline.title,
        "storage": storage.uri,
        "coordinator": coordinator_facts(holder, lease.alive(holder), registry.generation()),
        "halted": suspended,
        "last_checkpoint": None if head is None else _brief(head),
        "rows_lost": _rows_lost(head, lease.alive(holder)),
        "rows_quarantined": head.totals.get(ROWS_QUARANTINED, 0) if head is not None else 0,
        "restoring": [fetch.to_dict() for fetch in _restoring(storage, head)],
        "held": None if holds is None else holds.to_dict(),
        "lag": waiting,
        "units": {name: arrivals.unit for name, arrivals in arrived.items() if arrivals.unit != "file"},
        "unreachable": unreachable,
        "missing": backlog.missing(sources, waiting),
        "delivered_again": {
            name: [file.name for file in arrivals.again] for name, arrivals in arrived.items() if arrivals.again
        },
        "set_aside": {
            name: position["set_aside"]
            for name, position in (head.offsets if head else {}).items()
            if position.get("set_aside")
        },
        "sources": {name: reader.location for name, reader in sources.items()},
        "unapplied": dict(backlog.unapplied(head)),
        "watermarks": {
            uid: from_micros(moment).isoformat() for uid, moment in (head.watermarks if head else {}).items()
        },
        "tables": tables,
        "sinks": sinks,
    }


def _sinks(
    pipeline: Pipeline, storage: Storage, registry: Registry, head: Checkpoint | None
) -> tuple[list[TableFacts], list[SinkFacts]]:
    """Return the tables and the other sinks, with what each has and what it lacks."""
    publications = registry.publications()  # before the checkpoints, which come first
    lacking = unpublished(registry.checkpoints(), publications)
    refused = publishing_refused.read(storage) if lacking else {}
    return (
        [
            {
                "name": sink.name,
                "path": storage.full(table_path(sink.name)),
                **_published(registry, head, sink.name, lacking, refused),
            }
            for sink in pipeline.sinks_shown(head.sinks if head else ())
            if pipeline.capabilities(sink).has_versions
        ],
        [
            {"name": sink.name, "kind": sink.kind, **_published(registry, head, sink.name, lacking, refused)}
            for sink in pipeline.sinks
            if not pipeline.capabilities(sink).has_versions
        ],
    )


def _published(
    registry: Registry,
    head: Checkpoint | None,
    sink: str,
    lacking: Mapping[str, tuple[CheckpointId, ...]],
    refused: Mapping[str, RefusedPublication],
) -> Published:
    """Return what a sink has, and what is committed and not yet published in it."""
    ids = lacking.get(sink)
    if not ids:
        return {"last_published": head.published(sink) if head else None, "unpublished": None}
    note = refused.get(sink)
    known = note is not None and note.checkpoint in ids
    return {
        "last_published": before_first(registry.checkpoints(), sink, ids),
        "unpublished": {
            "checkpoints": list(ids),
            "why": note.why if note is not None and known else None,
            "since": note.when if note is not None and known else None,
        },
    }


def _rows_lost(head: Checkpoint | None, alive: bool | None) -> int:
    """Count the rows that no epoch has applied, and none will."""
    if head is None or alive is False:
        return rows_lost(head)
    return head.totals.get(ROWS_LOST, 0)


def _restoring(storage: Storage, head: Checkpoint | None) -> list[Restoring]:
    """Return the fetches of state that are going on.

    Notes of processes that died are left out if their epoch has completed since.
    """
    fetches = [
        fetch
        for fetch in restore_progress.read(storage)
        if fetch.epoch is None or head is None or fetch.epoch > head.id
    ]
    return sorted(fetches, key=lambda fetch: (fetch.stage or "", fetch.subtask or 0))


def _brief(head: Checkpoint) -> LastCheckpoint:
    return {
        "id": head.id,
        "completed_at": head.completed_at.isoformat(),
        "age_seconds": round((datetime.now(UTC) - head.completed_at).total_seconds(), 1),
        "trigger": head.trigger,
        "reason": head.reason,
        "generation": head.generation,
        "bottleneck": bottleneck(head.ms),
        "bytes_total": head.bytes_total,
        "bytes_new": head.bytes_new,
        "totals": head.totals,
    }


@prints(list[Listed])
def checkpoints(pipeline: Name, json: Json = False) -> None:
    """List the completed checkpoints that are retained, oldest first."""
    definition, settings = find(pipeline)
    _, registry = open_storage(definition, settings)
    with waiting("reading the registry"):
        completed, pins = registry.checkpoints(), registry.pins()
    names = {row.commit_id: [pin.name for pin in pins if pin.commit_id == row.commit_id] for row in completed}
    if json or not completed:
        facts = [Listed(row, bottleneck(row.ms), names[row.commit_id]) for row in completed]
        answer(json, facts, f"{pipeline} has no checkpoint yet: weir run {pipeline}")
        return
    numbers = ("id", "parent", "rows", "files new/total", "state bytes new/total", "ms", "gen")
    print_table(
        (_cells(row, names[row.commit_id]) for row in completed),
        ("id", "parent", "completed", "trigger", *numbers[2:6], "bottleneck", "gen", "named"),
        right=numbers,
    )


def _cells(checkpoint: Checkpoint, names: list[str]) -> tuple[str, ...]:
    stages = checkpoint.operators.values()
    return (
        str(checkpoint.id),
        str(checkpoint.parent_id or "-"),
        f"{checkpoint.completed_at:%Y-%m-%d %H:%M:%S}",
        checkpoint.trigger,
        f"{sum(part['rows'] for part in checkpoint.slice.values()):,}",
        f"{sum(stage.files_new for stage in stages)}/{sum(stage.files_total for stage in stages)}",
        f"{checkpoint.bytes_new:,}/{checkpoint.bytes_total:,}",
        f"{checkpoint.ms.get('to_commit', 0):.0f}",
        bottleneck(checkpoint.ms) or "-",
        str(checkpoint.generation),
        escape(", ".join(names)),
    )


@prints(list[Pin])
def savepoints(pipeline: Name, json: Json = False) -> None:
    """List the savepoints of a pipeline, oldest first."""
    definition, settings = find(pipeline)
    _, registry = open_storage(definition, settings)
    pins = [pin for pin in registry.pins() if pin.kind == SAVEPOINT]
    if json or not pins:
        none = escape(f"{pipeline} has no savepoint: weir savepoint {pipeline} --name NAME")
        answer(json, pins, none)
        return
    print_table(
        (
            (escape(pin.name), str(pin.checkpoint_id), f"{pin.created_at:%Y-%m-%d %H:%M:%S}", escape(pin.reason))
            for pin in pins
        ),
        ("name", "checkpoint", "taken", "reason"),
    )
