"""A Delta table in a bucket as a source."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from state_ops.errors import ConfigurationError, InputError, LostError, TransientError
from state_ops.storage.s3 import delta_options
from tests.storage.conftest import Bucket
from tests.storage.proxy import Proxy, Request, Reset, refused
from weir import delta
from weir.definition.source import Opening
from weir.testing.expected import is_clear
from weir.testing.source_contract import LARGE, read


def test_a_table_in_a_bucket(bucket: Bucket):
    uri = f"s3://{bucket.name}/lake/orders"
    for id in (1, 2):
        rows = pa.table({"id": [id, 10 * id], "kind": ["a b", "c/d"]})
        write_deltalake(
            uri, rows, partition_by=["kind"], mode="append", storage_options=delta_options(bucket.settings())
        )
    opening = Opening("p", str, {}, s3=bucket.settings())
    connector = delta.table(uri, start={"version": 0}).open(opening)
    parts = connector.plan(connector.begin({"version": 0}), LARGE).parts
    read_rows = [row for part in parts for row in read(connector, part)[0]]
    assert sorted((row["id"], row["kind"]) for row in read_rows) == [(1, "a b"), (2, "a b"), (10, "c/d"), (20, "c/d")]
    connector.verify(parts)
    snapshot = connector.plan(connector.begin("earliest"), LARGE)
    assert len(snapshot.parts) == 4 and snapshot.ends == {"table": True}
    path = parts[0].place["path"]
    bucket.client.delete_object(Bucket=bucket.name, Key=f"lake/orders/{path}")
    for call in (lambda: connector.verify(parts), lambda: read(connector, parts[0])):
        with pytest.raises(LostError, match="vacuumed"):
            call()
    with pytest.raises(InputError, match="no Delta table"):
        delta.table(f"s3://{bucket.name}/lake/nothing").open(opening).begin("earliest")
    with pytest.raises(ConfigurationError, match="NoSuchBucket"):
        delta.table("s3://no-such-bucket-here/lake/orders").open(opening).begin("earliest")
    with pytest.raises(ConfigurationError, match="holds credentials"):
        delta.table(f"s3://key:secret@{bucket.name}/lake/orders").open(opening)
    away = Opening("p", str, {}, s3=bucket.settings(1, max_attempts=1))
    with pytest.raises(TransientError):
        delta.table(uri).open(away).begin("earliest")


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (refused(503, "SlowDown"), TransientError),
        (Reset(), TransientError),
        (refused(403, "AccessDenied"), ConfigurationError),
    ],
)
def test_whatever_request_is_refused_it_is_named_for_what_it_is(bucket: Bucket, proxy: Proxy, fault, kind):
    uri, options = f"s3://{bucket.name}/lake/orders", delta_options(bucket.settings())
    for id in range(3):
        write_deltalake(uri, pa.table({"id": [id]}), mode="append", storage_options=options)
        DeltaTable(uri, storage_options=options).create_checkpoint()
    opening = Opening("p", str, {}, s3=bucket.settings(proxy.port, max_attempts=1))
    for allowed in itertools.count():
        begun = len(proxy.requests)

        def behave(_: Request, until: int = begun + allowed) -> Any:
            return fault if len(proxy.requests) > until else None

        proxy.behave = behave
        connector = delta.table(uri).open(opening)
        try:
            planned = connector.plan(connector.begin("earliest"), LARGE)
            rows = [row["id"] for part in planned.parts for row in read(connector, part)[0]]
            connector.verify(planned.parts)
            assert connector.lag(planned.position).rows == 0
            break
        except kind as error:
            is_clear(error, ["test-key", "test-secret"])
    assert sorted(rows) == [0, 1, 2] and allowed > 10
