"""What an epoch's control plane asks of storage: how many requests, how many of them one after the other, what waits
for which. Counted, not timed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

from state_ops.checkpoints import registry
from state_ops.delta import fenced_table, log_cleanup
from state_ops.snapshots import stage_upload
from state_ops.storage.storage import Storage
from tests.recovery.small import Bank
from weir.connectors.delta import append
from weir.epoch import steps, transitions
from weir.epoch.step_runner import Ended
from weir.epoch.step_runner import run as run_step
from weir.execution.in_process import InMemoryExecutor
from weir.ownership import publish
from weir.run.run import RunOptions, open_storage, run

_REQUESTS = ("put_file", "put_bytes", "create", "get_file", "read_bytes", "digest", "parquet_footer", "size", "list",
             "list_dirs", "delete", "delete_files", "delete_tree")  # fmt: skip
_EPOCHS, _WARM = 7, range(4, 8)  # no table's log needs upkeep in the warm ones

# Requests and the longest chain of one epoch with one stage of two subtasks, one sink, one checkpoint pruned.
ALLOWED = {"seal": (6, 4), "commit": (6, 5), "publish": (5, 5), "prune": (11, 7)}
ALLOWED_CHAIN = 26  # from one report to the next


class Inline:
    """Every step runs where it is started."""

    def __init__(self) -> None:
        self._ended: list[Ended] = []

    def start(self, slot: str, step: Callable[[], object]) -> None:
        self._ended.append(run_step(slot, step))

    def next(self, seconds: float) -> Ended | None:  # noqa: ARG002
        return self._ended.pop(0) if self._ended else None


class Requests:
    """Counts the calls of storage. What runs at once is run one after the other here, and is as long as the longest of
    it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._thread = threading.current_thread()
        self.asked: Counter[str] = Counter()
        self.chain = 0
        self.through_delta_rs: Counter[str] = Counter()
        self.phases: dict[str, tuple[int, int]] = {}
        for name in _REQUESTS:
            monkeypatch.setattr(Storage, name, self._counting(getattr(Storage, name), name))
        for owner, name in ((DeltaTable, "update_incremental"), (DeltaTable, "transaction_version"),
                            (fenced_table, "open_table"), (fenced_table, "commit"), (fenced_table, "exists")):  # fmt: skip
            monkeypatch.setattr(owner, name, self._seen(getattr(owner, name), name))
        for module in (registry, publish):
            monkeypatch.setattr(module, "at_once", self._at_once)
        for module in (append, stage_upload):
            monkeypatch.setattr(module, "together", self._together)
        for module, name, phase in ((steps, "completed", "seal"), (transitions, "commit", "commit"),
                                    (steps, "publish_missing", "publish"), (steps, "prune", "prune")):  # fmt: skip
            monkeypatch.setattr(module, name, self._phase(getattr(module, name), phase))

    def _counting(self, real: Callable, name: str) -> Callable:
        def counting(*args, **kwargs):
            nothing = name == "delete_files" and not args[1]
            if threading.current_thread() is self._thread and not nothing:  # not the heartbeat's
                self.asked[name] += 1
                self.chain += 1
            return real(*args, **kwargs)

        return counting

    def _seen(self, real: Callable, name: str) -> Callable:
        def seen(*args, **kwargs):
            self.through_delta_rs[name] += 1
            return real(*args, **kwargs)

        return seen

    def _at_once(self, steps):
        since, ends, results = self.chain, [self.chain], []
        for step in steps:
            self.chain = since
            results.append(step())
            ends.append(self.chain)
        self.chain = max(ends)
        return results

    def _together(self, move, items, **_):
        never = threading.Event()
        return self._at_once([lambda item=item: move(item, never) for item in items])

    def _phase(self, real: Callable, phase: str) -> Callable:
        def measured(*args, **kwargs):
            asked, chain = self.asked.total(), self.chain
            result = real(*args, **kwargs)
            self.phases[phase] = (self.asked.total() - asked, self.chain - chain)
            return result

        return measured


@pytest.fixture
def warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[dict, int, Counter[str]]]]:
    """By warm epoch: requests and chain of each phase, the chain of all of it, calls that went through delta-rs."""
    options = {
        "WEIR_SPARK__PARALLELISM": "2",
        "WEIR_CHECKPOINTS__MAX_CONCURRENT": "1",
    }
    bank = Bank.at(tmp_path / "site", **options)
    bank.land(*range(1, _EPOCHS + 1))
    seen, measured = Requests(monkeypatch), []
    asked = RunOptions(until_caught_up=True)
    for report in run(bank.site.pipeline, bank.site.settings, asked, InMemoryExecutor(), Inline()):
        if report.checkpoint.id in _WARM:
            assert report.pruned
            measured.append((dict(seen.phases), seen.chain, Counter(seen.through_delta_rs)))
        seen.chain = 0
        seen.through_delta_rs.clear()
    monkeypatch.undo()
    bank.assert_exact(*range(1, _EPOCHS + 1))
    yield measured


def test_a_warm_epoch_asks_storage_few_things_and_few_one_after_the_other(warm):
    assert len(warm) == len(_WARM)
    for phases, chain, _ in warm:
        assert {phase: count for phase, count in phases.items() if _more(count, ALLOWED[phase])} == {}
        assert chain <= ALLOWED_CHAIN
    assert warm[0][0] == warm[-1][0], "nothing grows"


def _more(count: tuple[int, int], allowed: tuple[int, int]) -> bool:
    return count[0] > allowed[0] or count[1] > allowed[1]


def test_a_warm_epoch_opens_no_delta_table(warm):
    """delta-rs lists and replays a log each time, and holds Python's lock while it waits."""
    assert [through for _, _, through in warm] == [Counter()] * len(_WARM)


def test_no_commit_waits_for_the_upkeep_of_the_logs(tmp_path, monkeypatch):
    """Nor does anything else of an epoch: it is a step of its own."""
    monkeypatch.setattr(log_cleanup, "INTERVAL", 4)
    bank, under_way, within = Bank.at(tmp_path / "site"), [], []
    bank.land(*range(1, _EPOCHS + 1))
    for module, name in ((transitions, "commit"), (steps, "publish"), (steps, "finish")):
        monkeypatch.setattr(module, name, _noted(getattr(module, name), name, under_way))
    clean_up = log_cleanup.clean_up
    monkeypatch.setattr(log_cleanup, "clean_up", lambda *given: within.append(list(under_way)) or clean_up(*given))
    list(run(bank.site.pipeline, bank.site.settings, RunOptions(until_caught_up=True), InMemoryExecutor(), Inline()))
    assert len(within) >= 2 * 3, "in the logs of three tables"
    assert not any(within)
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    logs = [log_cleanup.log_names(storage, f"registry/{table}") for table in ("checkpoints", "state_files")]
    assert max(map(len, logs)) <= 2 * log_cleanup.INTERVAL + 5


def _noted(real: Callable, name: str, under_way: list[str]) -> Callable:
    def noted(*args, **kwargs):
        under_way.append(name)
        try:
            return real(*args, **kwargs)
        finally:
            under_way.remove(name)

    return noted
