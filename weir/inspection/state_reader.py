"""State at a retained checkpoint, read without Spark, without a coordinator and without touching production.

Which checkpoint: a number is an id, a text a savepoint's name, None the newest. What may take long holds its
checkpoint, so that pruning leaves it; the hold is the only thing that reading ever writes below a pipeline's root.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from state_ops.backends.base import Backend, BackendOptions
from state_ops.checkpoints.reader_holds import ReaderHold
from state_ops.checkpoints.registry import Registry
from state_ops.errors import ConfigurationError, DamageError, PrunedError, WeirError
from state_ops.ids import CheckpointId
from state_ops.records.checkpoint import POSITIONS, Checkpoint, stats_of
from state_ops.records.pins import SAVEPOINT
from state_ops.records.snapshot_files import Snapshot, snapshots_of
from state_ops.storage.storage import Storage
from weir.definition import Pipeline
from weir.inspection.snapshot_files import SnapshotCache, opened
from weir.inspection.view import View, parsed, state_stats, view_of
from weir.ownership.pipeline_storage import open_storage
from weir.settings.configuration import Settings

At = int | str | None


def get(pipeline: Pipeline, settings: Settings, uid: str, key: Sequence[Any], at: At = None) -> list[dict[str, Any]]:
    """Return the state of one key in a checkpoint: key columns, fields, lists and maps; what a TTL has forgotten is not
    in it.

    Args:
        key: One value, or its text, per key column. A stage's function has at most one row, a window one for each of
            its windows that are open.

    Raises:
        ConfigurationError: For a key that cannot be one.
    """
    while True:
        try:
            return _get(pipeline, settings, uid, key, at)
        except PrunedError:  # a newer checkpoint replaced it while it was read; one that was asked for is not found now
            continue


def _get(pipeline: Pipeline, settings: Settings, uid: str, key: Sequence[Any], at: At) -> list[dict[str, Any]]:
    storage, registry = open_storage(pipeline, settings)
    checkpoint = chosen(pipeline, registry, at)
    state_stats(pipeline, checkpoint, uid)
    with _retained(registry, checkpoint):
        view = view_of(pipeline, settings, storage, checkpoint, uid, _snapshots(registry, checkpoint, uid))
        return _rows(view, key, opened)


def scan(pipeline: Pipeline, settings: Settings, uid: str, at: At = None) -> Iterator[pa.Table]:
    """Yield all state of one stage in a checkpoint, in tables of bounded size: as `get`."""
    with viewed(pipeline, settings, uid, at, "weir state scan") as view:
        yield from view.tables()


def count(pipeline: Pipeline, settings: Settings, uid: str, at: At = None) -> tuple[CheckpointId, dict[int, int]]:
    """Return how many rows `scan` gives, by subtask, and of which checkpoint."""
    with viewed(pipeline, settings, uid, at, "weir state count") as view:
        return view.checkpoint, {
            subtask: sum(table.num_rows for table in view.tables([subtask])) for subtask in range(view.parallelism)
        }


@contextmanager
def viewed(pipeline: Pipeline, settings: Settings, uid: str, at: At, purpose: str) -> Iterator[View]:
    """Yield one stage's state in a checkpoint, which is not pruned meanwhile."""
    with held(pipeline, settings, at, purpose) as (storage, registry, checkpoint):
        state_stats(pipeline, checkpoint, uid)
        yield view_of(pipeline, settings, storage, checkpoint, uid, _snapshots(registry, checkpoint, uid))


@contextmanager
def held(
    pipeline: Pipeline, settings: Settings, at: At, purpose: str
) -> Iterator[tuple[Storage, Registry, Checkpoint]]:
    """Yield a checkpoint that is not pruned meanwhile.

    Args:
        purpose: Why the checkpoint is kept; a person who asks sees it.
    """
    storage, registry = open_storage(pipeline, settings)
    with ExitStack() as stack:
        while True:
            checkpoint = chosen(pipeline, registry, at)
            try:
                stack.enter_context(
                    ReaderHold(storage, registry, checkpoint, purpose, settings.lease.heartbeat_seconds)
                )
                break
            except PrunedError:  # replaced this very moment; one that was asked for is not found now
                continue
        with _retained(registry, checkpoint):
            yield storage, registry, checkpoint


@contextmanager
def _retained(registry: Registry, checkpoint: Checkpoint) -> Iterator[None]:
    """Raise PrunedError for what looks like damage where a checkpoint was pruned while it was read."""
    try:
        yield
    except DamageError as error:
        if registry.holds(checkpoint):
            raise
        raise PrunedError(
            f"Checkpoint {checkpoint.id} was pruned while it was being read.", next="Look again."
        ) from error


def _snapshots(registry: Registry, checkpoint: Checkpoint, uid: str) -> dict[int, Snapshot]:
    return snapshots_of(registry.files(checkpoint), uid)


def chosen(pipeline: Pipeline, registry: Registry, at: At) -> Checkpoint:
    """Return the checkpoint that is meant. Raises WeirError that lists what is retained, if it is not."""
    completed, pins = registry.checkpoints(), [pin for pin in registry.pins() if pin.kind == SAVEPOINT]
    if not completed:
        raise WeirError(
            f"{pipeline.title} has no state yet: it has no checkpoint.",
            next=f"Run the pipeline first: weir run {pipeline.title}",
        )
    if at is None:
        return completed[-1]
    named = {pin.commit_id for pin in pins if pin.name == at}
    chosen = next((row for row in completed if row.id == at or row.commit_id in named), None)
    if chosen is not None:
        return chosen
    what = f"no savepoint {at!r}" if isinstance(at, str) else f"no checkpoint {at} any more, or not yet"
    raise WeirError(
        f"{pipeline.title} has {what}.",
        next=f"Retained checkpoints: {', '.join(str(row.id) for row in completed)}. "
        f"Savepoints: {', '.join(f'{pin.name} ({pin.checkpoint_id})' for pin in pins) or 'none'}.",
    )


def one_of(checkpoint: int | None, savepoint: str | None) -> int | str | None:
    """Return what `AtCheckpoint` or `AtSavepoint` names; None: the newest checkpoint. Raises ConfigurationError for
    both."""
    if checkpoint is not None and savepoint is not None:
        raise ConfigurationError("Both a checkpoint and a savepoint are given.", next="Give one of them.")
    return checkpoint if savepoint is None else savepoint


def moment(text: str, registry: Registry) -> int | str:
    """Parse a checkpoint as people name it: by its number, or by the name of a savepoint.

    Raises:
        ConfigurationError: The text is the number of one checkpoint and the name of a savepoint of another one, which
            earlier releases allowed.
    """
    if not text.isdecimal():
        return text
    pin = registry.pinned(SAVEPOINT, text)
    if pin is not None:
        raise ConfigurationError(
            f"{text} is the number of a checkpoint and the name of a savepoint, which is checkpoint"
            f" {pin.checkpoint_id}.",
            next=(
                "Use --savepoint where there is such an option, or drop the savepoint and take it again under another"
                " name."
            ),
        )
    return int(text)


def whole(pipeline: Pipeline, registry: Registry, at: At) -> Checkpoint:
    """Return the same, to go on from: none of positions alone, unless it has a name. By default the newest.

    Raises:
        WeirError: It has positions alone.
    """
    checkpoint = chosen(pipeline, registry, at)
    if checkpoint.kind != POSITIONS or isinstance(at, str):
        return checkpoint
    others = [row for row in registry.checkpoints() if row.kind != POSITIONS]
    if at is None and others:
        return others[-1]
    raise WeirError(
        f"Checkpoint {checkpoint.id} of {pipeline.title} has positions alone, past rows that its state has not got.",
        next=f"Name another one: {', '.join(str(row.id) for row in others) or 'there is none yet'}.",
    )


# -- one key through time


@dataclass(frozen=True, slots=True)
class StateChange:
    """A checkpoint in which a key's state is not what it was in the retained one before.

    Attributes:
        rows: As `get` gives them; none: the key is gone.
        since: The first checkpoint in which it may have changed: the same one unless others between were pruned; None:
            any before.
        carried: Epochs whose rows still waited for the stage before this checkpoint, so that they may be what changed
            the key.
        versions: By table, the Delta version that published this checkpoint's rows.
    """

    checkpoint: Checkpoint
    rows: list[dict[str, Any]]
    since: int | None
    carried: tuple[int, ...]
    versions: dict[str, int]

    @property
    def exact(self) -> bool:
        return self.since == self.checkpoint.id


def history(
    pipeline: Pipeline, settings: Settings, uid: str, key: Sequence[Any], at: At = None
) -> Iterator[StateChange]:
    """Return the changes of a key, by the retained checkpoints that lead to one, oldest first.

    Checkpoints that a rewind abandoned are not among them.

    A checkpoint that is pruned while this reads is passed over, as if it had been pruned before.
    """
    storage, registry = open_storage(pipeline, settings)
    last = chosen(pipeline, registry, at)
    state_stats(pipeline, last, uid)
    published: dict[int, dict[str, int]] = {}
    for publication in registry.publications():
        if publication.delta_version is not None:
            published.setdefault(publication.checkpoint_id, {})[publication.sink] = publication.delta_version
    before: Checkpoint | None = None
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weir-state-") as scratch:
        cache = SnapshotCache(Path(scratch))
        for row in chain(registry, last):
            try:
                with view_at(pipeline, settings, storage, registry, row, uid, "weir state get --history") as view:
                    current = _rows(view, key, cache.opened) if view is not None else []
            except PrunedError:
                continue
            if current != rows:
                adjoins = row.parent_id == (before.id if before else None)
                since = row.id if adjoins else before.id + 1 if before else None
                carried = tuple(sorted({batch["epoch"] for batch in stats_of(before, uid).waiting}))
                yield StateChange(row, current, since, carried, published.get(row.id, {}))
            before, rows = row, current


def _rows(
    view: View,
    key: Sequence[Any],
    opened: Callable[[Storage, BackendOptions, Snapshot, str], AbstractContextManager[Backend]],
) -> list[dict[str, Any]]:
    """Return the rows of one key. opened: what opens its subtask's snapshot."""
    columns = parsed(view.keys, key, view.uid)
    snapshot = view.snapshots.get(view.subtask(columns))
    if snapshot is None:
        return []
    with opened(view.storage, view.options, snapshot, view.backend) as backend:
        return view.of_key(columns, backend)


def chain(registry: Registry, last: Checkpoint) -> list[Checkpoint]:
    """Return the retained checkpoints that lead to `last`, oldest first, itself included.

    What lies between a checkpoint and its parent was abandoned by a rewind.
    """
    line, upto = [last], last.parent_id
    for row in reversed(registry.checkpoints()):
        if upto is not None and row.id <= upto:
            line.append(row)
            upto = row.parent_id
    return line[::-1]


@contextmanager
def view_at(
    pipeline: Pipeline,
    settings: Settings,
    storage: Storage,
    registry: Registry,
    checkpoint: Checkpoint,
    uid: str,
    purpose: str,
) -> Iterator[View | None]:
    """Return the view of one checkpoint, as `viewed` does; None if the stage has no state.

    The checkpoint was retained a moment ago. Raises PrunedError.
    """
    if uid not in checkpoint.stages_with_state:
        yield None
        return
    with (
        ReaderHold(storage, registry, checkpoint, purpose, settings.lease.heartbeat_seconds),
        _retained(registry, checkpoint),
    ):
        yield view_of(pipeline, settings, storage, checkpoint, uid, _snapshots(registry, checkpoint, uid))
