"""What a tick of the checkpoint sensor decides, case by case."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Semaphore

import pytest

from state_ops.coordination.lease import Lease
from state_ops.coordination.suspension import Suspension
from tests.recovery.small import Bank, until
from weir.execution.in_process import InMemoryExecutor
from weir.run.sensor import Action, Decision, SensorMemory, Sight, ask, decide, observe

HOLDER = Lease(
    generation=3,
    counter=7,
    last_id=5,
    host="worker-1",
    pid=42,
    born="another boot/1",
    heartbeat_seconds=5.0,
    run_id="r-3",
)
IDLE = Sight(holder=None, alive=False, waiting=0, head=None, asked=False)
RUNNING = Sight(holder=HOLDER, alive=True, waiting=0, head=5, asked=False)
DEAD = replace(RUNNING, alive=False)
STOPPED = replace(DEAD, holder=replace(HOLDER, stopped=True))


SUSPENDED = Suspension("stopped", "weir stop")


def ended(outcome: str, **changes) -> Sight:
    return replace(DEAD, holder=replace(HOLDER, stopped=True, outcome=outcome), **changes)


def tick(sight: Sight, memory: SensorMemory | None = None, *, max_lag: int = 0, now: float = 100.0) -> Decision:
    return decide(sight, memory or SensorMemory(), max_lag, observer="here", now=now)


@pytest.mark.parametrize(
    ("sight", "max_lag", "action", "says"),
    [
        (IDLE, 0, Action.WAIT, "no file is waiting"),
        (replace(IDLE, waiting=1), 0, Action.RUN, "1 file new"),
        (replace(IDLE, waiting=3), 3, Action.WAIT, "3 files waiting, as many as may"),
        (replace(IDLE, waiting=4), 3, Action.RUN, "4 files new"),
        (
            replace(IDLE, waiting=4, unfinished=("0123456789",)),
            0,
            Action.WAIT,
            "run 01234567 of this pipeline is queued",
        ),
        (replace(IDLE, timers_due=("clicked",)), 0, Action.RUN, "windows, timers or an idle input of clicked are due"),
        (
            replace(RUNNING, timers_due=("clicked",)),
            0,
            Action.BARRIER,
            "windows, timers or an idle input of clicked are due",
        ),
        (replace(RUNNING, timers_due=("clicked",), waiting=1), 0, Action.BARRIER, "1 file new"),
        (RUNNING, 0, Action.WAIT, "process 42 on worker-1"),
        (replace(RUNNING, waiting=2), 0, Action.BARRIER, "2 files new"),
        (replace(RUNNING, waiting=2, unfinished=("r-3",)), 0, Action.BARRIER, "2 files new"),
        (replace(RUNNING, waiting=2, asked=True), 0, Action.WAIT, "was asked already"),
        (replace(RUNNING, waiting=2, asked=True, starting=True), 0, Action.WAIT, "is starting, first epoch"),
        (replace(RUNNING, waiting=2, starting=True), 0, Action.BARRIER, "2 files new"),
        (replace(RUNNING, waiting=2), 2, Action.WAIT, "2 files waiting, as many as may"),
        (STOPPED, 0, Action.WAIT, "no file is waiting"),
        (replace(STOPPED, waiting=2), 0, Action.RUN, "2 files new"),
        (replace(STOPPED, waiting=2, asked=True), 0, Action.RUN, "2 files new"),
        (DEAD, 0, Action.RESTORE, "coordinator of generation 3 (process 42 on worker-1) died"),
        (replace(DEAD, waiting=2), 0, Action.RESTORE, "2 files waiting"),
        (
            ended("stopped", waiting=2, suspended=SUSPENDED),
            0,
            Action.WAIT,
            "stopped by a person (weir stop), 2 files waiting",
        ),
        (replace(DEAD, waiting=2, suspended=SUSPENDED), 0, Action.WAIT, "stopped by a person"),
        (replace(RUNNING, waiting=2, suspended=SUSPENDED), 0, Action.BARRIER, "2 files new"),
        (ended("stopped", waiting=2), 0, Action.RUN, "2 files new"),
        (ended("ended", waiting=2), 0, Action.RUN, "2 files new"),
        (ended("failed", waiting=2), 0, Action.RUN, "2 files new"),
        (replace(RUNNING, waiting=2, held="gate x failed"), 0, Action.BARRIER, "2 files new"),
        (replace(STOPPED, waiting=2, held="gate x failed"), 0, Action.WAIT, "held: gate x failed"),
        (replace(DEAD, waiting=2, held="gate x failed"), 0, Action.RESTORE, "died"),
    ],
)
def test_a_tick_decides(sight, max_lag, action, says):
    decision = tick(sight, max_lag=max_lag)
    assert decision.action is action
    assert says in decision.reason
    assert (decision.key is not None) == (action in (Action.RUN, Action.RESTORE))


def test_a_dead_coordinator_is_answered_once_per_generation():
    first = tick(DEAD)
    assert (first.action, first.key) == (Action.RESTORE, "restore-g3")
    assert tick(DEAD, first.memory).action is Action.WAIT
    successor = replace(DEAD, holder=replace(HOLDER, generation=4), head=6)
    assert tick(successor, first.memory).key == "restore-g4"


def test_a_coordinator_that_dies_again_without_a_checkpoint_is_not_restored_at_once():
    first = tick(DEAD)
    successor = replace(DEAD, holder=replace(HOLDER, generation=4))
    second = tick(successor, first.memory)
    assert second.action is Action.WAIT
    assert tick(successor, second.memory).key == "restore-g4"


def test_a_death_is_work_even_if_no_file_waits_and_its_restore_failed():
    """What it committed may not be published yet."""
    first = tick(DEAD)
    second = tick(DEAD, first.memory)
    assert second.action is Action.WAIT
    assert tick(DEAD, second.memory).action is Action.RESTORE


def test_a_sensor_that_lost_its_cursor_asks_under_the_same_key():
    assert tick(DEAD).key == tick(DEAD, SensorMemory(tick=50)).key


def test_a_run_whose_process_is_gone_is_named_and_does_not_block_its_successor():
    decision = tick(replace(DEAD, unfinished=("r-3",)))
    assert (decision.action, decision.gone) == (Action.RESTORE, "r-3")


def test_a_run_whose_process_is_gone_is_named_also_while_its_successor_is_queued():
    decision = tick(replace(DEAD, unfinished=("r-4", "r-3")))
    assert (decision.action, decision.gone) == (Action.WAIT, "r-3")


def test_a_living_or_stopped_coordinators_run_is_never_called_gone():
    for sight in (RUNNING, STOPPED):
        assert tick(replace(sight, unfinished=("r-3",))).gone is None


def test_runs_that_bring_no_checkpoint_are_asked_for_ever_more_rarely_but_never_given_up():
    sight, memory, asked, keys = replace(STOPPED, waiting=2), SensorMemory(), [], set()
    for number in range(1, 140):
        decision = tick(sight, memory)
        memory = decision.memory
        if decision.action is Action.RUN:
            asked.append(number)
            keys.add(decision.key)
    assert asked == [1, 3, 7, 15, 31, 63, 95, 127]
    assert len(keys) == len(asked)


def test_a_death_that_a_restore_did_not_mend_is_asked_about_ever_more_rarely():
    sight, memory, asked = replace(DEAD, waiting=2), SensorMemory(), []
    for number in range(1, 40):
        decision = tick(sight, memory)
        memory = decision.memory
        if decision.action is Action.RESTORE:
            asked.append(number)
    assert asked == [1, 3, 7, 15, 31]


def test_a_cursor_of_another_release_is_understood():
    assert SensorMemory.from_json('{"tick": 7, "something_new": 1}') == SensorMemory(tick=7)


def test_a_checkpoint_ends_the_pause():
    first = tick(replace(STOPPED, waiting=2))
    assert tick(replace(STOPPED, waiting=2), first.memory).action is Action.WAIT
    assert tick(replace(STOPPED, waiting=2, head=6), first.memory).action is Action.RUN


def test_a_coordinator_on_another_host_is_dead_when_its_heartbeat_stood_still_for_three_beats():
    sight = replace(RUNNING, alive=None, waiting=1)
    decision = tick(sight, now=100.0)
    assert decision.action is Action.BARRIER
    decision = tick(sight, decision.memory, now=114.9)
    assert decision.action is Action.BARRIER
    assert tick(sight, decision.memory, now=115.0).action is Action.RESTORE
    beating = replace(sight, holder=replace(HOLDER, counter=8))
    assert tick(beating, decision.memory, now=115.0).action is Action.BARRIER


def test_clocks_of_two_observers_or_two_boots_are_not_compared():
    sight = replace(RUNNING, alive=None, waiting=1)
    memory = tick(sight, now=100.0).memory
    moved = decide(sight, memory, 0, observer="elsewhere", now=9_000.0)
    assert moved.action is Action.BARRIER
    assert tick(sight, memory, now=3.0).memory.since == 3.0


def test_the_cursor_survives_a_round_trip_and_ticks_are_counted():
    memory = tick(DEAD).memory
    assert SensorMemory.from_json(memory.to_json()) == memory
    assert tick(DEAD, SensorMemory.from_json(memory.to_json())).memory.tick == 2
    assert SensorMemory.from_json(None) == SensorMemory()


class Halting(InMemoryExecutor):
    """Each epoch waits in its middle until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.within, self.may_go_on = Semaphore(0), Semaphore(0)

    def run(self, task, rows, columns, deadline):
        self.within.release()
        assert self.may_go_on.acquire(timeout=60)
        return super().run(task, rows, columns, deadline)


def test_a_coordinator_that_starts_is_not_said_to_miss_its_barrier(tmp_path):
    bank, halting = Bank.at(tmp_path / "site", WEIR_SPARK__PARALLELISM="1"), Halting()
    site = bank.site

    def reason() -> str:
        sight = observe(site.pipeline, site.settings)
        decision = decide(sight, SensorMemory(), 0)
        if decision.action is Action.BARRIER:
            ask(site.pipeline, site.settings, decision)
        return decision.reason

    bank.land(1)
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(bank.epochs, 2, executor=halting)
        try:
            assert halting.within.acquire(timeout=60)
            assert reason() == "2 files new"
            assert "is starting, first epoch" in reason()
            halting.may_go_on.release()
            until(lambda: bank.ids() == [1])
            assert halting.within.acquire(timeout=60)
            reason()
            assert "was asked already and has not come to its barrier" in reason()
        finally:
            halting.may_go_on.release(10)
        run.result(60)
    bank.assert_exact(1, 2)
