"""The contract of a state backend: two protocols, which `rocksdb`, `filesystem`, `memory` and third parties implement.

tests/state_ops/backends/test_backends.py tests the contract for every backend; docs/reference/backends.md shows a small
one.

One subtask's epoch, which is one attempt:

    open(directory)  ->  multi_get, scan, write ...  ->  snapshot(target), if something was written  ->  close

- **The directory belongs to this attempt alone**, and lies on a local disk. It is empty when there is no state yet;
  else it holds the base snapshot's files, flat, under the names that they had. Afterwards it is removed.
- **Files that `is_immutable` names are hard links.** Other checkpoints' files are the very same inodes, so they must
  never be changed in place, nor truncated, nor opened for writing; deleting one, or renaming another file over it, is
  fine. All others are copies, to do with as one likes. The answer depends on the name alone and must not change from
  one release to the next.
- **A snapshot is a set of files.** The files that it lists are uploaded; the next epoch's directory holds no others. A
  file that is the very inode of the base's is not uploaded again: the checkpoint names its object once more. So the
  name of an immutable file must never come back with other content in one lineage of snapshots.
- **A checkpoint is the only durability.** Nothing has to survive a crash before the snapshot, so a backend needs no log
  and no fsync.
- **The backend finds damage in immutable files.** They are linked unread, so each needs checksums that are verified
  when it is read. Damage raises DamageError and never gives other values. Copied files are compared with the digests in
  the checkpoint before `open` sees them.

What is not called, and what is not promised:

- After a failure nothing but `close` is called, and `close` may fail then as well; after a crash not even that. A
  directory that was left is never opened again, and a snapshot that was begun may end up in no checkpoint.
- `close` is called after `snapshot` and before the upload: what `target` holds has to stand without the open backend.
- An epoch that is replayed, a speculative twin and a fork each open the same base again, perhaps at the same time and
  on the same host. Each has a directory of its own with the same inodes.
- One thread uses a backend at a time; several backends may be open in one process, one after the other or at once.
- A backend for reading (`weir state get`) is opened, read and closed, without a snapshot.

Errors: DamageError when what Weir wrote is not what is read, TransientError when the machine or the disk is short of
something and a replay may succeed, ConfigurationError for a setting. Whatever else is raised declines the epoch as an
error of the stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, overload, runtime_checkable

Compression = Literal["lz4", "zstd"]

BEYOND = b"\xff" * 9
"""Above every key: they begin with a key group, of which there are at most 32768."""


@dataclass(frozen=True, slots=True)
class SortedRun(Sequence[tuple[bytes, bytes]]):
    """Puts whose keys ascend strictly, probably the last of an epoch: a backend that keeps sorted runs may keep them as
    they are. With `more`, runs of higher keys probably follow in this epoch, and nothing of lower ones.

    To every other one it is a sequence of pairs, which are only made when they are asked for. The field is not called
    `keys`: dict() would take the run for a mapping.
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
    """One subtask's ordered key-value store, raw bytes in and out. Keys are not empty, and ordered bytewise."""

    @property
    def written(self) -> bool:
        """Whether the state may differ from the base's: true from the first write of at least one put or delete.

        While it is false no snapshot is taken, and the base's files stand for this epoch too.
        """
        ...

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of `keys` in their order; None where there is none. Keys may repeat, and are in no
        order."""
        ...

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes] = ()) -> None:
        """Apply one batch, all or nothing, visible at once. Deletes come first; of several puts of a key the last
        counts.

        Deleting a key that is not there is no error. Empty values are values. puts may be a `SortedRun`; then deletes
        ascend strictly as well.
        """
        ...

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Entries with start <= key < end, in key order. Nothing is written before the iterator is exhausted or
        dropped."""
        ...

    def approximate_entries(self) -> int:
        """Return roughly how many entries there are, without looking at them.

        The number decides what is cheaper, never what is right.
        """
        ...

    def snapshot(self, target: Path) -> list[Path]:
        """Make `target`, which does not exist, and put the state of this moment there as files; returns those.

        Directly in `target`, with plain names that do not begin with a dot; files that are not returned are ignored.
        No files at all stand for an empty state. This is the barrier: it delays the epoch, the upload does not count.
        """
        ...

    def close(self) -> None:
        """Let go of memory, threads and file handles."""
        ...


class Frozen(Protocol):
    """A state as it was at a barrier. Nobody changes it any more, so that it may be written while the next epoch works
    on it.

    files: names of what `write` makes; the factory calls all of them immutable. file_bytes: of these files;
    memory_bytes: what it takes in this process. Both are estimates: they decide what may wait, never what is right.
    """

    @property
    def files(self) -> tuple[str, ...]: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...

    def write(self, target: Path) -> list[Path]:
        """Write the snapshot as `Backend.snapshot` does, in a thread of its own, beside backends that `reopen` has
        opened.
        """
        ...

    def reopen(self, options: BackendOptions) -> Backend:
        """Open the state as it was, without its files. Later writes show only in the backend that is returned."""
        ...


@runtime_checkable
class Freezing(Protocol):
    """An option of a backend: snapshots that are written after the barrier (`state.asynchronous_snapshots`)."""

    def freeze(self) -> Frozen:
        """Return the state of this moment, in no more time than it takes to hold on to it.

        Only `close` is called afterwards.
        """
        ...


@runtime_checkable
class Clipping(Protocol):
    """An option of a backend: without it, entries are deleted one by one when a subtask's key groups change."""

    def keep_only(self, start: bytes, end: bytes) -> None:
        """Forget all entries but those with start <= key < end. The state counts as written."""
        ...


@runtime_checkable
class Backwards(Protocol):
    """An option of a backend: without it, the last entries of a range are found by reading all of it."""

    def scan_back(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Scan as `Backend.scan` does, the highest key first."""
        ...


@runtime_checkable
class Tracing(Protocol):
    """An option of a backend: without it, any file of its snapshots may have traces of any key."""

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
        where: The owner of the state, for messages.
        compression: The compression of RocksDB's files.
    """

    memory_mb: int = 128
    max_state_size_mb: float = 5
    own: Mapping[str, str] = field(default_factory=dict)
    where: str = ""
    compression: Compression = "lz4"


class BackendFactory(Protocol):
    """A kind of backend, on the coordinator and in every worker: the object behind a backend's name.

    Attributes:
        format: The name of its files' format. State can be opened by every backend of the format that wrote it.
    """

    @property
    def format(self) -> str: ...

    def is_immutable(self, name: str) -> bool:
        """Return whether a snapshot's file of this name is never changed in place, and can tell damage from data by
        itself.
        """
        ...

    def open(self, directory: Path, options: BackendOptions) -> Backend:
        """Open the state whose files are in `directory`, or an empty one if it holds none."""
        ...
