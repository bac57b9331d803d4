"""A table in a bucket that rows are looked up in."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from state_ops.errors import ConfigurationError, InputError, LostError, TransientError, VanishedError
from state_ops.storage.s3 import delta_options
from tests.storage.conftest import Bucket
from weir.connectors.lookups.lookup_table import LookupTable


def rows_of(table: LookupTable, version, **more) -> list[dict]:
    return [row for part in table.rows(version, version.columns, **more) for row in part.to_pylist()]


def test_versions_of_a_delta_table_in_a_bucket(bucket: Bucket):
    uri = f"s3://{bucket.name}/lake/names"
    options = {"storage_options": delta_options(bucket.settings())}
    table = pickle.loads(pickle.dumps(LookupTable(uri, "lookup named", bucket.settings())))
    with pytest.raises(InputError, match="no Delta table"):
        table.newest()
    write_deltalake(uri, pa.table({"key": [1, 2], "kind": ["a b", "c/d"]}), partition_by=["kind"], **options)
    old = table.newest()
    assert (old.number, table.newest()) == (0, old)
    write_deltalake(uri, pa.table({"key": [3], "kind": ["e"]}), mode="overwrite", **options)
    new = table.newest()
    assert new.number == 1 and new.same != old.same
    assert sorted(row["key"] for row in rows_of(table, old)) == [1, 2]
    assert rows_of(table, new) == [{"key": 3, "kind": "e"}]
    assert table.missing(old) is table.missing(new) is None
    listed = bucket.client.list_objects_v2(Bucket=bucket.name, Prefix="lake/names/kind=a")["Contents"]
    bucket.client.delete_object(Bucket=bucket.name, Key=listed[0]["Key"])
    assert table.missing(old) == "1 of its 2 files is gone, by a vacuum"
    with pytest.raises(LostError, match="vacuumed"):
        rows_of(table, old)
    with pytest.raises(VanishedError, match="vacuumed"):
        rows_of(table, old, fresh=True)
    with pytest.raises(TransientError):
        LookupTable(uri, "lookup named", bucket.settings(1, max_attempts=1)).newest()
    with pytest.raises(ConfigurationError, match="holds credentials"):
        LookupTable(f"s3://key:secret@{bucket.name}/lake/names", "lookup named", bucket.settings())


def test_a_parquet_file_in_a_bucket(bucket: Bucket):
    def put(rows: pa.Table) -> None:
        data = pa.BufferOutputStream()
        pq.write_table(rows, data)
        bucket.client.put_object(Bucket=bucket.name, Key="lake/names.parquet", Body=data.getvalue().to_pybytes())

    table = LookupTable(f"s3://{bucket.name}/lake/names.parquet", "lookup named", bucket.settings())
    with pytest.raises(InputError, match="no such file"):
        table.newest()
    put(pa.table({"key": [1]}))
    old = table.newest()
    assert rows_of(table, old) == [{"key": 1}]
    put(pa.table({"key": [2]}))
    assert table.newest().same != old.same
    assert table.missing(old) == "the file was replaced"
    with pytest.raises(LostError, match="was replaced"):
        rows_of(table, old)
    bucket.client.put_object(Bucket=bucket.name, Key="lake/names.parquet", Body=b"no Parquet")
    with pytest.raises(InputError, match="cannot be read"):
        table.newest()
    with pytest.raises(TransientError):
        LookupTable(table.uri, "lookup named", bucket.settings(1, max_attempts=1)).newest()
