"""The contract of a state backend: two protocols, which `rocksdb`, `filesystem`, `memory` and third parties implement.

`weir.testing.BackendContract` tests it for any backend. docs/how-to/state-backend.md shows two small ones.

One subtask's epoch is one attempt, with these calls:

    open(directory)  ->  multi_get, scan, write ...  ->  snapshot(target), if something was written  ->  close

Rules:

- **The directory belongs to this attempt alone**, and lies on a local disk. Without state it is empty. Otherwise it
  holds the base snapshot's files, flat, under the names that they had. It is removed afterwards.
- **Files that `is_immutable` names are hard links** to files of other checkpoints. Never change such a file in place,
  truncate it, or open it for writing. You may delete it, or rename another file over it. The answer of `is_immutable`
  depends on the name alone, and must not change from one release to the next.
- **All other files are copies.** You may change them.
- **A snapshot is a set of files, or a reference.** The files that `snapshot` returns are uploaded, and the next epoch's
  directory holds no others. A file that is the same inode as in the base is not uploaded again: the checkpoint names
  its object once more. So the name of an immutable file must never come back with other content in one lineage of
  snapshots. The next section is about references.
- **A checkpoint is the only durability.** Nothing has to survive a crash before the snapshot, so a backend needs no log
  and no fsync.
- **The backend finds damage in immutable files.** They are linked unread, so each needs checksums that are verified
  when it is read. Damage raises DamageError and never gives other values. Copied files are compared with the digests in
  the checkpoint before `open` is called.

A backend that uploads by itself (SlateDB, or a database on a server) keeps its snapshots, and hands out references:

- **The reference is a text** of at most `MOST_REFERENCE_BYTES` bytes of UTF-8, in a file `REFERENCE`, which is the only
  file of the snapshot. Weir does not read the text. It stores the file, names it in the checkpoint with its digest, and
  hands it back in the directory of `open`, on any host. `is_immutable(REFERENCE)` is False.
- **A snapshot is durable when `snapshot` returns.** It is made under `BackendOptions.key`, a name that no other
  snapshot has or ever gets. An empty key says that the state is only read. `snapshot` may be called although nothing
  was written: then it makes one more snapshot of the same state.
- **A snapshot stands alone.** It may share data with others in the backend's store. Deleting one never harms another,
  not even one that was built on it.
- **Nothing is written before the first write** of an attempt, and then only under its key. What an attempt has begun
  when it dies stays in the store until Weir deletes it.
- **Weir alone decides what is deleted**, by `Keeping`, which the factory implements. The backend deletes nothing by
  age. It keeps its data outside of the pipeline's storage.
- **Snapshots are taken at the barrier.** Such a backend does not implement `Freezing`.

Not promised:

- After a failure only `close` is called, and `close` may fail too. After a crash not even `close` is called. A
  directory that is left over is never opened again. A snapshot that was begun may become part of no checkpoint.
- `close` is called after `snapshot` and before the upload. So the files in `target` must be complete without the open
  backend.
- A replayed epoch, a speculative twin and a fork open the same base again, perhaps at the same time and on the same
  host. Each has a directory of its own with the same inodes.
- One thread uses a backend at a time. Several backends may be open in one process at once.
- A backend for reading (`weir state get`) is opened, read and closed, without a snapshot.

Errors:

- DamageError: Data that Weir wrote has changed.
- TransientError: The machine or the disk is short of something, and a replay may succeed.
- ConfigurationError: A setting is wrong.
- Any other error declines the epoch, as an error of the stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, overload, runtime_checkable

from state_ops.records.snapshot_files import REFERENCE as REFERENCE

Compression = Literal["lz4", "zstd"]

MOST_REFERENCE_BYTES = 4096

BEYOND = b"\xff" * 9
"""Above every key: they begin with a key group, of which there are at most 32768."""


@dataclass(frozen=True, slots=True)
class SortedRun(Sequence[tuple[bytes, bytes]]):
    """Puts whose keys ascend strictly, probably the last ones of an epoch.

    A backend that keeps sorted runs may keep them as they are. To any other backend this is a sequence of pairs, which
    are made when they are asked for.

    Attributes:
        ascending: The keys. The field is not called `keys`, since dict() would take the run for a mapping.
        values: Their values.
        more: True if runs of higher keys probably follow in this epoch, and no lower keys.
    """

    ascending: list[bytes]
    values: list[bytes]
    more: bool = False

    def __len__(self) -> int:
        return len(self.ascending)

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return zip(self.ascending, self.values, strict=True)

    @overload
    def __getitem__(self, at: int) -> tuple[bytes, bytes]: ...
    @overload
    def __getitem__(self, at: slice) -> SortedRun: ...
    def __getitem__(self, at: int | slice) -> tuple[bytes, bytes] | SortedRun:
        if isinstance(at, slice):
            return SortedRun(self.ascending[at], self.values[at], self.more)
        return self.ascending[at], self.values[at]


class Backend(Protocol):
    """One subtask's ordered key-value store of raw bytes. Keys are not empty, and are ordered bytewise."""

    @property
    def written(self) -> bool:
        """True from the first write of at least one put or delete: the state may differ from the base's.

        While it is false no snapshot is taken, and the checkpoint names the base's files again.
        """
        ...

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, in the order of `keys`; None for a key without a value.

        Args:
            keys: Keys in any order. A key may occur several times.

        Raises:
            DamageError: A file is damaged.
        """
        ...

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes] = ()) -> None:
        """Apply one batch, all or nothing, visible at once.

        Args:
            puts: Keys with their values, applied after the deletes. Of several puts of a key the last one counts. An
                empty value is a value. With a `SortedRun`, deletes ascend strictly as well.
            deletes: Keys to delete. A key that is not there is no error.
        """
        ...

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the entries with start <= key < end, in key order.

        Nothing is written before the iterator is exhausted or dropped.

        Raises:
            DamageError: A file is damaged.
        """
        ...

    def approximate_entries(self) -> int:
        """Return roughly the number of entries, without a look at them.

        The number decides which way is cheaper, never a result.
        """
        ...

    def snapshot(self, target: Path) -> list[Path]:
        """Write the state of this moment as files into a new directory.

        This is the barrier: its time delays the epoch, that of the upload does not.

        Args:
            target: The directory, which does not exist yet.

        Returns:
            The files of the snapshot, directly in `target`, with plain names that do not begin with a dot; none for an
            empty state. Other files there are ignored.
        """
        ...

    def close(self) -> None:
        """Let go of memory, threads and file handles."""
        ...


class Frozen(Protocol):
    """A state as it was at a barrier, which may be written while the next epoch goes on from it.

    Nobody changes it any more. `file_bytes` and `memory_bytes` are estimates: they decide what may wait, never a
    result.
    """

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files that `write` makes. The factory calls all of them immutable."""
        ...

    @property
    def file_bytes(self) -> int:
        """The bytes of these files."""
        ...

    @property
    def memory_bytes(self) -> int:
        """The bytes that the state takes in this process."""
        ...

    def write(self, target: Path) -> list[Path]:
        """Write the snapshot as `Backend.snapshot` does.

        It is called in a thread of its own, beside backends that `reopen` has opened.
        """
        ...

    def reopen(self, options: BackendOptions) -> Backend:
        """Open the state as it was, without its files.

        Later writes show only in the backend that is returned.
        """
        ...


@runtime_checkable
class Freezing(Protocol):
    """Implement this too for snapshots that are written after the barrier (`state.asynchronous_snapshots`)."""

    def freeze(self) -> Frozen:
        """Return the state of this moment, without writing it.

        Only `close` is called afterwards.
        """
        ...


@runtime_checkable
class Clipping(Protocol):
    """Implement this too for fast rescaling.

    Without it, entries are deleted one by one when a subtask's key groups change.
    """

    def keep_only(self, start: bytes, end: bytes) -> None:
        """Forget all entries but those with start <= key < end. The state counts as written."""
        ...


@runtime_checkable
class Backwards(Protocol):
    """Implement this too if a range can be read from its end.

    Without it, the last entries of a range are found by reading all of it.
    """

    def scan_back(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Scan as `Backend.scan` does, the highest key first."""
        ...


@runtime_checkable
class Tracing(Protocol):
    """Implement this too if files of deleted keys can be told, for `weir state delete`.

    Without it, any file of a snapshot may have traces of any key.
    """

    def has_traces(self, start: bytes, end: bytes) -> bool:
        """Return whether files of the state may still have bytes of keys with start <= key < end, deleted or not."""
        ...


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """The settings for every backend; each backend takes the ones that concern it.

    Attributes:
        memory_mb: MiB for all state of this process together.
        max_state_size_mb: MiB of keys and values that one subtask may have in the memory backend.
        own: `state.options`, for backends of third parties.
        where: The owner of the state, for error messages.
        compression: The compression of RocksDB's files.
        key: The name under which a backend that keeps its snapshots makes the one of this attempt: the full path, or
            URI, of the file with its reference. Empty if the state is only read.
    """

    memory_mb: int = 128
    max_state_size_mb: float = 5
    own: Mapping[str, str] = field(default_factory=dict)
    where: str = ""
    compression: Compression = "lz4"
    key: str = ""


class BackendFactory(Protocol):
    """A kind of backend, on the coordinator and in every worker: the object behind a backend's name.

    Attributes:
        format: The name of its files' format. State can be opened by every backend of the format that wrote it.
    """

    @property
    def format(self) -> str: ...

    def is_immutable(self, name: str) -> bool:
        """Return whether a snapshot's file of this name is never changed in place, and has checksums of its own."""
        ...

    def open(self, directory: Path, options: BackendOptions) -> Backend:
        """Open the state whose files are in `directory`, or an empty state if there are no files."""
        ...


@runtime_checkable
class Keeping(Protocol):
    """Implement this too, in the factory, if the backend keeps its snapshots and hands out references.

    Only the owner of a pipeline deletes, and only what no retained checkpoint names. A key begins with the place of its
    pipeline's storage, so pipelines may share one store.
    """

    def kept(self, below: str, options: BackendOptions) -> Iterable[str]:
        """Return the keys that begin with `below`: of all snapshots in the store, and of those that were only begun.

        What is deleted is decided from the answer, so it is complete, or an error is raised.
        """
        ...

    def delete(self, keys: Collection[str], options: BackendOptions) -> None:
        """Delete the snapshots of these keys, and what was begun under them. A key that is not there is no error."""
        ...

    def problem(self, reference: str, options: BackendOptions) -> str | None:
        """Return in words what is wrong with a snapshot; None if it is there and whole, as far as can be told.

        `weir fsck` asks it of every snapshot that a retained checkpoint names.

        Args:
            reference: The text that `snapshot` wrote.
        """
        ...
