"""As-of joins on Spark: rows of both inputs reach their subtasks, whichever way each of them takes."""

from __future__ import annotations

import random

import pytest

from tests.weir.operators.test_as_of import PAYMENTS, RATES, rows, truth
from tests.weir.operators.test_join import comparable, cut, site_of, table
from weir import Pipeline, as_of, delta, side
from weir.operations.plan import plan


@pytest.mark.usefixtures("spark")
def test_it_is_duckdbs_on_spark(tmp_path):
    chance, given = random.Random(1), rows(7, 300, 20)
    payments = side(PAYMENTS, where="pmod(id, 1) = 0")  # no row is left out, and Spark alone knows
    rated = as_of("rated", payments, RATES, on={"id": "of"}, lateness="10m", sink=delta.append("rated"))
    site = site_of(tmp_path, Pipeline("shop", (rated,)), WEIR_EPOCH__MAX_FILES="2")
    for directory, frame in zip(("orders", "payments"), given.values(), strict=True):
        for number, part in enumerate(cut(frame, 4, chance)):
            part.write_parquet(site.landing / directory / f"{number}.parquet")
    site.run()
    assert not plan(site.pipeline, site.settings).stops
    site.run(drain=True)
    assert comparable(table(site, "rated")) == truth("left", given)
