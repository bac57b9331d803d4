"""The coordinator in a run: failures are counted and waited out, attempts that lose leave nothing, on a clock that
tests turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.coordination import lease, requests
from state_ops.coordination.requests import Request
from state_ops.errors import TransientError
from state_ops.records.acks import Ack
from state_ops.records.triggers import Trigger
from tests.recovery import mortal
from tests.recovery.harness import Site
from weir.epoch import failover, scheduler, stage_job, steps, transitions
from weir.execution.executor import Deadline, InputRows
from weir.execution.in_process import InMemoryExecutor
from weir.run import run
from weir.run.run import RunOptions
from weir.sources.files import FilesReader
from weir.task import run_task
from weir.task.run_task import KeyedTask

ROWS = 20
A_JOB_WITHOUT_ROWS = {"WEIR_CHECKPOINTS__MODE": "full"}  # else a drain has no job that could fail


@dataclass
class Clock:
    """Time that passes at once when somebody sleeps. then: what happens meanwhile."""

    slept: float = 0.0
    then: Callable[[], object] = field(default=lambda: None)

    def monotonic(self) -> float:
        return time.monotonic() + self.slept

    def perf_counter(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.then()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    for module in (run, steps, scheduler, transitions, failover, stage_job):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def site(tmp_path) -> Callable[..., Site]:
    """Makes a site with one file that waits."""

    def make_site(**options: str) -> Site:
        options = {"WEIR_SPARK__PARALLELISM": "2", **options}
        site = Site(tmp_path / "site", options, mortal.pipeline, "tests.recovery.mortal")
        _land(site, 1)
        return site

    return make_site


def _land(site: Site, number: int) -> None:
    site.landing.mkdir(parents=True, exist_ok=True)
    rows = pa.table({"id": pa.array(range(ROWS)), "fuse": pa.nulls(ROWS, pa.string())})
    pq.write_table(rows, site.landing / f"{number}.parquet")


def _run(site: Site, executor: InMemoryExecutor | None = None, **options) -> list[int]:
    """The ids of the checkpoints that a run completes."""
    options = {"until_caught_up": True, **options}
    reports = run.run(site.pipeline, site.settings, RunOptions(**options), executor or InMemoryExecutor())
    return [report.checkpoint.id for report in reports]


def _assert_exact(site: Site, files: int) -> None:
    assert sorted(site.table("counted")["id"]) == sorted([*range(ROWS)] * files)
    assert dict(site.state("counts").itertuples(index=False, name=None)) == dict.fromkeys(range(ROWS), files)
    site.assert_no_orphans()


class Failing(InMemoryExecutor):
    """Its first jobs fail. tries: when each began, on the tests' clock."""

    def __init__(self, clock: Clock, failures: int) -> None:
        super().__init__()
        self.clock, self.failures = clock, failures
        self.tries: list[float] = []

    def run(self, task: KeyedTask, rows: InputRows | None, columns: pa.Schema, deadline: Deadline) -> list[Ack]:
        acks = super().run(task, rows, columns, deadline)
        self.tries.append(self.clock.monotonic())
        if len(self.tries) <= self.failures:
            raise TransientError("the cluster was away")
        return acks


def test_after_each_failure_the_next_try_waits_longer(site, clock):
    counts = site(WEIR_CHECKPOINTS__TOLERABLE_FAILURES="4")
    executor = Failing(clock, failures=4)

    assert _run(counts, executor) == [5]

    pauses = [after - before for before, after in zip(executor.tries, executor.tries[1:], strict=False)]
    assert [least <= pause for least, pause in zip([1, 2, 4, 8], pauses, strict=True)] == [True] * 4
    assert clock.slept == pytest.approx(15, abs=1), "and no longer than that"
    _assert_exact(counts, 1)


def test_the_failure_after_the_last_tolerable_one_ends_the_run_with_nothing_left(site, clock):
    counts = site(WEIR_CHECKPOINTS__TOLERABLE_FAILURES="2")
    with pytest.raises(TransientError, match="the cluster was away"):
        _run(counts, Failing(clock, failures=3))
    assert counts.head() is None
    assert not [name for name in counts.objects() if name.startswith(("state/", "channels/", "tables/counted/data"))]
    assert _run(counts) == [4], "no id is used again"
    _assert_exact(counts, 1)


def test_a_success_resets_the_count_of_failures(site, clock):
    counts = site(WEIR_CHECKPOINTS__TOLERABLE_FAILURES="1", WEIR_EPOCH__MAX_FILES="1")
    _land(counts, 2)

    class EveryOther(Failing):
        def run(self, *work) -> list[Ack]:
            self.failures = len(self.tries) + 1 if len(self.tries) % 2 == 0 else 0
            return super().run(*work)

    first, second = _run(counts, EveryOther(clock, 0))
    assert first in (2, 3), "1 failed, and 2 may have been begun by then"
    assert second > first + 1, "one more failed in between, and was tolerated"
    _assert_exact(counts, 2)


@pytest.mark.parametrize("error", [OSError("the listing broke off"), TransientError("throttled")])
def test_a_slice_that_cannot_be_planned_is_a_failure_that_may_be_tolerated(site, clock, monkeypatch, error):
    counts = site(WEIR_CHECKPOINTS__TOLERABLE_FAILURES="2", WEIR_CHECKPOINTS__MIN_PAUSE_SECONDS="7")
    plan, errors = FilesReader.plan, [error, error]

    def flaky(*arguments):
        if errors:
            raise errors.pop()
        return plan(*arguments)

    monkeypatch.setattr(FilesReader, "plan", flaky)
    assert _run(counts) == [1]
    assert clock.slept == pytest.approx(14, abs=1), "the min pause, which is longer, after each failure"
    _assert_exact(counts, 1)


def test_a_slice_that_cannot_be_planned_ends_a_run_that_tolerates_nothing(site, clock, monkeypatch):
    def broken(*_):
        raise OSError("the listing broke off")

    monkeypatch.setattr(FilesReader, "plan", broken)
    with pytest.raises(TransientError, match="the listing broke off"):
        _run(site())
    assert clock.slept == 0


@pytest.mark.parametrize("drain", [False, True])
def test_a_stop_is_seen_while_a_failure_is_waited_out(site, clock, drain):
    counts = site(WEIR_CHECKPOINTS__TOLERABLE_FAILURES="100", **A_JOB_WITHOUT_ROWS)
    storage, _ = run.open_storage(counts.pipeline, counts.settings)
    stopped: list[Request] = []

    def stop() -> None:
        if clock.slept > 3 and not stopped:
            stopped.append(requests.send(storage, Request(requests.STOP)))

    clock.then = stop
    executor = Failing(clock, failures=1000)
    if drain:  # all that is left to do is the drain, which fails and fails
        assert _run(counts) == [1]
    assert _run(counts, executor, drain=drain) == []
    assert len(executor.tries) == 3, "at once, after 1 s, after 2 s more; the stop came before the next"
    holder = lease.read(storage)
    assert holder is not None and holder.outcome == "stopped"
    assert requests.pending(storage) == []


def test_a_drain_that_fails_is_tried_again_until_it_is_done(site, clock):
    counts = site(WEIR_CHECKPOINTS__TOLERABLE_FAILURES="3", **A_JOB_WITHOUT_ROWS)
    assert _run(counts) == [1]
    assert _run(counts, Failing(clock, failures=2), drain=True) == [4]
    storage, registry = run.open_storage(counts.pipeline, counts.settings)
    head, holder = registry.head(), lease.read(storage)
    assert head is not None and head.trigger == Trigger.DRAIN
    assert holder is not None and holder.outcome == "drained"


def test_case_12_an_epoch_that_takes_too_long_discards_what_was_acked_and_publishes_nothing(site, clock):
    class Slow(InMemoryExecutor):
        """Its acks come when the time is up."""

        def run(self, *work) -> list[Ack]:
            acks = super().run(*work)
            clock.slept += 601
            return acks

    counts = site()
    with pytest.raises(TransientError, match="Epoch 1 was aborted: it took longer than 600 s"):
        _run(counts, Slow())
    assert counts.head() is None
    assert not [name for name in counts.objects() if name.startswith(("state/", "channels/", "tables/counted/data"))]


def test_case_13_of_two_attempts_that_ack_the_loser_leaves_nothing_behind(site):
    class Speculating(InMemoryExecutor):
        """Runs every subtask twice, and hands both acks out, with some that belong nowhere; each has uploaded by
        itself."""

        def run(self, task: KeyedTask, rows: InputRows | None, columns: pa.Schema, deadline: Deadline) -> list[Ack]:
            task = replace(task, here=None)
            twice = [super(Speculating, self).run(task, rows, columns, deadline) for _ in range(2)]
            orphan = run_task.run(task, task.parallelism, iter(()))
            return [*twice[0], *twice[0], orphan, *twice[1]]

    counts = site()
    assert _run(counts, Speculating()) == [1]
    _assert_exact(counts, 1)
    _land(counts, 2)
    assert _run(counts, Speculating()) == [2]
    _assert_exact(counts, 2)
