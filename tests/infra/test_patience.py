"""The demo waits for a run that gets on, also slowly, and gives up one that has died or does nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from state_ops.coordination import lease
from state_ops.ids import CheckpointId, Generation
from state_ops.storage.storage import Storage
from weir.local.patience import BUSY_SECONDS, SILENCE_SECONDS, Patience, doing, processor_seconds

# Takes a lease, works, says so, and lives until its input ends.
RUN = """
import sys, time
from state_ops.coordination.lease import Heartbeat
from state_ops.storage.storage import Storage

beat = Heartbeat(Storage(sys.argv[1]), 1, 7, 0.05, "run")
beat._write()
beat._thread.start()
while time.process_time() < 1.5:
    pass
print("busy", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "busy\n"
        yield process
        process.kill()


def test_a_run_that_lives_and_has_died_is_told_from_one_that_is_not_there(tmp_path, run):
    storage = Storage(str(tmp_path))
    holder = lease.read(storage)
    assert holder is not None
    assert doing(holder, 7).startswith(f"the run lives (process {run.pid}, ")
    assert "preparing" in doing(holder, 7) and "epoch 7 has begun" in doing(holder, 6)
    assert processor_seconds(holder) >= 1.4  # ticks of a hundredth
    run.kill()
    run.wait()
    assert doing(holder, 6).startswith(f"the run's process {run.pid} has died")
    assert processor_seconds(holder) == 0
    assert "starting the run" in doing(None, 0)


def test_a_run_that_has_ended_by_itself_is_followed_by_one_that_starts(tmp_path):
    storage = Storage(str(tmp_path))
    with lease.Heartbeat(storage, Generation(1), CheckpointId(7), 60, "run"):
        pass
    assert "starting the run" in doing(lease.read(storage), 6)


def waited(*seen: tuple[float, object, float]) -> bool:
    """Return whether the demo still waits after it has seen this: when, signs, processor seconds."""
    patience = Patience(0.0)
    for now, signs, busy in seen:
        patience.look(now, signs, busy)
        if patience.ends(now):
            return False
    return True


def test_a_slow_run_is_waited_for():
    """Its processes work, but get a tenth of a processor on a busy machine: no line, no epoch, for two hours."""
    assert waited(*((now, "epoch 7", now / 10) for now in range(0, 7200, 2)))
    assert waited(*((now, f"line {now // 500}", 0.0) for now in range(0, 7200, 2)))


@pytest.mark.parametrize(
    ("busy", "rate"),
    [(50.0, 0.0), (50.0, 0.5 * BUSY_SECONDS / SILENCE_SECONDS), (0.0, 0.0)],
    ids=["nothing", "heartbeats", "dead"],
)
def test_a_run_that_does_nothing_is_given_up(busy, rate):
    seen = [(now, "epoch 7", busy + rate * now) for now in range(0, 700, 2)]
    assert not waited(*seen)
    assert waited(*(each for each in seen if each[0] < SILENCE_SECONDS - 10))


def test_another_run_begins_with_less_processor_time_and_is_waited_for():
    assert waited((0, "run 1", 100.0), (590, "run 2", 3.0), (1180, "run 2", 40.0), (1700, "run 2", 40.0))


def test_a_line_is_said_every_half_minute_without_a_checkpoint():
    patience = Patience(0.0)
    spoken = [now for now in range(100) if patience.speaks(now)]
    assert spoken == [31, 62, 93]
    patience.checkpoint(100.0)
    assert not patience.speaks(120.0) and not patience.ends(100 + SILENCE_SECONDS)
