"""Several outputs of a stage on Spark: whichever way rows reach the stages that read them, tables are plain Python's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.recovery import test_outputs as whole
from tests.tools.sampling import sampled
from weir.execution import exchange

WAYS = {
    exchange.FILES: {"WEIR_SPARK__EXCHANGE": "blocks", "WEIR_SPARK__DIRECT_READ_MB": "0"},
    exchange.ROWS: {"WEIR_SPARK__EXCHANGE": "rows", "WEIR_SPARK__DIRECT_READ_MB": "0"},
    exchange.DIRECT: {},
}


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("way", sampled(WAYS))
def test_stages_read_each_output_of_a_stage(way, tmp_path):
    stages = (whole.split, whole.followed, whole.again, whole.odds, whole.rare, whole.tumbling, whole.missed)
    site = whole.site_at(tmp_path, pipeline=replace(whole.pipeline, stages=stages), **WAYS[way])
    whole.land(site, 1, 3, 4)
    history = [report.checkpoint for report in site.run(drain=True)]
    whole.assert_exact(site)
    assert whole.truth(site)["late"] and whole.truth(site)["rare"], "both are part of the comparison"
    taken = {row.operators[uid].exchange for row in history for uid in ("followed", "odds", "missed") if row.slice}
    assert way in taken and taken <= {way, exchange.DIRECT, None}
