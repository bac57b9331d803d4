"""Files of a table that others wrote, with times in 96 bits or dates by the old calendar: what is written anew of them
has the values that readers have seen before."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from state_ops.delta import fenced_table
from state_ops.delta.log_entries import active_files
from state_ops.moments import to_micros
from state_ops.storage.storage import Storage
from tests.weir.connectors.delta.test_upsert import publish, staged
from weir import delta as sinks
from weir.connectors.delta import append, predicates
from weir.connectors.delta.replace_where import Range, only
from weir.connectors.formats.stored_rows import stored_rows

SCHEMA = pa.schema([("key", pa.timestamp("us", "UTC")), ("n", pa.int64()), ("day", pa.date32())])
LAST = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
SPARK = {"org.apache.spark.version": "3.5.1", "org.apache.spark.legacyDateTime": ""}
ROWS = [(LAST, 1, date(2026, 1, 1)), (datetime(2026, 1, 1, tzinfo=UTC), 2, date(1000, 3, 6)), (None, 3, None)]
READ = [*ROWS[:1], (ROWS[1][0], 2, date(1000, 3, 1)), ROWS[2]]  # the day that Spark means


def written(path: Path, rows: list[tuple] = ROWS) -> None:
    table = pa.table(list(map(list, zip(*rows, strict=True))), schema=SCHEMA)
    with pq.ParquetWriter(path, table.schema, use_deprecated_int96_timestamps=True, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(SPARK)


@pytest.fixture
def storage(tmp_path) -> Storage:
    """A table whose only file was written by an old Spark."""
    opened = Storage(str(tmp_path / "p"))
    append.ensure(opened, "out", SCHEMA)
    publish(opened, 1, None, staged(opened, 1, ROWS[:2], SCHEMA), sink=sinks.upsert("out", "key"))
    (path,) = (tmp_path / "p/tables/out").rglob("*.parquet")
    written(path, ROWS[:2])
    return opened


def tuples(table: pa.Table) -> list[tuple]:
    return [tuple(row.values()) for row in table.to_pylist()]


def test_a_file_is_read_as_its_writer_has_meant_it(tmp_path):
    written(tmp_path / "a.parquet")
    with stored_rows(tmp_path / "a.parquet") as stored:
        assert stored.schema.metadata is None
        table = stored.read()
        assert table.schema.equals(stored.schema)
        assert tuples(table) == READ
        assert stored.read(["day"]).column_names == ["day"]
        assert [batch.num_rows for batch in stored.batches(2)] == [2, 1]


def test_an_upsert_leaves_rows_of_old_files_as_they_are_and_knows_their_keys(storage):
    new = datetime(2027, 1, 1, tzinfo=UTC)
    sink = sinks.upsert("out", "key")
    publish(storage, 2, 1, staged(storage, 2, [(ROWS[1][0], 5, None), (new, 6, None)], SCHEMA), sink=sink)
    table = DeltaTable(storage.full("tables/out")).to_pyarrow_table().sort_by("n")
    assert tuples(table) == [READ[0], (ROWS[1][0], 5, None), (new, 6, None)]
    publish(storage, 3, 2, staged(storage, 3, [(LAST, 7, None)], SCHEMA), sink=sink)
    assert DeltaTable(storage.full("tables/out")).to_pyarrow_table().sort_by("n").column("n").to_pylist() == [5, 6, 7]


def test_rows_beside_a_condition_are_left_as_they_are(storage, tmp_path):
    handle = fenced_table.open_table(storage, "tables/out")
    condition = predicates.predicate("out", "n = 2", handle)
    (goes,), (rest,) = predicates.apart(storage, condition, "data", active_files(handle), tmp_path)
    assert goes.rows == 2
    assert tuples(pq.read_table(storage.full(f"tables/out/{rest.path}"))) == READ[:1]


@pytest.mark.parametrize("inside", [True, False])
def test_a_range_that_is_cut_out_has_its_values(tmp_path, inside):
    written(tmp_path / "a.parquet")
    year = Range(*(to_micros(datetime(of, 1, 1, tzinfo=UTC)) for of in (2026, 2027)))
    assert only(tmp_path / "a.parquet", tmp_path / "b.parquet", "key", year, inside=inside) == (1 if inside else 2)
    left = pq.read_table(tmp_path / "b.parquet")
    expected = [READ[1]] if inside else [READ[0], READ[2]]
    assert tuples(left) == expected
    assert b"org.apache.spark.legacyDateTime" not in (pq.read_metadata(tmp_path / "b.parquet").metadata or {})
