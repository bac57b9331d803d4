"""What the code server of test_days_at_the_pages loads: a pipeline's component, and a batch job of somebody else's that
goes by its days."""

from __future__ import annotations

import dagster as dg

from weir.dagster.component import WeirPipelineComponent

COMPLETE = dg.AssetKey(["sensors", "complete", "readings_days"])


@dg.asset(
    deps=[COMPLETE],
    partitions_def=dg.DailyPartitionsDefinition(start_date="2026-01-01", end_date="2026-01-08"),
    automation_condition=dg.AutomationCondition.eager().without(dg.AutomationCondition.in_latest_time_window()),
)
def day_report() -> None:
    """A day of readings, once it is complete."""


@dg.definitions
def defs() -> dg.Definitions:
    """Made where the code server and its runs load them, not where the test imports this."""
    automation = dg.AutomationConditionSensorDefinition(
        "automation", target="day_report", default_status=dg.DefaultSensorStatus.RUNNING, minimum_interval_seconds=5
    )
    theirs = dg.Definitions(assets=[day_report], sensors=[automation], executor=dg.in_process_executor)
    return dg.Definitions.merge(dg.build_defs_for_component(WeirPipelineComponent(pipeline="sensors")), theirs)
