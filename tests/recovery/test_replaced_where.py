"""A table of which an epoch's rows replace those that a condition keeps, and no other's: through crashes, rewinds and
promotions."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from state_ops.delta.log_entries import active_files
from state_ops.errors import InputError, PipelineError, WeirError
from state_ops.storage.storage import Storage
from tests.recovery import small
from tests.recovery.small import Bank, InMemoryExecutor
from tests.tools.sampling import sampled
from tests.tools.stages import altered
from weir import Epoch, Pipeline, ValueState, agg, delta
from weir.connectors.delta import replace_partitions
from weir.connectors.delta.predicates import apart, predicate
from weir.operations import branch_diff, forks, promotion
from weir.ownership.publish import publish_missing
from weir.run import fsck, maintenance

RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "8"}
CONDITION = "part = 'ours' AND amount < 100"
SCHEMA = pa.schema([("id", pa.string()), ("amount", pa.int64()), ("part", pa.string())])
MIXED = [("old", 0, "ours"), ("kept", 1, "theirs"), ("null", 2, None), ("large", 500, "ours")]
WHOLE = [("old", 1, "ours"), ("old", 2, "ours")]
OTHERS = [("others", 1, "theirs"), ("more", 1, "theirs")]
STAYS = sorted([*MIXED[1:], *OTHERS], key=str)


def ours(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """The rows of a file, of the third one none."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    return rows.filter(pl.col("amount") != 3).select("id", "amount", part=pl.lit("ours"))


stage = altered(small.accounts, function=ours, sink=delta.replace("parts", where=CONDITION))
pipeline = Pipeline("small", (stage,), max_parallelism=8)


@pytest.fixture
def bank(tmp_path) -> Bank:
    """Others have written a file with rows that the condition keeps and rows that it does not, one of the first kind
    alone, and one of the second."""
    plain = Bank.at(tmp_path, **RETAINED)
    for rows in (MIXED, WHOLE, OTHERS):
        table = pa.table([pa.array(column) for column in zip(*rows, strict=True)], schema=SCHEMA)
        write_deltalake(str(plain.site.storage / "tables" / "parts"), table, mode="append")
    return Bank(replace(plain.site, pipeline=pipeline))


def table(bank: Bank) -> DeltaTable:
    return DeltaTable(str(bank.site.storage / "tables" / "parts"))


def rows(bank: Bank) -> list[tuple]:
    return sorted(
        (tuple(row.values()) for row in table(bank).to_pyarrow_table(columns=SCHEMA.names).to_pylist()), key=str
    )


def expected(newest: int) -> list[tuple]:
    ids = [f"k{key}" for key in range(8)] + [f"only-{newest}-{key}" for key in range(2)]
    return sorted([*STAYS, *((id, newest, "ours") for id in ids)], key=str)


def test_each_epoch_replaces_what_the_condition_keeps_and_nothing_else(bank):
    for until, newest in ((1, 1), (2, 2), (3, 2), (4, 4)):
        bank.epochs(until)
        assert rows(bank) == expected(newest)
    assert not fsck.examine(pipeline, bank.site.settings).findings


def test_files_without_such_rows_are_neither_read_nor_written(bank, monkeypatch):
    from weir.connectors.delta import predicates

    before, read = set(table(bank).file_uris()), []
    original = predicates.local_file
    monkeypatch.setattr(predicates, "local_file", lambda *asked: (read.append(asked[2].path), original(*asked))[1])
    bank.epochs(1)
    left = before & set(table(bank).file_uris())
    (others,) = left
    assert pl.read_parquet(others)["part"].unique().to_list() == ["theirs"]
    read.clear()
    bank.epochs(2)
    (others,) = left & set(table(bank).file_uris())
    assert read and not any(path in others for path in read)


def crash(*asked, **options):
    raise OSError("cut off")


@pytest.mark.parametrize("place", ["replace_partitions.publish", "table_commit._put_after"])
def test_a_publish_that_is_cut_off_is_made_good(bank, monkeypatch, place):
    bank.epochs(1)
    with monkeypatch.context() as patched:
        patched.setattr(f"weir.connectors.delta.{place}", crash)
        with pytest.raises(WeirError):
            bank.epochs(2)
    assert rows(bank) == expected(1)
    bank.epochs(4)
    assert rows(bank) == expected(4)
    assert not fsck.examine(pipeline, bank.site.settings).findings


def test_what_a_try_that_was_cut_off_has_written_is_removed(bank, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("weir.connectors.delta.table_commit._put_after", crash)
        with pytest.raises(WeirError):
            bank.epochs(1)
    bank.epochs(3)  # without rows
    stored = {path.name for path in (bank.site.storage / "tables/parts/data").glob("g*-e1/**/*.parquet")}
    assert stored == {uri.rpartition("/")[2] for uri in table(bank).file_uris() if "-e1/" in uri}


def test_others_in_between_are_respected(bank, monkeypatch):
    """An OPTIMIZE, and rows that the condition keeps."""
    bank.epochs(1)
    original, written = replace_partitions.without, []

    def overtaken(*asked):
        result = original(*asked)
        if not written:
            written.append(table(bank).optimize.z_order(["id"]))
            write_deltalake(
                table(bank).table_uri, pa.table({"id": ["x"], "amount": [9], "part": ["ours"]}), mode="append"
            )
        return result

    monkeypatch.setattr(replace_partitions, "without", overtaken)
    bank.epochs(2)
    assert written[0]["numFilesRemoved"]
    assert rows(bank) == expected(2)


def test_a_rewind_and_a_zombie(bank):
    bank.epochs(1, 2, 4, 5)
    records = {row.id: row for row in bank.registry.checkpoints()}
    with maintenance.owning(pipeline, bank.site.settings, epochs=False) as owner:
        zombie = owner.context
    maintenance.rewind(pipeline, bank.site.settings, 2)
    assert rows(bank) == expected(2)
    with pytest.raises(WeirError):
        publish_missing(zombie, [records[3], records[4]])
    assert rows(bank) == expected(2)
    bank.epochs(6)
    assert rows(bank) == expected(6)


@pytest.mark.parametrize("at", sampled([3, 1]))
def test_a_promotion_replaces_what_the_condition_keeps(bank, at):
    bank.epochs(1, 2, 4, 5)
    settings = bank.site.settings
    forks.fork(pipeline, settings, "fix", at)
    branch = Bank(replace(bank.site, pipeline=forks.branched(pipeline, settings, "fix")))
    branch.epochs()
    assert branch_diff.diff(pipeline, settings, "fix").same
    promotion.promote(pipeline, settings, "fix", executor=InMemoryExecutor())
    assert rows(bank) == expected(5)
    bank.epochs(6)
    assert rows(bank) == expected(6)
    assert not fsck.examine(pipeline, settings).damage
    promoted = max(row.id for row in bank.registry.checkpoints() if row.kind == "promotion")
    maintenance.rewind(pipeline, settings, promoted - 1)
    assert rows(bank) == expected(5)


@pytest.mark.long
def test_another_code_of_a_branch_is_told_and_promoted(bank):
    """It hands out other amounts, of which those at the fork are replaced too."""

    def doubled(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        return ours(rows, state, epoch).with_columns(pl.col("amount") * 2)

    bank.epochs(1, 2)
    settings = bank.site.settings
    forks.fork(pipeline, settings, "fix", 1)
    other = Pipeline("small", (altered(stage, function=doubled),), max_parallelism=8)
    Bank(replace(bank.site, pipeline=forks.branched(other, settings, "fix"))).epochs()
    (compared,) = branch_diff.diff(other, settings, "fix").tables
    assert compared.counts == {"added": 0, "removed": 0, "changed": 10}
    promotion.promote(other, settings, "fix", executor=InMemoryExecutor())
    wanted = [(id, amount * 2 if part == "ours" and amount < 100 else amount, part) for id, amount, part in expected(2)]
    assert rows(bank) == sorted(wanted, key=str)


def test_rows_that_the_condition_does_not_keep_hold_the_epoch(bank):
    with pytest.raises(InputError, match=r"\d+ rows for the table parts do not satisfy part = 'ours' AND amount < 100"):
        bank.land(100)
        bank.epochs(1)  # files come by name: 1 is published, 100 is not
    assert bank.ids() == [1] and rows(bank) == expected(1)


def test_conditions_that_cannot_be_told_are_refused_before_the_first_row(bank):
    for condition, why in (("absent = 1", "absent"), ("rand() < 1", "rand")):
        sink = delta.replace("parts", where=condition)
        bad = Bank(replace(bank.site, pipeline=Pipeline("small", (replace(stage, sink=sink),), max_parallelism=8)))
        with pytest.raises(PipelineError, match=f"What rows for the table parts replace cannot be evaluated: .*{why}"):
            bad.epochs(1)
    assert not bank.ids()
    for wrong in ({}, {"by": "part", "where": CONDITION}, {"by": "part", "partition_by": "part"}):
        with pytest.raises(PipelineError, match="It is not clear what rows for the table parts replace"):
            delta.replace("parts", **wrong)


CONDITIONS = [
    "true", "n > 3", "n = 3 OR s LIKE 'a%'", "s IS NULL", "NOT (s = 'b')", "d = DATE '2024-01-02'", "f > 0.5 AND n < 5",
    "d BETWEEN DATE '2024-01-01' AND DATE '2024-01-02' AND n IN (1, 2)", "n % 2 = 0",
]  # fmt: skip


@pytest.mark.parametrize("partition_by", [None, ["d"]])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_files_are_taken_apart_as_sql_says(tmp_path, condition, partition_by):
    """Rows of ten files of others, with nulls, in files by day where the table is partitioned."""
    columns = pa.schema([("n", pa.int64()), ("s", pa.string()), ("d", pa.date32()), ("f", pa.float64()), ("id", pa.int64())])  # fmt: skip
    storage = Storage(str(tmp_path / "p"))
    everything = []
    for number in range(10):
        of_file = [
            (number if number < 5 else row, [None, "a", "b", "ab"][(row * number) % 4], date(2024, 1, 1 + (number + row // 4) % 3), row / 7, number * 8 + row)
            for row in range(8)
        ]  # fmt: skip
        everything += of_file
        given = pa.Table.from_pylist([dict(zip(columns.names, row, strict=True)) for row in of_file], columns)
        write_deltalake(storage.full("tables/out"), given, mode="append", partition_by=partition_by)
    handle = DeltaTable(storage.full("tables/out"))
    active = replace_partitions.active_files(handle)
    goes, rests = apart(storage, predicate("out", condition, handle), "data", active, tmp_path / "scratch")
    stays = {file.path for file in active} - {file.path for file in goes} | {file.path for file in rests}
    ids = [id for path in stays for id in pl.read_parquet(tmp_path / "p/tables/out" / path)["id"]]
    database = duckdb.connect()
    database.register("everything", pa.Table.from_pylist([dict(zip(columns.names, row, strict=True)) for row in everything], columns))  # fmt: skip
    wanted = database.sql(f"SELECT id FROM everything WHERE ({condition}) IS NOT true ORDER BY id").fetchall()
    assert sorted(ids) == [id for (id,) in wanted]
    assert all(file.partition == () if partition_by is None else file.partition for file in rests)


def test_what_delta_rs_may_take_for_another_text_is_read(tmp_path):
    """In an entry that escapes characters by number it takes U+20BB7 for U+10BB7."""
    storage = Storage(str(tmp_path / "p"))
    for text in ("\U00010bb7", "\U00020bb7"):
        write_deltalake(storage.full("tables/out"), pa.table({"s": [text]}), mode="append")
    entry = tmp_path / f"p/tables/out/_delta_log/{1:020}.json"
    entry.write_text("\n".join(json.dumps(json.loads(line)) for line in entry.read_text().splitlines()))
    handle = DeltaTable(storage.full("tables/out"))
    goes, _ = apart(storage, predicate("out", "s = '\U00010bb7'", handle), "data", active_files(handle), tmp_path / "s")
    assert [pl.read_parquet(tmp_path / "p/tables/out" / file.path)["s"].to_list() for file in goes] == [["\U00010bb7"]]
