"""Dagster's instance on a real Postgres server, which the test starts for itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from state_ops.errors import ConfigurationError
from tests.tools.postgres_server import Postgres
from tests.weir.dagster.conftest import landing, project  # noqa: F401  fixtures
from weir.local import dagster_home
from weir.settings.configuration import PROJECT

JOB, SENSOR = "flights_job", "flights_checkpoint_sensor"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(dagster_home, "HOME", tmp_path / "dagster")
    return tmp_path / "dagster"


def _configured(name: str) -> dict[str, Any]:
    return yaml.safe_load((PROJECT / "weir" / "local" / dagster_home.INSTANCES[name]).read_text())


def test_both_instances_differ_in_their_storage_alone():
    sqlite, server = _configured("sqlite"), _configured("postgres")
    assert "storage" not in sqlite
    place = server.pop("storage")["postgres"]["postgres_db"]
    assert server == sqlite
    assert place.pop("scheme") == "postgresql+psycopg2"
    assert all(set(value) == {"env"} for value in place.values()), (
        "nothing of a server, least its password, is in the file"
    )


def test_what_is_missing_is_named_before_dagster_starts(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WEIR_DAGSTER_INSTANCE", "postgres")
    for name in Postgres(1).environment:
        if name.startswith("DAGSTER_POSTGRES"):
            monkeypatch.setenv(name, "x")
    monkeypatch.delenv("DAGSTER_POSTGRES_PASSWORD")
    with pytest.raises(ConfigurationError, match="not set: DAGSTER_POSTGRES_PASSWORD"):
        dagster_home.prepare()
    monkeypatch.setenv("WEIR_DAGSTER_INSTANCE", "oracle")
    with pytest.raises(ConfigurationError, match="sqlite, postgres"):
        dagster_home.prepare()
    assert not home.exists()


@pytest.mark.long
def test_runs_events_ticks_and_schedules_are_on_the_server(
    postgres: Postgres,
    home: Path,
    landing: Path,  # noqa: F811
    project: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    for name, value in postgres.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WEIR_DAGSTER__SENSOR_SECONDS", "5")
    landing.mkdir()
    dagster_home.prepare()
    with dg.DagsterInstance.from_config(str(home)) as instance:
        result = project.defs.resolve_job_def(JOB).execute_in_process(instance=instance)
        assert result.success
        log = tmp_path / "daemon.log"
        daemon = [dagster_home.program("dagster-daemon"), "run", "-w", str(dagster_home.WORKSPACE)]
        with dagster_home.started(daemon, log) as process:
            deadline = time.monotonic() + 60
            while not (ticks := _ticks(instance)) or _kinds(instance) != {"SENSOR", "SCHEDULE"}:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.2)
        assert "nothing to do" in ticks[0].tick_data.skip_reason

    rows = postgres.query("SELECT run_id, pipeline_name, status FROM runs")
    assert rows == [(result.run_id, JOB, "SUCCESS")]
    events = postgres.query(f"SELECT dagster_event_type FROM event_logs WHERE run_id = '{result.run_id}'")
    assert ("PIPELINE_SUCCESS",) in events and ("ASSET_MATERIALIZATION",) in events
    assert ("SKIPPED",) in postgres.query("SELECT DISTINCT status FROM job_ticks")
    kinds = postgres.query("SELECT DISTINCT instigator_type FROM instigators")
    assert sorted(kinds) == [("SCHEDULE",), ("SENSOR",)]
    assert list(home.rglob("*.db")) == [], "nothing is kept in files beside it"

    with dg.DagsterInstance.from_config(str(home)) as later:  # another process would see the same
        assert [run.run_id for run in later.get_runs()] == [result.run_id]
        assert _ticks(later)


def _kinds(instance: dg.DagsterInstance) -> set[str]:
    return {state.instigator_type.value for state in instance.all_instigator_state()}


def _ticks(instance: dg.DagsterInstance) -> list[Any]:
    return [
        tick
        for state in instance.all_instigator_state()
        if state.instigator_name == SENSOR
        for tick in instance.get_ticks(state.instigator_origin_id, state.selector_id)
        if tick.status.value == "SKIPPED"
    ]
