"""When a step may begin: each rule of the table alone keeps its step back, and two epochs in flight wait for each other
as the drawing at the table's head says. No threads, no storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from state_ops.checkpoints.pending_checkpoint import PendingCheckpoint
from state_ops.coordination.requests import Request
from state_ops.ids import AttemptId, CheckpointId, Generation
from state_ops.records.acks import Ack, PendingUpload
from state_ops.records.snapshot_files import CHANNEL, StagedFile
from state_ops.records.triggers import Trigger
from weir import agg, aggregate, files
from weir.definition import Stage
from weir.epoch import readiness
from weir.epoch.in_flight_data import InFlightData
from weir.epoch.model import (
    EpochsInFlight,
    Failure,
    InFlightEpoch,
    RunningStep,
    SourceOffsets,
    StageProgress,
    Step,
)
from weir.epoch.readiness import MAY_BEGIN, may_begin
from weir.settings.sections import CheckpointSettings
from weir.sources.slices import EpochPlan

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FIRST = aggregate("first", files("{landing}/*.parquet", name="landing"), key="id", rows=agg.count())
SECOND = aggregate("second", FIRST, key="id", rows=agg.count())
STAGES = (FIRST, SECOND)
LIMITS = CheckpointSettings(max_concurrent=3, max_pending_mb=1)
ROWS = StagedFile(CHANNEL, "next", "/local/rows", "channels/first/rows", 2 << 20, None, 5)


def ack(stage: Stage, number: int, **fields: object) -> Ack:
    return Ack(stage.uid, 0, AttemptId("a"), CheckpointId(number), Generation(1), **fields)


def an_epoch(number: int) -> InFlightEpoch:
    """An epoch of which all is done, and of which no step is recorded as begun."""
    id, expected = CheckpointId(number), dict.fromkeys(("first", "second"), 1)
    pending = PendingCheckpoint(id, None, None, Generation(1), Trigger.MANUAL, expected, 100.0)
    for stage in STAGES:
        pending.record(ack(stage, number))
    epoch = InFlightEpoch(pending, EpochPlan(Trigger.MANUAL, "", {}), SourceOffsets({}, {}, NOW), NOW, 0.0, 100.0)
    epoch.noted, epoch.judged = True, {"first", "second"}
    epoch.positions_first = epoch.positioned = True
    epoch.delivered = {"first": [], "second": []}
    epoch.acks = {stage.uid: pending.acks_of(stage.uid) for stage in STAGES}
    epoch.sealed = epoch.confirmed = epoch.published = ()  # the rules ask only whether they are there
    return epoch


def in_flight(*numbers: int) -> EpochsInFlight:
    epochs = EpochsInFlight(STAGES, LIMITS, [an_epoch(number) for number in numbers], early=True)
    epochs.progress = {stage.uid: StageProgress() for stage in STAGES}
    return epochs


def ready(step: Step, stage: Stage | None) -> tuple[EpochsInFlight, InFlightEpoch]:
    """Three epochs, of which the newest may take the step."""
    epochs = in_flight(1, 2, 3)
    epoch = epochs.epochs[-1]
    if step is Step.JUDGE:
        epoch.judged.clear()
    if step is Step.UPLOAD and stage is not None:
        epoch.acks[stage.uid] = [ack(stage, 3, pending_upload=PendingUpload(None, None, (), "/work"))]
    return epochs, epoch


def fill_disk(epochs: EpochsInFlight, epoch: InFlightEpoch) -> None:
    data = InFlightData(CheckpointId(1), "first", NOW, None, ((ROWS,),), None)
    epochs.progress["second"] = replace(epochs.progress["second"], waiting=(data,))
    epochs.epochs[-2].confirmed = None


def unsettled(epochs: EpochsInFlight, epoch: InFlightEpoch) -> None:
    epochs.progress["second"] = replace(epochs.progress["second"], settled=False)
    epochs.epochs[-2].confirmed = None


def unaligned(epochs: EpochsInFlight, epoch: InFlightEpoch) -> None:
    epochs.limits = epochs.limits.model_copy(update={"alignment_timeout_seconds": 1.0})
    del epoch.acks["first"]


def missing_ack(epochs: EpochsInFlight, epoch: InFlightEpoch) -> None:
    epoch.pending.acks.clear()


def not_confirmed(epochs: EpochsInFlight, epoch: InFlightEpoch) -> None:
    epochs.epochs[-2].confirmed = None


def not_published(epochs: EpochsInFlight, epoch: InFlightEpoch) -> None:
    for before in epochs.epochs[:2]:
        before.published = None


def one_more(epochs: EpochsInFlight, epoch: InFlightEpoch) -> None:
    epochs.epochs.insert(0, an_epoch(0))


def undone(field: str, value: object = None) -> Callable[[EpochsInFlight, InFlightEpoch], None]:
    return lambda _, epoch: setattr(epoch, field, value)


# What makes one rule of a step fail, while all others hold.
BROKEN = {
    (Step.POSITIONS, "id_is_noted"): undone("noted", False),
    (Step.POSITIONS, "positions_come_first"): undone("positions_first", False),
    (Step.RUN_STAGE, "id_is_noted"): undone("noted", False),
    (Step.RUN_STAGE, "is_behind_positions"): undone("positioned", False),
    (Step.RUN_STAGE, "disk_has_room"): fill_disk,
    (Step.RUN_STAGE, "stage_has_done_epoch_before"): lambda epochs, _: epochs.epochs[-2].acks.pop("second"),
    (Step.RUN_STAGE, "gates_have_passed_upstream"): undone("judged", {"second"}),
    (Step.RUN_STAGE, "base_is_at_hand"): unsettled,
    (Step.DELIVER, "rows_come_before_commit"): lambda epochs, _: setattr(epochs, "early", False),
    (Step.DELIVER, "stage_has_acked"): undone("acks", {}),
    (Step.DELIVER, "stage_has_delivered_epoch_before"): lambda epochs, _: epochs.epochs[-2].delivered.pop("second"),
    (Step.JUDGE, "stage_has_acked"): undone("acks", {}),
    (Step.JUDGE, "gates_have_not_spoken"): undone("judged", {"second"}),
    (Step.UPLOAD, "epoch_before_is_stored"): lambda epochs, _: epochs.epochs[-2].pending.acks.clear(),
    (Step.UPLOAD, "rows_left_are_known"): unaligned,
    (Step.UPLOAD, "has_pending_upload"): lambda _, epoch: epoch.acks.update(second=[ack(SECOND, 3)]),
    (Step.UPLOAD, "stage_is_delivered"): lambda _, epoch: epoch.delivered.pop("second"),
    (Step.SEAL, "all_is_stored"): missing_ack,
    (Step.SEAL, "all_is_delivered"): undone("delivered", {}),
    (Step.SEAL, "gates_have_passed"): undone("judged", {"first"}),
    (Step.SEAL, "epoch_before_is_confirmed"): not_confirmed,
    (Step.COMMIT, "is_sealed"): undone("sealed"),
    (Step.COMMIT, "publishing_keeps_up"): not_published,
    (Step.COMMIT, "pruning_keeps_up"): one_more,
    (Step.PUBLISH, "is_confirmed"): undone("confirmed"),
    (Step.FINISH, "is_published"): undone("published"),
}


def stage_of(step: Step) -> Stage | None:
    return SECOND if MAY_BEGIN[step].stage else None


def test_the_table_of_this_test_breaks_every_rule():
    rules = {(step, rule.__name__) for step, of in MAY_BEGIN.items() for rule in (*of.epoch, *of.stage)}
    assert rules == BROKEN.keys()
    assert all(rule.__doc__ for of in MAY_BEGIN.values() for rule in (*of.epoch, *of.stage)), "each has its reason"


@pytest.mark.parametrize("step", Step)
def test_a_step_begins_once_when_its_rules_hold_and_its_slot_is_free(step):
    stage = stage_of(step)
    epochs, epoch = ready(step, stage)
    assert may_begin(epochs, epoch, step, stage)
    epochs.running[step.slot(stage)] = RunningStep(epochs.epochs[0], 0.0)
    assert not may_begin(epochs, epoch, step, stage), "a slot runs one step at a time"
    epochs.running.clear()
    epoch.begun.add((step, stage.uid if stage else None))
    assert not may_begin(epochs, epoch, step, stage), "no step is taken twice"


@pytest.mark.parametrize(("step", "rule"), BROKEN, ids=lambda value: getattr(value, "name", value))
def test_one_rule_alone_keeps_its_step_back(step, rule):
    stage = stage_of(step)
    epochs, epoch = ready(step, stage)
    BROKEN[step, rule](epochs, epoch)
    of = MAY_BEGIN[step]
    failing = [check.__name__ for check in of.epoch if not check(epochs, epoch)]
    failing += [check.__name__ for check in of.stage if not check(epochs, epoch, stage)]
    assert failing == [rule]
    assert not may_begin(epochs, epoch, step, stage)


def test_the_oldest_epoch_waits_neither_for_the_disk_nor_for_storage():
    epochs = in_flight(1, 2)
    oldest = epochs.epochs[0]
    fill_disk(epochs, oldest)
    unsettled(epochs, oldest)
    oldest.elsewhere.add("second")
    assert may_begin(epochs, oldest, Step.RUN_STAGE, SECOND)
    assert not may_begin(epochs, epochs.epochs[1], Step.RUN_STAGE, SECOND)


def test_a_stage_that_runs_again_elsewhere_waits_until_its_base_is_stored():
    epochs = in_flight(1, 2)
    newest = epochs.epochs[1]
    newest.elsewhere.add("second")
    assert may_begin(epochs, newest, Step.RUN_STAGE, SECOND)
    epochs.epochs[0].confirmed = None
    assert not may_begin(epochs, newest, Step.RUN_STAGE, SECOND)


def test_an_upload_waits_for_the_epoch_before_the_one_that_it_refers_to():
    epochs, epoch = ready(Step.UPLOAD, SECOND)
    epochs.epochs[1].confirmed = None
    assert may_begin(epochs, epoch, Step.UPLOAD, SECOND), "it may be uploaded while the epoch before is committed"
    epochs.epochs[0].confirmed = None
    assert not may_begin(epochs, epoch, Step.UPLOAD, SECOND)


@pytest.mark.parametrize(
    ("most", "unconfirmed", "confirmed", "starts"),
    [(1, 0, 0, True), (1, 0, 1, False), (1, 1, 0, False), (2, 1, 2, True), (2, 2, 0, False), (3, 2, 2, True)],
)
def test_confirmed_epochs_take_no_place_unless_nothing_is_to_overlap(most, unconfirmed, confirmed, starts):
    epochs = in_flight(*range(confirmed + unconfirmed))
    epochs.limits = LIMITS.model_copy(update={"max_concurrent": most})
    for epoch in epochs.epochs[confirmed:]:
        epoch.confirmed = None
    assert readiness.can_start_epoch(epochs) is starts


def test_no_epoch_starts_while_bytes_wait_except_the_oldest():
    epochs = in_flight(1, 2)
    fill_disk(epochs, epochs.epochs[1])
    assert not readiness.can_start_epoch(epochs)
    epochs.epochs[0].confirmed = ()
    assert readiness.can_start_epoch(epochs)


def test_no_epoch_starts_before_what_fell_is_cleared_up():
    epochs = in_flight()
    assert readiness.can_start_epoch(epochs)
    epochs.failure = Failure(1, RuntimeError())
    assert not readiness.can_start_epoch(epochs)
    epochs.failure, epochs.fallen = None, [an_epoch(1)]
    assert not readiness.can_start_epoch(epochs)


def test_pruning_is_left_to_the_next_epoch_never_twice_and_not_while_somebody_waits():
    epochs = in_flight(1, 2)
    first, second = epochs.epochs
    assert readiness.can_defer_pruning(epochs, first)
    assert not readiness.can_defer_pruning(epochs, second), "nothing follows that would wait for it"
    epochs.pruning_deferred = True
    assert not readiness.can_defer_pruning(epochs, first)
    epochs.pruning_deferred, first.plan = False, replace(first.plan, requests=(Request("barrier"),))
    assert not readiness.can_defer_pruning(epochs, first)
    first.plan = replace(first.plan, requests=())
    second.pending.acks.clear()
    assert not readiness.can_defer_pruning(epochs, first), "the next one is far from publishing"


def test_a_stage_is_watched_once_it_has_worked_for_long_or_for_a_quarter_of_its_time():
    epochs = in_flight(1)
    (epoch,) = epochs.epochs
    epoch.deadline = 110.0
    epochs.running = {"uploads": RunningStep(epoch, 0.0)}
    assert readiness.epoch_to_watch(epochs, 50.0, 0.0) is None, "no stage is at work"
    epochs.running["first"] = RunningStep(epoch, 10.0)
    assert readiness.epoch_to_watch(epochs, 14.9, 0.0) is None
    assert readiness.epoch_to_watch(epochs, 15.0, 0.0) is epoch
    assert readiness.epoch_to_watch(epochs, 15.0, 12.0) is None, "somebody has just looked"
    epoch.deadline = 14.0
    assert readiness.epoch_to_watch(epochs, 11.0, 0.0) is epoch
    epochs.epochs, epochs.fallen = [], [epoch]
    assert readiness.epoch_to_watch(epochs, 50.0, 0.0) is None, "it has fallen"
