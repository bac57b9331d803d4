"""A table with keys through crashes, rewinds and promotions: it always is what the files say, netted by key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from deltalake import DeltaTable

from state_ops.errors import InputError, PipelineError, WeirError
from tests.recovery import small
from tests.recovery.conftest import weir as weir
from tests.recovery.small import Bank, InMemoryExecutor
from tests.tools.sampling import sampled
from tests.tools.stages import altered
from weir import Epoch, Pipeline, ValueState, agg, delta, expect, on_table
from weir.connectors.delta import upsert
from weir.connectors.delta.restore_version import RowsBack
from weir.operations import branch_diff, forks, promotion
from weir.ownership.pipeline_storage import open_storage
from weir.ownership.publish import publish_missing
from weir.restore import restore, rewind
from weir.run import fsck, maintenance

RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "8"}


def totals(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """What each key's total is now; a key whose total is 6 goes."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    now = rows.with_columns(state.get(rows)["total"])
    change = pl.when(pl.col("total") == 6).then(pl.lit("delete")).otherwise(pl.lit("update_postimage"))
    return now.select("id", "at", "total", change.alias("_change_type"))


keyed = altered(small.accounts, function=totals, sink=delta.upsert("totals", "id"))
pipeline = Pipeline("small", (keyed,), max_parallelism=8)


@pytest.fixture
def bank(tmp_path) -> Bank:
    plain = Bank.at(tmp_path, **RETAINED)
    return Bank(replace(plain.site, pipeline=pipeline, module=__name__))


def table(bank: Bank, name: str = "totals") -> dict[str, int]:
    rows = bank.site.table(name)
    assert len(set(rows["id"])) == len(rows)
    return dict(zip(rows["id"], rows["total"], strict=True))


def expected(*numbers: int) -> dict[str, int]:
    sums: dict[str, int] = {}
    for number in numbers:
        for key in [f"k{key}" for key in range(8)] + [f"only-{number}-{key}" for key in range(2)]:
            sums[key] = sums.get(key, 0) + number
    return {key: total for key, total in sums.items() if total != 6}


def test_the_table_has_each_keys_newest_row(bank):
    for until in range(1, 6):
        bank.epochs(until)
        assert table(bank) == expected(*range(1, until + 1))
    assert set(bank.site.table("totals").columns) == {"id", "at", "total"}
    assert not fsck.examine(pipeline, bank.site.settings).findings


def test_staged_rows_of_pruned_checkpoints_are_deleted(tmp_path):
    bank = Bank(replace(Bank.at(tmp_path).site, pipeline=pipeline))
    bank.epochs(1, 2, 3)
    storage, _ = open_storage(pipeline, bank.site.settings)
    assert storage.list_dirs("outputs/totals") == ["g1-e3"]
    assert table(bank) == expected(1, 2, 3)


def test_a_crash_between_commit_and_publish_is_made_good(bank, monkeypatch):
    bank.epochs(1)

    def crash(*asked, **options):
        raise OSError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr(upsert, "publish", crash)
        with pytest.raises(WeirError):
            bank.epochs(2)
    assert table(bank) == expected(1)
    bank.epochs(3)
    assert table(bank) == expected(1, 2, 3)


def test_a_crash_in_the_middle_of_a_publish_leaves_nothing(bank, monkeypatch):
    bank.epochs(1, 2)

    def crash(*asked, **options):
        raise OSError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr("weir.connectors.delta.table_commit.log_entries.append", crash)
        with pytest.raises(WeirError):
            bank.epochs(3)
    bank.epochs(4)
    assert table(bank) == expected(1, 2, 3, 4)
    named = {uri.rpartition("/")[2] for uri in DeltaTable(str(bank.site.storage / "tables/totals")).file_uris()}
    stored = {path.name for path in (bank.site.storage / "tables/totals/data/").glob("g*-e3/*.parquet")}
    assert len(stored - named) <= 1, "what the try that was cut off wrote is gone; what 4 has replaced is there"


def difference(now: dict[str, int], then: dict[str, int]) -> RowsBack:
    """What becomes of the rows that are there now, if those of then are to be there again."""
    changed = [key for key in now if key in then and now[key] != then[key]]
    return RowsBack(len(changed), len(now.keys() - then.keys()), len(then.keys() - now.keys()))


def test_a_rewind_takes_the_table_back_and_a_zombie_changes_nothing(bank, weir):
    bank.epochs(1, 2, 3, 4)
    rows = {row.id: row for row in bank.registry.checkpoints()}
    with maintenance.owning(pipeline, bank.site.settings, epochs=False) as owner:
        zombie = owner.context
    for to in (3, 2):
        decided = rewind.plan(pipeline, bank.site.settings, to)
        assert decided.obstacles == ()
        assert decided.tables[0].becomes == difference(expected(1, 2, 3, 4), expected(*range(1, to + 1)))
    shown = weir(bank.site, "rewind", "small", "--to", "2", "--dry-run").out
    active = Path(DeltaTable(str(bank.site.storage / "tables/totals")).file_uris()[0].removeprefix("file://"))
    aside = active.rename(active.with_suffix(".aside"))
    (lost,) = rewind.plan(pipeline, bank.site.settings, 2).tables
    assert lost.becomes is None and lost.in_words.endswith("come back"), "who has lost a file is told what the log says"
    aside.rename(active)
    assert "as of version 2: 8 rows change back, 4 rows go" in " ".join(shown.split())
    maintenance.rewind(pipeline, bank.site.settings, 2)
    assert table(bank) == expected(1, 2)
    with pytest.raises(WeirError):
        publish_missing(zombie, [rows[3], rows[4]])  # what it records is fenced
    assert table(bank) == expected(1, 2)
    bank.epochs(5)
    assert table(bank) == expected(1, 2, 3, 4, 5)


@pytest.mark.long
def test_a_branch_is_compared_by_what_its_changes_make_of_the_table(bank):
    bank.epochs(1, 2, 3, 4)
    settings = bank.site.settings
    forks.fork(pipeline, settings, "fix", 1)
    branch = Bank(replace(bank.site, pipeline=forks.branched(pipeline, settings, "fix")))
    branch.epochs()
    assert branch_diff.diff(pipeline, settings, "fix").same
    forks.drop(pipeline, settings, "fix")
    forks.fork(pipeline, settings, "fix", 1)
    other = Pipeline("small", (altered(keyed, function=doubled),), max_parallelism=8)
    Bank(replace(bank.site, pipeline=forks.branched(other, settings, "fix"))).epochs()
    (compared,) = branch_diff.diff(other, settings, "fix").tables
    assert compared.counts == {"added": 0, "removed": 0, "changed": 14}


def with_more(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    return totals(rows, state, epoch).with_columns(more=pl.lit(1, pl.Int64))


def test_a_column_that_only_a_branch_has_is_compared_too(bank):
    open_sink = delta.upsert("totals", "id", evolve="add")
    before = Pipeline("small", (replace(keyed, sink=open_sink),), max_parallelism=8)
    bank = Bank(replace(bank.site, pipeline=before))
    bank.epochs(1, 2, 3)
    settings = bank.site.settings
    forks.fork(before, settings, "fix", 1)
    after = Pipeline("small", (altered(keyed, function=with_more, sink=open_sink),), max_parallelism=8)
    Bank(replace(bank.site, pipeline=forks.branched(after, settings, "fix"))).epochs()
    compared = branch_diff.diff(after, settings, "fix")
    (of_table,) = compared.tables
    assert of_table.columns == "only the branch has more" and not any(of_table.counts.values())
    assert not compared.same and "only the branch has more" in compared.to_markdown()


def test_what_is_expected_of_a_table_is_not_asked_of_a_branchs_changes(bank):
    unique = on_table("totals", expect("ExpectColumnValuesToBeUnique", column="id"))
    strict = replace(pipeline, on_restore=(unique,))
    bank.epochs(1, 2, 3)
    settings = bank.site.settings
    forks.fork(pipeline, settings, "fix", 1)
    branch = forks.branched(strict, settings, "fix")
    Bank(replace(bank.site, pipeline=branch)).epochs()
    for of in (strict, branch):
        storage, registry = open_storage(of, settings)
        restored = restore.restore(of, settings, storage, registry, registry.checkpoints()[-1])
        assert (restored.valid, restored.expectations) == (True, 1 if of is strict else 0)


@pytest.mark.parametrize("at", sampled([3, 1]))
def test_a_promotion_makes_the_branchs_changes(bank, at):
    bank.epochs(1, 2, 3, 4)
    settings = bank.site.settings
    forks.fork(pipeline, settings, "fix", at)
    decided = promotion.with_rows(promotion.plan(pipeline, settings, "fix"), pipeline, settings)
    assert decided.obstacles == () and decided.tables[0].back is not None
    assert decided.tables[0].back.becomes == difference(expected(1, 2, 3, 4), expected(*range(1, at + 1)))
    promotion.promote(pipeline, settings, "fix", executor=InMemoryExecutor())
    assert table(bank) == expected(1, 2, 3, 4)
    bank.epochs(5)
    assert table(bank) == expected(1, 2, 3, 4, 5)
    assert not fsck.examine(pipeline, settings).damage
    promoted = max(row.id for row in bank.registry.checkpoints() if row.kind == "promotion")
    maintenance.rewind(pipeline, settings, promoted - 1)
    assert table(bank) == expected(1, 2, 3, 4)


def test_on_a_branch_the_changes_themselves_are_appended(bank):
    bank.epochs(1, 2)
    forks.fork(pipeline, bank.site.settings, "fix", 1)
    branch = Bank(replace(bank.site, pipeline=forks.branched(pipeline, bank.site.settings, "fix")))
    branch.epochs()
    storage, _ = open_storage(branch.site.pipeline, bank.site.settings)
    rows = DeltaTable(storage.full("tables/totals")).to_pyarrow_table()
    assert rows.num_rows == 10 and "_change_type" in rows.column_names
    assert table(bank) == expected(1, 2)


def doubled(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    return totals(rows, state, epoch).with_columns(total=pl.col("total") * 2)


def no_key(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    return rows.select(pl.when(pl.col("id") == "k3").then(None).otherwise(pl.col("id")).alias("id"), "amount")


def no_change(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    return rows.select("id", pl.lit("upsert").alias("_change_type"))


@pytest.mark.parametrize(
    ("function", "message"),
    [(no_key, "1 row for the table totals has no 'id'"), (no_change, "has _change_type 'upsert'")],
)
def test_rows_that_say_no_key_or_no_change_hold_the_epoch(bank, function, message):
    bad = Bank(replace(bank.site, pipeline=Pipeline("small", (altered(keyed, function=function),), max_parallelism=8)))
    with pytest.raises(InputError, match=message):
        bad.epochs(1)
    assert not bank.ids() and not (bank.site.storage / "tables").exists()


def floats(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    return rows.select(pl.col("amount").cast(pl.Float64), "id")


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (delta.upsert("totals", ["id", "absent"]), "has the key absent"),
        (delta.upsert("totals", ["id"], order_by="absent"), "has the order_by absent"),
        (delta.upsert("totals", ["id", "amount"]), "amount is double, which is no key"),
    ],
)
def test_columns_that_cannot_be_netted_are_refused(bank, sink, message):
    stage = altered(keyed, function=floats, sink=sink)
    bad = Bank(replace(bank.site, pipeline=Pipeline("small", (stage,), max_parallelism=8)))
    with pytest.raises(PipelineError, match=message):
        bad.epochs(1)
