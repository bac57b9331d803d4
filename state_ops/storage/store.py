"""The store of bytes: one small Protocol, and the file system behind it.

Paths are relative to the store's root and were checked by `Storage`, which is what everything else uses. A store says
what happened by the kind of OSError: UnavailableError may pass (throttled, timed out, connection lost),
FileNotFoundError and PermissionError are what they say, any other one stays. No message holds what a server or a
library wrote, only
its status, code and kind: answers of servers repeat parts of the request.

`FileSystemStore` is pyarrow.fs; `ObjectStore`, in its own module, is obstore (docs/adr/0010-object-stores.md says why
not one for both).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    pass

CHUNK = 4 << 20  # bytes sent at a time over a network
ARRIVING = 512 << 10  # bytes that are read at a time over one: what a download that breaks off loses at most
PART = 8 << 20  # bytes of one request; larger objects are sent in parts, of which S3 allows 10,000
LOCAL_CHUNK = 256 << 10  # and on a disk: what stays in a processor's cache from reading to hashing to writing
UNFINISHED = ".tmp-"


class UnavailableError(OSError):
    """Storage is throttled, answers too late, or is out of reach: it may work in a moment."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One object in storage: path relative to the root, size in bytes."""

    path: str
    bytes: int


class Store(Protocol):
    """Bytes below one root. Each operation is whole or raises; a listing is complete or raises."""

    remote: bool

    def write(self, path: str, chunks: Iterator[bytes], size: int) -> None:
        """Put an object of `size` bytes in place, over what is there: visible as a whole, or not at all."""

    def create(self, path: str, data: bytes) -> bool:
        """Put an object in place unless there is one; False if there is. What fencing stands on, for small objects."""

    def read(self, path: str, start: int = 0) -> Iterator[bytes]:
        """Return the object's content from the byte `start` on, which it has. Raises FileNotFoundError."""

    def tail(self, path: str, length: int) -> tuple[bytes, int]:
        """Return the last `length` bytes, all if there are fewer, and the object's size in bytes. Raises
        FileNotFoundError."""

    def part(self, path: str, start: int, length: int) -> bytes:
        """Return `length` bytes from the byte `start` on, fewer at the object's end.

        Raises FileNotFoundError, and OSError if the object may end before `start`.
        """

    def size(self, path: str) -> int | None:
        """Size in bytes, None if there is no such object."""

    def on_disk(self, path: str) -> Path | None:
        """Return the file that an object is, of a store on a disk of this host; None: it is elsewhere."""

    def stamp(self, path: str) -> str | None:
        """Return a stamp that changes whenever the object is written anew, even with the same content; None if there is
        none.
        """

    def list(self, path: str) -> Iterable[StoredFile]:
        """Return all objects below `path`, also unfinished ones; none if there is no such directory."""

    def list_dirs(self, path: str) -> Iterable[str]:
        """Return the names of the directories directly below `path`."""

    def delete(self, path: str) -> bool:
        """Delete an object; False if it is known that there was none, which object stores do not tell."""

    def delete_files(self, paths: Sequence[str]) -> None:
        """Delete objects, whether they are there or not."""

    def delete_all(self, path: str, files: Iterable[StoredFile]) -> None:
        """Delete the files, which are all of those below `path`, and the directory."""
