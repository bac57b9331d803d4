"""Promotion: the pipeline is what it would be, had the branch's code read the same input from the fork on."""

from __future__ import annotations

import json
from dataclasses import replace

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from state_ops.coordination import lease, requests, suspension
from state_ops.errors import BusyError, PipelineError, WeirError
from state_ops.records.checkpoint import PROMOTION, abandoned
from tests.recovery import small
from tests.recovery.cutting import changes_fail_from
from tests.recovery.small import Account, Bank, pipeline, until
from tests.recovery.test_forks import Branched, at, nobody_lives, ran
from tests.recovery.test_rewind import bad
from tests.tools.sampling import sampled
from weir import Epoch, Pipeline, State, ValueState, agg, aggregate, delta, stage
from weir.connectors.delta.replace_where import Range
from weir.execution.in_process import InMemoryExecutor
from weir.operations import forks, promotion
from weir.operations.promotion import promote
from weir.operations.state_import import import_rows
from weir.ownership.pipeline_storage import open_storage
from weir.run import fsck, maintenance


def promoted(bank: Branched, name: str = "fix", code=pipeline, **options):
    return promote(code, bank.site.settings, name, executor=InMemoryExecutor(), **options)


def corrected(bank: Bank, *numbers: int) -> None:
    """Files of the same names, whose amounts are a hundred times what they were."""
    for number in numbers:
        file = bank.site.landing / f"{number:05}.parquet"
        rows = pq.read_table(file)
        amounts = pa.array([100 * number] * len(rows), pa.int64())
        pq.write_table(rows.set_column(2, "amount", amounts), bank.site.landing / f".{number}")
        (bank.site.landing / f".{number}").rename(file)


def assert_replayed(bank: Bank, *numbers: int, times: dict[int, int]) -> None:
    """State and table are those of these files, some with amounts of so many times their number."""
    expected: dict[str, tuple[int, int]] = {}
    rows = []
    for number in numbers:
        amount = number * times.get(number, 1)
        for key in [f"k{key}" for key in range(8)] + [f"only-{number}-{key}" for key in range(2)]:
            before = expected.get(key, (0, 0))
            expected[key] = (before[0] + 1, before[1] + amount)
            rows.append((key, amount))
    table = bank.site.table("booked")
    assert bank.state() == expected
    assert sorted(zip(table["id"], table["amount"], strict=True)) == sorted(rows)


@pytest.fixture
def bank(tmp_path) -> Branched:
    """Five epochs of a bad deploy's amounts after one of good ones; a branch from before them."""
    bank = at(tmp_path, WEIR_CHECKPOINTS__NUM_RETAINED="8")
    bank.epochs(1)
    Bank(replace(bank.site, pipeline=bad)).epochs(2, 3, 4)
    bank.fork(at=1)
    return bank


def test_after_a_promotion_the_bad_deploy_has_never_happened(bank):
    promotion_row = promoted(bank, reason="amounts")
    assert (promotion_row.id, promotion_row.parent_id, promotion_row.kind) == (5, 1, PROMOTION)
    assert promotion_row.reason == "of small@fix: amounts"
    bank.assert_exact(1, 2, 3, 4)
    bank.epochs(5, 6)
    bank.assert_exact(1, 2, 3, 4, 5, 6)
    bank.site.assert_no_orphans()
    assert not fsck.examine(bank.site.pipeline, bank.site.settings).findings


@pytest.mark.long
def test_corrected_input_is_replayed_and_new_input_read_once(tmp_path):
    bank = at(tmp_path)
    bank.epochs(1, 2, 3, 4)
    bank.fork(at=2)
    corrected(bank, 3)
    bank.land(5)
    promoted(bank)
    assert_replayed(bank, 1, 2, 3, 4, times={3: 100})
    bank.epochs(6)
    assert_replayed(bank, 1, 2, 3, 4, 5, 6, times={3: 100})


@pytest.mark.long
def test_a_rewind_takes_a_promotion_back_and_another_brings_it_again(bank):
    promoted(bank)
    maintenance.rewind(pipeline, bank.site.settings, 4)
    assert sorted(set(bank.site.table("booked")["amount"])) == [1, 4, 6, 8]
    assert bank.state()["k0"] == (4, 1 + 4 + 6 + 8)
    maintenance.rewind(pipeline, bank.site.settings, 5)
    bank.assert_exact(1, 2, 3, 4)
    bank.epochs(5)
    bank.assert_exact(1, 2, 3, 4, 5)


@pytest.mark.long
def test_what_a_promotion_abandons_is_kept_as_long_as_a_rewind_keeps_it(bank):
    promotion_row = promoted(bank)
    assert abandoned(bank.registry.checkpoints()) == {2: promotion_row.id, 3: promotion_row.id, 4: promotion_row.id}
    bank.site = replace(bank.site, options={**bank.site.options, "WEIR_CHECKPOINTS__NUM_RETAINED": "1"})
    bank.epochs(5)
    assert bank.ids() == [1, 6], "1 belongs to the branch"
    forks.drop(pipeline, bank.site.settings, "fix")
    bank.epochs(6)
    assert bank.ids() == [7]
    bank.assert_exact(1, 2, 3, 4, 5, 6)
    bank.site.assert_no_orphans()


def test_only_what_the_branch_made_is_copied(tmp_path):
    bank = at(tmp_path)
    bank.epochs(1, 2)
    bank.fork()
    promotion_row = promoted(bank)
    files = bank.registry.files(promotion_row)
    assert files
    assert not any(file.new for file in files)
    bank.assert_exact(1, 2)


@pytest.mark.long
def test_a_branch_may_be_promoted_again(bank):
    promoted(bank)
    bank.epochs(5)
    promotion_row = promoted(bank)
    assert promotion_row.parent_id == 1
    bank.assert_exact(1, 2, 3, 4, 5)
    bank.epochs(6)
    bank.assert_exact(1, 2, 3, 4, 5, 6)
    bank.site.assert_no_orphans()


@pytest.mark.long
def test_the_coordinator_is_stopped_and_its_epochs_are_caught_up_with(bank):
    with Bank(replace(bank.site, pipeline=bad)).coordinator() as reports:
        bank.land(5)
        until(lambda: reports)
        promoted(bank)
    bank.assert_exact(1, 2, 3, 4, 5)
    storage, _ = open_storage(pipeline, bank.site.settings)
    assert storage.read_bytes("coordinator/halt.json") is None, "nobody said that it should stay away"


class Wider(State):
    """A field more."""

    rows: int = 0
    total: int = 0
    largest: int | None = None


@stage("accounts", source=small.SOURCE, key="id", state=Wider, order_by=["at"], sink=delta.append("booked"))
def wider(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """The next version of the code."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"), largest=agg.max("amount"))
    return rows.select("id", "at", "amount")


@stage("large", source=wider, key="id", state=Account, sink=delta.append("large"))
def large(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """A stage and a table that the old version has not."""
    return rows.filter(pl.col("amount") > 2).select("id", "amount")


green = Pipeline("small", (wider, large), max_parallelism=8)


def test_blue_green_with_another_schema_another_parallelism_and_a_new_table(tmp_path):
    bank = at(tmp_path, WEIR_CHECKPOINTS__NUM_RETAINED="8")
    bank.epochs(1, 2)
    bank.fork("green", at=2)
    bank.epochs(3)
    four = replace(bank.site, pipeline=green, options={**bank.site.options, "WEIR_SPARK__PARALLELISM": "4"})
    promotion_row = promote(green, four.settings, "green", executor=InMemoryExecutor())
    bank.assert_exact(1, 2, 3)
    after = Bank(four)
    after.epochs(4)
    bank.assert_exact(1, 2, 3, 4)
    assert len(after.site.table("large")) == 20
    assert (promotion_row.operators["accounts"].parallelism, set(promotion_row.sinks)) == (4, {"booked", "large"})
    maintenance.rewind(pipeline, bank.site.settings, 3)
    bank.assert_exact(1, 2, 3)
    bank.epochs()
    bank.assert_exact(1, 2, 3, 4)


totals = aggregate(
    "totals",
    small.SOURCE,
    key="id",
    rows=agg.count(),
    total=agg.sum("amount"),
    sink=delta.append("totals"),
)
counting = Pipeline("small", (totals,), max_parallelism=8)


@pytest.mark.long
def test_state_that_was_imported_since_the_fork_is_not_taken_back_in_silence(bank):
    rows = pa.table({"id": ["k0"], "rows": [9], "total": [9]})
    import_rows(pipeline, bank.site.settings, "accounts", rows, reason="by hand")
    bank.epochs(5, 6)
    with pytest.raises(WeirError, match="has taken over imported rows of state"):
        promoted(bank)
    plan = promotion.plan(pipeline, bank.site.settings, "fix")
    assert plan.taken_back[0].checkpoint == 5
    promoted(bank, accepted=plan.obstacles)
    bank.assert_exact(1, 2, 3, 4, 5, 6)
    promoted(bank)


@pytest.mark.long
def test_a_branch_that_was_promoted_since_the_fork_of_another_is_not_taken_back_in_silence(bank):
    bank.fork("late", at=1)
    promoted(bank, reason="amounts")
    with pytest.raises(WeirError, match=r"checkpoint 5 has taken over a branch \(of small@fix: amounts\)"):
        promoted(bank, "late")
    maintenance.rewind(pipeline, bank.site.settings, 4)
    promoted(bank, "late")


@pytest.mark.long
def test_a_fork_of_a_range_that_was_cut_off_and_is_asked_for_as_a_whole_is_promoted_as_a_whole(bank, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(forks, "commit", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bank.fork("later", at=1, only=Range(0, 1))
    bank.fork("later")
    assert promotion.plan(pipeline, bank.site.settings, "later").only is None
    promoted(bank, "later")
    bank.assert_exact(1, 2, 3, 4)


@pytest.mark.parametrize(
    "finer", sampled([True, False]), ids=["the branch has more epochs", "the pipeline has more epochs"]
)
def test_a_key_s_newest_row_has_the_highest_epoch_also_after_promotions(tmp_path, finer):
    bank = at(tmp_path, WEIR_CHECKPOINTS__NUM_RETAINED="9")
    single, four = (
        Bank(replace(bank.site, pipeline=counting, options={**bank.site.options, "WEIR_EPOCH__MAX_FILES": count}))
        for count in ("1", "4")
    )
    production, branch = (four, single) if finer else (single, four)
    production.epochs(1)
    forks.fork(counting, bank.site.settings, "fix", 1)
    production.epochs(2, 3, 4, 5)
    promotion_row = promote(counting, branch.site.settings, "fix", executor=InMemoryExecutor())
    assert promotion_row.id == 6, "above the pipeline's 2 or 5 and the branch's 5 or 2"
    production.epochs(6)
    maintenance.rewind(counting, bank.site.settings, promotion_row.id)
    production.epochs(7)
    table = bank.site.table("totals")
    newest = table.loc[table.groupby("id")["epoch"].idxmax()].set_index("id")
    assert newest["rows"].to_dict() == table.groupby("id")["rows"].max().to_dict()
    assert newest.loc["k0", "total"] == sum(range(1, 8))


def test_what_others_wrote_to_a_table_is_an_obstacle(bank):
    write_deltalake(str(bank.site.storage / "tables" / "booked"), bank.site.table("booked")[:1], mode="append")
    with pytest.raises(WeirError, match="others have committed to the table booked"):
        promoted(bank)
    assert bank.registry.head().id == 4
    promoted(bank, accepted=promotion.plan(pipeline, bank.site.settings, "fix").obstacles)
    bank.assert_exact(1, 2, 3, 4)


def test_only_obstacles_that_somebody_was_shown_are_accepted(bank, monkeypatch):
    """Others commit once more while the branch catches up, and more often than the obstacle names."""
    table, catch_up = str(bank.site.storage / "tables" / "booked"), promotion.catch_up
    for _ in range(4):
        write_deltalake(table, bank.site.table("booked")[:1], mode="append")
    shown = promotion.plan(pipeline, bank.site.settings, "fix").obstacles
    monkeypatch.setattr(
        promotion,
        "catch_up",
        lambda *given: (write_deltalake(table, bank.site.table("booked")[:1], mode="append"), catch_up(*given)),
    )
    with pytest.raises(WeirError, match="others have committed to the table booked"):
        promoted(bank, accepted=shown)
    assert bank.registry.head().id == 4


def test_a_branch_of_what_was_abandoned_is_not_promoted(bank):
    bank.fork("late", at=3)
    maintenance.rewind(pipeline, bank.site.settings, 1)
    with pytest.raises(WeirError, match="forked from checkpoint 3, which checkpoint 5 has abandoned"):
        promoted(bank, "late")


def test_columns_that_the_table_has_not_are_refused_before_anything_is_stopped(bank):
    @stage("accounts", source=small.SOURCE, key="id", state=Account, sink=delta.append("booked"))
    def other(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
        return rows.select("id", "amount")

    code = Pipeline("small", (other,), max_parallelism=8)
    ran(bank.branch("fix", code))
    with pytest.raises(PipelineError, match="at is gone"):
        promoted(bank, code=code)
    assert bank.registry.head().id == 4


@pytest.mark.parametrize("step", sampled([43, 31, 11]))
def test_cut_off_anywhere_it_is_finished_by_the_next_run_or_was_none(tmp_path, monkeypatch, step):
    first = at(tmp_path / "first", WEIR_CHECKPOINTS__NUM_RETAINED="8")
    first.epochs(1)
    Bank(replace(first.site, pipeline=bad)).epochs(2, 3)
    first.fork(at=1)
    ran(first.branch("fix"))
    outcomes = set()
    for stop_at in range(0, 300, step):
        bank = Branched(first.site.copied_to(tmp_path / f"{stop_at}"))
        done = False
        with changes_fail_from(monkeypatch, stop_at):
            try:
                promoted(bank)
                done = True
            except (WeirError, OSError):
                pass
        nobody_lives(bank)
        head = bank.registry.head()
        outcomes.add(head.kind)
        if head.kind != PROMOTION:
            assert (head.id, bank.state()["k0"]) == (3, (3, 1 + 4 + 6)), "production is untouched"
            promoted(bank)
        bank.epochs(4)
        bank.assert_exact(1, 2, 3, 4)
        bank.site.assert_no_orphans()
        if done:
            break
    assert stop_at > 30
    assert outcomes == {"checkpoint", PROMOTION}


def test_a_halt_of_a_promotion_that_died_keeps_nobody_away(bank):
    storage, _ = open_storage(pipeline, bank.site.settings)
    with suspension.during(storage, "a branch is promoted"):
        assert suspension.read(storage) is not None
        note = json.loads(storage.read_bytes(suspension.PATH))
        note["process"][2] = "another life"
        storage.put_bytes(suspension.PATH, json.dumps(note).encode())
        assert suspension.read(storage) is None, "sensors begin again, and finish what it left"


def test_nobody_promotes_what_somebody_runs(bank):
    with bank.branch("fix").coordinator():
        storage, _ = open_storage(bank.branch("fix").site.pipeline, bank.site.settings)
        until(lambda: lease.alive(lease.read(storage)))
        with pytest.raises(BusyError, match="small@fix"):
            promoted(bank)
        requests.send(storage, requests.Request("stop"))
    assert bank.registry.head().id == 4
