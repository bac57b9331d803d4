"""Parquet files as Spark, pandas, Polars, DuckDB and Arrow write them: every reader gives the same values, and Spark's
own are the same."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.arrow import frames
from state_ops.errors import InputError, PipelineError
from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from tests.tools.stages import with_input
from weir import Epoch, Pipeline, State, ValueState, agg, aggregate, delta, files, stage, window
from weir.definition import ROW
from weir.execution import direct_read
from weir.execution.executor import Landed
from weir.execution.in_process import InMemoryExecutor
from weir.execution.spark.spark_executor import SparkExecutor, _read_source
from weir.run.run import RunOptions, run
from weir.settings.configuration import EpochSettings
from weir.sources.files import FilesReader
from weir.sources.slices import position

SOURCE = files("{landing}/*.parquet", event_time="at", name="landing")
PLAIN = files("{landing}/*.parquet", name="landing")
DAYS = [
    *(date(year, month, day) for year in (1, 4, 100, 1000, 1500, 1582) for month, day in ((1, 1), (2, 28), (3, 1))),
    date(1582, 10, 4), date(1582, 10, 15), date(1582, 10, 16), date(1700, 3, 1), date(1899, 12, 31), date(1900, 1, 1),
    date(1969, 12, 31), date(2024, 2, 29), date(9999, 12, 31),
]  # fmt: skip
MOMENTS = [datetime(day.year, day.month, day.day, 23, 59, 58, 999999, tzinfo=UTC) for day in DAYS[1:-1]]


def rows_of(kind: pa.DataType, values: list[Any]) -> pa.Table:
    """The values, a null, and once more each value in a list of structs and in a map."""
    at = pa.array([*values, None], kind)
    nested = pa.array([[{"x": value}, None] for value in values] + [None], pa.list_(pa.struct([("x", kind)])))
    mapped = pa.array([[("a", value)] for value in values] + [None], pa.map_(pa.string(), kind))
    return pa.table({"n": pa.array(range(len(at)), pa.int64()), "at": at, "nested": nested, "mapped": mapped})


def landed(root: Path, source: Any = PLAIN, tracked: bool = False) -> Landed:
    reader = FilesReader(source, f"{root}/*.parquet")
    planned = reader.plan(None, EpochSettings(), None)
    schema = planned.schema if not tracked else planned.schema.append(pa.field(ROW, pa.int64()))
    return Landed(schema, reader, planned.files)


def by_arrow(rows: Landed) -> pa.Table:
    return pa.concat_tables(direct_read.tables(rows, 7)).combine_chunks()


def by_spark(spark: Any, rows: Landed) -> pa.Table:
    return _read_source(spark, rows, 7).toArrow()


def same_rows(spark: Any, rows: Landed) -> pa.Table:
    """The rows, which all ways to read them must give alike."""
    table = by_arrow(rows)
    through_spark = by_spark(spark, rows).cast(table.schema).sort_by("n")
    assert table.sort_by("n").to_pydict() == through_spark.to_pydict()
    return table


def same_as_sparks_own(spark: Any, root: Path, table: pa.Table) -> None:
    """Beside `spark.read.parquet`; a set has no maps, so that those go as lists of entries."""
    ours, by_spark = spark.createDataFrame(table), spark.read.parquet(str(root))
    kinds = {field.name: field.dataType.simpleString() for field in ours.schema}
    shown = [
        f"map_entries({name}) as {name}" if kind.startswith("map") else f"cast({name} as {kind}) as {name}"
        for name, kind in kinds.items()
    ]
    ours, by_spark = ours.selectExpr(*shown), by_spark.selectExpr(*shown)
    assert ours.exceptAll(by_spark).isEmpty() and by_spark.exceptAll(ours).isEmpty()


@contextmanager
def session_with(spark: Any, **conf: str) -> Iterator[None]:
    before = {name: spark.conf.get(name) for name in conf}
    for name, value in conf.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)


_SQL = "spark.sql.parquet."
_SPARKS_SAMPLE = {
    ("INT96", "CORRECTED", "UTC"),
    ("TIMESTAMP_MICROS", "LEGACY", "America/Los_Angeles"),
    ("TIMESTAMP_MILLIS", "LEGACY", "UTC"),
}


@pytest.mark.parametrize(
    ("stored", "mode", "zone"),
    sampled(
        itertools.product(
            ("INT96", "TIMESTAMP_MICROS", "TIMESTAMP_MILLIS"), ("CORRECTED", "LEGACY"), ("UTC", "America/Los_Angeles")
        ),
        _SPARKS_SAMPLE.__contains__,
    ),
)
def test_what_spark_writes_is_read_as_spark_reads_it(tmp_path: Path, spark, stored: str, mode: str, zone: str):
    table = rows_of(pa.timestamp("us", "UTC"), MOMENTS)
    days = pa.array([*DAYS[: len(MOMENTS)], None], pa.date32())
    table = table.append_column("day", days).append_column("local", table.column("at").cast(pa.timestamp("us")))
    table = table.append_column("d9", pa.array([Decimal("1.25")] * len(table), pa.decimal128(5, 2)))
    table = table.append_column("d18", pa.array([Decimal("-1.25")] * len(table), pa.decimal128(15, 2)))
    table = table.append_column("d38", pa.array([Decimal(-(10**30))] * len(table), pa.decimal128(38, 2)))
    conf = {
        f"{_SQL}outputTimestampType": stored,
        f"{_SQL}datetimeRebaseModeInWrite": mode,
        f"{_SQL}int96RebaseModeInWrite": mode,
        f"{_SQL}writeLegacyFormat": str(mode == "LEGACY").lower(),
    }
    frame = spark.createDataFrame(table)
    ntz = spark.createDataFrame(table.select(["n", "local"]), "n bigint, local timestamp_ntz")
    with session_with(spark, **conf, **{"spark.sql.session.timeZone": zone}):
        frame.drop("local").join(ntz, "n").coalesce(1).write.parquet(str(tmp_path / "out"))
    (file,) = (tmp_path / "out").glob("*.parquet")
    shutil.copy(file, tmp_path / "1.parquet")
    footer = pq.read_metadata(file)
    assert (b"org.apache.spark.legacyDateTime" in footer.metadata) == (mode == "LEGACY")
    rows = landed(tmp_path, SOURCE)
    read = same_rows(spark, rows).select(table.column_names)
    same_as_sparks_own(spark, tmp_path / "1.parquet", read)
    if zone == "UTC":  # elsewhere Spark itself does not give back what it got before 1900
        assert read.column("day").to_pylist() == days.to_pylist()
        millis = stored == "TIMESTAMP_MILLIS"
        cut = [at.replace(microsecond=999000) if at and millis else at for at in table.column("at").to_pylist()]
        assert read.sort_by("n").column("at").to_pylist() == cut
    newest = rows.reader.plan(None, EpochSettings(), None).newest
    assert newest == max(filter(None, read.column("at").cast(pa.int64()).to_pylist()))


@pytest.mark.parametrize(
    ("metadata", "shifted"),
    [
        ({"version": "2.4.8"}, True),  # without a time zone
        ({"version": "3.0.3"}, False),
        ({"version": "3.5.1", "legacyDateTime": "", "timeZone": "Europe/Berlin"}, True),
        ({"version": "3.5.1", "legacyDateTime": "", "timeZone": "GMT+05:30"}, True),
        ({"version": "3.5.1", "legacyINT96": ""}, False),
        ({"legacyDateTime": ""}, False),  # of no Spark
    ],
)
@pytest.mark.parametrize("int96", sampled([False, True]))
def test_the_calendar_is_what_a_footer_says_of_it(tmp_path: Path, spark, metadata, shifted: bool, int96: bool):
    table = rows_of(pa.timestamp("us", "UTC"), MOMENTS)
    table = table.append_column("day", pa.array([*DAYS[: len(MOMENTS)], None], pa.date32()))
    path = tmp_path / "1.parquet"
    with pq.ParquetWriter(path, table.schema, use_deprecated_int96_timestamps=int96, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({f"org.apache.spark.{key}": value for key, value in metadata.items()})
    read = same_rows(spark, landed(tmp_path))
    same_as_sparks_own(spark, path, read)
    assert (read.column("day").to_pylist() != table.column("day").to_pylist()) == shifted


def test_a_file_by_the_old_calendar_is_as_new_as_what_is_read_of_it(tmp_path: Path):
    table = rows_of(pa.timestamp("us", "UTC"), [at for at in MOMENTS if at.year < 1582])
    with pq.ParquetWriter(tmp_path / "1.parquet", table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"org.apache.spark.version": "2.4.8"})
    rows = landed(tmp_path, SOURCE)
    read = by_arrow(rows).column("at").cast(pa.int64()).to_pylist()
    assert read != table.column("at").cast(pa.int64()).to_pylist()
    assert rows.reader.plan(None, EpochSettings(), None).newest == max(filter(None, read))


NANOS = [1_704_070_923_456_789_123, -1, -1001, -1_000_000_000_000_000_001, 0]
OTHERS: dict[str, pa.Array] = {
    "ns": pa.array(NANOS, pa.timestamp("ns")),
    "ns_zone": pa.array(NANOS, pa.timestamp("ns", "America/New_York")),
    "ns_list": pa.array([[value] for value in NANOS], pa.large_list(pa.timestamp("ns"))),
    "ns_struct": pa.array([{"x": {"y": value}} for value in NANOS], pa.struct([("x", pa.struct([("y", pa.timestamp("ns"))]))])),
    "ns_key": pa.array([[(value, value)] for value in NANOS], pa.map_(pa.timestamp("ns"), pa.timestamp("ns", "UTC"))),
    "us_zone": pa.array([-1, None, 1, 2, 3], pa.timestamp("us", "+05:30")),
    "ms": pa.array([-1, None, 1, 2, 3], pa.timestamp("ms")),
    "s": pa.array([-1, None, 1, 2, 3], pa.timestamp("s")),
    "u8": pa.array([0, 255, None, 1, 2], pa.uint8()),
    "u16": pa.array([0, 65535, None, 1, 2], pa.uint16()),
    "u32": pa.array([0, 2**32 - 1, None, 1, 2], pa.uint32()),
    "u64": pa.array([0, 2**63 - 1, None, 1, 2], pa.uint64()),
    "u64_list": pa.array([[0], [2**63 - 1, None], None, [], [1]], pa.list_(pa.uint64())),
    "u64_map": pa.array([[(2**63 - 1, 2**63 - 1)], [], None, [], []], pa.map_(pa.uint64(), pa.uint64())),
    "d5": pa.array([Decimal("1.5"), None, Decimal("-99.9"), 0, 1], pa.decimal32(5, 1)),
    "d18": pa.array([Decimal("1.5"), None, Decimal("-99.9"), 0, 1], pa.decimal64(18, 1)),
    "d38": pa.array([Decimal("1.5"), None, Decimal(-(10**36)), 0, 1], pa.decimal256(38, 1)),
    "text_view": pa.array(["", None, "é", "b", "c"], pa.string_view()),
    "text_large": pa.array(["", None, "é", "b", "c"], pa.large_string()),
    "text_coded": pa.array(["", None, "é", "b", "é"]).dictionary_encode(),
    "text_coded_list": pa.ListArray.from_arrays([0, 1, 2, 3, 4, 5], pa.array(["", None, "é", "b", "é"]).dictionary_encode()),
    "bytes_view": pa.array([b"", None, b"\xff", b"b", b"c"], pa.binary_view()),
    "bytes_fixed": pa.array([b"ab", None, b"\xff\x00", b"cd", b"ef"], pa.binary(2)),
    "list_view": pa.array([[1], None, [], [2, None], [3]], pa.list_view(pa.int64())),
    "list_fixed": pa.array([[1, 2], None, [3, 4], [5, None], [6, 7]], pa.list_(pa.int32(), 2)),
    "date64": pa.array([date(1500, 1, 1), None, date(1, 1, 1), date(2024, 2, 29), date(1970, 1, 1)], pa.date64()),
    "time_ms": pa.array([1, None, 2, 3, 4], pa.time32("ms")),
    "time_us": pa.array([1, None, 2, 3, 4], pa.time64("us")),
    "time_ns": pa.array([1001, None, 2, 3, 4], pa.time64("ns")),
    "span_ns": pa.array(NANOS, pa.duration("ns")),
    "span_s": pa.array([1, None, -1, 2, 3], pa.duration("s")),
    "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16, None, b"1" * 16, b"2" * 16, b"3" * 16], pa.binary(16))),
    "nothing": pa.nulls(5),
}  # fmt: skip


@pytest.mark.parametrize(
    "options", [{}, {"use_dictionary": False, "store_schema": False}, {"use_compliant_nested_type": False}], ids=str
)
def test_what_arrow_writes_is_read_alike_by_all(tmp_path: Path, spark, options: dict[str, Any]):
    table = pa.table({"n": pa.array(range(5), pa.int64()), **OTHERS})
    pq.write_table(table, tmp_path / "1.parquet", **options)
    read = same_rows(spark, landed(tmp_path))
    assert read.column("ns").cast(pa.int64()).to_pylist() == [value // 1000 for value in NANOS]
    assert read.column("u64").to_pylist() == OTHERS["u64"].to_pylist()
    assert read.column("u64").type == pa.int64()
    assert [dict(row) for row in read.column("ns_key").cast(pa.map_(pa.int64(), pa.int64())).to_pylist()] == [
        {value // 1000: value // 1000} for value in NANOS
    ]


def of_pandas(path: Path) -> None:
    at = pd.to_datetime(["2024-01-01 01:02:03.123456789", None, "1970-01-01 00:00:00.000000000"])
    frame = pd.DataFrame({"n": range(3), "at": at, "zone": at.tz_localize("Europe/Berlin"), "us": at.astype("M8[us]")})
    frame["code"] = pd.Categorical(["a", None, "b"])
    frame["span"] = pd.to_timedelta([1, None, 3], "us")
    frame["whole"] = pd.array([2**62 + 1, None, 3], "Int64")
    frame["unsigned"] = pd.array([2**62 + 1, None, 3], "UInt64")
    frame["nothing"] = pd.Series([None] * 3, dtype=object)
    frame["price"] = [Decimal("1.25"), None, Decimal("-3")]
    frame["period"] = pd.period_range("2020", periods=3, freq="D")
    frame.to_parquet(path, index=False)


def of_polars(path: Path) -> None:
    at = [datetime(2024, 1, 1, 1, 2, 3, 123456), None, datetime(1500, 1, 1)]
    frame = pl.DataFrame(
        {"n": [0, 1, 2], "us": pl.Series(at, dtype=pl.Datetime("us")), "ms": pl.Series(at, dtype=pl.Datetime("ms"))}
    )
    frame = frame.with_columns(
        ns=pl.Series([at[0], None, datetime(1700, 1, 1)], dtype=pl.Datetime("ns", "Europe/Berlin")),
        code=pl.Series(["a", None, "b"], dtype=pl.Categorical),
        kind=pl.Series(["a", None, "b"], dtype=pl.Enum(["a", "b"])),
        hour=pl.Series([time(1, 2, 3, 4), None, time(0)]),
        span=pl.Series([timedelta(days=1), None, timedelta(microseconds=-1)]),
        price=pl.Series([Decimal("1.25"), None, Decimal("-3.00")], dtype=pl.Decimal(20, 2)),
        unsigned=pl.Series([2**63 - 1, None, 0], dtype=pl.UInt64),
        fixed=pl.Series([[1, 2], None, [3, 4]], dtype=pl.Array(pl.UInt32, 2)),
        nested=pl.Series([[{"at": at[0]}], None, []], dtype=pl.List(pl.Struct({"at": pl.Datetime("ns")}))),
    )
    frame.write_parquet(path)


def of_duckdb(path: Path) -> None:
    row = """select {n}::bigint n, {n}::utinyint u8, {n}::ubigint u64, uuid '00000000-0000-0000-0000-00000000000{n}' id,
        time '12:00:0{n}' clock, interval '{n} day' span, 'a'::enum('a', 'b') kind, '{{"a": 1}}'::json doc, 1.5::decimal(4, 1) d4,
        1.5::decimal(12, 1) d12, -1.5::decimal(30, 1) d30, timestamp_ns '2024-01-01 00:00:00.00000000{n}' ns,
        timestamp_ms '1500-01-01 00:00:00' ms, timestamp_s '1500-01-01 00:00:00' s, timestamp '1500-01-01 00:00:00' us,
        timestamptz '1890-01-01 00:00:00+00' zoned, 'ab'::blob raw, date '1500-01-01' as day_of_it, {n}::hugeint huge,
        [{{'at': timestamp_ns '2024-01-01 00:00:00.00000000{n}'}}] nested, map {{'a': {n}::ubigint}} pairs"""
    duckdb.sql(f"copy ({row.format(n=1)} union all {row.format(n=2)}) to '{path}' (format parquet)")


@pytest.mark.parametrize("write", [of_pandas, of_polars, of_duckdb])
def test_what_others_write_is_read_alike_by_all(tmp_path: Path, spark, write: Callable[[Path], None]):
    write(tmp_path / "1.parquet")
    read = same_rows(spark, landed(tmp_path))
    assert read.num_rows == pq.read_metadata(tmp_path / "1.parquet").num_rows


def test_files_of_several_writers_are_one_slice_and_every_row_knows_its_place(tmp_path: Path, spark):
    at = [datetime(2024, 1, 1, 1, tzinfo=UTC), datetime(1500, 1, 1, tzinfo=UTC)]
    kinds = [pa.timestamp("us", "UTC"), pa.timestamp("ns"), pa.timestamp("us", "UTC"), pa.timestamp("ms")]
    for number, (kind, int96) in enumerate(zip(kinds, (True, False, False, False), strict=True)):
        moments = at if kind.unit != "ns" else [at[0], datetime(1700, 1, 1, tzinfo=UTC)]
        unsigned = pa.uint64() if number == 2 else pa.int64()  # which Arrow alone reads
        table = pa.table({"n": pa.array([2 * number, 2 * number + 1], unsigned), "at": pa.array(moments, kind)})
        pq.write_table(table, tmp_path / f"{number}.parquet", use_deprecated_int96_timestamps=int96)
    rows = landed(tmp_path, SOURCE, tracked=True)
    assert [file.by_arrow for file in rows.files] == [False, False, True, False]
    read = same_rows(spark, replace(rows, left_out=(position(2, 0), position(3, 1))))
    assert read.column("n").to_pylist() == [0, 1, 2, 3, 5, 6]


class Seen(State):
    """Of one key."""

    rows: int = 0


@stage("seen", source=SOURCE, key="k", state=Seen, order_by=["n"], sink=delta.append("seen"))
def seen(rows: pa.Table, state: ValueState, epoch: Epoch) -> pa.Table:
    state.fold(rows, rows=agg.count())
    return rows


hours = window("hours", SOURCE, key="k", on="at", every="1h", rows=agg.count(), sink=delta.append("hours"))
pipeline = Pipeline("writers", (seen, hours), max_parallelism=8)


def test_a_pipeline_on_sparks_files_gives_the_same_however_they_are_read(tmp_path: Path, spark):
    first = pa.table({
        "n": pa.array(range(4), pa.int64()), "k": ["a", "b", "a", "b"],
        "at": pa.array([datetime(2024, 1, 1, hour, 30, tzinfo=UTC) for hour in (0, 0, 1, 2)], pa.timestamp("us", "UTC")),
        "odd": pa.array([1, 2, None, 2**63 - 1], pa.uint64()),
    })  # fmt: skip
    spark.createDataFrame(first.drop_columns("odd")).coalesce(1).write.parquet(str(tmp_path / "out"))
    (written,) = (tmp_path / "out").glob("*.parquet")
    assert pq.read_metadata(written).schema.column(2).physical_type == "INT96"
    results = []
    for name, megabytes, executor in (("memory", 32, InMemoryExecutor()), ("direct", 32, None), ("shuffle", 0, None)):
        site = Site(tmp_path / name, {"WEIR_SPARK__DIRECT_READ_MB": str(megabytes)}, pipeline, __name__)
        site.landing.mkdir(parents=True)
        shutil.copy(written, site.landing / "1.parquet")
        reports = list(run(pipeline, site.settings, RunOptions(until_caught_up=True), executor))
        assert len(reports) == 1
        results.append(
            (
                site.table("seen").sort_values("n").to_dict("list"),
                site.table("hours").sort_values(["window_start", "k"]).to_dict("list"),
            )
        )
    assert results[0] == results[1] == results[2]
    assert results[0][0]["at"] == first.column("at").to_pylist()
    assert results[0][1]["rows"] == [
        1,
        1,
        1,
    ]  # the watermark is known before the job, although such files have no statistics


# -- what cannot be read


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([Decimal(1)], pa.decimal256(50, 2)), r"'odd' of the input file 1\.parquet is decimal256\(50, 2\)"),
        (pa.array(np.array([1], "float16")), r"'odd' of the input file 1\.parquet is halffloat"),
        (pa.array([[np.float16(1)]], pa.list_(pa.float16())), r"'odd' .* with halffloat"),
    ],
)
def test_what_cannot_be_read_is_refused_when_it_is_planned(tmp_path: Path, column: pa.Array, message: str):
    pq.write_table(pa.table({"n": [1], "odd": column}), tmp_path / "1.parquet")
    with pytest.raises(InputError, match=message) as refused:
        landed(tmp_path)
    assert refused.value.where == f"{tmp_path}/1.parquet" and "Cast or drop it" in refused.value.next


def test_a_number_of_more_than_64_bits_is_refused_by_column(tmp_path: Path):
    pl.DataFrame({"n": [1], "huge": pl.Series([1], dtype=pl.Int128)}).write_parquet(tmp_path / "1.parquet")
    with pytest.raises(InputError, match=r"1\.parquet has types that cannot be read: 'huge'"):
        landed(tmp_path)


ENUMS = """message rows {
    required int32 n;
    optional binary kind (ENUM);
    optional group kinds (LIST) { repeated group list { optional binary element (ENUM); } }
    optional group inner { optional binary kind (ENUM); }
}"""


def write_enums(spark: Any, file: Path) -> None:
    """As Parquet's own library for Java writes them, with which Avro's and Protobuf's writers work."""
    parquet, hadoop = spark._jvm.org.apache.parquet, spark._jvm.org.apache.hadoop.fs.Path
    shape = parquet.schema.MessageTypeParser.parseMessageType(ENUMS)
    writer = parquet.hadoop.example.ExampleParquetWriter.builder(hadoop(str(file))).withType(shape).build()
    group = parquet.example.data.simple.SimpleGroupFactory(shape)
    for n, kind in ((1, "SOLD"), (2, "BOUGHT")):
        row = group.newGroup().append("n", n).append("kind", kind)
        row.addGroup("kinds").addGroup("list").append("element", kind)
        row.addGroup("inner").append("kind", kind)
        writer.write(row)
    writer.write(group.newGroup().append("n", 3))
    writer.close()


def test_names_of_an_enum_are_text_as_for_spark(tmp_path: Path, spark):
    write_enums(spark, tmp_path / "1.parquet")
    assert pq.read_schema(tmp_path / "1.parquet").field("kind").type == pa.binary(), "as Arrow takes them"
    read = same_rows(spark, landed(tmp_path))
    assert read.column("kind").to_pylist() == ["SOLD", "BOUGHT", None]
    assert read.column("kinds").to_pylist() == [["SOLD"], ["BOUGHT"], None]
    same_as_sparks_own(spark, tmp_path / "1.parquet", read)


def test_a_pipeline_that_has_read_names_of_an_enum_as_bytes_goes_on_so(tmp_path: Path, spark):
    write_enums(spark, tmp_path / "1.parquet")
    reader = FilesReader(PLAIN, f"{tmp_path}/*.parquet")
    before = frames.canonical_schema(pq.read_schema(tmp_path / "1.parquet"))
    planned = reader.plan(None, EpochSettings(), before)
    assert planned.schema == before
    read = same_rows(spark, Landed(planned.schema, reader, planned.files))
    assert read.column("kind").to_pylist() == [b"SOLD", b"BOUGHT", None]


def test_a_column_that_earlier_files_do_not_have_harms_nobody(tmp_path: Path):
    pq.write_table(pa.table({"n": [1]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"n": [2], "odd": pa.array([2**64 - 1], pa.uint64())}), tmp_path / "2.parquet")
    assert by_arrow(landed(tmp_path)).column("n").to_pylist() == [1, 2]


def test_a_file_whose_column_is_all_null_fits_the_type_of_earlier_files(tmp_path: Path, spark):
    pq.write_table(pa.table({"n": [1], "name": ["a"], "tags": [["x"]]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"n": [2], "name": pa.nulls(1), "tags": pa.nulls(1)}), tmp_path / "2.parquet")
    assert same_rows(spark, landed(tmp_path)).column("name").to_pylist() == ["a", None]


UNTYPED = {
    "name": pa.nulls(1),
    "tags": pa.array([[]], pa.list_(pa.null())),
    "inner": pa.array([{"x": None}]),
    "pairs": pa.array([[("a", None)]], pa.map_(pa.string(), pa.null())),
}
TYPED = {
    "name": ["a"],
    "tags": [["x"]],
    "inner": [{"x": 1.5}],
    "pairs": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
}


def test_a_column_that_is_all_null_in_the_first_files_takes_the_type_of_later_ones(tmp_path: Path, spark):
    pq.write_table(pa.table({"n": [1], **UNTYPED}), tmp_path / "1.parquet")
    first = landed(tmp_path)
    assert same_rows(spark, first).column("name").to_pylist() == [None]
    pq.write_table(pa.table({"n": [2], **TYPED}), tmp_path / "2.parquet")
    pq.write_table(pa.table({"n": [3], **UNTYPED}), tmp_path / "3.parquet")
    rows = landed(tmp_path)
    assert rows.schema.field("name").type == pa.string()
    assert same_rows(spark, rows).drop("n").to_pylist() == [
        {"name": None, "tags": [], "inner": {"x": None}, "pairs": [("a", None)]},
        {"name": "a", "tags": ["x"], "inner": {"x": 1.5}, "pairs": [("a", 1)]},
        {"name": None, "tags": [], "inner": {"x": None}, "pairs": [("a", None)]},
    ]
    later = rows.reader.plan(None, EpochSettings(), first.schema)
    assert later.schema == rows.schema, "of what an earlier epoch has read, too"
    pq.write_table(pa.table({"n": [4], **TYPED, "tags": [[4]]}), tmp_path / "4.parquet")
    with pytest.raises(InputError, match=r"'tags' of the input file 4\.parquet is list<item: int64>; earlier files"):
        landed(tmp_path)


class Noted(State):
    """Of one key."""

    rows: int = 0


@stage("noted", source=PLAIN, key="k", state=Noted)
def noted(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Gives the column a type wherever it has none."""
    state.fold(rows, rows=agg.count())
    return rows.select("k", pl.col("note").cast(pl.String))


notes = aggregate("notes", noted, key="k", sink=delta.append("notes"), last=agg.max("note"), rows=agg.count())


@pytest.mark.parametrize("direct", sampled([None, "32", "0"], 2), ids=["without Spark", "by its workers", "by Spark"])
@pytest.mark.parametrize("runs", sampled([2, 1]))
def test_a_stage_goes_on_when_a_column_of_nulls_gets_a_type(tmp_path: Path, request, direct: str | None, runs: int):
    options = {"WEIR_EPOCH__MAX_FILES": "1", "WEIR_SPARK__DIRECT_READ_MB": direct or "0"}
    site = Site(tmp_path, options, Pipeline("noting", (noted, notes), max_parallelism=8), __name__)
    site.landing.mkdir(parents=True)
    if direct is not None:
        request.getfixturevalue("spark")
    for number, column in enumerate([pa.nulls(1), ["seen"], pa.nulls(1)]):
        pq.write_table(pa.table({"k": ["a"], "note": column}), site.landing / f"{number}.parquet")
        if runs == 2 or number == 2:
            executor = InMemoryExecutor() if direct is None else None
            list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor))
    table = site.table("notes").sort_values("rows")
    assert [text if isinstance(text, str) else None for text in table["last"]] == [None, "seen", "seen"]


def test_a_stage_that_hands_on_a_column_of_nulls_before_a_file_has_its_type_is_told_to_cast_it(tmp_path: Path):
    @stage("handed", source=PLAIN, key="k", state=Noted, sink=delta.append("handed"))
    def handed(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, rows=agg.count())
        return rows.select("k", "note")

    site = Site(tmp_path, {}, Pipeline("handing", (handed,), max_parallelism=8), __name__)
    site.landing.mkdir(parents=True)
    pq.write_table(pa.table({"k": ["a"], "note": pa.nulls(1)}), site.landing / "0.parquet")
    with pytest.raises(PipelineError, match=r"'note' cannot be told .* or from a column of nulls") as refused:
        list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    assert refused.value.next is not None and "pl.lit(None, pl.String)" in refused.value.next
    pq.write_table(pa.table({"k": ["a"], "note": ["seen"]}), site.landing / "1.parquet")
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    assert len(site.table("handed")) == 2, "one delivery has both"


def test_a_number_that_no_statistics_tell_of_is_refused_by_column_in_all_readers(tmp_path: Path, spark):
    column = pa.array([2**64 - 1], pa.uint64())
    pq.write_table(pa.table({"n": [1], "k": ["a"], "odd": column}), tmp_path / "1.parquet", write_statistics=False)
    with pytest.raises(
        InputError, match=r"'odd' of the input file 1\.parquet has a value in row 0 that cannot be handed on"
    ):
        by_arrow(landed(tmp_path))
    site = Site(
        tmp_path / "site",
        {"WEIR_SPARK__DIRECT_READ_MB": "0"},
        Pipeline("odd", (with_input(seen, PLAIN),), max_parallelism=8),
        __name__,
    )
    site.landing.mkdir(parents=True)
    shutil.copy(tmp_path / "1.parquet", site.landing)
    executor = SparkExecutor(site.settings, "weir-tests")
    with pytest.raises(
        InputError, match=r"'odd' of the input file 1\.parquet has a value in row 0 that cannot be handed on"
    ):
        list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor))
