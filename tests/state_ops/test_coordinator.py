"""The coordinator's decisions, each ack with its outcome."""

from __future__ import annotations

import pytest

from state_ops.checkpoint import STATE, Ack, StateFile
from state_ops.coordinator import AckOutcome, PendingCheckpoint, TriggerPolicy, next_id


def pending() -> PendingCheckpoint:
    return PendingCheckpoint(7, None, 3, {"one": 2, "two": 1})  # type: ignore[arg-type]


def ack(
    operator: str = "one", subtask: int = 0, *, attempt: str = "a", epoch: int = 7, generation: int = 3, error=None
) -> Ack:
    file = StateFile(operator, subtask, STATE, "1.sst", f"state/{operator}/{attempt}/1.sst", 1, "", True, attempt)  # type: ignore[arg-type]
    return Ack(operator, subtask, attempt, epoch, generation, files=(file,), error=error)  # type: ignore[arg-type]


def test_complete_when_every_subtask_of_every_stage_has_acked():
    found = pending()
    for operator, subtask in [("one", 0), ("one", 1), ("two", 0)]:
        assert not found.complete
        assert found.receive(ack(operator, subtask)) is AckOutcome.ACCEPTED
    assert found.complete
    assert found.missing("one") == []
    assert len(found.files()) == 3


def test_the_first_ack_of_a_subtask_wins_among_its_attempts():
    found = pending()
    found.receive(ack(attempt="first"))
    assert found.receive(ack(attempt="second")) is AckOutcome.DUPLICATE
    assert {file.attempt for file in found.files()} == {"first"}


@pytest.mark.parametrize(
    ("late", "outcome"),
    [
        (ack(epoch=6), AckOutcome.UNKNOWN),
        (ack(operator="three"), AckOutcome.UNKNOWN),
        (ack(subtask=2), AckOutcome.UNKNOWN),
        (ack(subtask=-1), AckOutcome.UNKNOWN),
        (ack(generation=2), AckOutcome.FENCED),
        (ack(generation=4), AckOutcome.FENCED),
    ],
)
def test_late_foreign_and_fenced_acks_change_nothing(late, outcome):
    found = pending()
    assert found.receive(late) is outcome
    assert found.acks == {} and found.declines == []


def test_one_decline_declines_the_epoch():
    found = pending()
    for operator, subtask in [("one", 0), ("one", 1), ("two", 0)]:
        found.receive(ack(operator, subtask))
    assert found.receive(ack("one", 1, attempt="b", error={"kind": "StageError"})) is AckOutcome.DECLINED
    assert not found.complete


def test_ids_grow_above_every_id_that_was_begun():
    assert next_id(None, []) == 1
    assert next_id(None, [4]) == 5  # type: ignore[list-item]


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
    policy = TriggerPolicy(interval, pause)
    assert policy.due(since_last=since, backlog=backlog, requested=requested, catching_up=catching_up) is due
