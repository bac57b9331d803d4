"""Unaligned checkpoints of the flights on Spark: the second stage stops after each batch; real kills, and the replay's results."""

from __future__ import annotations

import pytest

from pipelines.runtime.run import unapplied
from tests.recovery.harness import Site, child

_DAYS = 6


@pytest.fixture
def site(tmp_path) -> Site:
    return Site(
        tmp_path / "site",
        {
            "WEIR_EPOCH__MAX_FILES": "3",
            "WEIR_SPARK__BATCH_ROWS": "800",
            "WEIR_CHECKPOINTS__NUM_RETAINED": "2",
            "WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS": "0",
        },
    )


@pytest.mark.usefixtures("spark")
def test_a_run_whose_second_stage_never_applies_all_is_exact(site, days):
    site.land(days[:_DAYS])
    history = [report.checkpoint for report in site.run(drain=True)]
    assert sum(bool(unapplied(checkpoint)) for checkpoint in history) >= 2
    site.assert_exact(_DAYS)
    site.assert_no_orphans()


@pytest.mark.usefixtures("spark")
def test_a_run_that_is_killed_while_rows_wait_goes_on_exactly(site, days):
    site.land(days[:_DAYS])
    with child(site, "before the row", 2) as coordinator:
        coordinator.wait_until_held()
        coordinator.kill()
    assert site.head() == 1
    waiting = site.registry("checkpoints").sort_values("id")["operators"].iloc[-1]
    assert '"begun": true' in waiting or '"begun":true' in waiting, "the killed run had left rows"

    site.run(drain=True)

    site.assert_exact(_DAYS)
    site.assert_no_orphans()
