"""Every physical type in every encoding and codec that a writer has: Python and Spark read the rows that were written."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tools.sampling import sampled
from tests.weir.sources.test_parquet_writers import by_arrow, by_spark, landed, session_with

ROWS = 40
TYPES = {
    "yes": (pa.bool_(), lambda at: at % 3 == 0),
    "i32": (pa.int32(), lambda at: at * 7 - 100),
    "i64": (pa.int64(), lambda at: at * 10**15),
    "f32": (pa.float32(), lambda at: at / 4),
    "f64": (pa.float64(), lambda at: at / 3),
    "text": (pa.string(), lambda at: f"käse-{at % 5}"),
    "raw": (pa.binary(), lambda at: bytes([at, 255])),
    "d5": (pa.decimal128(5, 1), lambda at: Decimal(at) / 2),
    "d15": (pa.decimal128(15, 1), lambda at: Decimal(at) / 2),
    "d30": (pa.decimal128(30, 1), lambda at: Decimal(at * 10**20) / 2),
    "moment": (pa.timestamp("us", "UTC"), lambda at: datetime(2024, 1, 1, 1, at, 0, 7, UTC)),
    "list": (pa.list_(pa.int32()), lambda at: [at, None] * (at % 3)),
}
_DELTA = {"yes": "RLE", "text": "DELTA_LENGTH_BYTE_ARRAY", "raw": "DELTA_BYTE_ARRAY", "d30": "DELTA_BYTE_ARRAY"}
_DELTA |= dict.fromkeys(("n", "i32", "i64", "d5", "d15", "moment", "list.list.element"), "DELTA_BINARY_PACKED")
_SPLIT = {"text": "DELTA_BYTE_ARRAY", "raw": "DELTA_LENGTH_BYTE_ARRAY", "yes": "RLE"}
_SPLIT |= dict.fromkeys((name for name in (*_DELTA, "f32", "f64") if name not in _SPLIT), "BYTE_STREAM_SPLIT")
_ENCODED: list[dict[str, Any]] = [
    {}, {"use_dictionary": False},
    {"use_dictionary": False, "column_encoding": _DELTA}, {"use_dictionary": False, "column_encoding": _SPLIT},
]  # fmt: skip
SHAPES: list[dict[str, Any]] = [
    *({**options, "store_decimal_as_integer": True} for options in _ENCODED),
    {"use_deprecated_int96_timestamps": True},
    {"use_deprecated_int96_timestamps": True, "use_dictionary": False},
]


def rows_from(first: int) -> pa.Table:
    columns = {"n": pa.array(range(first, first + ROWS), pa.int64())}
    for at, (name, (type, value)) in enumerate(TYPES.items()):
        columns[name] = pa.array([None if (row + at) % 11 == 0 else value(row) for row in range(ROWS)], type)
    return pa.table(columns)


def of_arrow(root: Path, _: Any, every: int = 7) -> None:
    codecs = ("none", "snappy", "gzip", "brotli", "lz4", "zstd")
    for at, (codec, version, options) in enumerate([*itertools.product(codecs, ("1.0", "2.0"), SHAPES)][::every]):
        path = root / f"{at}.parquet"
        pq.write_table(rows_from(at * ROWS), path, compression=codec, data_page_version=version, **options)


def all_of_arrow(root: Path, _: Any) -> None:
    of_arrow(root, _, every=1)


def of_duckdb(root: Path, _: Any) -> None:
    codecs = ("uncompressed", "snappy", "gzip", "zstd", "brotli", "lz4_raw")
    with duckdb.connect() as connection:
        for at, (codec, version, size) in enumerate(itertools.product(codecs, ("v1", "v2"), (1, 1 << 20))):
            connection.register("rows", rows_from(at * ROWS))
            connection.sql(
                f"COPY (FROM rows) TO '{root}/{at}.parquet' "
                f"(FORMAT parquet, CODEC {codec}, PARQUET_VERSION {version}, DICTIONARY_SIZE_LIMIT {size})"
            )


def of_polars(root: Path, _: Any) -> None:
    codecs = ("uncompressed", "snappy", "gzip", "brotli", "lz4", "zstd")
    for at, (codec, statistics) in enumerate(itertools.product(codecs, (True, False))):
        frame: Any = pl.from_arrow(rows_from(at * ROWS))
        frame.write_parquet(root / f"{at}.parquet", compression=codec, statistics=statistics)


def of_spark(root: Path, spark: Any) -> None:
    codecs = ("none", "snappy", "gzip", "lz4", "lz4_raw", "zstd")
    for at, (codec, version) in enumerate(itertools.product(codecs, ("v1", "v2"))):
        times = ("INT96", "TIMESTAMP_MICROS")[at // 2 % 2]
        frame = spark.createDataFrame(rows_from(at * ROWS)).coalesce(1)
        options = {"compression": codec, "parquet.writer.version": version}
        with session_with(spark, **{"spark.sql.parquet.outputTimestampType": times}):
            frame.write.options(**options).parquet(f"{root}/out-{at}")
        (written,) = (root / f"out-{at}").glob("*.parquet")
        shutil.copy(written, root / f"{at}.parquet")


def written(root: Path) -> Iterator[tuple[str, str, str]]:
    """Physical type, encoding and codec of each column chunk."""
    for path in root.glob("*.parquet"):
        group = pq.read_metadata(path).row_group(0)
        for chunk in map(group.column, range(group.num_columns)):
            for encoding in chunk.encodings:
                yield chunk.physical_type, encoding, chunk.compression


_DELTAS = {("INT32", "DELTA_BINARY_PACKED"), ("INT64", "DELTA_BINARY_PACKED")}
_TEXTS = {("BYTE_ARRAY", "DELTA_BYTE_ARRAY"), ("BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY")}
_SPLITS = {(type, "BYTE_STREAM_SPLIT") for type in ("FLOAT", "DOUBLE", "INT32", "INT64", "FIXED_LEN_BYTE_ARRAY")}
_ALL = {"UNCOMPRESSED", "SNAPPY", "GZIP", "BROTLI", "ZSTD"}
_OF_ARROW = {*_DELTAS, *_TEXTS, *_SPLITS, ("INT96", "PLAIN"), ("BOOLEAN", "RLE")}
WRITERS = [
    (of_arrow, _OF_ARROW, {*_ALL, "LZ4"}),
    (all_of_arrow, _OF_ARROW, {*_ALL, "LZ4"}),
    (of_duckdb, {*_DELTAS, ("DOUBLE", "BYTE_STREAM_SPLIT")}, {*_ALL, "LZ4"}),
    (of_polars, {("INT64", "PLAIN"), ("BYTE_ARRAY", "RLE_DICTIONARY")}, {*_ALL, "LZ4"}),
    (of_spark, {*_DELTAS, ("INT96", "PLAIN_DICTIONARY")}, {"UNCOMPRESSED", "SNAPPY", "GZIP", "LZ4", "ZSTD"}),
]


@pytest.mark.parametrize(
    ("write", "encodings", "codecs"),
    sampled(WRITERS, lambda case: case[0] in (of_arrow, of_polars)),
    ids=[write.__name__ for write, *_ in WRITERS],
)
def test_every_type_encoding_and_codec_of_a_writer_is_read_alike(tmp_path: Path, spark, write, encodings, codecs):
    write(tmp_path, spark)
    there = set(written(tmp_path))
    assert encodings <= {(type, encoding) for type, encoding, _ in there}
    assert codecs <= {codec for *_, codec in there}
    rows = landed(tmp_path)
    files = len(list(tmp_path.glob("*.parquet")))
    right = pa.concat_tables([rows_from(at * ROWS) for at in range(files)])
    assert by_arrow(rows).sort_by("n").cast(right.schema).to_pydict() == right.to_pydict()
    assert by_spark(spark, rows).sort_by("n").cast(right.schema).to_pydict() == right.to_pydict()
