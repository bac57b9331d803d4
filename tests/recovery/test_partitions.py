"""Tables whose files have one partition each, and statistics by which readers skip files."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, date, datetime

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from state_ops.delta.log_entries import active_files
from state_ops.errors import InputError, PipelineError, WeirError
from state_ops.moments import to_micros
from state_ops.storage.storage import Storage
from tests.recovery import small
from tests.recovery.small import Account, Bank, InMemoryExecutor
from tests.tools.stages import altered, with_input
from weir import Epoch, Pipeline, ValueState, agg, delta, stage
from weir.connectors.delta.replace_where import Range, touched
from weir.connectors.delta.statistics import statistics
from weir.gates.restore_gates import newest_rows
from weir.operations import forks, promotion
from weir.restore import rewind
from weir.run import fsck, maintenance

RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "8"}
BY = ["day", "kind", "odd"]


@stage(
    "accounts",
    source=small.SOURCE,
    key="id",
    state=Account,
    order_by=["at"],
    sink=delta.append("booked", partition_by=BY),
)
def spread(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Rows of several days and kinds, of which one is null and one has signs that paths may not have."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    kind = pl.when(pl.col("at") % 3 == 0).then(pl.lit("a/b c%é")).when(pl.col("at") % 3 == 1).then(pl.lit("x"))
    return rows.select(
        "id",
        "at",
        "amount",
        day=pl.lit(date(2026, 1, 1)) + pl.duration(days=pl.col("at") % 2),
        kind=kind,
        odd=pl.col("at") % 2 == 1,
    )


totals = altered(small.accounts, input=spread, uid="after", sink=delta.append("again"))
pipeline = Pipeline("small", (spread, totals), max_parallelism=8)
COLUMNS = 'id, "at", amount, day, kind, odd'


@pytest.fixture
def bank(tmp_path) -> Bank:
    plain = Bank.at(tmp_path, **RETAINED)
    return Bank(replace(plain.site, pipeline=pipeline))


def handle(bank: Bank, table: str = "booked") -> DeltaTable:
    return DeltaTable(str(bank.site.storage / "tables" / table))


def rows(bank: Bank) -> list[tuple]:
    dataset = handle(bank).to_pyarrow_dataset()  # noqa: F841  named in the query
    return duckdb.sql(f"SELECT {COLUMNS} FROM dataset ORDER BY ALL").fetchall()


def expected(*numbers: int) -> list[tuple]:
    """The same, by DuckDB alone, from the files that have landed."""
    files = [f"{number:05}.parquet" for number in numbers]
    return duckdb.sql(
        'SELECT id, "at", amount, (DATE \'2026-01-01\' + CAST("at" % 2 AS INTEGER)) AS day, '
        "CASE \"at\" % 3 WHEN 0 THEN 'a/b c%é' WHEN 1 THEN 'x' END AS kind, \"at\" % 2 = 1 AS odd "
        f"FROM read_parquet({files}) ORDER BY ALL"
    ).fetchall()


def read(bank: Bank, *numbers: int, monkeypatch) -> None:
    monkeypatch.chdir(bank.site.landing)
    assert rows(bank) == expected(*numbers)


def test_delta_rs_and_duckdb_read_each_row_once_and_stages_read_them_too(bank, monkeypatch):
    bank.epochs(1, 2, 3)
    read(bank, 1, 2, 3, monkeypatch=monkeypatch)
    assert handle(bank).metadata().partition_columns == BY
    assert len(bank.site.table("again")) == 30
    report = fsck.examine(pipeline, bank.site.settings)
    assert not report.findings


def test_readers_skip_partitions_and_files_by_statistics(bank):
    bank.epochs(1, 2, 3)
    dataset = handle(bank).to_pyarrow_dataset()
    everything = len(list(dataset.get_fragments()))
    of_day = list(dataset.get_fragments(ds.field("day") == date(2026, 1, 2)))
    assert 0 < len(of_day) < everything * 0.7
    of_amount = list(dataset.get_fragments(ds.field("amount") == 2))
    assert 0 < len(of_amount) < everything * 0.5
    assert not list(dataset.get_fragments(ds.field("id") > "only-9"))
    null_counts = pa.table(handle(bank).get_add_actions(flatten=True))
    assert set(null_counts["null_count.amount"].to_pylist()) == {0}


@pytest.mark.long
def test_an_optimized_table_still_gets_rows_and_goes_back(bank, monkeypatch):
    bank.epochs(1, 2)
    handle(bank).optimize.compact()
    bank.epochs(3)
    read(bank, 1, 2, 3, monkeypatch=monkeypatch)
    obstacles = rewind.plan(pipeline, bank.site.settings, 1).obstacles
    assert obstacles, "somebody has committed in between"
    maintenance.rewind(pipeline, bank.site.settings, 1, accepted=obstacles)
    read(bank, 1, monkeypatch=monkeypatch)
    bank.epochs(4)
    read(bank, 1, 2, 3, 4, monkeypatch=monkeypatch)


def test_a_rewind_and_a_promotion_keep_partitions(bank, monkeypatch):
    bank.epochs(1, 2, 3)
    maintenance.rewind(pipeline, bank.site.settings, 1)
    read(bank, 1, monkeypatch=monkeypatch)
    maintenance.rewind(pipeline, bank.site.settings, 3)
    read(bank, 1, 2, 3, monkeypatch=monkeypatch)
    dataset = handle(bank).to_pyarrow_dataset()
    assert len(list(dataset.get_fragments(ds.field("amount") == 3))) < len(list(dataset.get_fragments())) * 0.5
    forks.fork(pipeline, bank.site.settings, "fix", 1)
    promotion.promote(pipeline, bank.site.settings, "fix", executor=InMemoryExecutor())
    read(bank, 1, 2, 3, monkeypatch=monkeypatch)
    bank.epochs(4)
    read(bank, 1, 2, 3, 4, monkeypatch=monkeypatch)
    bank.site.assert_no_orphans()


def test_what_a_crash_left_of_a_partition_is_swept(bank, monkeypatch):
    bank.epochs(1)
    with monkeypatch.context() as patched:

        def crash(*asked, **options):
            raise OSError("cut off")

        patched.setattr("state_ops.checkpoints.registry.Registry.commit", crash)
        patched.setattr("weir.ownership.fencing.delete_staged", crash)
        with pytest.raises(WeirError):
            bank.epochs(2)
    bank.epochs(3)
    bank.site.assert_no_orphans()
    read(bank, 1, 2, 3, monkeypatch=monkeypatch)


def test_another_partitioning_is_refused_before_the_first_row(bank):
    bank.epochs(1)
    for by, message in ((["day"], "partitioned by day, kind, odd"), ([], "partitioned by day, kind, odd")):
        changed = replace(spread, sink=delta.append("booked", partition_by=by))
        other = Pipeline("small", (changed, with_input(totals, changed)), max_parallelism=8)
        with pytest.raises(PipelineError, match=message):
            Bank(replace(bank.site, pipeline=other)).epochs(2)


@pytest.mark.parametrize("by", ["absent", "half"])
def test_what_is_no_partition_is_refused(tmp_path, by):
    def halves(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        return rows.select("id", half=pl.col("amount") / 2)

    bad = altered(small.accounts, function=halves, sink=delta.append("booked", partition_by=by))
    bank = Bank.at(tmp_path)
    with pytest.raises(PipelineError, match=f"cannot be partitioned by {by}"):
        Bank(replace(bank.site, pipeline=Pipeline("small", (bad,), max_parallelism=8))).epochs(1)


def test_too_many_partitions_are_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("weir.task.staged_output._MAX_PARTITIONS", 2)
    by_id = replace(small.accounts, sink=delta.append("booked", partition_by="id"))
    bank = Bank.at(tmp_path)
    with pytest.raises(InputError, match="more than 2 partitions"):
        Bank(replace(bank.site, pipeline=Pipeline("small", (by_id,), max_parallelism=8))).epochs(1)


def test_statistics_are_safe_to_skip_by(tmp_path):
    table = pa.table(
        {
            "n": pa.array([3, 1, None], pa.int64()),
            "text": ["é" * 40, "a" * 40, "b"],
            "float": [float("nan"), 1.0, 2.0],
            "day": pa.array([date(2026, 1, 2), None, None]),
            "none": pa.array([None, None, None], pa.int64()),
            "list": [[1], [2], []],
        }
    )
    pq.write_table(table, tmp_path / "file")
    stats = json.loads(statistics(pq.read_metadata(tmp_path / "file")))
    assert stats["numRecords"] == 3
    assert stats["minValues"] == {"n": 1, "text": "a" * 32, "day": "2026-01-02"}
    assert stats["maxValues"] == {"n": 3, "text": "é" * 32 + "\U0010ffff", "day": "2026-01-02"}
    assert stats["nullCount"] == {"n": 1, "text": 0, "float": 0, "day": 2, "none": 3}


def test_bounds_of_files_agree_with_delta_rs(tmp_path):
    table = pa.table({"n": [3, 1, 2], "text": ["b", "a", "c"], "day": [date(2026, 1, day) for day in (1, 2, 3)]})
    write_deltalake(str(tmp_path / "t"), table)
    (file,) = DeltaTable(str(tmp_path / "t")).file_uris()
    (entry,) = (tmp_path / "t" / "_delta_log").glob("*0.json")
    added = next(json.loads(line)["add"] for line in entry.read_text().splitlines() if '"add"' in line)
    theirs, ours = json.loads(added["stats"]), json.loads(statistics(pq.read_metadata(file)))
    assert {name: theirs[name] for name in ("numRecords", "minValues", "maxValues", "nullCount")} == ours


@pytest.mark.long
def test_spark_reads_the_same_rows_and_skips_files(bank, spark, monkeypatch):
    bank.epochs(1, 2, 3)
    frame = spark.read.format("delta").load(str(bank.site.storage / "tables" / "booked"))
    monkeypatch.chdir(bank.site.landing)
    order = ("id", "at", "amount", "day", "kind", "odd")
    assert sorted(map(tuple, frame.select(*order).collect()), key=str) == sorted(expected(1, 2, 3), key=str)
    assert frame.where("amount = 2").count() == 10
    files = {row["file"] for row in frame.selectExpr("input_file_name() AS file").collect()}
    plan = frame.where("amount = 2 AND day = DATE '2026-01-02'")
    read = plan._jdf.queryExecution().executedPlan()
    plan.collect()
    assert read.treeString().count("PartitionFilters") >= 1
    assert len({row["file"] for row in plan.selectExpr("input_file_name() AS file").collect()}) < len(files)
    numbers = spark._jvm.scala.jdk.javaapi.CollectionConverters.asJava(read.collectLeaves().head().metrics())
    assert numbers["numFiles"].value() < len(files) // 3


def test_a_range_is_replaced_by_partition_where_files_have_no_such_column(tmp_path):
    """Others' files of a partitioned table have no partition columns, as after an OPTIMIZE."""
    storage, handle = Storage(str(tmp_path / "p")), str(tmp_path / "p" / "tables" / "t")
    days = [date(2026, 1, 1), date(2026, 1, 2), None]
    write_deltalake(handle, pa.table({"n": [1, 2, 3], "day": days}), partition_by=["day"])
    files = active_files(DeltaTable(handle))
    wanted = Range(to_micros(datetime(2026, 1, 2, tzinfo=UTC)), to_micros(datetime(2026, 1, 3, tzinfo=UTC)))
    assert touched(storage, "t", files, "day", wanted, tmp_path) == 1
    rows = sorted(
        (row["n"], row["day"]) for table in newest_rows(storage, "t") for row in table.select(["n", "day"]).to_pylist()
    )
    assert rows == list(zip([1, 2, 3], days, strict=True))
