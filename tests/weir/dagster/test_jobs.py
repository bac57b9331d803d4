"""The jobs beside the epochs do what they say, on real storage, and say so in Dagster."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import dagster as dg
import pytest
import yaml
from dagster._core.definitions.asset_checks.asset_check_evaluation import AssetCheckEvaluationPlanned

from state_ops.coordination import lease, requests, suspension
from state_ops.errors import TransientError
from state_ops.records.pins import SAVEPOINT
from state_ops.records.snapshot_files import STATE
from tests.recovery.small import until
from tests.tools.sampling import sampled
from tests.weir.dagster.without_spark import CHECKPOINT, House
from weir import expect
from weir.dagster.names import REASON, TRIGGER
from weir.dagster.operations import to_accept
from weir.ownership.pipeline_storage import open_storage
from weir.run import maintenance


@contextmanager
def living(house: House):
    """A coordinator that lives meanwhile."""
    with house.bank.coordinator() as reports:
        until(lambda: lease.alive(lease.read(house.storage)))
        yield reports


def failed_with(result) -> dict:
    """The metadata of the failure that ended a run."""
    (event,) = [event for event in result.all_events if event.is_step_failure]
    data = event.step_failure_data.user_failure_data
    return {name: value.value for name, value in data.metadata.items()}


def damaged(house: House) -> str:
    _, registry = open_storage(house.pipeline, house.settings)
    older = {file.path for row in registry.checkpoints()[:-1] for file in registry.files(row)}
    file = next(file for file in registry.files(registry.head()) if file.kind == STATE and file.path not in older)
    path = house.bank.site.root / "storage" / "small" / file.path
    path.write_bytes(path.read_bytes()[:-1])
    return file.path


# -- restore


def test_a_restore_proves_reports_and_resumes(house):
    house.bank.land(4)
    result = house.execute("small_restore_job")
    assert result.success
    assert house.checked() == {
        "restorable": True,
        "input_is_there": True,
        "last_run": True,
        "on_time": True,
    }
    assets = {event.asset_key.to_user_string() for event in result.get_asset_materialization_events()}
    assert assets == {"small/accounts_stage", "small/tables/booked", "small/checkpoint"}
    house.bank.assert_exact(1, 2, 3, 4)


def test_a_restore_of_what_is_damaged_changes_nothing_and_says_what_next(house):
    path, before = damaged(house), house.bank.ids()
    generation = house.bank.registry.generation()
    house.bank.land(4)
    result = house.execute("small_restore_job")
    assert not result.success
    assert house.bank.registry.generation() == generation, "no run began"
    metadata = failed_with(result)
    assert metadata["kind"] == "DamageError"
    assert path in metadata["where"] + metadata["what"]
    assert "weir" in metadata["next"]
    checked = house.checked()
    assert (checked["restorable"], checked["storage_is_whole"], checked["last_run"]) == (False, False, False)
    assert house.bank.ids() == before


def test_a_restore_for_a_generation_that_has_a_successor_does_nothing(house):
    house.bank.land(4)
    generation = lease.read(house.storage).generation
    house.bank.epochs()
    before = house.bank.ids()
    house.bank.land(5)
    result = house.execute("small_restore_job", {"generation": generation})
    assert result.success
    assert house.bank.ids() == before
    assert house.checked() == {}


def test_an_older_checkpoint_can_be_proven_but_not_resumed_from(house):
    damaged(house)
    assert house.execute("small_restore_job", {"checkpoint": 2, "resume": False}).success
    assert "restorable" not in house.checked(), "that is of the newest one"
    refused = house.execute("small_restore_job", {"checkpoint": 2})
    assert "rewind job" in failed_with(refused)["next"]


def test_a_restore_beside_a_living_coordinator_is_refused(house):
    with living(house):
        assert failed_with(house.execute("small_restore_job"))["kind"] == "BusyError"
        requests.send(house.storage, requests.Request("stop"))


# -- one asset alone


@pytest.mark.parametrize("job", ["small_job", "__ASSET_JOB"])
@pytest.mark.parametrize("name", [("tables", "booked"), ("accounts_stage",), ("checkpoint",)])
def test_one_asset_that_is_asked_for_alone_comes_by_epochs_of_the_whole_pipeline(house, job, name):
    house.bank.land(4)
    asked = dg.AssetKey(["small", *name])
    ran = house.execute(job, asset_selection=[asked])
    assert ran.success
    house.bank.assert_exact(1, 2, 3, 4)
    by_job = {event.asset_key for event in ran.all_events if event.is_step_materialization}
    assert by_job == {
        dg.AssetKey(["small", *other]) for other in [("tables", "booked"), ("accounts_stage",), ("checkpoint",)]
    }


# -- savepoint, rewind, stop


def test_a_savepoint_is_taken_and_dropped(house):
    assert house.execute("small_savepoint_job", {"name": "before"}).success
    (pin,) = [pin for pin in house.bank.registry.pins() if pin.kind == SAVEPOINT]
    assert (pin.name, pin.checkpoint_id) == ("before", 3)
    again = house.execute("small_savepoint_job", {"name": "before"})
    assert "already" in failed_with(again)["what"]
    assert house.execute("small_savepoint_job", {"name": "before", "drop": True}).success
    assert [pin for pin in house.bank.registry.pins() if pin.kind == SAVEPOINT] == []


def test_a_rewind_only_shows_unless_it_is_told_to_do_it(house):
    result = house.execute("small_rewind_job", {"checkpoint": 1})
    assert result.success
    assert house.bank.ids() == [1, 2, 3]
    assert house.execute("small_rewind_job", {"checkpoint": 1, "dry_run": False}).success
    assert house.bank.registry.head().kind == "rewind"
    house.bank.epochs()
    house.bank.assert_exact(1, 2, 3)


def test_a_rewind_accepts_only_the_obstacles_that_a_dry_run_has_shown(house):
    (house.bank.site.landing / "00003.parquet").unlink()
    shown = house.execute("small_rewind_job", {"checkpoint": 1})
    (event,) = [event for event in shown.all_events if event.event_type_value == "STEP_OUTPUT"]
    obstacles = event.event_specific_data.metadata["plan"].value["obstacles"]
    (house.bank.site.landing / "00002.parquet").unlink()
    asked = {"checkpoint": 1, "dry_run": False}
    assert "00002.parquet" in failed_with(house.execute("small_rewind_job", {**asked, "accept": obstacles}))["what"]
    assert house.bank.ids() == [1, 2, 3]
    obstacles = [obstacles[0].replace("00003", "00002.parquet, 00003")]
    assert house.execute("small_rewind_job", {**asked, "accept": obstacles}).success


def test_a_rewind_ends_a_running_coordinator_if_it_may_and_sensors_go_on(house):
    with living(house):
        refused = house.execute("small_rewind_job", {"checkpoint": 2, "dry_run": False})
        assert failed_with(refused)["kind"] == "BusyError"
        assert house.execute("small_rewind_job", {"checkpoint": 2, "dry_run": False, "stop": True}).success
    assert house.bank.registry.head().kind == "rewind"
    assert suspension.read(house.storage) is None
    (request,), _, _ = house.tick("checkpoint_sensor")
    assert request.job_name == "small_job"


def test_a_rewind_does_not_end_what_a_person_has_stopped(house):
    with living(house):
        assert house.execute("small_stop_job", {}).success
    assert house.execute("small_rewind_job", {"checkpoint": 2, "dry_run": False, "stop": True}).success
    assert "stopped by a person" in house.tick("checkpoint_sensor")[1]


def test_what_a_person_has_stopped_goes_on_after_the_resume_job(house):
    assert house.execute("small_stop_job", {}).success
    house.bank.land(4)
    assert "stopped by a person" in house.tick("checkpoint_sensor")[1]
    assert house.execute("small_resume_job").success
    assert house.tick("checkpoint_sensor")[0], "a run is asked for"


def test_a_rewind_that_fails_after_it_stopped_the_coordinator_lets_sensors_go_on(house, monkeypatch):
    def fails(*_args, **_options):
        raise TransientError("the storage is away")

    monkeypatch.setattr(maintenance, "rewind", fails)
    with living(house):
        assert not house.execute("small_rewind_job", {"checkpoint": 2, "dry_run": False, "stop": True}).success
    house.bank.land(4)
    assert house.tick("checkpoint_sensor")[0]


def test_which_checkpoint_must_be_said(house):
    for asked in ({}, {"checkpoint": 1, "beginning": True}):
        assert "checkpoint, savepoint or beginning" in failed_with(house.execute("small_rewind_job", asked))["next"]


def test_a_rewind_goes_to_before_the_first_checkpoint_if_that_is_asked_for(house):
    assert house.execute("small_rewind_job", {"beginning": True}).success
    assert house.bank.ids() == [1, 2, 3]
    assert house.execute("small_rewind_job", {"beginning": True, "dry_run": False}).success
    assert len(house.bank.site.table("booked")) == 0
    house.bank.epochs()
    house.bank.assert_exact(1, 2, 3)


def test_a_stop_ends_the_coordinator_and_sensors_wait_for_a_person(house):
    with living(house):
        assert house.execute("small_stop_job", {"savepoint": "at-the-end"}).success
    house.bank.land(4)
    runs, message, _ = house.tick("checkpoint_sensor")
    assert runs == []
    assert "stopped by a person" in message
    assert house.execute("small_job").success
    house.bank.land(5)
    (request,), _, _ = house.tick("checkpoint_sensor")
    assert request.job_name == "small_job"


def test_a_command_beside_a_stop_does_not_end_it(house):
    with living(house):
        assert house.execute("small_stop_job", {}).success
    house.bank.land(4)
    assert house.execute("small_savepoint_job", {"name": "x"}).success
    assert "stopped by a person" in house.tick("checkpoint_sensor")[1]


def test_with_nobody_running_a_stop_still_keeps_sensors_and_their_queued_runs_from_beginning(house):
    house.bank.land(4)
    assert house.execute("small_stop_job", {"savepoint": "at-the-end"}).success
    assert [pin.name for pin in house.bank.registry.pins()] == ["at-the-end"]
    assert "stopped by a person (stop job)" in house.tick("checkpoint_sensor")[1]


@pytest.mark.parametrize(
    "tags",
    sampled(
        [
            {TRIGGER: "sensor", REASON: "1 file new"},
            {"dagster/sensor_name": "of_the_project"},
            {"dagster/schedule_name": "every_hour"},
            {"dagster/from_automation_condition": "true"},
            {"dagster/retry_number": "1"},
            {"dagster/retry_number": "1", "dagster/parent_run_id": "r-1", "dagster/root_run_id": "r-1"},
            {TRIGGER: "sensor", "dagster/retry_number": "1", "dagster/parent_run_id": "r-1"},
        ],
        lambda tags: TRIGGER in tags or "dagster/schedule_name" in tags,
    ),
    ids=lambda tags: next(iter(tags)),
)
@pytest.mark.parametrize("job", sampled(["small_job", "small_restore_job"]))
def test_a_queued_run_that_no_person_asked_for_leaves_a_stopped_pipeline_alone(house, job, tags):
    house.bank.land(4)
    assert house.execute("small_stop_job", {}).success
    verdicts = house.checked()
    result = house.execute(job, tags=tags)
    assert result.success
    assert house.bank.ids() == [1, 2, 3]
    assert suspension.read(house.storage) is not None
    assert {name: passed for name, passed in house.checked().items() if name == "last_run"} == verdicts
    lines = house.instance.all_logs(result.run_id)
    assert any("stopped by a person (stop job)" in entry.user_message for entry in lines)


@pytest.mark.parametrize(
    "inherited",
    sampled(
        [
            {
                TRIGGER: "sensor",
                REASON: "1 file new",
                "dagster/sensor_name": "small_checkpoint_sensor",
            },
            {"dagster/schedule_name": "every_hour"},
            {"dagster/from_automation_condition": "true"},
        ]
    ),
    ids=lambda tags: next(iter(tags)),
)
def test_a_run_that_a_person_executes_again_begins_again_whoever_asked_for_the_first(house, inherited):
    """Dagster gives such a run all tags of the run before, and the id of that."""
    house.bank.land(4)
    assert house.execute("small_stop_job", {}).success
    again = {**inherited, "dagster/parent_run_id": "r-1", "dagster/root_run_id": "r-1"}
    assert house.execute("small_job", tags=again).success
    assert suspension.read(house.storage) is None
    newest = house.bank.registry.head()
    assert (newest.id, newest.trigger, newest.reason) == (4, "manual", "re-executed in Dagster")


def test_a_stop_that_drains_with_nobody_running_is_a_persons_run(house):
    house.bank.land(4)
    refused = failed_with(house.execute("small_stop_job", {"drain": True}))
    assert "No coordinator" in refused["what"]
    assert "weir stop small --drain" in refused["next"]
    assert suspension.read(house.storage) is None


# -- upkeep, drill, checks


def test_upkeep_checks_all_and_fails_on_damage(house):
    assert house.execute("small_retention_and_fsck", {}).success
    assert house.checked() == {"storage_is_whole": True}
    path = damaged(house)
    result = house.execute("small_retention_and_fsck", {"quick": True})
    assert not result.success
    assert not house.checked()["storage_is_whole"]
    (event,) = [event for event in result.all_events if event.is_step_failure]
    assert path in event.step_failure_data.user_failure_data.metadata["what"].value


def test_a_drill_is_an_asset_with_what_it_measured(house):
    result = house.execute("small_restore_drill_job")
    assert result.success
    (event,) = result.get_asset_materialization_events()
    shown = event.materialization.metadata
    assert shown["checkpoint"].value == 3
    assert shown["entries compared"].value == 14
    assert shown["recovery seconds"].value > 0
    assert "data:image/png" in shown["history"].value
    assert house.checked() == {"comes_back_as_it_was": True, "meets_objectives": True}


def test_a_drill_that_misses_an_objective_or_finds_damage_turns_red(house):
    site = house.bank.site
    house.bank.site = replace(
        site, options={**site.options, "WEIR_RESTORE__RECOVERY_TIME_OBJECTIVE_SECONDS": "0.000001"}
    )
    damaged(house)
    result = house.execute("small_restore_drill_job")
    assert house.checked() == {"comes_back_as_it_was": False, "meets_objectives": False}
    assert result.success


def test_checks_can_be_asked_again_one_by_one(house):
    checks = house.defs.resolve_job_def("__ASSET_JOB")
    graph = house.defs.resolve_asset_graph()
    chosen = {key for key in graph.asset_check_keys if key.name in ("restorable", "on_time", "last_run")}
    assert len(chosen) == 3
    picked = checks.get_subset(asset_selection=set(), asset_check_selection=chosen)
    assert picked.execute_in_process(instance=house.instance).success
    assert house.checked() == {"restorable": True, "on_time": True, "last_run": True}


def test_the_check_reads_storage_though_copies_are_here(house):
    """Whatever this host could start from: the next one has only what is in storage."""
    victim = next((house.bank.site.root / "storage").rglob("*.sst"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    graph = house.defs.resolve_asset_graph()
    chosen = {key for key in graph.asset_check_keys if key.name == "restorable"}
    picked = house.defs.resolve_job_def("__ASSET_JOB").get_subset(asset_selection=set(), asset_check_selection=chosen)
    assert picked.execute_in_process(instance=house.instance).success
    assert house.checked() == {"restorable": False}
    assert "altered" in house.description("restorable")


@pytest.mark.parametrize("waits", [True, False])
def test_input_that_waits_for_too_long_is_overdue(house, waits):
    site = house.bank.site
    house.bank.site = replace(site, options={**site.options, "WEIR_DAGSTER__OVERDUE_SECONDS": "0.000001"})
    if waits:
        house.bank.land(4)
    _, message, cursor = house.tick("lease_watchdog")
    assert house.checked() == ({"on_time": False} if waits else {})
    assert ("1 file is waiting" if waits else "nothing is waiting") in message
    verdicts = house.history("on_time")
    house.tick("lease_watchdog", cursor)
    assert house.history("on_time") == verdicts, "only what has changed is reported"


def test_a_check_that_a_run_has_only_planned_does_not_stop_the_watchdog(house):
    site = house.bank.site
    house.bank.site = replace(site, options={**site.options, "WEIR_DAGSTER__OVERDUE_SECONDS": "0.000001"})
    house.bank.land(4)
    cursor = house.tick("lease_watchdog")[2]
    run = house.instance.create_run_for_job(house.defs.resolve_job_def("small_job"))
    planned = AssetCheckEvaluationPlanned(asset_key=CHECKPOINT, check_name="on_time")
    event = dg.DagsterEvent(
        dg.DagsterEventType.ASSET_CHECK_EVALUATION_PLANNED.value, "small_job", event_specific_data=planned
    )
    house.instance.report_dagster_event(event, run.run_id)
    before = house.history("on_time")

    assert "1 file is waiting" in house.tick("lease_watchdog", cursor)[1]
    assert house.history("on_time") == before, "it had said so already"


@pytest.mark.long
def test_pages_of_all_expectations_are_made(house, tmp_path):
    (stage,) = house.pipeline.stages
    gate = expect("ExpectColumnValuesToBeBetween", column="amount", max_value=2, on_failure="warn")
    gated = house.with_pipeline(stages=(replace(stage, gates=(gate,)),))
    result = gated.execute("small_data_docs", {"directory": str(tmp_path / "pages")})
    assert result.success
    assert (tmp_path / "pages" / "index.html").is_file()
    (output,) = [event for event in result.all_events if event.event_type_value == "STEP_OUTPUT"]
    shown = output.step_output_data.metadata
    assert (shown["expectations"].value, shown["expectations failed"].value) == (1, 1)


def test_a_run_observes_its_source_with_its_columns(house):
    house.bank.land(4)
    result = house.execute("small_job")
    records = house.instance.get_records_for_run(result.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION).records
    seen = [record.event_log_entry.asset_observation for record in records]
    (source,) = [event.metadata for event in seen if event.asset_key == dg.AssetKey(["small", "landing"])]
    assert (source["files read"].value, source["files waiting"].value, source["last file"].value) == (
        4,
        0,
        "00004.parquet",
    )
    columns = source["dagster/column_schema"].value.columns
    assert [(column.name, column.type) for column in columns] == [
        ("id", "string"),
        ("at", "int64"),
        ("amount", "int64"),
    ]


def test_epochs_that_come_fast_share_an_observation_that_leaves_none_of_their_rows_out(house):
    site = house.bank.site
    house.bank.site = replace(site, options={**site.options, "WEIR_DAGSTER__OBSERVE_SECONDS": "3600"})
    house.bank.land(4, 5, 6, 7)
    result = house.execute("small_job")
    records = house.instance.get_records_for_run(result.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION).records
    seen = [record.event_log_entry.asset_observation for record in records]
    shown = [event.metadata for event in seen if event.asset_key == CHECKPOINT]
    assert [
        (metadata["checkpoint"].value, metadata["epochs"].value, metadata["rows read"].value) for metadata in shown
    ] == [
        (4, 1, 10),
        (7, 3, 30),
    ]


def test_a_tables_columns_say_where_they_come_from(house):
    house.bank.land(4)
    result = house.execute("small_job")
    tables = {
        event.asset_key.path[-1]: event.materialization.metadata for event in result.get_asset_materialization_events()
    }
    of_table, of_stage = (
        tables["booked"]["dagster/column_lineage"].value,
        tables["accounts_stage"]["dagster/column_lineage"].value,
    )
    assert {name: [dep.asset_key.path[-1] for dep in deps] for name, deps in of_table.deps_by_column.items()} == {
        "id": ["accounts_stage"],
        "at": ["accounts_stage"],
        "amount": ["accounts_stage"],
    }
    assert of_stage.deps_by_column["amount"] == [dg.TableColumnDep(dg.AssetKey(["small", "landing"]), "amount")]
    assert (tables["booked"]["rows added"].value, tables["booked"]["dagster/row_count"].value) == (10, 40)


def test_obstacles_are_logged_as_the_launchpad_reads_them():
    """It reads YAML, which takes the halves of a character beyond 16 bits for two characters. The last name is no
    UTF-8."""
    obstacles = (
        'the file "a": b.parquet',
        "\N{GRINNING FACE} und \N{LATIN SMALL LETTER U WITH DIAERESIS}",
        "\u2028\x85",
        "\udc80",
    )
    line = to_accept(obstacles)
    assert yaml.safe_load(line) == {"accept": list(obstacles)}
    assert line.isprintable(), "and it is one line"
