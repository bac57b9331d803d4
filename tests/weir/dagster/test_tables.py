"""Tables are materialized in Dagster while their run goes on, and what is downstream of them follows."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated

import dagster as dg
import polars as pl
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.definitions.freshness import FreshnessState
from dagster._core.loader import LoadingContextForTest
from dagster._core.test_utils import freeze_time
from dagster._daemon.freshness import FreshnessDaemon

from state_ops.coordination import lease, requests
from tests.tools.stages import altered
from tests.weir.dagster.without_spark import House
from weir import Epoch, State, ValueState, agg, delta, expect
from weir.execution.in_process import InMemoryExecutor
from weir.ownership import ownership

BOOKED = dg.AssetKey(["small", "tables", "booked"])
VERSION = "dagster/data_version"


def shown(house: House) -> list[dg.AssetMaterialization]:
    """The table's materializations, oldest first."""
    records = house.instance.fetch_materializations(BOOKED, limit=100).records
    return [record.asset_materialization for record in reversed(records)]


def figures(house: House, name: str) -> list:
    return [event.metadata[name].value for event in shown(house)]


@dg.asset(deps=[BOOKED], automation_condition=dg.AutomationCondition.eager())
def report() -> None:
    """What somebody else has made of the table."""


def test_each_epoch_of_a_run_materializes_the_table_that_it_has_written_to(house):
    house.bank.land(4, 5)
    assert house.execute("small_job").success
    assert figures(house, "checkpoint") == [4, 5, 5], "and at the end of the run"
    assert figures(house, "dagster/row_count") == [40, 50, 50]
    assert figures(house, "rows added") == [10, 10, 20]
    assert [event.metadata["files waiting in landing"].value for event in shown(house)[:2]] == [1, 0]
    assert all(rate > 0 for rate in figures(house, "rows/s"))
    assert {"Delta version", "size (MiB)", "epoch to commit (ms)", "dagster/column_schema"} <= set(
        shown(house)[-1].metadata
    )
    assert house.execute("small_job").success, "which finds nothing to do"
    first, second, *others = (event.tags[VERSION] for event in shown(house))
    assert first != second
    assert set(others) == {second}, "the same rows are the same data"


def hands_on(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Every column, also that by which a row is set aside."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    return rows


def test_a_table_of_rows_set_aside_is_materialized_once_it_has_had_a_row(house):
    aside = dg.AssetKey(["small", "tables", "accounts_quarantine"])
    gate = expect("ExpectColumnValuesToBeBetween", column="amount", max_value=8, on_failure="quarantine",
                  quarantine_at_most=1.0)  # fmt: skip
    house = house.with_pipeline(stages=(altered(house.pipeline.stages[0], function=hands_on, gates=(gate,)),))

    def times() -> int:
        house.tick("tables_sensor")
        return len(house.instance.fetch_materializations(aside, limit=100).records)

    house.bank.land(4)
    assert house.execute("small_job").success
    assert times() == 0 and shown(house), "no row was set aside"
    house.bank.land(9)
    assert house.execute("small_job").success
    assert times() == 2, "by its epoch, and at the end of the run"
    house.bank.land(5)
    assert house.execute("small_job").success
    assert times() > 2


def test_epochs_that_come_fast_share_a_materialization(house):
    house.bank.land(4, 5, 6)
    house.bank.site.options["WEIR_DAGSTER__OBSERVE_SECONDS"] = "3600"
    assert house.execute("small_job").success
    assert figures(house, "checkpoint") == [4, 6, 6]
    assert figures(house, "rows added") == [10, 20, 30]


def test_an_eager_asset_is_due_while_the_run_goes_on(house, monkeypatch):
    """Dagster takes a table for in progress until its run has materialized it, and starts nothing downstream before."""
    due: list[int] = []
    defs = dg.Definitions.merge(house.defs, dg.Definitions(assets=[report]))
    cursor = [None]

    def evaluate() -> int:
        result = dg.evaluate_automation_conditions(
            defs=defs, instance=house.instance, cursor=cursor[0], asset_selection=dg.AssetSelection.assets("report")
        )
        cursor[0] = result.cursor
        return result.total_requested

    class Looked(InMemoryExecutor):
        def run(self, *given, **options):
            due.append(evaluate())
            while len(due) > 1 and 1 not in due and time.monotonic() < deadline:  # the epoch before is still under way
                time.sleep(0.05)
                due.append(evaluate())
            return super().run(*given, **options)

    monkeypatch.setattr(ownership, "SparkExecutor", lambda *_, **__: Looked())
    house.bank.land(4, 5, 6)
    deadline = time.monotonic() + 60
    assert house.execute("small_job").success
    assert due[0] == 0 and 1 in due[1:], "before an epoch, what an earlier one of the run has made due"


class Account(State):
    """Of one key."""

    rows: Annotated[int, "Bookings so far."] = 0
    total: int = 0


def test_columns_are_described_by_their_author_on_the_table_and_on_the_stage(house):
    (stage,) = house.pipeline.stages
    sink = delta.append("booked", describe={"amount": "In cents."})
    described = house.with_pipeline(stages=(altered(stage, sink=sink, state=Account),))
    described.bank.land(4)
    result = described.execute("small_job")
    assert result.success
    for event in result.get_asset_materialization_events():
        if event.asset_key.path[-1] in ("booked", "accounts_stage"):
            schema = event.materialization.metadata["dagster/column_schema"].value
            assert {column.name: column.description for column in schema.columns} == {
                "id": None,
                "at": None,
                "amount": "In cents.",
            }
    of_state = (
        described.defs.resolve_asset_graph().get(dg.AssetKey(["small", "accounts_stage"])).metadata["state per key"]
    )
    assert [column.description for column in of_state.value.columns] == ["Bookings so far.", None]


def test_a_tables_freshness_is_evaluated_by_what_runs_have_written(house):
    house.bank.site.options["WEIR_DAGSTER__FRESHNESS_HOURS"] = "4"
    node = house.defs.resolve_asset_graph().get(BOOKED)

    def freshness(hours: float) -> FreshnessState:
        """What Dagster's daemon says of the table so many hours from now."""
        with freeze_time(datetime.now(UTC) + timedelta(hours=hours)):
            context = LoadingContextForTest(house.instance)
            return asyncio.run(FreshnessDaemon()._compute_asset_freshness_state(context, node))

    assert freshness(0) is FreshnessState.UNKNOWN
    house.bank.land(4)
    assert house.execute("small_job").success
    assert [freshness(hours) for hours in (0, 1.9, 2.1, 4.1)] == [
        FreshnessState.PASS,
        FreshnessState.PASS,
        FreshnessState.WARN,
        FreshnessState.FAIL,
    ]


def test_a_table_that_weir_run_has_changed_is_shown_with_the_verdicts_on_its_rows(house):
    """Dagster shows a verdict only until its asset is materialized anew."""
    (stage,) = house.pipeline.stages
    gate = expect("ExpectColumnValuesToBeBetween", column="amount", max_value=4, on_failure="warn")
    gated = house.with_pipeline(stages=(replace(stage, gates=(gate,)),))
    gated.bank.epochs(5)
    (sensor,) = [each for each in gated.defs.sensors or () if each.name == "small_tables_sensor"]
    context = dg.build_sensor_context(instance=house.instance, definitions=gated.defs)
    stage, table, verdict, checkpoint, source = sensor.evaluate_tick(context).asset_events
    assert isinstance(source, dg.AssetObservation) and source.asset_key.path == ["small", "landing"]
    assert (source.metadata["checkpoint"].value, source.metadata["files waiting"].value) == (4, 0)
    # The stage and the checkpoint do not look as if they had never been made, and the stage comes before its table.
    made = [event.asset_key.path for event in (stage, checkpoint)]
    assert made == [["small", "accounts_stage"], ["small", "checkpoint"]]
    assert isinstance(table, dg.AssetMaterialization)
    assert isinstance(verdict, dg.AssetCheckEvaluation)
    assert (table.asset_key, verdict.asset_key, verdict.passed) == (BOOKED, BOOKED, False)
    assert verdict.description == ('10 of 10 rows, e.g. 5 (id = "k1"), 5 (id = "k2"), 5 (id = "k3"); the epoch went on')


def test_a_table_is_never_out_of_step_with_the_stage_that_writes_it(house, monkeypatch):
    """Dagster would say so of each table of a first run, until its end."""
    stale: list[StaleStatus] = []
    resolver = CachingStaleStatusResolver

    class Looked(InMemoryExecutor):
        def run(self, *given, **options):
            graph = house.defs.resolve_asset_graph()
            if shown(house):
                context = LoadingContextForTest(house.instance)
                stale.append(resolver(house.instance, graph, context).get_status(BOOKED))
            return super().run(*given, **options)

    monkeypatch.setattr(ownership, "SparkExecutor", lambda *_, **__: Looked())
    house.bank.land(4, 5, 6, 7)
    assert house.execute("small_job").success
    assert set(stale) == {StaleStatus.FRESH}


def test_a_stage_is_materialized_at_its_runs_first_epoch_and_at_the_end_where_nothing_goes_to_a_table_too(house):
    (stage,) = house.pipeline.stages
    kept = house.with_pipeline(stages=(replace(stage, sink=None),))
    kept.bank.land(4, 5, 6)
    events = kept.execute("small_job").get_asset_materialization_events()
    assert [event.asset_key.path[-1] for event in events].count("accounts_stage") == 2


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("served", [False], indirect=True)
def test_an_eager_asset_follows_an_epoch_within_a_minute_while_the_run_goes_on(served):
    served.bank.land(1)
    served.until(lambda: served.head() == 1, "the first epoch")
    served.until(lambda: reports(served), "the report after the first epoch")
    time.sleep(15)  # until the tick after the one that has started it
    served.bank.land(2)
    served.until(lambda: served.head() == 2, "the second epoch")
    epoch = time.time()
    served.until(lambda: reports(served, since=epoch), "the report after the second epoch")
    (run, *_) = served.instance.get_run_records(dg.RunsFilter(tags={"dagster/from_automation_condition": "true"}))
    assert run.create_timestamp.timestamp() - epoch < 60, "when it was asked for; how soon it starts is the machine's"
    assert lease.alive(served.lease)
    assert served.runs()["job"] == ["STARTED"], "which goes on"
    requests.send(served.storage, requests.Request("stop"))
    served.until(lambda: served.runs()["job"] == ["SUCCESS"], "the end of the run")


def reports(served, since: float = 0.0) -> int:
    """How often the report was made since a moment."""
    records = served.instance.fetch_materializations(dg.AssetKey("report"), limit=10).records
    return sum(record.timestamp >= since for record in records)
