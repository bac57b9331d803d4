"""The commands that look at a pipeline: `status`, `checkpoints`. They are asked often, so they import little."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

from rich.markup import escape
from rich.table import Table

from configs.settings import Settings
from pipelines.cli.console import Json, Name, counted, no_directory, out, print_json, short
from pipelines.loading import find
from pipelines.runtime.definition import Pipeline
from pipelines.runtime.ownership import backlog, hold_causes
from pipelines.runtime.ownership.pipeline_storage import open_storage, readers
from pipelines.runtime.sinks.delta import table_path
from pipelines.runtime.sources.files import DELIVERED_AGAIN
from pipelines.runtime.timings import bottleneck
from state_ops.checkpoints.checkpoint import Checkpoint, from_micros
from state_ops.coordination import gate_hold, lease, restore_progress, suspension
from state_ops.coordination.gate_hold import GateHold
from state_ops.coordination.restore_progress import Restoring
from state_ops.storage.storage import Storage

_FILES_SHOWN = 10


def status(pipeline: Name, json: Json = False) -> None:
    """Whether a coordinator lives, the last checkpoint, what waits, and where the tables are."""
    found, settings = find(pipeline)
    facts = status_of(found, settings)
    if json:
        print_json(facts)
        return
    head, holder = facts["last_checkpoint"], facts["coordinator"]
    alive = {True: "running", False: "not running", None: "unknown (on another host or in another container)"}[
        holder["alive"]
    ]
    where = f"  (process {holder['pid']} on {holder['host']})" if holder["alive"] else ""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    if facts["held"] is not None:
        table.add_row("held", escape(_held(facts["held"])))
    table.add_row("coordinator", alive + where)
    if facts["halted"] is not None:
        halted = facts["halted"]
        table.add_row(
            "halted", f"{halted['how']} by a person at {halted['when']} ({halted['why']}): weir resume {pipeline}"
        )
    if head is None:
        table.add_row("checkpoint", f"none yet: weir run {pipeline}")
    else:
        table.add_row(
            "checkpoint", f"{head['id']}, {head['age_seconds']:.0f} s ago, by {head['trigger']} ({head['reason']})"
        )
        table.add_row("state", f"{head['bytes_total']:,} bytes, of which {head['bytes_new']:,} new")
        ended = " (of the last run)" if holder["alive"] is False else ""
        table.add_row("bottleneck", f"{head['bottleneck']}{ended}" if head["bottleneck"] else "none")
    for one in facts["restoring"]:
        whose = f"{one['stage']}, subtask {one['subtask']}, on" if one["stage"] else "on"
        here = restore_progress.described([Restoring(**one)])
        table.add_row("restoring", escape(f"{whose} {one['host']}: {here} at {one['at']}"))
    for name, files in facts["lag"].items():
        directory = short(facts["sources"][name])
        said = f"{counted(files, 'file')} in {directory}" if name not in facts["missing"] else no_directory(directory)
        table.add_row("waiting", escape(said))
    for name, names in facts["delivered_again"].items():
        shown = ", ".join(names[:_FILES_SHOWN]) + (", ..." if len(names) > _FILES_SHOWN else "")
        place = short(facts["sources"][name])
        again = f"{counted(len(names), 'file')} in {place}, delivered again after being read: {shown}"
        table.add_row("not read", escape(again))
    for name, left in facts["set_aside"].items():
        last = f"the last: {left['last']['name']}: {left['last']['reason']}"
        table.add_row("set aside", escape(f"{counted(left['files'], 'file')} of {name}, {last}"))
    for uid, rows in facts["unapplied"].items():
        if not rows:  # only barriers are left to pass
            continue
        table.add_row("unapplied", f"{rows:,} rows in front of {uid}")
    for uid, moment in facts["watermarks"].items():
        table.add_row("watermark", f"{uid}: {moment}")
    for entry in facts["tables"]:
        table.add_row("table", f"{entry['name']}: {short(entry['path'])}")
    out.print(table)
    if facts["delivered_again"]:
        out.print(f"\n{escape(DELIVERED_AGAIN)}")
    if facts["held"] is not None:
        out.print(f"\n{escape(facts['held']['message'])}")
        for name, read in facts["held"]["files"].items():
            shown = ", ".join(read[:_FILES_SHOWN]) + (", ..." if len(read) > _FILES_SHOWN else "")
            directory = short(facts["sources"].get(name, name))
            out.print(escape(f"  files: {counted(len(read), 'file')} in {directory}: {shown}"))


def _held(note: dict[str, Any]) -> str:
    """What holds the pipeline, on one line. note: as `GateHold.to_dict`."""
    if note["error"] == gate_hold.GATE:
        by = f" by a gate of {note['stage']}" if note["stage"] else ""
        return f"since {note['when']}, epoch {note['epoch']}{by}: see below"
    return f"{GateHold.from_dict(note).subject}, since {note['when']}: see below"


def status_of(pipeline: Pipeline, settings: Settings) -> dict[str, Any]:
    """What `weir status` says, JSON-ready. Reads only; starts no JVM."""
    storage, registry = open_storage(pipeline, settings)
    head, holder = registry.head(), lease.read(storage)
    sources = readers(pipeline, settings)
    holds, halted = hold_causes.standing(storage, head, sources), suspension.read(storage)
    arrived = backlog.arrivals(pipeline, settings, head)
    waiting = {name: len(found.fresh) for name, found in arrived.items()}
    return {
        "pipeline": pipeline.title,
        "storage": storage.uri,
        "coordinator": {
            "alive": lease.alive(holder),
            "host": holder.host if holder else None,
            "pid": holder.pid if holder else None,
            "run_id": holder.run_id if holder else None,
            "outcome": holder.outcome if holder else None,
            "generation": registry.generation(),
        },
        "halted": None if halted is None else dataclasses.asdict(halted),
        "last_checkpoint": None if head is None else _brief(head),
        "restoring": [one.to_dict() for one in _restoring(storage, head)],
        "held": None if holds is None else holds.to_dict(),
        "lag": waiting,
        "missing": backlog.missing(sources, waiting),
        "delivered_again": {
            name: [file.name for file in found.again] for name, found in arrived.items() if found.again
        },
        "set_aside": {
            name: position["set_aside"]
            for name, position in (head.offsets if head else {}).items()
            if position.get("set_aside")
        },
        "sources": {name: reader.directory for name, reader in sources.items()},
        "unapplied": dict(backlog.unapplied(head)),
        "watermarks": {
            uid: from_micros(moment).isoformat() for uid, moment in (head.watermarks if head else {}).items()
        },
        "tables": [
            {
                "name": sink.table,
                "path": storage.full(table_path(sink.table)),
                "last_published": (head.sinks.get(sink.table) or {}).get("id") if head else None,
            }
            for sink in pipeline.sinks
        ],
    }


def _restoring(storage: Storage, head: Checkpoint | None) -> list[Restoring]:
    """State that is being fetched, without what was said by processes that died in epochs which have ended since."""
    found = [one for one in restore_progress.read(storage) if one.epoch is None or head is None or one.epoch > head.id]
    return sorted(found, key=lambda one: (one.stage or "", one.subtask or 0))


def _brief(head: Checkpoint) -> dict[str, Any]:
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


def checkpoints(pipeline: Name, json: Json = False) -> None:
    """The completed checkpoints that are retained, oldest first."""
    found, settings = find(pipeline)
    _, registry = open_storage(found, settings)
    completed, pins = registry.checkpoints(), registry.pins()
    names = {row.commit_id: [pin.name for pin in pins if pin.commit_id == row.commit_id] for row in completed}
    if json:
        print_json(
            [{**_view(row), "bottleneck": bottleneck(row.ms), "named": names[row.commit_id]} for row in completed]
        )
        return
    if not completed:
        out.print(f"{pipeline} has no checkpoint yet: weir run {pipeline}")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in (
        "id",
        "parent",
        "completed",
        "trigger",
        "rows",
        "files new/total",
        "state bytes new/total",
        "ms",
        "bottleneck",
        "gen",
        "named",
    ):
        table.add_column(title, justify="left" if title in ("completed", "trigger", "bottleneck", "named") else "right")
    for row in completed:
        figures = row.operators.values()
        table.add_row(
            str(row.id),
            str(row.parent_id or "-"),
            row.completed_at.strftime("%Y-%m-%d %H:%M:%S"),
            row.trigger,
            f"{sum(part['rows'] for part in row.slice.values()):,}",
            f"{sum(f['files_new'] for f in figures)}/{sum(f['files_total'] for f in figures)}",
            f"{row.bytes_new:,}/{row.bytes_total:,}",
            f"{row.ms.get('to_commit', 0):.0f}",
            bottleneck(row.ms) or "-",
            str(row.generation),
            escape(", ".join(names[row.commit_id])),
        )
    out.print(table)


def _view(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint's row under the names that people use."""
    raw = checkpoint.to_dict()
    return {"id": raw.pop("id"), "parent": raw.pop("parent_id"), "durations_ms": raw.pop("ms"), **raw}
