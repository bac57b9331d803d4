"""The command `weir run`."""

from __future__ import annotations

import signal
from collections import Counter
from typing import Annotated, Any

import typer
from rich.markup import escape

from state_ops import logs
from state_ops.coordination import lease
from state_ops.counts import counted
from state_ops.errors import WeirError, first_line
from state_ops.logs import Logger
from state_ops.records.triggers import Trigger
from weir.cli.console import Name, err, no_directory, out, short
from weir.connectors.delta.table_commit import table_path
from weir.definition import Pipeline
from weir.loading import find
from weir.ownership import backlog
from weir.ownership.ownership import Ownership
from weir.ownership.pipeline_storage import open_storage, readers
from weir.run import progress
from weir.run import run as runtime
from weir.run.run import RunOptions
from weir.settings.configuration import Settings
from weir.sources.positions import in_words

log = Logger("weir.run")


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
    definition, settings = find(pipeline)
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
    follow(definition, settings, options)


def follow(pipeline: Pipeline, settings: Settings, options: RunOptions) -> None:
    """Run the pipeline, and print a line when the run begins, one for each epoch, and a summary at the end."""
    epochs = rows = 0
    late, pace = Counter[str](), progress.Pace()

    def began(owner: Ownership) -> None:
        pace.executor = owner.context.executor
        _say_begun(options, owner)

    for report in runtime.run(pipeline, settings, options, began=began):
        seconds = pace.seconds(report.checkpoint)
        if logs.is_json():
            log.info("epoch", **progress.fields(pipeline, report, seconds))
        else:
            out.print(escape(progress.line_of(report, seconds)))
        epochs += 1
        rows += report.checkpoint.rows_read
        late.update(progress.rows_late(report.checkpoint))
    storage, registry = open_storage(pipeline, settings)
    head = registry.head()
    if head is None or not epochs:
        gone = backlog.missing(readers(pipeline, settings), {})
        input = no_directory(*gone.values()).removeprefix("nothing: ") if gone else "no input is waiting"
        _say(
            f"Nothing to do: {pipeline.title} {f'is at checkpoint {head.id}' if head else 'has no checkpoint yet'};"
            f" {input}."
        )
        return
    holder = lease.read(storage)
    how = {"drained": "Drained", "stopped": "Stopped"}.get((holder.outcome if holder else None) or "")
    if how is None:
        waits = any(backlog.lag(pipeline, settings, head).values()) or any(backlog.unapplied(head).values())
        how = "Ended" if waits else "Caught up"
    _say(
        f"{how} at checkpoint {head.id}: {counted(epochs, 'epoch')}, {counted(rows, 'row')}"
        + (f"; late: {progress.by_stage(late)}" if late else "")
        + ".",
        pipeline=pipeline.title,
        outcome=how.lower(),
        checkpoint=int(head.id),
        epochs=epochs,
        rows_in=rows,
    )
    tables: dict[str, list[str]] = {}
    for sink in pipeline.tables:
        if sink.name in head.sinks:
            directory, _, last = short(storage.full(table_path(sink.name))).rpartition("/")
            named = sink.name if last == sink.name else f"{sink.name} ({last})"
            tables.setdefault(directory, []).append(named)
    for directory, names in tables.items():
        _say(f"Tables in {directory}: {', '.join(names)}")


def _say(text: str, **fields: Any) -> None:
    """Print what a run says of itself, or log it where log lines are JSON."""
    if logs.is_json():
        log.info(text, **fields)
    else:
        out.print(escape(text))


def _say_begun(options: RunOptions, owner: Ownership) -> None:
    """Say at once which coordinator runs and from which checkpoint, because recovery prints nothing."""
    context, head, before = owner.context, owner.head, owner.predecessor
    parts = [f"generation {context.generation}"]
    if before is not None and not before.stopped:
        parts.append(f"the run before (process {before.pid} on {before.host}) died")
    if head is not None:
        parts.append(f"goes on from checkpoint {head.id}" if len(parts) > 1 else f"from checkpoint {head.id}")
    elif options.start_from is not None:
        parts.append(f"starts from {options.start_from}")
    else:
        parts.append("no checkpoint yet")
    offsets = head.offsets if head else {}
    rows = sum(backlog.unapplied(head).values())
    try:
        arrived = {name: reader.look(offsets.get(name)) for name, reader in context.readers.items()}
        gone = backlog.missing(context.readers, {name: of.waiting for name, of in arrived.items()})
        if any(of.waiting for of in arrived.values()) or not gone:
            parts.append(f"{in_words(arrived.values())} waiting")
        parts += [no_directory(*gone.values()).replace("nothing", "nothing waits", 1)] if gone else []
    except (OSError, WeirError) as error:  # the run asks again, and ends if it lasts
        parts.append(f"what waits is not known: {first_line(error)}")
    if rows:
        parts.append(f"{counted(rows, 'row')} unapplied")
    err.print(escape(f"{context.pipeline.title}: {', '.join(parts)}"))


def _interrupt_on_term() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
