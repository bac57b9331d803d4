"""What a pipeline requests of storage is in its checkpoints' totals, whoever coordinated it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa

from state_ops.records.acks import Ack
from state_ops.records.checkpoint import Checkpoint
from state_ops.storage.instrumented_store import NAMES
from tests.recovery.small import Bank, successor
from weir.execution.executor import Deadline, InputRows
from weir.execution.in_process import InMemoryExecutor
from weir.ownership import savepoints
from weir.restore import rewind
from weir.restore.recovery import owning
from weir.run.run import RunOptions, open_storage, run
from weir.settings import configuration as settings
from weir.task.run_task import KeyedTask


def _counted(checkpoint: Checkpoint) -> dict[str, int]:
    return {name: checkpoint.totals[name] for name in NAMES}


def _grew(before: Checkpoint, after: Checkpoint) -> bool:
    """No count has fallen, and every epoch puts, reads and lists something."""
    old, new = _counted(before), _counted(after)
    busy = ("requests_put", "requests_get", "requests_list", "requests_create", "bytes_up", "bytes_down")
    return all(new[name] >= old[name] for name in NAMES) and all(new[name] > old[name] for name in busy)


def test_totals_grow_from_epoch_to_epoch_and_from_coordinator_to_coordinator(tmp_path: Path):
    bank = Bank.at(tmp_path / "site")
    rows = [report.checkpoint for report in bank.epochs(1, 2)]
    rows += [report.checkpoint for report in bank.epochs(3)]  # another coordinator, which begins to count at zero
    assert len(rows) == 3
    assert all(_grew(row, other) for row, other in pairwise(rows))
    uploaded = rows[-1].totals["bytes_new"]
    assert rows[-1].totals["bytes_up"] > uploaded, "state, and the registry's own files"
    assert rows[-1].totals["requests_put"] > rows[-1].totals["files_new"]


class Elsewhere(InMemoryExecutor):
    """Its subtasks say that they have requested ten thousand of everything."""

    def run(self, task: KeyedTask, rows: InputRows | None, columns: pa.Schema, deadline: Deadline) -> list[Ack]:
        counts = dict.fromkeys(NAMES, 10_000)
        return [replace(ack, request_counts=counts) for ack in super().run(task, rows, columns, deadline)]


def test_what_subtasks_count_elsewhere_comes_in_with_their_acks(tmp_path: Path):
    bank = Bank.at(tmp_path / "site")
    (report,) = bank.epochs(1, executor=Elsewhere())
    subtasks = report.checkpoint.operators["accounts"].parallelism
    assert all(10_000 * subtasks <= count < 10_000 * (subtasks + 1) for count in _counted(report.checkpoint).values())


def test_a_rewind_takes_the_chain_back_and_not_what_was_requested(tmp_path: Path):
    bank = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="5")
    first, _, third = [report.checkpoint for report in bank.epochs(1, 2, 3)]
    with owning(bank.site.pipeline, bank.site.settings, InMemoryExecutor()) as owner:
        back = rewind.carry_out(owner, rewind.plan(bank.site.pipeline, bank.site.settings, 1))
    assert back.totals["epochs"] == first.totals["epochs"] and back.totals["bytes_new"] == first.totals["bytes_new"]
    assert all(_counted(back)[name] >= _counted(third)[name] for name in NAMES)
    assert _counted(back)["requests_get"] > _counted(third)["requests_get"]


def test_a_pipeline_that_starts_from_a_savepoint_counts_its_own_requests(tmp_path: Path):
    bank = Bank.at(tmp_path / "site")
    bank.epochs(*range(1, 8))
    with owning(bank.site.pipeline, bank.site.settings, InMemoryExecutor(), epochs=False) as owner:
        savepoints.save(owner.context, bank.registry.head(), "here", "test")
    origin = bank.registry.head()
    env = {**bank.site.env, "WEIR_PIPELINES__SUCCESSOR__OBJECT": "tests.recovery.small:successor",
           "WEIR_PIPELINES__SUCCESSOR__PARAMS": bank.site.env["WEIR_PIPELINES__SMALL__PARAMS"]}  # fmt: skip
    loaded = settings.load(env)
    list(run(successor, loaded, RunOptions(until_caught_up=True, start_from="small:here"), InMemoryExecutor()))
    started = open_storage(successor, loaded)[1].head()
    assert started.kind == "start" and started.totals["epochs"] == origin.totals["epochs"]
    assert 0 < started.totals["requests_put"] < origin.totals["requests_put"]


def test_a_row_of_a_release_that_did_not_count_is_gone_on_from(tmp_path: Path, monkeypatch):
    bank = Bank.at(tmp_path / "site")
    with monkeypatch.context() as older:
        older.setattr("weir.ownership.context.RunContext.requested", lambda _: {})
        bank.epochs(1, 2)
    head = bank.registry.head()
    assert head is not None and head.totals.keys() == {"epochs", "rows_read", "bytes_new", "files_new"}
    (report,) = bank.epochs(3)
    assert report.checkpoint.totals["epochs"] == 3
    assert all(_counted(report.checkpoint)[name] > 0 for name in ("requests_put", "requests_get", "bytes_up"))
