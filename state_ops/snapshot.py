"""Local snapshots of one subtask's RocksDB: fork, take, upload only what is new, restore.

    <work>/<pipeline>/<operator uid>/<subtask>/
        g2-e17-<attempt>/            one attempt's directory, never shared, never opened by another attempt
            db/                      working copy: hard links of the base's SSTs, copies of its small files
            snapshot/                hard links of the files that were live at the barrier
            manifest.json            snapshot file -> object in storage; written last, so it vouches for the rest

    <root>/<pipeline>/state/<operator uid>/g2-e17/<subtask>-<attempt>/<file>     immutable, unique names

Why each step is safe:
- RocksDB never reuses a file number within one lineage (its MANIFEST counts on), and an attempt's directory is forked
  from exactly one base. So a file that still is the very inode that was linked in is the base's file; a file of the same
  name and size from another attempt (a replay produces those, with other content) is never taken for it.
- Only files that the base checkpoint's row names are re-referenced, by that row's object path.
- Only SSTs are linked: RocksDB appends to MANIFEST and replaces CURRENT in place.
- A base directory is used only if its manifest names the attempt that the checkpoint's row names.
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import stamina

from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.checkpoint import STATE, Snapshot, StateFile
from state_ops.errors import DamageError
from state_ops.ids import AttemptId, CheckpointId, Generation, epoch_dir, parse_epoch_dir
from state_ops.storage import Storage

_TRANSFERS = 4
_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of one subtask: whose state it is, and where its local files are."""

    operator: str
    subtask: int
    generation: Generation
    epoch: CheckpointId
    id: AttemptId
    home: Path

    @property
    def directory(self) -> Path:
        return self.home / f"{epoch_dir(self.generation, self.epoch)}-{self.id}"

    @property
    def prefix(self) -> str:
        """Where this attempt's objects go; nobody else ever writes there."""
        return f"state/{self.operator}/{epoch_dir(self.generation, self.epoch)}/{self.subtask}-{self.id}"


@dataclass(frozen=True, slots=True)
class Fork:
    """A working copy of the base. inherited: local name -> (inode, the file as the base checkpoint names it)."""

    db: Path
    inherited: dict[str, tuple[int, StateFile]]


def fork(storage: Storage, attempt: Attempt, base: Snapshot | None) -> Fork:
    """Make the attempt's working copy: by hard links where the base's local files are still there, else from storage.

    Raises DamageError that names the file when an object is missing or is not what the checkpoint recorded.
    """
    db = attempt.directory / "db"
    db.mkdir(parents=True)
    if base is None:
        return Fork(db, {})
    if not _link_local(attempt, base, db):
        fetch(storage, base, db)
    return Fork(db, {file.name: ((db / file.name).stat().st_ino, file) for file in base.files if _is_sst(file.name)})


def fetch(storage: Storage, base: Snapshot, target: Path) -> None:
    """Download a snapshot's files in parallel into `target`, every digest checked."""

    def one(file: StateFile) -> None:
        _check_name(file.name)
        storage.get_file(file.path, target / file.name, digest=file.digest)

    with ThreadPoolExecutor(_TRANSFERS) as pool:
        list(pool.map(one, base.files))


def _link_local(attempt: Attempt, base: Snapshot, db: Path) -> bool:
    source = _local_directory(attempt.home, base)
    if source is None:
        return False
    for file in base.files:
        _check_name(file.name)
        local = source / "snapshot" / file.name
        if not local.is_file() or local.stat().st_size != file.bytes:
            _empty(db)
            return False
        if _is_sst(file.name):
            os.link(local, db / file.name)
        else:
            shutil.copyfile(local, db / file.name)
    return True


def _local_directory(home: Path, base: Snapshot) -> Path | None:
    for directory in home.glob(f"g*-e*-{base.attempt}"):
        manifest = directory / _MANIFEST
        if manifest.is_file() and json.loads(manifest.read_text())["attempt"] == base.attempt:
            return directory
    return None


def take(attempt: Attempt, backend: RocksDBBackend) -> list[Path]:
    """The sync phase: flush and hard-link. Returns the files that are needed to open the snapshot."""
    target = attempt.directory / "snapshot"
    backend.snapshot(target)
    # Not part of the state: RocksDB's own logs, its empty write-ahead log, options (Weir's code gives them), rocksdict's notes.
    wanted = ("MANIFEST-", "CURRENT")
    return [file for file in sorted(target.iterdir()) if _is_sst(file.name) or file.name.startswith(wanted)]


def upload(storage: Storage, attempt: Attempt, forked: Fork, files: list[Path]) -> Snapshot:
    """The rest: upload what the base does not have, re-reference what it has, write the local manifest last."""

    @stamina.retry(on=OSError, attempts=4, timeout=60)
    def send(file: Path) -> StateFile:
        path = f"{attempt.prefix}/{file.name}"
        size, digest = storage.put_file(file, path)
        return StateFile(
            attempt.operator, attempt.subtask, STATE, file.name, path, size, digest, True, attempt.id, attempt.id
        )

    def one(file: Path) -> StateFile:
        known = forked.inherited.get(file.name)
        if known is not None and known[0] == file.stat().st_ino:
            return replace(known[1], new=False, snapshot=attempt.id)
        return send(file)

    with ThreadPoolExecutor(_TRANSFERS) as pool:
        listed = tuple(pool.map(one, files))
    snapshot = Snapshot(attempt.subtask, attempt.id, listed)
    manifest = {"attempt": attempt.id, "files": {file.name: [file.attempt, file.path, file.digest] for file in listed}}
    staging = attempt.directory / f".{_MANIFEST}"
    staging.write_text(json.dumps(manifest))
    staging.rename(attempt.directory / _MANIFEST)
    shutil.rmtree(forked.db, ignore_errors=True)
    return snapshot


def unchanged(base: Snapshot | None) -> tuple[StateFile, ...]:
    """The listing of a subtask that wrote nothing: the base's files, none of them new."""
    return tuple(replace(file, new=False) for file in base.files) if base else ()


def sweep(attempt: Attempt, base: Snapshot | None) -> None:
    """Remove local directories that nothing can need: those of lower generations and of epochs before this one, but the base's.

    Another attempt of this very epoch may be alive (speculation), so its directory stays.
    """
    if not attempt.home.is_dir():
        return
    for directory in attempt.home.iterdir():
        name, _, owner = directory.name.rpartition("-")
        parsed = parse_epoch_dir(name)
        if parsed is None or (base is not None and owner == base.attempt):
            continue
        if parsed < (attempt.generation, attempt.epoch):
            shutil.rmtree(directory, ignore_errors=True)


def _is_sst(name: str) -> bool:
    return name.endswith(".sst")


def _check_name(name: str) -> None:
    if not name or "/" in name or "\\" in name or name.startswith("."):
        raise DamageError(f"The registry names a local state file {name!r}.", next="Weir never writes such a name.")


def _empty(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
