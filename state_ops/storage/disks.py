"""Disks without room, which an error does not always say, and disks without hard links, where files are copied."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from state_ops.errors import is_full
from state_ops.storage.store import UNFINISHED

_ROOM = 1 << 20  # bytes; with less nothing that Weir writes fits for long
# What file systems without hard links, and those between two of which none can be made, answer.
_NO_LINK = frozenset(
    {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}
)

_links: dict[int, bool] = {}


@dataclass(frozen=True, slots=True)
class Disk:
    """The room that a file system has left where a path lies.

    Attributes:
        mount: Its directory.
        free, total: Bytes that we may use.
        files: The number of files that may still be made; None if the file system sets no limit.
    """

    mount: str
    path: str
    free: int
    total: int
    files: int | None

    @property
    def is_full(self) -> bool:
        return self.free < min(_ROOM, self.total) or self.files == 0

    def __str__(self) -> str:
        left = f"{self.free:,} bytes free of {self.total:,}"
        return f"the disk {self.mount} of {self.path} has {left}" + (
            ", and no file more fits" if self.files == 0 else ""
        )


def disk(path: str | Path) -> Disk | None:
    """Return the disk of a path, which need not exist yet; None where that cannot be told, as of a URI."""
    if "://" in str(path):
        return None
    there = Path(path).absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        left, device = os.statvfs(there), there.stat().st_dev
        mount = there if there.is_dir() else there.parent
        while mount != mount.parent and mount.parent.stat().st_dev == device:
            mount = mount.parent
    except OSError:
        return None
    files = left.f_favail if left.f_files else None
    return Disk(str(mount), str(path), left.f_bavail * left.f_frsize, left.f_blocks * left.f_frsize, files)


def has_links(directory: str | Path) -> bool:
    """Return whether files of a directory can have hard links. The disk is tried once in a process."""
    device = Path(directory).stat().st_dev
    if device not in _links:
        tried = Path(directory) / f"{UNFINISHED}{uuid.uuid4().hex}"
        second = tried.with_name(f"{tried.name}-link")
        try:
            tried.touch()  # a directory in which nothing may be written says nothing about its disk
            try:
                os.link(tried, second)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                _links[device] = False
            else:
                _links[device] = True
        finally:
            second.unlink(missing_ok=True)
            tried.unlink(missing_ok=True)
    return _links[device]


def link(source: Path, target: Path) -> None:
    """Give a file that nobody changes a second name; where the disk has no hard links, copy it with its times.

    A symbolic link is linked, or made again, itself.

    Raises:
        OSError: As `os.link` does, but not for want of hard links.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        copy(source, target)


def copy(source: Path, target: Path) -> None:
    """Copy a file with its times. Nothing stays of a copy that fails.

    Raises:
        FileExistsError: The target is there.
    """
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    try:
        shutil.copy2(source, target, follow_symlinks=False)
    except OSError:
        target.unlink(missing_ok=True)
        raise


def full(error: BaseException, places: Mapping[str, str | Path]) -> str | None:
    """Return the full disk that an error comes from, in words with path and bytes free; None if there is none.

    Args:
        error: What was raised, and all that led to it. One that says that there is no room names the disk of its own
            file, or else the fullest.
        places: Where Weir writes, by the setting that says so.
    """
    all_causes = list(causes(error))
    named = [cause.filename for cause in all_causes if isinstance(cause, OSError) and is_full(cause)]
    of_files = [candidate for path in named if isinstance(path, str | Path) and (candidate := disk(path)) is not None]
    others = [candidate for path in places.values() if (candidate := disk(path)) is not None]
    candidates = [candidate for candidate in (*of_files, *others) if candidate.is_full]
    if not candidates and any(map(is_full, all_causes)):  # somebody has made room since, or it is a quota
        candidates = of_files or sorted(others, key=lambda candidate: candidate.free)[:1]
    settings = {str(path): name for name, path in places.items()}
    descriptions = [
        f"{candidate} ({settings[candidate.path]})" if candidate.path in settings else str(candidate)
        for candidate in candidates
    ]
    return "; ".join(dict.fromkeys(descriptions)) or None


def causes(error: BaseException) -> Iterable[BaseException]:
    """Yield an error and all that led to it."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
