"""Restore drill: prove on scratch that the pipeline would come back, and measure how long that takes.

    restore   the newest checkpoint, from storage into an empty directory; every digest, opened, keys in their groups
    replay    its epoch once more, from the checkpoint before it, in a storage of the drill's own
    compare   the state of the replay, entry by entry and key group by key group, and how many rows went in and out

Production is only read, apart from reader holds, a row in `registry/restores` and a note of the result. So a
coordinator may go on beside the drill. Entries are compared, never files, because another run makes other files of the
same state.
"""

from __future__ import annotations

import shutil
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

from state_ops.arrow import frames
from state_ops.checkpoints.registry import Registry
from state_ops.coordination import results
from state_ops.errors import InputError, PrunedError, WeirError, plainly
from state_ops.facts import Facts, fact
from state_ops.ids import CheckpointId
from state_ops.keyed.owners import GROUP_BYTES
from state_ops.logs import Logger
from state_ops.records.checkpoint import EPOCH, Checkpoint
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.restores import Restored
from state_ops.schema import descriptors
from state_ops.storage.storage import Storage
from state_ops.storage.temp_dirs import scratch
from weir.definition import Pipeline
from weir.epoch.model import EpochReport
from weir.execution.executor import Executor
from weir.inspection.comparison.entries import TIMERS, differs, kind_of, paired_views
from weir.inspection.comparison.states import both, compared_views
from weir.inspection.view import View
from weir.ownership.derived_checkpoint import lasting
from weir.ownership.lookups import Lookups, recorded
from weir.ownership.pipeline_storage import nothing_kept, open_storage, readers
from weir.replay.replayer import branch_of, held_with_parent, not_playable, replaying, settings_below, waits, working_in
from weir.restore import restore
from weir.settings.configuration import Settings

log = Logger("weir.drill")

PURPOSE = "drill"
_DIRECTORY = "drills"
_COUNTED = ("rows_in", "rows_out", "rows_late", "rows_dropped", "rows_duplicate", "rows_null_key")
_SHOWN = 3  # keys that differ


@dataclass(frozen=True, slots=True)
class Replay(Facts):
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
class Drilled(Facts):
    """The result of a drill.

    Attributes:
        problems: What is wrong, in words. Without problems the pipeline would come back as it was.
        replay: None if the epoch could not be played again; then `not_replayed` says why.
        missed: The objectives of the settings that were missed, in words.
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
    missed: tuple[str, ...] = ()

    @property
    @fact
    def recovery_seconds(self) -> float | None:
        """The time from an empty host to the next epoch's commit: of the restore, and of the replayed epoch if there is
        one.

        None if the restored state is not what it was, because then there was no recovery.
        """
        if self.problems:
            return None
        return round(self.restore_seconds + (self.replay.seconds if self.replay else 0.0), 3)

    def misses(self, settings: Settings) -> tuple[str, ...]:
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
        return tuple(missed)


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
    done = replace(done, missed=done.misses(settings))
    noted = results.RecordedDrill(
        at=datetime.now(UTC),
        seconds=_since(clock),
        checkpoint=int(done.checkpoint),
        comes_back=not done.problems,
        replayed=done.replay is not None,
        in_time=not done.missed,
        restore_seconds=done.restore_seconds,
        replay_seconds=done.replay.seconds if done.replay is not None else None,
        recovery_seconds=done.recovery_seconds,
        loss_seconds=done.loss_seconds,
    )
    results.note(open_storage(pipeline, settings)[0], results.DRILL, noted)
    return done


def _drilled(pipeline: Pipeline, settings: Settings, executor: Executor | None) -> Drilled:
    if open_storage(pipeline, settings)[1].head() is None:
        raise WeirError(
            f"{pipeline.title} has no checkpoint that could be restored.",
            next=f"Run it first: weir run {pipeline.title}",
        )
    home, host = settings.work_dir / _DIRECTORY, socket.gethostname()  # directories of other hosts may be in use
    with (
        scratch(home, f"{host}-") as directory,
        held_with_parent(pipeline, settings, None, "weir drill") as (storage, registry, head, parent),
        ExitStack() as ends,
    ):
        loss = _loss(pipeline, settings, head)
        begun, clock = datetime.now(UTC), time.perf_counter()
        away = working_in(settings, directory / "restored")
        try:
            restored = restore.restore(pipeline, away, storage, registry, head, PURPOSE)
        except PrunedError:
            raise
        except Exception as error:  # any error is what the drill is there to find
            seconds = _since(clock)
            return Drilled(head.id, begun, None, seconds, None, "it was not restored", loss, (_problem(error),))
        seconds = _since(clock)
        done = partial(Drilled, head.id, begun, restored, seconds, loss_seconds=loss)
        shutil.rmtree(directory / "restored", ignore_errors=True)
        why = _not_comparable(pipeline, settings, head, parent)
        if why is not None or parent is None:
            return done(replay=None, not_replayed=why, problems=())
        there, here = settings_below(settings, directory / "replayed"), branch_of(pipeline, PURPOSE)
        ends.enter_context(nothing_kept(open_storage(here, there)[0]))
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


def _since(clock: float) -> float:
    """Return the seconds since a moment of the performance counter."""
    return round(time.perf_counter() - clock, 3)


def _problem(error: Exception) -> str:
    if isinstance(error, WeirError):
        return str(error)
    log.exception("the drill has met an error that nobody foresaw")
    return plainly(error)


def _loss(pipeline: Pipeline, settings: Settings, head: Checkpoint) -> float:
    """Return the seconds for which the oldest unread file has waited, of sources that can be asked.

    Unread is a file that no checkpoint has read.
    """
    waiting: list[int] = []
    for name, reader in readers(pipeline, settings).items():
        with suppress(WeirError):
            waiting += [file.mtime_ns for file in reader.look(head.offsets.get(name)).fresh if file.mtime_ns]
    return max(0.0, time.time() - min(waiting) / 1e9) if waiting else 0.0


def _not_comparable(pipeline: Pipeline, settings: Settings, head: Checkpoint, parent: Checkpoint | None) -> str | None:
    """Why the newest checkpoint's epoch cannot be played again, in words; None if it can."""
    if pipeline.at_most_once:
        return f"{pipeline.title} delivers at most once: what an epoch was begun on is let go with its end"
    if (why := not_playable(head, parent)) is not None:
        return why if head.kind != EPOCH else f"{why}: set checkpoints.num_retained to 2 or more"
    if head.parent_id is None:
        return f"checkpoint {head.id} is the first: nothing lies before it"
    if (gone := Lookups(pipeline, settings).gone(recorded(head))) is not None:
        return gone
    for row in (head, parent):
        if row is not None and waits(row):
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
    with replaying(here, there, settings, executor, "a drill") as replayer:
        replayer.begin(parent, storage, lasting(registry.files(parent), parent.operators))
        plan = replayer.plan(head, parent)
        clock = time.perf_counter()
        report = replayer.play(plan, head.id)
        if report is None:
            raise WeirError(
                "Its gates set other rows aside than they did.",
                where=f"checkpoint {head.id}",
                next="Were they changed since? The next epoch can be compared again.",
            )
        return report, _since(clock)


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
        at = int(head.id)
        with both(pipeline, settings, uid, at, at, here, there, "weir drill") as (was, now):
            differing = set[tuple[bytes, int]]()
            for pair in paired_views(was, now, equal=True):
                key, then, _ = pair
                entries += then is not None
                if differs(pair):
                    differing.add((key[:GROUP_BYTES], kind_of(key)))
            # What is no row is compared to the byte; rows may differ in the last digits of floats, and what has expired
            # may be swept.
            parts = [_NO_ROWS[kind] for kind in sorted({kind for _, kind in differing} & _NO_ROWS.keys())]
            parts += _differing_rows(was, now) if differing else []
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


_NO_ROWS = {
    descriptors.LIST_ENDS: "the ends of lists",
    **{kind: f"timers by {clock}" for kind, clock in TIMERS.items()},
}


def _differing_rows(was: View, now: View) -> list[str]:
    """Return the differences of the rows in words; none if they differ at most in the last digits of floats."""
    with compared_views(was, now, rounded=True) as difference, difference.rows(_SHOWN) as (_, tables):
        keys = ", ".join(str(row["key"]) for table in tables for row in frames.python_rows(table))
    counts = [f"{count:,} {kind}" for kind, count in difference.counts.items() if count]
    return [f"{', '.join(counts)}, e.g. {keys}"] if counts else []
