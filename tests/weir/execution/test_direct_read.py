"""Small slices that subtasks read by themselves: the same rows, in the same order and batches, as through Spark's
shuffle."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.arrow import frames
from state_ops.arrow.parquet import staged_writer
from state_ops.errors import InputError, TransientError
from state_ops.keyed.keyed_state import GROUP
from state_ops.records.snapshot_files import CHANNEL, StagedFile
from state_ops.schema.key_groups import key_groups, subtask_of
from state_ops.storage.storage import Storage
from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from tests.tools.stages import altered, with_input
from weir import Epoch, Pipeline, State, ValueState, agg, aggregate, delta, files, stage, window
from weir.definition import ROW
from weir.execution import direct_read, exchange, in_process, staged_blocks
from weir.execution.executor import Channel, InputRows, Landed
from weir.execution.row_order import ordered
from weir.execution.spark.spark_executor import SparkExecutor
from weir.settings import configuration as settings
from weir.settings.configuration import EpochSettings, S3Settings
from weir.sources.files import FilesReader
from weir.sources.slices import Slice, SourceFile, position

SOURCE = files("{landing}/*.parquet", name="landing")
_NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
MAX_PARALLELISM = 16


class Seen(State):
    """Of one key."""

    rows: int = 0


@stage(
    "first",
    source=SOURCE,
    key=["id", "day"],
    state=Seen,
    order_by=["number", "ratio", "id", "unique"],
    sink=delta.append("first"),
)
def first(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Says of each row which subtask got it, and at which place of its batch."""
    state.fold(rows, rows=agg.count())
    return rows.with_columns(subtask=pl.lit(epoch.subtask), place=pl.int_range(pl.len()))


@stage("second", source=first, key="name", null_keys="drop", state=Seen, sink=delta.append("second"))
def second(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    state.fold(rows, rows=agg.count())
    return rows.select("unique", "name", second=pl.lit(epoch.subtask))


pipeline = Pipeline("plain", (first, second), max_parallelism=MAX_PARALLELISM)


def plain_rows(count: int, seed: int) -> pa.Table:
    """Every plain type, as files may have it, with nulls and the values at its ends."""
    rng = np.random.default_rng(seed)

    def some(values: list[Any], kind: pa.DataType, nulls: bool = True) -> pa.Array:
        chosen = [values[at] for at in rng.integers(len(values), size=count)]
        gone = rng.random(count) < 0.2
        return pa.array(
            [None if nulls and missing else value for value, missing in zip(chosen, gone, strict=True)], kind
        )

    return pa.table(
        {
            "id": some(list(range(40)), pa.int64(), nulls=False),
            "day": some([date(1969, 12, 31), date(2024, 2, 29)], pa.date32(), nulls=False),
            "number": some([-1, 3], pa.int32()),  # so few that the next column decides, with its nulls and NaN
            "unique": pa.array(range(seed * 1000, seed * 1000 + count), pa.int64()),
            "ratio": some([0.0, -1.5, math.nan, math.inf, -math.inf], pa.float64()),
            "name": some(["", "a", "Z", "ä", "ab", "\U0001f600"], pa.string()),
            "raw": some([b"", b"\x00", b"\xff\x00"], pa.binary()),
            "right": some([True, False], pa.bool_()),
            "tiny": some([-128, 127], pa.int8()),
            "small": some([-(2**15), 2**15 - 1], pa.int16()),
            "half": some([0.5, -math.inf], pa.float32()),
            "unsigned": some([0, 2**32 - 1], pa.uint32()),
            "price": some([Decimal("-1.25"), Decimal("99999999999999.75")], pa.decimal128(16, 2)),
            "wide": some([Decimal(10) ** 30, Decimal(-1)], pa.decimal128(38, 0)),
            "at": some([_NOON, _NOON - timedelta(days=40_000)], pa.timestamp("ms", tz="Europe/Berlin")),
            "local": some([_NOON.replace(tzinfo=None)], pa.timestamp("us")),
            "coded": some(["x", "y"], pa.string()).dictionary_encode(),
        }
    )


def landed(site: Site) -> None:
    site.landing.mkdir(parents=True)
    for number, count in enumerate((150, 0, 90)):
        rows = plain_rows(count, number)
        pq.write_table(rows, site.landing / f"{number}.parquet", row_group_size=40, compression="zstd")


WAYS = {
    exchange.ROWS: {"DIRECT_READ_MB": "0", "EXCHANGE": "rows"},
    exchange.DIRECT: {},
    exchange.FILES: {"DIRECT_READ_MB": "0", "EXCHANGE": "blocks"},
    exchange.CUT: {"EXCHANGE": "blocks", "CONF": json.dumps({"spark.sql.files.openCostInBytes": "4194304"})},
}
WAYS |= {way + exchange.STAGED: WAYS[way] for way in (exchange.FILES, exchange.CUT)}
SOME_OR_ALL = sampled([[exchange.ROWS, exchange.DIRECT, exchange.CUT + exchange.STAGED], list(WAYS)])


@pytest.fixture
def through_storage(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets blocks go through storage where a way says so, as if there were several hosts."""

    def chosen(way: str) -> None:
        monkeypatch.setattr(SparkExecutor, "_is_staged", lambda *_: way.endswith(exchange.STAGED))

    return chosen


@pytest.mark.parametrize("ways", SOME_OR_ALL, ids=len)
def test_subtasks_see_the_same_rows_in_the_same_order_however_they_come(
    tmp_path: Path, spark, monkeypatch, through_storage, ways
):
    """Read by themselves, in blocks, or row by row; the same where they are too many to be sorted in memory, and where
    a map task puts several objects."""
    monkeypatch.setattr(staged_blocks, "MOST_BYTES", 4_000)
    monkeypatch.setattr(exchange, "_CUT_ROWS", 60)
    tables: dict[str, list[pd.DataFrame]] = {}
    for way in ways:
        given = WAYS[way]
        through_storage(way)
        options = {f"WEIR_SPARK__{name}": value for name, value in given.items()}
        options |= {"WEIR_SPARK__PARALLELISM": "3", "WEIR_SPARK__BATCH_ROWS": "25"}
        site = Site(tmp_path / way, options, pipeline, __name__)
        landed(site)
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "25")  # the tests' session is there already
        try:
            reports = site.run()
        finally:
            spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
        operators = reports[-1].checkpoint.operators
        assert {stats.exchange for stats in operators.values()} == {way}
        assert not site.left_of_exchange()
        tables[way] = [site.table(name).sort_values("unique").reset_index(drop=True) for name in ("first", "second")]
    for way in set(ways) - {exchange.ROWS}:
        for through_spark, otherwise in zip(tables[exchange.ROWS], tables[way], strict=True):
            assert len(otherwise) > 150
            pd.testing.assert_frame_equal(through_spark, otherwise)


@stage(
    "asked",
    source=SOURCE,
    key="id",
    state=Seen,
    where="unique % 3 <> 1 AND (ratio > -1 OR name LIKE 'a%' OR at < '2020-01-01')",
    sink=delta.append("asked"),
)
def asked_rows(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    return rows.select("unique", subtask=pl.lit(epoch.subtask))


@stage("again", source=asked_rows, key="unique", where="unique >= 1000", state=Seen, sink=delta.append("again"))
def asked_again(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    return rows


asking = Pipeline("asking", (asked_rows, asked_again), max_parallelism=MAX_PARALLELISM)


@pytest.mark.parametrize("ways", SOME_OR_ALL, ids=len)
def test_a_where_keeps_the_same_rows_and_counts_them_alike_whoever_evaluates_it(
    tmp_path: Path, spark, monkeypatch, through_storage, ways
):
    monkeypatch.setattr(exchange, "_CUT_ROWS", 60)
    results = []
    for way in ways:
        given = WAYS[way]
        through_storage(way)
        site = Site(tmp_path / way, {f"WEIR_SPARK__{name}": value for name, value in given.items()}, asking, __name__)
        landed(site)
        (report,) = site.run()
        operators = report.checkpoint.operators
        assert {stats.exchange for stats in operators.values()} == {way}
        counts = [(uid, stats.rows_in, stats.rows_dropped, stats.rows_out) for uid, stats in operators.items()]
        tables = [site.table(name).sort_values("unique").to_dict("list") for name in ("asked", "again")]
        results.append((counts, tables))
    assert all(result == results[0] for result in results)
    (_, rows_in, dropped, _), (_, rows_again, dropped_again, _) = results[0][0]
    assert 0 < rows_in < 240 and rows_in + dropped == 240
    assert 0 < rows_again < rows_in and rows_again + dropped_again == rows_in


UNJUDGED = {
    "upper(name) = 'Ä'": None,
    "10 / number > 0": None,
    "10 / (number + 1) > 0": r"\[DIVIDE_BY_ZERO\]",
    "number > 0 OR tiny + tiny > 0": r"\[ARITHMETIC_OVERFLOW\]|\[BINARY_ARITHMETIC_OVERFLOW\]",
}
"""What Python evaluates until it meets a row, and how it ends then on Spark."""


@pytest.mark.parametrize("where", sampled(UNJUDGED, lambda where: where.startswith("10 /")))
def test_a_row_that_python_cannot_judge_is_judged_by_spark(tmp_path: Path, spark, through_storage, where):
    results: list[Any] = []
    for way in (exchange.ROWS, exchange.DIRECT, exchange.FILES, exchange.FILES + exchange.STAGED):
        through_storage(way)
        counted = aggregate(
            "counted", SOURCE, key="name", null_keys="drop", where=where, rows=agg.count(), sink=delta.append("counted")
        )
        options = {f"WEIR_SPARK__{name}": value for name, value in WAYS[way].items()}
        site = Site(tmp_path / way, options, Pipeline("counts", (counted,)), __name__)
        landed(site)
        try:
            (report,) = site.run()
        except InputError as error:
            some_row = re.sub(r"-?\d+S\b", "a number", str(error))  # which one fails first depends on the tasks' order
            results.append((some_row, error.where, error.next))
            continue
        stats = report.checkpoint.operators["counted"]
        assert (
            stats.exchange == way
            if where == "10 / number > 0"
            else stats.exchange.startswith((exchange.ROWS, exchange.CUT))
        )
        results.append((stats.rows_in, site.table("counted").sort_values("name").to_dict("list")))
        site.assert_no_orphans()
    assert results[1:] == [results[0]] * 3
    assert UNJUDGED[where] is None or re.search(UNJUDGED[where], results[0][0])


_MINUTES = files("{landing}/*.parquet", name="landing", event_time="at")
_TOTALS = aggregate("totals", SOURCE, key="id", n=agg.count(), top=agg.max("number"), sink=delta.append("totals"))
_BY_MINUTE = window("minutes", _MINUTES, key="id", on="at", every="1m", n=agg.count(), sink=delta.append("minutes"))
narrow = {
    "direct": (Pipeline("narrow", (with_input(_TOTALS, where="number >= 0 and at > '2020-01-01'"),)), {}),
    "files": (
        Pipeline("narrow", (_BY_MINUTE,)),
        {"WEIR_SPARK__DIRECT_READ_MB": "0", "WEIR_SPARK__EXCHANGE": "blocks"},
    ),
    "cut": (Pipeline("narrow", (with_input(_TOTALS, where="size(tags) = 1"),)), {}),
}


@pytest.mark.parametrize("way", narrow)
def test_columns_that_an_aggregate_does_not_look_at_are_not_read(tmp_path: Path, spark, way):
    """However wide they are, and of whatever types; late rows are counted all the same."""
    asked, options = narrow[way]
    site = Site(tmp_path, options, asked, __name__)
    site.landing.mkdir(parents=True)
    for number in range(2):
        at = [_NOON + timedelta(hours=1 - number, seconds=row) for row in range(40)]
        columns = {
            "id": [row % 4 for row in range(40)],
            "number": range(40),
            "at": pa.array(at, pa.timestamp("us", "UTC")),
        }
        rows = pa.table(columns | {"tags": [["x" * 1000]] * 40, "text": ["y" * 1000] * 40})
        pq.write_table(rows, site.landing / f"{number}.parquet")
        reports = site.run()
    (stats,) = reports[-1].checkpoint.operators.values()
    assert stats.exchange == way
    if way == "files":
        assert stats.rows_late == 40
    else:
        totals = site.table("totals").groupby("id").last()
        assert totals["n"].tolist() == [20] * 4 and totals["top"].tolist() == [36, 37, 38, 39]


def test_a_stage_says_what_it_looks_at_of_its_sources_rows():
    late = altered(_BY_MINUTE, late=delta.append("late"))
    by_event_time = aggregate("again", _MINUTES, key="id", top=agg.max("number"), sink=delta.append("again"))
    always = {"_change_type"}  # a row that takes another one back is not one more
    assert _TOTALS.reads == {"id", "number"} | always
    assert _BY_MINUTE.reads == {"id", "at"} | always
    assert by_event_time.reads == {"id", "number", "at"} | always, "the watermark is that of the source"
    assert first.reads is late.reads is None


# -- without Spark


def slice_of(root: Path, **changed: Any) -> Landed:
    reader = FilesReader(SOURCE, f"{root}/*.parquet")
    landed = tuple(
        SourceFile(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(root.iterdir())
    )
    schema = pa.schema([("id", pa.int64()), ("number", pa.int64()), (ROW, pa.int64())])
    landed = tuple(replace(file, rows=pq.read_metadata(root / file.name).num_rows) for file in landed)
    return replace(Landed(schema, reader, landed), **changed)


def write(root: Path, *counts: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for number, count in enumerate(counts):
        rows = pa.table({"id": [number * 7 % 31 for number in range(count)], "number": list(range(count))})
        pq.write_table(rows, root / f"{number}.parquet", write_page_checksum=True)


@pytest.mark.parametrize("parallelism", [1, 2, 5, 8])
@pytest.mark.parametrize("batch_rows", [1, 7, 1000])
def test_each_row_goes_to_the_subtask_of_its_key_in_full_batches(tmp_path, parallelism, batch_rows):
    write(tmp_path, 40, 0, 25)
    gone = (position(0, 3), position(2, 24))
    rows = slice_of(tmp_path, left_out=gone)
    asked = altered(first, key=("id",), order_by=())
    seen = []
    for subtask in range(parallelism):
        batches = list(
            direct_read.own_batches(
                asked, InputRows.of(rows), subtask, parallelism, MAX_PARALLELISM, batch_rows, tmp_path
            )
        )
        assert all(batch.num_rows == batch_rows for batch in batches[:-1])
        assert all(0 < batch.num_rows <= batch_rows for batch in batches)
        for batch in batches:
            groups = key_groups([batch.column("id")], MAX_PARALLELISM)
            assert batch.column(GROUP).to_pylist() == groups.tolist()
            assert set(subtask_of(groups, parallelism, MAX_PARALLELISM).tolist()) == {subtask}
            seen += batch.column(ROW).to_pylist()
    everything = {position(0, row) for row in range(40)} | {position(2, row) for row in range(25)}
    assert sorted(seen) == sorted(everything - set(gone))


def test_rows_come_in_the_stages_order_over_all_files(tmp_path):
    write(tmp_path, 40, 25)
    asked = altered(first, key=("id",), order_by=("number",))
    (batch,) = direct_read.own_batches(asked, InputRows.of(slice_of(tmp_path)), 0, 1, MAX_PARALLELISM, 1000, tmp_path)
    places = list(zip(batch.column("id").to_pylist(), batch.column("number").to_pylist(), strict=True))
    assert places == sorted(places) and len(places) == 65


def test_a_damaged_or_missing_file_is_named(tmp_path):
    write(tmp_path, 40, 25)
    rows = slice_of(tmp_path)
    asked = altered(first, key=("id",), order_by=())
    damaged = tmp_path / "1.parquet"
    content = bytearray(damaged.read_bytes())
    content[30] ^= 0xFF
    damaged.write_bytes(content)
    with pytest.raises(InputError, match=r"1\.parquet is not a readable Parquet file"):
        list(direct_read.own_batches(asked, InputRows.of(rows), 0, 1, MAX_PARALLELISM, 10, tmp_path))
    damaged.write_bytes(content + b"x")
    with pytest.raises(InputError, match="changed while an epoch was reading it"):
        list(direct_read.own_batches(asked, InputRows.of(rows), 0, 1, MAX_PARALLELISM, 10, tmp_path))
    damaged.unlink()
    with pytest.raises(InputError, match=r"1\.parquet vanished"):
        list(direct_read.own_batches(asked, InputRows.of(rows), 0, 1, MAX_PARALLELISM, 10, tmp_path))


def staged(root: Path, as_seen: bool = False, size: int = 1) -> Channel:
    file = StagedFile(CHANNEL, "main", str(root / "staged"), "channels/staged", size, None, 3)
    return Channel(pa.schema([("id", pa.int64())]), Storage(str(root)), (file,), as_seen)


def test_staged_rows_with_a_flipped_bit_are_not_taken_for_others(tmp_path):
    rows = pa.table({"id": range(1000)}, schema=staged(tmp_path).schema)
    with staged_writer(tmp_path / "staged", rows.schema) as writer:
        writer.write_table(rows)
    asked = altered(first, key=("id",), order_by=())
    (batch,) = direct_read.own_batches(asked, InputRows.of(staged(tmp_path)), 0, 1, MAX_PARALLELISM, 1000, tmp_path)
    assert batch.column("id").to_pylist() == rows.column("id").to_pylist()
    content = bytearray((tmp_path / "staged").read_bytes())
    content[len(content) // 3] ^= 1
    (tmp_path / "staged").write_bytes(content)
    with pytest.raises(TransientError, match="Rows that a stage has staged cannot be read"):
        list(direct_read.own_batches(asked, InputRows.of(staged(tmp_path)), 0, 1, MAX_PARALLELISM, 1000, tmp_path))


def test_an_order_may_name_a_key_once_more_and_names_are_no_patterns():
    rows = pa.table({"^x$": [2, 1, 1], "x": [0, 5, 4], "row": [1, 2, 3]})
    assert ordered(rows, ["^x$", "x", "^x$"]).tolist() == [2, 1, 0]


def fits(asked, rows, parallelism, most_bytes) -> bool:
    way = exchange.chosen(asked, asked.inputs[0], rows, parallelism, most_bytes, exchange.AUTO, by_python=True)
    return way == exchange.DIRECT


@pytest.mark.parametrize(
    ("changed", "parallelism", "is_direct"),
    [
        ({}, 8, True),
        ({}, 9, False),
        ({"where": "id > 1"}, 2, True),
        ({"where": "hash(id) > 1"}, 2, False),
        ({"transform": lambda frame: frame}, 2, False),
    ],
)
def test_what_spark_has_to_evaluate_or_many_would_read_goes_through_spark(tmp_path, changed, parallelism, is_direct):
    write(tmp_path, 10)
    asked = altered(first, **changed)
    assert fits(asked, slice_of(tmp_path), parallelism, 1 << 20) is is_direct
    assert fits(asked, staged(tmp_path), parallelism, 1 << 20) is is_direct
    assert fits(asked, staged(tmp_path, as_seen=True), parallelism, 1 << 20) is (parallelism <= 8)
    assert not fits(asked, staged(tmp_path, as_seen=True, size=2 << 20), parallelism, 1 << 20)


def test_a_slice_is_read_by_itself_up_to_its_size_and_if_its_types_are_plain(tmp_path):
    write(tmp_path, 10, 20)
    rows = slice_of(tmp_path)
    size = sum(file.size for file in rows.files)
    assert fits(first, rows, 2, size) and not fits(first, rows, 2, size - 1)
    nested = pa.schema([*rows.schema, ("tags", pa.list_(pa.string()))])
    assert not fits(first, replace(rows, schema=nested), 2, size)
    elsewhere = FilesReader(SOURCE, "mock:///landing/*.parquet")
    assert not fits(first, replace(rows, reader=elsewhere), 2, size)
    first_file, other = rows.files
    assert not fits(first, replace(rows, files=(first_file, replace(other, rows=16_000_000 // 3))), 2, size)


def test_a_slice_on_s3_is_read_by_itself_if_its_files_are_few():
    reader = FilesReader(SOURCE, "s3://bucket/landing/*.parquet", S3Settings(region="eu-west-1"))
    rows = Landed(pa.schema([("id", pa.int64())]), reader, tuple(SourceFile(f"{n}", 1, 1, 1) for n in range(9)))
    assert fits(replace(first, order_by=()), replace(rows, files=rows.files[:8]), 2, 100)
    assert not fits(replace(first, order_by=()), rows, 2, 100)


@pytest.mark.parametrize(
    ("column", "metadata", "by_arrow"),
    [
        (pa.array([1], pa.int64()), {}, False),
        (pa.array([1], pa.int64()), {"org.apache.spark.version": "2.4.8"}, False),
        (pa.array([1], pa.timestamp("us", "UTC")), {"org.apache.spark.version": "2.4.8"}, False),
        (
            pa.array([1], pa.timestamp("us")),
            {"org.apache.spark.version": "3.5.1", "org.apache.spark.legacyDateTime": ""},
            True,
        ),
        (pa.array([1], pa.timestamp("us")), {}, False),
        (pa.array([1], pa.timestamp("ns")), {}, False),
        (pa.array([[1]], pa.list_(pa.timestamp("ns"))), {}, True),
        (pa.array([1], pa.uint64()), {}, True),
        (pa.array([1], pa.uint32()), {}, False),
        (pa.array([1], pa.duration("us")), {}, True),
        (pa.array([1], pa.time64("us")), {}, True),
        (pa.nulls(1), {}, True),
        (pa.array([{"x": [b"ab"]}], pa.struct([("x", pa.list_(pa.binary(2)))])), {}, False),
    ],
)
def test_a_slice_knows_which_files_spark_cannot_read_as_they_are_meant(tmp_path, column, metadata, by_arrow):
    table = pa.table({"x": column})
    with pq.ParquetWriter(tmp_path / "1.parquet", table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    (file,) = FilesReader(SOURCE, f"{tmp_path}/*.parquet").plan(None, EpochSettings(), None).files
    assert file.by_arrow is by_arrow
    assert "by_arrow" not in Slice((file,), False, None, None).to_dict()["files"][0]


@pytest.mark.parametrize(
    ("name", "asks"),
    [
        ("spark.sql.files.ignoreCorruptFiles", True),
        ("spark.hadoop.parquet.crypto.factory.class", True),
        ("spark.executor.memory", False),
    ],
)
def test_whoever_tells_spark_how_to_read_has_it_read(tmp_path, name, asks):
    executor = SparkExecutor(settings.load({"WEIR_SPARK__CONF": json.dumps({name: "x"})}), "weir-tests")
    assert (
        executor._way(first, first.inputs[0], staged(tmp_path, as_seen=True), 2, exchange.AUTO) != exchange.DIRECT
    ) is asks


# -- blocks


def blocks_of(rows: Landed | Channel, tasks: int, parallelism: int, stage_: Any) -> dict[int, list[pa.Table]]:
    """What each subtask gets of what map tasks have cut."""
    columns, got = rows.schema, {subtask: [] for subtask in range(parallelism)}
    for read in exchange.pieces(rows, tasks):
        for cut in exchange.read_blocks(stage_.inputs[0], rows, read, parallelism, MAX_PARALLELISM):
            for at, subtask in enumerate(cut.column("subtask").to_pylist()):
                got[subtask] += (rows for _, rows in exchange.opened([cut.slice(at, 1)], [columns]))
    return got


def types_of_files(count: int) -> pa.Table:
    """A column of each type that a file may hold, and one of nulls alone."""
    ticks = pa.array([None if row % 5 == 2 else (-1, 0, 10**9, 7)[row % 4] for row in range(count)], pa.int64())
    zones = (None, "UTC", "Europe/Berlin", "+05:30")
    columns = {
        f"at {unit} {zone}": ticks.cast(pa.timestamp(unit, tz=zone)) for unit in ("s", "ms", "us") for zone in zones
    }
    columns |= {f"span {unit}": ticks.cast(pa.duration(unit)) for unit in ("s", "ms", "us")}
    others: list[tuple[list[Any], pa.DataType]] = [
        ([1, 86_399_999, None], pa.time32("ms")),
        ([1, None], pa.time64("us")),
        ([date(1969, 12, 31), None], pa.date64()),
        (["a", None, ""], pa.large_string()),
        (["a", None, "x" * 40], pa.string_view()),
        ([b"a", None, b""], pa.large_binary()),
        ([b"a", None, b"x" * 40], pa.binary_view()),
        ([b"abcd", None], pa.binary(4)),
        ([0.0, -0.0, math.nan, None, math.inf, -math.inf], pa.float32()),
        ([-0.0, 0.0, math.nan, None, math.inf, -math.inf], pa.float64()),
        ([Decimal("1.5"), None], pa.decimal128(38, 10)),
        ([Decimal("1.5"), None], pa.decimal256(30, 10)),
        ([2**63 - 1, 0, None], pa.uint64()),
        ([255, None], pa.uint8()),
        ([2**16 - 1, None], pa.uint16()),
        ([None], pa.null()),
        ([[1, 2], None, []], pa.list_(pa.int64())),
        ([["a", None], None, []], pa.large_list(pa.string())),
        ([[1, 2], None], pa.list_(pa.int64(), 2)),
        ([{"a": 1, "b": "x"}, None, {"a": None, "b": None}], pa.struct([("a", pa.int64()), ("b", pa.string())])),
        ([[("k", [1])], None, []], pa.map_(pa.string(), pa.list_(pa.int32()))),
        ([[{"m": [("k", 1)]}], None], pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.int64()))]))),
    ]
    for values, kind in others:
        columns[str(kind)] = pa.array([values[row % len(values)] for row in range(count)], kind)
    columns["coded"] = pa.array([("x", None, "y")[row % 3] for row in range(count)]).dictionary_encode()
    return pa.table(columns)


@pytest.mark.parametrize("step", sampled([4, 1]))
def test_each_type_reaches_its_subtask_alike_in_blocks_read_by_itself_and_in_memory(tmp_path, monkeypatch, step):
    """With each of them as the order too: ties, nulls, NaN and both zeros come in the order of the files' rows."""
    monkeypatch.setattr(exchange, "_LEAST_SHARE", 1)
    monkeypatch.setattr(exchange, "_READ_ROWS", 6)
    monkeypatch.setattr(exchange, "_CUT_ROWS", 17)
    monkeypatch.setattr(exchange, "_ROWS_A_BLOCK", 1)
    landing, work, parallelism = tmp_path / "landing", tmp_path / "work", 3
    landing.mkdir()
    for number, count in enumerate((60, 0, 1)):
        rows = types_of_files(count).add_column(0, "id", pa.array([row % 7 for row in range(count)], pa.int64()))
        pq.write_table(rows, landing / f"{number}.parquet", row_group_size=20)
    schema = pa.schema([(field.name, frames.canonical_type(field.type)) for field in rows.schema])
    landed = slice_of(landing, schema=schema.append(pa.field(ROW, pa.int64())))
    whole = pa.concat_tables(direct_read.tables(landed, 50))
    for name in [None, *schema.names[1::step]]:
        if name is not None and pa.types.is_nested(schema.field(name).type):
            continue
        asked = altered(first, key=("id",), order_by=(name,) if name else ())
        by_blocks = blocks_of(landed, 3, parallelism, asked)
        for subtask, in_memory in enumerate(in_process.routed(asked, whole, parallelism, MAX_PARALLELISM, 1000)):
            expected = pa.Table.from_batches(in_memory)
            itself = direct_read.own_batches(
                asked, InputRows.of(landed), subtask, parallelism, MAX_PARALLELISM, 7, work
            )
            parts = direct_read.in_batches(asked, by_blocks[subtask], 7, work)
            for way in (pa.Table.from_batches(itself), pa.Table.from_batches(parts)):
                assert way.schema == expected.schema and expected.num_rows > 5
                # As text: NaN is no value's equal, and -0.0 is that of 0.0.
                assert str(way.to_pylist()) == str(expected.to_pylist()), (name, subtask)


@pytest.mark.parametrize("tasks", [1, 2, 3, 7])
@pytest.mark.parametrize("parallelism", [1, 3, 16])
def test_map_tasks_share_a_slice_by_row_groups_and_each_row_comes_once_to_its_owner(
    tmp_path, monkeypatch, tasks, parallelism
):
    monkeypatch.setattr(exchange, "_LEAST_SHARE", 200)
    monkeypatch.setattr(exchange, "_READ_ROWS", 6)
    monkeypatch.setattr(exchange, "_CUT_ROWS", 9)
    monkeypatch.setattr(exchange, "_ROWS_A_BLOCK", 1)
    for number, count in enumerate((40, 0, 25, 1)):
        rows = pa.table({"id": [at * 7 % 31 for at in range(count)], "number": list(range(count))})
        pq.write_table(rows, tmp_path / f"{number}.parquet", row_group_size=4)
    gone = (position(0, 3), position(2, 24))
    slice_, asked = slice_of(tmp_path, left_out=gone), altered(first, key=("id",), order_by=())
    assert tasks == 1 or len(exchange.pieces(slice_, tasks)) > 1
    seen = []
    for subtask, parts in blocks_of(slice_, tasks, parallelism, asked).items():
        for part in parts:
            groups = key_groups([part.column("id")], MAX_PARALLELISM)
            assert part.column(GROUP).to_pylist() == groups.tolist()
            assert set(subtask_of(groups, parallelism, MAX_PARALLELISM).tolist()) == {subtask}
            places = part.column(ROW).to_pylist()
            assert [at & 0xFF for at in places] == part.column("number").to_pylist()
            seen += places
    everything = {position(number, row) for number, count in ((0, 40), (2, 25), (3, 1)) for row in range(count)}
    assert sorted(seen) == sorted(everything - set(gone))


@pytest.mark.parametrize("from_stage", [False, True], ids=["source", "stage"])
def test_wide_rows_are_read_and_cut_some_at_a_time_however_many_lie_together(tmp_path, monkeypatch, from_stage):
    """Else a map task holds a whole file, and Arrow's offsets of 32 bits end at 2 GiB of texts."""
    most = 100_000
    monkeypatch.setattr(exchange, "_CUT_BYTES", most)
    rng = np.random.default_rng(3)
    texts = [rng.bytes(60_000 if number == 150 else 2000) for number in range(300)]
    table = pa.table({"id": range(300), "text": pa.array(texts, pa.binary())})
    path = tmp_path / "staged"
    pq.write_table(table, path, compression="none", use_dictionary=False)
    size = path.stat().st_size
    if from_stage:
        file = StagedFile(CHANNEL, "main", str(path), "channels/staged", size, None, 300)
        rows: Landed | Channel = Channel(table.schema, Storage(str(tmp_path)), (file,), False)
    else:
        rows = slice_of(tmp_path, schema=table.schema)
    read: list[int] = []
    file_tables = direct_read.file_tables
    monkeypatch.setattr(
        direct_read, "file_tables", lambda *asked: (read.append(part.nbytes) or part for part in file_tables(*asked))
    )
    asked = altered(first, key=("id",), order_by=())
    parts = [part for of_subtask in blocks_of(rows, 1, 2, asked).values() for part in of_subtask]
    assert max(read) < 2 * most and max(part.nbytes for part in parts) < 2 * most
    back = pa.concat_tables(parts).sort_by("id")
    assert back.drop_columns([GROUP]).to_pydict() == table.to_pydict()
    # read together all the same, as a stage's transform may hand them out
    cut = list(exchange.cut(asked.inputs[0], [table], 2, MAX_PARALLELISM))
    assert max(len(block.as_py()) for batch in cut for block in batch.column("block")) < 2 * most
    assert sum(part.num_rows for _, part in exchange.opened(cut, [table.schema])) == 300


def test_batches_of_wide_rows_have_fewer_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_read, "_BATCH_BYTES", 10_000)
    rows = pa.table({"id": range(50), "text": ["x" * 1000] * 20 + ["y"] * 30})
    tables = (rows.slice(at, 3) for at in range(0, 50, 3))
    batches = list(direct_read.in_batches(replace(first, order_by=()), tables, 25, tmp_path))
    assert pa.Table.from_batches(batches).combine_chunks() == rows
    assert [batch.num_rows for batch in batches] == [12, 25, 13]


def test_map_tasks_get_about_as_many_bytes_each_and_neighbours():
    files = tuple(SourceFile(f"{number}", size, 1, 1) for number, size in enumerate((100 << 20, 1, 1, 60 << 20)))
    rows = Landed(pa.schema([("id", pa.int64())]), FilesReader(SOURCE, "/nowhere/*.parquet"), files)
    tasks = exchange.pieces(rows, 4)
    sizes = [sum(files[file].size / share.parts for file, share in task) for task in tasks]
    assert len(tasks) == 4 and max(sizes) < 1.5 * min(sizes)
    flat = [(file, share.part) for task in tasks for file, share in task]
    assert flat == sorted(flat) and {file for file, _ in flat} == {0, 1, 2, 3}
    few = replace(rows, files=files[1:3])
    assert len(exchange.pieces(few, 4)) == 2


@pytest.mark.parametrize(
    ("columns", "bytes_a_row", "ordered_too", "is_narrow"),
    [
        ({"a": pa.int64(), "b": pa.int64()}, 500, False, True),  # other columns may be wide, which nobody reads
        ({"a": pa.int64(), "text": pa.string()}, 20, False, True),
        ({"a": pa.int64(), "text": pa.string()}, 100, False, False),
        ({"a": pa.int64(), "text": pa.string()}, 100, True, True),
        ({"a": pa.int64(), "text": pa.string()}, 300, True, False),
    ],
)
def test_blocks_are_for_narrow_rows(columns, bytes_a_row, ordered_too, is_narrow):
    file = SourceFile("0", 1000 * bytes_a_row, 1, 1000)
    rows = Landed(pa.schema(columns), FilesReader(SOURCE, "/nowhere/*.parquet"), (file,))
    asked = replace(first, order_by=("a",) if ordered_too else ())
    assert exchange.is_narrow(asked, rows, rows.schema) is is_narrow
    wider = replace(rows, files=(replace(file, size=5 * file.size // 2),))  # rows that Python reads may be
    assert exchange.is_narrow(asked, wider, rows.schema, exchange.FILES) is is_narrow


def test_a_damaged_file_is_named_by_a_map_task_too(tmp_path, spark):
    options = {"WEIR_SPARK__DIRECT_READ_MB": "0", "WEIR_SPARK__EXCHANGE": "blocks"}
    site = Site(tmp_path, options, pipeline, __name__)
    landed(site)
    file = site.landing / "2.parquet"
    content = bytearray(file.read_bytes())
    content[4:60] = bytes(56)
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"2\.parquet is not a readable Parquet file"):
        site.run()


@pytest.mark.parametrize(
    ("name", "asks"),
    [("spark.sql.ansi.enabled", True), ("spark.sql.extensions", True), ("spark.executor.memory", False)],
)
def test_whoever_tells_spark_how_to_evaluate_has_it_evaluate_a_where(tmp_path, name, asks):
    executor = SparkExecutor(settings.load({"WEIR_SPARK__CONF": json.dumps({name: "x"})}), "weir-tests")
    asked = with_input(first, where="id > 1")
    assert (executor._way(asked, asked.inputs[0], staged(tmp_path), 2, exchange.AUTO) != exchange.DIRECT) is asks
    assert executor._way(first, first.inputs[0], staged(tmp_path), 2, exchange.AUTO) == exchange.DIRECT
