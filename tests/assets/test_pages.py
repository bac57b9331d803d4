"""A real webserver and a real daemon, with a person at the pages: a headless Chromium, driven by playwright.

Nobody calls Weir here: sensors start runs, the test lands files, kills a coordinator, clicks. What comes of it is compared with pandas.
"""

from __future__ import annotations

import os
import signal
import subprocess

import pyarrow.parquet as pq
import pytest

from configs.settings import PROJECT
from infra import dagster_home
from state_ops import lease
from tests.assets.dagster_site import Site, pictures, shows
from tests.replay import flights as replay


@pytest.mark.timeout(900)
def test_a_day_at_the_pages(site, page, days):
    shot = pictures(page)

    # The graph is there, and the sensor is on without anybody having turned it on.
    site.land(days, 6)
    names = ("landing", "aircraft_rotation", "airport_hourly", "aircraft_legs", "checkpoint", "restore_drill")
    shows(page, "/locations/weir/asset-groups/flights/lineage", *names)
    site.until(site.read_all, "the first checkpoints")

    # Epochs appear on the checkpoint's page as they complete.
    shows(page, "/assets/flights/checkpoint?view=events", "ms to commit", "Observed in run")
    shot("epochs")

    # The tick says what it did and why.
    shows(page, "/locations/weir/sensors/flights_checkpoint_sensor", "flights_restore_job", "requested")
    shot("sensor")

    # A coordinator is killed in the middle of its work. Nobody does anything.
    site.until(lambda: not lease.alive(lease.read(site.storage)), "the end of the first run")
    site.land(days, 24)
    before = site.registry.head().id
    site.until(lambda: site.registry.head().id > before and lease.alive(lease.read(site.storage)), "the second run")
    killed = lease.read(site.storage)
    os.kill(killed.pid, signal.SIGKILL)
    assert not site.read_all(), "it was to be killed in the middle"
    site.until(site.read_all, "what the restore resumed")
    site.until(lambda: lease.read(site.storage).stopped, "its end")
    by_job = {run["jobName"]: run for run in reversed(site.runs())}
    assert next(run for run in site.runs() if run["runId"] == killed.run_id)["status"] == "FAILURE"
    restored = by_job["flights_restore_job"]
    tags = {tag["key"]: tag["value"] for tag in restored["tags"]}
    assert tags["weir/generation"] == str(killed.generation)
    assert [run["jobName"] for run in site.runs()].count("flights_restore_job") == 1
    site.until(lambda: site.runs()[0]["status"] == "SUCCESS", "the end of the restore")

    # Its checks are green.
    shows(page, "/assets/flights/restore_drill?view=checks&checkDetail=restorable", "a run went on from it")
    shows(page, "/assets/flights/checkpoint?view=checks", "last_run", "Passed")
    shot("checks")
    shows(page, "/assets/flights/checkpoint?view=events", "Materialized in run")
    shot("history")

    # A person launches a job.
    page.goto("/locations/weir/jobs/flights_retention_and_fsck/playground")
    page.get_by_role("button", name="Launch Run").click()
    site.until(
        lambda: any(
            run["jobName"] == "flights_retention_and_fsck" and run["status"] == "SUCCESS" for run in site.runs()
        ),
        "the job that was launched",
    )

    # A day with an impossible delay lands: the gate holds, the check is red, the sensor waits for a person.
    exact = site.registry.head().id
    bad = days / "flights-2013-12-31.parquet"
    table = pq.read_table(bad)
    column = table.column_names.index("dep_delay")
    delays = table.column("dep_delay").to_pylist()
    delays[next(i for i, value in enumerate(delays) if value is not None)] = 99_999.0
    pq.write_table(table.set_column(column, table.schema.field(column), [delays]), site.landing / ".bad")
    (site.landing / ".bad").rename(site.landing / "flights-2013-12-31.parquet")
    site.until(
        lambda: any(run["status"] == "FAILURE" and run["runId"] != killed.run_id for run in site.runs()), "the hold"
    )
    shows(page, "/assets/flights/aircraft_rotation?view=checks", "column_values_to_be_between_dep_delay", "Failed")
    shot("gate")
    assert site.registry.head().id == exact
    site.until(lambda: site.said("held: A quality gate"), "the tick that waits")

    # The person takes the file away, and clicks Materialize.
    (site.landing / "flights-2013-12-31.parquet").unlink()
    site.land(days, 60)
    page.goto("/assets/flights/checkpoint")
    page.get_by_role("button", name="Materialize", exact=False).first.click()
    page.get_by_role("button", name="Confirm").click()  # its stages and tables come along
    site.until(lambda: lease.alive(lease.read(site.storage)) and site.registry.head().id > exact, "its first epoch")

    # In the middle of it, the person cancels the run: lease and pool are free, and sensors begin nothing.
    page.goto(f"/runs/{lease.read(site.storage).run_id}")
    page.get_by_role("button", name="Terminate").first.click()
    page.wait_for_timeout(1000)
    shot("terminate")
    page.get_by_role("dialog").get_by_role("button", name="Terminate", exact=False).last.click()
    site.until(lambda: lease.read(site.storage).stopped, "the end of what was cancelled")
    assert not site.read_all(), "it was to be cancelled in the middle"
    site.until(lambda: site.said("cancelled by a person"), "the tick that leaves it alone")
    assert site.runs()[0]["status"] == "CANCELED"

    # `weir resume`, and it goes on by itself to the exact end.
    subprocess.run([dagster_home.program("weir"), "resume", "flights"], env=site.environment, cwd=PROJECT, check=True)
    site.until(site.read_all, "the rest")
    site.until(lambda: lease.read(site.storage).stopped, "the end of the rest")
    replayed(site)


def replayed(site: Site) -> None:
    """The rows that were handed out are those of an independent replay of the days that have landed."""
    wanted = replay.expected(len(list(site.landing.glob("*.parquet")))).legs
    actual = replay.read_delta(site.root / "storage" / "flights" / "tables" / "aircraft_legs")
    replay.assert_same(actual, wanted, replay.LEG_KEY, "aircraft_legs")
