"""Compare a stage's state with today's code.

The checkpoint's record of the stage is compared. If that does not tell, snapshots are opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from state_ops.backends import loader as backends
from state_ops.backends.base import Backend
from state_ops.checkpoints.registry import Registry
from state_ops.counts import counted
from state_ops.errors import TransientError, WeirError
from state_ops.facts import Facts
from state_ops.keyed.scan import scan_state
from state_ops.keyed.timers import are_set
from state_ops.keyed.ttl import Expiry, Ttl
from state_ops.moments import to_micros
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.snapshot_files import snapshots_of
from state_ops.schema.key_groups import group_range
from state_ops.storage.storage import Storage
from weir.definition import Finding, Pipeline, Shapes, Stage, Verdict
from weir.inspection.snapshot_files import opened
from weir.inspection.view import View, view_of
from weir.operators.compatibility import Fit, fit, timers_left
from weir.settings.configuration import Settings

_SAMPLE_ROWS = 5_000


@dataclass(frozen=True, slots=True)
class Sample(Facts):
    """Rows of one subtask that were read with today's schema.

    Attributes:
        problem: The error's message, if the rows could not be read.
    """

    stage: str
    subtask: int
    rows: int
    problem: str | None = None


class Findings(list[Finding]):
    """The findings so far.

    Args:
        raises_transient: Whether what does not answer ends the plan, instead of being a finding.
    """

    def __init__(self, *, raises_transient: bool = False) -> None:
        super().__init__()
        self._raises_transient = raises_transient

    def report(self, kind: str, name: str, aspect: str, verdict: Verdict, what: str, next: str | None = None) -> None:
        self.append(Finding(kind, name, aspect, verdict, what, next))

    def allow(self, kind: str, name: str, aspect: str, what: str, next: str | None = None) -> None:
        self.report(kind, name, aspect, Verdict.COMPATIBLE, what, next)

    def refuse(self, kind: str, name: str, aspect: str, error: WeirError) -> None:
        if self._raises_transient and isinstance(error, TransientError):
            raise error
        self.report(kind, name, aspect, Verdict.REFUSED, error.what, error.next)


class StateCheck:
    """Compares the state of stages with a checkpoint.

    Args:
        findings: Gets what is found.

    Attributes:
        samples: The rows that were read with today's schema.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        settings: Settings,
        storage: Storage,
        registry: Registry,
        head: Checkpoint,
        findings: Findings,
    ) -> None:
        self._pipeline, self._settings, self._storage, self._registry = pipeline, settings, storage, registry
        self._head, self._findings = head, findings
        self.samples: list[Sample] = []

    def look_at(self, stage: Stage, fixed: Shapes, recorded: OperatorStats) -> None:
        fitted = fit(stage, fixed, recorded, self._pipeline)
        was, now = recorded.backend, self._settings.state.backend
        problem = backends.misfit(was, now)
        opens = not fitted.problems and problem is None
        self._findings += self._counted(stage, fitted, recorded) if opens else fitted.findings
        if problem is not None:
            next = "Set state.backend back, or give the stage a new uid: it then starts with empty state."
            self._findings.report("stage", stage.uid, "backend", Verdict.REFUSED, problem, next)
        elif was != now:
            self._findings.allow(
                "stage", stage.uid, "backend", f"the backend was {was}, is {now}, which reads what it wrote"
            )
        subtasks = self._settings.spark.parallelism
        if recorded.parallelism != subtasks:
            self._findings.allow(
                "stage",
                stage.uid,
                "parallelism",
                f"rescales from {recorded.parallelism} to {counted(subtasks, 'subtask')}, in the first epoch",
            )
        if opens and fitted.migrations:
            self._try(stage, fitted)
        if opens and stage.function is not None and stage.on_timer is None and recorded.timers is None:
            self._look_for_timers(stage)

    def _taken(self, stage: Stage) -> tuple[View, list[int]]:
        """Return the view of the stage's state, and the subtasks that have state, the smallest snapshot first."""
        taken = snapshots_of(self._registry.files(self._head), stage.uid)
        view = view_of(self._pipeline, self._settings, self._storage, self._head, stage.uid, taken)
        return view, sorted(taken, key=lambda subtask: sum(file.bytes for file in taken[subtask].files))

    @contextmanager
    def _opened(self, view: View, subtask: int) -> Iterator[tuple[Backend, range]]:
        """Open a subtask's snapshot, and return it with its key groups."""
        with opened(self._storage, view.options, view.snapshots[subtask], view.backend) as backend:
            yield backend, group_range(subtask, view.parallelism, view.max_parallelism)

    def _try(self, stage: Stage, fitted: Fit) -> None:
        """Read rows of the smallest snapshot with today's schema."""
        view, subtasks = self._taken(stage)
        if not subtasks:
            return
        rows, smallest, now = 0, subtasks[0], fitted.shapes
        try:
            with self._opened(view, smallest) as (backend, groups):
                if view.stage is not None:
                    tables = view.stage.operator.opened(view.stage, view.keys, now.state, backend, groups)
                else:
                    tables = scan_state(backend, now.state, now.collections, view.keys, groups, view.expiry)
                for table in tables:
                    rows += table.num_rows
                    if rows >= _SAMPLE_ROWS:
                        break
        except WeirError as error:
            self.samples.append(Sample(stage.uid, smallest, rows, str(error)))
            self._findings.refuse("stage", stage.uid, "sample", error)
            return
        self.samples.append(Sample(stage.uid, smallest, rows))

    def _look_for_timers(self, stage: Stage) -> None:
        """Look for timers that are set although the stage has no on_timer.

        Earlier releases did not record whether timers are set, so all snapshots are read, as a run does.
        """
        view, subtasks = self._taken(stage)
        for subtask in subtasks:
            try:
                with self._opened(view, subtask) as (backend, groups):
                    left = are_set(backend, groups)
            except WeirError as error:
                self._findings.refuse("stage", stage.uid, "timers", error)
                return
            if left:
                self._findings.append(timers_left(stage.uid))
                return

    def _counted(self, stage: Stage, fitted: Fit, recorded: OperatorStats) -> list[Finding]:
        """Return the findings about a stage's state.

        If its time to live became shorter or comes back, they include how many rows are deleted at once.
        """
        if not fitted.losses:
            return list(fitted.findings)
        try:
            counted = self._count_expired(stage, fitted, Ttl(**recorded.ttl) if recorded.ttl else None)
        except WeirError as error:
            counted = f"how much that is cannot be told: {error.what}"
        return [
            replace(finding, what=f"{finding.what} ({counted})") if finding.verdict is Verdict.LOSES else finding
            for finding in fitted.findings
        ]

    def _count_expired(self, stage: Stage, fitted: Fit, was: Ttl | None) -> str:
        """Return in words how many rows the stage's time to live deletes at once that were kept before.

        The number comes from a sample of the state.
        """
        assert stage.lifetime is not None
        now = to_micros(max(datetime.now(UTC), self._head.epoch_now))
        view, subtasks = self._taken(stage)
        forgotten = view.expiry.before if view.expiry is not None else None
        alive = left = seen = 0
        for subtask in subtasks:
            with self._opened(view, subtask) as (backend, groups):
                for group in groups:
                    before, after = (
                        _entries(backend, fitted.shapes, view.keys, group, Expiry(ttl, now, forgotten))
                        for ttl in (was, stage.lifetime)
                    )
                    alive, left = alive + before, left + after
                    if alive >= _SAMPLE_ROWS:
                        break
            seen += 1
            if alive >= _SAMPLE_ROWS:
                break
        where = f"{seen} of {counted(view.parallelism, 'subtask')}"
        return f"{alive - left:,} of {alive:,} rows and elements by now, in {where}"


def _entries(backend: Backend, fixed: Shapes, keys: pa.Schema, group: int, expiry: Expiry) -> int:
    """Return how many rows of state, and elements of lists and maps, in a key group have not expired."""
    number = 0
    for rows in scan_state(backend, fixed.state, fixed.collections, keys, range(group, group + 1), expiry):
        columns = [rows.column(collection.name) for collection in fixed.collections]
        elements = [
            pc.sum(pc.list_value_length(column)).as_py() or 0 for column in columns if not pa.types.is_null(column.type)
        ]
        number += rows.num_rows + sum(elements)
    return number
