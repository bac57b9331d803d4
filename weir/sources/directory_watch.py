"""Watch the directory of a file source: a problem is said once, or raised as an error, as the source wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from state_ops.counts import counted
from state_ops.errors import InputError
from state_ops.logs import Logger
from weir.definition import Source
from weir.sources import positions
from weir.sources.positions import Arrivals, Position
from weir.sources.slices import SourceFile
from weir.sources.source_directory import LandingDirectory

DELIVERED_AGAIN = (
    "Deliver what is new in them under other names, or replay the range of event time that they have: "
    "docs/how-to/backfills.md."
)
"""What a person does about files that were delivered again after they were read."""

log = Logger("weir.source")


def named(files: Sequence[SourceFile], most: int = 3) -> str:
    """Return the number of files, and the names of the first of them."""
    names = ", ".join(file.name for file in files[:most]) + (", ..." if len(files) > most else "")
    return f"{counted(len(files), 'file')}: {names}"


class DirectoryWatch:
    """Sees whether a directory is the one that was read, and says what arrives there and is not read.

    Args:
        below_floor: What to do about new names that sort below the oldest remembered one: "fail" or "warn".
        first_time: Whether something is to be said for the first time in this process.
    """

    def __init__(
        self, source: Source, below_floor: str, landing: LandingDirectory, first_time: Callable[..., bool]
    ) -> None:
        self._source, self._below_floor, self._landing, self._first_time = source, below_floor, landing, first_time
        self._moved_from = set[str]()

    def check(self, position: Position | None) -> None:
        """Raise InputError if files were read from a directory that is gone, or from another one."""
        if position and position["files"]:
            recorded = position.get("directory", self._landing.place)
            if not self._landing.is_at(recorded) and not self._moved(position):
                raise InputError(
                    f"The source {self._source.name} was read from {recorded} and now names {self._landing.place}: "
                    f"files there with "
                    "names that were read would be taken as read already.",
                    where=f"source {self._source.name}",
                    next="Name the directory as before, or rename the source, with its old name in retired= and the "
                    "new one in added=, to read all anew.",
                )
            if not self._landing.exists():
                raise InputError(
                    f"The landing directory is gone, of which "
                    f"{counted(position['files'], 'file', 'was', 'were')} read.",
                    where=self._landing.directory,
                    next="Mount it, put it back, or correct the source's pattern; nothing is read until then.",
                )
        elif not self._landing.exists() and self._first_time("missing"):
            log.warning(f"landing directory does not exist yet: {self._landing.directory}", source=self._source.name)

    def again(self, arrived: Arrivals) -> None:
        """Warn of the files that were delivered again and are not read, once for each delivery."""
        new = [file for file in arrived.again if self._first_time("again", file.name, file.mtime_ns, file.size)]
        if new:
            log.warning(
                "files were delivered again after they were read, and are not read again",
                source=self._source.name,
                directory=self._landing.directory,
                files=named(new),
                next=DELIVERED_AGAIN,
            )

    def below(self, position: Position, message: str) -> None:
        """Warn of files that arrived below the floor, or raise InputError, as the source wants."""
        if self._below_floor == "warn":
            if self._first_time("below", position["files"], position["last"]):
                log.warning("files below the floor are not read", source=self._source.name, detail=message)
            return
        raise InputError(
            message,
            where=f"source {self._source.name}",
            next=f"Deliver them again under names above {position['floor']!r} and take these away, or accept the "
            f"loss with "
            'below_floor="warn" on the source.',
        )

    def _moved(self, position: Position) -> bool:
        """Return whether this is the recorded directory in another place.

        It is if remembered files are here, all of them unchanged.
        """
        if position["directory"] in self._moved_from:
            return True
        if not positions.are_there(position, self._landing.files()):
            return False
        self._moved_from.add(position["directory"])
        log.warning(
            "the landing directory has moved",
            source=self._source.name,
            was=position["directory"],
            now=self._landing.place,
        )
        return True
