"""The commands that bring a pipeline back, or a source elsewhere: `restore`, `rewind`, `seek`."""

from __future__ import annotations

from datetime import UTC, datetime
from json import dumps, loads
from typing import Annotated, Any

import typer
from rich.markup import escape

from state_ops.counts import counted
from state_ops.errors import ConfigurationError
from weir.cli.console import (
    AtCheckpoint,
    AtSavepoint,
    Force,
    Json,
    Name,
    Yes,
    answer,
    moment,
    one_of,
    out,
    print_obstacles,
    print_table,
    proceeds,
    waiting,
)
from weir.cli.shell import completion
from weir.connectors.source import EARLIEST, LATEST
from weir.inspection.state_reader import chosen
from weir.loading import find
from weir.ownership.ownership import raise_if_busy
from weir.ownership.pipeline_storage import open_storage
from weir.restore import restore as restoring
from weir.restore import rewind as rewinding
from weir.restore import seek as seeking
from weir.restore.restore import RestorePlan
from weir.restore.rewind import RewindPlan
from weir.restore.seek import SeekPlan
from weir.run import maintenance


def restore(
    pipeline: Name,
    checkpoint: AtCheckpoint = None,
    savepoint: AtSavepoint = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be fetched.")] = False,
    storage: Annotated[
        bool, typer.Option("--storage", help="Read every object in storage, also if this host has copies of it.")
    ] = False,
    json: Json = False,
) -> None:
    """Fetch a checkpoint to this host and prove it: every digest, opened, its keys where they belong. Then a run starts from here.

    For files that this host has already, only the sizes in storage are compared, unless --storage is given. Changes nothing in storage but a row in registry/restores, and may run beside a coordinator. To go on from an older
    checkpoint: weir rewind. Exit code 1 if the checkpoint is damaged.
    """
    at = one_of(checkpoint, savepoint)
    definition, settings = find(pipeline)
    durable, registry = open_storage(definition, settings)
    meant = chosen(definition, registry, at)
    with waiting("comparing this host's copies with storage"):
        plan = restoring.plan_restore(definition, settings, durable, registry, meant)
    if not proceeds(lambda: _show_restore(plan), {**plan.to_dict(), "restored": None}, dry_run=dry_run, json=json):
        return
    with waiting("fetching and checking"):
        done = restoring.restore(definition, settings, durable, registry, meant, stored=storage)
    seconds = done.fetch_ms / 1000
    valid = (
        f"Checkpoint {meant.id} is valid: {done.bytes_fetched:,} bytes fetched,"
        f" {done.bytes_cached + done.bytes_local:,} were here, {counted(done.files, 'file')} checked in "
        f"{seconds:.1f} s. `weir run"
        f" {escape(pipeline)}` starts from local files now."
        if registry.head() == meant
        else (
            f"Checkpoint {meant.id} is valid, {counted(done.files, 'file')} checked in {seconds:.1f} s. "
            f"To go on from it: "
            f"weir rewind {escape(pipeline)} --to {meant.id}"
        )
    )
    unread = (
        f"{done.bytes_unread:,} bytes were not read in storage, where only their sizes were compared: "
        f"weir restore {escape(pipeline)} --storage"
    )
    answer(json, {**plan.to_dict(), "restored": done.to_dict()}, valid, *([unread] if done.bytes_unread else []))


def _show_restore(plan: RestorePlan) -> None:
    facts = plan.to_dict()
    out.print(f"Checkpoint {facts['checkpoint']} of {facts['completed_at']}: {facts['bytes_total']:,} bytes of state.")
    numbers = ("subtasks", "files", "bytes", "on this host")
    print_table(
        (
            (
                escape(uid),
                str(stage["subtasks"]),
                str(stage["files"]),
                f"{stage['bytes']:,}",
                f"{stage['bytes_local']:,}",
            )
            for uid, stage in facts["stages"].items()
        ),
        ("stage", *numbers),
        right=numbers,
    )
    out.print(f"To fetch: {facts['bytes_to_fetch']:,} bytes; {facts['bytes_cached']:,} are among this host's objects.")


def rewind(
    pipeline: Name,
    to: Annotated[
        str | None,
        typer.Option(
            help="The checkpoint to go back to, by its number, or by the name of a savepoint. 0: before the first one.",
            autocompletion=completion.moments,
        ),
    ] = None,
    savepoint: Annotated[str | None, typer.Option(hidden=True, help="The earlier name of --to NAME.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    force: Force = False,
    reason: Annotated[str, typer.Option(help="A note that `weir checkpoints` shows.")] = "",
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Take state, source positions and all sink tables back to one checkpoint, together. The next run reads the input again from there.

    Checkpoints that are abandoned stay in the registry until they are pruned, and are never published again. No coordinator may be running.
    """
    if (to is None) == (savepoint is None):
        raise ConfigurationError(
            "Say which checkpoint to go back to.",
            next=f"`weir rewind {pipeline} --to N` or `--to NAME`; `weir checkpoints {pipeline}` lists them.",
        )
    definition, settings = find(pipeline)
    durable, registry = open_storage(definition, settings)
    at = savepoint if to is None else moment(to, registry)
    back_to = at if at == rewinding.BEGINNING else int(chosen(definition, registry, at).id)
    with waiting("comparing the tables' rows"):
        plan = rewinding.plan(definition, settings, back_to)
    if not plan.takes_back:
        if not dry_run:
            with waiting("looking for a coordinator"):
                raise_if_busy(definition, durable)
        said = f"{escape(rewinding.nothing_to_take_back(plan, pipeline))}."
        answer(json, {**plan.to_dict(), "checkpoint": None if dry_run else plan.head.id}, said)
        return
    accepted = plan.obstacles if force else ()
    if not proceeds(
        lambda: _show_rewind(plan),
        {**plan.to_dict(), "checkpoint": None},
        check=lambda: rewinding.check(plan, pipeline, accepted),
        ask="rewind",
        dry_run=dry_run,
        yes=yes,
        json=json,
    ):
        return
    with waiting("checking the checkpoint, then rewinding"):
        done = maintenance.rewind(definition, settings, back_to, accepted=accepted, reason=reason)
    answer(
        json,
        {**plan.to_dict(), "checkpoint": done.id},
        f"{escape(pipeline)} is at checkpoint {done.id}, back {escape(done.reason)}. "
        f"`weir run {escape(pipeline)}` goes on from there.",
    )


def _show_rewind(plan: RewindPlan) -> None:
    retained = ", ".join(map(str, plan.abandoned))
    verb = "is" if len(plan.abandoned) == 1 else "are"
    to = f"{plan.to.id} ({plan.to.completed_at:%Y-%m-%d %H:%M:%S})" if plan.to.id else "before the first one"
    undone = f"everything after {plan.to.id}; of it" if plan.to.id else "everything; of it"
    out.print(
        f"From checkpoint {plan.head.id} back to {to}. Undone: {undone} {retained} {verb} still retained and can be "
        "taken back to."
    )
    states = [("state", uid, f"{now:,} bytes, then {then:,}") for uid, (now, then) in plan.stages.items()]
    sources = [("source", source.source, str(source)) for source in plan.sources]
    tables = [
        (
            "table",
            table.table,
            (
                f"version {table.version}, then {'empty' if table.then is None else f'as of version {table.then}'}: "
                f"{table.in_words}"
            ),
        )
        for table in plan.tables
    ]
    sinks = [
        (
            "sink",
            sink.name,
            (
                f"{'gives back' if sink.stays is None else 'keeps'} what {sink.kind} was given since checkpoint "
                f"{sink.then or 'the beginning'}"
            )
            if sink.has != sink.then
            else "has no rows that are taken back",
        )
        for sink in plan.sinks
    ]
    never = [
        ("not published", name, f"{', '.join(map(str, ids))}: taken back before their rows came into it")
        for name, ids in plan.never.items()
    ]
    print_table(tuple(map(escape, row)) for row in (*states, *sources, *tables, *sinks, *never))
    print_obstacles(plan.obstacles)


def seek(
    pipeline: Name,
    source: Annotated[str, typer.Argument(help="The source's name.", metavar="SOURCE")],
    to: Annotated[
        str,
        typer.Option(
            help="earliest, latest, a time (2026-05-01T12:00Z), or a position in JSON as `weir checkpoints` shows it."
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    reason: Annotated[str, typer.Option(help="A note that `weir checkpoints` shows.")] = "",
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Read a source on from another position. State and tables stay as they are: rows that are read twice count twice, and rows that are passed over are never read.

    It is a checkpoint of its own, which a rewind takes back. No coordinator may be running.
    """
    definition, settings = find(pipeline)
    meant = _sought(to)
    with waiting("asking the source"):
        plan = seeking.plan(definition, settings, source, meant)
    if not proceeds(
        lambda: _show_seek(plan),
        {**plan.to_dict(), "checkpoint": None},
        ask="seek",
        dry_run=dry_run,
        yes=yes,
        json=json,
    ):
        return
    with waiting("seeking"):
        done = maintenance.seek(definition, settings, source, meant, reason)
    answer(
        json,
        {**plan.to_dict(), "checkpoint": done.id},
        f"{escape(pipeline)} is at checkpoint {done.id}: {escape(done.reason)}. "
        f"`weir run {escape(pipeline)}` goes on from there.",
    )


def _sought(to: str) -> str | datetime | dict[str, Any]:
    if to in (EARLIEST, LATEST):
        return to
    try:
        if to.startswith("{"):
            position: dict[str, Any] = loads(to)
            return position
        moment = datetime.fromisoformat(to)
    except ValueError as error:
        raise ConfigurationError(
            f"--to {to!r} is no place in a source.",
            next="Say earliest, latest, a time such as 2026-05-01T12:00Z, or a position in JSON.",
        ) from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _show_seek(plan: SeekPlan) -> None:
    was = dumps(plan.was["at"]) if plan.was is not None else "nowhere"
    waits = "" if plan.waits is None else f"; {counted(plan.waits, 'row', 'waits', 'wait')} behind that"
    out.print(
        f"{escape(plan.source)} is read to {escape(was)}. It goes on from {escape(dumps(plan.then['at']))}{waits}."
    )
