"""A Python worker of Spark is killed in the middle of a batch: the message of `worker-died.md` that its own test cannot
show."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import TransientError
from tests.playbooks import page as reading
from tests.recovery import mortal
from tests.recovery.harness import Site


@pytest.mark.long
def test_the_run_says_of_a_dead_worker_what_the_page_says(tmp_path, spark):
    site = Site(tmp_path / "site", {}, mortal.pipeline, "tests.recovery.mortal")
    site.landing.mkdir(parents=True)
    fuse = tmp_path / "fuse"
    fuse.touch()
    rows = pa.table({"id": [1, 2], "fuse": [str(fuse), None]})
    pq.write_table(rows, site.landing / "1.parquet")
    with pytest.raises(TransientError) as ended:
        site.run()
    steps = reading.steps(reading.FOLDER / "worker-died.md")
    at = next(number for number, step in enumerate(steps) if step.text == "by test_worker_died.py")
    assert reading.missing(steps[at + 1].text, str(ended.value)) is None, str(ended.value)
    assert [report.checkpoint.id for report in site.run()] == [2], "the next run does it"
    assert sorted(site.table("counted")["id"]) == [1, 2]
