"""The `weir` command. Exit codes: 0 done, 1 failed or found damage, 2 wrong usage or configuration."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO, cast

import structlog
import typer
from deltalake.exceptions import DeltaError
from rich.markup import escape
from rich.table import Table

from configs.redaction import redacted
from configs.settings import Settings, load
from pipelines.cli import branches, fsck, metrics, restore, savepoints, state, state_import, verify
from pipelines.cli.console import Json, Name, err, out, print_json, waiting
from pipelines.loading import find
from pipelines.runtime.definition import Pipeline
from pipelines.runtime.ownership import hold_causes
from pipelines.runtime.ownership.ownership import Ownership
from pipelines.runtime.ownership.pipeline_storage import open_storage, readers
from pipelines.runtime.ownership.savepoints import check_free
from pipelines.runtime.run import maintenance, progress
from pipelines.runtime.run import run as runtime
from pipelines.runtime.run.run import RunOptions
from pipelines.runtime.run.stopping import end
from pipelines.runtime.sinks.delta import table_path
from pipelines.runtime.sources.files import DELIVERED_AGAIN
from pipelines.runtime.timings import bottleneck
from state_ops.checkpoints.checkpoint import Checkpoint, from_micros
from state_ops.checkpoints.pending_checkpoint import Trigger
from state_ops.coordination import gate_hold, lease, requests, restore_progress, suspension
from state_ops.coordination.gate_hold import GateHold
from state_ops.coordination.requests import Request
from state_ops.coordination.restore_progress import Restoring
from state_ops.coordination.suspension import Suspension
from state_ops.errors import DISK_FULL, StageError, WeirError, page_about, plainly
from state_ops.storage import disks
from state_ops.storage.storage import Storage

app = typer.Typer(
    help="Keyed state for PySpark pipelines: exactly-once epochs, incremental snapshots, restores you can trust.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
state.app.command("import")(state_import.state_import)
app.add_typer(state.app, name="state")


_FILES_SHOWN = 10
_INTERRUPTED = 130
_SAID_WHEN_INTERRUPTED = "interrupted; the epoch in flight was discarded, everything committed stays"


def main() -> None:
    """Entry point: run the command, turn errors into messages and exit codes."""
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    _quiet_logs(debug)
    sys.exit(_guarded(app, debug))


def process() -> NoReturn:
    """`main` as a process of its own, which ends without tearing down native libraries: Arrow's threads may abort that
    (apache/arrow#34314), and a command that succeeded would exit with 134."""
    code = 0
    try:
        main()
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _guarded(command: Callable[..., Any], debug: bool) -> int:
    try:
        return int(command(standalone_mode=False) or 0)
    except WeirError as error:
        if debug:
            err.print(escape(_trace(error)))
        if isinstance(error, StageError) and error.traceback:
            err.print(escape(error.traceback.rstrip()))
        err.print(f"[bold red]error:[/] {escape(str(error))}")
        return error.exit_code
    except typer.Exit as done:
        if done.exit_code == _INTERRUPTED:  # what typer makes of a KeyboardInterrupt
            err.print(_SAID_WHEN_INTERRUPTED)
        return int(done.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        err.print(_SAID_WHEN_INTERRUPTED)
        return _INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message"):  # click's usage errors: typer carries its own copy of their classes
            err.print(f"[bold red]usage:[/] {escape(error.format_message())}")
            return 2
        if debug:
            err.print(escape(_trace(error)))
            return 1
        if isinstance(error, OSError | DeltaError):
            disk = _full_disk(error)
            where = f"  where: {escape(disk)}\n" if disk is not None else ""
            page = DISK_FULL if disk is not None else page_about(error)
            err.print(
                f"[bold red]error:[/] {escape(plainly(error))}\n{where}  next:  Look at the storage and the disk: {page}."
            )
            return 1
        err.print(
            f"[bold red]error:[/] {escape(plainly(error))}\n"
            "  next:  this was not foreseen; run the command again with --debug for the trace."
        )
        return 1


def _trace(error: BaseException) -> str:
    """The whole trace, redacted: errors of libraries in it repeat what a server has answered."""
    return redacted("".join(traceback.format_exception(error))).rstrip()


def _full_disk(error: Exception) -> str | None:
    """Which disk is full, if that is what an error comes from."""
    try:
        settings = load()
    except Exception:  # the error at hand is what there is to say
        return disks.full(error, {})
    return disks.full(error, {"storage.root": settings.storage.root, "local.work_dir": settings.work_dir})


def _quiet_logs(debug: bool) -> None:
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, stream=sys.stderr, format="%(message)s")
    if not debug:
        logging.getLogger("py4j").setLevel(
            logging.CRITICAL
        )  # it shows a trace for Ctrl-C, and for what we report ourselves
        logging.getLogger("great_expectations").setLevel(logging.ERROR)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if debug else logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=cast(TextIO, _Stderr())),
    )


class _Stderr:
    """Today's sys.stderr, whenever something is written: it may be replaced, as test runners and Dagster do."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


@app.command()
def run(
    pipeline: Name,
    until_caught_up: Annotated[bool, typer.Option("--until-caught-up", help="End when no input is waiting.")] = False,
    drain: Annotated[
        bool, typer.Option("--drain", help="When no input is waiting, close every window, then end.")
    ] = False,
    max_seconds: Annotated[float | None, typer.Option(help="End at the first barrier after this time.")] = None,
    start_from: Annotated[
        str | None,
        typer.Option("--from", metavar="PIPELINE:SAVEPOINT", help="Start a new pipeline from another one's savepoint."),
    ] = None,
) -> None:
    """Coordinate a pipeline: catch up, then cut a barrier every interval until stopped."""
    found, settings = find(pipeline)
    _interrupt_on_term()
    options = RunOptions(
        trigger=Trigger.CATCH_UP,
        reason="weir run",
        interval=settings.checkpoints.interval_seconds,
        until_caught_up=until_caught_up,
        drain=drain,
        max_seconds=max_seconds,
        start_from=start_from,
    )
    _follow(found, settings, options)


@app.command()
def stop(
    pipeline: Name,
    drain: Annotated[
        bool,
        typer.Option(
            "--drain", help="First work off what has arrived and close every window. Later rows for those are late."
        ),
    ] = False,
    savepoint: Annotated[str | None, typer.Option(help="At the end, name the newest checkpoint so.")] = None,
) -> None:
    """Ask the running coordinator to end at its next barrier, and wait for it."""
    found, settings = find(pipeline)
    storage, _ = open_storage(found, settings)
    reason = "weir stop --drain" if drain else "weir stop"
    if savepoint is not None:
        check_free(found, settings, savepoint)
    request = Request(requests.STOP, reason=reason, drain=drain, savepoint=savepoint or "")
    if end(found, settings, request, waiting=waiting):
        out.print(f"{pipeline} {'drained' if drain else 'stopped'} and ended at a barrier.")
        return
    if drain:
        out.print(f"No coordinator of {pipeline} is running: this command works off what has arrived and drains.")
        _follow(found, settings, RunOptions(trigger=Trigger.MANUAL, reason=reason, drain=True))
        suspension.write(storage, Suspension("drained", reason))
    else:
        out.print(f"No coordinator of {pipeline} is running.")
    if savepoint is not None:
        pin = maintenance.savepoint(found, settings, savepoint, reason, settings.checkpoints.timeout_seconds)
        out.print(f"Savepoint {escape(pin.name)} is checkpoint {pin.checkpoint_id}. It stays until it is dropped.")


@app.command()
def resume(pipeline: Name) -> None:
    """Let sensors start runs again after `weir stop` or a cancelled run; `weir run` and Materialize do so too."""
    found, settings = find(pipeline)
    storage, _ = open_storage(found, settings)
    out.print(
        f"{pipeline} {'goes on as soon as files wait.' if suspension.clear(storage) else 'was not stopped by a person.'}"
    )


@app.command()
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
        directory = _short(facts["sources"][name])
        said = f"{_counted(files, 'file')} in {directory}" if name not in facts["missing"] else _no_directory(directory)
        table.add_row("waiting", escape(said))
    for name, names in facts["delivered_again"].items():
        shown = ", ".join(names[:_FILES_SHOWN]) + (", ..." if len(names) > _FILES_SHOWN else "")
        place = _short(facts["sources"][name])
        again = f"{_counted(len(names), 'file')} in {place}, delivered again after being read: {shown}"
        table.add_row("not read", escape(again))
    for name, left in facts["set_aside"].items():
        last = f"the last: {left['last']['name']}: {left['last']['reason']}"
        table.add_row("set aside", escape(f"{_counted(left['files'], 'file')} of {name}, {last}"))
    for uid, rows in facts["unapplied"].items():
        if not rows:  # only barriers are left to pass
            continue
        table.add_row("unapplied", f"{rows:,} rows in front of {uid}")
    for uid, moment in facts["watermarks"].items():
        table.add_row("watermark", f"{uid}: {moment}")
    for entry in facts["tables"]:
        table.add_row("table", f"{entry['name']}: {_short(entry['path'])}")
    out.print(table)
    if facts["delivered_again"]:
        out.print(f"\n{escape(DELIVERED_AGAIN)}")
    if facts["held"] is not None:
        out.print(f"\n{escape(facts['held']['message'])}")
        for name, read in facts["held"]["files"].items():
            shown = ", ".join(read[:_FILES_SHOWN]) + (", ..." if len(read) > _FILES_SHOWN else "")
            directory = _short(facts["sources"].get(name, name))
            out.print(escape(f"  files: {_counted(len(read), 'file')} in {directory}: {shown}"))


def _no_directory(*directories: str) -> str:
    """That there is nothing to read, in words that nobody takes for an empty directory."""
    return f"nothing: {' and '.join(map(_short, directories))} does not exist"


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
    arrived = runtime.arrivals(pipeline, settings, head)
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
        "missing": runtime.missing(sources, waiting),
        "delivered_again": {
            name: [file.name for file in found.again] for name, found in arrived.items() if found.again
        },
        "set_aside": {
            name: position["set_aside"]
            for name, position in (head.offsets if head else {}).items()
            if position.get("set_aside")
        },
        "sources": {name: reader.directory for name, reader in sources.items()},
        "unapplied": dict(runtime.unapplied(head)),
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


@app.command()
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


def _follow(pipeline: Pipeline, settings: Settings, options: RunOptions) -> None:
    """Run, and print a line when it begins, one for each epoch, and what was done in all."""
    epochs = rows = 0
    late, pace = Counter[str](), progress.Pace()

    def began(owner: Ownership) -> None:
        pace.executor = owner.context.executor
        _say_begun(options, owner)

    for report in runtime.run(pipeline, settings, options, began=began):
        out.print(progress.line(report.checkpoint, pace.seconds(report.checkpoint)))
        epochs += 1
        rows += report.checkpoint.rows_read
        late.update(progress.rows_late(report.checkpoint))
    storage, registry = open_storage(pipeline, settings)
    head = registry.head()
    if head is None or not epochs:
        gone = runtime.missing(readers(pipeline, settings), {})
        input = _no_directory(*gone.values()) if gone else "no input is waiting"
        out.print(
            escape(f"Nothing to do: {pipeline.title} is at checkpoint {head.id if head else 'none'}, and {input}.")
        )
        return
    holder = lease.read(storage)
    how = {"drained": "Drained", "stopped": "Stopped"}.get((holder.outcome if holder else None) or "")
    if how is None:
        waits = any(runtime.lag(pipeline, settings, head).values()) or any(runtime.unapplied(head).values())
        how = "Ended" if waits else "Caught up"
    out.print(
        f"{how} at checkpoint {head.id}: {_counted(epochs, 'epoch')}, {_counted(rows, 'row')}"
        + (f"; late: {progress.by_stage(late)}" if late else "")
        + "."
    )
    tables = [sink.table for sink in pipeline.sinks if sink.table in head.sinks]
    if tables:
        directory = _short(storage.full(table_path(tables[0]))).rpartition("/")[0]
        out.print(f"Tables in {escape(directory)}: {escape(', '.join(tables))}")


def _say_begun(options: RunOptions, owner: Ownership) -> None:
    """Say at once who runs and from where: recovery is silent."""
    context, head, before = owner.context, owner.head, owner.predecessor
    said = [f"generation {context.generation}"]
    if before is not None and not before.stopped:
        said.append(f"the run before (process {before.pid} on {before.host}) died")
    if head is not None:
        said.append(f"goes on from checkpoint {head.id}" if len(said) > 1 else f"from checkpoint {head.id}")
    elif options.start_from is not None:
        said.append(f"starts from {options.start_from}")
    else:
        said.append("no checkpoint yet")
    offsets = head.offsets if head else {}
    rows = sum(runtime.unapplied(head).values())
    try:
        waiting = {name: len(reader.backlog(offsets.get(name))) for name, reader in context.readers.items()}
        files, gone = sum(waiting.values()), runtime.missing(context.readers, waiting)
        said += [f"{_counted(files, 'file')} waiting"] if files or not gone else []
        said += [_no_directory(*gone.values()).replace("nothing", "nothing waits", 1)] if gone else []
    except (OSError, WeirError):  # the run itself says what is wrong, and what to do
        pass
    if rows:
        said.append(f"{rows:,} rows unapplied")
    err.print(escape(f"{context.pipeline.title}: {', '.join(said)}"))


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _short(path: str) -> str:
    """A local path as it is from here, where that is shorter."""
    here = f"{Path.cwd()}/"
    return path.removeprefix(here)


def _interrupt_on_term() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


for _command in (
    savepoints.savepoint,
    savepoints.savepoints,
    restore.restore,
    restore.rewind,
    branches.fork,
    branches.forks,
    branches.diff,
    branches.promote,
    branches.backfill,
    verify.drill,
    verify.plan,
    verify.report,
    savepoints.prune,
    savepoints.cancel,
    fsck.fsck,
    metrics.metrics,
):
    app.command()(_command)

if __name__ == "__main__":
    process()
