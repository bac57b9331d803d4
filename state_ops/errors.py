"""One error tree, by what the operator should do next.

Every message says what happened, where, and what to do: the three arguments of `WeirError`.
"""

from __future__ import annotations


class WeirError(Exception):
    """Base of all errors that Weir raises on purpose.

    what: what happened, one sentence. where: file, key, stage, checkpoint or table.
    next: what a person does now, a command where there is one.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, next: str | None = None) -> None:
        super().__init__(what)
        self.what, self.where, self.next = what, where, next

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


class PipelineError(WeirError):
    """Fix the pipeline's code: its definition does not fit itself, its input or its state."""

    exit_code = 2


class StageError(WeirError):
    """Fix the stage function: it raised, or returned something it must not. Carries the author's traceback."""

    def __init__(self, what: str, *, where: str | None = None, next: str | None = None, traceback: str = "") -> None:
        super().__init__(what, where=where, next=next)
        self.traceback = traceback


class InputError(WeirError):
    """Repair or move the input: a source's data cannot be read as the pipeline needs it."""


class GateError(WeirError):
    """Look at the data: a quality gate failed, the epoch was declined, and everything is as it was."""


class DamageError(WeirError):
    """Restore or repair: something that Weir wrote is missing, altered or inconsistent. Nothing is deleted."""


class FencedError(WeirError):
    """Do nothing: another coordinator has taken this pipeline over; this one stops and deletes nothing."""


class BusyError(WeirError):
    """Wait, or stop the other one: a coordinator of this pipeline is alive."""


class TransientError(WeirError):
    """Retry: storage or the cluster failed in a way that may pass."""
