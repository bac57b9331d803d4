"""The coordinator's decisions, each ack with its outcome, on a clock that the tests set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from state_ops.checkpoints import retention
from state_ops.checkpoints.coordinator import Coordinator, Policy, next_id, retry_pause
from state_ops.checkpoints.pending_checkpoint import (
    AckOutcome,
    FailureReason,
    PendingCheckpoint,
    Received,
    Refusal,
    owns,
)
from state_ops.errors import DamageError
from state_ops.ids import AttemptId, CheckpointId, Generation, epoch_dir
from state_ops.records.acks import Ack
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.snapshot_files import OUTPUT, STATE, StateFile
from state_ops.records.triggers import Trigger
from tests.state_ops.checkpoints.test_registry import a_checkpoint

GENERATION, EXPECTED = Generation(3), {"one": 2, "two": 1}
EVERY_SUBTASK = [("one", 0), ("one", 1), ("two", 0)]
HOUR = 3600.0


def a_coordinator(head: int | None = None, files: Sequence[StateFile] = (), *, last_id: int = 6, **policy: Any):
    """At second 0, on generation 3, with a head if `head` is its id; the next epoch is 7."""
    retained = [] if head is None else [a_checkpoint(head, None, files, generation=2)]
    listings = {row.id: files for row in retained}
    return Coordinator(Policy(**policy), GENERATION, retained, listings, CheckpointId(last_id), 0.0)


def begin(coordinator: Coordinator, now: float = 0.0, trigger: Trigger = Trigger.MANUAL) -> PendingCheckpoint:
    begun = coordinator.trigger(now, trigger, EXPECTED, catching_up=True)
    assert isinstance(begun, PendingCheckpoint), begun
    return begun


def a_file(
    operator: str = "one",
    subtask: int = 0,
    attempt: str = "a",
    epoch: int = 7,
    generation: int = 3,
    name: str = "1.sst",
    kind: str = STATE,
) -> StateFile:
    """An object that an attempt uploaded."""
    attempt = f"{attempt}-of-{operator}"
    place = f"{epoch_dir(Generation(generation), CheckpointId(epoch))}/{subtask}-{attempt}"
    path = f"state/{operator}/{place}/{name}" if kind == STATE else f"tables/out/data/{place}.parquet"
    sink = "out" if kind == OUTPUT else None
    return StateFile(operator, subtask, kind, name, path, 1, f"digest of {path}", True, AttemptId(attempt), None, sink)


def ack(
    operator: str = "one",
    subtask: int = 0,
    *,
    attempt: str = "a",
    epoch: int = 7,
    generation: int = 3,
    also: Sequence[StateFile] = (),
    error: dict[str, Any] | None = None,
) -> Ack:
    """With one state file and one output of its own. also: further files that it names."""
    files = [a_file(operator, subtask, attempt, epoch, generation, kind=kind) for kind in (STATE, OUTPUT)]
    ids = files[0].attempt, CheckpointId(epoch), Generation(generation)
    return Ack(operator, subtask, *ids, files=(*files, *also), error=error)


def ack_all(coordinator: Coordinator, epoch: int = 7) -> None:
    for operator, subtask in EVERY_SUBTASK:
        assert coordinator.receive(ack(operator, subtask, epoch=epoch)) == Received(AckOutcome.ACCEPTED)


def commit(coordinator: Coordinator, now: float = 0.0) -> Checkpoint:
    """What the runtime does with a registry that takes the row."""
    pending = coordinator.begin_commit()
    assert pending is not None
    done = a_checkpoint(pending.id, pending.parent_id, pending.files(), generation=3)
    coordinator.completed(now, done)
    return done


# -- positions before rows


def position(coordinator: Coordinator, head: int | None) -> Checkpoint:
    """What the runtime does with a registry that takes the row."""
    row = a_checkpoint(coordinator.begin_positions(), head, [], generation=3)
    coordinator.positioned(row, [])
    return row


def test_an_epoch_continues_the_positions_that_were_committed_for_it():
    coordinator = a_coordinator(head=6)
    pending = coordinator.trigger(0.0, Trigger.MANUAL, EXPECTED, positions_first=True)
    assert isinstance(pending, PendingCheckpoint) and (pending.id, pending.parent_id) == (8, 6)
    row = position(coordinator, 6)
    assert row.id == 7 and coordinator.head is row and pending.parent_id == 7
    assert coordinator.needed().keys() == {6, 7}
    ack_all(coordinator, epoch=8)
    assert commit(coordinator).parent_id == 7


def test_after_an_epoch_that_fails_the_next_one_continues_its_positions():
    coordinator = a_coordinator(head=6, tolerable_failures=1)
    coordinator.trigger(0.0, Trigger.MANUAL, EXPECTED, positions_first=True)
    position(coordinator, 6)
    coordinator.abort(0.0, CheckpointId(8), FailureReason.JOB)
    assert coordinator.failures == 1 and coordinator.head.id == 7
    again = coordinator.trigger(60.0, Trigger.MANUAL, EXPECTED, positions_first=True)
    assert isinstance(again, PendingCheckpoint) and (again.id, again.parent_id) == (10, 7)


def test_an_epoch_whose_positions_are_being_committed_has_no_deadline_and_has_one_afterwards():
    coordinator = a_coordinator(head=6, timeout=10.0)
    coordinator.trigger(0.0, Trigger.MANUAL, EXPECTED, positions_first=True)
    row = a_checkpoint(coordinator.begin_positions(), 6, [], generation=3)
    assert coordinator.expire(11.0) == ()
    coordinator.positioned(row, [])
    assert [aborted.reason for aborted in coordinator.expire(12.0)] == [FailureReason.TIMEOUT]


# -- acks


def test_the_first_ack_of_a_subtask_wins_among_its_attempts():
    coordinator = a_coordinator()
    pending = begin(coordinator)
    coordinator.receive(ack(attempt="first"))
    loser = ack(attempt="second")
    assert coordinator.receive(loser) == Received(AckOutcome.DUPLICATE, discard=loser.files)
    assert {file.attempt for file in pending.files()} == {"first-of-one"}


@pytest.mark.parametrize(
    ("late", "outcome", "discarded"),
    [
        (ack(epoch=6), AckOutcome.FOREIGN, False),
        (ack(epoch=8), AckOutcome.FOREIGN, False),
        (ack(operator="three"), AckOutcome.UNKNOWN, True),
        (ack(subtask=2), AckOutcome.UNKNOWN, True),
        (ack(subtask=-1), AckOutcome.UNKNOWN, True),
        (ack(generation=2), AckOutcome.FENCED, False),
        (ack(generation=4), AckOutcome.FENCED, False),
    ],
)
def test_late_foreign_and_fenced_acks_change_nothing(late, outcome, discarded):
    coordinator = a_coordinator()
    pending = begin(coordinator)
    assert coordinator.receive(late) == Received(outcome, discard=late.files if discarded else ())
    assert pending.acks == {} and pending.declines == []


def test_rows_that_were_published_are_not_deleted_for_a_late_ack_once_their_checkpoint_is_pruned():
    coordinator = a_coordinator()
    begin(coordinator)
    ack_all(coordinator)
    commit(coordinator)
    coordinator.pruned([CheckpointId(7)])
    assert coordinator.receive(ack()) == Received(AckOutcome.LATE, discard=(a_file(),))


def test_one_decline_declines_the_epoch():
    coordinator = a_coordinator(max_concurrent=2)
    begin(coordinator)
    ack_all(coordinator)
    report = {"kind": "StageError"}
    declined = ack("one", 1, attempt="b", error=report)
    assert coordinator.receive(declined) == Received(AckOutcome.DECLINED, report, declined.files)
    assert coordinator.begin_commit() is None
    assert "epoch 7, which it would continue, has been declined" in refused(coordinator)


OLDER, NEWER = a_file(epoch=4, generation=2), a_file(epoch=5, generation=2, name="2.sst")


@pytest.mark.parametrize(
    ("named", "accepted"),
    [
        pytest.param(replace(NEWER, new=False), True, id="confirmed"),
        pytest.param(replace(OLDER, new=False), False, id="of-a-checkpoint-that-pruning-may-take"),
        pytest.param(replace(NEWER, new=False, digest="another"), False, id="confirmed-with-another-content"),
        pytest.param(NEWER, False, id="confirmed-but-said-to-be-new"),
        pytest.param(replace(a_file(epoch=7, attempt="b"), new=False), False, id="another-attempts"),
        pytest.param(a_file(epoch=7, attempt="b"), False, id="another-attempts-said-to-be-new"),
        pytest.param(replace(a_file(), path=f"{a_file().path}/../../0-b/1.sst"), False, id="out-of-its-prefix"),
        pytest.param(replace(a_file(epoch=5, generation=2, kind=OUTPUT), new=False), False, id="rows-once-more"),
    ],
)
def test_an_ack_may_name_its_own_objects_and_those_of_confirmed_checkpoints(named, accepted):
    rows = [a_checkpoint(4, None, [OLDER]), a_checkpoint(5, 4, [NEWER, a_file(epoch=5, generation=2, kind=OUTPUT)])]
    listings = {CheckpointId(4): [OLDER], CheckpointId(5): [NEWER, a_file(epoch=5, generation=2, kind=OUTPUT)]}
    coordinator = Coordinator(Policy(), GENERATION, rows, listings, CheckpointId(6), 0.0)
    pending = begin(coordinator)
    received = coordinator.receive(ack(also=[named]))
    if accepted:
        assert received == Received(AckOutcome.ACCEPTED)
        return
    assert received.outcome is AckOutcome.DECLINED
    assert received.error is not None and received.error["kind"] == "DamageError"
    assert f"acked with {named.path}, which is neither" in received.error["what"]
    assert pending.acks == {} and received.discard == ack().files


# -- commits


def test_case_07_after_a_commit_that_fails_the_old_checkpoint_stands_and_the_new_state_is_discarded():
    inherited = a_file(epoch=5, generation=2)
    coordinator = a_coordinator(head=6, files=[inherited], tolerable_failures=1)
    before = coordinator.head
    begin(coordinator)
    reuses = ack(also=[replace(inherited, new=False)])
    coordinator.receive(reuses)
    for operator, subtask in EVERY_SUBTASK[1:]:
        coordinator.receive(ack(operator, subtask))
    pending = coordinator.begin_commit()
    assert pending is not None
    with pytest.raises(ValueError, match="only the registry can tell"):
        coordinator.abort(1.0, CheckpointId(7), FailureReason.TIMEOUT)

    (aborted,) = coordinator.abort(1.0, CheckpointId(7), FailureReason.COMMIT)

    assert aborted.reason is FailureReason.COMMIT
    assert aborted.discard == tuple(file for file in pending.files() if file.path != inherited.path)
    assert coordinator.head is before
    assert begin(coordinator, now=2.0).id == 8
    assert coordinator.receive(replace(reuses, epoch=CheckpointId(8))).outcome is AckOutcome.DECLINED


def test_case_08_a_checkpoint_that_cannot_be_read_is_never_skipped():
    rows = [a_checkpoint(1, None, [OLDER]), a_checkpoint(2, 1, [OLDER, NEWER]), a_checkpoint(3, 2, [NEWER])]
    whole = {CheckpointId(1): [OLDER], CheckpointId(2): [OLDER, NEWER], CheckpointId(3): [NEWER]}
    assert Coordinator(Policy(), GENERATION, rows, whole, CheckpointId(3), 0.0).head == rows[-1]
    for lost in (1, 2, 3):
        torn = {**whole, CheckpointId(lost): whole[CheckpointId(lost)][1:]}
        absent = {id: files for id, files in whole.items() if id != lost}
        for listings in (torn, absent):
            with pytest.raises(DamageError, match=f"Checkpoint {lost} has"):
                Coordinator(Policy(), GENERATION, rows, listings, CheckpointId(3), 0.0)


def test_case_11_of_two_pending_the_newer_waits_and_falls_with_the_older():
    coordinator = a_coordinator(max_concurrent=2, tolerable_failures=1)
    begin(coordinator)
    newer = begin(coordinator)
    assert (newer.parent_id, newer.base) == (7, None)
    ack_all(coordinator, epoch=8)
    assert newer.complete and coordinator.begin_commit() is None, "the newer is ready first, and waits"
    ack_all(coordinator, epoch=7)
    first = commit(coordinator)
    second = commit(coordinator)
    assert [first.id, second.id, second.parent_id] == [7, 8, 7]

    begin(coordinator)
    begin(coordinator)
    ack_all(coordinator, epoch=10)
    fallen = coordinator.abort(1.0, CheckpointId(9), FailureReason.JOB)
    reasons = [FailureReason.JOB, FailureReason.PREDECESSOR]
    assert [(failed.pending.id, failed.reason) for failed in fallen] == list(zip([9, 10], reasons, strict=True))
    assert fallen[1].discard == tuple(file for subtask in EVERY_SUBTASK for file in ack(*subtask, epoch=10).files)
    assert (coordinator.pending, coordinator.head, coordinator.failures) == ((), second, 1)
    assert begin(coordinator, now=5.0).parent_id == 8


def test_a_timeout_takes_the_successors_along_but_no_epoch_that_is_being_committed():
    coordinator = a_coordinator(timeout=600.0, max_concurrent=3)
    for now in (0.0, 1.0, 2.0):
        begin(coordinator, now)
    ack_all(coordinator)
    committing = coordinator.begin_commit()
    fallen = coordinator.expire(601.0)
    assert [(failed.pending.id, failed.reason) for failed in fallen] == [
        (8, FailureReason.TIMEOUT),
        (9, FailureReason.PREDECESSOR),
    ]
    assert coordinator.pending == (committing,) and coordinator.failures == 1
    assert commit(coordinator).id == 7


def test_only_what_was_being_committed_can_complete_and_what_has_cannot_be_aborted():
    coordinator = a_coordinator(max_concurrent=2)
    begin(coordinator)
    begin(coordinator)
    with pytest.raises(ValueError, match="was not being committed"):
        coordinator.completed(0.0, a_checkpoint(7, None))
    ack_all(coordinator)
    coordinator.begin_commit()
    for wrong in (a_checkpoint(8, 7), a_checkpoint(7, 6)):
        with pytest.raises(ValueError, match="was not being committed"):
            coordinator.completed(0.0, wrong)
    commit(coordinator)
    for id in (7, 9):
        with pytest.raises(ValueError, match=f"Epoch {id} is not pending"):
            coordinator.abort(0.0, CheckpointId(id), FailureReason.JOB)


def test_under_a_generation_of_its_own_making_a_coordinator_goes_on_without_what_was_pending():
    coordinator = a_coordinator(max_concurrent=3)
    begin(coordinator)
    begin(coordinator)
    ack_all(coordinator)
    commit(coordinator)
    (fallen,) = coordinator.renew(Generation(4))
    assert (fallen.pending.id, fallen.reason) == (8, FailureReason.RENEWED)
    assert coordinator.failures == 0
    assert coordinator.receive(ack(epoch=8)).outcome is AckOutcome.FENCED
    assert coordinator.receive(ack(epoch=8, generation=4)).outcome is AckOutcome.FOREIGN
    assert (begun := begin(coordinator)).id == 9 and begun.generation == 4


# -- barriers


def refused(coordinator: Coordinator, now: float = 0.0, **options: Any) -> str:
    refusal = coordinator.trigger(now, Trigger.INTERVAL, EXPECTED, **options)
    assert isinstance(refusal, Refusal), refusal
    return refusal.reason


def test_case_37_a_clock_that_is_set_back_or_forward_aborts_and_triggers_nothing_early():
    coordinator = a_coordinator(timeout=600.0, interval=60.0, min_pause=10.0)
    wants = {"backlog": True, "requested": False, "catching_up": False}
    assert coordinator.due(60.0, **wants)
    begin(coordinator, now=60.0)
    assert coordinator.expire(60.0 - HOUR) == ()
    assert coordinator.expire(60.0 - HOUR + 599.0) == ()
    ack_all(coordinator)
    commit(coordinator, now=60.0 - HOUR + 599.0)
    assert not coordinator.due(-2 * HOUR, **wants)
    assert not coordinator.due(-2 * HOUR + 59.0, **wants)
    assert coordinator.due(-2 * HOUR + 60.0, **wants), "nor does it wait for the hours to come again"

    begin(coordinator, now=-2 * HOUR + 60.0)
    ack_all(coordinator, epoch=8)
    coordinator.begin_commit()
    assert coordinator.expire(100 * HOUR) == (), "a leap forward never aborts what the registry may have"
    assert coordinator.needed() == {7: ["epoch 8 is in flight"]}


def test_ids_grow_above_every_id_that_was_begun():
    assert next_id(None, []) == 1
    assert next_id(None, [CheckpointId(4)]) == 5
    assert begin(a_coordinator(head=9, last_id=4)).id == 10
    assert begin(a_coordinator(head=3, last_id=4)).id == 5


@pytest.mark.parametrize(
    ("interval", "pause", "since", "backlog", "requested", "catching_up", "due"),
    [
        (60, 0, 10, True, False, False, False),
        (60, 0, 60, True, False, False, True),
        (60, 0, 600, False, False, False, False),
        (None, 0, 600, True, False, False, False),
        (None, 0, 0, True, True, False, True),
        (None, 5, 3, True, True, False, False),
        (None, 5, 5, False, True, False, True),
        (60, 5, 0, True, False, True, True),
        (60, 5, 0, False, False, True, False),
    ],
)
def test_when_a_barrier_is_due(interval, pause, since, backlog, requested, catching_up, due):
    coordinator = a_coordinator(interval=interval, min_pause=pause)
    assert coordinator.due(since, backlog=backlog, requested=requested, catching_up=catching_up) is due


def test_a_barrier_that_comes_too_soon_is_refused_with_the_reason():
    coordinator = a_coordinator(min_pause=5.0)
    assert refused(coordinator, 2.0) == "min pause: 3 s of 5 s left"
    assert begin(coordinator, now=2.0).id == 7


@pytest.mark.parametrize("trigger", [Trigger.SAVEPOINT, Trigger.DRAIN])
def test_a_savepoint_and_a_drain_do_not_wait_for_the_min_pause(trigger):
    coordinator = a_coordinator(min_pause=5.0)
    begun = coordinator.trigger(0.0, trigger, EXPECTED)
    assert isinstance(begun, PendingCheckpoint) and begun.trigger is trigger


def test_after_a_failure_the_next_try_waits_twice_as_long_each_time_whoever_asks():
    assert [retry_pause(failures) for failures in (1, 2, 3, 4, 5, 6, 5000)] == [1, 2, 4, 8, 16, 30, 30]
    coordinator = a_coordinator(tolerable_failures=9, min_pause=3.0)
    now = 0.0
    for pause in (3.0, 3.0, 4.0, 8.0):
        coordinator.failed(now)
        for trigger in Trigger:
            assert isinstance(coordinator.trigger(now + pause - 0.1, trigger, EXPECTED, catching_up=True), Refusal)
        assert not coordinator.due(now + pause - 0.1, backlog=True, requested=True, catching_up=True)
        assert f"s of {pause:g} s left" in refused(coordinator, now + pause - 0.1, catching_up=True)
        now += pause
        assert coordinator.due(now, backlog=True, requested=False, catching_up=True)


# -- retention


def test_the_base_of_an_epoch_in_flight_and_all_that_came_after_are_kept_for_it():
    coordinator = a_coordinator(max_concurrent=3, num_retained=1)
    rows: list[Checkpoint] = []

    def complete(epoch: int) -> None:
        ack_all(coordinator, epoch)
        rows.append(commit(coordinator))

    begin(coordinator)
    complete(7)
    for _ in range(3):
        begin(coordinator)
    complete(8)
    complete(9)
    assert coordinator.needed() == {id: ["epoch 10 is in flight"] for id in (7, 8, 9)}
    keep = coordinator.policy.num_retained
    assert retention.plan(rows, {row.id: () for row in rows}, keep, needed=coordinator.needed()).drop == ()
    complete(10)
    assert coordinator.needed() == {}
    assert retention.plan(rows, {row.id: () for row in rows}, keep, needed=coordinator.needed()).drop == (7, 8, 9)


def test_whose_object_it_is_shows_in_its_path():
    mine = ack()
    assert all(owns(mine, file) for file in mine.files)
    for other in (ack(attempt="aa"), ack(subtask=1), ack("two"), ack(epoch=8), ack(generation=4)):
        assert not any(owns(mine, file) for file in other.files)
