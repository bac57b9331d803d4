"""A drill restores and replays on scratch, finds what would not come back, and leaves production as it was."""

from __future__ import annotations

import json
from dataclasses import replace

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from state_ops.checkpoints import restore_log
from state_ops.errors import WeirError
from state_ops.records.snapshot_files import STATE
from tests.recovery import small
from tests.recovery.small import Bank
from tests.tools.stages import altered
from tests.weir.dagster.without_spark import in_this_process
from weir import Epoch, Pipeline, State, Timestamp, ValueState, agg, delta, files, foreach, stage
from weir.execution.in_process import InMemoryExecutor
from weir.operations import drill as drills
from weir.ownership.pipeline_storage import open_storage

RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "2", "WEIR_SPARK__PARALLELISM": "2"}


def drilled(bank: Bank, **changes):
    return drills.drill(replace(bank.site.pipeline, **changes), bank.site.settings, InMemoryExecutor())


def everything(bank: Bank) -> set[str]:
    return {
        str(path.relative_to(bank.site.root))
        for path in bank.site.root.rglob("*")
        if path.is_file() and "restores" not in path.parts
    }


@pytest.fixture
def bank(tmp_path) -> Bank:
    bank = Bank.at(tmp_path / "site", **RETAINED)
    bank.epochs(1, 2, 3)
    return bank


def test_an_epoch_that_is_replayed_gives_the_same_state_and_leaves_production_as_it_was(bank):
    before = everything(bank)
    done = drilled(bank)
    assert (done.checkpoint, done.problems, done.not_replayed) == (3, (), None)
    assert (done.replay.parent, done.replay.rows, done.replay.entries) == (2, 10, 14)
    assert done.restored.bytes_fetched == bank.registry.head().bytes_total
    assert done.recovery_seconds == round(done.restore_seconds + done.replay.seconds, 3)
    assert everything(bank) == before | {"storage/small/coordinator/drill.json"}
    (row,) = restore_log.recorded(open_storage(bank.site.pipeline, bank.site.settings)[0])
    assert (row.purpose, row.valid, row.checkpoint_id) == ("drill", True, 3)
    bank.epochs(4)
    bank.assert_exact(1, 2, 3, 4)


def test_a_damaged_object_is_a_problem_that_names_it(bank):
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    file = next(file for file in registry.files(registry.head()) if file.kind == STATE and file.new)
    path = bank.site.root / "storage" / "small" / file.path
    path.write_bytes(path.read_bytes()[:-1])
    done = drilled(bank)
    assert len(done.problems) == 1
    assert file.path in done.problems[0]
    assert done.restored is None
    assert not restore_log.recorded(storage)[-1].valid


def test_a_drill_that_fails_times_no_recovery(bank, weir, monkeypatch):
    in_this_process(monkeypatch)
    timed = {"WEIR_RESTORE__RECOVERY_TIME_OBJECTIVE_SECONDS": "1000"}
    well = weir(bank.site, "drill", "small", **timed)
    assert well.code == 0 and well.out.splitlines()[-1].startswith("Recovery takes")
    _storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    (bank.site.storage / next(file.path for file in registry.files(registry.head()) if file.kind == STATE)).unlink()
    bank.land(4)
    failed = weir(bank.site, "drill", "small", **timed)
    assert failed.code == 1
    assert "Recovery takes" not in failed.out
    assert failed.out.splitlines()[-1].startswith("It does not come back")
    facts = json.loads(weir(bank.site, "drill", "small", "--json", **timed).out)
    assert facts["recovery_seconds"] is None
    assert [objective for objective in facts["missed"] if "recovery_time_objective_seconds" in objective], (
        "no time is no time within it"
    )


def test_code_that_makes_other_state_of_the_same_rows_is_a_problem_that_says_where(bank):
    (booked,) = bank.site.pipeline.stages

    def doubled(rows: pl.DataFrame, state, epoch):
        state.fold(rows.with_columns(amount=rows["amount"] * 2), rows=agg.count(), total=agg.sum("amount"))
        return rows.select("id", "at", "amount")

    done = drilled(bank, stages=(altered(booked, function=doubled),))
    (problem,) = done.problems
    assert "The state of accounts differs" in problem
    assert "10 changed" in problem and "Its code was changed since" in problem


@pytest.mark.long
def test_an_error_that_nobody_foresaw_is_a_problem_too(bank, monkeypatch):
    def fails(*_, **__):
        raise pa.ArrowInvalid("of some library")

    for place, name, why in (
        (drills.restore, "restore", "it was not restored"),
        (drills, "_replayed", "it failed"),
        (drills, "_compared", "it could not be compared"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, fails)
            done = drilled(bank)
        (problem,) = done.problems
        assert "ArrowInvalid: of some library" in problem and done.not_replayed == why
    assert drilled(bank).problems == ()


def test_what_cannot_be_replayed_says_why(tmp_path):
    bank = Bank.at(tmp_path / "site")
    with pytest.raises(WeirError, match="no checkpoint"):
        drilled(bank)
    bank.epochs(1)
    assert "is the first" in drilled(bank).not_replayed
    bank.epochs(2)
    assert "num_retained" in drilled(bank).not_replayed


def test_input_that_is_gone_is_said(bank):
    (bank.site.landing / "00003.parquet").unlink()
    done = drilled(bank)
    assert "00003.parquet is gone" in done.not_replayed
    assert done.problems == ()


def test_objectives_are_judged(bank):
    bank.land(4)
    done = replace(drilled(bank), loss_seconds=10.0)
    with_objectives = bank.site.settings.model_copy(
        update={
            "restore": bank.site.settings.restore.model_copy(
                update={"recovery_time_objective_seconds": 1e-6, "recovery_point_objective_seconds": 5.0}
            )
        }
    )
    assert [objective.split(",")[0].split()[0] for objective in done.misses(with_objectives)] == ["recovery", "input"]
    assert done.misses(bank.site.settings) == ()


class Seen(State):
    """When a key was seen last, and in which epoch."""

    at: Timestamp | None = None
    epoch: int = 0


@stage("seen", source=files("{landing}/*.parquet", name="landing"), key="id", state=Seen, order_by=["at"], ttl="1h")
def seen(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Nothing but what the epoch says of itself."""
    keys = rows.select("id").unique()
    state.put(keys.with_columns(at=pl.lit(epoch.now), epoch=pl.lit(int(epoch.id))))
    return rows.select("id")


def test_the_replay_is_at_the_time_and_under_the_id_of_the_epoch(tmp_path):
    bank = Bank.at(tmp_path / "site", **RETAINED)
    bank.site = replace(bank.site, pipeline=replace(bank.site.pipeline, stages=(seen,)))
    bank.epochs(1, 2)
    assert drilled(bank).problems == ()


def _reminds(after: str):
    def reminded(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        keys = rows.select("id").unique()
        state.put(keys.with_columns(epoch=pl.lit(1), at=pl.lit(epoch.now)))
        state.timers.set(keys, after=after)
        return rows.select("id")

    return reminded


@pytest.mark.parametrize("gone", [True, False])
def test_timers_are_compared_though_no_row_shows_them(tmp_path, gone):
    bank = Bank.at(tmp_path / "site", **RETAINED)
    source = files("{landing}/*.parquet", name="landing")
    timed = stage("seen", source=source, key="id", state=Seen, order_by=["at"], on_timer=_fires)(_reminds("1h"))
    bank.site = replace(bank.site, pipeline=replace(bank.site.pipeline, stages=(timed,)))
    bank.epochs(1, 2)
    later = altered(timed, function=_reminds("9h")) if gone else timed
    problems = drilled(bank, stages=(later,)).problems
    assert ("timers by processing time" in "".join(problems)) == gone


def _fires(fired: pl.DataFrame, state, epoch) -> pl.DataFrame:
    return fired.select("id")


@pytest.mark.long
def test_no_sink_outside_of_the_pipelines_storage_gets_the_rows_again(tmp_path):
    given: list[int] = []

    def take(rows: pa.Table, checkpoint: int) -> None:
        given.append(checkpoint)

    outside = replace(small.accounts, sink=foreach(take, name="outside"))
    bank = Bank.at(tmp_path / "site", **RETAINED)
    bank = Bank(replace(bank.site, pipeline=Pipeline("small", (outside,), max_parallelism=8, delivery="at_least_once")))
    bank.epochs(1, 2)
    assert drilled(bank).problems == () and given == [1, 2]
    there = tmp_path / "warehouse" / "booked"
    elsewhere = Pipeline("other", (replace(small.accounts, sink=delta.append(str(there))),), max_parallelism=8)
    bank = Bank(replace(Bank.at(tmp_path / "other", **RETAINED).site, pipeline=elsewhere))
    bank.epochs(1, 2)
    version = DeltaTable(str(there)).version()
    assert drilled(bank).problems == () and DeltaTable(str(there)).version() == version
