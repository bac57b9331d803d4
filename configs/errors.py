"""The root of the error tree. `state_ops.errors` has the rest of it; the settings need only these two.

Every message says what happened, where, and what to do: the three arguments of `WeirError`. Each of them is redacted,
since many repeat what a library or a server has said.
"""

from __future__ import annotations

from configs.printable import on_one_line, unforged
from configs.redaction import redacted


class WeirError(Exception):
    """Base of all errors that Weir raises on purpose.

    Args:
        what: What happened, one sentence.
        where: File, key, stage, checkpoint or table.
        next: What a person does now, a command where there is one.
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

    def __reduce__(self):
        # Exceptions with keyword-only arguments do not survive a process boundary by default.
        return _rebuild, (type(self), self.what, self.where, self.next, self.__dict__)


def _rebuild(cls: type[WeirError], what: str, where: str | None, next: str | None, state: dict) -> WeirError:
    error = WeirError.__new__(cls)
    Exception.__init__(error, what)
    error.__dict__.update(state, what=what, where=where, next=next)
    return error


class ConfigurationError(WeirError):
    """Reconfigure: a setting or a command line is wrong. Nothing was started."""

    exit_code = 2
