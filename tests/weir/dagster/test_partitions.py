"""Days of a table are materialized once they are complete, and anew when a promotion or a rewind has changed them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import dagster as dg
import pytest

from state_ops.errors import WeirError
from tests.recovery.test_backfill import Plant, pipeline
from tests.tools.sampling import sampled
from weir.dagster.factory import weir_definitions
from weir.dagster.tables import partitions
from weir.dagster.tables import sensor as tables_sensor
from weir.epoch import steps
from weir.ownership.pipeline_storage import open_storage
from weir.ownership.publish import unpublished
from weir.run import maintenance
from weir.settings.configuration import PartitionSettings

READINGS, DAILY = (dg.AssetKey(["sensors", "complete", f"{name}_days"]) for name in ("readings", "daily"))
READINGS_BY_HOUR = dg.AssetKey(["sensors", "complete", "readings_hours"])
TABLE = dg.AssetKey(["sensors", "tables", "readings"])
VERSION = "dagster/data_version"
JANUARY = {"start": "2026-01-01", "end": "2026-01-20"}


@dg.asset(
    deps=[READINGS],
    partitions_def=dg.DailyPartitionsDefinition(start_date="2026-01-01", end_date="2026-01-20"),
    automation_condition=dg.AutomationCondition.eager().without(dg.AutomationCondition.in_latest_time_window()),
)
def report() -> None:
    """What somebody else makes of each day."""


@dataclass
class Calendar:
    """A plant whose days Dagster shows, its one sensor ticked by the test."""

    plant: Plant
    instance: dg.DagsterInstance
    cursor: str | None = None
    conditions: Any = None

    @property
    def defs(self) -> dg.Definitions:
        return dg.Definitions.merge(
            weir_definitions([pipeline], self.plant.site.settings), dg.Definitions(assets=[report])
        )

    def tick(self) -> dict[dg.AssetKey, list[str]]:
        """One tick of the sensor, as the daemon carries it out: by asset, the days that it has materialized."""
        defs = self.defs
        (sensor,) = [each for each in defs.sensors or () if each.name == "sensors_tables_sensor"]
        context = dg.build_sensor_context(instance=self.instance, cursor=self.cursor, definitions=defs)
        outcome = sensor.evaluate_tick(context)
        self.cursor = outcome.cursor
        days: dict[dg.AssetKey, list[str]] = {}
        for event in outcome.asset_events:
            self.instance.report_runless_asset_event(event)
            if isinstance(event, dg.AssetMaterialization):
                days.setdefault(event.asset_key, []).append((event.partition or "all").removeprefix("2026-01-"))
        return days

    def due(self) -> set[str]:
        """The days of the report that Dagster would start now."""
        outcome = dg.evaluate_automation_conditions(
            defs=self.defs,
            instance=self.instance,
            cursor=self.conditions,
            asset_selection=dg.AssetSelection.assets("report"),
        )
        self.conditions = outcome.cursor
        return {key.removeprefix("2026-01-") for key in outcome.get_requested_partitions(report.key)}

    def version(self, day: str) -> str:
        record = self.instance.fetch_materializations(
            dg.AssetRecordsFilter(READINGS, asset_partitions=[f"2026-01-{day}"]), limit=1
        ).records[0]
        return record.asset_materialization.tags[VERSION]

    def taken_back(self) -> set[str]:
        records = self.instance.fetch_observations(READINGS, limit=20).records
        return {record.partition_key.removeprefix("2026-01-") for record in records}


@pytest.fixture
def calendar(tmp_path, instance) -> Calendar:
    plant = Plant.at(tmp_path / "site", keep=20)
    plant.site.options["WEIR_PIPELINES__SENSORS__PARTITIONS"] = json.dumps(JANUARY)
    plant.site.options["WEIR_CHECKPOINTS__NUM_RETAINED"] = "20"
    plant.land(1, 2, 3, 4)
    plant.run()
    return Calendar(plant, instance)


def test_a_day_is_complete_once_the_watermark_has_passed_it_and_its_report_is_due(calendar):
    assert calendar.due() == set()
    shown = calendar.tick()
    assert shown[READINGS] == ["01", "02", "03"], "readings of the fourth day may still come"
    assert shown[DAILY] == ["01", "02"], "the third window is handed out by the epoch after the one that closes it"
    assert shown[TABLE] == ["all"], "no run of Dagster's has written to it"
    assert calendar.due() == {"01", "02", "03"}
    assert calendar.tick() == {}, "nothing is new"

    calendar.plant.land(5)
    calendar.plant.run()
    shown = calendar.tick()
    assert (shown[READINGS], shown[DAILY]) == (["04"], ["03"])
    assert calendar.due() == {"04"}


def test_a_day_that_the_watermark_has_passed_before_it_was_over_comes_once_it_is(calendar, monkeypatch):
    """A drain closes windows up to their end, and clocks of others may be ahead."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2026, 1, day, 0, 10, tzinfo=tz)

    monkeypatch.setattr(tables_sensor, "datetime", Clock)
    day = 3
    assert calendar.tick()[READINGS] == ["01", "02"]
    assert calendar.tick() == {}
    day = 4
    assert calendar.tick()[READINGS] == ["03"], "without another checkpoint"


def test_a_table_that_is_damaged_keeps_no_day_of_another_from_those_who_wait_for_it(calendar):
    log = calendar.plant.site.storage / "tables" / "daily" / "_delta_log"
    (newest,) = sorted(log.glob("*.json"))[-1:]
    whole = newest.read_bytes()
    newest.write_bytes(b"{no json")
    assert calendar.tick()[READINGS] == ["01", "02", "03"]
    with pytest.raises(WeirError, match=r"The table daily cannot be read: .*Json error"):
        calendar.tick()
    newest.write_bytes(whole)
    assert calendar.tick()[TABLE] == ["all"]


def test_a_day_waits_until_its_rows_are_in_the_table(calendar, monkeypatch):
    calendar.tick()
    calendar.plant.land(5)
    with monkeypatch.context() as patched, pytest.raises(WeirError, match="the sink was away"):
        patched.setattr(steps, "publish_missing", sink_is_away)
        calendar.plant.run()
    _, registry = open_storage(pipeline, calendar.plant.site.settings)
    assert [row.id for row in unpublished(registry)] == [5], "it is committed"
    assert calendar.tick() == {}
    calendar.plant.run()
    assert registry.head().id == 5, "nothing but publishing was left"
    shown = calendar.tick()
    assert (shown[READINGS], shown[DAILY], shown[TABLE]) == (["04"], ["03"], ["all"])


def sink_is_away(context: object, checkpoints: object) -> None:
    raise OSError("the sink was away")


@pytest.mark.long
def test_other_partitions_in_the_settings_are_shown_at_the_next_tick(calendar):
    def shown(**changed: str) -> list[str]:
        calendar.plant.site.options["WEIR_PIPELINES__SENSORS__PARTITIONS"] = json.dumps(JANUARY | changed)
        return calendar.tick().get(READINGS if "every" not in changed else READINGS_BY_HOUR, [])

    assert shown(start="2026-01-02") == ["02", "03"]
    assert shown() == ["01"], "the others were shown"
    assert shown(start="2026-01-05") == []
    calendar.plant.land(5, 6)
    calendar.plant.run()
    assert shown(start="2026-01-05") == ["05"]
    assert shown(start="2026-01-05", every="hour") == [f"05-{hour:02}:00" for hour in range(24)] + [
        f"06-{hour:02}:00" for hour in range(23)
    ]


def test_a_promotion_makes_the_days_of_its_range_anew(calendar):
    calendar.due()
    calendar.tick()
    calendar.due()
    calendar.due()
    before = calendar.version("01"), calendar.version("02")
    calendar.plant.land(2, value=100)
    done = calendar.plant.backfill(2, 2, replaces="range", promote=True)
    shown = calendar.tick()
    assert (shown[READINGS], shown[DAILY], shown[TABLE]) == (["02"], ["02"], ["all"])
    assert (calendar.version("01"), calendar.version("02")) == (before[0], f"checkpoint {done.promoted.id}")
    assert calendar.due() == {"02"}


@pytest.mark.long
def test_a_promotion_of_all_since_makes_those_days_anew_that_are_complete_again(calendar):
    calendar.tick()
    calendar.plant.land(2, value=100)
    calendar.plant.backfill(2, 4, promote=True)
    assert calendar.tick()[READINGS] == ["01", "02", "03"], "the first day was not over where the replay began"


def test_a_rewind_takes_days_back_until_they_are_complete_again(calendar):
    calendar.due()
    calendar.tick()
    maintenance.rewind(pipeline, calendar.plant.site.settings, 2)
    shown = calendar.tick()
    assert READINGS not in shown
    assert calendar.taken_back() == {"02", "03"}
    assert calendar.due() == {"01", "02", "03"}, "of before"
    calendar.due()
    old = calendar.version("02")
    calendar.plant.run()
    shown = calendar.tick()
    assert (shown[READINGS], shown[DAILY]) == (["02", "03"], ["01", "02"])
    assert calendar.version("02") != old
    assert calendar.due() == {"02", "03"}


@pytest.mark.parametrize("how", sampled(["rewind", "range"]))
def test_what_has_changed_days_may_be_pruned_by_the_next_tick(calendar, how):
    calendar.tick()
    site = calendar.plant.site
    if how == "rewind":
        maintenance.rewind(pipeline, site.settings, 2)
    else:
        calendar.plant.land(2, value=100)
        calendar.plant.backfill(2, 2, replaces="range", promote=True)
    site.options["WEIR_CHECKPOINTS__NUM_RETAINED"] = "1"
    site.options["WEIR_PIPELINES__SENSORS__BACKFILL"] = json.dumps({"start": "2026-01-01", "keep": 0})
    calendar.plant.land(5, 6)
    calendar.plant.run()
    _, registry = open_storage(pipeline, site.settings)
    assert len(registry.checkpoints()) == 1
    shown = calendar.tick()[READINGS]
    assert shown == (["02", "04", "05"] if how == "range" else ["01", "02", "03", "04", "05"])


def test_many_days_come_over_several_ticks(calendar, monkeypatch):
    monkeypatch.setattr(tables_sensor, "_AT_ONCE", 2)
    days: dict[dg.AssetKey, list[str]] = {}
    for _ in range(5):
        for asset, shown in calendar.tick().items():
            days.setdefault(asset, []).extend(shown)
    assert (days[READINGS], days[DAILY]) == (["01", "02", "03"], ["01", "02"])


def test_partitions_have_an_end():
    configured = PartitionSettings.model_validate(JANUARY)
    assert partitions.definition(configured).get_last_partition_key() == "2026-01-19"
    hourly = partitions.definition(configured.model_copy(update={"every": "hour"}), begun=True)
    assert hourly.get_last_partition_key() == "2026-01-19-23:00"
    with pytest.raises(ValueError, match="has to be after start"):
        PartitionSettings.model_validate({"start": "2026-01-02", "end": "2026-01-02"})
