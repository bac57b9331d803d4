"""Files in nested directories: what they are called, the columns of their directories, and that all readers agree."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import ConfigurationError, InputError
from weir.connectors.formats import hive
from weir.definition import ROW, FileSource
from weir.execution import direct_read
from weir.execution.executor import Landed
from weir.execution.spark.spark_executor import _read_source
from weir.settings.configuration import EpochSettings
from weir.sources.files import FilesReader
from weir.sources.slices import Slice

LIMITS = EpochSettings()


def put(root: Path, name: str, *numbers: int, **more: Any) -> None:
    """A file with a column n, and others."""
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"n": pa.array(numbers, pa.int64()), **more}), file)


def reader(root: Path, below: str, **options: Any) -> FilesReader:
    pattern = f"{root}/{below}"
    return FilesReader(FileSource(pattern, **options), pattern)


def planned(root: Path, below: str, expected: pa.Schema | None = None, **options: Any) -> Slice:
    return reader(root, below, **options).plan(None, LIMITS, expected)


def names(root: Path, below: str) -> list[str]:
    return [file.name for file in reader(root, below).look(None).fresh]


def test_a_name_is_the_path_below_the_first_wildcard(tmp_path: Path):
    for name in (
        "a.parquet",
        "x/a.parquet",
        "x/y/a.parquet",
        "x/y/b.csv",
        "_tmp/a.parquet",
        "x/.y/a.parquet",
        "x/_a.parquet",
    ):
        put(tmp_path, name, 1)
    assert names(tmp_path, "*.parquet") == ["a.parquet"]
    assert names(tmp_path, "x/*.parquet") == ["a.parquet"]
    assert names(tmp_path, "*/*.parquet") == ["x/a.parquet"]
    assert names(tmp_path, "**/*.parquet") == ["a.parquet", "x/a.parquet", "x/y/a.parquet"]
    assert names(tmp_path, "**/y/*") == ["x/y/a.parquet", "x/y/b.csv"]
    assert names(tmp_path, "x/**") == ["a.parquet", "y/a.parquet", "y/b.csv"]
    assert names(tmp_path, "[w-x]/?/a.*") == ["x/y/a.parquet"]
    with pytest.raises(ConfigurationError, match="has to begin with a directory"):
        FilesReader(FileSource("/*/a"), "/*/a")


def test_what_has_been_read_is_not_read_again_and_files_are_watched_by_their_paths(tmp_path: Path):
    put(tmp_path, "d=1/a.parquet", 1)
    source = reader(tmp_path, "d=*/*.parquet")
    first = source.plan(None, LIMITS, None)
    position = source.advance(None, first)
    assert position["seen"] == ["d=1/a.parquet"]
    put(tmp_path, "d=2/a.parquet", 2)
    second = source.plan(position, LIMITS, first.schema)
    assert [file.name for file in second.files] == ["d=2/a.parquet"]
    assert source.plan_again(second.to_dict(), first.schema).files == second.files
    source.verify(second)
    (tmp_path / "d=2/a.parquet").unlink()
    with pytest.raises(InputError, match="vanished"):
        source.verify(second)


def test_columns_of_directories_have_the_types_of_their_first_values_or_declared_ones(tmp_path: Path):
    put(tmp_path, "day=2024-01-02/h=07/c=a%2Fb/a.parquet", 1, h=pa.array(["in the file"]))
    columns = planned(tmp_path, "**/*.parquet").schema
    assert columns == pa.schema([("n", pa.int64()), ("day", pa.date32()), ("h", pa.int64()), ("c", pa.string())])
    declared = planned(tmp_path, "**/*.parquet", partitions=(("day", "string"), ("h", "string"))).schema
    assert declared == pa.schema([("n", pa.int64()), ("day", pa.string()), ("h", pa.string()), ("c", pa.string())])
    put(tmp_path, "day=x/h=8/c=1/a.parquet", 2)
    with pytest.raises(InputError, match="says day=x, which is no date32"):
        planned(tmp_path, "**/*.parquet")
    aside = planned(tmp_path, "**/*.parquet", on_bad="quarantine")
    assert [bad.file.name for bad in aside.set_aside] == ["day=x/h=8/c=1/a.parquet"]


def test_a_directory_without_a_column_that_others_have_is_refused(tmp_path: Path):
    put(tmp_path, "d=1/a.parquet", 1)
    put(tmp_path, "e/a.parquet", 1)
    with pytest.raises(InputError, match="has no column 'd'"):
        planned(tmp_path, "**/*.parquet")


def test_values_of_directories():
    assert hive.partitions_of("a=1/b/c=x%3Dy/=2/a=3/f=4") == (("a", "3"), ("c", "x=y"))
    assert hive.partitions_of("a=__HIVE_DEFAULT_PARTITION__/f") == (("a", None),)
    assert hive.partitions_of("a=%FF/b=%FE%41/f") == (("a", "%FF"), ("b", "%FE%41"))
    types = {text: hive.type_of(text) for text in ("1", "-07", "1.5", "2024-02-29", "2024-02-30", "", "1" * 19)}
    assert types == {
        "1": pa.int64(), "-07": pa.int64(), "1.5": pa.string(), "2024-02-29": pa.date32(), "2024-02-30": pa.string(),
        "": pa.string(), "1" * 19: pa.string(),
    }  # fmt: skip


def test_a_column_is_said_by_directories_of_some_files_and_stands_in_others(tmp_path: Path, spark: Any):
    put(tmp_path, "d=1/a.parquet", 1)
    put(tmp_path, "e/a.parquet", 2, d=pa.array([5], pa.int64()))
    put(tmp_path, "f/d=__HIVE_DEFAULT_PARTITION__/a.parquet", 3, d=pa.array([6], pa.int64()))
    source = reader(tmp_path, "**/*.parquet")
    slice = source.plan(None, LIMITS, None)
    assert slice.schema is not None
    rows = Landed(slice.schema, source, slice.files)
    for table in (pa.concat_tables(direct_read.tables(rows, 7)), _read_source(spark, rows, 7).toArrow()):
        assert table.sort_by("n").to_pydict() == {"n": [1, 2, 3], "d": [1, 5, None]}


@pytest.mark.parametrize("tracked", [False, True])
def test_spark_and_arrow_read_the_same_rows_of_nested_files(tmp_path: Path, spark: Any, tracked: bool):
    """Two files of one name in two directories, a null, and names that have to be escaped."""
    put(tmp_path, "day=2024-01-02/s=a b/x.parquet", 1, 2)
    put(tmp_path, "day=2024-01-03/s=a%2Fb+[c]/x.parquet", 3, 4, day=pa.array(["in", "file"]))
    put(tmp_path, "day=__HIVE_DEFAULT_PARTITION__/s=07/x y+%20[z].parquet", 5)
    source = reader(tmp_path, "day=*/*/*.parquet", partitions=(("s", "string"),))
    slice = source.plan(None, LIMITS, None)
    assert slice.schema is not None
    schema = slice.schema.append(pa.field(ROW, pa.int64())) if tracked else slice.schema
    rows = Landed(schema, source, slice.files, left_out=[1 << 40] if tracked else [])
    by_arrow = pa.concat_tables(direct_read.tables(rows, 7)).sort_by("n")
    by_spark = _read_source(spark, rows, 7).toArrow().cast(schema).sort_by("n")
    assert by_arrow.to_pylist() == by_spark.to_pylist()
    days = {row["n"]: (row["day"], row["s"]) for row in by_arrow.to_pylist()}
    assert days == {
        1: (date(2024, 1, 2), "a b"), 2: (date(2024, 1, 2), "a b"), 4: (date(2024, 1, 3), "a/b+[c]"), 5: (None, "07"),
    } | ({} if tracked else {3: (date(2024, 1, 3), "a/b+[c]")})  # fmt: skip
