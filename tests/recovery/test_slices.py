"""However the input is sliced and however many subtasks share it, the results are the replay's."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("slice_days", "parallelism", "number"),
    [
        pytest.param(1, 2, 12, id="slices-of-1-day-over-12-days", marks=pytest.mark.long),
        pytest.param(7, 1, 28, id="slices-of-7-days-over-28-days-1-subtask", marks=pytest.mark.long),
        pytest.param(7, 5, 21, id="slices-of-7-days-over-21-days-5-subtasks", marks=pytest.mark.long),
        pytest.param(60, 2, 365, id="slices-of-60-days-over-the-year", marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("spark")
def test_an_uninterrupted_run_is_exact(site, days, slice_days, parallelism, number):
    pipeline = site(max_files=slice_days, parallelism=parallelism)
    pipeline.land(days[:number])

    reports = pipeline.run(drain=True)

    assert len(reports) == -(-number // slice_days) + 1, "an epoch for each slice, and the one that drains"
    assert [report.checkpoint.id for report in reports] == list(range(1, len(reports) + 1))
    pipeline.assert_exact(number)
    pipeline.assert_no_orphans()


@pytest.mark.usefixtures("spark")
def test_runs_that_follow_each_other_build_on_what_is_there(site, days):
    pipeline = site(max_files=10)
    pipeline.land(days[:10])
    pipeline.run()
    pipeline.land(days[10:20])
    pipeline.run()
    assert pipeline.run() == [], "nothing waits"

    pipeline.run(drain=True)

    pipeline.assert_exact(20)
    pipeline.assert_no_orphans()
