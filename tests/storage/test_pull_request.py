"""A pull request is tried on production in a bucket with credentials that may only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage import counting
from tests.storage.conftest import Bucket
from tests.storage.proxy import Answer, Proxy, Request, refused
from weir.execution.in_process import InMemoryExecutor
from weir.operations.pull_request import review
from weir.run.run import RunOptions, run


def _reads_alone(request: Request) -> Answer | None:
    return None if request.method in ("GET", "HEAD") else refused(403, "AccessDenied")


@pytest.mark.long
def test_production_in_a_bucket_is_only_read(bucket: Bucket, proxy: Proxy, tmp_path: Path):
    retained = {"WEIR_CHECKPOINTS__NUM_RETAINED": "3", "WEIR_SPARK__PARALLELISM": "2"}
    here = counting.configured(bucket, tmp_path / "work", **retained)
    counting.land(bucket, 1, 2, 3)
    assert len(list(run(counting.pipeline, here, RunOptions(until_caught_up=True), InMemoryExecutor()))) == 3
    before = {key: bucket.content(key) for key in bucket.objects()}

    proxy.behave = _reads_alone
    reader = counting.configured(bucket, tmp_path / "ci", proxy.port, **retained)
    done = review.review(counting.pipeline, reader, epochs=2, executor=InMemoryExecutor())

    assert done.found == () and [int(epoch.recorded.id) for epoch in done.played] == [2, 3]
    assert (done.tables[0].rows, done.states[0].counts) == ((20, 20), {"added": 0, "removed": 0, "changed": 0})
    assert proxy.seen(lambda request: request.method == "GET") > 10
    assert proxy.seen(lambda request: request.method not in ("GET", "HEAD")) == 0
    assert {key: bucket.content(key) for key in bucket.objects()} == before and not bucket.half_done()
