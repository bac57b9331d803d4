"""A table whose partitions an epoch's rows replace, through crashes, rewinds and promotions."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from state_ops.errors import WeirError
from tests.recovery import small
from tests.recovery.small import Bank, InMemoryExecutor
from tests.tools.sampling import sampled
from tests.tools.stages import altered
from weir import Epoch, Pipeline, ValueState, agg, delta
from weir.connectors.delta import replace_partitions
from weir.connectors.delta.restore_version import RowsBack
from weir.operations import branch_diff, forks, promotion
from weir.ownership.publish import publish_missing
from weir.restore import rewind
from weir.run import fsck, maintenance

RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "8"}


def parity(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Files of odd and of even numbers replace each other's rows, and those of the partition of all."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    odd = rows.with_columns(part=pl.when(pl.col("amount") % 2 == 1).then(pl.lit("odd")))
    return pl.concat([odd, rows.head(1).with_columns(part=pl.lit("newest"))]).select("id", "amount", "part")


stage = altered(small.accounts, function=parity, sink=delta.replace("parts", "part"))
pipeline = Pipeline("small", (stage,), max_parallelism=8)


@pytest.fixture
def bank(tmp_path) -> Bank:
    plain = Bank.at(tmp_path, **RETAINED)
    return Bank(replace(plain.site, pipeline=pipeline))


def amounts(bank: Bank) -> dict[str | None, set[int]]:
    rows = DeltaTable(str(bank.site.storage / "tables" / "parts")).to_pyarrow_table()
    table = pl.DataFrame({"part": rows["part"].to_pylist(), "amount": rows["amount"].to_pylist()})
    assert len(table.filter(pl.col("part").is_null())) in (0, 10)
    return {part: set(group["amount"]) for (part,), group in table.group_by("part")}


def expected(*numbers: int) -> dict[str | None, set[int]]:
    parts: dict[str | None, set[int]] = {}
    for number in numbers:
        parts["odd" if number % 2 else None] = {number}
        parts["newest"] = {number}
    return parts


def test_each_partition_has_the_rows_of_the_newest_epoch_that_had_it(bank):
    for until in range(1, 6):
        bank.epochs(until)
        assert amounts(bank) == expected(*range(1, until + 1))
    assert not fsck.examine(pipeline, bank.site.settings).findings


def test_a_crash_between_commit_and_publish_is_made_good(bank, monkeypatch):
    bank.epochs(1, 2)

    def crash(*asked, **options):
        raise OSError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr(replace_partitions, "publish", crash)
        with pytest.raises(WeirError):
            bank.epochs(3)
    assert amounts(bank) == expected(1, 2)
    bank.epochs(4)
    assert amounts(bank) == expected(1, 2, 3, 4)


def test_a_foreign_optimize_in_between_is_respected(bank, monkeypatch):
    bank.epochs(1, 2)
    named, optimized = replace_partitions.active_files, []

    def overtaken(handle):
        files = named(handle)
        if not optimized:
            table = DeltaTable(str(bank.site.storage / "tables" / "parts"))
            optimized.append(table.optimize.z_order(["id"]))
        return files

    monkeypatch.setattr(replace_partitions, "active_files", overtaken)
    bank.epochs(3)
    assert optimized[0]["numFilesRemoved"]
    assert amounts(bank) == expected(1, 2, 3)


def test_rows_of_others_that_come_in_between_are_replaced(bank, monkeypatch):
    """Also where the partition had none before, so that the commit removes nothing."""
    within, written = replace_partitions.within, []

    def overtaken(*asked):
        files = within(*asked)
        if not written:
            rows = pa.table({"id": ["theirs"], "amount": [7], "part": ["odd"]})
            write_deltalake(str(bank.site.storage / "tables" / "parts"), rows, mode="append")
            written.append(rows)
        return files

    monkeypatch.setattr(replace_partitions, "within", overtaken)
    bank.epochs(3)
    assert amounts(bank) == expected(3)


@pytest.mark.long
def test_a_rewind_and_a_zombie(bank):
    bank.epochs(1, 2, 3, 4)
    rows = {row.id: row for row in bank.registry.checkpoints()}
    with maintenance.owning(pipeline, bank.site.settings, epochs=False) as owner:
        zombie = owner.context
    path = str(bank.site.storage / "tables" / "parts")
    (parts,) = rewind.plan(pipeline, bank.site.settings, 2).tables
    now, then = (pl.from_arrow(DeltaTable(path, version).to_pyarrow_table()) for version in (None, parts.then))
    gone, come = (
        len(one.join(other, on=one.columns, how="anti", nulls_equal=True)) for one, other in ((now, then), (then, now))
    )
    assert parts.becomes == RowsBack(0, gone, come) and gone > 20
    maintenance.rewind(pipeline, bank.site.settings, 2)
    assert amounts(bank) == expected(1, 2)
    with pytest.raises(WeirError):
        publish_missing(zombie, [rows[3], rows[4]])
    assert amounts(bank) == expected(1, 2)
    bank.epochs(5)
    assert amounts(bank) == expected(1, 2, 3, 4, 5)


@pytest.mark.long
@pytest.mark.parametrize("at", sampled([3, 1]))
def test_a_promotion_replaces_the_partitions_that_the_branch_has(bank, at):
    bank.epochs(1, 2, 3, 4)
    settings = bank.site.settings
    forks.fork(pipeline, settings, "fix", at)
    branch = Bank(replace(bank.site, pipeline=forks.branched(pipeline, settings, "fix")))
    branch.epochs()
    assert branch_diff.diff(pipeline, settings, "fix").same
    promotion.promote(pipeline, settings, "fix", executor=InMemoryExecutor())
    assert amounts(bank) == expected(1, 2, 3, 4)
    bank.epochs(5)
    assert amounts(bank) == expected(1, 2, 3, 4, 5)
    assert not fsck.examine(pipeline, settings).damage
