"""Stages without a key on Spark: tasks read their files by themselves, or Spark evaluates what it alone can."""

from __future__ import annotations

import random

import polars as pl
import pytest

from tests.tools.sampling import sampled
from tests.weir.operators.test_stateless import SAME, SHOP, WEB, cheap, land, rows, site_of, slices, table
from weir import Pipeline, delta, select, side, stage, union
from weir.execution import exchange
from weir.operations.plan import plan

BY_SPARK = "pmod(key, 1) = 0"  # no row is left out, and Spark alone knows


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("way", sampled([exchange.ROWS, exchange.DIRECT]))
def test_a_select_a_function_and_a_union_are_the_same_whoever_reads(way, tmp_path):
    alone = way == exchange.ROWS
    half = "price % 2" if not alone else "pmod(price, 2)"
    chosen = select(
        "chosen", SHOP, "key", "at", "lower(text) AS text", "price * 2 AS price", f"{half} AS odd", where="price < 50"
    )

    @stage("marked", source=WEB, key=None, where=BY_SPARK if alone else None)
    def marked(rows: pl.DataFrame, epoch) -> pl.DataFrame:
        return rows.filter(pl.col("price").is_not_null())

    odd = side(chosen, where="odd = 1", transform=(lambda frame: frame.select(*SAME, "odd")) if alone else None)
    odds = select("odds", marked, *SAME, "price % 2 AS odd")
    both = union("both", odd, odds, sink=delta.append("both"))
    site = site_of(tmp_path, Pipeline("union", (chosen, marked, odds, both)), WEIR_SPARK__PARALLELISM="3")
    shop, web, chance = rows(1, 300), rows(2, 200), random.Random(way)
    land(site, "shop", slices(shop, chance, 3))
    land(site, "web", slices(web, chance, 5))
    reports = site.run()
    assert not [finding for finding in plan(site.pipeline, site.settings).findings if finding.verdict.stops]
    reports += site.run()
    wanted = pl.concat(
        [
            cheap(shop).filter(pl.col("price") // 2 % 2 == 1).with_columns(odd=pl.lit(1, pl.Int64)),
            web.filter(pl.col("price").is_not_null()).with_columns(odd=pl.col("price") % 2),
        ]
    )
    columns = [*SAME, "odd"]
    assert table(site, "both").select(columns).sort(columns).equals(wanted.select(columns).sort(columns))
    ways = {report.checkpoint.operators["chosen"].exchange for report in reports} - {None}
    assert ways == {way}
    assert {len(report.checkpoint.operators["chosen"].ms) for report in reports}
    site.assert_no_orphans()
