"""Lookups on Spark: workers read the version of their epoch."""

from __future__ import annotations

import pytest

from tests.weir.operators.test_lookup import joined, land, named, put, site_of
from weir import Pipeline
from weir.operations.plan import plan


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("broadcast", [True, False])
def test_workers_join_the_version_of_their_epoch(broadcast, tmp_path):
    site = site_of(tmp_path, Pipeline("lookups", (named(where="pmod(n, 2) = 0", broadcast=broadcast),)))
    expected = []
    for number in range(2):
        put(site, {key: f"{number} of {key}" for key in range(0, 30, 2)})
        land(site, number, list(range(40)))
        expected += [(key, key, f"{number} of {key}" if key < 30 else None) for key in range(0, 40, 2)]
        site.run()
    assert joined(site) == sorted(expected, key=str)
    assert not plan(site.pipeline, site.settings).stops
