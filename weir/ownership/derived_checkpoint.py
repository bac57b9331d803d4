"""Derived checkpoints: a start, a fork, a rewind, a promotion, an edit, a seek and, where rows are delivered at most
once, each epoch's positions make a checkpoint of another one.

None of them reads input, and all go the same way:

1. plan      Each operation reads what it would do, and refuses what it must. Nothing is changed.
2. `begin`   The sinks' tables must be where the registry says. The checkpoint gets an id that was never used.
3. stage     What the checkpoint will name is put into this pipeline's storage (`copied`), or is there already.
4. `commit`  The registry's row decides. Before it, a failure leaves only objects that the next owner removes.
5. `publish` The sinks' tables follow the row. The next owner does that if this process is cut off.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import pyarrow.parquet as pq

from state_ops.backends.loader import keeping, named
from state_ops.ids import AttemptId, CheckpointId, Generation, epoch_dir, new_attempt_id
from state_ops.records.checkpoint import (
    START,
    TAKEN,
    WITH_ARCHIVE,
    Checkpoint,
    began,
    format_with,
    spans_with,
    taken_back,
)
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.snapshot_files import INPUT, STATE, StateFile, is_reference
from state_ops.snapshots.snapshot import kept_again
from state_ops.storage.branches import is_inherited, own_of_parent
from state_ops.storage.storage import Storage
from weir.ownership.context import RunContext
from weir.ownership.ownership import Ownership
from weir.ownership.pipeline_storage import backend_options
from weir.ownership.prune import prune
from weir.ownership.publish import publish_missing
from weir.sources.slices import nothing_read

_TRANSFERS = 4


def begin(
    owner: Ownership,
    head: Checkpoint,
    sinks: Iterable[str],
    *beyond: Checkpoint,
    lacking: Mapping[str, Sequence[CheckpointId | None]] = MappingProxyType({}),
) -> CheckpointId:
    """Take an id for a checkpoint that changes sinks.

    Args:
        head: The newest checkpoint here.
        sinks: Those that are to change. They are checked first, because nobody could change one that is not where the
            newest checkpoint says.
        beyond: Checkpoints of other storages whose ids the new one must exceed.
        lacking: By sink that lacks committed rows which are taken back, as `Sinks.check_chain` has it.

    Raises:
        DamageError: A sink is elsewhere.
    """
    changed = list(sinks)
    for sink in changed:
        owner.context.sinks.check_chain(sink, head, lacking.get(sink, ()))
    above = max(owner.last_id, owner.context.sinks.newest(changed, head))
    return replace(owner, last_id=above).begin(head, *beyond)


def commit(
    context: RunContext,
    base: Checkpoint,
    id: CheckpointId,
    files: Sequence[StateFile],
    *,
    kind: str,
    what: str,
    reason: str = "",
    head: Checkpoint | None = None,
    parent: CheckpointId | None = None,
    beginning: Mapping[str, int] | None = None,
    rewritten: Sequence[tuple[Checkpoint, Sequence[StateFile]]] = (),
) -> Checkpoint:
    """Commit a checkpoint with the state, positions, watermarks and tables of another one.

    Args:
        base: The checkpoint that it is made of, with everything in which the new one differs replaced.
        files: Its listing. All objects are in this pipeline's storage.
        what: What it is, in words, for the row's reason.
        reason: Why somebody asked for it; "" if nobody said.
        head: The newest checkpoint here, which it follows. None: it is the first one.
        parent: The checkpoint that it continues. None: it is the first one.
        beginning: How the chain begins, as `checkpoint.began` has it, of a first checkpoint.
        rewritten: What takes the place of retained checkpoints in the same commit, as `Registry.commit` has it.

    Raises:
        FencedError: A newer owner took over.
    """
    now = datetime.now(UTC)
    if head is not None and not any(file.kind == INPUT for file in files):  # input of later epochs may be read again
        kept = [file for file in context.registry.files(head) if file.kind == INPUT]
        files = [*files, *(replace(file, new=False) for file in kept)]
        base = replace(base, format_version=max(base.format_version, WITH_ARCHIVE)) if kept else base
    sums = {name: value for name, value in base.totals.items() if name not in (*began(base), *TAKEN)}
    row = replace(
        base,
        id=id,
        parent_id=parent,
        kind=kind,
        generation=context.generation,
        commit_id=uuid.uuid4().hex,
        triggered_at=now,
        completed_at=now,
        epoch_now=max(base.epoch_now, head.epoch_now) if head is not None else base.epoch_now,
        trigger="savepoint" if kind == START else kind,
        reason=f"{what}: {reason}" if reason else what,
        slice={name: nothing_read() for name in base.slice},
        ms={},
        totals={**sums, **(beginning or began(head)), **taken_back(head), **context.requested()},
        files=len(files),
        bytes_total=sum(file.bytes for file in files if file.kind == STATE),
        bytes_new=sum(file.bytes for file in files if file.kind == STATE and file.new),
        run_id=context.run_id,
        lineage=spans_with(head, context.generation, id),
        format_version=format_with(base.format_version, base.sinks),
    )
    context.registry.commit(row, files, newest=head.id if head is not None else None, rewritten=rewritten)
    context.head = row
    return row


def first_of(
    context: RunContext,
    base: Checkpoint,
    moved: Sequence[tuple[StateFile, StateFile]],
    id: CheckpointId,
    *,
    kind: str,
    what: str,
    beginning: Mapping[str, int],
) -> Checkpoint:
    """Commit a checkpoint of elsewhere as the first one here. moved: each of its files as it is named there, and
    here."""
    empty = replace(base, sinks={}, operators=pointed(base.operators, moved))
    return commit(context, empty, id, [here for _, here in moved], kind=kind, what=what, beginning=beginning)


def nothing_before(generation: Generation, id: CheckpointId, now: datetime) -> Checkpoint:
    """Return a checkpoint that has read nothing, of which a pipeline's first checkpoint is made."""
    return Checkpoint(
        id=id,
        parent_id=None,
        kind="",
        generation=generation,
        commit_id="",
        triggered_at=now,
        completed_at=now,
        epoch_now=now,
        trigger="",
        reason="",
        offsets={},
        slice={},
        watermarks={},
        operators={},
        sinks={},
        inputs={},
        ms={},
        totals=dict.fromkeys(("epochs", "rows_read", "bytes_new", "files_new"), 0),
        files=0,
        bytes_total=0,
        bytes_new=0,
    )


def publish(context: RunContext, row: Checkpoint) -> None:
    """Let the sinks' tables follow a checkpoint that is committed, and prune what no checkpoint needs any more."""
    publish_missing(context, [row])
    prune(context)


def lasting(files: Iterable[StateFile], operators: Mapping[str, OperatorStats]) -> list[StateFile]:
    """Return the files of a checkpoint that a later one goes on from: state, and rows that wait in front of stages.

    Args:
        operators: What the checkpoint records, by stage.
    """
    waiting = waiting_paths(operators)
    return [file for file in files if file.kind == STATE or file.path in waiting]


def unchanged(context: RunContext, checkpoint: Checkpoint) -> list[StateFile]:
    """Return the files that a checkpoint of this pipeline hands on to a derived one. None of them is uploaded anew."""
    files = lasting(context.registry.files(checkpoint), checkpoint.operators)
    return [replace(file, new=False) for file in files]


def waiting_paths(operators: Mapping[str, OperatorStats]) -> set[str]:
    """Return the paths of rows that wait in front of stages.

    Args:
        operators: What a checkpoint records, by stage.
    """
    batches = [batch for stats in operators.values() for batch in stats.waiting]
    return {path for batch in batches for layer in batch["layers"] for path in layer}


def pointed(
    operators: Mapping[str, OperatorStats], renamed: Iterable[tuple[StateFile, StateFile]]
) -> dict[str, OperatorStats]:
    """Return a checkpoint's record of its stages, with rows that wait named by their new paths, and the size of the
    state here: references to snapshots that a backend keeps have other sizes.

    Args:
        renamed: Each file as it was named before, and as it is named here.
    """
    moved = list(renamed)
    paths = {old.path: new.path for old, new in moved}
    grown = Counter[str]()
    for old, new in moved:
        grown[old.operator] += new.bytes - old.bytes

    def here(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "layers": [[paths[path] for path in layer] for layer in batch["layers"]]}

    return {
        uid: stats.updated(
            waiting=[here(batch) for batch in stats.waiting],
            **({"bytes_total": stats.bytes_total + grown[uid]} if grown[uid] else {}),
        )
        for uid, stats in operators.items()
    }


def copied(
    context: RunContext, source: Storage, listing: Sequence[StateFile], id: CheckpointId, *, returning: bool = False
) -> list[tuple[StateFile, StateFile]]:
    """Copy state and waiting rows of another storage under prefixes of our own, one attempt for each subtask.

    Args:
        listing: What is copied.
        id: Of the checkpoint that will name the copies.
        returning: The source is a branch of this very pipeline: what it inherited is named again, and not copied.

    Returns:
        Each file as it is named there, and here.

    Raises:
        DamageError: An object is not what it was.
        ConfigurationError: A state backend keeps the state, and it is not the one of these settings.
    """
    attempts: dict[tuple[str, int], AttemptId] = {}
    for file in listing:
        attempts.setdefault((file.operator, file.subtask), new_attempt_id())

    def copy_of(number: int, file: StateFile) -> StateFile:
        attempt = attempts[file.operator, file.subtask]
        snapshot = attempt if file.kind == STATE else None
        if returning and is_inherited(file.path):
            return replace(file, path=own_of_parent(file.path), new=False, snapshot=snapshot)
        top, name = ("state", file.name) if file.kind == STATE else ("channels", f"{number:06}.parquet")
        path = f"{top}/{file.operator}/{epoch_dir(context.generation, id)}/{file.subtask}-{attempt}/{name}"
        moved = replace(file, path=path, new=True, attempt=attempt, snapshot=snapshot)
        if is_reference(path):
            size, digest = _kept_again(context, source, file, path)
            return replace(moved, bytes=size, digest=digest)
        copy(context, source, file.path, path, file.digest)
        return moved

    with ThreadPoolExecutor(_TRANSFERS) as pool:
        return list(zip(listing, pool.map(copy_of, range(len(listing)), listing), strict=True))


def _kept_again(context: RunContext, source: Storage, file: StateFile, path: str) -> tuple[int, str]:
    backend, settings = context.settings.state.backend, context.settings
    keeping(backend)
    return kept_again(named(backend), backend_options(settings), source, file, context.storage, path, settings.work_dir)


def copy(
    context: RunContext, source: Storage, there: str, here: str, digest: str | None = None
) -> tuple[int, str, int | None]:
    """Copy an object of another storage; returns its size in bytes, its sha256, and its rows if it is Parquet.

    Args:
        digest: DamageError if it has another one.
    """
    with source.fetched(there, context.settings.work_dir, digest=digest) as local:
        rows = pq.read_metadata(local).num_rows if there.endswith(".parquet") else None
        return *context.storage.put_file(local, here), rows
