"""Restore drill: prove on scratch that the pipeline would come back, and measure how long that takes.

    restore   the newest checkpoint, from storage into an empty directory; every digest, opened, keys in their groups
    replay    its epoch once more, from the checkpoint before it, in a storage of the drill's own
    compare   the state of the replay, entry by entry and key group by key group, and how many rows went in and out

Production is only read, apart from reader holds, a row in `registry/restores` and a note of the result. So a
coordinator may go on beside the drill. Entries are compared, never files, because another run makes other files of the
same state.
"""

from __future__ import annotations

import itertools
import math
import shutil
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from state_ops.arrow import frames
from state_ops.checkpoints.reader_holds import ReaderHold
from state_ops.checkpoints.registry import Registry
from state_ops.coordination import results
from state_ops.errors import InputError, PrunedError, WeirError, plainly
from state_ops.ids import CheckpointId
from state_ops.logs import Logger
from state_ops.records.checkpoint import EPOCH, Checkpoint
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.restores import Restored
from state_ops.records.triggers import Trigger
from state_ops.schema import descriptors
from state_ops.schema.key_groups import group_range
from state_ops.snapshots.rescale import first_key
from state_ops.storage.branches import Branch
from state_ops.storage.storage import Storage
from state_ops.storage.temp_dirs import scratch
from weir.definition import Pipeline
from weir.epoch.model import EpochReport, SourceOffsets
from weir.epoch.scheduler import EpochScheduler
from weir.epoch.step_runner import Threads
from weir.execution.executor import Executor
from weir.inspection import state_reader
from weir.inspection.diff import ADDED, CHANGED, REMOVED, compared
from weir.inspection.snapshot_files import opened
from weir.inspection.view import View
from weir.ownership.lookups import Lookups, recorded
from weir.ownership.ownership import claimed
from weir.ownership.pipeline_storage import open_storage, readers
from weir.restore import restore
from weir.restore.start_from import seed
from weir.run.run import RunOptions, check_fits, coordinator_of
from weir.settings.configuration import Settings
from weir.sources.slices import EpochPlan

log = Logger("weir.drill")

PURPOSE = "drill"
_DIRECTORY = "drills"
_COUNTED = ("rows_in", "rows_out", "rows_late", "rows_dropped", "rows_duplicate", "rows_null_key")
_LOOKED_AT = 100_000
_LOOKS = 3
_RELATIVE = 1e-9  # for sums of floats, whose last digits depend on the order in which rows arrive


@dataclass(frozen=True, slots=True)
class Replay:
    """One epoch, played again.

    Attributes:
        parent: The checkpoint from which it was played.
        entries: How many entries of state were compared.
        seconds: How long the epoch took, up to its commit.
    """

    parent: CheckpointId
    rows: int
    entries: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Drilled:
    """The result of a drill.

    Attributes:
        problems: What is wrong, in words. Without problems the pipeline would come back as it was.
        replay: None if the epoch could not be played again; then `not_replayed` says why.
        loss_seconds: How long the oldest input that no checkpoint holds has waited; 0 if none waits.
    """

    checkpoint: CheckpointId
    drilled_at: datetime
    restored: Restored | None
    restore_seconds: float
    replay: Replay | None
    not_replayed: str | None
    loss_seconds: float
    problems: tuple[str, ...]

    @property
    def recovery_seconds(self) -> float | None:
        """The time from an empty host to the next epoch's commit: of the restore, and of the replayed epoch if there is
        one.

        None if the restored state is not what it was, because then there was no recovery.
        """
        if self.problems:
            return None
        return self.restore_seconds + (self.replay.seconds if self.replay else 0.0)

    def missed(self, settings: Settings) -> list[str]:
        """Return the objectives of the settings that were missed, in words."""
        wanted, missed = settings.restore, []
        time_objective, point_objective = (
            wanted.recovery_time_objective_seconds,
            wanted.recovery_point_objective_seconds,
        )
        took = self.recovery_seconds
        if time_objective is not None and (took is None or took > time_objective):
            outcome = "it does not come back" if took is None else f"recovery takes {took:.1f} s"
            missed.append(f"{outcome}, restore.recovery_time_objective_seconds is {time_objective:g}")
        if point_objective is not None and self.loss_seconds > point_objective:
            missed.append(
                f"input has waited for {self.loss_seconds:.0f} s, restore.recovery_point_objective_seconds is "
                f"{point_objective:g}"
            )
        return missed

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        replay = self.replay
        return {
            "checkpoint": self.checkpoint,
            "drilled_at": self.drilled_at.isoformat(),
            "recovery_seconds": None if self.recovery_seconds is None else round(self.recovery_seconds, 3),
            "restore_seconds": round(self.restore_seconds, 3),
            "loss_seconds": round(self.loss_seconds, 3),
            "restored": self.restored.to_dict() if self.restored else None,
            "replay": None
            if replay is None
            else {
                "parent": replay.parent,
                "rows": replay.rows,
                "entries": replay.entries,
                "seconds": round(replay.seconds, 3),
            },
            "not_replayed": self.not_replayed,
            "problems": list(self.problems),
        }


def drill(pipeline: Pipeline, settings: Settings, executor: Executor | None = None) -> Drilled:
    """Restore the newest checkpoint on scratch, replay its epoch, compare the state, and note the result.

    Args:
        executor: What runs the stages; by default Spark.

    Raises:
        WeirError: There is no checkpoint yet, or the drill itself cannot be done. What is wrong with the checkpoint is
            no error but a problem in the result.
    """
    clock = time.perf_counter()
    done = _drilled(pipeline, settings, executor)
    noted = results.RecordedDrill(
        at=datetime.now(UTC),
        seconds=round(time.perf_counter() - clock, 3),
        checkpoint=int(done.checkpoint),
        comes_back=not done.problems,
        replayed=done.replay is not None,
        in_time=not done.missed(settings),
        restore_seconds=done.restore_seconds,
        replay_seconds=done.replay.seconds if done.replay is not None else None,
        recovery_seconds=done.recovery_seconds,
        loss_seconds=done.loss_seconds,
    )
    results.note(open_storage(pipeline, settings)[0], results.DRILL, noted)
    return done


def _drilled(pipeline: Pipeline, settings: Settings, executor: Executor | None) -> Drilled:
    storage, registry = open_storage(pipeline, settings)
    home, host = settings.work_dir / _DIRECTORY, socket.gethostname()  # directories of other hosts may be in use
    with scratch(home, f"{host}-") as directory, ExitStack() as holds:
        head, parent = _hold_newest(pipeline, settings, storage, registry, holds)
        loss = _loss(pipeline, settings, head)
        begun, clock = datetime.now(UTC), time.perf_counter()
        away = _at(settings, work=directory / "restored")
        try:
            restored = restore.restore(pipeline, away, storage, registry, head, PURPOSE)
        except PrunedError:
            raise
        except Exception as error:  # any error is what the drill is there to find
            seconds = time.perf_counter() - clock
            return Drilled(head.id, begun, None, seconds, None, "it was not restored", loss, (_problem(error),))
        seconds = time.perf_counter() - clock
        done = partial(Drilled, head.id, begun, restored, seconds, loss_seconds=loss)
        shutil.rmtree(directory / "restored", ignore_errors=True)
        why = _not_comparable(pipeline, settings, head, parent)
        if why is not None or parent is None:
            return done(replay=None, not_replayed=why, problems=())
        there = _at(settings, work=directory / "replayed", root=directory / "storage")
        # On a branch all sinks are tables in its storage: no other system, and no table elsewhere, gets the rows again.
        here = replace(pipeline, branch=Branch(PURPOSE, uuid.uuid4().hex))
        try:
            report, took = _replayed(here, settings, there, storage, registry, head, parent, executor)
        except InputError as error:
            return done(replay=None, not_replayed=str(error), problems=())
        except Exception as error:
            return done(replay=None, not_replayed="it failed", problems=(f"The replay failed: {_problem(error)}",))
        try:
            entries, problems = _compared(pipeline, here, settings, there, head, report.checkpoint)
        except PrunedError:
            raise
        except Exception as error:
            why = "it could not be compared"
            return done(replay=None, not_replayed=why, problems=(f"The comparison failed: {_problem(error)}",))
        replay = Replay(parent.id, report.checkpoint.totals["rows_read"] - parent.totals["rows_read"], entries, took)
        return done(replay=replay, not_replayed=None, problems=tuple(problems))


def _problem(error: Exception) -> str:
    if isinstance(error, WeirError):
        return str(error)
    log.exception("the drill has met an error that nobody foresaw")
    return plainly(error)


def _at(settings: Settings, *, work: Path, root: Path | None = None) -> Settings:
    """Return these settings with directories of the drill's own."""
    changed: dict[str, Any] = {"local": settings.local.model_copy(update={"work_dir": str(work)})}
    if root is not None:
        changed["storage"] = settings.storage.model_copy(update={"root": str(root)})
    return settings.model_copy(update=changed)


def _hold_newest(
    pipeline: Pipeline, settings: Settings, storage: Storage, registry: Registry, stack: ExitStack
) -> tuple[Checkpoint, Checkpoint | None]:
    """Return the newest checkpoint, and the one before it if that is retained. Both stay as long as the stack lasts."""
    beat = settings.lease.heartbeat_seconds
    for look in range(_LOOKS):
        completed = {row.id: row for row in registry.checkpoints()}
        if not completed:
            raise WeirError(
                f"{pipeline.title} has no checkpoint that could be restored.",
                next=f"Run it first: weir run {pipeline.title}",
            )
        head = completed[max(completed)]
        parent = completed.get(head.parent_id) if head.parent_id is not None else None
        try:
            with ExitStack() as attempt:
                for row in (head, parent):
                    attempt.enter_context(
                        nullcontext() if row is None else ReaderHold(storage, registry, row, "weir drill", beat)
                    )
                stack.push(attempt.pop_all())
            return head, parent
        except PrunedError:  # newer checkpoints were completed meanwhile
            if look == _LOOKS - 1:
                raise
    raise AssertionError("the last look returns or raises")


def _loss(pipeline: Pipeline, settings: Settings, head: Checkpoint) -> float:
    """Return the seconds for which the oldest unread file has waited, of sources that can be asked.

    Unread is a file that no checkpoint has read.
    """
    waiting: list[int] = []
    for name, reader in readers(pipeline, settings).items():
        with suppress(WeirError):
            waiting += [file.mtime_ns for file in reader.backlog(head.offsets.get(name)) if file.mtime_ns]
    return max(0.0, time.time() - min(waiting) / 1e9) if waiting else 0.0


def _not_comparable(pipeline: Pipeline, settings: Settings, head: Checkpoint, parent: Checkpoint | None) -> str | None:
    """Why the newest checkpoint's epoch cannot be played again, in words; None if it can."""
    if pipeline.at_most_once:
        return f"{pipeline.title} delivers at most once: what an epoch was begun on is let go with its end"
    if head.kind != EPOCH:
        return f"checkpoint {head.id} is no epoch but a {head.kind}"
    if head.parent_id is None:
        return f"checkpoint {head.id} is the first: nothing lies before it"
    if parent is None:
        return (
            f"checkpoint {head.parent_id}, which it was begun on, is not retained: "
            "set checkpoints.num_retained to 2 or more"
        )
    if (gone := Lookups(pipeline, settings).gone(recorded(head))) is not None:
        return gone
    for row in (head, parent):
        if any(stats.waiting for stats in row.operators.values()):
            return f"checkpoint {row.id} is unaligned: how far its stages came depended on the clock"
    return None


def _replayed(
    here: Pipeline,
    settings: Settings,
    there: Settings,
    storage: Storage,
    registry: Registry,
    head: Checkpoint,
    parent: Checkpoint,
    executor: Executor | None,
) -> tuple[EpochReport, float]:
    """Play the newest checkpoint's epoch again, under its own id and at its own processing time; also the seconds it
    took.
    """
    aligned = there.checkpoints.model_copy(update={"alignment_timeout_seconds": None})
    there = there.model_copy(update={"checkpoints": aligned})
    offsets = SourceOffsets.at(parent)
    slices = {
        name: reader.plan_again(head.slice[name], offsets.expected.get(name), offsets.offsets.get(name))
        for name, reader in readers(here, there, archived=settings).items()
        if name in head.slice
    }
    drained = head.trigger == Trigger.DRAIN.value
    cut = EpochPlan(
        Trigger.MANUAL,
        f"drill of checkpoint {head.id}",
        slices,
        drained,
        at=head.triggered_at,
        now=head.epoch_now,
        lookups=recorded(head),
    )
    before = CheckpointId(head.id - 1)
    with claimed(here, there, executor) as owner:
        owner.context.tells_sources = False
        seeded = seed(owner, there, storage, registry, parent, before, f"checkpoint {parent.id}, for a drill")
        check_fits(here, seeded)
        coordinator = coordinator_of(owner.context, RunOptions(), before)
        threads = Threads()
        scheduler = EpochScheduler(owner.context, coordinator, owner.heartbeat, threads, _raised)
        reports: list[EpochReport] = []
        clock = time.perf_counter()
        try:
            scheduler.begin(cut)
            while not scheduler.empty:
                reports += scheduler.turn(there.run.poll_seconds)
            if not reports:
                raise WeirError(
                    "Its gates set other rows aside than they did.",
                    where=f"checkpoint {head.id}",
                    next="Were they changed since? The next epoch can be compared again.",
                )
        finally:
            scheduler.close()
            threads.close()
    return reports[-1], time.perf_counter() - clock


def _raised(_epoch: int, error: WeirError) -> None:
    raise error


def _compared(
    pipeline: Pipeline, here: Pipeline, settings: Settings, there: Settings, head: Checkpoint, replayed: Checkpoint
) -> tuple[int, list[str]]:
    """Return how many entries of state were compared, and the differences of the replay and the checkpoint."""
    problems, entries = [], 0
    for uid, stats in head.operators.items():
        again = replayed.operators.get(uid)
        if again is None:
            problems.append(f"{uid} is no longer in the pipeline, so it was not replayed")
            continue
        other = [
            f"{name} {getattr(stats, name)}, then {getattr(again, name)}"
            for name in _COUNTED
            if getattr(stats, name) != getattr(again, name)
        ]
        other += [
            f"rows of {name} {rows}, then {again.outputs[name]}"
            for name, rows in stats.outputs.items()
            if again.outputs.get(name, rows) != rows
        ]
        if other:
            problems.append(f"{uid} handled other rows: {'; '.join(other)}{_rightly(stats, again)}")
    for uid in head.stages_with_state:
        if uid not in replayed.stages_with_state:
            continue
        with (
            state_reader.viewed(pipeline, settings, uid, int(head.id), "weir drill") as was,
            state_reader.viewed(here, there, uid, int(head.id), "weir drill") as now,
        ):
            first, second = digests(was), digests(now)
        entries += sum(count for count, _ in first.values())
        differing = [place for place in first.keys() | second.keys() if first.get(place) != second.get(place)]
        if differing:
            # What is no row is compared to the byte; rows may differ in the last digits of floats, and what has expired
            # may be swept.
            parts = [_NO_ROWS[kind] for kind in sorted({kind for _, kind in differing} & _NO_ROWS.keys())]
            parts += [rows] if (rows := _differing_rows(pipeline, here, settings, there, uid, head)) else []
            if parts:
                groups = f"{len({group for group, _ in differing})} key groups"
                why = _rightly(head.operators[uid], replayed.operators[uid])
                problems.append(f"The state of {uid} differs in {groups}: {', '.join(parts)}{why}")
    return entries, problems


def _rightly(stats: OperatorStats, again: OperatorStats) -> str:
    """Return the words to add to a difference if today's code is not the epoch's."""
    if stats.code in (None, again.code):
        return ""
    return ". Its code was changed since, so that may be right: the next epoch can be compared again"


_TIMERS = {descriptors.EVENT_TIMERS: "timers by event time", descriptors.PROCESSING_TIMERS: "timers by processing time"}
_NO_ROWS = {descriptors.LIST_ENDS: "the ends of lists", **_TIMERS}


def digests(view: View) -> Mapping[tuple[int, int], tuple[int, str]]:
    """Return the logical digest of a stage's state: by key group and kind of state (`state_ops.schema.descriptors`)
    that have entries, their number and a hash of them in key order.

    Files, compaction, parallelism and the number of databases make no difference to it.
    """
    digests: dict[tuple[int, int], tuple[int, str]] = {}
    for subtask, taken in view.snapshots.items():
        groups = group_range(subtask, view.parallelism, view.max_parallelism)
        with opened(view.storage, view.options, taken, view.backend) as backend:
            for group in groups:
                for kind, entries in itertools.groupby(backend.scan(first_key(group), first_key(group + 1)), _kind):
                    count, digest = 0, xxhash.xxh3_128()
                    for key, value in entries:
                        if kind in _TIMERS:  # their value says in whose barrier they did not fire, which is over
                            value = b""
                        digest.update(len(key).to_bytes(4, "big") + key + len(value).to_bytes(4, "big"))
                        digest.update(value)
                        count += 1
                    digests[group, kind] = (count, digest.hexdigest())
    return digests


def _kind(entry: tuple[bytes, bytes]) -> int:
    return entry[0][2]  # behind the key group


def _differing_rows(
    pipeline: Pipeline, here: Pipeline, settings: Settings, there: Settings, uid: str, head: Checkpoint
) -> str | None:
    """Return the differences of the rows in words, or None if they differ at most in the last digits of floats."""
    at = int(head.id)
    with (
        compared(pipeline, settings, uid, at, at, there, here) as difference,
        difference.rows(_LOOKED_AT) as (_, tables),
    ):
        rows = [row for table in tables for row in frames.python_rows(table) if not _same(row)]
        many = sum(difference.counts.values()) > _LOOKED_AT
    if not rows:
        return f"more than {_LOOKED_AT:,} rows" if many else None
    counts = {kind: sum(row["change"] == kind for row in rows) for kind in (ADDED, REMOVED, CHANGED)}
    keys = ", ".join(str(row["key"]) for row in rows[:3])
    return f"{', '.join(f'{count:,} {kind}' for kind, count in counts.items() if count)}, e.g. {keys}"


def _same(row: Mapping[str, Any]) -> bool:
    return row["change"] == CHANGED and _close(row["old"], row["new"])


def _close(before: Any, other: Any) -> bool:
    if isinstance(before, float) and isinstance(other, float):
        return (math.isnan(before) and math.isnan(other)) or math.isclose(before, other, rel_tol=_RELATIVE)
    if isinstance(before, dict) and isinstance(other, dict):
        return before.keys() == other.keys() and all(_close(before[name], other[name]) for name in before)
    if isinstance(before, list) and isinstance(other, list):
        return len(before) == len(other) and all(map(_close, before, other))
    return bool(before == other)
