"""The coordinator's decisions, without Spark, clock or I/O: when to cut a barrier, what an ack means, what may be
committed.

    trigger -> pending -> every subtask acked -> begin_commit -> completed      in id order, never a newer one first
                  |                                   |
                  +-- declined, timed out, gate ... --+-> abort: it, and every pending epoch that was built on it

Epoch n+1 may start while n is pending. It continues n (`parent_id`), but its files name only objects of checkpoints
that are confirmed, from its `base` on, so n may fail at any time. `needed` says which checkpoints pruning must leave
for it.

Times are seconds on any clock. If the clock goes back, it is taken to have stood still.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from state_ops.checkpoints.pending_checkpoint import (
    Aborted,
    AckOutcome,
    FailureReason,
    PendingCheckpoint,
    Received,
    Refusal,
    misreference,
    owns,
)
from state_ops.counts import agrees, counted
from state_ops.errors import DamageError
from state_ops.ids import CheckpointId, Generation
from state_ops.records.acks import Ack
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.snapshot_files import STATE, StateFile
from state_ops.records.triggers import Trigger

_LONGEST_RETRY = 30.0


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits on barriers, failures and retained checkpoints. Times are in seconds.

    Attributes:
        interval: The time between barriers while data waits; None cuts them only on request.
        min_pause: The least time since the last epoch began or ended.
        timeout: The longest time from trigger to commit.
        tolerable_failures: How many failures in a row are tolerated; one more ends the run.
        num_retained: How many completed checkpoints are kept.
    """

    interval: float | None = None
    min_pause: float = 0.0
    timeout: float = 600.0
    max_concurrent: int = 1
    tolerable_failures: int = 0
    num_retained: int = 1


class Coordinator:
    """A model of pending, confirmed and failed checkpoints. Barriers, acks and commits are proven as one model.

    Attributes:
        retained: The registry's checkpoints, oldest first; the last one is continued.
        listings: Their files, by id.
        last_id: The highest id that any coordinator of this pipeline has begun.
        now: The time, in seconds.

    Raises:
        DamageError: A retained checkpoint lacks its listing, so the files that it names could not be told from garbage.
    """

    def __init__(
        self,
        policy: Policy,
        generation: Generation,
        retained: Sequence[Checkpoint],
        listings: Mapping[CheckpointId, Sequence[StateFile]],
        last_id: CheckpointId,
        now: float,
    ) -> None:
        self.policy, self.generation = policy, generation
        self.head = max(retained, key=lambda row: row.id, default=None)
        self.failures = 0
        self._pending: list[PendingCheckpoint] = []
        self._aborted: set[CheckpointId] = set()
        self._confirmed = {row.id: _objects(row, listings.get(row.id, ())) for row in retained}
        self._last_id = CheckpointId(next_id(self.head, [last_id]) - 1)
        self._first_id = self._last_id + 1
        self._seen, self._lost, self._last = now, 0.0, now

    # -- barriers

    @property
    def pending(self) -> tuple[PendingCheckpoint, ...]:
        """The pending epochs, oldest first."""
        return tuple(self._pending)

    @property
    def failed_for_good(self) -> bool:
        return self.failures > self.policy.tolerable_failures

    def due(self, now: float, *, backlog: bool, requested: bool, catching_up: bool) -> bool:
        """Return whether to cut a barrier.

        A request keeps the min pause too. A run that catches up waits only after a failure.
        """
        at = self._clock(now)
        if not (backlog or requested) or self._held(at, catching_up) is not None:
            return False
        interval = self.policy.interval
        return catching_up or requested or (interval is not None and at - self._last >= interval)

    def trigger(
        self,
        now: float,
        trigger: Trigger,
        expected: Mapping[str, int],
        *,
        catching_up: bool = False,
        positions_first: bool = False,
    ) -> PendingCheckpoint | Refusal:
        """Begin the next epoch, with an id above every one that was ever begun.

        Args:
            expected: By operator, its number of subtasks.
            positions_first: The id below the epoch's is that of a checkpoint of positions (`begin_positions`).
        """
        at = self._clock(now)
        held = self._held(at, catching_up or trigger in (Trigger.SAVEPOINT, Trigger.DRAIN))
        if held is not None:
            return Refusal(held)
        self._last_id = CheckpointId(next_id(self.head, [self._last_id]) + positions_first)
        self._last = at
        newest = self._pending[-1] if self._pending else self.head
        parent = newest.id if newest is not None else None
        deadline = at + self.policy.timeout
        begun = PendingCheckpoint(self._last_id, parent, self.head, self.generation, trigger, dict(expected), deadline)
        self._pending.append(begun)
        return begun

    def _held(self, at: float, at_once: bool) -> str | None:
        """Return the reason why no epoch may begin, in words; None if one may.

        Args:
            at_once: Ignore the min pause.
        """
        if self.failed_for_good:
            tolerated = counted(self.policy.tolerable_failures, "failure", "is", "are")
            return f"{counted(self.failures, 'epoch')} failed in a row, {tolerated} tolerated"
        if len(self._pending) >= self.policy.max_concurrent:
            ids = ", ".join(str(pending.id) for pending in self._pending)
            return f"max concurrent reached: {ids} pending, {self.policy.max_concurrent} may be"
        for pending in self._pending:
            if pending.declines:
                return f"epoch {pending.id}, which it would continue, has been declined"
        pause, why = (0.0, "") if at_once else (self.policy.min_pause, "min pause")
        if self.failures:
            pause, why = max(self.policy.min_pause, retry_pause(self.failures)), f"pause after failure {self.failures}"
        left = self._last + pause - at
        return f"{why}: {left:.3g} s of {pause:g} s left" if left > 0 else None

    # -- acks

    def receive(self, ack: Ack) -> Received:
        """Record an ack and return its outcome, with the files to discard.

        Files to discard lie under its attempt's own prefix, and nothing that counts names them.
        """
        if ack.generation != self.generation:
            return Received(AckOutcome.FENCED)
        if not self._first_id <= ack.epoch <= self._last_id:
            return Received(AckOutcome.FOREIGN)
        pending = next((pending for pending in self._pending if pending.id == ack.epoch), None)
        if pending is None:
            return Received(AckOutcome.LATE, discard=self._discardable(ack))
        if ack.error is None and (unconfirmed := self._unconfirmed(pending, ack)) is not None:
            ack = replace(ack, error=misreference(ack, unconfirmed))
        outcome = pending.record(ack)
        if outcome is AckOutcome.ACCEPTED:
            return Received(outcome)
        if outcome is AckOutcome.DUPLICATE and pending.acks[ack.operator, ack.subtask].attempt == ack.attempt:
            return Received(outcome)
        error = ack.error if outcome is AckOutcome.DECLINED else None
        return Received(outcome, error, self._discardable(ack))

    def _unconfirmed(self, pending: PendingCheckpoint, ack: Ack) -> StateFile | None:
        """Return the first file of an ack that is neither the attempt's own nor an object confirmed by a checkpoint
        from the epoch's base on."""
        confirmed = [self._confirmed[id] for id in self._needed_by(pending)]
        for file in ack.files:
            if owns(ack, file):
                continue
            if file.new or file.kind != STATE or all(named.get(file.path) != file.digest for named in confirmed):
                return file
        return None

    def _discardable(self, ack: Ack) -> tuple[StateFile, ...]:
        files = [file for file in ack.files if owns(ack, file)]
        if ack.epoch not in self._aborted and ack.epoch not in self._confirmed and not self._is_pending(ack.epoch):
            # It has completed and was pruned: whose rows were published then is not known any more.
            files = [file for file in files if not file.in_table]
        return self._unnamed(files)

    def _unnamed(self, files: Sequence[StateFile]) -> tuple[StateFile, ...]:
        """Return the files that no accepted ack and no confirmed checkpoint names."""
        if not files:
            return ()
        accepted = {file.path for pending in self._pending for file in pending.files()}
        return tuple(
            file
            for file in files
            if file.path not in accepted and all(file.path not in named for named in self._confirmed.values())
        )

    # -- ends

    def expire(self, now: float) -> tuple[Aborted, ...]:
        """Abort the oldest epoch if its time is up, and its successors. An epoch that is being committed has no
        deadline.
        """
        at = self._clock(now)
        for pending in self._pending:
            if at >= pending.deadline and not pending.committing:
                return self.abort(now, pending.id, FailureReason.TIMEOUT)
        return ()

    def abort(self, now: float, id: CheckpointId, reason: FailureReason) -> tuple[Aborted, ...]:
        """Abort an epoch and all that continue it, which counts as one failure.

        Nothing happens if the epoch was aborted before. Only the registry knows of an epoch that is being committed:
        FailureReason.COMMIT says that the registry was asked and has no row of it.

        Raises:
            ValueError: The epoch has completed or was never begun, or it is being committed and the reason is another
                one.
        """
        if id in self._aborted:
            return ()
        if not self._is_pending(id):
            raise ValueError(f"Epoch {id} is not pending: it has completed, or this coordinator never began it.")
        if self._pending[0].id == id and self._pending[0].committing and reason is not FailureReason.COMMIT:
            raise ValueError(f"Epoch {id} is being committed: only the registry can tell that it failed.")
        fallen = self._drop([pending for pending in self._pending if pending.id >= id], id, reason)
        self._count_failure(now)
        return fallen

    def prolong(self, now: float, id: CheckpointId) -> None:
        """Begin an epoch's time anew: it has waited for an earlier one until now."""
        at = self._clock(now)
        for pending in self._pending:
            if pending.id == id:
                pending.deadline = max(pending.deadline, at + self.policy.timeout)

    def count(self, now: float, failures: int) -> None:
        """Set how many failures in a row there are, if several epochs have failed for one reason."""
        self.failures, self._last = failures, self._clock(now)

    def failed(self, now: float) -> None:
        """Count an attempt that failed before it could trigger an epoch, for example because its slice could not be
        planned.
        """
        self._count_failure(now)

    def begin_positions(self) -> CheckpointId:
        """Begin a checkpoint of positions alone, for which the only pending epoch waits, and return its id.

        The epoch continues that checkpoint.
        """
        (only,) = self._pending
        only.committing = True
        return CheckpointId(only.id - 1)

    def positioned(self, checkpoint: Checkpoint, files: Sequence[StateFile]) -> None:
        """Take a checkpoint of positions that the registry has as the head, which the pending epoch continues.

        Args:
            files: Its listing.
        """
        (only,) = self._pending
        self._confirmed[checkpoint.id] = _objects(checkpoint, files)
        self.head, only.parent_id, only.committing = checkpoint, checkpoint.id, False

    def begin_commit(self) -> PendingCheckpoint | None:
        """Return the oldest pending epoch if all its acks are in: it is to be committed now. None otherwise, even if
        newer ones are complete."""
        oldest = self._pending[0] if self._pending else None
        if oldest is None or not oldest.complete:
            return None
        oldest.committing = True
        return oldest

    def completed(self, now: float, checkpoint: Checkpoint, carried: Sequence[StateFile] = ()) -> None:
        """Take the checkpoint as the head: the registry has its row.

        Args:
            carried: Files of its listing that no ack has brought.

        Raises:
            ValueError: It was not being committed.
        """
        oldest = self._pending[0] if self._pending else None
        if (
            oldest is None
            or not oldest.committing
            or (checkpoint.id, checkpoint.parent_id) != (oldest.id, oldest.parent_id)
        ):
            raise ValueError(f"Checkpoint {checkpoint.id}, parent {checkpoint.parent_id}, was not being committed.")
        self._confirmed[checkpoint.id] = _objects(checkpoint, [*oldest.files(), *carried])
        self._pending.remove(oldest)
        self.head, self.failures, self._last = checkpoint, 0, self._clock(now)

    def renew(self, generation: Generation) -> tuple[Aborted, ...]:
        """Go on under a generation that this coordinator has claimed itself.

        Pending epochs carry the old generation and fail.
        """
        if generation == self.generation:
            return ()
        fallen = self._drop(list(self._pending), None, FailureReason.RENEWED)
        self.generation, self._first_id = generation, self._last_id + 1
        return fallen

    def _drop(
        self, fallen: list[PendingCheckpoint], first: CheckpointId | None, reason: FailureReason
    ) -> tuple[Aborted, ...]:
        ids = {pending.id for pending in fallen}
        self._pending = [pending for pending in self._pending if pending.id not in ids]
        self._aborted |= ids
        others = reason if first is None else FailureReason.PREDECESSOR
        return tuple(
            Aborted(
                pending,
                reason if pending.id == first else others,
                self._unnamed([file for ack in pending.acks.values() for file in ack.files if owns(ack, file)]),
            )
            for pending in fallen
        )

    def _count_failure(self, now: float) -> None:
        self.failures, self._last = self.failures + 1, self._clock(now)

    # -- retention

    def needed(self) -> dict[CheckpointId, list[str]]:
        """Return the checkpoints that pruning must leave, with the reasons: epochs in flight may name their objects."""
        reasons: dict[CheckpointId, list[str]] = {}
        for pending in self._pending:
            for id in self._needed_by(pending):
                reasons.setdefault(id, []).append(f"epoch {pending.id} is in flight")
        return reasons

    def _needed_by(self, pending: PendingCheckpoint) -> list[CheckpointId]:
        base = pending.base.id if pending.base else 0
        return [id for id in sorted(self._confirmed) if id >= base]

    @property
    def confirmed(self) -> frozenset[CheckpointId]:
        """The ids of the retained checkpoints, as far as this object was told."""
        return frozenset(self._confirmed)

    def pruned(self, ids: Iterable[CheckpointId]) -> None:
        """Note that the registry has dropped these checkpoints."""
        for id in ids:
            self._confirmed.pop(id, None)

    # -- details

    def _is_pending(self, id: CheckpointId) -> bool:
        return any(pending.id == id for pending in self._pending)

    def _clock(self, now: float) -> float:
        """Return the time that has passed. If the clock is set back by an hour, no wait ends early or takes an hour
        longer."""
        self._lost += max(0.0, self._seen - now)
        self._seen = now
        return now + self._lost


def next_id(head: Checkpoint | None, begun: Iterable[CheckpointId]) -> CheckpointId:
    """Return the next checkpoint id: above the head, and above every id that was ever begun, completed or not."""
    return CheckpointId(max([head.id if head else 0, *begun]) + 1)


def retry_pause(failures: int) -> float:
    """Return the least seconds before the next try after so many failures in a row: 1, 2, 4 ... 30."""
    return min(2.0 ** min(failures - 1, 10), _LONGEST_RETRY)


def _objects(checkpoint: Checkpoint, files: Sequence[StateFile]) -> dict[str, str]:
    """Return the path and digest of all objects that a checkpoint names."""
    if len(files) != checkpoint.files:
        raise DamageError(
            f"Checkpoint {checkpoint.id} has {counted(checkpoint.files, 'file')}, but {len(files)} "
            f"{agrees(len(files), 'is', 'are')} listed.",
            next="Nothing was deleted. Do not go on from an older checkpoint by hand: that would lose what this one "
            "holds.",
        )
    return {file.path: file.digest for file in files}
