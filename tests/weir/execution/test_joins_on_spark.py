"""A join on Spark: whichever way the rows of its two inputs take to their subtasks, pairs are DuckDB's."""

from __future__ import annotations

import random

import polars as pl
import pyarrow as pa
import pytest

from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from tests.weir.operators.test_join import comparable, cut, rows, truth
from weir import Pipeline, delta, files, join, side
from weir.execution import exchange
from weir.execution.spark.spark_executor import SparkExecutor
from weir.inspection import state_reader
from weir.operations.plan import plan
from weir.operators.joins import FULL

ORDERS = files("{landing}/orders/*.parquet", name="orders", event_time="at")
PAYMENTS = files("{landing}/payments/*.parquet", name="payments", event_time="paid_at")
BY_SPARK = "pmod(id, 1) = 0"  # no row is left out, and Spark alone knows
WAYS = {
    exchange.DIRECT: ({}, None),
    exchange.FILES: ({"WEIR_SPARK__EXCHANGE": "blocks", "WEIR_SPARK__DIRECT_READ_MB": "0"}, None),
    exchange.CUT: ({"WEIR_SPARK__EXCHANGE": "blocks", "WEIR_SPARK__DIRECT_READ_MB": "0"}, BY_SPARK),
    exchange.ROWS: ({"WEIR_SPARK__EXCHANGE": "rows", "WEIR_SPARK__DIRECT_READ_MB": "0"}, BY_SPARK),
}


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    "way",
    sampled(
        [*WAYS, exchange.FILES + exchange.STAGED, exchange.CUT + exchange.STAGED],
        lambda way: way in (exchange.DIRECT, exchange.CUT + exchange.STAGED),
    ),
)
def test_rows_of_both_inputs_reach_their_subtasks_in_one_exchange(way, tmp_path, monkeypatch):
    options, where = WAYS[way.removesuffix(exchange.STAGED)]
    monkeypatch.setattr(SparkExecutor, "_is_staged", lambda *_: way.endswith(exchange.STAGED))
    chance, given = random.Random(way), rows(7, 400, 30)
    paid = join(
        "paid",
        side(ORDERS, where=where),
        PAYMENTS,
        on={"id": "order"},
        within=("-10s", "30s"),
        how=FULL,
        lateness="10m",
        sink=delta.append("paid"),
    )
    site = Site(tmp_path, {"WEIR_EPOCH__MAX_FILES": "2", **options}, Pipeline("shop", (paid,)), __name__)
    for name, frame in given.items():
        (site.landing / name).mkdir(parents=True)
        for number, part in enumerate(cut(frame, 5, chance)):
            part.write_parquet(site.landing / name / f"{number}.parquet")
    reports = site.run()
    shown = pl.from_arrow(pa.concat_tables(state_reader.scan(site.pipeline, site.settings, "paid")))
    assert shown["left"].list.len().sum() == shown["left_rows"].sum() > 0, "state shows the rows that wait"
    planned = plan(site.pipeline, site.settings)
    assert not [finding for finding in planned.findings if finding.verdict.stops], "what has run may run again"
    reports += site.run(drain=True)
    taken = {report.checkpoint.operators["paid"].exchange for report in reports if report.checkpoint.slice}
    assert way in taken and taken <= {way, exchange.DIRECT, None}
    table = pl.read_delta(str(site.storage / "tables" / "paid"))
    assert comparable(table.select("id", "at", "what", "price", "paid_at", "price_right")) == truth(FULL, given)
