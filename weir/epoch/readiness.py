"""Rules about when a step of an epoch may begin. Pure functions over the model.

    ids              1 2 3 4        an epoch's id is written down before anything else of it begins
    positions        1 . . .        at most once: committed before anything is applied, and then nothing overlaps
    a stage          1 2 3 4        a stage takes epochs in order, each on the snapshot that the epoch before left
    the next stage     1 2 3 4      ... and after the stage upstream; rows that it left come first in its next epoch
    deliveries         1 2 3 4      at least once: rows go to sinks as soon as their stage has acked
    gates of rows      1 2 3 4      before a stage that reads the rows, and beside the next epoch
    uploads              1 2 3      after the upload of the epoch before, to whose objects this one refers
    commits                1 2 3    sealed and committed one epoch after the other
    publishing               1 2 3  one after the other too, at most one epoch behind the newest commit
    pruning                    1 2 3  beside the publishing of the next epoch, and not after each epoch

Nothing of an epoch waits for a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weir.definition import Stage
from weir.epoch.model import EpochsInFlight, InFlightEpoch, Step

MIB = 1 << 20
_WATCH_SECONDS = 5.0


def may_begin(epochs: EpochsInFlight, epoch: InFlightEpoch, step: Step, stage: Stage | None = None) -> bool:
    """Return whether a step of an epoch may begin now.

    Its slot must be free, it must not have begun before, and its rules must hold.

    Args:
        stage: For a step that each stage takes (`Rules.stage` in `MAY_BEGIN`); None for a step of the whole epoch.
    """
    if (step, stage.uid if stage else None) in epoch.begun or step.slot(stage) in epochs.running:
        return False
    rules = MAY_BEGIN[step]
    return all(rule(epochs, epoch) for rule in rules.epoch) and (
        stage is None or all(rule(epochs, epoch, stage) for rule in rules.stage)
    )


# -- rules about an epoch


def id_is_noted(_: EpochsInFlight, epoch: InFlightEpoch) -> bool:
    """Require that the epoch's id is noted.

    The next run must not use an id again if something may lie in storage under it.
    """
    return epoch.noted


def positions_come_first(_: EpochsInFlight, epoch: InFlightEpoch) -> bool:
    """Positions alone are committed where rows are delivered at most once, and only for an epoch that reads rows."""
    return epoch.positions_first


def is_behind_positions(_: EpochsInFlight, epoch: InFlightEpoch) -> bool:
    """Require that the positions are committed, if rows are delivered at most once.

    No stage may see rows that the next run could read again.
    """
    return epoch.positioned or not epoch.positions_first


def epoch_before_is_confirmed(epochs: EpochsInFlight, epoch: InFlightEpoch) -> bool:
    """Checkpoints are committed in order, and each names only objects of confirmed ones."""
    before = epochs.before(epoch)
    return before is None or before.confirmed is not None


def epoch_before_is_stored(epochs: EpochsInFlight, epoch: InFlightEpoch) -> bool:
    """Return an upload refers to objects of the epoch before, so they are in storage, and that epoch is the next to
    commit."""
    before = epochs.before(epoch)
    return before is None or (before.pending.complete and epoch_before_is_confirmed(epochs, before))


def rows_left_are_known(epochs: EpochsInFlight, epoch: InFlightEpoch) -> bool:
    """Require that all stages have told which rows they leave.

    Rows that a stage downstream leaves are uploaded with those of the stage that handed them out.
    """
    return not epochs.may_leave_rows or all(stage.uid in epoch.acks for stage in epochs.stages)


def all_is_stored(_: EpochsInFlight, epoch: InFlightEpoch) -> bool:
    """Require the ack of every subtask, and all files that the acks name in storage."""
    return epoch.pending.complete


def rows_come_before_commit(epochs: EpochsInFlight, _: InFlightEpoch) -> bool:
    """Sinks get rows of an epoch that may still fall only where rows are delivered at least once."""
    return epochs.early


def all_is_delivered(epochs: EpochsInFlight, epoch: InFlightEpoch) -> bool:
    """Require that all rows are delivered, if they are delivered at least once.

    Nobody publishes them after the commit.
    """
    return all(stage_is_delivered(epochs, epoch, stage) for stage in epochs.stages)


def gates_have_passed(epochs: EpochsInFlight, epoch: InFlightEpoch) -> bool:
    """Require that no gate on rows refuses the epoch."""
    return all(stage.uid in epoch.judged for stage in epochs.stages)


def is_sealed(_: EpochsInFlight, epoch: InFlightEpoch) -> bool:
    """Require that the epoch is sealed: its row and its listing are written as they were checked."""
    return epoch.sealed is not None


def publishing_keeps_up(epochs: EpochsInFlight, epoch: InFlightEpoch) -> bool:
    """Require that at most the epoch before is still publishing, so that sinks lack little."""
    return sum(other.published is None for other in _all_before(epochs, epoch)) <= 1


def pruning_keeps_up(epochs: EpochsInFlight, epoch: InFlightEpoch) -> bool:
    """Require that at most one more epoch is still pruning, so that there are few checkpoints at a time."""
    return len(_all_before(epochs, epoch)) <= 2


def is_confirmed(_: EpochsInFlight, epoch: InFlightEpoch) -> bool:
    """Require that the commit is confirmed: rows of an epoch that may still fall are not shown to anybody."""
    return epoch.confirmed is not None


def is_published(_: EpochsInFlight, epoch: InFlightEpoch) -> bool:
    """Require that the epoch is published.

    Rows that a sink lacks are not pruned, and a request is answered only when its epoch's rows can be seen.
    """
    return epoch.published is not None


# -- rules about a stage in an epoch


def stage_has_done_epoch_before(epochs: EpochsInFlight, epoch: InFlightEpoch, stage: Stage) -> bool:
    """Require that the stage has done the epoch before: it applies an epoch to the state that the one before left."""
    before = epochs.before(epoch)
    return before is None or stage.uid in before.acks


def gates_have_passed_upstream(_: EpochsInFlight, epoch: InFlightEpoch, stage: Stage) -> bool:
    """Require that the gates upstream have passed: no stage may see rows that a gate refuses."""
    return all(before.uid in epoch.judged for before in stage.stages_before)


def base_is_at_hand(epochs: EpochsInFlight, epoch: InFlightEpoch, stage: Stage) -> bool:
    """Subtasks find the snapshot of an epoch in flight only on a disk that they share with the coordinator."""
    at_hand = epochs.progress[stage.uid].settled and stage.uid not in epoch.elsewhere
    return at_hand or epoch_before_is_confirmed(epochs, epoch)


def disk_has_room(epochs: EpochsInFlight, epoch: InFlightEpoch, _: Stage) -> bool:
    """Require room on the disk, except for the oldest epoch, whose end alone frees space.

    It is asked last, since it adds all bytes up.
    """
    return epoch_before_is_confirmed(epochs, epoch) or below_max_pending(epochs)


def stage_is_delivered(epochs: EpochsInFlight, epoch: InFlightEpoch, stage: Stage) -> bool:
    """Require that the stage's rows are delivered, if they are delivered at least once.

    Rows are uploaded before state, so that they can be seen sooner.
    """
    return not epochs.early or stage.uid in epoch.delivered


def stage_has_delivered_epoch_before(epochs: EpochsInFlight, epoch: InFlightEpoch, stage: Stage) -> bool:
    """Require that the stage has delivered the epoch before: a sink gets epochs in order."""
    before = epochs.before(epoch)
    return before is None or stage.uid in before.delivered


def stage_has_acked(_: EpochsInFlight, epoch: InFlightEpoch, stage: Stage) -> bool:
    """Gates look at the rows of all subtasks, and a sink gets these at once."""
    return stage.uid in epoch.acks


def gates_have_not_spoken(_: EpochsInFlight, epoch: InFlightEpoch, stage: Stage) -> bool:
    """Gates that may set rows aside are asked in the stage's own job, and a stage may have none."""
    return stage.uid not in epoch.judged


def has_pending_upload(_: EpochsInFlight, epoch: InFlightEpoch, stage: Stage) -> bool:
    """Subtasks that do not share the coordinator's disk upload by themselves."""
    return any(ack.pending_upload is not None for ack in epoch.acks.get(stage.uid, ()))


@dataclass(frozen=True, slots=True)
class Rules:
    """All of them must hold before a step begins.

    Attributes:
        stage: For steps that each stage takes.
    """

    epoch: tuple[Callable[[EpochsInFlight, InFlightEpoch], bool], ...] = ()
    stage: tuple[Callable[[EpochsInFlight, InFlightEpoch, Stage], bool], ...] = ()


MAY_BEGIN: Mapping[Step, Rules] = {
    Step.NOTE_ID: Rules(),
    Step.POSITIONS: Rules((id_is_noted, positions_come_first)),
    Step.RUN_STAGE: Rules(
        (id_is_noted, is_behind_positions),
        (stage_has_done_epoch_before, gates_have_passed_upstream, base_is_at_hand, disk_has_room),
    ),
    Step.DELIVER: Rules((rows_come_before_commit,), (stage_has_acked, stage_has_delivered_epoch_before)),
    Step.JUDGE: Rules((), (stage_has_acked, gates_have_not_spoken)),
    Step.UPLOAD: Rules((epoch_before_is_stored, rows_left_are_known), (has_pending_upload, stage_is_delivered)),
    Step.SEAL: Rules((all_is_stored, all_is_delivered, gates_have_passed, epoch_before_is_confirmed)),
    Step.COMMIT: Rules((is_sealed, publishing_keeps_up, pruning_keeps_up)),
    Step.PUBLISH: Rules((is_confirmed,)),
    Step.FINISH: Rules((is_published,)),
}


# -- what is decided beside the steps


def can_start_epoch(epochs: EpochsInFlight) -> bool:
    """Return whether one more epoch may begin.

    An epoch without unconfirmed ones before it may, however many bytes wait: only its end frees space.
    """
    if epochs.fallen or epochs.failure is not None:
        return False
    oldest = all(epoch.confirmed is not None for epoch in epochs.epochs)
    return below_max_concurrent(epochs) and (oldest or below_max_pending(epochs))


def below_max_concurrent(epochs: EpochsInFlight) -> bool:
    """Return a confirmed epoch that is still publishing does not count: publishing needs no processor, so stages should
    not wait for it. With a limit of one epoch nothing overlaps."""
    limit = epochs.limits.max_concurrent
    return sum(epoch.confirmed is None for epoch in epochs.epochs) < limit and (limit > 1 or not epochs.epochs)


def below_max_pending(epochs: EpochsInFlight) -> bool:
    """Whatever waits to be uploaded or applied fills this disk."""
    return epochs.pending_bytes <= epochs.limits.max_pending_mb * MIB


def can_defer_pruning(epochs: EpochsInFlight, epoch: InFlightEpoch) -> bool:
    """Return whether an epoch leaves pruning to the next one, which would soon wait for it.

    It never does so twice in a row, nor if a request waits for an answer.
    """
    follower = epochs.after(epoch)
    soon = follower is not None and follower.pending.complete
    return soon and not epoch.plan.requests and not epochs.pruning_deferred


def epoch_to_watch(epochs: EpochsInFlight, now: float, watched: float) -> InFlightEpoch | None:
    """Return the epoch of a stage that has worked for so long that it may wait for state that is being fetched.

    Args:
        now: On time.monotonic().
        watched: When somebody looked last.
    """
    stages = {stage.uid for stage in epochs.stages}
    for slot, step in epochs.running.items():
        if slot in stages and step.epoch in epochs.epochs:
            since = max(step.begun, watched)
            if now >= since + min(_WATCH_SECONDS, (step.epoch.deadline - since) / 4):
                return step.epoch
    return None


def _all_before(epochs: EpochsInFlight, epoch: InFlightEpoch) -> list[InFlightEpoch]:
    return epochs.epochs[: epochs.epochs.index(epoch)]
