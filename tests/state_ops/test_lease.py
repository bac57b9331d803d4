from __future__ import annotations

import os
import socket
import subprocess
import time
from contextlib import closing, suppress
from dataclasses import replace

import psutil
import pytest

from state_ops import lease
from state_ops.ids import CheckpointId, Generation
from state_ops.lease import Heartbeat, Lease
from state_ops.storage import Storage

_NEVER = 60.0  # seconds between heartbeats, where a test wants none


@pytest.fixture
def storage(tmp_path) -> Storage:
    return Storage(str(tmp_path / "pipeline"))


def a_heartbeat(storage: Storage, generation: int = 1, seconds: float = _NEVER) -> Heartbeat:
    return Heartbeat(storage, Generation(generation), CheckpointId(0), seconds, None)


def held(storage: Storage) -> Lease:
    found = lease.read(storage)
    assert found is not None
    return found


@pytest.fixture
def mine(storage) -> Lease:
    """The lease of a coordinator that lives: this process."""
    with a_heartbeat(storage):
        return held(storage)


# -- who lives


def test_nobody_is_dead(storage):
    assert lease.read(storage) is None
    assert lease.alive(None) is False
    assert lease.watch(storage) is False


def test_the_living_are_alive_whatever_the_wall_clock_says(mine, monkeypatch):
    assert lease.alive(mine) is True
    real = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: real(self) + 3600)
    monkeypatch.setattr(psutil, "boot_time", lambda: time.time() - 5)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert lease.alive(mine) is True


@pytest.mark.parametrize(
    ("changes", "alive"),
    [
        ({"stopped": True}, False),
        ({"born": "this boot/another process of the same pid"}, False),
        ({"host": "another"}, None),
        ({"host": "another", "stopped": True}, False),
    ],
    ids=["stopped", "pid used again", "on another host", "stopped on another host"],
)
def test_who_is_taken_for_dead(mine, changes, alive):
    assert lease.alive(replace(mine, **changes)) is alive


def test_a_killed_process_is_dead_before_and_after_its_parent_collects_it(mine):
    with subprocess.Popen(["sleep", "60"]) as child:
        of_child = replace(mine, pid=child.pid, born=lease.born(child.pid))
        assert lease.alive(of_child) is True
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
        assert lease.alive(of_child) is False
    assert not psutil.pid_exists(child.pid)
    assert lease.alive(of_child) is False


def test_on_another_host_a_heartbeat_is_watched(storage, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        beating = a_heartbeat(storage, seconds=0.05)
    with beating:
        assert lease.alive(held(storage)) is None
        assert lease.watch(storage) is True
    assert lease.watch(storage) is False, "it gave the lease back"
    beating._write(stopped=False)
    assert lease.alive(held(storage)) is None
    assert lease.watch(storage) is False, "its counter stands still"


# -- how a coordinator ends


@pytest.mark.parametrize("outcome", ["ended", "stopped", "drained"])
def test_the_lease_says_how_its_holder_ended(storage, outcome):
    with a_heartbeat(storage) as heartbeat:
        assert (held(storage).stopped, held(storage).outcome) == (False, None)
        if outcome != "ended":
            heartbeat.outcome = outcome
    assert (held(storage).stopped, held(storage).outcome) == (True, outcome)


@pytest.mark.parametrize("reached", ["ended", "drained"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_holder_that_raises_has_failed_whatever_it_had_reached(storage, reached, error):
    with suppress(error), a_heartbeat(storage) as heartbeat:
        heartbeat.outcome = reached
        raise error
    assert (held(storage).stopped, held(storage).outcome) == (True, "failed" if error is ValueError else "interrupted")


def test_a_command_beside_a_stop_leaves_it_however_it_ends(storage):
    with suppress(ValueError), a_heartbeat(storage) as heartbeat:
        heartbeat.halt = "drained"
        raise ValueError
    assert held(storage).outcome == "drained"
    with a_heartbeat(storage) as heartbeat:
        heartbeat.halt = "stopped"
    assert held(storage).halted


def test_what_a_person_ended_can_be_let_go_on(storage):
    assert not lease.resume(storage)
    with a_heartbeat(storage) as heartbeat:
        assert not lease.resume(storage)
        heartbeat.outcome = "stopped"
    assert lease.resume(storage)
    assert (held(storage).stopped, held(storage).halted) == (True, False)
    assert not lease.resume(storage)


def test_that_a_person_cancelled_a_run_is_noted_for_that_run_alone(storage):
    with suppress(KeyboardInterrupt), Heartbeat(storage, Generation(1), CheckpointId(0), _NEVER, "run 1"):
        assert not lease.cancelled(storage, "run 1"), "it has not ended"
        raise KeyboardInterrupt
    assert not lease.cancelled(storage, "another run")
    assert not held(storage).halted
    assert lease.cancelled(storage, "run 1")
    assert (held(storage).outcome, held(storage).halted) == ("cancelled", True)


def test_a_run_that_its_caller_leaves_has_not_failed(storage):
    def run():
        with a_heartbeat(storage):
            yield

    with closing(run()) as left:
        next(left)
    assert (held(storage).stopped, held(storage).outcome) == (True, "ended")


def test_a_lease_that_cannot_be_given_back_does_not_hide_why_the_run_ended(storage, monkeypatch):
    def away(*_):
        raise OSError("the storage is away")

    with (
        monkeypatch.context() as patched,
        pytest.raises(ValueError, match="the real reason"),
        a_heartbeat(storage),
    ):
        patched.setattr(storage, "put_bytes", away)
        raise ValueError("the real reason")
    with monkeypatch.context() as patched, a_heartbeat(storage):
        patched.setattr(storage, "put_bytes", away)
    assert held(storage).stopped is False, "observers see for themselves that it is dead"


# -- the generation


def test_a_renewed_lease_is_the_same_process_under_a_higher_generation(storage):
    with a_heartbeat(storage) as heartbeat:
        heartbeat.begin(CheckpointId(7))
        before = held(storage)
        heartbeat.renew(Generation(1))
        assert held(storage) == before, "nothing was claimed, nothing is written"
        heartbeat.renew(Generation(2))
        now = held(storage)
        assert now == replace(before, generation=Generation(2), counter=before.counter + 1)
        assert now.process == before.process
        assert lease.alive(now) is True
    assert (held(storage).generation, held(storage).outcome) == (2, "ended")


def test_the_lease_of_a_successor_is_left_alone(storage):
    with a_heartbeat(storage) as old:
        with a_heartbeat(storage, generation=2):
            theirs = held(storage)
            old.begin(CheckpointId(9))
            old.renew(Generation(1))
            assert held(storage) == theirs
        theirs = held(storage)
    assert held(storage) == theirs and theirs.generation == 2
