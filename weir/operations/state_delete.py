"""One key forgotten: gone from a stage's state, in the newest checkpoint, in all retained ones and in savepoints.

    1 2 3        3 is the newest, 1 a savepoint's
    1 2 3 4      4 = 3 without the key, and in the same commit the rows of 1, 2 and 3 give way to rows that say the same
                 of states without it

Every snapshot that may have bytes of the key is copied, entry by entry, without it, and uploaded as objects of this
owner's generation, which re-reference nothing of before. One commit of the registry decides. Before it nothing is
changed, and the next owner removes what was uploaded by then; after it the old objects are named by no row, and pruning
deletes them: here, or by the next owner. docs/adr/0064-a-key-is-forgotten-by-rewriting.md plays what may come between.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated

import pyarrow as pa

from state_ops.arrow.types import type_named
from state_ops.backends import composite
from state_ops.backends.base import Backend
from state_ops.backends.loader import named
from state_ops.checkpoints.reader_holds import ReaderHold
from state_ops.checkpoints.registry import Registry
from state_ops.coordination import gate_hold, publishing_refused
from state_ops.errors import PrunedError, WeirError
from state_ops.facts import Facts, Named
from state_ops.fsck.sinks import OUTPUTS
from state_ops.ids import CheckpointId, epoch_dir, new_attempt_id
from state_ops.keyed.forget import ForgottenKey, copy_without
from state_ops.keyed.owners import KIND_BYTES
from state_ops.logs import Logger
from state_ops.records.checkpoint import EDIT, EDITED, REWRITTEN, Checkpoint, stats_of
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.pins import BRANCH, SAVEPOINT
from state_ops.records.snapshot_files import INPUT, OUTPUT, STATE, Snapshot, StateFile, snapshots_of
from state_ops.schema.key_groups import subtask_of
from state_ops.snapshots import snapshot
from state_ops.snapshots.attempt import Attempt
from state_ops.storage.storage import Storage
from state_ops.storage.temp_dirs import scratch
from weir.definition import Pipeline
from weir.execution.executor import Executor
from weir.inspection.snapshot_files import SnapshotCache
from weir.inspection.state_reader import chosen
from weir.inspection.view import parsed, state_stats
from weir.operations.state_edit import edited
from weir.ownership.derived_checkpoint import commit, unchanged
from weir.ownership.local_paths import local_directory, objects
from weir.ownership.ownership import Ownership
from weir.ownership.pipeline_storage import backend_options, open_storage
from weir.ownership.prune import prune
from weir.restore.recovery import owning
from weir.settings.configuration import Settings

log = Logger("weir.forget")

_SCRATCH = "forget-"


@dataclass(frozen=True, slots=True)
class Holding(Facts):
    """The entries of a key in a retained checkpoint.

    Attributes:
        savepoints: The names of the checkpoint.
        entries: How many entries of its state are the key's: rows, elements, timers, places in indices.
        bytes: The size of the snapshot that has them, which is copied without them.
        stays: The branch that reads this checkpoint, which therefore keeps it as it is; None: it is rewritten.
    """

    checkpoint: CheckpointId
    savepoints: tuple[str, ...]
    entries: int
    bytes: int
    stays: str | None


@dataclass(frozen=True, slots=True)
class Remaining(Facts):
    """A place that may have the key still.

    Attributes:
        kind: What it is.
        name: Which one.
        why: It is left as it is.
    """

    kind: str
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Deletion(Facts):
    """The result of forgetting a key, or the plan of it.

    Attributes:
        holdings: By checkpoint, oldest first.
        remains: Where the key may be still.
        head: The newest checkpoint before it.
        checkpoint: Its own; None: nothing was done.
        bytes_written: Of the objects that were uploaded.
    """

    stage: str
    key: tuple[str, ...]
    holdings: Annotated[tuple[Holding, ...], Named("checkpoints")]
    remains: tuple[Remaining, ...]
    head: Annotated[CheckpointId, Named("before")]
    checkpoint: CheckpointId | None = None
    bytes_written: int = 0


@dataclass(frozen=True, slots=True)
class _State:
    """The stage's state in a retained checkpoint, as that one recorded it.

    Attributes:
        branch: The branch that reads this checkpoint; None: none does.
    """

    row: Checkpoint
    stats: OperatorStats
    key: ForgottenKey
    snapshots: Mapping[int, Snapshot]
    savepoints: tuple[str, ...]
    branch: str | None

    @property
    def owner(self) -> int:
        """The subtask that has the key."""
        return int(subtask_of(self.key.group, self.stats.parallelism, self.stats.max_parallelism))

    def holding(self, entries: int) -> Holding:
        taken = self.snapshots.get(self.owner)
        size = sum(file.bytes for file in taken.files) if taken else 0
        return Holding(self.row.id, self.savepoints, entries, size, self.branch)


def plan(pipeline: Pipeline, settings: Settings, uid: str, key: Sequence[str]) -> Deletion:
    """Return the deletion that `delete` would make. Nothing is changed, and a coordinator may be running.

    Raises:
        ConfigurationError: The texts cannot be a key of the stage.
        PipelineError: The pipeline has no such stage.
        WeirError: No retained checkpoint has state of it.
    """
    storage, registry = open_storage(pipeline, settings)
    head = chosen(pipeline, registry, None)
    holdings = []
    with scratch(settings.work_dir, _SCRATCH) as directory:
        cache = SnapshotCache(directory)
        for state in _states(pipeline, registry, uid, key):
            beat = settings.lease.heartbeat_seconds
            with suppress(PrunedError), ReaderHold(storage, registry, state.row, "weir state delete", beat):
                entries = 0
                if (taken := state.snapshots.get(state.owner)) is not None:
                    with cache.opened(storage, backend_options(settings), taken, state.stats.backend) as backend:
                        entries = sum(1 for _ in state.key.entries(backend))
                holdings.append(state.holding(entries))
    return Deletion(uid, tuple(key), tuple(holdings), _remaining(pipeline, registry, head, uid, holdings), head.id)


def delete(
    pipeline: Pipeline,
    settings: Settings,
    uid: str,
    key: Sequence[str],
    *,
    reason: str = "",
    executor: Executor | None = None,
) -> Deletion:
    """Forget a key, as a checkpoint of its own, which the next run continues.

    Args:
        key: One text for each key column, cast to its type.
        reason: A note that the list of checkpoints shows. It should not name the key.

    Raises:
        BusyError: A coordinator is alive.
        DamageError: A snapshot that has to be copied is not whole. Nothing is changed, as after the errors of `plan`.
    """
    with owning(pipeline, settings, executor, epochs=False) as owner:
        context = owner.context
        head = chosen(pipeline, context.registry, None)
        states = _states(pipeline, context.registry, uid, key)
        id = owner.begin(head)
        try:
            holdings, copies = _copied(owner, uid, states, id, head)
        except BaseException:
            with suppress(OSError, WeirError):  # what stays all the same is removed by the next owner
                context.storage.delete_tree(f"state/{uid}/{epoch_dir(context.generation, id)}")
            raise
        row, replaced = _committed(owner, uid, states, copies, id, head, reason)
        prune(context)
        # What held the pipeline, or a sink's rows, may name the key; a cause that stays is noted again.
        gate_hold.clear(context.storage)
        publishing_refused.clear(context.storage)
        _clean_disk(owner, uid, replaced)
        read = {orphan.commit_id for orphan in context.registry.orphan_listings(as_owner=True)}
        kept = [state.row for state in states if state.row.commit_id in read]
        remains = _remaining(pipeline, context.registry, row, uid, holdings, kept)
        written = {file.path: file.bytes for files in copies.values() for file in files}
    log.info("a key was forgotten", pipeline=pipeline.title, stage=uid, checkpoint=int(id), rewritten=len(replaced))
    return Deletion(uid, tuple(key), tuple(holdings), remains, head.id, id, sum(written.values()))


def _states(pipeline: Pipeline, registry: Registry, uid: str, key: Sequence[str]) -> list[_State]:
    """Return the stage's state in each retained checkpoint that has some, oldest first."""
    completed, pins = registry.checkpoints(), registry.pins()
    having = [row for row in completed if stats_of(row, uid).has_state]
    if not having:
        state_stats(pipeline, completed[-1], uid)
    states = []
    for row in having:
        stats = stats_of(row, uid)
        keys = pa.schema([(name, type_named(kind)) for name, kind in stats.keys])
        forgotten = ForgottenKey.of(parsed(keys, key, uid), stats.max_parallelism)
        named = [pin for pin in pins if pin.commit_id == row.commit_id]
        savepoints = tuple(pin.name for pin in named if pin.kind == SAVEPOINT)
        branch = next((pin.name for pin in named if pin.kind == BRANCH), None)
        states.append(_State(row, stats, forgotten, snapshots_of(registry.files(row), uid), savepoints, branch))
    return states


# -- copies

Copies = dict[tuple[CheckpointId, int], tuple[StateFile, ...]]
"""By checkpoint and subtask, the snapshot without the key."""


def _copied(
    owner: Ownership, uid: str, states: Sequence[_State], id: CheckpointId, head: Checkpoint
) -> tuple[list[Holding], Copies]:
    """Copy and upload every snapshot that may have bytes of the key, each once, however many checkpoints have it.

    What a branch reads is only looked at, unless it is the newest checkpoint, which the deletion's own continues.
    """
    context = owner.context
    options, entries = backend_options(context.settings), dict.fromkeys((state.row.id for state in states), 0)
    copies: Copies = {}
    with scratch(context.settings.work_dir, _SCRATCH) as directory:
        for subtask in sorted({subtask for state in states for subtask in state.snapshots}):
            home = directory / str(subtask)  # one after the other: consecutive snapshots of a subtask share most files
            (home / "read").mkdir(parents=True)
            cache = SnapshotCache(home / "read")
            copied: dict[tuple[str, ...], tuple[int, tuple[StateFile, ...] | None]] = {}
            for state in states:
                taken = state.snapshots.get(subtask)
                if taken is None:
                    continue
                is_kept = state.branch is not None and state.row.id != head.id
                same = (str(state.stats.parallelism), str(is_kept), *sorted(file.path for file in taken.files))
                if same not in copied:
                    with cache.opened(context.storage, options, taken, state.stats.backend) as backend:
                        traced = subtask == state.owner or _has_traces(context.storage, state, taken, backend)
                        if is_kept or not traced:
                            copied[same] = sum(1 for _ in state.key.entries(backend)), None
                        else:
                            attempt = Attempt(uid, subtask, context.generation, id, new_attempt_id(), home / "written")
                            copied[same] = _copy(owner, state, backend, attempt)
                forgotten, files = copied[same]
                entries[state.row.id] += forgotten
                if files is not None:
                    copies[state.row.id, subtask] = files
            shutil.rmtree(home)
    return [state.holding(entries[state.row.id]) for state in states], copies


def _has_traces(storage: Storage, state: _State, taken: Snapshot, backend: Backend) -> bool:
    """Return whether files of a subtask without the key's group may have bytes of the key.

    The subtask had the group before its parallelism changed.
    """
    is_immutable = composite.is_immutable(named(state.stats.backend))
    if composite.has_traces(backend, *state.key.range):
        return True
    logs = (file for file in taken.files if not is_immutable(file.name))  # RocksDB's say which keys files began with
    return any(state.key.encoded in (storage.read_bytes(file.path) or b"") for file in logs)


def _copy(owner: Ownership, state: _State, source: Backend, attempt: Attempt) -> tuple[int, tuple[StateFile, ...]]:
    """Copy one snapshot without the key, and upload it; returns how many entries it had, and the files."""
    context = owner.context
    kind = named(state.stats.backend)
    is_immutable = composite.is_immutable(kind)
    forked = snapshot.working_copy(context.storage, attempt, None, None, is_immutable)
    options = replace(backend_options(context.settings), key=context.storage.full(attempt.reference))
    target = composite.opened(kind, forked.db, options)
    try:
        forgotten = copy_without(source, target, state.key)
        taken = snapshot.take(attempt, target) if target.written else []
    finally:
        target.close()
    prepared = snapshot.prepare(attempt, forked, taken, is_immutable)
    files = snapshot.upload(context.storage, attempt, prepared, None, full=True).files
    shutil.rmtree(attempt.directory)
    return forgotten, files


# -- rows


def _committed(
    owner: Ownership,
    uid: str,
    states: Sequence[_State],
    copies: Copies,
    id: CheckpointId,
    head: Checkpoint,
    reason: str,
) -> tuple[Checkpoint, list[_State]]:
    """Commit the deletion's own checkpoint, with rows that replace the retained ones; returns it, and what was
    replaced."""
    context = owner.context
    replaced = [state for state in states if state.branch is None and _changes(state, copies)]
    rewritten = [_rewritten(state, uid, context.registry.files(state.row), copies, id) for state in replaced]
    rewritten += _without_state(context.registry, {state.row.id for state in states}, id)
    head = replace(head, operators=_without_samples(head.operators))
    listing, base = unchanged(context, head), head
    newest = next((state for state in states if state.row.id == head.id), None)
    if newest is not None:
        of_stage, others = _divided(listing, uid, newest, copies, new=True)
        base = edited(head, uid, _cleaned(newest), others, of_stage, id, {})
        listing = others + of_stage
    new = {file.path: file.bytes for files in copies.values() for file in files}
    totals = {name: count for name, count in base.totals.items() if name != REWRITTEN}
    totals["files_new"] = head.totals.get("files_new", 0) + len(new)
    totals["bytes_new"] = head.totals.get("bytes_new", 0) + sum(new.values())
    row = commit(
        context,
        replace(base, totals=totals | {EDITED: int(id)}),
        id,
        listing,
        kind=EDIT,
        what=f"a key of {uid} is forgotten",
        reason=reason,
        head=head,
        parent=head.id,
        rewritten=rewritten,
    )
    return row, replaced


def _changes(state: _State, copies: Copies) -> bool:
    """Return whether the checkpoint's row or listing changes without the key."""
    cleaned = _without_samples(state.row.operators)
    is_cleaned = cleaned != state.row.operators or _cleaned(state) != state.stats
    return is_cleaned or any((state.row.id, subtask) in copies for subtask in state.snapshots)


def _rewritten(
    state: _State, uid: str, listing: Sequence[StateFile], copies: Copies, id: CheckpointId
) -> tuple[Checkpoint, list[StateFile]]:
    """Return the row and the listing that replace a retained checkpoint, with the copies in place of the old files."""
    of_stage, others = _divided(listing, uid, state, copies, new=False)
    files = others + of_stage
    stats = _cleaned(state).updated(
        files_total=len(of_stage),
        bytes_total=sum(file.bytes for file in of_stage),
        files_new=sum(1 for file in of_stage if file.new),
        bytes_new=sum(file.bytes for file in of_stage if file.new),
    )
    all_state = [file for file in files if file.kind == STATE]
    row = replace(
        state.row,
        commit_id=uuid.uuid4().hex,
        operators={**_without_samples(state.row.operators), uid: stats},
        totals={**state.row.totals, REWRITTEN: int(id)},
        files=len(files),
        bytes_total=sum(file.bytes for file in all_state),
        bytes_new=sum(file.bytes for file in all_state if file.new),
    )
    return row, files


def _without_state(
    registry: Registry, having: Collection[CheckpointId], id: CheckpointId
) -> list[tuple[Checkpoint, list[StateFile]]]:
    """Return the replacements of retained checkpoints in which the stage has no state, and whose gates have samples.

    Args:
        having: The checkpoints in which it has some.
    """
    read = {pin.commit_id for pin in registry.pins(as_owner=True) if pin.kind == BRANCH}
    rows = [row for row in registry.checkpoints(as_owner=True) if row.id not in having and row.commit_id not in read]
    rewritten = []
    for row in rows:
        cleaned = _without_samples(row.operators)
        if cleaned != row.operators:
            totals = {**row.totals, REWRITTEN: int(id)}
            new = replace(row, commit_id=uuid.uuid4().hex, operators=cleaned, totals=totals)
            rewritten.append((new, list(registry.files(row))))
    return rewritten


def _divided(
    listing: Sequence[StateFile], uid: str, state: _State, copies: Copies, *, new: bool
) -> tuple[list[StateFile], list[StateFile]]:
    """Return a checkpoint's files of the stage's state, with the copies instead of what was copied, and all others.

    Args:
        new: Whether the copies count as uploaded by this checkpoint.
    """
    of_stage: list[StateFile] = []
    others: list[StateFile] = []
    for file in listing:
        if file.kind != STATE or file.operator != uid:
            others.append(file)
        elif (state.row.id, file.subtask) not in copies:
            of_stage.append(file)
    for subtask in state.snapshots:
        of_stage += [replace(file, new=new) for file in copies.get((state.row.id, subtask), ())]
    return of_stage, others


def _cleaned(state: _State) -> OperatorStats:
    """Return the checkpoint's record of the stage without the key.

    A sweep that had come to the key goes on from the beginning of its group, and samples that gates refused are
    dropped.
    """
    text, stats = state.key.encoded.hex(), _unsampled(state.stats)
    swept = {subtask: key[: 2 * KIND_BYTES] if text in key else key for subtask, key in stats.swept.items()}
    return stats.updated(swept=swept) if swept != stats.swept else stats


def _without_samples(operators: Mapping[str, OperatorStats]) -> dict[str, OperatorStats]:
    """Return a checkpoint's record of its stages without samples that gates refused.

    Samples of any stage may be of the key.
    """
    return {uid: _unsampled(stats) for uid, stats in operators.items()}


def _unsampled(stats: OperatorStats) -> OperatorStats:
    gates = [
        {**verdict, "sample": [], "keys": []} if verdict.get("sample") or verdict.get("keys") else verdict
        for verdict in stats.gates
    ]
    return stats.updated(gates=gates) if gates != stats.gates else stats


# -- what is beside it


def _clean_disk(owner: Ownership, uid: str, replaced: Sequence[_State]) -> None:
    """Remove this host's copies of the stage's state. The next run fetches it."""
    context = owner.context
    shutil.rmtree(local_directory(context.settings, context.pipeline, context.storage) / uid, ignore_errors=True)
    named_now = {file.path for row in context.registry.checkpoints() for file in context.registry.files(row)}
    gone = [file for state in replaced for taken in state.snapshots.values() for file in taken.files]
    objects(context.settings).drop(file.digest for file in gone if file.path not in named_now)


def _remaining(
    pipeline: Pipeline,
    registry: Registry,
    head: Checkpoint,
    uid: str,
    holdings: Sequence[Holding],
    read: Sequence[Checkpoint] = (),
) -> tuple[Remaining, ...]:
    """Return the places where the key may still be.

    Args:
        head: The newest checkpoint.
        read: Checkpoints whose old objects wait until nobody reads them any more.
    """
    return tuple(_places(pipeline, registry, head, uid, holdings, read))


def _downstream(pipeline: Pipeline, uid: str) -> set[str]:
    """Return the stages that rows of a stage reach."""
    reached = {uid}
    for stage in pipeline.stages:  # each after those that it reads
        if any(before.uid in reached for before in stage.stages_before):
            reached.add(stage.uid)
    return reached - {uid}


def _listed(ids: Sequence[CheckpointId]) -> str:
    return f"checkpoint{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"


def _staged_beside(file: StateFile) -> str | None:
    """Return the sink for which a file has rows, if it is no part of the sink's own table."""
    top, _, below = file.path.partition("/")
    return below.partition("/")[0] if file.kind == OUTPUT and top == OUTPUTS else None


def _places(
    pipeline: Pipeline,
    registry: Registry,
    head: Checkpoint,
    uid: str,
    holdings: Sequence[Holding],
    read: Sequence[Checkpoint],
) -> Iterator[Remaining]:
    for row in read:
        why = "somebody reads its old files at this moment; the next pruning deletes them"
        yield Remaining("reader", f"checkpoint {row.id}", why)
    for pin in registry.pins():
        if pin.kind == BRANCH:
            kept = any(holding.checkpoint == pin.checkpoint_id for holding in holdings)
            of = f", and checkpoint {pin.checkpoint_id} that it reads" if kept else ""
            why = f"the branch's own checkpoints and tables{of}: drop it, then delete the key again"
            yield Remaining("branch", f"{pipeline.name}@{pin.name}", why)
    if pipeline.branch is not None:
        yield Remaining("pipeline", pipeline.name, "this branch was forked from it: delete the key there, too")
    downstream, names = _downstream(pipeline, uid), {name for name, _ in stats_of(head, uid).keys}
    for other, stats in head.operators.items():
        if other == uid or not stats.has_state:
            continue
        has_name = {name for name, _ in stats.keys} & names
        if has_name or other in downstream or uid in _downstream(pipeline, other):
            why = "its key has a column of that name" if has_name else "rows of this key may have gone through it"
            yield Remaining("state", other, f"{why}: weir state delete {pipeline.title} {other} --key ...")
    completed = registry.checkpoints()
    for other in dict.fromkeys(other for row in completed for other in row.operators):
        having = [row.id for row in completed if any(batch["layers"] for batch in stats_of(row, other).waiting)]
        if having:
            why = f"rows wait in front of it in {_listed(having)}; a run that continues one of these applies them"
            yield Remaining("waiting rows", other, why)
    for sink in pipeline.sinks:
        yield Remaining("sink", sink.name, "rows that are published belong to whoever reads them")
    staged = (_staged_beside(file) for row in completed for file in registry.files(row))
    for name in sorted({name for name in staged if name is not None}):
        why = "rows that were staged for it, below outputs/, until no retained checkpoint names them"
        yield Remaining("staged rows", name, why)
    archived = {file.operator for row in completed for file in registry.files(row) if file.kind == INPUT}
    for name in sorted(archived):
        yield Remaining("archive", name, "input that a rewind may read again, until no retained checkpoint needs it")
    for source in pipeline.sources:
        yield Remaining("input", source.name, "what is read again, or comes with the next rows, brings the key back")
    if pipeline.on_restore or any(stage.gates for stage in pipeline.stages):
        why = "data docs may show rows that a gate has refused, registry/restores values that on_restore has"
        yield Remaining("gate results", pipeline.title, why)
        why = "Dagster's events of checks show up to three values that a gate has refused, and their keys"
        yield Remaining("dagster events", pipeline.title, why)
    why = "errors quote values and keys: log files, spark.log, the lease, runs in Dagster; functions log what they like"
    yield Remaining("logs", pipeline.title, why)
    yield Remaining(
        "local disks", "of other hosts", "copies of state in local.work_dir, until the next run sweeps them"
    )
