"""Frames of any library as canonical Arrow tables."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import deltalake
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from state_ops.arrow import frames

US = pa.timestamp("us", tz="UTC")
NANOS = [-1, 0, 1_999, None, 1_704_067_200_000_000_001]
MICROS = [-1, 0, 1, None, 1_704_067_200_000_000]


FROM_ARROW = {"polars": pl.from_arrow, "pandas": pa.Table.to_pandas, "pyarrow": lambda table: table}
ZONES = [None, "UTC", "America/New_York", "+05:30"]  # the last one Polars does not have


@pytest.mark.parametrize(
    ("library", "zone"),
    [(library, zone) for library in FROM_ARROW for zone in ZONES if (library, zone) != ("polars", "+05:30")],
)
def test_nanoseconds_are_cut_to_microseconds_in_every_library(library, zone):
    table = pa.table({"k": ["a"] * 5, "at": pa.array(NANOS, pa.timestamp("ns", tz=zone))})
    frame = FROM_ARROW[library](table)
    converted = frames.arrow(frame)
    assert converted.schema == pa.schema([("k", pa.string()), ("at", US)])
    assert converted.column("at").cast(pa.int64()).to_pylist() == MICROS
    assert frames.arrow(frame[:0]).schema.field("at").type == US


def test_nanoseconds_within_lists_maps_and_structs_are_cut_too():
    nanos = pa.array(NANOS, pa.timestamp("ns"))
    offsets = pa.array([0, 2, 5])
    table = pa.table(
        {
            "list": pa.ListArray.from_arrays(offsets, nanos),
            "map": pa.MapArray.from_arrays(offsets, pa.array(list("abcde")), nanos),
            "struct": pa.StructArray.from_arrays([nanos.slice(0, 2), pa.array([1, 2], pa.uint8())], ["at", "n"]),
        }
    )
    canonical = frames.canonical(table)
    assert canonical.schema == frames.canonical_schema(table.schema)
    first = datetime(1970, 1, 1, tzinfo=UTC) - timedelta(microseconds=1)
    assert canonical.column("list")[0].as_py()[0] == canonical.column("map")[0].as_py()[0][1] == first
    assert canonical.column("struct")[0].as_py() == {"at": first, "n": 1}
    assert canonical.column("list")[1].as_py()[1] is None
    assert frames.canonical(table.schema.empty_table()).schema == canonical.schema


def test_pandas_gets_nulls_as_its_own_and_counts_nan_as_one():
    table = frames.arrow(pd.DataFrame({"fare": [1.5, float("nan"), None]}))
    assert table.column("fare").to_pylist() == [1.5, None, None]


@pytest.mark.parametrize("value", [1, {"a": 1}, [1, 2]])
def test_columns_that_polars_hands_out_without_bytes_can_be_copied(value):
    lists = pl.Series([[value] * 3, [], []])[1:]
    none = lists.list.explode(empty_as_null=False)  # a piece without rows, from behind the three
    table = frames.arrow(none.to_frame("v"))
    assert len(table.column("v").combine_chunks()) == 0
    inside = pl.DataFrame({"v": lists}).select(pl.struct("v").alias("s"))
    assert frames.stored(inside, frames.arrow(inside).schema).column("s").combine_chunks().to_pylist() == [
        {"v": []},
        {"v": []},
    ]


def test_rows_for_people_have_far_dates_and_texts_that_are_not_utf8():
    """State of an earlier release may have them, inside of structs and lists too."""
    texts = pa.array([b"caf\xe9", b"fine"], pa.binary()).view(pa.string())
    days = pa.array([2_932_897, 0], pa.int32()).view(pa.date32())
    nested = pa.StructArray.from_arrays([texts, days], ["text", "day"])
    rows = frames.python_rows(pa.table({"text": texts, "parts": nested}))
    assert rows[0] == {"text": "caf\\xe9", "parts": {"text": "caf\\xe9", "day": "10000-01-01"}}
    assert rows[1]["parts"]["text"] == "fine" and str(rows[1]["parts"]["day"]) == "1970-01-01"


@pytest.mark.parametrize(
    ("part", "levels"), [(lambda type: pa.struct([("a", type)]), 36), (pa.list_, 109)], ids=["records", "lists"]
)
def test_a_type_that_is_nested_deeper_than_a_delta_log_can_say_is_refused(tmp_path, part, levels):
    type = pa.int64()
    for _ in range(levels):
        type = part(type)
    assert frames.unstorable(type) is None
    deltalake.write_deltalake(str(tmp_path), pa.table({"a": pa.nulls(1, type)}))
    assert frames.unstorable(part(type)) == part(type) == frames.unreadable(part(type))
