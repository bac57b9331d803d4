"""Epochs beside each other in real threads: what may run while an upload, a sink or a stage is slow, and what may not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import polars as pl
import pytest

from pipelines.api import Epoch, Stage, ValueState, delta, expect, stage
from pipelines.runtime import epoch as steps
from pipelines.runtime import in_flight
from pipelines.runtime import run as runtime
from pipelines.runtime.in_memory import InMemoryExecutor
from pipelines.runtime.run import RunOptions
from pipelines.runtime.workshop import EpochReport, bottleneck
from state_ops import handover, lease
from state_ops.checkpoint import LocalSnapshot
from state_ops.coordinator import Coordinator
from state_ops.errors import GateError, InputError, TransientError
from state_ops.registry import Registry
from tests.recovery.small import Bank, accounts, pipeline, until


class Noting(InMemoryExecutor):
    """Notes which epochs' jobs have begun, and what they were built on."""

    def __init__(self) -> None:
        super().__init__()
        self.bases: dict[int, list[type]] = {}

    def run(self, task, rows, columns, deadline):
        self.bases.setdefault(int(task.epoch), []).extend({type(base) for base in task.bases.values()})
        return super().run(task, rows, columns, deadline)


class Gate:
    """Holds calls of a function back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        real = getattr(module, name)

        def held(*arguments, **options):
            self.reached.set()
            assert self._open.wait(60), "nobody opened it"
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, held)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def bank(tmp_path) -> Bank:
    return Bank.at(tmp_path / "site")


def background(bank: Bank, executor: InMemoryExecutor) -> tuple[threading.Thread, list[EpochReport]]:
    reports: list[EpochReport] = []

    def coordinate() -> None:
        asked = RunOptions(until_caught_up=True)
        reports.extend(runtime.run(bank.site.pipeline, bank.site.settings, asked, executor))

    thread = threading.Thread(target=coordinate, daemon=True)
    thread.start()
    return thread, reports


def limited(bank: Bank, concurrent: int) -> Bank:
    options = {**bank.site.options, "WEIR_CHECKPOINTS__MAX_CONCURRENT": str(concurrent)}
    return Bank(replace(bank.site, options=options))


@pytest.mark.parametrize(
    ("module", "name"), [(handover, "upload"), (steps, "publish_missing")], ids=["a slow store", "a slow sink"]
)
@pytest.mark.parametrize("concurrent", [1, 2, 3])
def test_stages_work_on_beside_what_is_slow_and_never_more_epochs_than_allowed(
    bank, monkeypatch, module, name, concurrent
):
    bank, gate, executor = limited(bank, concurrent), Gate(monkeypatch, module, name), Noting()
    bank.land(*range(1, 8))
    thread, reports = background(bank, executor)
    assert gate.reached.wait(30)
    most = concurrent + (
        concurrent > 1 and name == "publish_missing"
    )  # the first one is committed then, and takes no place any more
    until(lambda: len(executor.bases) == most)
    time.sleep(0.3)  # what must not happen would happen now
    assert sorted(executor.bases) == list(range(1, most + 1))
    assert not reports
    for number in range(2, concurrent + 1):
        assert executor.bases[number] == [LocalSnapshot], "on what the epoch before left, wherever that is by now"
    gate.open()
    thread.join(60)
    assert [report.checkpoint.id for report in reports] == list(range(1, 8))
    bank.assert_exact(*range(1, 8))
    bank.site.assert_no_orphans()


@pytest.mark.parametrize("lost", [False, True])
def test_state_goes_to_storage_while_the_epoch_before_is_committed(bank, monkeypatch, lost):
    """It counts once that one is confirmed, to whose objects it refers; if that one falls, so does what was uploaded."""
    commit, upload, uploaded, counted = Registry.commit, handover.upload, threading.Event(), []
    receive = Coordinator.receive

    def waiting(registry, checkpoint, *others, **given):
        if checkpoint.id == 2:
            assert uploaded.wait(30), "the third epoch's state waits for the second one's commit"
            assert not counted
            if lost:
                raise OSError("the store was away")
        commit(registry, checkpoint, *others, **given)

    def noted(storage, acks, *others, **given):
        found = upload(storage, acks, *others, **given)
        if acks[0].epoch == 3:
            uploaded.set()
        return found

    def received(coordinator, ack):
        if ack.epoch == 3 and ack.handover is None:
            counted.append(ack.subtask)
        return receive(coordinator, ack)

    monkeypatch.setattr(Registry, "commit", waiting)
    monkeypatch.setattr(handover, "upload", noted)
    monkeypatch.setattr(Coordinator, "receive", received)
    tolerated = replace(bank.site, options={**bank.site.options, "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "1"})
    bank = limited(Bank(tolerated), 2)
    ids = [report.checkpoint.id for report in bank.epochs(1, 2, 3, 4)]
    assert ids == ([1, 4, 5, 6] if lost else [1, 2, 3, 4])
    bank.assert_exact(1, 2, 3, 4)
    bank.site.assert_no_orphans()


def gated(bank: Bank, refused: int, *behind: Stage) -> Bank:
    """The same with a gate that refuses the rows of one file."""
    gate = expect("ExpectColumnValuesToNotBeInSet", column="amount", value_set=[refused])
    first = replace(accounts, gates=(gate,))
    checked = replace(pipeline, stages=(first, *[replace(one, input=first) for one in behind]))
    return Bank(replace(bank.site, pipeline=checked))


def test_a_commit_that_could_begin_goes_before_pruning_but_never_twice_in_a_row(bank, monkeypatch):
    """Else pruning, which nobody waits for, bounds the rate on slow storage. What was left is pruned with the next epoch."""
    commit, upload, last = Registry.commit, handover.upload, 6
    uploaded = {epoch: threading.Event() for epoch in range(1, last + 1)}

    def waiting(registry, checkpoint, *others, **given):
        assert checkpoint.id == last or uploaded[checkpoint.id + 1].wait(30)
        commit(registry, checkpoint, *others, **given)

    def noted(storage, acks, *others, **given):
        found = upload(storage, acks, *others, **given)
        uploaded[acks[0].epoch].set()
        return found

    pruned_by, prune = [], steps.prune
    monkeypatch.setattr(Registry, "commit", waiting)
    monkeypatch.setattr(handover, "upload", noted)
    monkeypatch.setattr(steps, "prune", lambda shop, **given: pruned_by.append(shop.head.id) or prune(shop, **given))
    bank = limited(bank, 2)
    bank.epochs(*range(1, last + 1))
    assert pruned_by == [2, 4, 6]
    retained = bank.site.settings.checkpoints.num_retained
    assert bank.ids() == list(range(last + 1 - retained, last + 1))
    bank.assert_exact(*range(1, last + 1))
    bank.site.assert_no_orphans()


def test_the_next_epoch_is_worked_on_beside_the_gates_and_nothing_is_committed_before_them(bank, monkeypatch):
    bank, gate, executor = gated(limited(bank, 2), 9), Gate(monkeypatch, in_flight, "judge"), Noting()
    bank.land(1, 2, 3)
    thread, reports = background(bank, executor)
    assert gate.reached.wait(30)
    until(lambda: len(executor.bases) == 2)
    until(lambda: any(bank.site.storage.glob("state/accounts/*e1*/**/*")))  # it is uploaded meanwhile
    time.sleep(0.3)
    assert bank.registry.head() is None and not reports
    gate.open()
    thread.join(60)
    assert [report.checkpoint.id for report in reports] == [1, 2, 3]
    assert all(len(report.checkpoint.operators["accounts"]["gates"]) == 1 for report in reports)
    bank.assert_exact(1, 2, 3)


def test_an_epoch_that_a_gate_refuses_takes_along_what_was_built_on_it(bank, monkeypatch):
    third, judge = threading.Event(), in_flight.judge

    class Third(Noting):
        def run(self, task, rows, columns, deadline):
            acks = super().run(task, rows, columns, deadline)
            if task.epoch == 3:
                third.set()
            return acks

    def late(*arguments):
        said = judge(*arguments)
        assert said[0][0].passed or third.wait(30)
        return said

    monkeypatch.setattr(in_flight, "judge", late)
    bank = gated(limited(bank, 3), 2)
    bank.land(1, 2, 3)
    done: list[int] = []
    with pytest.raises(GateError, match="10 of 10 rows"):
        for report in runtime.run(bank.site.pipeline, bank.site.settings, RunOptions(until_caught_up=True), Third()):
            done.append(report.checkpoint.id)
    assert done == [1] and third.is_set()
    bank.assert_exact(1)
    bank.site.assert_no_orphans()


def test_no_stage_sees_rows_that_a_gate_refuses(bank, monkeypatch):
    seen: list[int] = []

    @stage("behind", source=accounts, key="id", state=accounts.state, sink=delta.append("behind"))
    def behind(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        seen.extend(rows["amount"])
        return rows

    bank = gated(bank, 2, behind)
    gate = Gate(monkeypatch, in_flight, "judge")
    bank.land(1, 2)
    with ThreadPoolExecutor(1) as pool:
        ran = pool.submit(bank.epochs, executor=Noting())
        assert gate.reached.wait(30)
        time.sleep(0.3)
        assert not seen
        gate.open()
        with pytest.raises(GateError, match="10 of 10 rows"):
            ran.result(60)
    assert set(seen) == {1}, "and not 2"
    assert bank.registry.head().id == 1


def test_bytes_that_wait_for_the_store_hold_the_source_back(bank, monkeypatch):
    bank, gate, executor = limited(bank, 8), Gate(monkeypatch, handover, "upload"), Noting()
    monkeypatch.setattr("pipelines.runtime.in_flight._MIB", 0)  # so that any byte is one too many
    bank.land(1, 2, 3, 4)
    thread, reports = background(bank, executor)
    assert gate.reached.wait(30)
    time.sleep(0.3)
    assert sorted(executor.bases) == [1]
    gate.open()
    thread.join(60)
    assert len(reports) == 4
    bank.assert_exact(1, 2, 3, 4)


def test_a_subtask_that_lands_on_another_host_waits_until_its_base_is_in_storage(bank, tmp_path):
    class Elsewhere(Noting):
        """Every second epoch runs on a host whose disk nobody else sees."""

        def run(self, task, rows, columns, deadline):
            if task.epoch % 2 == 0:
                task = replace(task, work_dir=tmp_path / "another host", here=None)
            return super().run(task, rows, columns, deadline)

    executor = Elsewhere()
    reports = bank.epochs(1, 2, 3, 4, executor=executor)
    assert [report.checkpoint.id for report in reports] == [1, 2, 3, 4], "that is no failure: no id was lost"
    assert [kind.__name__ for kind in executor.bases[2]] == ["LocalSnapshot", "Snapshot"], "it ran again"
    assert [kind.__name__ for kind in executor.bases[3]] == ["Snapshot"], "it waited: nobody here had seen epoch 2"
    bank.assert_exact(1, 2, 3, 4)
    bank.site.assert_no_orphans()


def test_an_epoch_whose_upload_fails_takes_along_what_was_built_on_it_and_nothing_before_it(bank, monkeypatch):
    upload, seen = handover.upload, []

    def failing(storage, acks, *others, **options):
        seen.append(acks[0].epoch)
        if acks[0].epoch == 3:
            raise InputError("the third epoch's upload is refused")
        return upload(storage, acks, *others, **options)

    monkeypatch.setattr(handover, "upload", failing)
    done: list[int] = []
    executor = Noting()
    bank = limited(bank, 3)
    bank.land(1, 2, 3, 4, 5)
    asked = RunOptions(until_caught_up=True)
    with pytest.raises(InputError, match="the third epoch's upload"):
        for report in runtime.run(bank.site.pipeline, bank.site.settings, asked, executor):
            done.append(report.checkpoint.id)
    assert done == [1, 2]
    assert 4 not in seen, "what builds on it was never uploaded"
    bank.assert_exact(1, 2)
    bank.site.assert_no_orphans()
    monkeypatch.setattr(handover, "upload", upload)
    bank.epochs()
    bank.assert_exact(1, 2, 3, 4, 5)


def test_an_epoch_that_ended_well_is_told_before_the_failure_of_the_next(bank, monkeypatch):
    gate, upload, failed = Gate(monkeypatch, steps, "publish_missing"), handover.upload, threading.Event()

    def failing(storage, acks, *others, **options):
        if acks[0].epoch == 2:
            failed.set()
            raise InputError("the second epoch's upload is refused")
        return upload(storage, acks, *others, **options)

    def open_late() -> None:
        assert failed.wait(30)
        time.sleep(0.3)
        gate.open()

    monkeypatch.setattr(handover, "upload", failing)
    threading.Thread(target=open_late, daemon=True).start()
    bank.land(1, 2)
    told: list[int] = []
    with pytest.raises(InputError, match="the second"):
        for report in runtime.run(
            bank.site.pipeline, bank.site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()
        ):
            told.append(report.checkpoint.id)
    assert told == [1]


def test_a_run_that_nobody_listens_to_any_more_leaves_nothing(bank):
    bank = limited(bank, 3)
    bank.land(*range(1, 7))
    reports: Iterator[EpochReport] = runtime.run(
        bank.site.pipeline, bank.site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()
    )
    assert next(reports).checkpoint.id == 1
    reports.close()  # type: ignore[attr-defined]
    begun = [path.name for path in bank.site.storage.glob("state/*/*")]
    assert {name for name in begun if int(name.split("-e")[1]) > bank.registry.head().id} == set()
    bank.epochs()
    bank.assert_exact(*range(1, 7))
    bank.site.assert_no_orphans()


@pytest.mark.parametrize(
    ("ms", "named"),
    [
        ({"stage:a": 5, "stage:b": 7, "quarantine:a": 3, "gate:b": 6, "to_commit": 99}, "a"),
        ({"stage:a": 5, "gate:a": 3, "gate:b": 3, "to_commit": 99}, "gates"),
        ({"stage:a": 5, "upload:a": 4, "upload:b": 4}, "uploads"),
        ({"stage:a": 5, "commits_before": 6.5}, "commits"),
        ({}, None),
    ],
)
def test_what_bounds_the_epochs_is_named(ms, named):
    assert bottleneck(ms) == named


def test_status_and_checkpoints_say_what_held_an_epoch_up(bank, monkeypatch):
    publish = steps.publish_missing

    def slow(*arguments):
        time.sleep(0.6)
        return publish(*arguments)

    monkeypatch.setattr(steps, "publish_missing", slow)
    bank.epochs(1, 2, 3)
    head = bank.registry.head()
    assert head.ms["commits_before"] > 600
    assert bottleneck(head.ms) == "commits"


def test_a_source_that_cannot_be_planned_costs_nothing_that_is_in_flight(bank):
    bank = limited(bank, 2)
    bank.land(1, 2)
    (bank.site.landing / "00003.parquet").write_bytes(b"this is no Parquet file")
    with pytest.raises(InputError, match="00003"):
        bank.epochs()
    bank.assert_exact(1, 2)
    with pytest.raises(InputError, match="00003"):
        bank.epochs()
    (bank.site.landing / "00003.parquet").unlink()
    bank.epochs(4)
    bank.assert_exact(1, 2, 4)


def test_a_file_that_lands_while_an_epoch_is_in_flight_is_read_by_the_same_run(bank, monkeypatch):
    gate, executor = Gate(monkeypatch, handover, "upload"), Noting()
    bank.land(1)
    thread, reports = background(bank, executor)
    assert gate.reached.wait(30)
    time.sleep(0.3)  # the run has seen by now that nothing else waits
    bank.land(2)
    gate.open()
    thread.join(60)
    assert len(reports) == 2
    bank.assert_exact(1, 2)


def test_what_a_failed_epoch_was_reading_is_read_before_a_drain(bank, monkeypatch):
    """The stop comes while it is in flight: its file is none of those that land later."""
    bank = Bank(replace(bank.site, options={**bank.site.options, "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "3"}))
    storage, _ = runtime.open_storage(bank.site.pipeline, bank.site.settings)
    upload, failed = handover.upload, []

    def failing(*arguments, **options):
        if not failed:
            failed.append(lease.send(storage, lease.Request("stop", drain=True)))
            time.sleep(0.5)
            raise TransientError("the store was away")
        return upload(*arguments, **options)

    monkeypatch.setattr(handover, "upload", failing)
    bank.epochs(1)
    assert failed
    bank.assert_exact(1)
    holder = lease.read(storage)
    assert holder is not None and holder.outcome == "drained"


def test_the_time_that_an_epoch_waits_for_the_one_before_is_not_its_own(bank, monkeypatch):
    options = {"WEIR_CHECKPOINTS__TIMEOUT_SECONDS": "2", "WEIR_CHECKPOINTS__INTERVAL_SECONDS": "1"}
    bank = Bank(replace(bank.site, options={**bank.site.options, **options}))
    upload = handover.upload

    def slow(*arguments, **given):
        time.sleep(1.2)
        return upload(*arguments, **given)

    monkeypatch.setattr(handover, "upload", slow)
    assert [report.checkpoint.id for report in bank.epochs(1, 2, 3)] == [1, 2, 3]


def test_several_epochs_that_fall_for_one_reason_are_one_failure(bank, monkeypatch):
    options = {"WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "1"}
    bank = limited(Bank(replace(bank.site, options={**bank.site.options, **options})), 3)
    upload, begun, failures = handover.upload, threading.Event(), []

    class Away(InMemoryExecutor):
        """The second epoch's job fails, after which the first one's upload fails too."""

        def run(self, task, rows, columns, deadline):
            if task.epoch == 2:
                failures.append(2)
                begun.set()
                raise TransientError("the cluster was away")
            return super().run(task, rows, columns, deadline)

    def failing(storage, acks, *others, **given):
        if acks[0].epoch == 1:
            assert begun.wait(30)
            time.sleep(0.3)
            failures.append(1)
            raise TransientError("the store was away")
        return upload(storage, acks, *others, **given)

    monkeypatch.setattr(handover, "upload", failing)
    assert len(bank.epochs(1, 2, 3, executor=Away())) == 3
    assert failures == [2, 1]
    bank.assert_exact(1, 2, 3)


def test_a_stage_that_runs_again_elsewhere_leaves_nothing_of_its_first_try(bank, tmp_path):
    class Elsewhere(InMemoryExecutor):
        """The second epoch runs on another host, where only the first subtask lacks its base."""

        def run(self, task, rows, columns, deadline):
            if task.epoch == 2:
                bases = {subtask: base for subtask, base in task.bases.items() if subtask == 0}
                first = any(isinstance(base, LocalSnapshot) for base in bases.values())
                work_dir = tmp_path / "another host"
                task = replace(task, work_dir=work_dir, here=None, bases=bases if first else task.bases)
            return super().run(task, rows, columns, deadline)

    bank.epochs(1, 2, 3, executor=Elsewhere())
    bank.assert_exact(1, 2, 3)
    bank.site.assert_no_orphans()


def test_the_end_of_a_run_is_told_as_it_was_even_if_spark_is_gone_with_it(bank, monkeypatch):
    class Gone(InMemoryExecutor):
        def cancel(self) -> None:
            raise ConnectionError("the JVM is gone")

    bank = limited(bank, 3)
    bank.land(1, 2, 3, 4)
    reports = runtime.run(bank.site.pipeline, bank.site.settings, RunOptions(until_caught_up=True), Gone())
    next(reports)
    with pytest.raises(KeyboardInterrupt):
        reports.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert not list(bank.site.root.glob("work/*/coordinator-*"))
    bank.epochs()
    bank.assert_exact(1, 2, 3, 4)
