"""State in a bucket is looked into like state on a disk, and exported to one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.storage import counting
from tests.storage.conftest import Bucket
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.inspection.export import to_delta
from weir.inspection.sql import answered
from weir.run.run import RunOptions, run


def test_state_in_a_bucket_is_read_asked_and_exported(bucket: Bucket, tmp_path: Path):
    counting.land(bucket, 1, 2)
    settings = counting.configured(bucket, tmp_path / "work")
    list(run(counting.pipeline, settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    before = bucket.objects()
    expected: dict[str, int] = {}
    for row in counting.rows_of(1) + counting.rows_of(2):
        expected[row["id"]] = expected.get(row["id"], 0) + 1
    tables = list(state_reader.scan(counting.pipeline, settings, "counts"))
    assert {row["id"]: row["rows"] for table in tables for row in table.to_pylist()} == expected
    query = "SELECT sum(rows)::BIGINT, (SELECT count(*) FROM counted), (SELECT max(id) FROM checkpoints) FROM counts"
    with answered(counting.pipeline, settings, query) as (_, answer):
        total = sum(expected.values())
        assert [tuple(row.values()) for table in answer for row in table.to_pylist()] == [(total, total, 2)]
    assert bucket.objects() == before, "the holds are gone"
    with state_reader.viewed(counting.pipeline, settings, "counts", None, "test") as view:
        uri, version = to_delta(view, settings, f"s3://{bucket.name}/exported")
        options = view.storage.delta_options
    exported = DeltaTable(uri, storage_options=options).to_pyarrow_table().to_pylist()
    assert (version, {row["id"]: row["rows"] for row in exported}) == (0, expected)


@pytest.mark.long
def test_an_export_to_a_store_that_is_busy_with_the_first_file_of_each_kind_is_written_once(
    bucket: Bucket, misbehaving: Callable[[str], int], quick_retries: None, tmp_path: Path
):
    """S3's 409 says nothing of what is there: the export is tried again, and is one version of the table."""
    counting.land(bucket, 1)
    settings = counting.configured(bucket, tmp_path / "work")
    list(run(counting.pipeline, settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    busy = counting.configured(bucket, tmp_path / "work", misbehaving("is busy with the first file of each kind"))
    with state_reader.viewed(counting.pipeline, settings, "counts", None, "test") as view:
        for expected in (0, 1):
            uri, version = to_delta(view, busy, f"s3://{bucket.name}/exported", force=True)
            assert version == expected
            table = DeltaTable(uri, storage_options=view.storage.delta_options)
            assert table.to_pyarrow_table().num_rows == sum(table.num_rows for table in view.tables())
