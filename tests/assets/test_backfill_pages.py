"""Days that had been read wrongly, corrected, and backfilled by a person at the partitions page, while production goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipelines import flights
from pipelines.runtime import state_reader
from state_ops import lease
from state_ops.checkpoint import PROMOTION
from tests.assets.dagster_site import Site, pictures, shows
from tests.replay import flights as replay

BACKFILL = {"start": "2013-01-01", "keep": 8, "promote": "automatic"}
BACKFILL_RUN = "__ASSET_JOB"  # as Dagster calls runs that the backfill page starts
WRONG = (4, 5, 6)


@pytest.fixture
def options() -> dict[str, str]:
    return {"WEIR_PIPELINES__FLIGHTS__BACKFILL": json.dumps(BACKFILL), "WEIR_EPOCH__MAX_FILES": "1"}


def spoil(site: Site, days: Path) -> None:
    """The source delivers three days with every delay an hour too long."""
    for number in WRONG:
        day = days / f"flights-2013-01-{number:02}.parquet"
        table = pq.read_table(day)
        for name in ("dep_delay", "arr_delay"):
            at = table.schema.get_field_index(name)
            later = pc.add(table.column(name), pa.scalar(60, table.schema.field(name).type))
            table = table.set_column(at, table.schema.field(name), later)
        arrive(site, table, day.name)


def correct(site: Site, days: Path) -> None:
    """It delivers them again, under their own names."""
    for number in WRONG:
        name = f"flights-2013-01-{number:02}.parquet"
        arrive(site, pq.read_table(days / name), name)


def arrive(site: Site, table: pa.Table, name: str) -> None:
    pq.write_table(table, site.landing / f".{name}")
    (site.landing / f".{name}").rename(site.landing / name)


@pytest.mark.timeout(900)
def test_days_are_backfilled_at_the_partitions_page(site, page, days):
    shot = pictures(page)

    site.land(days, 3)
    spoil(site, days)
    site.land(days, 2)
    site.until(site.read_all, "production's epochs")
    site.until(lambda: lease.read(site.storage).stopped, "the end of its run")
    assert site.registry.head().id == 8
    wrong = replay.read_delta(site.root / "storage" / "flights" / "tables" / "aircraft_legs")

    correct(site, days)
    page.goto("/assets/flights/backfill?view=partitions")
    days_of = page.get_by_placeholder("ex: 2013").first
    days_of.fill("[2013-01-04...2013-01-06]")
    days_of.press("Enter")
    page.get_by_role("button", name="Materialize", exact=False).first.click()
    launch = page.get_by_role("button", name="Launch backfill")
    confirm = page.get_by_role("button", name="Confirm")  # while the run's own materializations are not shown yet
    launch.or_(confirm).first.wait_for()
    if confirm.count():
        confirm.click()
    launch.wait_for()
    shot("backfill-dialog")
    launch.click()
    site.until(
        lambda: any(run["jobName"] == BACKFILL_RUN for run in site.runs()),
        "the backfill's run",
    )
    site.land(days, 2)  # production goes on meanwhile
    site.until(lambda: any(row.kind == PROMOTION for row in site.registry.checkpoints()), "the promotion")
    site.land(days, 1)
    site.until(site.read_all, "what production reads afterwards")
    site.until(lambda: lease.read(site.storage).stopped, "its end")

    shows(page, "/assets/flights/backfill?view=checks", "production_is_the_same", "Passed")
    shows(page, "/assets/flights/backfill?view=partitions&partition=2013-01-05", "2013-01-05", "Materialized")
    shot("backfill-partitions")
    shows(page, "/assets/flights/backfill?view=events", "rows changed")
    shot("backfill-report")
    (run,) = [run for run in site.runs() if run["jobName"] == BACKFILL_RUN]
    assert run["status"] == "SUCCESS", "one run for all three days"

    expected = replay.expected(11)
    found = replay.read_delta(site.root / "storage" / "flights" / "tables" / "aircraft_legs")
    replay.assert_same(found, expected.legs, replay.LEG_KEY, "aircraft_legs")
    state = pa.concat_tables(list(state_reader.scan(flights.pipeline, site.settings, "aircraft_rotation")))
    replay.assert_same(state.to_pandas(use_threads=False), expected.aircraft, replay.AIRCRAFT_KEY, "the state")
    assert wrong["dep_delay"].mean() > found["dep_delay"].mean() + 10, "it had been wrong"
