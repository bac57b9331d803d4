"""Local snapshots of one subtask's state: fork, take, prepare, upload what is new or everything, restore.

    <work>/<pipeline>/<operator uid>/<subtask>/
        g2-e17-<attempt>/            one attempt's directory, never shared, never opened by another attempt
            db/                      working copy: hard links of the base's immutable files, copies of the others
            snapshot/                the files that the backend made at the barrier; RocksDB's are hard links
            .snapshot/, .writing     while an asynchronous snapshot is written (`async_writer`)
            manifest.json            snapshot file -> object in storage; written last, so that it proves the rest
        .restoring-<attempt>/        a snapshot that is being fetched; what is there is not fetched again if that breaks
                                     off

    <root>/<pipeline>/state/<operator uid>/g2-e17/<subtask>-<attempt>/<file>     immutable, unique names

Why each step is safe:
- RocksDB never reuses a file number within one lineage (its MANIFEST counts on), and an attempt's directory is forked
  from exactly one base. So a file that still is the very inode that was linked in is the base's file; a file of the
  same name and size from another attempt (a replay produces those, with other content) is never taken for it.
- Only files that the base checkpoint's row names are re-referenced, by that row's object path. A full snapshot
  re-references nothing, so no later pruning of another checkpoint concerns it; the next incremental one builds on
  either.
- Only files that the backend calls immutable are linked. Of RocksDB's these are SSTs: it appends to MANIFEST and
  replaces CURRENT in place.
- A base directory is used only if its manifest says what the checkpoint's row says: the attempt, and for every file the
  object and the digest. Else everything is fetched, each digest checked on the way.
- An epoch may build on a snapshot that is still being uploaded (`LocalSnapshot`): the coordinator names the attempt
  whose ack it has, and the names and sizes in that ack must be what lies there. What such a fork inherits is uploaded
  only after the epoch before is confirmed, and refers to the objects that the confirmed checkpoint names.
- Local disks rot too. The digests of copied files are checked at every fork. A linked file is only checked for its
  size, because hashing the whole state at every epoch would cost more than the epoch; its backend finds damage when it
  reads it. RocksDB verifies the checksum of each block that it reads, compactions included, and on opening an SST the
  unique id that MANIFEST recorded.
  What is never read is never uploaded either (its object in storage is whole), but by a full snapshot, which compares.
  Damage that is found this way costs the base's local directory: the replay fetches it from storage (`healing`).

A base that has to be fetched becomes a local directory first, which the attempt then forks like any other: a subtask
that writes nothing, or whose epoch is declined, would fetch it again for the next attempt. What stays on a host, and
for how long, is in `sweep`."""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

from state_ops.backends import loader
from state_ops.backends.base import MOST_REFERENCE_BYTES, REFERENCE, Backend, BackendFactory, BackendOptions, Frozen
from state_ops.coordination.restore_progress import RestoreProgress
from state_ops.errors import DamageError, LocalBaseError, PipelineError, TransientError
from state_ops.ids import AttemptId, epoch_dir
from state_ops.records.snapshot_files import STATE, LocalFile, LocalSnapshot, Snapshot, StateFile, is_reference
from state_ops.snapshots import async_writer
from state_ops.snapshots.attempt import Attempt
from state_ops.snapshots.object_cache import ObjectCache, download, is_object
from state_ops.snapshots.sweep import RESTORING, attempts, directories, owner
from state_ops.storage import disks
from state_ops.storage.storage import Arrived, CancelledError, Storage
from state_ops.storage.temp_dirs import resumable, scratch
from state_ops.storage.transfers import together

_MANIFEST = "manifest.json"
_PART = ".part-"


def _of_default(name: str) -> bool:
    return loader.named(loader.DEFAULT).is_immutable(name)


@dataclass(frozen=True, slots=True)
class WorkingCopy:
    """A working copy of the base.

    Attributes:
        inherited: The base's immutable files: local name -> inode.
        source: The local directory that it was linked from; None if it was fetched from storage, or starts empty.
        only: Whether `source` is the only place that has the base.
        fetched: Where the bytes came from that were not in `source`.
        operator: The local directory of the operator's subtasks.
    """

    db: Path
    inherited: dict[str, int]
    source: Path | None = None
    only: bool = False
    objects: ObjectCache | None = None
    fetched: Snapshot | None = None
    operator: Path | None = None


def working_copy(
    storage: Storage,
    attempt: Attempt,
    base: Snapshot | LocalSnapshot | None,
    deadline: float | None = None,
    is_immutable: Callable[[str], bool] = _of_default,
    objects: ObjectCache | None = None,
    *,
    read: bool = True,
    progress: RestoreProgress | None = None,
) -> WorkingCopy:
    """Make the attempt's working copy: by hard links if the base's files are on this host, else from storage.

    A base that is still being written is waited for until `deadline`. A base that has to be fetched may take longer,
    and if the fetch breaks off, the next attempt continues it.

    Args:
        deadline: On time.monotonic().
        is_immutable: Which files the backend never changes in place (`BackendFactory.is_immutable`), so that they may
            be linked.
        objects: As for `fetch`.
        read: False if the base is in memory already (`Frozen`): then the working copy stays empty.
        progress: Tells whoever waits how far a fetch is.

    Raises:
        DamageError: An object is missing, or is not what the checkpoint recorded. The error names the file.
        LocalBaseError: The base is on a local disk alone, and is not there or not whole.
    """
    db = attempt.directory / "db"
    db.mkdir(parents=True)
    if base is None:
        return WorkingCopy(db, {})
    for name in (base.attempt, *(file.name for file in base.files)):
        _check_name(name)
    if isinstance(base, LocalSnapshot):
        source = next((directory for directory in attempts(attempt.home) if owner(directory) == base.attempt), None)
        if read and (
            source is None
            or not _is_settled(source, base, deadline)
            or not _link_all(source, base.files, db, is_immutable)
        ):
            raise LocalBaseError(
                f"The snapshot of attempt {base.attempt}, which is still being uploaded, is not on this host's disk.",
                where=str(attempt.home),
                next="The stage runs again as soon as it is in storage.",
            )
    else:
        source = _local_directory(attempt.home, base)
        if read and (source is None or not _link_all(source, base.files, db, is_immutable)):
            source = None
            epoch = epoch_dir(attempt.generation, attempt.epoch)
            _brought(storage, attempt.home, base, epoch, is_immutable, objects, progress)
            brought = _local_directory(attempt.home, base)
            if brought is None or not _link_all(brought, base.files, db, is_immutable):
                raise TransientError(
                    "A state that was fetched is not on the disk any more.",
                    where=str(attempt.home),
                    next="The epoch was declined and will be replayed. Look at that disk if it happens again.",
                )
    inherited = {file.name: (db / file.name).stat().st_ino for file in base.files if read and is_immutable(file.name)}
    fetched = base if isinstance(base, Snapshot) and source is None else None
    return WorkingCopy(db, inherited, source, isinstance(base, LocalSnapshot), objects, fetched, attempt.home.parent)


def _is_settled(source: Path, base: LocalSnapshot, deadline: float | None) -> bool:
    """Wait until a snapshot has been written, and return whether it is whole. If it is not, its own upload says why."""
    try:
        if any(file.writing for file in base.files):
            async_writer.settle(source, deadline)
    except (TransientError, FileNotFoundError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Fetched:
    """The bytes of a snapshot by their origin: storage, this host, or local snapshots of the same operator."""

    stored: int = 0
    cached: int = 0
    local: int = 0

    def __add__(self, other: Fetched) -> Fetched:
        return Fetched(self.stored + other.stored, self.cached + other.cached, self.local + other.local)


def fetch(
    storage: Storage,
    base: Snapshot,
    target: Path,
    deadline: float | None = None,
    is_immutable: Callable[[str], bool] = _of_default,
    objects: ObjectCache | None = None,
    operator: Path | None = None,
    arrived: Arrived | None = None,
    *,
    in_place: bool = False,
) -> Fetched:
    """Bring a snapshot's files into `target` in parallel, and check every digest.

    Files that an earlier try has left in `target` are not fetched again.

    Args:
        objects: This host's objects, where immutable files are looked for and kept.
        operator: The local directory of the operator's subtasks. Files of their snapshots are linked if they are proven
            to be the very object.
        arrived: Told of all bytes as they arrive, from storage or from this host.
        in_place: Immutable files of a storage on a disk of this host are read where they lie, through symbolic links:
            for a caller that reads the state once. Only their size is checked; the backend checks what it reads.
    """
    copies = dict(_copies(operator)) if operator is not None else {}
    count: Arrived = arrived or (lambda _: None)

    def fetch_file(file: StateFile, cancelled: Event) -> Fetched:
        if cancelled.is_set():
            raise CancelledError("A download was cancelled.", where=storage.full(file.path))
        local, part = target / file.name, target / f"{_PART}{file.name}"
        if local.exists():
            if is_object(local, file):
                count(file.bytes)
                return Fetched(local=file.bytes)
            local.unlink()
        if not is_immutable(file.name):
            download(storage, file, local, cancelled, count, part)
            return Fetched(stored=file.bytes)
        if in_place and _symlinked(storage, file, local):
            count(file.bytes)
            return Fetched(local=file.bytes)
        copy = copies.get((file.path, file.digest))
        if copy is not None and _linked(copy, local, file):
            count(file.bytes)
            return Fetched(local=file.bytes)
        if objects is None:
            download(storage, file, local, cancelled, count, part)
        elif not objects.fetch(storage, file, local, cancelled, count, part):
            count(file.bytes)
            return Fetched(cached=file.bytes)
        return Fetched(stored=file.bytes)

    for file in base.files:
        _check_name(file.name)
    # Objects that this host has come first, because fetched ones may push them out.
    files = sorted(base.files, key=lambda file: objects is None or not objects.holds(file))
    return sum(together(fetch_file, files, at_once=storage.transfers, deadline=deadline), Fetched())


def _copies(operator: Path) -> Iterator[tuple[tuple[str, str], Path]]:
    """Yield the files of all local snapshots of an operator that are proven to be objects, each with its object's path
    and digest."""
    for home in directories(operator):
        for directory in attempts(home):
            manifest = _read_manifest(directory)
            for name, (_, path, digest) in (manifest["files"] if manifest else {}).items():
                yield (path, digest), directory / "snapshot" / name


def _symlinked(storage: Storage, file: StateFile, local: Path) -> bool:
    """Have a local name for an object on a disk; False where it is elsewhere, or visibly not what was recorded."""
    there = storage.on_disk(file.path)
    with suppress(OSError):
        if there is not None and there.stat().st_size == file.bytes:
            local.symlink_to(there)
            return True
    return False


def _linked(copy: Path, local: Path, file: StateFile) -> bool:
    """Link another snapshot's file, unless it is not the object.

    Damage in that file may be the reason for this fetch.
    """
    with suppress(OSError):
        if is_object(copy, file):
            disks.link(copy, local)
            return True
    return False


def _brought(
    storage: Storage,
    home: Path,
    base: Snapshot,
    epoch: str,
    is_immutable: Callable[[str], bool],
    objects: ObjectCache | None,
    progress: RestoreProgress | None = None,
    arrived: Arrived | None = None,
    check: Callable[[Path], None] | None = None,
    *,
    in_place: bool = False,
) -> Fetched:
    """Leave a snapshot in a subtask's home as if it had been taken there. It replaces one that was not to be trusted.

    If the fetch breaks off, the files that have arrived stay in `.restoring-<attempt>`, and the next call continues it.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(resumable(home, RESTORING, base.attempt))
        if directory is None:  # another process fetches it, and may be stuck
            directory = stack.enter_context(scratch(home, ".")) / "kept"
        files = directory / "snapshot"
        files.mkdir(parents=True, exist_ok=True)
        if progress is not None:
            arrived = stack.enter_context(progress.fetching(sum(file.bytes for file in base.files)))
        fetched = fetch(storage, base, files, None, is_immutable, objects, home.parent, arrived, in_place=in_place)
        if check is not None:
            try:
                with scratch(home, ".") as looked_at:
                    _duplicate(base, files, looked_at, is_immutable)
                    check(looked_at)
            except DamageError:
                shutil.rmtree(directory, ignore_errors=True)
                raise
        _settle(directory, home, base, epoch)
        return fetched


def _duplicate(base: Snapshot, source: Path, target: Path, is_immutable: Callable[[str], bool]) -> None:
    for file in base.files:
        bring = disks.link if is_immutable(file.name) else shutil.copyfile
        bring(source / file.name, target / file.name)


def _settle(kept: Path, home: Path, base: Snapshot, epoch: str) -> None:
    write_manifest(kept, base)
    for directory in attempts(home):
        if owner(directory) == base.attempt:
            shutil.rmtree(directory, ignore_errors=True)
    try:
        kept.rename(home / f"{epoch}-{base.attempt}")
    except OSError:  # another attempt of this epoch was faster
        shutil.rmtree(kept, ignore_errors=True)  # else another process may have begun it anew


def is_here(home: Path, base: Snapshot) -> bool:
    """Return whether a subtask's home has a whole snapshot, as far as names and sizes of its files tell."""
    source = _local_directory(home, base)
    if source is None:
        return False
    with suppress(FileNotFoundError):
        return all((source / "snapshot" / file.name).stat().st_size == file.bytes for file in base.files)
    return False


def is_sound(home: Path, base: Snapshot) -> bool:
    """Return whether the files of a snapshot in a subtask's home have the recorded digests.

    All are read. If one has another digest, the snapshot is removed.
    """
    source = _local_directory(home, base)
    if source is None:
        return False
    with suppress(FileNotFoundError):  # a run on this host has just removed it
        if all(_digest(source / "snapshot" / file.name) == file.digest for file in base.files):
            return True
        _drop(source)
    return False


def bring_home(
    storage: Storage,
    home: Path,
    base: Snapshot,
    epoch: str,
    check: Callable[[Path], None],
    is_immutable: Callable[[str], bool],
    objects: ObjectCache,
    arrived: Arrived | None = None,
    *,
    in_place: bool = False,
) -> Fetched:
    """Leave a snapshot in a subtask's home as if it had been taken here, for the next fork.

    Files that are whole when an error is raised are not fetched again, unless something is damaged.

    Args:
        epoch: The prefix of the directory's name, as for an attempt.
        check: Called with a working copy, before anything vouches for the snapshot. What it and `fetch` raise is
            raised.
        in_place: As in `fetch`.
    """
    for again in (False, True):
        try:
            return _brought(
                storage, home, base, epoch, is_immutable, objects, arrived=arrived, check=check, in_place=in_place
            )
        except DamageError:
            if again or not drop_rotten(base, objects, home.parent):
                raise
    raise AssertionError("the second try returns or raises")


def _link_all(
    source: Path, files: Sequence[StateFile | LocalFile], db: Path, is_immutable: Callable[[str], bool]
) -> bool:
    """Fill `db` from a local directory; False, with `db` empty, if the files visibly are not the recorded ones."""
    try:
        if all(_bring(source / "snapshot" / file.name, file, db, is_immutable(file.name)) for file in files):
            return True
    except FileNotFoundError:  # it was never there, or another attempt has just removed it
        pass
    _empty(db)
    return False


def _bring(local: Path, file: StateFile | LocalFile, db: Path, immutable: bool) -> bool:
    """Bring one file of the base into the working copy; False if it visibly is not what the checkpoint recorded."""
    estimated = isinstance(file, LocalFile) and file.writing
    if local.stat().st_size != file.bytes and not estimated:
        return False
    if immutable:
        disks.link(local, db / file.name)
        return True
    shutil.copyfile(local, db / file.name)
    return _digest(db / file.name) == file.digest


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _local_directory(home: Path, base: Snapshot) -> Path | None:
    wanted = _manifest(base)
    for directory in attempts(home):
        if owner(directory) == base.attempt and _read_manifest(directory) == wanted:
            return directory
    return None


@contextmanager
def healing(forked: WorkingCopy) -> Iterator[None]:
    """Use a working copy in the `with` block. If it was linked from damaged local files, these are removed.

    - Then TransientError is raised instead of DamageError: the replay fetches the base from storage and verifies it.
    - If the local files are the only copy, nothing is removed, and LocalBaseError says so: files that were not read may
      be whole, and must not be lost.
    - A base that was fetched may be linked in part from this host's objects. Those are read again, and damaged ones
      removed.
    """
    try:
        yield
    except DamageError as error:
        if forked.source is None:
            if forked.fetched is not None and forked.operator is not None:
                raise_if_rotten(error, forked.fetched, forked.objects, forked.operator)
            raise
        if forked.only:
            raise LocalBaseError(
                f"The local copy of a state that is still being uploaded is damaged. {error.what}",
                where=error.where or str(forked.source),
                next="The stage runs again as soon as the state is in storage, and fetches it from there.",
            ) from error
        if forked.objects is not None:  # which has the very files of this snapshot
            manifest = _read_manifest(forked.source)
            forked.objects.drop(digest for _, _, digest in (manifest["files"].values() if manifest else ()))
        _drop(forked.source)
        raise TransientError(
            f"The local copy of the state is damaged and was removed. {error.what}",
            where=error.where or str(forked.source),
            next="The replay fetches the state from storage. If this comes back, look at the disk.",
        ) from error


def raise_if_rotten(error: DamageError, base: Snapshot, objects: ObjectCache | None, operator: Path) -> None:
    """Raise TransientError if the damage is in files of this host, which are then removed; else do nothing, because the
    damage is elsewhere.
    """
    if drop_rotten(base, objects, operator):
        raise TransientError(
            f"What this host had of the state was damaged and was removed. {error.what}",
            where=error.where or str(operator),
            next="The replay fetches it from storage. If this comes back, look at the disk.",
        ) from error


def drop_rotten(base: Snapshot, objects: ObjectCache | None, operator: Path) -> bool:
    """Read all copies that this host has of a snapshot's objects again, and remove those that are damaged now.

    Args:
        base: The snapshot in storage.
        objects: The objects that this host keeps.
        operator: The local directory of the operator's subtasks, whose snapshots may have been linked from.

    Returns:
        Whether there was a damaged one.
    """
    has_rotten = objects is not None and objects.drop_rotten(base.files)
    files = {(file.path, file.digest): file for file in base.files}
    for named, copy in list(_copies(operator)):
        with suppress(FileNotFoundError):  # just removed by another attempt
            if named in files and not is_object(copy, files[named]):
                _drop(copy.parent.parent)
                has_rotten = True
    return has_rotten


def distrust(home: Path, attempt: AttemptId | None) -> None:
    """Remove an attempt's directory from a subtask's home, because a file in it is damaged."""
    for directory in attempts(home):
        if owner(directory) == attempt:
            _drop(directory)


def _drop(directory: Path) -> None:
    (directory / _MANIFEST).unlink(missing_ok=True)  # first: without it nothing else is trusted
    shutil.rmtree(directory, ignore_errors=True)


def take(attempt: Attempt, backend: Backend) -> list[Path]:
    """Return the sync phase of a snapshot: the backend writes or links its files.

    Returns:
        The files that are needed to open the snapshot.

    Raises:
        PipelineError: A file could not be restored under its name. After the commit it would be too late to notice.
    """
    return _plain(attempt, backend, backend.snapshot, attempt.directory / async_writer.WHOLE)


def _plain(
    attempt: Attempt, maker: Backend | Frozen, write: Callable[[Path], Sequence[Path]], target: Path
) -> list[Path]:
    files = sorted(set(write(target)))
    for file in files:
        if file.parent != target or file.name.startswith(".") or not file.is_file():
            raise PipelineError(
                f"The state backend {type(maker).__name__} breaks its contract: {file} is no plain file of its "
                "snapshot.",
                where=f"stage {attempt.operator}, epoch {attempt.epoch}, subtask {attempt.subtask}",
                next="snapshot(target) returns files directly in target, whose names begin with no dot.",
            )
        if is_reference(file.name) and not 0 < file.stat().st_size <= MOST_REFERENCE_BYTES:
            raise PipelineError(
                f"The state backend {type(maker).__name__} breaks its contract: {file.name} has "
                f"{file.stat().st_size:,} bytes.",
                where=f"stage {attempt.operator}, epoch {attempt.epoch}, subtask {attempt.subtask}",
                next=f"A reference has 1 to {MOST_REFERENCE_BYTES:,} bytes.",
            )
    return files


def begin(
    attempt: Attempt, forked: WorkingCopy, frozen: Frozen, is_immutable: Callable[[str], bool] = _of_default
) -> LocalSnapshot:
    """Begin a snapshot, instead of `take` and `prepare`, whose files are written asynchronously.

    A thread writes them, and a caller that needs them waits (`async_writer.settle`).

    Raises:
        PipelineError: Some files would be linked without being read, but nobody has their digests yet.
    """

    def written(target: Path) -> None:
        names = [file.name for file in _plain(attempt, frozen, frozen.write, target)]
        if names != sorted(frozen.files):
            raise _broken(attempt, frozen, f"it said {sorted(frozen.files)}, and wrote {names}")

    for name in frozen.files:
        _check_name(name)
        if not is_immutable(name):
            raise _broken(attempt, frozen, f"{name} is changed in place, and has no digest before it is written")
    shutil.rmtree(forked.db, ignore_errors=True)
    size = frozen.file_bytes // max(1, len(frozen.files))
    begun = tuple(LocalFile(name, size, None, False, writing=True) for name in sorted(frozen.files))
    async_writer.begin(attempt.directory, written)
    return LocalSnapshot(attempt.subtask, attempt.id, begun)


def _broken(attempt: Attempt, frozen: Frozen, how: str) -> PipelineError:
    return PipelineError(
        f"The state backend's {type(frozen).__name__} breaks its contract: {how}.",
        where=f"stage {attempt.operator}, epoch {attempt.epoch}, subtask {attempt.subtask}",
        next="Set state.asynchronous_snapshots to false, and report it to whoever wrote the backend.",
    )


def prepare(
    attempt: Attempt, forked: WorkingCopy, files: Sequence[Path], is_immutable: Callable[[str], bool] = _of_default
) -> LocalSnapshot:
    """Return the files that `take` returned, as the next epoch and `upload` need to know them. The closed working copy
    is removed."""

    def described(file: Path) -> LocalFile:
        stat = file.stat()
        digest = None if is_immutable(file.name) else _digest(file)
        return LocalFile(file.name, stat.st_size, digest, _is_inherited(file, stat, forked))

    prepared = LocalSnapshot(attempt.subtask, attempt.id, tuple(described(file) for file in files))
    shutil.rmtree(forked.db, ignore_errors=True)
    return prepared


def _is_inherited(file: Path, stat: os.stat_result, forked: WorkingCopy) -> bool:
    """Return whether a snapshot's file is the base's: by its inode, or by its bytes where snapshots are copied."""
    inherited, same = forked.inherited.get(file.name), forked.db / file.name
    if inherited is None or inherited == stat.st_ino:
        return inherited is not None
    with suppress(OSError):
        return same.stat().st_ino == inherited and filecmp.cmp(same, file, shallow=False)
    return False


def upload(
    storage: Storage,
    attempt: Attempt,
    local: LocalSnapshot,
    base: Snapshot | None,
    *,
    full: bool = False,
    deadline: float | None = None,
) -> Snapshot:
    """Upload the files that the base does not have, reference those that it has, and write the local manifest last.

    The first failure is raised after the other transfers have stopped. Files that were uploaded by then are for
    `discard`.

    Args:
        base: The snapshot from which the attempt was forked, as a confirmed checkpoint names it.
        full: Upload everything, so that the snapshot depends on no other.
        deadline: On time.monotonic().
    """

    def upload_file(file: LocalFile, cancelled: Event) -> StateFile:
        return sent(storage, attempt, file, base, full, cancelled)

    listed = tuple(together(upload_file, local.files, at_once=storage.transfers, deadline=deadline))
    snapshot = Snapshot(attempt.subtask, attempt.id, listed)
    write_manifest(attempt.directory, snapshot)
    return snapshot


def sent(
    storage: Storage, attempt: Attempt, file: LocalFile, base: Snapshot | None, full: bool, cancelled: Event
) -> StateFile:
    """Return a file of a snapshot as it is in storage: uploaded now, or as the base names it."""
    local, base_file = attempt.directory / "snapshot" / file.name, None
    if file.writing:
        async_writer.settle(attempt.directory, cancelled=cancelled)
    if file.inherited:
        base_file = next((other for other in base.files if other.name == file.name), None) if base else None
        if base_file is None:
            raise DamageError(f"{file.name} was inherited from a base that does not have it.", where=str(local))
        if not full:
            return replace(base_file, new=False, snapshot=attempt.id)
    path = f"{attempt.prefix}/{file.name}"
    size, digest = storage.put_file(local, path, cancelled=cancelled)
    expected = base_file.digest if base_file else file.digest
    if (
        expected is not None and digest != expected
    ):  # else a file that rotted on the local disk would get a digest that matches it
        raise DamageError("A local state file is not what it was when it was new.", where=str(local))
    return StateFile(
        attempt.operator, attempt.subtask, STATE, file.name, path, size, digest, True, attempt.id, attempt.id
    )


def kept_again(
    kind: BackendFactory,
    options: BackendOptions,
    source: Storage,
    file: StateFile,
    storage: Storage,
    path: str,
    within: Path,
) -> tuple[int, str]:
    """Let a backend keep one more snapshot of a state that another storage has a reference to.

    The copy depends on nothing there: either storage may be dropped.

    Args:
        path: Of the file with the new reference, in `storage`.
        within: Where local files go.

    Returns:
        The size in bytes and sha256 of that file.

    Raises:
        DamageError: The file in `source` is not what was recorded, or the backend has lost the snapshot.
    """
    with scratch(within, "weir-kept-") as directory:
        (directory / "db").mkdir()
        source.get_file(file.path, directory / "db" / REFERENCE, digest=file.digest)
        backend = kind.open(directory / "db", replace(options, key=storage.full(path)))
        try:
            backend.snapshot(directory / "snapshot")
        finally:
            backend.close()
        return storage.put_file(directory / "snapshot" / REFERENCE, path)


def discard(storage: Storage, attempt: Attempt) -> None:
    """Delete the state that an attempt without an ack has uploaded. Nothing can name what lies under its own prefix."""
    storage.delete_tree(attempt.prefix)


def _manifest(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "attempt": snapshot.attempt,
        "files": {file.name: [file.attempt, file.path, file.digest] for file in snapshot.files},
    }


def write_manifest(directory: Path, snapshot: Snapshot) -> None:
    """Record in an attempt's directory which objects its files are. From then on the directory can serve as the base
    that a confirmed checkpoint names.
    """
    staging = directory / f".{_MANIFEST}"
    staging.write_text(json.dumps(_manifest(snapshot)))
    staging.rename(directory / _MANIFEST)


def _read_manifest(directory: Path) -> Any:
    try:
        return json.loads((directory / _MANIFEST).read_bytes())
    except (OSError, ValueError):  # missing, unreadable, or cut off by a power failure: not to be trusted
        return None


def unchanged(base: Snapshot | None) -> tuple[StateFile, ...]:
    """Return the listing of a subtask that wrote nothing: the base's files, none of them new."""
    return tuple(replace(file, new=False) for file in base.files) if base else ()


def _check_name(name: str) -> None:
    if not name or "/" in name or "\\" in name or name.startswith("."):
        raise DamageError(
            f"The registry names {name!r} as a local state file or its directory.",
            next="Weir never writes such a name.",
        )


def _empty(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
