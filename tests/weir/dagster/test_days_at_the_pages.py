"""Days of a table at Dagster's pages: complete, made anew by a promotion, and a batch asset that follows; light and dark."""

from __future__ import annotations

import json
from collections.abc import Iterator

import dagster as dg
import pytest
import yaml

from tests.recovery.test_backfill import Plant
from tests.weir.dagster.dagster_site import Site, at_work, pictures, shows
from tests.weir.dagster.served_days import COMPLETE

DAYS = "?view=partitions&partition=2026-01-02"


@pytest.fixture
def plant(tmp_path) -> Plant:
    """Four days, of which three are complete."""
    plant = Plant.at(tmp_path, keep=20, end="2026-01-08")
    plant.site.options["WEIR_PIPELINES__SENSORS__PARTITIONS"] = json.dumps({"start": "2026-01-01", "end": "2026-01-08"})
    plant.land(1, 2, 3, 4)
    plant.run()
    return plant


@pytest.fixture
def site(tmp_path, plant) -> Iterator[Site]:
    workspace = tmp_path / "workspace.yaml"
    module = {"python_module": {"module_name": "tests.weir.dagster.served_days", "location_name": "weir"}}
    workspace.write_text(yaml.safe_dump({"load_from": [module]}))
    with at_work(tmp_path, plant.site.env, workspace) as site:
        yield site


def versions(instance: dg.DagsterInstance, asset: dg.AssetKey) -> list[tuple[str, str]]:
    """The asset's days with the versions of their data, oldest first."""
    records = instance.fetch_materializations(asset, limit=50).records
    return [
        (str(record.partition_key), str((record.asset_materialization.tags or {}).get("dagster/data_version")))
        for record in reversed(records)
        if record.asset_materialization is not None
    ]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_batch_asset_starts_with_each_complete_day_and_again_after_a_promotion(site, page, plant):
    shot = pictures(page)
    report = dg.AssetKey(["day_report"])
    with dg.DagsterInstance.from_config(str(site.root / "home")) as instance:
        first = [(f"2026-01-0{day}", "checkpoint 4") for day in (1, 2, 3)]
        site.until(lambda: versions(instance, COMPLETE) == first, "the days that are complete")
        site.until(lambda: {day for day, _ in versions(instance, report)} == dict(first).keys(), "their reports")
        shows(page, f"/assets/sensors/complete/readings_days{DAYS}", "Materialized (3)", "Missing (4)", "checkpoint")
        shot("days-complete")

        plant.land(2, value=100)
        promoted = plant.backfill(2, 2, replaces="range", promote=True).promoted
        site.until(
            lambda: versions(instance, COMPLETE) == [*first, ("2026-01-02", f"checkpoint {promoted.id}")],
            "the day that was promoted",
        )
        site.until(lambda: len(versions(instance, report)) == 4, "its report")
        assert versions(instance, report)[-1][0] == "2026-01-02"
        page.emulate_media(color_scheme="dark")
        shows(
            page, f"/assets/sensors/complete/readings_days{DAYS}", "Materialized (3)", "View all historical events (2)"
        )
        shot("days-promoted-dark")
        shows(page, "/assets/day_report?view=partitions", "Materialized (3)")
        shot("days-report-dark")
