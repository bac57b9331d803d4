"""Changes on Spark: whichever way rows reach their subtasks, aggregates of changes are DuckDB's."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import polars as pl
import pytest

from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from tests.weir.execution.test_joins_on_spark import BY_SPARK, WAYS
from tests.weir.operators.test_changes import chained, events, replayed, truth
from weir import files
from weir.execution import exchange

EVENTS = files("{landing}/*.parquet", name="events")


def as_it_was(rows: Any) -> Any:
    """A transform that changes nothing."""
    return rows.selectExpr("k", "n", "total + 0L AS total", "_change_type")


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("way", sampled(WAYS, lambda way: way == exchange.ROWS))
def test_conditions_and_transforms_see_changes_row_by_row(way, tmp_path):
    options, by_spark = WAYS[way]
    where = "total % 5 <> 0" + (f" AND {BY_SPARK.replace('id', 'n')}" if by_spark else "")
    more = {"transform": as_it_was} if by_spark else {}
    draw, parts = random.Random(way), []
    pipeline = chained(True, source=EVENTS, where=where, **more)
    site = Site(tmp_path, {"WEIR_EPOCH__MAX_FILES": "1", **options}, pipeline, __name__)
    site.landing.mkdir(parents=True)
    for number in range(4):
        parts.append(events(draw, 30))
        parts[-1].write_parquet(site.landing / f"{number}.parquet")
    reports = site.run()
    taken = {report.checkpoint.operators["by_count"].exchange for report in reports}
    assert way in taken, taken
    for table, rows in truth(pl.concat(parts)).items():
        content = Counter[tuple]()
        changes = pl.read_delta(str(site.storage / "tables" / table))
        for epoch in sorted(changes["epoch"].unique()):
            replayed(
                content,
                changes.filter(pl.col("epoch") == epoch).sort(
                    pl.col("_change_type").is_in(["insert", "update_postimage"])
                ),
            )
        assert sorted(content.elements()) == sorted(rows), table
