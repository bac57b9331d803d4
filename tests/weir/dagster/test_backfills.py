"""Backfills from Dagster: days of a partitioned asset, one run for all of them, a schedule, an approval."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import get_args

import dagster as dg
import pytest

from state_ops.records.checkpoint import PROMOTION
from tests.recovery.test_backfill import Plant, pipeline
from tests.weir.dagster.without_spark import in_this_process
from weir.dagster import backfills, jobs, operations
from weir.dagster.factory import weir_definitions
from weir.dagster.tables.partitions import definition
from weir.operations import forks
from weir.operations.backfill import plan
from weir.operations.declared import every
from weir.settings.configuration import BackfillSettings

OWN = dg.AssetKey(["sensors", "backfill"])
FIRST, LAST = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"


@dataclass
class Works:
    """A plant, its definitions, an instance of Dagster."""

    plant: Plant
    instance: dg.DagsterInstance

    @property
    def defs(self) -> dg.Definitions:
        return weir_definitions([pipeline], self.plant.site.settings)

    def backfill(self, first: str, last: str, **config: str):
        job = self.defs.resolve_job_def("sensors_backfill_job")
        return job.execute_in_process(
            instance=self.instance,
            raise_on_error=False,
            tags={FIRST: first, LAST: last},
            run_config={"ops": {"sensors_backfill": {"config": config}}},
        )

    def promote(self, branch: str, **config):
        job = self.defs.resolve_job_def("sensors_promote_job")
        given = {"branch": branch, **config}
        return job.execute_in_process(
            instance=self.instance,
            raise_on_error=False,
            run_config={"ops": {"sensors_promote": {"config": given}}},
        )

    def replayed(self) -> set[str]:
        """The days that Dagster shows as materialized."""
        return set(self.instance.get_materialized_partitions(OWN))

    def check(self) -> tuple[bool, str]:
        key = dg.AssetCheckKey(OWN, backfills.SAME)
        (record,) = self.instance.event_log_storage.get_asset_check_execution_history(key, limit=1)
        evaluation = record.event.dagster_event.asset_check_evaluation_data
        return evaluation.passed, evaluation.description


@pytest.fixture
def works(tmp_path, monkeypatch, instance) -> Works:
    in_this_process(monkeypatch)
    plant = Plant.at(tmp_path / "site", cron="0 3 * * *", last=2)
    plant.land(1, 2, 3, 4)
    plant.run()
    plant.land(2, 3, value=100)
    return Works(plant, instance)


def test_one_run_replays_all_days_and_waits_for_approval(works):
    result = works.backfill("2026-01-02", "2026-01-03")
    assert result.success
    assert works.replayed() == {"2026-01-02", "2026-01-03"}
    passed, description = works.check()
    assert not passed
    assert "waits for approval: weir promote sensors backfill-20260102T00-20260104T00" in description
    (event, *_) = result.get_asset_materialization_events()
    shown = event.materialization.metadata
    assert shown["rows changed"].value == 2 * 72 + 2 * 3
    assert "| table readings |" in shown["report"].value
    assert set(works.plant.site.table("readings")["value"]) == {1, 2, 3, 4}

    (branch,) = [fork.branch.name for fork in forks.forks(pipeline, works.plant.site.settings)]
    assert works.promote(branch).success
    assert works.plant.head.kind != PROMOTION, "dry_run"
    assert works.promote(branch, dry_run=False).success
    works.plant.assert_exact()
    assert not works.promote(branch, dry_run=False).success, "it is gone"


@pytest.mark.long
def test_the_promote_job_accepts_only_what_a_dry_run_has_shown(works):
    works.backfill("2026-01-02", "2026-01-03")
    (branch,) = [fork.branch.name for fork in forks.forks(pipeline, works.plant.site.settings)]
    works.plant.land(2, value=7)
    shown = works.promote(branch)
    (event,) = [event for event in shown.all_events if event.event_type_value == "STEP_OUTPUT"]
    obstacles = event.event_specific_data.metadata["plan"].value["obstacles"]
    assert "1 file has changed" in obstacles[0]
    works.plant.land(3, value=7)
    assert not works.promote(branch, dry_run=False, accept=obstacles).success
    assert works.plant.head.kind != PROMOTION, "nobody was shown that a second file has changed"
    shown = plan(pipeline, works.plant.site.settings, branch).obstacles
    assert "2 files have changed" in shown[0]
    assert works.promote(branch, dry_run=False, accept=list(shown)).success


@pytest.mark.long
def test_it_is_promoted_at_once_where_that_is_wanted(works):
    assert works.backfill("2026-01-02", "2026-01-03", promote="automatic", replaces="range").success
    assert works.check() == (True, f"rows differ in readings, daily; promoted as checkpoint {works.plant.head.id}")
    works.plant.assert_exact(state=False)


@pytest.mark.long
def test_a_gate_that_holds_fails_the_run_and_no_day_is_shown_as_replayed(works):
    works.plant.land(3, value=1_000_000)
    result = works.backfill("2026-01-02", "2026-01-03", promote="automatic")
    assert not result.success
    (event,) = [event for event in result.all_events if event.is_step_failure]
    assert event.step_failure_data.user_failure_data.metadata["kind"].value == "GateError"
    assert works.replayed() == set()
    works.plant.land(3, value=7)
    assert works.backfill("2026-01-02", "2026-01-03", promote="automatic").success
    works.plant.assert_exact()


@pytest.mark.long
def test_the_schedule_asks_for_the_newest_days_in_one_run(works):
    defs = works.defs
    schedule = defs.get_repository_def().get_schedule_def("sensors_backfill_schedule")
    at = datetime(2026, 1, 4, 3, tzinfo=UTC)
    with dg.build_schedule_context(
        instance=works.instance, scheduled_execution_time=at, repository_def=defs.get_repository_def()
    ) as context:
        tick = schedule.evaluate_tick(context)
    (request,) = tick.run_requests
    assert (request.tags[FIRST], request.tags[LAST]) == ("2026-01-02", "2026-01-03")
    job = defs.resolve_job_def("sensors_backfill_job")
    assert job.execute_in_process(instance=works.instance, tags=request.tags).success
    assert works.replayed() == {"2026-01-02", "2026-01-03"}


def test_without_settings_there_are_no_partitions_and_still_the_promote_job(house):
    jobs = {job.name for job in house.defs.jobs or ()}
    assert "small_promote_job" in jobs
    assert "small_backfill_job" not in jobs


def test_hours_are_partitions_too():
    configured = BackfillSettings(start="2026-01-01", every="hour", last=2)
    at = datetime(2026, 1, 4, 3, 20, tzinfo=UTC)
    request = backfills.newest_request(configured, at)
    assert (request.tags[FIRST], request.tags[LAST]) == ("2026-01-04-01:00", "2026-01-04-02:00")
    keys = definition(configured, begun=True).get_partition_keys(current_time=at)
    assert {request.tags[FIRST], request.tags[LAST]} <= set(keys)


@pytest.mark.parametrize(
    ("config", "allowed"),
    [({"replaces": "Range"}, ("since", "range")), ({"promote": "automatically"}, ("approval", "automatic"))],
)
def test_a_typo_in_the_launchpad_is_refused_with_what_is_allowed(works, config, allowed):
    before = works.plant.head
    with pytest.raises(dg.DagsterInvalidConfigError) as refused:
        works.backfill("2026-01-02", "2026-01-03", **{"promote": "automatic", **config})
    assert all(word in str(refused.value) for word in allowed)
    assert works.plant.head == before
    assert not works.instance.get_runs(), "no run began"


def test_no_configuration_of_a_run_takes_a_choice_as_free_text():
    free = {"savepoint", "name", "reason", "branch", "directory", "accept"}  # what is no obstacle accepts nothing
    kinds = [kind for module in (backfills, jobs) for kind in vars(module).values() if isinstance(kind, type)]
    kinds += [operations.config_of(of) for of in every() if of.job is not None]
    configs = [kind for kind in kinds if issubclass(kind, dg.Config) and kind is not dg.Config]
    assert len(configs) == 9
    for kind in configs:
        for name, field in kind.model_fields.items():
            assert name in free or str not in (field.annotation, *get_args(field.annotation)), (kind.__name__, name)
