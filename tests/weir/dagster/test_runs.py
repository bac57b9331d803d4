"""Runs of the job and ticks of the sensor, on real storage."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace

import dagster as dg
import pytest

from infra import flights_input
from pipelines import flights
from state_ops.coordination import lease, requests
from state_ops.coordination.lease import Heartbeat
from tests.recovery.small import Bank
from weir.dagster.names import REASON, TRIGGER
from weir.execution.in_process import InMemoryExecutor
from weir.run import run as runtime
from weir.run.run import RunOptions
from weir.settings import configuration as settings

JOB, SENSOR = "flights_job", "flights_checkpoint_sensor"
CHECKPOINT, ROTATION, HOURLY = (
    dg.AssetKey(["flights", name]) for name in ("checkpoint", "aircraft_rotation_stage", "airport_hourly_stage")
)


def execute(project, instance, **options):
    return project.defs.resolve_job_def(JOB).execute_in_process(instance=instance, **options)


def observed(instance, run_id, key):
    """Metadata of a run's observations of one asset, oldest first."""
    records = instance.get_records_for_run(run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION).records
    events = [record.event_log_entry.asset_observation for record in records]
    return [event.metadata for event in events if event.asset_key == key]


def materialized(result, key):
    """Metadata of a run's last materialization of one asset."""
    events = [event for event in result.get_asset_materialization_events() if event.asset_key == key]
    return events[-1].materialization.metadata


def tick(project, instance, cursor=None):
    """One tick as the daemon evaluates it: the requested runs, why it skipped, the cursor."""
    context = dg.build_sensor_context(instance=instance, cursor=cursor, definitions=project.defs)
    (sensor,) = [sensor for sensor in project.defs.sensors if sensor.name == SENSOR]
    outcome = sensor.evaluate_tick(context)
    return outcome.run_requests or [], outcome.skip_message, outcome.cursor


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_a_run_observes_each_epoch_and_materializes_its_tables_meanwhile(days, landing, project, instance):
    flights_input.land(days, landing, 5)
    result = execute(project, instance, tags={TRIGGER: "sensor", REASON: "5 files new (tick 9)"})

    epochs = observed(instance, result.run_id, CHECKPOINT)
    assert [epoch["checkpoint"].value for epoch in epochs] == [1, 2, 3]
    assert [epoch["trigger"].value for epoch in epochs] == ["slice_limit", "slice_limit", "sensor"]
    assert epochs[-1]["reason"].value == "5 files new (tick 9)"
    assert [epoch["files waiting in landing"].value for epoch in epochs] == [3, 1, 0]
    assert epochs[1]["parent"].value == 1
    assert epochs[0]["ms to commit"].value > 0
    assert "passed" in epochs[0]["gates"].value
    first = {"aircraft_rotation": "its first job in a new Spark", "airport_hourly": "so", "gates": "they are imported"}
    assert epochs[0]["bottleneck"].value in first
    assert epochs[0]["ms by phase"].value.splitlines()[:2] == ["| phase | ms |", "|---|---:|"]
    assert "| aircraft_rotation |" in epochs[0]["stages"].value, (
        "as Markdown, which takes fewer bytes than a table of Dagster's"
    )
    assert isinstance(epochs[0]["watermark of airport_hourly"], dg.TimestampMetadataValue)
    stages = observed(instance, result.run_id, ROTATION)
    assert sum(stage["rows in"].value + stage["rows dropped"].value for stage in stages) == sum(
        epoch["rows read"].value for epoch in epochs
    )
    assert sum(stage["epochs"].value for stage in observed(instance, result.run_id, HOURLY)) == 3

    whole = materialized(result, CHECKPOINT)
    assert (whole["epochs"].value, whole["checkpoint"].value) == (3, 3)
    columns = materialized(result, ROTATION)["dagster/column_schema"].value.columns
    assert {"tailnum", "inherited"} <= {column.name for column in columns}
    times = Counter(event.asset_key for event in result.get_asset_materialization_events())
    assert (times[CHECKPOINT], times[ROTATION], times[HOURLY]) == (1, 2, 2), "stages at the first epoch too"
    assert times[dg.AssetKey(["flights", "tables", "aircraft_legs"])] == 4, "by each epoch, and at the end"
    assert times[dg.AssetKey(["flights", "tables", "airport_hourly_late"])] == 2, "which nothing has come for"

    _, registry = runtime.open_storage(flights.pipeline, settings.load())
    assert registry.head().run_id == result.run_id

    again = execute(project, instance)
    assert "already caught up" in materialized(again, CHECKPOINT)["outcome"].value
    assert observed(instance, again.run_id, CHECKPOINT) == []


def test_an_unreadable_file_fails_the_run_with_what_where_and_next(landing, project, instance):
    landing.mkdir()
    (landing / "broken.parquet").write_bytes(b"no parquet")
    with pytest.raises(dg.Failure) as raised:
        execute(project, instance)
    assert not raised.value.allow_retries
    assert "broken.parquet" in raised.value.description
    assert set(raised.value.metadata) == {"what", "where", "next", "kind"}


def test_with_nothing_to_do_the_sensor_skips(landing, project, instance):
    landing.mkdir()
    runs, message, _ = tick(project, instance)
    assert (runs, message) == ([], "nothing to do: no file is waiting, no coordinator needed")


def test_files_and_no_coordinator_make_the_sensor_request_one_run(days, landing, project, instance):
    flights_input.land(days, landing, 2)
    (request,), _, cursor = tick(project, instance)
    assert request.tags[TRIGGER] == "sensor"
    assert request.tags[REASON] == "2 files new (tick 1)"
    assert cursor is not None

    run = instance.create_run_for_job(project.defs.resolve_job_def(JOB), status=dg.DagsterRunStatus.STARTING)
    assert run.run_id[:8] in tick(project, instance)[1]


def test_files_and_a_living_coordinator_make_the_sensor_ask_for_a_barrier_once(days, landing, project, instance):
    flights_input.land(days, landing, 2)
    storage, registry = runtime.open_storage(flights.pipeline, settings.load())
    with Heartbeat(storage, registry.take_over(), 0, 5.0, None):
        runs, message, cursor = tick(project, instance)
        assert (runs, message) == ([], "asked the running coordinator for a barrier: 2 files new")
        (request,) = requests.pending(storage)
        assert (request.kind, request.trigger, request.reason, request.tick) == (
            "barrier",
            "sensor",
            "2 files new",
            "1",
        )
        assert "is starting, first epoch" in tick(project, instance, cursor)[1]
    assert len(requests.pending(storage)) == 1


def test_a_coordinator_that_died_is_resumed_and_its_run_is_ended(project, instance):
    dead = instance.create_run_for_job(project.defs.resolve_job_def(JOB), status=dg.DagsterRunStatus.STARTED)
    storage, registry = runtime.open_storage(flights.pipeline, settings.load())
    heartbeat = Heartbeat(storage, registry.take_over(), 0, 5.0, dead.run_id)
    with heartbeat:
        holder = lease.read(storage)
    storage.put_bytes(lease.LEASE, _of_a_dead_process(holder))

    (request,), _, cursor = tick(project, instance)
    assert request.run_key == "flights-restore-g1"
    assert "died" in request.tags["weir/reason"]
    assert instance.get_run_by_id(dead.run_id).is_failure
    assert tick(project, instance, cursor)[0] == []


def _of_a_dead_process(holder):
    return json.dumps(asdict(replace(holder, stopped=False, born="another boot/1"))).encode()


def test_a_sensors_request_for_files_that_were_read_meanwhile_makes_no_empty_epoch(tmp_path):
    bank = Bank.at(tmp_path)
    bank.land(1)
    pipeline, settings, options = bank.site.pipeline, bank.site.settings, RunOptions(until_caught_up=True)
    storage, registry = runtime.open_storage(pipeline, settings)
    for _ in runtime.run(pipeline, settings, options, InMemoryExecutor()):
        requests.send(storage, requests.Request("barrier", trigger="sensor", reason="1 file new", tick="4"))
    assert bank.epochs() == []  # takes what came after the last look
    assert [row.id for row in registry.checkpoints()] == [1]
    assert requests.pending(storage) == []
