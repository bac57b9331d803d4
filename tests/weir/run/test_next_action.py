"""What a run does next, as a table: no threads, no storage, no clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from state_ops.coordination.requests import Request
from state_ops.records.triggers import Trigger
from weir.run.next_action import (
    BeginAgain,
    BeginEpoch,
    CarryOut,
    End,
    GoOn,
    LookAround,
    Observation,
    RunMemory,
    RunOptions,
    Situation,
    Sleep,
    Withdraw,
    next_action,
)
from weir.sources.slices import EpochPlan


def due(*, backlog: bool, requested: bool, catching_up: bool) -> bool:
    """Of a coordinator without an interval."""
    return (backlog or requested) and (requested or catching_up)


def never(**_: bool) -> bool:
    return False


FILE, OTHER = ("landing", "a"), ("landing", "b")
ONE, BOTH = frozenset({FILE}), frozenset({FILE, OTHER})
BARRIER, BY_SENSOR = Request("barrier", name="b"), Request("barrier", trigger="sensor", name="s")
NAME, PRUNE = Request("savepoint", savepoint="v1", name="n"), Request("upkeep", name="u")
STOP, DRAIN = Request("stop", name="stop"), Request("stop", drain=True, name="drain")
NAMING = Request("stop", savepoint="v1", name="naming")
PLAN = EpochPlan(Trigger.MANUAL, "", {})
CAUGHT_UP = RunMemory(catching_up=False)

IDLE = Situation(
    RunOptions(),
    now=100.0,
    expired=False,
    failing=False,
    unaligned=False,
    due=due,
    empty=True,
    has_room=True,
    look=Observation(),
)
BUSY = replace(IDLE, empty=False)


def looked(at: Situation, *asked: Request, waiting: frozenset = frozenset(), **changes) -> Situation:
    return replace(at, look=Observation(asked, waiting), **changes)


TABLE = {
    "nothing was looked at": (replace(IDLE, look=None), LookAround()),
    "no room for an epoch": (replace(BUSY, look=None, has_room=False), GoOn()),
    "room beside an epoch": (replace(BUSY, look=None), LookAround()),
    "an epoch is to begin again": (replace(IDLE, look=None, again=PLAN), BeginAgain(PLAN)),
    "an epoch is to begin again, later": (replace(IDLE, look=None, again=PLAN, due=never), Sleep()),
    "files wait": (looked(IDLE, waiting=ONE), BeginEpoch((), False)),
    "files wait beside an epoch": (looked(BUSY, waiting=ONE), BeginEpoch((), False)),
    "files wait, and room has gone": (looked(BUSY, waiting=ONE, has_room=False), GoOn()),
    "files wait, nothing is due": (looked(IDLE, waiting=ONE, due=never), Sleep()),
    "somebody asks": (looked(IDLE, BARRIER), BeginEpoch((BARRIER,), False)),
    "a sensor asks, and nothing waits": (looked(IDLE, BY_SENSOR, BARRIER), Withdraw((BY_SENSOR,))),
    "a sensor asks beside an epoch, and nothing waits": (looked(BUSY, BY_SENSOR), GoOn()),
    "a sensor asks, and files wait": (looked(IDLE, BY_SENSOR, waiting=ONE), BeginEpoch((BY_SENSOR,), False)),
    "a name beside an epoch": (looked(BUSY, NAME), BeginEpoch((NAME,), False)),
    "a name beside an epoch that may leave rows": (looked(BUSY, NAME, unaligned=True), GoOn()),
    "a request that may delete": (looked(IDLE, PRUNE, BARRIER), CarryOut((PRUNE,))),
    "a request that may delete, beside an epoch": (looked(BUSY, PRUNE, waiting=ONE), GoOn()),
    "only rows between stages": (replace(IDLE, behind={"ledger": 1}), BeginEpoch((), False)),
    "windows by processing time are due": (replace(IDLE, timers_due=("clicked",)), BeginEpoch((), False)),
    "a sensor asks, and windows are due": (
        looked(IDLE, BY_SENSOR, timers_due=("clicked",)),
        BeginEpoch((BY_SENSOR,), False),
    ),
    "rows wait for a slower source": (
        looked(IDLE, waiting=ONE, still=frozenset({"landing"}), options=RunOptions(until_caught_up=True, drain=True)),
        Sleep(),
    ),
    "rows wait for a slower source, and others for none": (
        looked(IDLE, waiting=BOTH | {("other", "a")}, still=frozenset({"landing"})),
        BeginEpoch((), False),
    ),
    "windows are due, and no epoch is": (replace(IDLE, timers_due=("clicked",), due=never), Sleep()),
    "the time is up": (looked(IDLE, waiting=ONE, expired=True), End()),
    "the time is up beside an epoch": (looked(BUSY, expired=True), GoOn()),
    "a stop": (looked(IDLE, STOP, waiting=ONE), End(STOP)),
    "a stop after the time": (looked(IDLE, STOP, expired=True), End(STOP)),
    "a stop beside an epoch": (looked(BUSY, STOP), GoOn()),
    "a drain with files": (looked(IDLE, DRAIN, waiting=ONE), BeginEpoch((), False)),
    "a drain after the time, with files": (looked(IDLE, DRAIN, waiting=ONE, expired=True), BeginEpoch((), False)),
    "a drain with rows between stages": (replace(looked(IDLE, DRAIN), behind={"x": 1}), BeginEpoch((), True)),
    "a drain": (looked(IDLE, DRAIN), End(DRAIN, "weir stop --drain")),
    "two stops": (looked(IDLE, DRAIN, STOP), End(DRAIN, "weir stop --drain")),
    "two stops while epochs fail": (looked(IDLE, DRAIN, STOP, failing=True), End(STOP)),
    "a stop with a name": (looked(IDLE, NAMING), End(NAMING)),
    "a stop with a name, and rows": (replace(looked(IDLE, NAMING), behind={"x": 1}), BeginEpoch((), True)),
    "that while epochs fail": (replace(looked(IDLE, NAMING, failing=True), behind={"x": 1}), End(NAMING)),
    "nothing to do": (IDLE, Sleep()),
    "nothing to do beside an epoch": (BUSY, GoOn()),
    "it ends once caught up": (replace(IDLE, options=RunOptions(until_caught_up=True)), End()),
    "it ends with a drain": (replace(IDLE, options=RunOptions(drain=True, reason="why")), End(drain="why")),
    "it lingers": (replace(IDLE, options=RunOptions(until_caught_up=True, linger_seconds=5)), Sleep()),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_next_action(case):
    situation, action = TABLE[case]
    assert next_action(situation, RunMemory())[0] == action


def test_who_has_caught_up_waits_for_a_request_and_catches_up_no_more():
    assert next_action(looked(IDLE, waiting=ONE), CAUGHT_UP)[0] == Sleep()
    _, memory = next_action(IDLE, RunMemory())
    assert memory == RunMemory(catching_up=False, idle_since=100.0)
    _, memory = next_action(looked(IDLE, waiting=ONE, due=never), RunMemory())
    assert memory.catching_up, "files still wait"


def test_who_waits_for_a_slower_source_still_catches_up():
    assert next_action(looked(IDLE, waiting=ONE, still=frozenset({"landing"})), RunMemory())[1].catching_up


def test_rows_between_stages_go_on_without_a_slice_when_no_epoch_is_due():
    waiting = replace(IDLE, behind={"ledger": 1})
    assert next_action(waiting, CAUGHT_UP)[0] == BeginEpoch((), only_waiting=True)


def test_a_run_lingers_since_it_had_nothing_to_do_and_anew_after_an_epoch():
    options = RunOptions(until_caught_up=True, linger_seconds=5)
    action, memory = next_action(replace(IDLE, options=options), RunMemory())
    assert action == Sleep() and memory.idle_since == 100.0
    assert next_action(replace(IDLE, options=options, now=104.9), memory)[0] == Sleep()
    assert next_action(replace(IDLE, options=options, now=105.0), memory)[0] == End()
    assert next_action(looked(IDLE, BARRIER), memory)[1].idle_since is None


def test_a_drain_reads_what_had_arrived_when_it_was_asked_for_and_no_more():
    asked = replace(IDLE, look=Observation((DRAIN,), ONE, frozenset({OTHER})))
    _, memory = next_action(asked, RunMemory())
    assert memory.to_drain == BOTH, "what epochs in flight read may fall, and is read again then"
    late = looked(IDLE, DRAIN, waiting=frozenset({("landing", "late")}))
    assert next_action(late, memory) == (End(DRAIN, "weir stop --drain"), memory)
    assert next_action(looked(IDLE, DRAIN, waiting=BOTH), memory)[0] == BeginEpoch((), False)
