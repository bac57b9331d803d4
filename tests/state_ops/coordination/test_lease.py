from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import asdict, replace

import psutil
import pytest

from state_ops.coordination import lease, processes
from state_ops.coordination.lease import Heartbeat, Lease
from state_ops.errors import GateError, StageError
from state_ops.ids import CheckpointId, Generation
from state_ops.storage.storage import Storage

_NEVER = 60.0  # seconds between heartbeats, where a test wants none


@pytest.fixture
def storage(tmp_path) -> Storage:
    return Storage(str(tmp_path / "pipeline"))


def a_heartbeat(storage: Storage, generation: int = 1, seconds: float = _NEVER) -> Heartbeat:
    return Heartbeat(storage, Generation(generation), CheckpointId(0), seconds, None)


def held(storage: Storage) -> Lease:
    holder = lease.read(storage)
    assert holder is not None
    return holder


@pytest.fixture
def mine(storage) -> Lease:
    """The lease of a coordinator that lives: this process."""
    with a_heartbeat(storage):
        return held(storage)


# -- who lives


def test_a_lease_of_an_older_release_is_read(storage, mine):
    old = {name: value for name, value in asdict(mine).items() if name != "pids"}
    storage.put_bytes(lease.LEASE, json.dumps(old).encode())
    assert lease.read(storage) == replace(mine, pids="")


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
        ({"pid": 2**22 + 1, "pids": "this boot/another container"}, None),
        ({"pid": 2**22 + 1, "pids": ""}, None),
        ({"pid": 2**22 + 1}, False),
    ],
    ids=[
        "stopped",
        "pid used again",
        "on another host",
        "stopped on another host",
        "in another container",
        "of an older release",
        "gone",
    ],
)
def test_who_is_taken_for_dead(mine, changes, alive):
    assert lease.alive(replace(mine, **changes)) is alive


def test_a_killed_process_is_dead_before_and_after_its_parent_collects_it(mine):
    with subprocess.Popen(["sleep", "60"]) as child:
        of_child = replace(mine, pid=child.pid, born=processes.born(child.pid))
        assert lease.alive(of_child) is True
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
        assert lease.alive(of_child) is False
    assert not psutil.pid_exists(child.pid)
    assert lease.alive(of_child) is False


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="containers are Linux's")
def test_in_a_container_of_the_hosts_name_nobody_is_taken_for_dead_at_sight(mine, storage):
    """Its pids are its own: the holder's number is nobody's there, or another process's."""
    code = "import sys; from state_ops.coordination import lease; from state_ops.storage.storage import Storage\n"
    code += "print(lease.alive(lease.read(Storage(sys.argv[1]))))"
    contained = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*contained, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this host does not let its users make namespaces")
    with a_heartbeat(storage):
        for where, output in ((contained, "None"), ([], "True"), (contained[:-1], "None")):
            looked = subprocess.run(
                [*where, sys.executable, "-c", code, storage.uri], capture_output=True, text=True, check=True
            )
            assert looked.stdout.strip() == output


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


# -- how coordinators ended


def ended(storage: Storage, generation: int, error: BaseException | None) -> None:
    with suppress(BaseException), a_heartbeat(storage, generation):
        if error is not None:
            raise error


def test_a_lease_remembers_how_coordinators_ended_that_nobody_had_asked_to(storage):
    ended(storage, 1, None)
    assert held(storage).failures == []
    ended(storage, 2, StageError("accounts raised ValueError: no", where="password=hunter22", next="Correct it."))
    ended(storage, 3, KeyboardInterrupt())
    ended(storage, 4, None)
    failures = held(storage).failures
    assert [(each["how"], each["generation"], each["error"]) for each in failures] == [
        ("failed", 2, "StageError"),
        ("interrupted", 3, None),
    ]
    assert failures[0]["message"] == "accounts raised ValueError: no where: password=*** next: Correct it."


def test_one_that_ended_without_a_word_is_noticed_by_its_successor(storage, mine):
    storage.put_bytes(lease.LEASE, json.dumps({**asdict(mine), "stopped": False, "run_id": "killed"}).encode())
    ended(storage, 2, None)
    (died,) = held(storage).failures
    assert (died["how"], died["generation"], died["run_id"]) == ("died", 1, "killed")


def test_of_many_failures_the_newest_are_remembered_and_rows_that_a_gate_refused_are_not(storage):
    for generation in range(1, 12):
        ended(storage, generation, GateError(f"A quality gate of {generation} failed: 'k1' is above 3" + "!" * 9999))
    failures = held(storage).failures
    assert [each["generation"] for each in failures] == list(range(4, 12))
    assert failures[-1]["message"] == "A quality gate of 11 failed"
    ended(storage, 12, ValueError("x" * 9999))
    assert len(held(storage).failures[-1]["message"]) == 500
