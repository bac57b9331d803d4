"""The small pipeline in Dagster, its stages run in this process: real storage, real runs, no JVM."""

from __future__ import annotations

from dataclasses import dataclass, replace

import dagster as dg

from tests.recovery.small import Bank
from weir.dagster.factory import weir_definitions
from weir.definition import Pipeline
from weir.execution.in_process import InMemoryExecutor
from weir.ownership import ownership
from weir.ownership.pipeline_storage import open_storage

RETAINED = {
    "WEIR_CHECKPOINTS__NUM_RETAINED": "3",
    "WEIR_DAGSTER__OBSERVE_SECONDS": "0",
    "WEIR_RUN__LINGER_SECONDS": "0",
}
CHECKPOINT = dg.AssetKey(["small", "checkpoint"])


@dataclass
class House:
    """A bank, its definitions, an instance of Dagster."""

    bank: Bank
    instance: dg.DagsterInstance

    @property
    def pipeline(self) -> Pipeline:
        return self.bank.site.pipeline

    @property
    def settings(self):
        return self.bank.site.settings

    @property
    def storage(self):
        return open_storage(self.pipeline, self.settings)[0]

    @property
    def defs(self) -> dg.Definitions:
        return weir_definitions([self.pipeline], self.settings)

    def execute(self, job: str, config: dict | None = None, **options):
        """Run a job. config: of its one op."""
        job_def = self.defs.resolve_job_def(job)
        if config is not None:
            (op,) = [node.name for node in job_def.nodes]
            options["run_config"] = {"ops": {op: {"config": config}}}
        return job_def.execute_in_process(instance=self.instance, raise_on_error=False, **options)

    def checked(self) -> dict[str, bool]:
        """The last verdict of each check that has one."""
        passed = {}
        for key in self.defs.resolve_asset_graph().asset_check_keys:
            records = self.instance.event_log_storage.get_asset_check_execution_history(key, limit=1)
            if records and records[0].event is not None:
                passed[key.name] = records[0].event.dagster_event.asset_check_evaluation_data.passed
        return passed

    def history(self, check: str) -> int:
        """How many verdicts of a check there are."""
        (key,) = [key for key in self.defs.resolve_asset_graph().asset_check_keys if key.name == check]
        return len(self.instance.event_log_storage.get_asset_check_execution_history(key, limit=100))

    def description(self, check: str) -> str:
        """What the last verdict of a check says."""
        (key,) = [key for key in self.defs.resolve_asset_graph().asset_check_keys if key.name == check]
        (record,) = self.instance.event_log_storage.get_asset_check_execution_history(key, limit=1)
        return record.event.dagster_event.asset_check_evaluation_data.description or ""

    def tick(self, sensor: str, cursor: str | None = None):
        """One tick as the daemon evaluates it: the requested runs, why it skipped, the cursor."""
        context = dg.build_sensor_context(instance=self.instance, cursor=cursor, definitions=self.defs)
        (sensor_def,) = [each for each in self.defs.sensors if each.name == f"small_{sensor}"]
        outcome = sensor_def.evaluate_tick(context)
        return outcome.run_requests or [], outcome.skip_message, outcome.cursor

    def with_pipeline(self, **changes) -> House:
        site = replace(self.bank.site, pipeline=replace(self.pipeline, **changes))
        return House(Bank(site), self.instance)


def in_this_process(monkeypatch) -> None:
    """Runs of pipelines use no Spark."""
    monkeypatch.setattr(ownership, "SparkExecutor", lambda *_, **__: InMemoryExecutor())
