"""What the code server of test_code_server loads: the small pipeline in Dagster, its stages run without Spark, at the
test's pace."""

from __future__ import annotations

import time
from pathlib import Path

import dagster as dg
import pyarrow as pa

from state_ops.records.acks import Ack
from tests.recovery.small import pipeline
from weir.dagster.factory import weir_definitions
from weir.execution.executor import Deadline, InputRows
from weir.execution.in_process import InMemoryExecutor
from weir.ownership import ownership
from weir.settings.configuration import Settings, load
from weir.task.run_task import KeyedTask

HOLD, HELD = "hold", "held"  # files: while the first is there, an epoch that has begun waits, and makes the second


class Held(InMemoryExecutor):
    """Waits in the middle of each epoch for as long as the test wants that."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._root = Path(settings.resolve(pipeline.name, "{landing}")).parent

    def run(self, task: KeyedTask, rows: InputRows | None, columns: pa.Schema, deadline: Deadline) -> list[Ack]:
        while (self._root / HOLD).exists():
            (self._root / HELD).touch()
            time.sleep(0.02)
        return super().run(task, rows, columns, deadline)


@dg.asset(deps=[dg.AssetKey([pipeline.name, "tables", "booked"])], automation_condition=dg.AutomationCondition.eager())
def report() -> None:
    """What somebody else makes of the table."""


@dg.definitions
def defs() -> dg.Definitions:
    """Made where the code server and its runs load them, not where the test imports this."""
    ownership.SparkExecutor = lambda settings, **_: Held(settings)  # type: ignore[assignment,misc]
    automation = dg.AutomationConditionSensorDefinition(
        "automation", target="report", default_status=dg.DefaultSensorStatus.RUNNING, minimum_interval_seconds=5
    )
    theirs = dg.Definitions(assets=[report], sensors=[automation], executor=dg.in_process_executor)
    return dg.Definitions.merge(weir_definitions([pipeline], load()), theirs)
