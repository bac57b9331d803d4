"""All errors that Weir raises on purpose, by what a person does next.

Every message says what happened, where, and what to do: the three arguments of `WeirError`. Each of them is redacted,
because many repeat what a library or a server has said.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from state_ops.printable import on_one_line, unforged
from state_ops.redaction import redacted

__all__ = [
    "BusyError",
    "ConfigurationError",
    "DamageError",
    "FencedError",
    "GateError",
    "HoldingError",
    "InputError",
    "LostError",
    "MissingError",
    "PipelineError",
    "PrunedError",
    "RefusedError",
    "RunEndedError",
    "StageError",
    "StateSizeError",
    "TransientError",
    "VanishedError",
    "WeirError",
    "first_line",
    "from_report",
    "look_there",
    "page_about",
    "plainly",
    "to_report",
]


class WeirError(Exception):
    """The base of all errors that Weir raises on purpose.

    Args:
        what: One sentence that says what happened.
        where: The file, key, stage, checkpoint or table.
        next: The next step of a person, a command if there is one.

    Example:
        >>> from weir import WeirError
        >>> print(WeirError("The file is empty.", where="orders-1.csv", next="Move it away."))
        The file is empty.
          where: orders-1.csv
          next:  Move it away.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, next: str | None = None) -> None:
        # A name of a file, or a value, that is quoted must not forge a line, or do something on a terminal.
        what = unforged(redacted(what))
        super().__init__(what)
        self.what = what
        self.where = on_one_line(redacted(where)) if where else where
        self.next = unforged(redacted(next)) if next else next

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.next:
            lines.append(f"  next:  {self.next}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword-only arguments do not survive a process boundary by default.
        return _rebuild, (type(self), self.what, self.where, self.next, self.__dict__)


def _rebuild(cls: type[WeirError], what: str, where: str | None, next: str | None, state: dict[str, Any]) -> WeirError:
    error = WeirError.__new__(cls)
    Exception.__init__(error, what)
    error.__dict__.update(state, what=what, where=where, next=next)
    return error


class ConfigurationError(WeirError):
    """Reconfigure: a setting or a command line is wrong. Nothing was started.

    Example:
        >>> from weir import ConfigurationError, sink
        >>> try:
        ...     sink("shelf", name="orders")
        ... except ConfigurationError as error:
        ...     print(error)
        No installed package brings 'shelf'.
          where: entry points weir.sinks
          next:  Install the package that has it; there are: none.
    """

    exit_code = 2


class PipelineError(WeirError):
    """Fix the pipeline's code: its definition does not fit itself, its input or its state.

    Example:
        >>> from weir import PipelineError, aggregate, files
        >>> try:
        ...     aggregate("totals", files("{landing}/*.parquet"), key="carrier")
        ... except PipelineError as error:
        ...     print(error)
        It aggregates nothing.
          where: aggregate totals
          next:  Add e.g. departures=agg.count().
    """

    exit_code = 2


class StateSizeError(ConfigurationError):
    """Reconfigure: state has outgrown its backend. The epoch was declined, and everything is as it was."""


class StageError(WeirError):
    """Fix the stage function: it raised, or returned something it must not. Carries the author's traceback."""

    def __init__(self, what: str, *, where: str | None = None, next: str | None = None, traceback: str = "") -> None:
        super().__init__(what, where=where, next=next)
        self.traceback = redacted(traceback)


class HoldingError(WeirError):
    """Base of what the next run would only meet again: the run ends, and schedulers wait until its cause has changed,
    or for a person.

    Attributes:
        epoch: The id of the epoch that ended with it; None if it came before an epoch had begun.
        files: By source, the input files that may be its cause: by name, their size in bytes and their time of change
            in ns since 1970.
    """

    epoch: int | None = None
    files: Mapping[str, Mapping[str, tuple[int, int]]] = MappingProxyType({})


class InputError(HoldingError):
    """Repair or move the input: a source's data cannot be read as the pipeline needs it.

    Example:
        >>> from weir import InputError, agg, aggregate, files, testing
        >>> totals = aggregate("totals", files("{landing}/*.parquet"), key="carrier", delay=agg.sum("delay"))
        >>> run = testing.run(totals)
        >>> try:
        ...     run.epoch([{"carrier": "AA", "delay": 5}, {"carrier": None, "delay": 7}])
        ... except InputError as error:
        ...     print(error.what)
        1 row of a batch has no 'carrier', which is a key of totals.
    """


class RefusedError(InputError):
    """Correct values, or set their rows aside with on_bad="quarantine": a stage or a table cannot take a row, or a sink
    would refuse it after the commit.

    Attributes:
        positions: By the position of a row in the stage's slice, why it is refused; none where that is not known.
    """

    positions: Mapping[int, str] = MappingProxyType({})


class VanishedError(InputError):
    """Run again, which plans anew: what an epoch was to read is not there any more, or not where an executor looks.
    Nobody waits for it."""


class LostError(InputError):
    """Bring the data back, or accept the loss with on_lost="skip": what a source still had to be read from is gone.

    Example:
        >>> from weir import LostError
        >>> print(LostError("Offsets 10 to 19 have expired.", where="topic orders", next='Say on_lost="skip".'))
        Offsets 10 to 19 have expired.
          where: topic orders
          next:  Say on_lost="skip".
    """


class GateError(HoldingError):
    """Look at the data: a quality gate failed, the epoch was declined, and everything is as it was.

    Args:
        verdicts: What all gates of that stage said, JSON-ready, failed or passed; none where no epoch was judged.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        next: str | None = None,
        verdicts: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(what, where=where, next=next)
        self.verdicts = tuple(verdicts)


class DamageError(HoldingError):
    """Restore or repair: something that Weir wrote is missing, altered or inconsistent. Nothing is deleted.

    Example:
        >>> from weir import DamageError
        >>> raise DamageError("The marker is 3, and the registry says 5.", where="table orders")
        Traceback (most recent call last):
            ...
        state_ops.errors.DamageError: The marker is 3, and the registry says 5.
          where: table orders
    """


class MissingError(DamageError):
    """Put it back; or let that process see it which does not, as an executor without the mount."""


class FencedError(WeirError):
    """Do nothing: another coordinator has taken this pipeline over; this one stops and deletes nothing.

    Example:
        >>> from weir import FencedError, SinkOpening
        >>> def prove():
        ...     raise FencedError("Another coordinator owns the pipeline orders.")
        >>> opening = SinkOpening("weir/orders/main/out", str, {}, prove)
        >>> opening.prove()
        Traceback (most recent call last):
            ...
        state_ops.errors.FencedError: Another coordinator owns the pipeline orders.
    """


class BusyError(WeirError):
    """Wait, or stop the other one: a coordinator of this pipeline is alive."""


class TransientError(WeirError):
    """Retry: storage or the cluster failed in a way that may pass.

    Example:
        >>> from weir import TransientError
        >>> try:
        ...     raise TimeoutError("timed out")
        ... except TimeoutError as error:
        ...     again = TransientError(f"The server does not answer: {error}", where="shop.example", next="Try again.")
        >>> again.what
        'The server does not answer: timed out'
    """


class DiskFullError(TransientError):
    """Make room: a disk is full, which the error names as the host saw it that met it."""


class LocalBaseError(TransientError):
    """Wait for durable files: the snapshot that the epoch before left on one host's disk is not on this one."""


class RunEndedError(TransientError):
    """Run again: this run cannot know or do more, but the next one, which takes over, can. Nothing was deleted."""


class PrunedError(TransientError):
    """Look again: the checkpoint that was being read has been pruned meanwhile, by right."""


def known_as(error: WeirError) -> str:
    """Return the name of an error's kind, or of the nearest that this module has: by it other processes raise it
    again."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in globals())


def to_report(error: WeirError) -> dict[str, Any]:
    """Return an error as JSON has it, to be raised again in another process; see `from_report`."""
    return {
        "kind": known_as(error),
        "what": error.what,
        "where": error.where,
        "next": error.next,
        "traceback": getattr(error, "traceback", ""),
        "files": {source: dict(files) for source, files in getattr(error, "files", {}).items()},
        "positions": [[position, why] for position, why in getattr(error, "positions", {}).items()],
    }


def from_report(report: Mapping[str, Any]) -> WeirError:
    """Return the inverse of `to_report`."""
    kind: type[WeirError] = globals().get(report["kind"], WeirError)
    if kind is StageError:
        return StageError(report["what"], where=report["where"], next=report["next"], traceback=report["traceback"])
    error = kind(report["what"], where=report["where"], next=report["next"])
    if isinstance(error, HoldingError):
        error.files = {
            source: {name: (size, mtime_ns) for name, (size, mtime_ns) in files.items()}
            for source, files in report.get("files", {}).items()
        }
    if isinstance(error, RefusedError):
        error.positions = dict(report.get("positions", ()))
    return error


_DECORATION = re.compile(r"\x1b\[[0-9;]*m|↳")
DISK_FULL = "docs/playbooks/disk-full.md"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_RIGHTS = ("Permission denied", "os error 13", "Read-only file system", "os error 30")


def plainly(error: BaseException) -> str:
    """Return a foreign error on one line: its type and what it says, redacted, without the colours and the tree in
    which delta-rs draws its causes."""
    lines = (" ".join(_DECORATION.sub("", line).split()) for line in redacted(str(error)).splitlines())
    return f"{type(error).__name__}: {' '.join(filter(None, lines))}"


def first_line(error: BaseException) -> str:
    """Return the first line of what a foreign error says, redacted: some libraries append a native stack. Its type, if
    it says nothing."""
    return next(iter(redacted(str(error)).strip().splitlines()), type(error).__name__)


def page_about(error: BaseException) -> str:
    """Return the playbook page for what storage or a disk raised."""
    return DISK_FULL if is_full(error) else "docs/playbooks/storage-down.md"


def look_there(error: BaseException) -> str:
    """Return the next step after what storage or a disk raised, up to the dot."""
    if isinstance(error, PermissionError) or any(text in str(error) for text in _NO_RIGHTS):
        return f"Let the user who runs this command (uid {os.getuid()}) read and write there ({page_about(error)})"
    return f"Look at the storage and the disk ({page_about(error)})"


def is_full(error: BaseException) -> bool:
    """Return whether an error says that a disk is full, or a quota used up."""
    return getattr(error, "errno", None) in _NO_ROOM or any(
        text in str(error) for text in ("No space left", "os error 28", "Disk quota exceeded")
    )
