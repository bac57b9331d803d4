"""A run goes by the slice limits and checkpoints of its own pipeline."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from tests.recovery.harness import Site
from weir import Pipeline, delta, files, select
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run


def test_a_run_takes_slices_and_keeps_checkpoints_as_its_pipeline_says(tmp_path):
    pipeline = Pipeline("own", (select("rows", files("{landing}/*.parquet"), "*", sink=delta.append("rows")),))
    own = {"WEIR_PIPELINES__OWN__EPOCH__MAX_FILES": "1", "WEIR_PIPELINES__OWN__CHECKPOINTS__NUM_RETAINED": "2"}
    site = Site(tmp_path, {"WEIR_CHECKPOINTS__NUM_RETAINED": "9", **own}, pipeline, "x")
    site.landing.mkdir()
    for number in range(4):
        pq.write_table(pa.table({"n": [number]}), site.landing / f"{number}.parquet")
    assert len(list(run(pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))) == 4
    assert sorted(site.registry("checkpoints")["id"]) == [3, 4]
