"""Parquet files that are damaged, or made to harm: each gives its rows, or an error with the file's name, in bounded
memory."""

from __future__ import annotations

import io
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import InputError
from weir.connectors.parquet import bounds, footers
from weir.connectors.parquet.pages import pages
from weir.connectors.parquet.rows import ParquetRows
from weir.definition import FileSource
from weir.execution import direct_read
from weir.execution.executor import Landed
from weir.settings.configuration import EpochSettings
from weir.sources.files import FilesReader

LIMITS = EpochSettings()


def reader_of(root: Path, **options: Any) -> FilesReader:
    return FilesReader(FileSource("{landing}/*.parquet", **options), f"{root}/*.parquet")


def read(root: Path, expected: pa.Schema | None = None) -> pa.Table:
    reader = reader_of(root)
    planned = reader.plan(None, LIMITS, expected)
    rows = Landed(planned.schema, reader, planned.files)
    return pa.concat_tables([rows.schema.empty_table(), *direct_read.tables(rows, 65_536)])


def refused(root: Path, message: str) -> None:
    """It is refused by name, and set aside where its source wants that."""
    with pytest.raises(InputError, match=message) as error:
        read(root)
    assert "1.parquet" in str(error.value)
    assert list(error.value.files["files"]) == ["1.parquet"]


# -- more than it is worth


def texts_of_one(path: Path, rows: int, size: int) -> None:
    """A text that the file has once, and all rows."""
    notes = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * size]))
    table = pa.table({"note": notes, "k": pa.array([1] * rows)})
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30, store_schema=False)


def lists_of_nothing(path: Path) -> None:
    table = pa.table({"n": pa.array([[0] * 40_000_000], pa.list_(pa.int64()))})
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30)


def page_of_zeros(path: Path) -> None:
    table = pa.table({"note": ["\0" * (1 << 28)] * 2})
    pq.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)


def texts_of_many(path: Path) -> None:
    notes = pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), pa.array(["x" * (1 << 20)]))
    table = pa.table({f"note{number}": notes for number in range(100)})
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30, store_schema=False)


def list_of_one_text(path: Path) -> None:
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000_000, pa.int32()), pa.array(["x" * 5000]))
    table = pa.table({"notes": pa.ListArray.from_arrays([0, 1_000_000], texts)})
    pq.write_table(table, path, store_schema=False)


BOMBS = {
    "a text that all items of one list have": list_of_one_text,
    "a text that all rows of many columns have": texts_of_many,
    "a text that all rows have": lambda path: texts_of_one(path, 1500, 1 << 20),
    "more rows of it": lambda path: texts_of_one(path, 100_000, 1 << 16),
    "a list of zeros": lists_of_nothing,
    "a page of zeros": page_of_zeros,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_file_that_stands_for_more_than_it_is_worth_is_bad_by_name_in_bounded_memory(tmp_path: Path, bomb: str):
    BOMBS[bomb](tmp_path / "1.parquet")
    assert (tmp_path / "1.parquet").stat().st_size < 100_000
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from tests.weir.sources.test_hostile_parquet import read\n"
        "read  # all is imported\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    read(Path(sys.argv[1]))\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, '1.parquet' in str(error), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    limited = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, env={**os.environ},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)),
    )  # fmt: skip
    kind, named, kilobytes = limited.stdout.split()
    assert (kind, named) == ("InputError", "True")
    assert int(kilobytes) < 700 << 10, "what one file may take, and what reads it"


def test_a_file_that_claims_rows_of_nothing_is_bad_by_name(tmp_path: Path):
    rows = 40_000_000
    pq.write_table(pa.table({"n": pa.nulls(rows, pa.int8())}), tmp_path / "1.parquet")
    assert (tmp_path / "1.parquet").stat().st_size < 100_000
    refused(tmp_path, rf"has {rows:,} rows in [\d,]+ bytes")


def test_a_file_of_too_many_columns_or_too_deep_ones_is_bad_by_name(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(bounds, "MOST_COLUMNS", 10)
    pq.write_table(pa.table({str(number): [1] for number in range(11)}), tmp_path / "1.parquet")
    refused(tmp_path, "has 11 columns, and at most 10 are read")
    deep = pa.int64()
    for _ in range(60):
        deep = pa.list_(deep)
    pq.write_table(pa.table({"n": pa.nulls(1, deep)}), tmp_path / "1.parquet")
    refused(tmp_path, "1.parquet")


def test_what_a_column_costs_does_not_grow_with_the_number_of_columns(tmp_path: Path):
    def calls(columns: int) -> int:
        pq.write_table(pa.table({f"c{number}": [1] for number in range(columns)}), tmp_path / "1.parquet")
        done: Counter[str] = Counter()
        sys.setprofile(lambda _, event, __: done.update([event]))
        try:
            read(tmp_path, read(tmp_path).schema)
        finally:
            sys.setprofile(None)
        return done["call"] + done["c_call"]

    calls(10)  # all is imported
    assert calls(400) < 6 * calls(100)


def test_wide_rows_are_decoded_few_at_a_time_and_narrow_ones_many(tmp_path: Path):
    def at_once(**columns: Any) -> int:
        stream = io.BytesIO()
        pq.write_table(pa.table(columns), stream)
        source = pa.BufferReader(stream.getvalue())
        opened = ParquetRows.opened(source, source.size())
        names = list(columns)
        groups = range(opened.parquet.metadata.num_row_groups)
        return bounds.rows_at_once(source, opened.parquet, names, groups, 65_536, source.size())

    count = 100_000
    assert at_once(n=range(count), k=["key"] * count) == 65_536
    assert at_once(k=["key", "x" * 100_000] * 500) < 1_000, "by the longest value of the dictionary"
    assert at_once(many=[list(range(1000))] * 1000) > 1_000
    assert at_once(**{str(number): range(1000) for number in range(300)}) < 65_536


# -- what it says


def test_two_columns_of_one_name_are_refused_unless_nobody_reads_them(tmp_path: Path):
    pq.write_table(pa.table([[1], [2], [3]], names=["a", "a", "b"]), tmp_path / "1.parquet")
    refused(tmp_path, r"The input file 1\.parquet has two columns 'a'")
    assert read(tmp_path, pa.schema([("b", pa.int64())])).to_pylist() == [{"b": 3}]
    fields = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    pq.write_table(pa.table({"s": fields, "b": [3]}), tmp_path / "1.parquet")
    refused(tmp_path, r"has two fields 'x' within the column 's'")


def test_an_encrypted_file_is_called_that(tmp_path: Path):
    (tmp_path / "1.parquet").write_bytes(b"PARE" + b"\x00" * 40 + b"\x20\x00\x00\x00PARE")
    refused(tmp_path, r"1\.parquet is encrypted, and Weir has no keys")


@pytest.mark.parametrize("name", ["1.parquet", "sub/1.parquet"])
def test_a_link_out_of_the_directory_is_not_followed(tmp_path: Path, name: str):
    private, landing = tmp_path / "private", tmp_path / "landing"
    for directory in (private, landing):
        directory.mkdir()
    pq.write_table(pa.table({"n": [42]}), private / "1.parquet")
    if "/" in name:
        (landing / "sub").symlink_to(private)
    else:
        (landing / name).symlink_to(private / name)
    pattern = f"{landing}/**/*.parquet" if "/" in name else f"{landing}/*.parquet"
    for on_bad in ("fail", "quarantine"):
        reader = FilesReader(FileSource(pattern, on_bad=on_bad), pattern)
        if on_bad == "fail" and reader.look(None).fresh:
            with pytest.raises(InputError, match="is a link out of its directory, which is not followed"):
                reader.plan(None, LIMITS, None)
        planned = reader.plan(None, LIMITS, None) if on_bad == "quarantine" else None
        assert planned is None or not planned.files


@pytest.mark.parametrize("format", ["csv", "json"])
def test_nor_is_one_of_a_file_that_is_decoded(tmp_path: Path, format: str):
    from weir.sources.source_directory import LandingDirectory

    (tmp_path / "landing").mkdir()
    (tmp_path / f"private.{format}").write_text("n\n1\n")
    (tmp_path / f"landing/a.{format}").symlink_to(tmp_path / f"private.{format}")
    landing = LandingDirectory(f"{tmp_path}/landing/*.{format}", "source files", None)
    (file,) = landing.files()
    with pytest.raises(InputError, match="is a link out of its directory"):
        landing.opened(file)


def test_a_link_within_the_directory_is_a_file_like_any_other(tmp_path: Path):
    (tmp_path / ".kept").mkdir()
    pq.write_table(pa.table({"n": [42]}), tmp_path / ".kept/x.parquet")
    (tmp_path / "1.parquet").symlink_to(tmp_path / ".kept/x.parquet")
    assert read(tmp_path).to_pylist() == [{"n": 42}]


# -- flipped and cut


def sound() -> pa.Table:
    return pa.table({
        "n": pa.array(range(200), pa.int64()), "k": [f"key-{number % 7}" for number in range(200)],
        "d": pa.array([Decimal(number) / 100 for number in range(200)], pa.decimal128(9, 2)),
        "l": [[{"x": number, "y": "é"}] * (number % 3) for number in range(200)],
        "at": pa.array(range(200), pa.timestamp("ms", "UTC")), "f": [number / 3 for number in range(200)],
    })  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zstd", "write_page_checksum": True},
        {"compression": "none", "write_page_checksum": True, "use_dictionary": False},
        {"compression": "snappy", "data_page_version": "2.0", "row_group_size": 64},
        {"compression": "gzip", "use_deprecated_int96_timestamps": True, "store_schema": False},
    ],
    ids=str,
)
def test_bytes_that_were_flipped_or_cut_give_an_error_with_the_files_name_or_rows(tmp_path: Path, options: Any):
    """With checksums, the rows that are read are right."""
    path, table, chance = tmp_path / "1.parquet", sound(), random.Random(20_261_128)
    pq.write_table(table, path, **options)
    raw, right = path.read_bytes(), read(tmp_path)
    for _ in range(60):
        data, end = bytearray(raw), len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
        if chance.random() < 0.2:
            data = data[: chance.randrange(len(data))]
        for _ in range(chance.choice((1, 1, 2, 8))):
            if data:
                data[chance.randrange(min(len(data), end))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        try:
            rows = read(tmp_path)
        except InputError as error:
            assert "1.parquet" in str(error)
            continue
        if options.get("write_page_checksum"):
            same = [name for name in right.schema.names if name in rows.schema.names]
            assert rows.num_rows == right.num_rows
            assert sum(rows.column(name).equals(right.column(name)) for name in same) >= len(same) - 1


def written(writer: str, table: pa.Table) -> bytes:
    stream = io.BytesIO()
    if writer == "polars":
        pl.from_arrow(table).write_parquet(stream)
    elif writer == "arrow":
        pq.write_table(table, stream, write_page_index=True)
    else:
        with tempfile.NamedTemporaryFile(suffix=".parquet") as file, duckdb.connect() as connection:
            connection.register("rows", table)
            connection.sql(f"COPY (FROM rows) TO '{file.name}' (FORMAT parquet)")
            return Path(file.name).read_bytes()
    return stream.getvalue()


def flipped_footers(data: bytes) -> Iterator[bytes]:
    """The file with each bit of its footer flipped, one at a time."""
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for bit in range(begin * 8, len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def ask(data: bytes) -> None:
    """Ask a file's footer all that a source asks."""
    try:
        parquet = ParquetRows.opened(pa.BufferReader(data), len(data)).parquet
    except (bounds.TooMuchError, ValueError, OSError, pa.ArrowException):
        return
    footer, stored = parquet.metadata, parquet.schema_arrow
    footers.by_arrow(footer, stored, stored.names)
    footers.nanos(footer, stored)
    footers.enums(footer, stored)
    for name, column in zip(stored.names, stored.types, strict=True):
        if pa.types.is_timestamp(column):
            footers.times(footer, name)


@pytest.mark.parametrize("writer", ["arrow", "duckdb", "polars"])
def test_no_bit_of_a_footer_ends_the_process(writer: str):
    """Each of them, in a process of its own: where Arrow asks what it has not checked, no exception comes of it."""
    code = (
        "import sys; from tests.weir.sources import test_hostile_parquet as hostile\n"
        "data = hostile.written(sys.argv[1], hostile.sound().select(['n', 'k', 'at']))\n"
        "print(len([hostile.ask(flipped) for flipped in hostile.flipped_footers(data)]))\n"
    )
    asked = subprocess.run([sys.executable, "-c", code, writer], capture_output=True, text=True, env={**os.environ})
    assert asked.returncode == 0, asked.stderr[-2000:]
    assert int(asked.stdout) > 2_000


@pytest.mark.long
@pytest.mark.parametrize("writer", ["arrow", "duckdb", "polars"])
def test_files_with_flipped_footers_are_read_or_bad_by_name(tmp_path: Path, writer: str):
    code = (
        "import random, sys; from pathlib import Path\n"
        "from state_ops.errors import InputError\n"
        "from tests.weir.sources import test_hostile_parquet as hostile\n"
        "root = Path(sys.argv[2])\n"
        "flipped = list(hostile.flipped_footers(hostile.written(sys.argv[1], hostile.sound())))\n"
        "for data in random.Random(28).sample(flipped, 1000):\n"
        "    (root / '1.parquet').write_bytes(data)\n"
        "    try:\n"
        "        hostile.read(root)\n"
        "    except InputError as error:\n"
        "        assert '1.parquet' in str(error)\n"
    )
    read = [sys.executable, "-c", code, writer, str(tmp_path)]
    ended = subprocess.run(read, capture_output=True, text=True, env={**os.environ})
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_page_headers_that_are_garbage_are_a_value_error():
    chance = random.Random(7)
    for _ in range(2_000):
        data = bytes(chance.randrange(256) for _ in range(chance.randrange(40)))
        try:
            list(pages(memoryview(data)))
        except ValueError:
            continue
