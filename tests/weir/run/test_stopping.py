from __future__ import annotations

from dataclasses import replace

import pytest

from state_ops.coordination import lease, requests, suspension
from state_ops.coordination.lease import Heartbeat
from state_ops.coordination.requests import STOP, Request
from state_ops.coordination.suspension import Suspension
from state_ops.ids import CheckpointId, Generation
from state_ops.records.triggers import Trigger
from tests.recovery.small import Bank, until
from weir.cli import operations
from weir.cli.operations import command_of
from weir.execution.in_process import InMemoryExecutor
from weir.operations.declared import declared
from weir.ownership.pipeline_storage import open_storage
from weir.run import sensor
from weir.run.run import RunOptions, run
from weir.run.stopping import ask_to_stop, end


@pytest.mark.parametrize("outcome", ["stopped", "ended"])
def test_a_coordinator_that_ends_between_two_looks_has_not_died(tmp_path, monkeypatch, outcome):
    site = Bank.at(tmp_path / "site").site
    storage, _ = open_storage(site.pipeline, site.settings)
    with Heartbeat(storage, Generation(1), CheckpointId(0), 60.0, None) as heartbeat:

        def watch(_: object) -> bool:
            """The lease has been read as a living one's; now the coordinator carries the request out, or not, and
            ends."""
            for request in requests.pending(storage) if outcome == "stopped" else []:
                requests.take(storage, request)
            heartbeat._write(stopped=True, outcome=outcome)
            return False

        monkeypatch.setattr(lease, "watch", watch)
        assert ask_to_stop(site.pipeline, site.settings, Request(STOP)) is (outcome == "stopped")
    assert requests.pending(storage) == []


QUEUED = RunOptions(trigger=Trigger.SENSOR, reason="1 file new", until_caught_up=True)


@pytest.fixture
def bank(tmp_path, monkeypatch) -> Bank:
    """One epoch is done, a file waits, and commands are about this pipeline."""
    bank = Bank.at(tmp_path / "site")
    bank.epochs(1)
    bank.land(2)
    monkeypatch.setattr(operations, "find", lambda _name: (bank.site.pipeline, bank.site.settings))
    return bank


def storage_of(bank: Bank):
    return open_storage(bank.site.pipeline, bank.site.settings)[0]


def committed(bank: Bank, options: RunOptions) -> list[int]:
    """The checkpoints of a run without Spark."""
    reports = run(bank.site.pipeline, bank.site.settings, options, InMemoryExecutor())
    return [int(report.checkpoint.id) for report in reports]


def ticked(bank: Bank) -> sensor.Decision:
    sight = sensor.observe(bank.site.pipeline, bank.site.settings)
    return sensor.decide(sight, sensor.SensorMemory(), bank.site.settings.dagster.max_lag_files)


def command(name: str, **options: bool) -> None:
    command_of(declared(name))(pipeline="small", **options)


ENDINGS = {
    "stop": lambda: command("stop"),
    "cancel and retain": lambda: command("cancel", delete=False),
    "cancel and delete": lambda: command("cancel", delete=True),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_pipeline_that_a_person_ended_while_nothing_ran_is_not_begun_again_by_sensors(bank, ending):
    assert ticked(bank).action is sensor.Action.RUN
    ENDINGS[ending]()
    assert ticked(bank).action is sensor.Action.WAIT
    assert f"weir {ending.split()[0]}" in ticked(bank).reason


@pytest.mark.parametrize("drain", [False, True])
def test_a_stop_says_that_sensors_wait_for_a_person_although_nothing_ran(bank, monkeypatch, capsys, drain):
    monkeypatch.setattr(operations, "follow", lambda *_: None)  # what drains; it needs Spark
    command("stop", drain=drain)
    printed = capsys.readouterr().out
    assert printed.startswith("No coordinator of small is running")
    assert printed.endswith("Sensors begin nothing until `weir resume small`, `weir run small` or Materialize.\n")
    assert ticked(bank).action is sensor.Action.WAIT


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_sensors_run_that_was_queued_before_the_end_does_nothing_and_says_so(bank, ending, capsys):
    ENDINGS[ending]()
    generation = bank.registry.generation()
    assert committed(bank, QUEUED) == []
    assert committed(bank, replace(QUEUED, trigger=Trigger.MANUAL, automatic=True)) == [], "a schedule's, say"
    assert bank.registry.generation() == generation, "it has not even taken over"
    assert "by a person" in "".join(capsys.readouterr())
    assert ticked(bank).action is sensor.Action.WAIT


def test_a_persons_run_begins_again(bank):
    command("stop")
    assert committed(bank, RunOptions(until_caught_up=True)) == [2]
    assert suspension.read(storage_of(bank)) is None
    bank.land(3)
    assert ticked(bank).action is sensor.Action.RUN
    assert committed(bank, QUEUED) == [3]


def test_a_sensors_run_that_begins_while_a_person_ends_the_pipeline_sees_that(bank, monkeypatch):
    """It has looked for a halt and found none; then the halt is written, then it owns the pipeline."""
    storage, read, looks = storage_of(bank), suspension.read, []

    def first_look_is_early(storage):
        holder = read(storage)
        if not looks:
            suspension.write(storage, Suspension("stopped", "weir stop"))
        looks.append(holder)
        return holder

    monkeypatch.setattr(suspension, "read", first_look_is_early)
    assert committed(bank, QUEUED) == []
    assert looks[0] is None
    assert read(storage) is not None


def test_a_coordinator_that_begins_while_a_person_ends_the_pipeline_is_asked_to_stop(bank, monkeypatch):
    """It had looked for a halt before that was written, and for the lease nobody looked again."""
    storage, write = storage_of(bank), suspension.write
    living = bank.coordinator()

    def begins_before(storage, note):
        if not looked:
            looked.append(True)
            living.__enter__()
            until(lambda: lease.alive(lease.read(storage)))
        write(storage, note)

    looked: list[bool] = []
    monkeypatch.setattr(suspension, "write", begins_before)
    assert end(bank.site.pipeline, bank.site.settings, Request(STOP, reason="weir stop"))
    living.__exit__(None, None, None)
    assert lease.read(storage).outcome == "stopped"
    assert suspension.read(storage).why == "weir stop"
