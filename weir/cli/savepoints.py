"""The commands that keep a pipeline's checkpoints: `savepoint`, `savepoints`, `prune`, `cancel`."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from state_ops.coordination import requests
from state_ops.coordination.requests import Request
from state_ops.counts import agrees, counted
from state_ops.errors import ConfigurationError
from state_ops.records.pins import SAVEPOINT, Pin
from weir.cli.console import Json, Name, answer, err, out, print_table, proceeds, waiting
from weir.cli.shell import completion
from weir.definition import Pipeline
from weir.loading import find
from weir.ownership.pipeline_storage import open_storage
from weir.settings.configuration import Settings

if TYPE_CHECKING:
    from state_ops.records.fates import Fate, ObjectFate

_SHOWN = 20
_LONG = timedelta(days=365)


def savepoint(
    pipeline: Name,
    name: Annotated[str | None, typer.Option(help="Take a savepoint of this name.")] = None,
    drop: Annotated[
        str | None,
        typer.Option(
            help="Remove this savepoint; checkpoints and files that only it kept are deleted.",
            autocompletion=completion.savepoints,
        ),
    ] = None,
    reason: Annotated[str, typer.Option(help="A note that `weir savepoints` shows.")] = "weir savepoint",
    json: Json = False,
) -> None:
    """Name a checkpoint, so that retention never touches it: the next one where a coordinator runs, else the newest.

    `weir savepoints` lists them; `weir run NEW --from PIPELINE:NAME` starts a pipeline from one.
    """
    from weir.run import maintenance

    if (name is None) == (drop is None):
        raise ConfigurationError(
            "Say what to do.",
            next=f"`weir savepoint {pipeline} --name NAME` or `--drop NAME`; `weir savepoints {pipeline}` lists.",
        )
    definition, settings = find(pipeline)
    patience = settings.checkpoints.timeout_seconds
    newest = open_storage(definition, settings)[1].head()
    with waiting("waiting for the coordinator's next barrier"):
        if name is not None:
            pin = maintenance.savepoint(definition, settings, name, reason, patience)
        else:
            assert drop is not None
            pin = maintenance.drop_savepoint(definition, settings, drop, patience)
    taken = f"Savepoint {escape(pin.name)} is checkpoint {pin.checkpoint_id}. It stays until it is dropped."
    dropped = f"Savepoint {escape(pin.name)} (checkpoint {pin.checkpoint_id}) is dropped."
    idle = [f"No coordinator of {escape(pipeline)} is running, so the newest checkpoint gets the name."]
    is_newest = newest is not None and pin.checkpoint_id == newest.id  # a coordinator would have named its next one
    answer(json, _facts(pin), *(idle if name is not None and is_newest else []), dropped if name is None else taken)
    if name is not None and not json:
        _warn_of_retention(definition, settings)


def savepoints(pipeline: Name, json: Json = False) -> None:
    """List the savepoints of a pipeline, oldest first."""
    definition, settings = find(pipeline)
    _, registry = open_storage(definition, settings)
    pins = [pin for pin in registry.pins() if pin.kind == SAVEPOINT]
    if json or not pins:
        none = escape(f"{pipeline} has no savepoint: weir savepoint {pipeline} --name NAME")
        answer(json, [_facts(pin) for pin in pins], none)
        return
    print_table(
        (
            (escape(pin.name), str(pin.checkpoint_id), f"{pin.created_at:%Y-%m-%d %H:%M:%S}", escape(pin.reason))
            for pin in pins
        ),
        ("name", "checkpoint", "taken", "reason"),
    )


def _warn_of_retention(pipeline: Pipeline, settings: Settings) -> None:
    """Warn of tables that keep their log for less than a year, because a rewind to the oldest savepoint needs the log."""
    from weir.connectors.delta import restore_version

    storage, registry = open_storage(pipeline, settings)
    oldest = min((pin.created_at for pin in registry.pins() if pin.kind == SAVEPOINT), default=None)
    if oldest is None:
        return
    tables = dict[timedelta, list[str]]()
    for sink in pipeline.tables:
        kept = restore_version.kept_for(storage, sink.name)
        if kept is not None and kept < _LONG:
            tables.setdefault(kept, []).append(sink.name)
    for kept, names in tables.items():
        when = f"{oldest + kept:%Y-%m-%d}"
        verb = "can" if oldest + kept > datetime.now(UTC) else "perhaps could"
        whose, it = (
            (f"the table {names[0]} keeps its log", "it")
            if len(names) == 1
            else (f"{len(names)} tables keep their logs", "they")
        )
        which = f" ({', '.join(names)})" if len(names) > 1 else ""
        err.print(
            f"[yellow]note[/]  {escape(whose)} for {kept.days} days (delta.logRetentionDuration): "
            f"{it} {verb} be taken back to the oldest savepoint until {when}{escape(which)}.",
        )


def _facts(pin: Pin) -> dict[str, Any]:
    return {
        "name": pin.name,
        "checkpoint": pin.checkpoint_id,
        "created_at": pin.created_at.isoformat(),
        "reason": pin.reason,
    }


def prune(
    pipeline: Name,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be deleted and why; change nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Drop the checkpoints that nothing keeps, and the objects that only they name. Every epoch does this by itself.

    Also removes the files that dead attempts left. If a coordinator runs, it is asked to.
    """
    from weir.run import maintenance

    definition, settings = find(pipeline)
    with waiting("asking what each checkpoint and object is kept for"):
        checkpoints, objects = maintenance.explain(definition, settings)
    facts = {
        "dry_run": dry_run,
        "checkpoints": [dataclasses.asdict(fate) for fate in checkpoints],
        "objects": [{**dataclasses.asdict(fate), "stays": fate.stays} for fate in objects],
        "bytes_freed": sum(fate.bytes for fate in objects if not fate.stays),
    }
    if not proceeds(lambda: _show(checkpoints, objects), facts, dry_run=dry_run, json=json):
        return
    with waiting("pruning"):
        by_coordinator = maintenance.asked(
            definition,
            settings,
            Request(requests.UPKEEP, reason="weir prune"),
            lambda _: None,  # taking ownership prunes and removes leftovers before anything else
            settings.checkpoints.timeout_seconds,
        )
    answer(json, facts, "Done by the running coordinator." if by_coordinator else "Done.")


def _show(checkpoints: list[Fate], objects: list[ObjectFate]) -> None:
    print_table(
        (
            (
                str(fate.id),
                "stays" if fate.stays else "goes",
                f"{fate.bytes:,}",
                f"{fate.frees:,}",
                escape("; ".join(fate.reasons) or "beyond the retained number, and nothing needs it"),
            )
            for fate in checkpoints
        ),
        ("checkpoint", "", "bytes", "frees", "why"),
        right=("checkpoint", "bytes", "frees"),
    )
    goes = [fate for fate in objects if not fate.stays]
    stays = [fate for fate in objects if fate.stays]
    shared = [fate for fate in stays if len(fate.named_by) > 1]
    out.print(
        f"\n{counted(len(stays), 'object', 'stays', 'stay')} ({sum(fate.bytes for fate in stays):,} "
        f"bytes; {len(shared):,} {agrees(len(shared), 'is', 'are')} named by"
        f" several checkpoints), {len(goes):,} {agrees(len(goes), 'goes', 'go')} "
        f"({sum(fate.bytes for fate in goes):,} bytes)."
    )
    for title, fates in (("goes", goes), ("stays", stays)):
        for fate in fates[:_SHOWN]:
            named = ", ".join(str(id) for id in fate.named_by)
            because = f"named by {named}" if named else "no checkpoint that stays names it"
            out.print(f"  {title:<5}  {fate.bytes:>12,}  {escape(fate.path)}  ({because})")
        if len(fates) > _SHOWN:
            out.print(f"  {title:<5}  ... and {len(fates) - _SHOWN:,} more; --json has all")


def cancel(
    pipeline: Name,
    delete: Annotated[
        bool | None,
        typer.Option("--delete/--retain", help="Delete or retain the checkpoints; default: checkpoints.on_cancel."),
    ] = None,
) -> None:
    """End a pipeline: stop its coordinator at the next barrier; then retain its checkpoints, or delete all but its savepoints.

    Sensors begin nothing until a person does (`weir run`, `weir resume`, Materialize). Tables stay as they are. After --delete the pipeline goes on only where its newest savepoint is the last that was published.
    """
    from weir.restore.recovery import owning
    from weir.run import maintenance
    from weir.run.stopping import end

    definition, settings = find(pipeline)
    deletes = settings.checkpoints.on_cancel == "delete" if delete is None else delete
    _, registry = open_storage(definition, settings)
    stopped = end(
        definition, settings, Request(requests.STOP, reason="weir cancel", delete=deletes), "cancelled", waiting
    )
    if deletes and not stopped:
        with owning(definition, settings, epochs=False) as owner:
            maintenance.end(owner.context)
    left = registry.checkpoints()
    out.print(
        f"{escape(pipeline)} is cancelled. "
        + (
            f"{counted(len(left), 'checkpoint', 'is', 'are')} retained."
            if left
            else "No checkpoint is left; its tables are as they were."
        )
    )
