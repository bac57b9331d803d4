"""Rows of Parquet files with values that no table can hold: bad rows by file and number, however the file is read."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import InputError
from tests.recovery.harness import Site
from weir import Epoch, Pipeline, State, ValueState, agg, aggregate, delta, files, select, stage
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run

SOURCE = files("{landing}/*.parquet", name="landing", on_bad="quarantine")
STRICT = files("{landing}/*.parquet", name="landing")
FAR = 2**31 - 1  # days: DuckDB's infinity


def unchecked(*values: bytes) -> pa.Array:
    """Texts of bytes that nobody has checked, as writers that do not check make them."""
    ends = np.cumsum([0, *map(len, values)]).astype(np.int32)
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(values)))


def too_many_digits(*values: int) -> pa.Array:
    data = b"".join(value.to_bytes(16, "little", signed=True) for value in values)
    return pa.Array.from_buffers(pa.decimal128(4, 2), len(values), [None, pa.py_buffer(data)])


def far_int96(path: Path) -> None:
    """A time of 96 bits whose days are some million years ahead, which as microseconds wraps around into this age."""
    table = pa.table({"n": [0, 1, 2], "odd": pa.array([0, 1, 2], pa.timestamp("ns"))})
    pq.write_table(
        table, path, use_deprecated_int96_timestamps=True, use_dictionary=False, compression="none", store_schema=False
    )
    raw = path.read_bytes()
    old = (1).to_bytes(8, "little") + (2_440_588).to_bytes(4, "little")
    assert raw.count(old) == 1
    days = 2_440_588 + 19_000 + (1 << 64) // 86_400_000_000
    path.write_bytes(raw.replace(old, (1).to_bytes(8, "little") + days.to_bytes(4, "little")))


TEXT = unchecked(b"a", b"he\xfflo", b"c")
ODD: dict[str, Any] = {
    "date": pa.array([20_000, FAR, None], pa.date32()),
    "moment": pa.array([0, 2**62, None], pa.timestamp("us")),
    "millis": pa.array([0, 2**62, None], pa.timestamp("ms")),
    "text": TEXT,
    "struct": pa.StructArray.from_arrays([TEXT], ["x"]),
    "list": pa.ListArray.from_arrays([0, 1, 2, 3], TEXT),
    "map": pa.MapArray.from_arrays([0, 1, 2, 3], pa.array(["a", "b", "c"]), TEXT),
    "decimal": too_many_digits(123, 12_345_678, 999),
    "unsigned": pa.array([0, 2**64 - 1, None], pa.uint64()),
    "list of unsigned": pa.array([[0], [1, 2**64 - 1], None], pa.list_(pa.uint64())),
    "map of millis": pa.array([[("a", 0)], [("a", 2**62)], []], pa.map_(pa.string(), pa.timestamp("ms"))),
    "map with a key twice": pa.array([[("a", 1)], [("a", 1), ("a", 2)], None], pa.map_(pa.string(), pa.int64())),
    "list of maps": pa.array(
        [[[(1, 1)]], [[(1, 1)], [(2, 1), (2, 1)]], None], pa.list_(pa.map_(pa.int32(), pa.int8()))
    ),
}


def put(path: Path, kind: str) -> None:
    if kind == "int96":
        far_int96(path)
        return
    pq.write_table(pa.table({"n": [0, 1, 2], "odd": ODD[kind]}), path, store_schema=False)


def site_of(root: Path, pipeline: Pipeline, **settings: str) -> Site:
    site = Site(root, settings, pipeline, __name__)
    site.landing.mkdir(parents=True, exist_ok=True)
    return site


def played(site: Site, spark: bool = False) -> list[Any]:
    executor = None if spark else InMemoryExecutor()
    return list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor))


def rows_of(site: Site, table: str) -> list[dict[str, Any]]:
    return site.table(table).to_dict("records")


kept = select("kept", SOURCE, "n", "odd", sink=delta.append("kept"))
strict = select("kept", STRICT, "n", "odd", sink=delta.append("kept"))


@pytest.mark.parametrize("kind", [*ODD, "int96"])
def test_a_value_that_cannot_be_handed_on_is_a_bad_row_by_file_and_number(tmp_path: Path, kind: str):
    site = site_of(tmp_path, Pipeline("odd", (kept,), max_parallelism=8))
    put(site.landing / "1.parquet", kind)
    (report,) = played(site)
    assert sorted(row["n"] for row in rows_of(site, "kept")) == [0, 2]
    (bad,) = rows_of(site, "kept_quarantine")
    assert (bad["_weir_file"], bad["_weir_row"], bad["_weir_gate"]) == ("1.parquet", 1, "on_bad")
    assert "'odd" in bad["_weir_reason"] and bad["n"] == 1 and pd.isna(bad["odd"])
    assert report.checkpoint.rows_quarantined == 1
    assert not played(site), "it is read"


@pytest.mark.parametrize("kind", [*ODD, "int96"])
def test_else_the_epoch_is_declined_with_file_row_column_and_value(tmp_path: Path, kind: str):
    site = site_of(tmp_path, Pipeline("odd", (strict,), max_parallelism=8))
    put(site.landing / "1.parquet", kind)
    with pytest.raises(
        InputError, match=r"The column 'odd.*' of the input file 1\.parquet has a value in row 1"
    ) as bad:
        played(site)
    assert bad.value.where == f"{site.landing}/1.parquet, row 1"
    (site.landing / "1.parquet").rename(tmp_path / "away.parquet")
    assert not played(site), "nothing of it was committed"


@pytest.mark.parametrize("kind", [*ODD, "int96"])
def test_a_value_of_a_column_that_nobody_reads_holds_nobody(tmp_path: Path, kind: str):
    plain = select("kept", STRICT, "n", sink=delta.append("kept"))
    site = site_of(tmp_path, Pipeline("odd", (plain,), max_parallelism=8))
    put(site.landing / "1.parquet", kind)
    played(site)
    assert sorted(row["n"] for row in rows_of(site, "kept")) == [0, 1, 2]


def test_many_files_with_bad_rows_are_worked_off_at_one_go(tmp_path: Path):
    site = site_of(tmp_path, Pipeline("odd", (kept,), max_parallelism=8))
    for number in range(5):
        odd = pa.array([0, FAR, 1, FAR, -FAR], pa.date32())
        table = pa.table({"n": [10 * number + at for at in range(5)], "odd": odd})
        pq.write_table(table, site.landing / f"{number}.parquet", row_group_size=2)
    (report,) = played(site)
    assert report.checkpoint.id == 2, "one replay"
    assert sorted(row["n"] for row in rows_of(site, "kept")) == [10 * file + at for file in range(5) for at in (0, 2)]
    bad = {(row["_weir_file"], row["_weir_row"]) for row in rows_of(site, "kept_quarantine")}
    assert bad == {(f"{file}.parquet", at) for file in range(5) for at in (1, 3, 4)}


def test_a_category_that_is_no_utf8_sets_its_file_aside_since_arrow_does_not_say_which_row_has_it(tmp_path: Path):
    site = site_of(tmp_path, Pipeline("odd", (kept,), max_parallelism=8))
    odd = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2]), TEXT)
    pq.write_table(pa.table({"n": [0, 1, 2], "odd": odd}), site.landing / "1.parquet")
    pq.write_table(pa.table({"n": [7], "odd": ["fine"]}), site.landing / "2.parquet")
    (report,) = played(site)
    (aside,) = report.checkpoint.slice["landing"]["set_aside"]
    assert aside["name"] == "1.parquet" and "UTF8" in aside["reason"]
    assert [row["n"] for row in rows_of(site, "kept")] == [7]


def test_a_file_with_too_many_bad_rows_is_set_aside_as_a_whole(tmp_path: Path):
    site = site_of(tmp_path, Pipeline("odd", (kept,), max_parallelism=8))
    count = 10_001
    pq.write_table(
        pa.table({"n": range(count), "odd": pa.array([FAR] * count, pa.date32())}), site.landing / "1.parquet"
    )
    pq.write_table(pa.table({"n": [7], "odd": pa.array([1], pa.date32())}), site.landing / "2.parquet")
    (report,) = played(site)
    assert [row["n"] for row in rows_of(site, "kept")] == [7]
    (aside,) = report.checkpoint.slice["landing"]["set_aside"]
    assert aside["name"] == "1.parquet" and "'odd'" in aside["reason"]


class Seen(State):
    """Of one key."""

    rows: int = 0


@stage("seen", source=SOURCE, key="k", state=Seen, sink=delta.append("seen"))
def seen(rows: pa.Table, state: ValueState, epoch: Epoch) -> pa.Table:
    state.fold(rows, rows=agg.count())
    return rows.select(["k", "n"])


through = aggregate(
    "through", SOURCE, key="k", sink=delta.append("through"), n=agg.sum("n"), transform=lambda rows: rows
)


@pytest.mark.parametrize("megabytes", ["32", "0"], ids=["direct", "by blocks"])
def test_on_spark_the_same_rows_are_bad_whatever_reads_them(tmp_path: Path, spark: Any, megabytes: str):
    """A stage whose subtasks read for themselves, and one whose rows go through a transform, with lists."""
    pipeline = Pipeline("odd", (seen, through), max_parallelism=8)
    results = []
    for name, by_spark in (("memory", False), ("spark", True)):
        stages = pipeline if by_spark else Pipeline("odd", (seen,), max_parallelism=8)
        site = site_of(tmp_path / name, stages, WEIR_SPARK__DIRECT_READ_MB=megabytes)
        for number, kind in enumerate(("date", "text", "list")):
            table = pa.table({"n": [0, 1, 2], "k": ["a", "b", "a"], kind: ODD[kind]})
            others = {other: pa.nulls(3, ODD[other].type) for other in ("date", "text", "list") if other != kind}
            for other, nothing in others.items():
                table = table.append_column(other, nothing)
            pq.write_table(table.select(["n", "k", "date", "text", "list"]), site.landing / f"{number}.parquet")
        played(site, by_spark)
        bad = sorted(
            (row["_weir_file"], row["_weir_row"], row["_weir_reason"], row["n"])
            for row in rows_of(site, "seen_quarantine")
        )
        results.append((sorted((row["k"], row["n"]) for row in rows_of(site, "seen")), bad))
        if by_spark:
            assert [(row["k"], row["n"]) for row in rows_of(site, "through")] == [("a", 6)]
            assert len(rows_of(site, "through_quarantine")) == 3
    assert results[0] == results[1]
    assert [bad[:2] for bad in results[0][1]] == [(f"{number}.parquet", 1) for number in range(3)]


def test_decimals_that_fit_are_read_however_they_are_stored(tmp_path: Path):
    site = site_of(tmp_path, Pipeline("odd", (strict,), max_parallelism=8))
    values = pa.array([Decimal("99.99"), Decimal("-99.99"), None], pa.decimal128(4, 2))
    pq.write_table(pa.table({"n": [0, 1, 2], "odd": values}), site.landing / "1.parquet", store_decimal_as_integer=True)
    pq.write_table(pa.table({"n": [0, 1, 2], "odd": values}), site.landing / "2.parquet")
    played(site)
    assert sorted(str(row["odd"]) for row in rows_of(site, "kept")) == sorted(["99.99", "-99.99", "None"] * 2)
