"""`weir savepoint` and the savepoint job."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated

from state_ops.errors import ConfigurationError
from state_ops.records.pins import SAVEPOINT, Pin
from weir.connectors.delta import restore_version
from weir.operations.operation import COMMAND, JOB, Done, Here, Labelled, Option, Steps, operation
from weir.ownership.pipeline_storage import open_storage
from weir.run import maintenance

_LONG = timedelta(days=365)


@operation(Pin, job="Names the next checkpoint, or drops a name.")
def savepoint(
    here: Here,
    name: Annotated[
        str | None,
        Option(
            "Take a savepoint of this name.",
            in_job="Required. The savepoint's name: letters, digits, dots, dashes and underscores.",
            required=True,
        ),
    ] = None,
    dropped: Annotated[
        str | None,
        Option(
            "Remove this savepoint; checkpoints and files that only it kept are deleted.",
            ("--drop",),
            complete="savepoints",
            only=COMMAND,
        ),
    ] = None,
    drop: Annotated[
        bool,
        Option("Remove the savepoint instead; checkpoints and files that only it kept are deleted.", only=JOB),
    ] = False,
    reason: Annotated[
        str, Option("A note that `weir savepoints` shows.", in_job="A note that the list of savepoints shows.")
    ] = "",
) -> Steps:
    """Name a checkpoint, so that retention never touches it: the next one where a coordinator runs, else the newest.

    `weir savepoints` lists them; `weir run NEW --from PIPELINE:NAME` starts a pipeline from one.
    """
    if (name is None) == (dropped is None):
        raise ConfigurationError(
            "Say what to do.",
            next=f"`weir savepoint {here.name} --name NAME` or `--drop NAME`; `weir savepoints {here.name}` lists.",
        )
    pipeline, settings, patience = here.pipeline, here.settings, here.settings.checkpoints.timeout_seconds
    newest = open_storage(pipeline, settings)[1].head()
    goes = name if drop else dropped
    with here.waiting("waiting for the coordinator's next barrier"):
        if goes is not None:
            pin = maintenance.drop_savepoint(pipeline, settings, goes, patience)
            yield Done(pin, [f"Savepoint {pin.name} (checkpoint {pin.checkpoint_id}) is dropped."])
            return
        assert name is not None
        pin = maintenance.savepoint(pipeline, settings, name, reason or here.by, patience)
    is_newest = newest is not None and pin.checkpoint_id == newest.id  # a coordinator would have named its next one
    idle = [f"No coordinator of {here.name} is running, so the newest checkpoint gets the name."] if is_newest else []
    taken = f"Savepoint {pin.name} is checkpoint {pin.checkpoint_id}. It stays until it is dropped."
    yield Done(pin, [*idle, taken], tuple(_warnings(here)))


def _warnings(here: Here) -> Iterator[Labelled]:
    """Yield the tables that keep their log for less than a year: a rewind to the oldest savepoint needs the log."""
    storage, registry = open_storage(here.pipeline, here.settings)
    oldest = min((pin.created_at for pin in registry.pins() if pin.kind == SAVEPOINT), default=None)
    if oldest is None:
        return
    tables = dict[timedelta, list[str]]()
    for sink in here.pipeline.tables:
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
        yield Labelled(
            "note",
            f"{whose} for {kept.days} days (delta.logRetentionDuration): {it} {verb} be taken back to the oldest"
            f" savepoint until {when}{which}.",
        )
