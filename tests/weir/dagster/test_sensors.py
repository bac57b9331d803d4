"""What the run-failure sensor and the watchdog do, branch by branch; the daemon itself is in test_pages."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace

import dagster as dg
import polars as pl
import pytest
from dagster import DagsterRunStatus
from dagster._core.remote_origin import ManagedGrpcPythonEnvCodeLocationOrigin, RemoteRepositoryOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._utils import get_run_crash_explanation

from state_ops.coordination import gate_hold, lease, processes, requests, suspension
from state_ops.coordination.lease import Heartbeat
from state_ops.coordination.requests import Request
from state_ops.errors import DamageError, InputError, MissingError, VanishedError
from tests.recovery.small import Bank, until
from tests.tools.sampling import sampled
from tests.tools.stages import altered
from tests.weir.dagster.without_spark import House
from tests.weir.sources import test_connector_reader as clicks
from weir import expect
from weir.dagster import checks, history, metadata
from weir.dagster.coordination import introduce
from weir.dagster.factory import weir_definitions
from weir.dagster.names import ANSWERED_BY, COORDINATES, PIPELINE, PROCESS, STORAGE, Place, Runs, place
from weir.ownership import backlog
from weir.run import maintenance
from weir.run import run as runtime


def failed_run(house: House, job: str = "small_job", raises: BaseException | None = None) -> dg.DagsterRun:
    """A run of the pipeline that has failed: by itself if it raises something, else because its process is gone."""
    if raises is None:
        run = house.instance.create_run_for_job(house.defs.resolve_job_def(job), status=DagsterRunStatus.STARTED)
        house.instance.report_run_failed(run)
        return house.instance.get_run_by_id(run.run_id)
    result = house.execute(job)
    assert not result.success
    return house.instance.get_run_by_id(result.run_id)


def answer(house: House, run: dg.DagsterRun):
    """What the sensor says of a failed run, as the daemon asks it."""
    (sensor,) = [each for each in house.defs.sensors if each.name == "small_run_failure_sensor"]
    records = house.instance.get_records_for_run(run.run_id, of_type=dg.DagsterEventType.PIPELINE_FAILURE).records
    event = records[-1].event_log_entry.dagster_event
    context = dg.build_run_status_sensor_context(
        sensor_name=sensor.name, dagster_event=event, dagster_instance=house.instance, dagster_run=run
    ).for_run_failure()
    return sensor(context)


def dead_holder(house: House, run: str | None, **changes) -> lease.Lease:
    """The lease of a coordinator that was killed."""
    with Heartbeat(house.storage, house.bank.registry.take_over(), 3, 5.0, None):
        holder = lease.read(house.storage)
    dead = replace(holder, **{"run_id": run, "stopped": False, "born": "another boot/1", **changes})
    house.storage.put_bytes(lease.LEASE, json.dumps(asdict(dead)).encode())
    return dead


# -- a run failed


def test_a_run_whose_process_died_is_restored(house):
    run = failed_run(house)
    holder = dead_holder(house, run.run_id)
    request = answer(house, run)
    assert (request.job_name, request.run_key) == ("small_restore_job", f"small-restore-g{holder.generation}")
    assert request.run_config["ops"]["small_restore"]["config"]["generation"] == holder.generation
    assert not house.checked()["last_run"]


def test_the_checkpoint_sensor_asks_under_the_same_key(house):
    holder = dead_holder(house, None)
    (request,), _, _ = house.tick("checkpoint_sensor")
    assert (request.job_name, request.run_key) == ("small_restore_job", f"small-restore-g{holder.generation}")


@pytest.mark.parametrize("changes", [{}, {"stopped": True, "outcome": "failed"}], ids=["died", "failed"])
@pytest.mark.parametrize("first", sampled(["checkpoint_sensor", "run_failure_sensor"]))
def test_one_of_two_sensors_that_tick_beside_each_other_asks_for_what_follows(house, first, changes):
    """What the first has asked for is not a run yet when the second looks."""
    house.bank.land(4)
    run = failed_run(house)
    dead_holder(house, run.run_id, **changes)
    if first == "checkpoint_sensor":
        assert len(house.tick("checkpoint_sensor")[0]) == 1
        assert (
            "small_checkpoint_sensor sees to it" in answer(house, house.instance.get_run_by_id(run.run_id)).skip_message
        )
        return
    assert answer(house, run).job_name == "small_restore_job"
    runs, message, cursor = house.tick("checkpoint_sensor")
    assert runs == []
    assert f"small_run_failure_sensor sees to run {run.run_id[:8]}" in message
    # Nothing came of it, as if the daemon had died before it began the run: whoever looks next does not wait for ever.
    runs, message, cursor = house.tick("checkpoint_sensor", cursor)
    assert runs == []
    assert "brought no checkpoint" in message
    assert len(house.tick("checkpoint_sensor", cursor)[0]) == 1


@pytest.mark.parametrize("last", ["checkpoint", "run_failure"])
def test_of_two_sensors_that_looked_before_either_marked_the_run_one_asks(house, monkeypatch, last):
    house.bank.land(4)
    run = failed_run(house)
    dead_holder(house, run.run_id)
    mark = house.instance.add_run_tags

    def both(run_id, tags):
        sensors = {"checkpoint": tags, "run_failure": dict.fromkeys(tags, f"small_run_failure_sensor|{run_id}")}
        for name in sorted(sensors, key=last.__eq__):
            mark(run_id, sensors[name])

    monkeypatch.setattr(house.instance, "add_run_tags", both)
    runs, message, _ = house.tick("checkpoint_sensor")
    assert len(runs) == (last == "checkpoint")
    assert runs or f"small_run_failure_sensor sees to run {run.run_id[:8]}" in message


def test_a_run_that_ended_well_is_not_marked_as_answered(house):
    assert house.execute("small_job").success
    house.bank.land(4)
    assert len(house.tick("checkpoint_sensor")[0]) == 1
    assert all(ANSWERED_BY not in run.tags for run in house.instance.get_runs())


def test_a_failure_that_only_a_person_can_mend_is_said_and_left(house):
    (stage,) = house.pipeline.stages
    broken = house.with_pipeline(stages=(altered(stage, function=_raises),))
    broken.bank.land(4)
    run = failed_run(broken, raises=ValueError())
    message = answer(broken, run).skip_message
    assert "correct the stage's function" in message
    assert not broken.checked()["last_run"]


def _raises(rows: pl.DataFrame, state, epoch):
    raise ValueError("nobody expected this")


def test_a_damaged_checkpoint_is_not_restored_twice(house):
    path = next(path for path in (house.bank.site.root / "storage").rglob("*.sst"))
    path.write_bytes(path.read_bytes()[:-1])
    run = failed_run(house, "small_restore_job", raises=ValueError())
    assert "repair or rewind" in answer(house, run).skip_message


@pytest.mark.parametrize("kind", [DamageError, MissingError])
def test_a_restore_that_fails_over_damage_that_holds_nobody_is_tried_again_and_says_so(house, kind, monkeypatch):
    """Nothing is recorded that could be seen to change, so the checkpoint sensor asks again."""
    house.bank.land(4)
    error = kind("A file is damaged.", where="/disk/of/a/worker")
    monkeypatch.setattr(runtime, "run", _run_that_raises(error))
    run = failed_run(house, "small_restore_job", raises=error)
    dead_holder(house, run.run_id)
    assert "the checkpoint sensor tries again" in answer(house, run).skip_message
    assert [request.job_name for request in asked_for(house, 1)] == ["small_restore_job"]


def test_input_that_vanished_waits_for_no_person(house, monkeypatch):
    """The next run plans without it. Bad input does wait."""
    for error, asked in ((VanishedError("It is gone."), True), (InputError("It is bad."), False)):
        monkeypatch.setattr(runtime, "run", _run_that_raises(error))
        run = failed_run(house, raises=error)
        dead_holder(house, run.run_id)
        assert isinstance(answer(house, run), dg.RunRequest) is asked


def _run_that_raises(error: BaseException):
    def run(*args, **options):
        raise error
        yield

    return run


def test_what_follows_already_is_not_asked_for_again(house):
    run = failed_run(house)
    dead_holder(house, run.run_id)
    house.instance.create_run_for_job(house.defs.resolve_job_def("small_job"), status=DagsterRunStatus.STARTING)
    assert "follows already" in answer(house, run).skip_message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stopped": True, "outcome": "stopped"}, "stopped by a person (weir stop)"),
        ({"run_id": "another run"}, "was not its own"),
    ],
)
def test_a_run_that_was_ended_or_had_not_the_lease_is_left(house, changes, says):
    run = failed_run(house)
    if "stopped" in changes:
        suspension.write(house.storage, suspension.Suspension("stopped", "weir stop"))
    dead_holder(house, run.run_id, **changes)
    assert says in answer(house, run).skip_message


def test_a_run_that_failed_before_it_had_begun_leaves_nothing_to_restore(house):
    run = failed_run(house)
    house.storage.delete(lease.LEASE)
    assert "had not begun" in answer(house, run).skip_message


def test_a_living_coordinator_is_not_restored(house):
    run = failed_run(house)
    with Heartbeat(house.storage, house.bank.registry.take_over(), 3, 5.0, run.run_id):
        assert "is alive" in answer(house, run).skip_message


def test_a_run_of_another_pipeline_whose_job_has_that_name_is_not_its_own(house):
    """Of the pipeline small_restore, in a code location of its own, it is the job that runs epochs."""
    house.bank.land(4)
    job = house.defs.resolve_job_def("small_restore_job")
    other = {PIPELINE: "small_restore"}
    house.instance.create_run_for_job(job, status=DagsterRunStatus.STARTED, tags=other)
    (request,), _, _ = house.tick("checkpoint_sensor")
    assert request.job_name == "small_job"


def test_runs_of_others_are_not_its_own(house):
    run = failed_run(house, "small_retention_and_fsck")
    assert "none of small's" in answer(house, run).skip_message


def test_a_restore_that_fails_is_not_answered_by_another_one_at_once(house):
    run = failed_run(house, "small_restore_job")
    dead_holder(house, run.run_id)
    assert "ever more rarely" in answer(house, run).skip_message


# -- a run was cancelled


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_that_a_person_cancelled_is_not_begun_again_whether_or_not_it_had_begun(house, begun):
    house.bank.land(4)
    run = house.instance.create_run_for_job(house.defs.resolve_job_def("small_job"), status=DagsterRunStatus.CANCELED)
    if begun:
        dead_holder(house, run.run_id)
    runs, message, cursor = house.tick("checkpoint_sensor")
    assert runs == []
    assert "cancelled by a person" in message
    assert suspension.clear(house.storage), "weir resume"
    assert house.tick("checkpoint_sensor", cursor)[0], "it is cancelled once"


def test_a_queued_run_that_was_one_too_many_may_be_cancelled(house):
    house.bank.land(4)
    job = house.defs.resolve_job_def("small_job")
    first = house.instance.create_run_for_job(job, status=DagsterRunStatus.STARTED)
    house.instance.create_run_for_job(job, status=DagsterRunStatus.CANCELED)
    cursor = house.tick("checkpoint_sensor")[2]
    assert suspension.read(house.storage) is None
    house.instance.report_run_failed(house.instance.get_run_by_id(first.run_id))
    assert house.tick("checkpoint_sensor", cursor)[0]
    assert suspension.read(house.storage) is None


def cancelled_run(house: House) -> dg.DagsterRun:
    run = house.instance.create_run_for_job(house.defs.resolve_job_def("small_job"), status=DagsterRunStatus.STARTED)
    house.instance.report_run_canceled(run)
    return run


def test_who_has_begun_again_without_dagster_before_a_tick_saw_the_run_cancelled_is_not_ended(house):
    """The sensor was off, or the daemon dead, when somebody cancelled the run and then ran the pipeline from a shell."""
    cancelled_run(house)
    house.bank.epochs(4)
    house.bank.land(5)
    (request,), _, cursor = house.tick("checkpoint_sensor")
    assert request.job_name == "small_job" and suspension.read(house.storage) is None
    house.tick("checkpoint_sensor", cursor)
    assert suspension.read(house.storage) is None


def test_that_a_run_was_cancelled_waits_for_what_a_coordinator_of_a_shell_comes_to(house):
    cancelled_run(house)
    with Heartbeat(house.storage, house.bank.registry.take_over(), 3, 5.0, None):
        cursor = house.tick("checkpoint_sensor")[2]
        assert suspension.read(house.storage) is None
    house.tick("checkpoint_sensor", cursor)
    assert suspension.read(house.storage) is not None, "it came to nothing"


# -- the watchdog


def test_the_watchdog_ends_the_run_of_a_dead_coordinator(house):
    run = house.instance.create_run_for_job(house.defs.resolve_job_def("small_job"), status=DagsterRunStatus.STARTED)
    dead_holder(house, run.run_id)
    message = house.tick("lease_watchdog")[1]
    assert "died" in message
    assert "marked as failed" in message
    assert house.instance.get_run_by_id(run.run_id).is_failure


def test_the_watchdog_ends_a_coordinator_whose_run_is_over_but_not_at_first_sight(house):
    run = house.instance.create_run_for_job(house.defs.resolve_job_def("small_job"), status=DagsterRunStatus.CANCELED)
    with Heartbeat(house.storage, house.bank.registry.take_over(), 3, 5.0, run.run_id):
        _, message, cursor = house.tick("lease_watchdog")
        assert requests.pending(house.storage) == []
        _, message, cursor = house.tick("lease_watchdog", cursor)
        assert "asked it to end" in message
        assert [request.kind for request in requests.pending(house.storage)] == ["stop"]
        house.tick("lease_watchdog", cursor)
        assert len(requests.pending(house.storage)) == 1


def test_the_watchdog_asks_a_coordinator_that_does_not_come_to_its_end_once(house):
    run = house.instance.create_run_for_job(house.defs.resolve_job_def("small_job"), status=DagsterRunStatus.CANCELED)
    cursor = None
    with Heartbeat(house.storage, house.bank.registry.take_over(), 3, 5.0, run.run_id):
        for _ in range(6):
            cursor = house.tick("lease_watchdog", cursor)[2]
        assert len(requests.pending(house.storage)) == 1


def test_rows_of_a_connector_are_overdue_that_the_watchdog_has_seen_wait_for_long(tmp_path, instance):
    """They do not say when they came, as files do."""
    site = clicks.site_of(tmp_path)
    clicks.put(site.landing, "p", clicks.row("a", 1, 0))
    defs = weir_definitions([site.pipeline], site.settings)
    (watchdog,) = [each for each in defs.sensors if each.name == "clicks_lease_watchdog"]
    check = dg.AssetCheckKey(dg.AssetKey(["clicks", "checkpoint"]), checks.ON_TIME)

    def tick(cursor):
        return watchdog.evaluate_tick(dg.build_sensor_context(instance=instance, cursor=cursor, definitions=defs))

    begun = tick(None)
    assert re.search("1 row is waiting, the oldest for [01] s", begun.skip_message)
    seen = json.loads(begun.cursor)
    seen["waits"][1] -= 1000
    late = tick(json.dumps(seen))
    assert re.search(r"1 row is waiting, the oldest for 100\d s", late.skip_message)
    assert not checks.newest(instance, check).passed
    clicks.epochs(site)
    clicks.put(site.landing, "p", clicks.row("a", 2, 1))
    assert re.search("1 row is waiting, the oldest for [01] s", tick(late.cursor).skip_message), "a newer checkpoint"
    assert checks.newest(instance, check).passed


def test_what_the_watchdog_ends_no_person_has_ended(house):
    run = house.instance.create_run_for_job(house.defs.resolve_job_def("small_job"), status=DagsterRunStatus.CANCELED)
    with house.bank.coordinator(run_id=run.run_id):
        until(lambda: lease.alive(lease.read(house.storage)) and lease.read(house.storage).run_id == run.run_id)
        cursor = house.tick("lease_watchdog")[2]
        house.tick("lease_watchdog", cursor)
    assert suspension.read(house.storage) is None


def test_the_watchdog_leaves_a_run_alone_that_has_the_tags_of_the_one_that_it_repeats(house):
    """Dagster copies what the first run has said of its process, which is gone by then."""
    before = house.execute("small_job")
    gone = {
        **house.instance.get_run_by_id(before.run_id).tags,
        PROCESS: f"{socket.gethostname()}|999999|another boot/1|{processes.pid_namespace()}|{before.run_id}",
        "dagster/parent_run_id": before.run_id,
    }
    job = house.defs.resolve_job_def("small_job")
    again = house.instance.create_run_for_job(job, status=DagsterRunStatus.STARTING, tags=gone)
    house.tick("lease_watchdog")
    assert house.instance.get_run_by_id(again.run_id).status is DagsterRunStatus.STARTING


@dg.op
def coordinates(context) -> None:
    introduce(context, Place("small", "/somewhere/small"))


@dg.job(executor_def=dg.multiprocess_executor)
def apart() -> None:
    coordinates()


def test_where_each_step_has_a_process_of_its_own_the_runs_is_another(tmp_path):
    """That of the epochs ends with them, and the run goes on: what is downstream in it is not the watchdog's to end."""
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        with dg.execute_job(dg.reconstructable(apart), instance=instance) as result:
            assert result.success
        run = instance.get_run_by_id(result.run_id)
        assert run.tags[COORDINATES] == "small"
        assert run.tags[PROCESS].split("|")[:2] == [socket.gethostname(), str(os.getpid())]


def test_a_run_that_repeats_one_that_was_answered_is_answered_itself(house, monkeypatch):
    """It has that one's tags from Dagster, whether it comes to say anything of itself or not."""
    house.bank.land(4)
    first = failed_run(house)
    dead_holder(house, first.run_id)
    assert answer(house, first).job_name == "small_restore_job"
    tags = house.instance.get_run_by_id(first.run_id).tags
    assert ANSWERED_BY in tags
    events = house.instance.get_records_for_run(first.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT).records
    messages = [record.event_log_entry.dagster_event.message for record in events]
    assert "small_run_failure_sensor sees to what follows this run." in messages
    monkeypatch.setattr(house.instance, "add_run_tags", _says_nothing)
    run_id = house.execute("small_job", tags={**tags, "dagster/parent_run_id": first.run_id}).run_id
    monkeypatch.undo()
    dead_holder(house, run_id)
    (request,), _, _ = house.tick("checkpoint_sensor")
    assert request.job_name == "small_restore_job"


def _says_nothing(*args: object) -> None:
    raise OSError("the database is away")


def test_the_watchdog_ends_a_run_whose_process_is_gone_and_that_held_no_lease(house):
    run = house.instance.create_run_for_job(
        house.defs.resolve_job_def("small_restore_job"), status=DagsterRunStatus.STARTED
    )
    house.instance.add_run_tags(run.run_id, {"weir/process": f"{socket.gethostname()}|{os.getpid()}|another boot/1"})
    other = house.instance.create_run_for_job(house.defs.resolve_job_def("small_job"), status=DagsterRunStatus.STARTED)
    mine = f"{socket.gethostname()}|{os.getpid()}|{processes.born(os.getpid())}|{processes.pid_namespace()}"
    house.instance.add_run_tags(other.run_id, {PROCESS: mine})
    boxed = house.instance.create_run_for_job(house.defs.resolve_job_def("small_job"), status=DagsterRunStatus.STARTED)
    boot = processes.born(os.getpid()).partition("/")[0]
    in_container = f"{socket.gethostname()}|{os.getpid()}|{boot}/1|{boot}/another container"
    house.instance.add_run_tags(boxed.run_id, {"weir/process": in_container})
    message = house.tick("lease_watchdog")[1]
    assert f"run {run.run_id[:8]} is marked as failed" in message
    assert house.instance.get_run_by_id(run.run_id).is_failure
    assert not house.instance.get_run_by_id(other.run_id).is_finished
    assert not house.instance.get_run_by_id(boxed.run_id).is_finished, "its number says nothing outside of it"


@pytest.mark.parametrize("tag", [COORDINATES, "weir/coordinates"], ids=["now", "of an earlier release"])
def test_a_run_of_a_projects_own_job_is_known_by_what_it_says(house, tag):
    house.bank.land(4)
    job = dg.define_asset_job("everything", dg.AssetSelection.all())
    with_own = dg.Definitions.merge(house.defs, dg.Definitions(jobs=[job])).resolve_job_def("everything")
    result = with_own.execute_in_process(instance=house.instance, raise_on_error=False)
    run = house.instance.get_run_by_id(result.run_id)
    assert run.tags[COORDINATES] == "small"
    house.instance.delete_run(run.run_id)
    stuck = house.instance.create_run_for_job(with_own, status=DagsterRunStatus.STARTED, tags={tag: "small"})
    house.bank.land(5)
    assert stuck.run_id[:8] in house.tick("checkpoint_sensor")[1]


# -- a pipeline of the same name in another code location


def run_from(house: House, location: str, tags: dict[str, str], status=DagsterRunStatus.STARTED) -> dg.DagsterRun:
    """A run of the pipeline's job, as a code location of Dagster's has launched it."""
    module = LoadableTargetOrigin(module_name=f"{location}.definitions")
    there = ManagedGrpcPythonEnvCodeLocationOrigin(module, location_name=location)
    return house.instance.create_run_for_job(
        house.defs.resolve_job_def("small_job"),
        status=status,
        remote_job_origin=RemoteRepositoryOrigin(there, "__repository__").get_job_origin("small_job"),
        tags=tags,
    )


def runs_seen_from(house: House, location: str | None) -> Runs:
    return Runs(house.instance, house.pipeline, place(house.pipeline, house.settings), frozenset(), location)


ELSEWHERE = Place("small", "s3://production/weir/small")
OF_ANOTHER = {
    "queued": {**ELSEWHERE.tags},
    "begun": {COORDINATES: "small", ELSEWHERE.tag: "small"},
    "of an earlier release": {COORDINATES: "small"},
    "of a release before that": {"weir/coordinates": "small"},
}


@pytest.mark.parametrize("tags", OF_ANOTHER.values(), ids=OF_ANOTHER)
def test_a_run_of_a_pipeline_of_that_name_in_another_code_location_is_none_of_its_own(house, tags):
    house.bank.land(4)
    run_from(house, "production", tags)
    run_from(house, "production", tags, DagsterRunStatus.CANCELED)
    assert runs_seen_from(house, "staging").unfinished() == []
    assert runs_seen_from(house, "staging").newest() is None
    (request,), _, _ = house.tick("checkpoint_sensor")
    assert request.job_name == "small_job"
    assert suspension.read(house.storage) is None
    assert "marked as failed" not in house.tick("lease_watchdog")[1]


def test_a_run_is_known_by_its_storage_though_its_code_location_has_another_name_now(house):
    here = place(house.pipeline, house.settings)
    ids = {run_from(house, "before", tags).run_id for tags in (here.tags, {here.tag: "small"})}
    assert set(runs_seen_from(house, "now").unfinished()) == ids


def test_a_run_of_an_earlier_release_is_known_by_its_code_location(house):
    run = run_from(house, "staging", {COORDINATES: "small"}, DagsterRunStatus.CANCELED)
    for number in range(10):  # newer ones of another location
        run_from(house, "production", {COORDINATES: "small"} if number % 2 else {})
    assert runs_seen_from(house, "staging").newest().dagster_run.run_id == run.run_id


def test_a_run_that_coordinates_several_pipelines_is_one_of_each(house):
    here = place(house.pipeline, house.settings)
    tags = {here.tag: "small", Place("other", "/other").tag: "other", COORDINATES: "other"}
    run = run_from(house, "staging", tags)
    assert runs_seen_from(house, "staging").unfinished() == [run.run_id]


def test_jobs_and_pools_of_pipelines_of_one_name_are_told_apart_by_their_storage(house, tmp_path):
    other = house.settings.model_copy(
        update={"storage": house.settings.storage.model_copy(update={"root": str(tmp_path)})}
    )
    jobs = [weir_definitions([house.pipeline], each).resolve_job_def("small_job") for each in (house.settings, other)]
    assert len({job.run_tags[STORAGE] for job in jobs}) == 2
    assert {job.run_tags[PIPELINE] for job in jobs} == {"small"}
    assert len({op.pool for job in jobs for op in job.all_node_defs}) == 2


# -- what is only shown


def test_what_cannot_be_shown_does_not_end_a_run_that_does_well(house, monkeypatch):
    def locked(*_args, **_options):
        raise RuntimeError("database is locked")

    for module, name in (
        (backlog, "lag"),
        (metadata, "of_stage"),
        (metadata, "of_sink_run"),
        (history, "as_plot"),
        (checks, "on_time"),
    ):
        monkeypatch.setattr(module, name, locked)
    house.bank.land(4, 5)
    assert house.execute("small_job").success
    house.bank.assert_exact(1, 2, 3, 4, 5)


def test_why_a_run_failed_is_said_even_if_it_cannot_be_shown(house, monkeypatch):
    def locked(*_args, **_options):
        raise RuntimeError("database is locked")

    monkeypatch.setattr(checks, "failed", locked)
    (stage,) = house.pipeline.stages
    broken = house.with_pipeline(stages=(altered(stage, function=_raises),))
    broken.bank.land(4)
    result = broken.execute("small_job")
    (event,) = [event for event in result.all_events if event.is_step_failure]
    assert event.step_failure_data.user_failure_data.metadata["kind"].value == "StageError"


def test_the_watchdog_leaves_a_coordinator_alone_that_dagster_did_not_start(house):
    with Heartbeat(house.storage, house.bank.registry.take_over(), 3, 5.0, "from a shell"):
        cursor = house.tick("lease_watchdog")[2]
        assert "is alive" in house.tick("lease_watchdog", cursor)[1]
        assert requests.pending(house.storage) == []


# -- gates


def test_a_gate_that_holds_turns_its_check_red_and_sensors_wait_for_a_person(house):
    (stage,) = house.pipeline.stages
    gate = expect("ExpectColumnValuesToBeBetween", column="amount", max_value=3)
    gated = house.with_pipeline(stages=(replace(stage, gates=(gate,)),))
    gated.bank.land(4)
    result = gated.execute("small_job")
    assert not result.success
    assert not gated.checked()["column_values_to_be_between_amount"]
    verdict = gated.description("column_values_to_be_between_amount")
    assert verdict == (
        '10 of 10 rows, e.g. 4 (id = "k1"), 4 (id = "k2"), 4 (id = "k3"); the epoch is declined, and nothing of it is'
        " in the table or in state"
    )
    assert gate_hold.read(gated.storage, None) is not None
    runs, message, cursor = gated.tick("checkpoint_sensor")
    assert runs == []
    assert "held: A quality gate of the stage accounts failed" in message
    run = gated.instance.get_run_by_id(result.run_id)
    assert "repair the input or correct the gate" in answer(gated, run).skip_message
    # A person corrects the gate and materializes: it goes on, and sensors with it.
    corrected = replace(gate, arguments=(("column", "amount"), ("max_value", 100)))
    mended = house.with_pipeline(stages=(replace(stage, gates=(corrected,)),))
    assert mended.execute("small_job").success
    assert mended.checked()["column_values_to_be_between_amount"]
    mended.bank.land(5)
    (request,), _, _ = mended.tick("checkpoint_sensor", cursor)
    assert request.job_name == "small_job"
    mended.bank.epochs()
    mended.bank.assert_exact(1, 2, 3, 4, 5)


def test_a_gate_that_warns_is_a_warning_and_the_run_goes_on(house):
    (stage,) = house.pipeline.stages
    gate = expect("ExpectColumnValuesToBeBetween", column="amount", max_value=4, on_failure="warn")
    gated = house.with_pipeline(stages=(replace(stage, gates=(gate,)),))
    gated.bank.land(4, 5)
    assert gated.execute("small_job").success
    assert not gated.checked()["column_values_to_be_between_amount"]
    again = gated.defs.resolve_asset_graph().asset_check_keys
    chosen = {key for key in again if key.name == "column_values_to_be_between_amount"}
    picked = gated.defs.resolve_job_def("__ASSET_JOB").get_subset(asset_selection=set(), asset_check_selection=chosen)
    assert picked.execute_in_process(instance=gated.instance).success
    assert "10 of 10 rows" in gated.description("column_values_to_be_between_amount"), (
        "what the newest checkpoint recorded"
    )
    gated.bank.assert_exact(1, 2, 3, 4, 5)


# -- bad input and damage


def asked_for(house: House, ticks: int) -> list[dg.RunRequest]:
    """What so many ticks of the checkpoint sensor ask for, if no run comes of it."""
    cursor, asked = None, []
    for _ in range(ticks):
        requests, _, cursor = house.tick("checkpoint_sensor", cursor)
        asked += requests
    return asked


@pytest.mark.long
def test_bad_input_fails_one_run_and_then_waits_for_whoever_repairs_it(house):
    file = house.bank.site.landing / "00004.parquet"
    file.write_bytes(b"no parquet")
    run = failed_run(house, raises=ValueError())
    assert "repair or move the input" in answer(house, run).skip_message
    assert asked_for(house, 20) == []
    assert f"held: InputError, {file}" in house.tick("checkpoint_sensor")[1]
    file.unlink()
    house.bank.land(5)
    assert [request.job_name for request in asked_for(house, 1)] == ["small_job"]
    assert house.execute("small_job").success
    house.bank.assert_exact(1, 2, 3, 5)


@pytest.mark.parametrize("died", sampled([True, False]), ids=["a coordinator died", "a run found it"])
def test_damage_fails_one_run_and_then_waits_for_whoever_puts_it_back(house, died):
    victim = next(path for path in (house.bank.site.root / "storage").rglob("*.sst"))
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-1])
    house.bank.land(4)
    if died:
        dead_holder(house, None)
    job = "small_restore_job" if died else "small_job"
    run = failed_run(house, job, raises=ValueError())
    assert "a person has to repair or rewind" in answer(house, run).skip_message
    assert asked_for(house, 20) == []
    assert f"held: DamageError, {victim}" in house.tick("checkpoint_sensor")[1]
    victim.write_bytes(whole)
    assert [request.job_name for request in asked_for(house, 1)] == ["small_restore_job" if died else "small_job"]
    assert house.execute(job).success
    house.bank.assert_exact(1, 2, 3, 4)
    assert house.tick("checkpoint_sensor")[1].startswith("nothing to do")


# -- what is red, and what answers it


def killed_run(house: House) -> dg.DagsterRun:
    """A run whose process was killed, as Dagster's code server reports it."""
    run = house.instance.create_run_for_job(house.defs.resolve_job_def("small_job"), status=DagsterRunStatus.STARTED)
    house.instance.add_run_tags(run.run_id, {"weir/process": "worker-7|4711|boot/1|"})
    crash = get_run_crash_explanation(f"Run execution process for {run.run_id}", -signal.SIGKILL)
    house.instance.report_engine_event(crash, house.instance.get_run_by_id(run.run_id))
    house.instance.report_run_failed(house.instance.get_run_by_id(run.run_id))
    return house.instance.get_run_by_id(run.run_id)


def test_a_killed_run_says_process_signal_and_what_was_asked_for(house):
    run = killed_run(house)
    dead_holder(house, run.run_id)
    assert answer(house, run).job_name == "small_restore_job"
    description = house.description("last_run")
    assert "process 4711 on worker-7" in description and "signal 9 (SIGKILL)" in description
    assert "small_restore_job was asked for" in description


def test_a_run_that_is_gone_without_a_word_says_so(house):
    house.bank.land(4)
    run = failed_run(house)
    dead_holder(house, run.run_id)
    assert len(house.tick("checkpoint_sensor")[0]) == 1
    answer(house, house.instance.get_run_by_id(run.run_id))
    assert "by which signal nobody saw" in house.description("last_run")
    assert "small_checkpoint_sensor sees to it" in house.description("last_run")


def test_a_run_that_ended_with_an_error_that_nobody_foresaw_says_which_without_secrets(house, monkeypatch):
    monkeypatch.setattr(runtime, "run", _run_that_raises(KeyError("s3://user:geheimnis99@bucket/x")))
    run = failed_run(house, raises=KeyError())
    answer(house, run)
    verdict = house.description("last_run")
    assert f"run {run.run_id[:8]} failed: KeyError: 's3://bucket/x'" in verdict and "is gone" not in verdict
    assert "geheimnis99" not in str(house.instance.all_logs(run.run_id))


def test_a_check_that_nobody_can_answer_is_red_and_keeps_no_other_from_its_answer(house):
    (house.bank.site.storage / lease.LEASE).write_bytes(bytes(40))
    names = ("last_run", "on_time")
    chosen = {key for key in house.defs.resolve_asset_graph().asset_check_keys if key.name in names}
    asked = house.defs.resolve_job_def("__ASSET_JOB").get_subset(asset_selection=set(), asset_check_selection=chosen)
    asked.execute_in_process(instance=house.instance, raise_on_error=False)
    assert house.checked() == {"last_run": False, "on_time": True}
    assert "lease.json cannot be read" in house.description("last_run")


@contextmanager
def living_run(house: House, job: str) -> Iterator[House]:
    """A run that lives on after its first commit."""
    options = house.bank.site.options | {"WEIR_RUN__LINGER_SECONDS": "300"}
    long = House(Bank(replace(house.bank.site, options=options)), house.instance)
    head = house.bank.registry.head().id
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(long.execute, job)
        try:
            until(lambda: run.done() or long.bank.registry.head().id > head)
            assert not run.done()
            yield long
        finally:
            requests.send(long.storage, Request("stop"))
        run.result(60)


def test_the_first_commit_of_the_next_run_answers_that_the_last_one_failed(house):
    run = killed_run(house)
    dead_holder(house, run.run_id)
    answer(house, run)
    assert house.checked()["last_run"] is False
    house.bank.land(4)
    with living_run(house, "small_restore_job") as long:
        until(lambda: long.checked()["last_run"])
        assert "checkpoint 4" in long.description("last_run")


@pytest.mark.long
def test_the_first_commit_after_a_rewind_answers_for_the_checkpoint_that_was_damaged(house):
    storage, registry = house.storage, house.bank.registry
    head, *older = reversed(registry.checkpoints())
    left = {file.path for row in older for file in registry.files(row)}
    victim = next(file for file in registry.files(head) if file.path not in left)
    storage.delete(victim.path)
    assert not house.execute("small_restore_job").success
    assert house.checked()["restorable"] is False
    maintenance.rewind(house.pipeline, house.settings, int(older[0].id))
    with living_run(house, "small_job") as long:
        until(lambda: long.checked()["restorable"])
        assert "does not name what was damaged" in long.description("restorable")


def test_what_is_still_damaged_stays_red_however_many_epochs_follow(house):
    """Its local copy lets epochs go on; every checkpoint names the damaged object again."""
    victim = next((house.bank.site.root / "storage").rglob("*.sst"))
    whole = victim.read_bytes()
    victim.write_bytes(bytes(len(whole)))
    assert not house.execute("small_restore_job").success
    house.bank.land(4)
    assert house.execute("small_job").success
    assert house.checked()["restorable"] is False
    victim.write_bytes(whole)
    house.bank.land(5)
    assert house.execute("small_job").success
    assert house.checked()["restorable"]


def test_the_watchdog_answers_for_runs_that_dagster_did_not_start(house):
    run = killed_run(house)
    dead_holder(house, run.run_id)
    answer(house, run)
    cursor = house.tick("lease_watchdog")[2]
    assert house.checked()["last_run"] is False
    house.bank.epochs(4)
    house.tick("lease_watchdog", cursor)
    assert house.checked()["last_run"]
