"""Epochs beside each other in real threads: what may run while an upload, a sink or a stage is slow, and what may
not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import polars as pl
import pytest

from state_ops.checkpoints.coordinator import Coordinator
from state_ops.checkpoints.registry import Registry
from state_ops.coordination import lease, requests
from state_ops.coordination.restore_progress import Restoring
from state_ops.delta import log_cleanup
from state_ops.errors import ConfigurationError, FencedError, GateError, InputError, RunEndedError, TransientError
from state_ops.records.snapshot_files import LocalSnapshot
from state_ops.snapshots import stage_upload
from state_ops.storage.storage import Storage
from tests.recovery.small import Bank, accounts, pipeline, until
from tests.tools.sampling import sampled
from tests.tools.stages import with_input
from weir import Epoch, Stage, ValueState, delta, expect, stage
from weir.epoch import failover, readiness, steps, transitions
from weir.epoch.model import EpochReport
from weir.epoch.scheduler import EpochScheduler
from weir.execution.in_process import InMemoryExecutor
from weir.run import run as runtime
from weir.run.run import RunOptions
from weir.timings import bottleneck

_HASTE = ("WEIR_CHECKPOINTS__TIMEOUT_SECONDS", "WEIR_CHECKPOINTS__INTERVAL_SECONDS")


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
    return configured(bank, WEIR_CHECKPOINTS__MAX_CONCURRENT=str(concurrent))


def configured(bank: Bank, **options: str) -> Bank:
    return Bank(replace(bank.site, options={**bank.site.options, **options}))


@pytest.mark.parametrize(
    ("module", "name"), [(stage_upload, "upload"), (steps, "publish_missing")], ids=["a slow store", "a slow sink"]
)
@pytest.mark.parametrize("concurrent", sampled([3, 1, 2]))
def test_stages_work_on_beside_what_is_slow_and_never_more_epochs_than_allowed(
    bank, monkeypatch, module, name, concurrent
):
    bank, gate, executor = limited(bank, concurrent), Gate(monkeypatch, module, name), Noting()
    bank.land(*range(1, 8))
    thread, reports = background(bank, executor)
    assert gate.reached.wait(30)
    # The first two are committed then, and take no place any more.
    most = concurrent + 2 * (concurrent > 1 and name == "publish_missing")
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
    """It counts once that one is confirmed, to whose objects it refers; if that one falls, so does what was
    uploaded."""
    commit, upload, uploaded, counted = Registry.commit, stage_upload.upload, threading.Event(), []
    receive = Coordinator.receive

    def waiting(registry, checkpoint, *others, **given):
        if checkpoint.id == 2:
            assert uploaded.wait(30), "the third epoch's state waits for the second one's commit"
            assert not counted
            if lost:
                raise OSError("the store was away")
        commit(registry, checkpoint, *others, **given)

    def noted(storage, acks, *others, **given):
        files = upload(storage, acks, *others, **given)
        if acks[0].epoch == 3:
            uploaded.set()
        return files

    def received(coordinator, ack):
        if ack.epoch == 3 and ack.pending_upload is None:
            counted.append(ack.subtask)
        return receive(coordinator, ack)

    monkeypatch.setattr(Registry, "commit", waiting)
    monkeypatch.setattr(stage_upload, "upload", noted)
    monkeypatch.setattr(Coordinator, "receive", received)
    bank = limited(configured(bank, WEIR_CHECKPOINTS__TOLERABLE_FAILURES="1"), 2)
    ids = [report.checkpoint.id for report in bank.epochs(1, 2, 3, 4)]
    assert ids == ([1, 4, 5, 6] if lost else [1, 2, 3, 4])
    bank.assert_exact(1, 2, 3, 4)
    bank.site.assert_no_orphans()


def gated(bank: Bank, refused: int, *behind: Stage) -> Bank:
    """The same with a gate that refuses the rows of one file."""
    gate = expect("ExpectColumnValuesToNotBeInSet", column="amount", value_set=[refused])
    first = replace(accounts, gates=(gate,))
    checked = replace(pipeline, stages=(first, *[with_input(stage, first) for stage in behind]))
    return Bank(replace(bank.site, pipeline=checked))


def committed_first(monkeypatch: pytest.MonkeyPatch, last: int) -> dict[int, threading.Event]:
    """No epoch but the last is published before the next one is committed. Set, by id, once an epoch is committed."""
    commit, publish = Registry.commit, steps.publish_missing
    committed = {epoch: threading.Event() for epoch in range(1, last + 1)}

    def noted(registry, checkpoint, *others, **given):
        commit(registry, checkpoint, *others, **given)
        committed[checkpoint.id].set()

    def waiting(context, checkpoints):
        (checkpoint,) = checkpoints
        assert checkpoint.id == last or committed[checkpoint.id + 1].wait(30), "its commit waits for this publishing"
        assert checkpoint.id + 2 not in committed or not committed[checkpoint.id + 2].is_set(), "one ahead, no more"
        return publish(context, checkpoints)

    monkeypatch.setattr(Registry, "commit", noted)
    monkeypatch.setattr(steps, "publish_missing", waiting)
    return committed


def test_publishing_that_could_begin_goes_before_pruning_but_never_twice_in_a_row(bank, monkeypatch):
    """Else pruning, which nobody waits for, bounds the rate on slow storage. What was left is pruned with the next
    epoch."""
    pruned_by, prune, last = [], steps.prune, 6
    monkeypatch.setattr(
        steps, "prune", lambda context, **given: pruned_by.append(context.head.id) or prune(context, **given)
    )
    committed_first(monkeypatch, last)
    bank = limited(bank, 2)
    bank.epochs(*range(1, last + 1))
    assert pruned_by == [3, 5, 6]
    retained = bank.site.settings.checkpoints.num_retained
    assert bank.ids() == list(range(last + 1 - retained, last + 1))
    bank.assert_exact(*range(1, last + 1))
    bank.site.assert_no_orphans()


def test_two_epochs_are_committed_and_published_beside_pruning_and_no_more(bank, monkeypatch):
    """On slow storage pruning takes longer than publishing. What is newer than the epoch that prunes stays
    meanwhile."""
    bank, gate, published = limited(bank, 2), Gate(monkeypatch, steps, "prune"), []
    publish = steps.publish_missing
    monkeypatch.setattr(
        steps, "publish_missing", lambda context, rows: published.append(int(rows[0].id)) or publish(context, rows)
    )
    bank.land(*range(1, 8))
    thread, reports = background(bank, InMemoryExecutor())
    assert gate.reached.wait(30)
    ended = len(reports)
    until(lambda: published[-1:] == [ended + 3])
    time.sleep(0.3)  # what must not happen would happen now
    assert bank.ids()[-1] == published[-1] == ended + 3
    assert len(reports) == ended
    gate.open()
    thread.join(60)
    assert [report.checkpoint.id for report in reports] == list(range(1, 8))
    assert len(bank.ids()) == bank.site.settings.checkpoints.num_retained
    bank.assert_exact(*range(1, 8))
    bank.site.assert_no_orphans()


def test_an_epoch_that_is_pruned_after_is_told_although_the_publishing_of_the_next_fails(bank, monkeypatch):
    gate, publish, failed = Gate(monkeypatch, steps, "prune"), steps.publish_missing, threading.Event()

    def failing(context, checkpoints):
        if checkpoints[0].id == 2:
            assert gate.reached.wait(30)
            failed.set()
            raise TransientError("the sink is away")
        return publish(context, checkpoints)

    ids: list[int] = []

    def coordinate() -> None:
        asked = RunOptions(until_caught_up=True)
        for report in runtime.run(bank.site.pipeline, bank.site.settings, asked, InMemoryExecutor()):
            ids.append(report.checkpoint.id)

    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as pool:
        patched.setattr(steps, "publish_missing", failing)
        patched.setattr(readiness, "can_defer_pruning", lambda *_: False)
        bank.land(1, 2, 3)
        ran = pool.submit(coordinate)
        assert failed.wait(30)
        time.sleep(0.3)
        gate.open()
        with pytest.raises(TransientError, match="the sink is away"):
            ran.result(60)
    assert ids == [1]
    bank.epochs()
    bank.assert_exact(1, 2, 3)
    bank.site.assert_no_orphans()


@pytest.mark.long
def test_epochs_are_committed_and_published_beside_the_upkeep_of_the_logs(bank, monkeypatch):
    """On slow storage it takes as long as several epochs."""
    monkeypatch.setattr(log_cleanup, "INTERVAL", 3)
    gate, last = Gate(monkeypatch, log_cleanup, "clean_up"), 8
    bank.land(*range(1, last + 1))
    thread, reports = background(bank, InMemoryExecutor())
    assert gate.reached.wait(30)
    until(lambda: len(reports) == last)
    assert thread.is_alive(), "the upkeep belongs to the run, and ends with it"
    gate.open()
    thread.join(60)
    bank.assert_exact(*range(1, last + 1))
    bank.site.assert_no_orphans()


@pytest.mark.long
def test_upkeep_that_fails_is_done_by_the_next_one(bank, monkeypatch):
    monkeypatch.setattr(log_cleanup, "INTERVAL", 3)
    real, calls = Registry.keep_up, []

    def failing(registry, generation):
        calls.append(generation)
        if len(calls) == 1:
            raise TransientError("storage was away")
        real(registry, generation)

    monkeypatch.setattr(Registry, "keep_up", failing)
    bank.epochs(*range(1, 9))
    assert len(calls) > 1
    storage = Storage(str(bank.site.storage))
    assert len(log_cleanup.log_names(storage, "registry/checkpoints")) <= 2 * log_cleanup.INTERVAL + 5
    bank.assert_exact(*range(1, 9))


def test_who_learns_from_the_upkeep_that_it_was_replaced_ends(bank, monkeypatch):
    monkeypatch.setattr(log_cleanup, "INTERVAL", 1)
    real = Registry.keep_up

    def replaced(registry, generation):
        bank.registry.take_over()
        real(registry, generation)

    with monkeypatch.context() as patched:
        patched.setattr(Registry, "keep_up", replaced)
        with pytest.raises(FencedError):
            bank.epochs(1)  # nothing but the upkeep is left to learn it from
    bank.epochs(2)
    bank.assert_exact(1, 2)
    bank.site.assert_no_orphans()


def test_a_savepoint_is_of_its_epoch_although_the_next_one_is_the_newest_by_then(bank, monkeypatch):
    """One checkpoint is retained, and no epoch in flight needs the one before."""
    committed_first(monkeypatch, 2)
    storage, _ = runtime.open_storage(bank.site.pipeline, bank.site.settings)
    requests.send(storage, requests.Request("savepoint", savepoint="early"))
    bank = limited(bank, 2)
    bank.epochs(1, 2)
    assert [(pin.name, pin.checkpoint_id) for pin in bank.registry.pins()] == [("early", 1)]
    assert bank.ids() == [1, 2]
    bank.assert_exact(1, 2)
    bank.site.assert_no_orphans()


def test_who_was_replaced_leaves_a_savepoint_that_it_was_asked_for_to_its_successor(bank, monkeypatch):
    storage, _ = runtime.open_storage(bank.site.pipeline, bank.site.settings)
    requests.send(storage, requests.Request("savepoint", savepoint="early"))

    def fenced(*_arguments):
        raise FencedError("Another coordinator owns the pipeline.", next="Nothing to do.")

    with monkeypatch.context() as patch, pytest.raises(FencedError):
        patch.setattr(Registry, "pin", fenced)
        bank.epochs(1)
    assert [request.savepoint for request in requests.pending(storage)] == ["early"]
    bank.epochs(2)
    assert [(pin.name, pin.checkpoint_id) for pin in bank.registry.pins()] == [("early", 2)]


def test_an_object_that_cannot_be_deleted_does_not_undo_a_commit(bank, monkeypatch):
    """It is of an attempt that lost; whatever the store answers, its epoch has been committed by then."""
    commit, delete, refused = transitions.commit, Storage.delete, []

    def with_loser(context, flight, checkpoint, named):
        flight.losers.append(replace(named[0], path=f"{named[0].path}-lost"))
        return commit(context, flight, checkpoint, named)

    def refusing(storage, path):
        if path.endswith("-lost"):
            refused.append(path)
            raise ConfigurationError("The bucket lies elsewhere.", next="Look at storage.s3.region.")
        delete(storage, path)

    monkeypatch.setattr(transitions, "commit", with_loser)
    monkeypatch.setattr(Storage, "delete", refusing)
    assert [report.checkpoint.id for report in bank.epochs(1, 2, 3)] == [1, 2, 3]
    assert len(refused) == 3
    bank.assert_exact(1, 2, 3)


@pytest.mark.long
def test_a_step_that_does_not_end_ends_the_run_and_undoes_nothing_that_stands(bank, monkeypatch):
    monkeypatch.setattr(failover, "_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(failover, "_GOODBYE_SECONDS", 0.1)
    over = threading.Event()

    class Hanging(InMemoryExecutor):
        def run(self, task, rows, columns, deadline):
            if task.epoch == 2:
                over.wait(60)
            return super().run(task, rows, columns, deadline)

    try:
        with pytest.raises(RunEndedError, match=r"does not end, 0\.5 s after its epoch's time was up: accounts"):
            hasty(bank).epochs(1, 2, executor=Hanging())
    finally:
        over.set()
    storage, _ = runtime.open_storage(bank.site.pipeline, bank.site.settings)
    assert not lease.alive(lease.read(storage))
    bank.epochs()
    bank.assert_exact(1, 2)


def hasty(bank: Bank) -> Bank:
    """Epochs have a second each."""
    return configured(bank, **dict.fromkeys(_HASTE, "1"))


@pytest.mark.parametrize("step", sampled(["commit", "publish", "finish"]))
def test_what_does_not_end_after_the_last_ack_ends_the_run_too(bank, monkeypatch, step):
    """What is committed has no deadline, and later epochs would wait behind it for ever."""
    monkeypatch.setattr(failover, "_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(failover, "_GOODBYE_SECONDS", 0.1)
    over, module = threading.Event(), transitions if step == "commit" else steps
    real = getattr(module, step)

    def hanging(context, flight, *others):
        if flight.pending.id == 2:
            over.wait(60)
            raise OSError("it was given up meanwhile")
        return real(context, flight, *others)

    monkeypatch.setattr(module, step, hanging)
    with pytest.raises(RunEndedError, match=r"does not end, 0\.5 s after .*: (commits|publishing|pruning)"):
        hasty(bank).epochs(1, 2, 3)
    over.set()
    monkeypatch.undo()
    bank.epochs()
    bank.assert_exact(1, 2, 3)


@pytest.mark.long
def test_a_slow_sink_takes_no_time_from_the_epochs_that_wait_for_it(bank, monkeypatch):
    """They are as good as done, and have three seconds more to wait than they may take."""
    publish, committed = steps.publish_missing, committed_first(monkeypatch, 5)

    def slow(context, checkpoints):
        if checkpoints[0].id == 1:
            assert committed[2].wait(30)
            time.sleep(4)
        return publish(context, checkpoints)

    monkeypatch.setattr(steps, "publish_missing", slow)
    assert [report.checkpoint.id for report in limited(hasty(bank), 3).epochs(1, 2, 3, 4, 5)] == [1, 2, 3, 4, 5]
    assert bank.registry.head().generation == 1
    bank.assert_exact(1, 2, 3, 4, 5)


def test_time_that_an_epoch_is_given_reaches_the_work_that_runs(bank, monkeypatch):
    """It has waited for the one before: what cancels its job asks anew how long that may take."""
    commit, begun, given = Registry.commit, threading.Event(), []

    class Asking(InMemoryExecutor):
        def run(self, task, rows, columns, deadline):
            if task.epoch == 2:
                given.append(deadline())
                begun.set()
                until(lambda: deadline() > given[0])
            return super().run(task, rows, columns, deadline)

    def waiting(registry, checkpoint, *others, **options):
        assert checkpoint.id != 1 or begun.wait(30)
        commit(registry, checkpoint, *others, **options)

    monkeypatch.setattr(Registry, "commit", waiting)
    limited(bank, 2).epochs(1, 2, executor=Asking())
    bank.assert_exact(1, 2)


@pytest.mark.parametrize("landed", sampled(["while", "before", "never"]))
def test_what_is_committed_beside_publishing_that_fails_stands(bank, monkeypatch, landed):
    """Nothing of it is deleted, whether its commit had landed by then, or was under way, or failed; the next run
    publishes both."""
    commit, publish = Registry.commit, steps.publish_missing
    begun, failed, done = threading.Event(), threading.Event(), threading.Event()

    def committing(registry, checkpoint, *others, **given):
        if checkpoint.id == 2:
            begun.set()
            if landed != "before":
                assert failed.wait(30)
                time.sleep(0.3)  # the coordinator knows it by now
            if landed == "never":
                raise OSError("the store was away")
        commit(registry, checkpoint, *others, **given)
        if checkpoint.id == 2:
            done.set()

    def failing(context, checkpoints):
        if checkpoints[0].id != 1:
            return publish(context, checkpoints)
        assert (done if landed == "before" else begun).wait(30)
        time.sleep(0.3)
        failed.set()
        raise OSError("the sink was away")

    with monkeypatch.context() as patch, pytest.raises(TransientError, match="the sink was away"):
        patch.setattr(Registry, "commit", committing)
        patch.setattr(steps, "publish_missing", failing)
        limited(bank, 3).epochs(1, 2, 3, 4)
    assert bank.ids() == ([1] if landed == "never" else [1, 2])
    bank.epochs()
    bank.assert_exact(1, 2, 3, 4)
    bank.site.assert_no_orphans()


@pytest.mark.parametrize("lands", sampled([True, False]))
def test_a_claim_that_is_renewed_beside_publishing_does_not_fence_it(bank, monkeypatch, lands):
    """The answer to a commit is lost while the epoch before is published, under the generation that the run has had so
    far."""
    commit, record, renewed = Registry.commit, Registry.record_publications, threading.Event()
    take_over, lost = Registry.take_over, []

    def committing(registry, checkpoint, *others, **given):
        if checkpoint.id != 2 or lost:
            return commit(registry, checkpoint, *others, **given)
        lost.append(2)
        if lands:
            commit(registry, checkpoint, *others, **given)
        raise OSError("no answer")

    def claiming(registry, **given):
        claimed = take_over(registry, **given)
        if lost:
            renewed.set()
            time.sleep(0.3)  # not told yet
        return claimed

    def recording(registry, generation, publications):
        if publications[0].checkpoint_id == 1:
            assert renewed.wait(30)
        record(registry, generation, publications)

    monkeypatch.setattr(Registry, "commit", committing)
    monkeypatch.setattr(Registry, "take_over", claiming)
    monkeypatch.setattr(Registry, "record_publications", recording)
    bank = limited(configured(bank, WEIR_CHECKPOINTS__TOLERABLE_FAILURES="1"), 2)
    ids = [report.checkpoint.id for report in bank.epochs(1, 2, 3, 4)]
    assert ids[:2] == ([1, 2] if lands else [1, 4])
    bank.assert_exact(1, 2, 3, 4)
    bank.site.assert_no_orphans()


def test_the_next_epoch_is_worked_on_beside_the_gates_and_nothing_is_committed_before_them(bank, monkeypatch):
    bank, gate, executor = gated(limited(bank, 2), 9), Gate(monkeypatch, transitions, "judge"), Noting()
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
    assert all(len(report.checkpoint.operators["accounts"].gates) == 1 for report in reports)
    bank.assert_exact(1, 2, 3)


def test_an_epoch_that_a_gate_refuses_takes_along_what_was_built_on_it(bank, monkeypatch):
    third, judge = threading.Event(), transitions.judge

    class Third(Noting):
        def run(self, task, rows, columns, deadline):
            acks = super().run(task, rows, columns, deadline)
            if task.epoch == 3:
                third.set()
            return acks

    def late(*arguments):
        verdicts = judge(*arguments)
        assert verdicts[0][0].passed or third.wait(30)
        return verdicts

    monkeypatch.setattr(transitions, "judge", late)
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
    gate = Gate(monkeypatch, transitions, "judge")
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
    begin, begun = EpochScheduler.begin, []

    class Late(Noting):
        """No byte waits before all epochs are under way."""

        def run(self, task, rows, columns, deadline):
            until(lambda: len(begun) == 4)
            return super().run(task, rows, columns, deadline)

    def noted(air, cut):
        begun.append(cut)
        return begin(air, cut)

    bank, gate, executor = limited(bank, 8), Gate(monkeypatch, stage_upload, "upload"), Late()
    monkeypatch.setattr(EpochScheduler, "begin", noted)
    monkeypatch.setattr("weir.epoch.readiness.MIB", 0)  # so that any byte is one too many
    bank.land(1, 2, 3, 4)
    thread, reports = background(bank, executor)
    assert gate.reached.wait(30)
    time.sleep(0.3)
    assert sorted(executor.bases) == [1]
    gate.open()
    thread.join(60)
    assert len(reports) == 4
    bank.assert_exact(1, 2, 3, 4)


@stage("booked_twice", source=accounts, key="id", state=accounts.state, sink=delta.append("behind"))
def slow_reader(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Reads what another stage has handed out."""
    return rows


class Reading(Noting):
    """Notes when which stage's jobs begin; that of `slow_reader` in the first epoch waits until it is let go."""

    def __init__(self, batch_rows: int = 65_536) -> None:
        super().__init__()
        self._batch_rows = batch_rows
        self.begun: list[tuple[str, int]] = []
        self.go = threading.Event()

    def run(self, task, rows, columns, deadline):
        self.begun.append((task.stage.uid, int(task.epoch)))
        assert self.begun[-1] != (slow_reader.uid, 1) or self.go.wait(60), "nobody let it go"
        return super().run(task, rows, columns, deadline)


def of_two_stages(bank: Bank, **options: str) -> Bank:
    both = replace(pipeline, stages=(accounts, slow_reader))
    return configured(Bank(replace(bank.site, pipeline=both)), **options)


def test_rows_that_the_next_stage_has_still_to_apply_hold_the_source_back(bank, monkeypatch):
    """They lie on the disk, although all else of their epoch is in storage by then."""
    upload, stored, executor = stage_upload.upload, threading.Event(), Reading()

    def uploading(*arguments, **options):
        acks = upload(*arguments, **options)
        stored.set()
        return acks

    monkeypatch.setattr(stage_upload, "upload", uploading)
    monkeypatch.setattr("weir.epoch.readiness.MIB", 0)  # so that any byte is one too many
    bank = of_two_stages(bank, WEIR_CHECKPOINTS__MAX_CONCURRENT="8")
    bank.land(1, 2, 3)
    thread, reports = background(bank, executor)
    assert stored.wait(30)
    time.sleep(0.3)
    assert executor.begun == [(accounts.uid, 1), (slow_reader.uid, 1)]
    executor.go.set()
    thread.join(60)
    assert len(reports) == 3, "the oldest may go on, however much waits"
    bank.assert_exact(1, 2, 3)


@pytest.mark.long
def test_rows_that_a_stage_has_left_hold_the_source_back_too_but_not_for_ever(bank, monkeypatch):
    """Unaligned: all is in storage, and the rest of the first epoch waits on the disk for the next one."""
    commit, executor = Gate(monkeypatch, Registry, "commit"), Reading(batch_rows=2)
    monkeypatch.setattr("weir.epoch.readiness.MIB", 0)
    options = {"WEIR_CHECKPOINTS__MAX_CONCURRENT": "8", "WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS": "0"}
    bank = of_two_stages(bank, **options)
    bank.land(1, 2)
    executor.go.set()
    thread, reports = background(bank, executor)
    assert commit.reached.wait(30)
    time.sleep(0.3)
    held = list(executor.begun)
    commit.open()
    thread.join(60)
    assert held == [(accounts.uid, 1), (slow_reader.uid, 1)]
    left = [report.checkpoint.operators[slow_reader.uid].rows_waiting for report in reports]
    assert left[0] > 0 and left[-1] == 0
    bank.assert_exact(1, 2)
    assert sorted(bank.site.table("behind")["amount"]) == [1] * 10 + [2] * 10


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
    upload, seen = stage_upload.upload, []

    def failing(storage, acks, *others, **options):
        seen.append(acks[0].epoch)
        if acks[0].epoch == 3:
            raise InputError("the third epoch's upload is refused")
        return upload(storage, acks, *others, **options)

    monkeypatch.setattr(stage_upload, "upload", failing)
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
    monkeypatch.setattr(stage_upload, "upload", upload)
    bank.epochs()
    bank.assert_exact(1, 2, 3, 4, 5)


def test_an_epoch_that_ended_well_is_told_before_the_failure_of_the_next(bank, monkeypatch):
    gate, upload, failed = Gate(monkeypatch, steps, "publish_missing"), stage_upload.upload, threading.Event()

    def failing(storage, acks, *others, **options):
        if acks[0].epoch == 2:
            failed.set()
            raise InputError("the second epoch's upload is refused")
        return upload(storage, acks, *others, **options)

    def open_late() -> None:
        assert failed.wait(30)
        time.sleep(0.3)
        gate.open()

    monkeypatch.setattr(stage_upload, "upload", failing)
    threading.Thread(target=open_late, daemon=True).start()
    bank.land(1, 2)
    ids: list[int] = []
    with pytest.raises(InputError, match="the second"):
        for report in runtime.run(
            bank.site.pipeline, bank.site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()
        ):
            ids.append(report.checkpoint.id)
    assert ids == [1]


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
        ({"stage:a": 5, "commits_before": 6.5, "publishing_before": 6}, "commits"),
        ({"stage:a": 5, "commits_before": 6.5, "publishing_before": 7}, "publishing"),
        ({"stage:a": 5, "commits_before": 6.5, "publishing_before": 7, "pruning_before": 8}, "pruning"),
        ({"stage:a": 5, "commits_before": 3, "seal": 3}, "commits"),
        ({"stage:a": 5, "commits_before": 1, "seal": 3, "seal:gates": 2.9}, "a"),
        ({}, None),
    ],
)
def test_what_bounds_the_epochs_is_named(ms, named):
    assert bottleneck(ms) == named


@pytest.mark.parametrize(
    ("where", "name", "phase", "lane"),
    sampled(
        [
            (steps, "publish_missing", "publishing_before", "publishing"),
            (steps, "prune", "pruning_before", "pruning"),
            (steps.append, "check", "seal", "commits"),
        ]
    ),
)
def test_status_and_checkpoints_say_what_held_an_epoch_up(bank, weir, monkeypatch, where, name, phase, lane):
    real = getattr(where, name)

    def slow(*arguments, **options):
        time.sleep(1)  # longer than a stage takes on a busy machine
        return real(*arguments, **options)

    monkeypatch.setattr(where, name, slow)
    monkeypatch.setattr(readiness, "can_defer_pruning", lambda *_: False)
    bank.epochs(1, 2, 3, 4)
    head = bank.registry.head()
    assert head.ms[phase] > 1000
    assert bottleneck(head.ms) == lane
    (*_, row) = json.loads(weir(bank.site, "checkpoints", "small", "--json").out)
    assert row["id"] == head.id and row["bottleneck"] == lane
    title, *_, line = weir(bank.site, "checkpoints", "small").out.splitlines()
    assert "ms  bottleneck  gen" in title and f"  {head.ms['to_commit']:.0f}  {lane} " in line


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
    gate, executor = Gate(monkeypatch, stage_upload, "upload"), Noting()
    bank.land(1)
    thread, reports = background(bank, executor)
    assert gate.reached.wait(30)
    time.sleep(0.3)  # the run has seen by now that nothing else waits
    bank.land(2)
    gate.open()
    thread.join(60)
    assert len(reports) == 2
    bank.assert_exact(1, 2)


class Second:
    """Holds the second call of a function back, and later ones, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: object, name: str, number: int = 2) -> None:
        self.reached, self._open, self._calls = threading.Event(), threading.Event(), 0
        real = getattr(module, name)

        def held(*arguments, **options):
            self._calls += 1
            if self._calls >= number and not self._open.is_set():
                self.reached.set()
                assert self._open.wait(60), "nobody opened it"
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, held)

    def open(self) -> None:
        self._open.set()


LOOKS = ["_look", "_plan"]
"""What asks storage before a barrier is cut."""


@pytest.mark.parametrize("name", LOOKS)
def test_an_epoch_goes_on_to_its_end_while_the_coordinator_looks_for_more(bank, monkeypatch, name):
    look = Second(monkeypatch, runtime, name)
    bank.land(1, 2)
    thread, reports = background(bank, InMemoryExecutor())
    assert look.reached.wait(30)
    until(lambda: len(reports) == 1)
    look.open()
    thread.join(60)
    assert [report.checkpoint.id for report in reports] == [1, 2]
    bank.assert_exact(1, 2)


def test_a_request_that_an_epoch_answers_while_it_is_looked_at_cuts_no_second_one(bank, monkeypatch):
    storage, _ = runtime.open_storage(bank.site.pipeline, bank.site.settings)
    listed, over = threading.Event(), threading.Event()
    look = runtime._look

    def slow(context, offsets):
        action = look(context, offsets)
        if context.head is None and not offsets.get("landing"):
            return action
        listed.set()
        assert over.wait(60)
        return action

    monkeypatch.setattr(runtime, "_look", slow)
    requests.send(storage, requests.Request("barrier", reason="asked for"))
    bank.land(1)
    thread, reports = background(bank, InMemoryExecutor())
    assert listed.wait(30)
    until(lambda: len(reports) == 1)
    over.set()
    thread.join(60)
    assert [report.checkpoint.reason for report in reports] == ["asked for"]


@pytest.mark.parametrize("number", sampled([1, 2]), ids=["nothing is in flight", "an epoch is"])
def test_a_look_that_does_not_end_ends_the_run(bank, monkeypatch, number):
    """The lease would be kept fresh by its thread, and nobody would take over."""
    monkeypatch.setattr(failover, "_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(failover, "_GOODBYE_SECONDS", 0.1)
    look = Second(monkeypatch, runtime, "_look", number)
    with pytest.raises(RunEndedError, match=r"does not end, 0\.5 s after .*: looks"):
        hasty(bank).epochs(1, 2)
    look.open()
    monkeypatch.undo()
    bank.epochs()
    bank.assert_exact(1, 2)


@pytest.mark.long
def test_a_write_of_an_id_that_does_not_end_ends_the_run(bank, monkeypatch):
    """Nor does the last word of the lease wait for it."""
    monkeypatch.setattr(failover, "_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(failover, "_GOODBYE_SECONDS", 0.1)
    monkeypatch.setattr(lease, "_LAST_SECONDS", -0.5)  # after a heartbeat
    put, over = Storage.put_bytes, threading.Event()

    def hanging(storage, path, data):
        if path == lease.LEASE and json.loads(data)["last_id"] == 2:
            over.wait(60)
        put(storage, path, data)

    monkeypatch.setattr(Storage, "put_bytes", hanging)
    quick = configured(bank, **dict.fromkeys(_HASTE, "1"), WEIR_LEASE__HEARTBEAT_SECONDS="1")
    begun = time.monotonic()
    try:
        with pytest.raises(RunEndedError, match=r"does not end, 0\.5 s after .*: ids"):
            quick.epochs(1, 2)
        assert time.monotonic() - begun < 30
    finally:
        over.set()


@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.parametrize("fails", sampled([True, False]), ids=["an epoch fails beside it", "an epoch ends beside it"])
def test_a_look_that_fails_beside_an_epoch_is_done_again_once_that_has_ended(bank, monkeypatch, name, fails):
    real, calls, failed = getattr(runtime, name), [], threading.Event()
    monkeypatch.setattr("state_ops.checkpoints.coordinator.retry_pause", lambda _: 0.0)

    class Failing(InMemoryExecutor):
        def run(self, task, rows, columns, deadline):
            if task.epoch == 1 and fails:
                assert failed.wait(30)
                raise TransientError("the storage is away")
            return super().run(task, rows, columns, deadline)

    def looking(*given):
        calls.append(name)
        if len(calls) == 2:
            failed.set()
            time.sleep(0.5)  # the epoch ends meanwhile, or falls
            raise TransientError("the storage is away")
        return real(*given)

    monkeypatch.setattr(runtime, name, looking)
    tolerant = configured(bank, WEIR_CHECKPOINTS__TOLERABLE_FAILURES="1")
    assert len(tolerant.epochs(1, 2, executor=Failing())) == 2, "one outage is one failure at most"
    bank.assert_exact(1, 2)


def test_nothing_of_an_epoch_is_begun_before_its_id_is_written_down_and_the_one_before_does_not_wait(bank, monkeypatch):
    ids, executor = Second(monkeypatch, lease.Heartbeat, "begin"), Noting()
    bank.land(1, 2)
    thread, reports = background(bank, executor)
    assert ids.reached.wait(30)
    until(lambda: len(reports) == 1)
    assert list(executor.bases) == [1]
    ids.open()
    thread.join(60)
    assert [report.checkpoint.id for report in reports] == [1, 2]
    bank.assert_exact(1, 2)


@pytest.mark.parametrize("name", LOOKS)
def test_what_was_found_before_epochs_fell_counts_for_nothing(bank, monkeypatch, name):
    """The files of an epoch that fell were in flight when the look began: they are neither done nor to be skipped."""
    look, failed = Second(monkeypatch, runtime, name), threading.Event()
    monkeypatch.setattr(
        "state_ops.checkpoints.coordinator.retry_pause", lambda _: 0.0
    )  # else nothing may begin so soon
    read: list[str] = []

    class Failing(InMemoryExecutor):
        def run(self, task, rows, columns, deadline):
            read.extend(file.name for _, part in rows.parts for file in part.files)
            if task.epoch == 1:
                assert look.reached.wait(30)
                failed.set()
                raise TransientError("the first epoch fails")
            return super().run(task, rows, columns, deadline)

    bank = configured(bank, WEIR_CHECKPOINTS__TOLERABLE_FAILURES="3")
    files = (1, 2) if name == "_plan" else (1,)  # one more to plan, or none
    bank.land(*files)
    thread, reports = background(bank, Failing())
    assert failed.wait(30)
    time.sleep(0.3)  # the epoch falls
    look.open()
    thread.join(60)
    assert read == ["00001.parquet", *(f"{number:05}.parquet" for number in files)], "again, and in order"
    assert len(reports) == len(files)
    bank.assert_exact(*files)


def test_what_a_failed_epoch_was_reading_is_read_before_a_drain(bank, monkeypatch):
    """The stop comes while it is in flight: its file is none of those that land later."""
    bank = Bank(replace(bank.site, options={**bank.site.options, "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "3"}))
    storage, _ = runtime.open_storage(bank.site.pipeline, bank.site.settings)
    upload, failed = stage_upload.upload, []

    def failing(*arguments, **options):
        if not failed:
            failed.append(requests.send(storage, requests.Request("stop", drain=True)))
            time.sleep(0.5)
            raise TransientError("the store was away")
        return upload(*arguments, **options)

    monkeypatch.setattr(stage_upload, "upload", failing)
    bank.epochs(1)
    assert failed
    bank.assert_exact(1)
    holder = lease.read(storage)
    assert holder is not None and holder.outcome == "drained"


@pytest.mark.long
def test_the_time_that_an_epoch_waits_for_the_one_before_is_not_its_own(bank, monkeypatch):
    options = {"WEIR_CHECKPOINTS__TIMEOUT_SECONDS": "4", "WEIR_CHECKPOINTS__INTERVAL_SECONDS": "1"}
    bank = Bank(replace(bank.site, options={**bank.site.options, **options}))
    upload = stage_upload.upload

    def slow(*arguments, **given):
        time.sleep(2.2)
        return upload(*arguments, **given)

    monkeypatch.setattr(stage_upload, "upload", slow)
    assert [report.checkpoint.id for report in bank.epochs(1, 2, 3)] == [1, 2, 3]


@pytest.mark.long
def test_what_a_dead_subtask_said_of_its_restore_prolongs_no_epoch(bank):
    options = {"WEIR_CHECKPOINTS__TIMEOUT_SECONDS": "1", "WEIR_CHECKPOINTS__INTERVAL_SECONDS": "1"}
    bank = Bank(replace(bank.site, options={**bank.site.options, **options}))

    class Dead(InMemoryExecutor):
        """It said once that its state was being fetched; then nothing more came of it."""

        def run(self, task, rows, columns, deadline):
            subject = ("epoch", task.stage.uid, 0, int(task.generation), int(task.epoch))
            restoring = Restoring(*subject, bytes=1, bytes_total=9, beat=3)
            task.storage.put_bytes(restoring.path, json.dumps(restoring.to_dict()).encode())
            patience = time.monotonic() + 20
            while time.monotonic() < deadline():
                assert time.monotonic() < patience, "its time never ends"
                time.sleep(0.05)
            return super().run(task, rows, columns, deadline)

    with pytest.raises(TransientError, match="took longer than 1 s"):
        bank.epochs(1, executor=Dead())


def test_several_epochs_that_fall_for_one_reason_are_one_failure(bank, monkeypatch):
    options = {"WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "1"}
    bank = limited(Bank(replace(bank.site, options={**bank.site.options, **options})), 3)
    upload, begun, failures = stage_upload.upload, threading.Event(), []

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

    monkeypatch.setattr(stage_upload, "upload", failing)
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
