"""The card_fraud example: its alerts are those that DuckDB says of the whole input, whatever happens meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import polars as pl
import pytest

from infra.card_fraud_input import by_minutes, cards, confirmations, payments
from infra.demo_fraud import ALERTS
from pipelines import card_fraud
from state_ops.errors import TransientError
from tests.recovery.harness import Site
from weir.execution.executor import Executor
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run


class Failing(InMemoryExecutor):
    """Fails as soon as a stage without a key is to run: epochs are declined half-way."""

    def run(self, task, *rest):
        if task.stage.uid == "judged":
            raise TransientError("The cluster is away.")
        return super().run(task, *rest)


def test_alerts_are_what_duckdb_says_of_the_whole_input(tmp_path: Path):
    table_of_cards = cards(300)
    paid = payments(8_000, table_of_cards)
    confirmed = confirmations(paid)
    site = Site(
        tmp_path,
        {
            "WEIR_PIPELINES__CARD_FRAUD__PARAMS": json.dumps(
                {"landing": str(tmp_path / "landing"), "cards": str(tmp_path / "cards")}
            ),
            "WEIR_EPOCH__MAX_FILES": "2",
            "WEIR_SPARK__PARALLELISM": "2",
            "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "0",
        },
        card_fraud.pipeline,
        "pipelines.card_fraud",
    )
    table_of_cards.write_delta(str(tmp_path / "cards"))
    for name, frame, time in (("payments", paid, "at"), ("confirmations", confirmed, "confirmed_at")):
        (site.landing / name).mkdir(parents=True)
        for number, part in enumerate(by_minutes(frame, time, 2)):
            part.write_parquet(site.landing / name / f"{number:04}.parquet")

    def go(executor: Executor, drain: bool = False) -> None:
        list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True, drain=drain), executor))

    with pytest.raises(TransientError):
        go(Failing())
    site.options["WEIR_SPARK__PARALLELISM"] = "3"
    go(InMemoryExecutor(500))
    go(InMemoryExecutor(), drain=True)

    def table(name: str) -> pl.DataFrame:
        return pl.read_delta(str(site.storage / "tables" / name))

    with duckdb.connect() as base:
        for name, frame in (("payments", paid), ("confirmations", confirmed), ("cards", table_of_cards)):
            base.register(name, frame)
        wanted = base.sql(ALERTS).pl().sort("payment")
    alerts = table("alerts")
    assert alerts.select("payment", "reason").sort("payment").equals(wanted)
    assert set(wanted["reason"]) == {"no such card", "two countries within an hour", "abroad", "above its limit"}
    assert table("payments")["payment"].sort().equals(paid["payment"])
    per_card = alerts.group_by("card").agg(pl.len().cast(pl.Int64).alias("alerts"))
    assert table("alerted_cards").select("card", "alerts").sort("card").equals(per_card.sort("card"))
    site.assert_no_orphans()
