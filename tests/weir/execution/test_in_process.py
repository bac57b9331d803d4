"""The coordinator over the in-memory executor: the real thing but for Spark, so the results are the replay's."""

from __future__ import annotations

import pytest

from infra import flights_input
from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run


@pytest.mark.parametrize("parallelism", sampled([3, 1]))
def test_a_run_without_spark_gives_exactly_what_the_replay_says(tmp_path, parallelism):
    days = flights_input.prepare(tmp_path / "days")[:6]
    site = Site(tmp_path / "site", {"WEIR_EPOCH__MAX_FILES": "2", "WEIR_SPARK__PARALLELISM": str(parallelism)})
    site.land(days)
    executor = InMemoryExecutor(batch_rows=500)
    reports = list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True, drain=True), executor))
    assert [report.checkpoint.id for report in reports] == [1, 2, 3, 4]
    site.assert_exact(6)
    site.assert_no_orphans()
