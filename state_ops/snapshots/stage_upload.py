"""Upload what the subtasks of one stage have left on a host's disk at the barrier.

If the coordinator sees the same disk, it uploads, so that a worker is free for the next epoch at once. Elsewhere a
subtask uploads before it acks. docs/adr/0020-epochs-overlap.md says why.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event

from state_ops.errors import DamageError, TransientError
from state_ops.ids import epoch_dir
from state_ops.outputs import MAIN as MAIN
from state_ops.outputs import PARTS
from state_ops.records.acks import Ack
from state_ops.records.snapshot_files import CHANNEL, OUTPUT, LocalFile, Snapshot, StagedFile, StateFile
from state_ops.snapshots import snapshot
from state_ops.snapshots.attempt import Attempt
from state_ops.storage.storage import Storage
from state_ops.storage.transfers import together


def upload_outputs(storage: Storage, acks: Sequence[Ack], *, deadline: float | None) -> list[StateFile]:
    """Upload the rows that some acks hand to sinks, and nothing else yet; `upload` is told that they are there.

    Args:
        deadline: On time.monotonic().
    """
    staged = [ack.pending_upload.staged if ack.pending_upload is not None else () for ack in acks]
    todo = [(ack, file) for ack, files in zip(acks, staged, strict=True) for file in files if file.kind == OUTPUT]

    def upload_file(item: tuple[Ack, StagedFile], cancelled: Event) -> StateFile:
        return _sent(storage, *item, cancelled)

    return together(upload_file, todo, at_once=storage.transfers * max(1, len(acks)), deadline=deadline)


def upload(
    storage: Storage,
    acks: Sequence[Ack],
    bases: Mapping[int, Snapshot],
    *,
    full: bool,
    channels: Callable[[StagedFile], bool],
    deadline: float | None,
    sent: Sequence[StateFile] = (),
) -> list[Ack]:
    """Upload what some acks stand for, and return the acks with their files in storage.

    An ack that has handed nothing over stays as it is. The first failure is raised after the other transfers have
    stopped.

    Args:
        bases: By subtask, the snapshot that it was built on, as a confirmed checkpoint names it.
        full: As in `snapshot.upload`.
        channels: Which files of `for_stages` are to be read from storage.
        deadline: On time.monotonic().
        sent: Files of these acks that are in storage already.
    """
    started, there = time.perf_counter(), {file.path for file in sent}
    todo: list[tuple[Ack, LocalFile | StagedFile]] = []
    for ack in acks:
        if ack.pending_upload is not None:
            _check_base(ack, bases.get(ack.subtask))
            todo += [(ack, file) for file in ack.pending_upload.snapshot.files] if ack.pending_upload.snapshot else []
            todo += [
                (ack, file) for file in ack.pending_upload.staged if file.kind != CHANNEL and file.path not in there
            ]
            todo += [(ack, file) for file in for_stages(ack) if isinstance(file, StagedFile) and channels(file)]

    damaged: list[Ack] = []

    def upload_file(item: tuple[Ack, LocalFile | StagedFile], cancelled: Event) -> StateFile:
        ack, file = item
        if isinstance(file, LocalFile):
            try:
                return snapshot.sent(storage, attempt_of(ack), file, bases.get(ack.subtask), full, cancelled)
            except DamageError:
                damaged.append(ack)
                raise
        return _sent(storage, ack, file, cancelled)

    try:
        moved = together(upload_file, todo, at_once=storage.transfers * max(1, len(acks)), deadline=deadline)
    except DamageError as error:  # only now, because the other transfers read the same directories
        raise _healed(damaged, error) from error
    by_subtask: dict[int, list[StateFile]] = {}
    for file in (*sent, *moved):
        by_subtask.setdefault(file.subtask, []).append(file)
    took = round((time.perf_counter() - started) * 1000, 3)
    return [_durable(ack, bases.get(ack.subtask), by_subtask.get(ack.subtask, []), took) for ack in acks]


def _sent(storage: Storage, ack: Ack, file: StagedFile, cancelled: Event) -> StateFile:
    size, digest = storage.put_file(Path(file.local), file.path, cancelled=cancelled)
    fields = (file.kind, file.name, file.path, size, digest, True, ack.attempt, None, file.sink, file.rows)
    return StateFile(ack.operator, ack.subtask, *fields)


def _check_base(ack: Ack, base: Snapshot | None) -> None:
    assert ack.pending_upload is not None
    if ack.pending_upload.base != (base.attempt if base else None):
        raise DamageError(
            f"Subtask {ack.subtask} of {ack.operator} has built on the snapshot {ack.pending_upload.base}, but its "
            "predecessor was "
            f"confirmed with {base.attempt if base else 'none'}.",
            where=f"epoch {ack.epoch}, attempt {ack.attempt}",
            next="The epoch was declined. If it happens again, report it: it must not.",
        )


def _healed(acks: Sequence[Ack], error: DamageError) -> TransientError:
    """Remove the directories of these acks and of their bases after damage in local files, and return the error to
    raise.
    """
    for ack in acks:
        assert ack.pending_upload is not None
        for attempt in (ack.attempt, ack.pending_upload.base):
            snapshot.distrust(Path(ack.pending_upload.directory).parent, attempt)
    return TransientError(
        f"The local copy of the state is damaged and was removed. {error.what}",
        where=error.where,
        next="The replay fetches the state from storage. If this comes back, look at the disk.",
    )


def _durable(ack: Ack, base: Snapshot | None, files: Sequence[StateFile], took: float) -> Ack:
    if ack.pending_upload is None:
        return ack
    if ack.pending_upload.snapshot is not None:
        state_files = tuple(file for file in files if file.snapshot is not None)
        snapshot.write_manifest(Path(ack.pending_upload.directory), Snapshot(ack.subtask, ack.attempt, state_files))
        listed = tuple(files)
    else:
        listed = (*snapshot.unchanged(base), *files)
    return replace(ack, files=listed, pending_upload=None, ms={**ack.ms, "upload": took})


def attempt_of(ack: Ack) -> Attempt:
    """Return the attempt of an ack, with the local directory of its files."""
    assert ack.pending_upload is not None
    home = Path(ack.pending_upload.directory).parent
    return Attempt(ack.operator, ack.subtask, ack.generation, ack.epoch, ack.attempt, home)


def for_stages(ack: Ack) -> list[StagedFile | StateFile]:
    """Return the files that a subtask leaves for stages: its rows for the next ones, and what it has left of its own
    input.

    They are channel files, which belong to Weir alone. Rows that also go to a table are uploaded to a channel as well.
    """
    if ack.pending_upload is None:
        return [file for file in ack.files if file.kind == CHANNEL]
    attempt = attempt_of(ack)
    return [
        file if file.kind == CHANNEL else replace(file, kind=CHANNEL, path=channel_path(attempt, file.name), sink=None)
        for file in ack.pending_upload.staged
        if file.kind == CHANNEL or not file.name.endswith(PARTS)
    ]


def channel_path(attempt: Attempt, output: str) -> str:
    """Return the storage path for the rows of one output that an attempt leaves for other stages."""
    place = f"channels/{attempt.operator}/{epoch_dir(attempt.generation, attempt.epoch)}/{attempt.subtask}-{attempt.id}"
    return f"{place}.parquet" if output == MAIN else f"{place}/{output}.parquet"


def read_by_next(ack: Ack, output: str = MAIN) -> list[StagedFile | StateFile]:
    """Return the files of one output's rows that stages downstream read: each row once, from a channel if it is in
    one."""
    from_channel = [file for file in for_stages(ack) if file.name == output]
    return from_channel or ack.staged(output)


def locals_of(ack: Ack) -> Collection[str]:
    """Return the local paths of the rows that a subtask has handed over."""
    return [file.local for file in ack.pending_upload.staged] if ack.pending_upload is not None else []


def clear(acks: Sequence[Ack]) -> None:
    """Remove what nobody reads any more when an epoch has ended: local copies of rows, and the directories of attempts
    that wrote no state.
    """
    for ack in acks:
        if ack.pending_upload is None:
            continue
        for file in ack.pending_upload.staged:
            with suppress(OSError):  # the next run's sweep finds it
                Path(file.local).unlink(missing_ok=True)
        if ack.pending_upload.snapshot is None:
            shutil.rmtree(ack.pending_upload.directory, ignore_errors=True)
