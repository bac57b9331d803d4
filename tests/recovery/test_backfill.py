"""Backfills: corrected input replayed beside production, and promoted, is what a full recomputation gives."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops import extras
from state_ops.errors import ConfigurationError, GateError, StageError, WeirError
from state_ops.moments import from_micros, to_micros
from state_ops.records.checkpoint import PROMOTION, before, event_time
from tests.recovery.cutting import changes_fail_from
from tests.recovery.harness import Site
from tests.recovery.test_forks import nobody_lives
from tests.tools import described
from tests.tools.sampling import sampled
from tests.tools.stages import altered, with_input
from weir import Epoch, Pipeline, State, ValueState, agg, delta, expect, files, stage, window
from weir.connectors.delta.replace_where import Range, check_bounds, only
from weir.epoch import steps
from weir.execution.in_process import InMemoryExecutor
from weir.operations import branch_diff, forks, promotion
from weir.operations.backfill import approve, backfill, base_of, branch_name, newest, plan
from weir.ownership.pipeline_storage import open_storage
from weir.run import fsck, maintenance
from weir.run.run import RunOptions, run
from weir.sources.file_check import FileCheck

FIRST = datetime(2026, 1, 1, tzinfo=UTC)


class Device(State):
    """Of one device, over all time."""

    readings: int = 0
    total: int = 0


@stage(
    "devices",
    source=files("{landing}/*.parquet", event_time="at", name="landing"),
    key="device",
    state=Device,
    order_by=["at"],
    sink=delta.append("readings"),
    gate=expect("ExpectColumnValuesToBeBetween", column="value", max_value=10_000),
)
def devices(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Each reading, and its device's sum."""
    state.fold(rows, readings=agg.count(), total=agg.sum("value"))
    return rows.select("device", "at", "value")


daily = window(
    "daily",
    devices,
    key="device",
    every="1d",
    on="at",
    readings=agg.count(),
    total=agg.sum("value"),
    sink=delta.append("daily"),
)
pipeline = Pipeline("sensors", (devices, daily), max_parallelism=8)


def day(number: int) -> datetime:
    """The start of the first day, of the second, ..."""
    return FIRST + timedelta(days=number - 1)


@dataclass
class Plant:
    """A site whose every file is a day and an epoch."""

    site: Site

    @classmethod
    def at(cls, root: Path, **options: object) -> Plant:
        block = {"start": "2026-01-01", "keep": 4, **options}
        return cls(
            Site(
                root,
                {"WEIR_EPOCH__MAX_FILES": "1", "WEIR_PIPELINES__SENSORS__BACKFILL": json.dumps(block)},
                pipeline,
                "tests.recovery.test_backfill",
            )
        )

    def land(self, *days: int, value: int = 1) -> None:
        """A reading an hour of three devices, which is its day's number times `value`."""
        self.site.landing.mkdir(parents=True, exist_ok=True)
        for number in days:
            times = [day(number) + timedelta(hours=hour) for hour in range(24) for _ in range(3)]
            rows = pa.table(
                {
                    "device": [f"d{device}" for _ in range(24) for device in range(3)],
                    "at": pa.array(times, pa.timestamp("us", tz="UTC")),
                    "value": pa.array([number * value] * 72, pa.int64()),
                }
            )
            pq.write_table(rows, self.site.landing / f".{number:05}")
            (self.site.landing / f".{number:05}").rename(self.site.landing / f"{number:05}.parquet")

    def run(self) -> list:
        options = RunOptions(until_caught_up=True)
        return list(run(self.site.pipeline, self.site.settings, options, InMemoryExecutor()))

    def backfill(self, first: int, last: int, **options):
        return backfill(
            self.site.pipeline,
            self.site.settings,
            day(first),
            day(last + 1),
            executor=InMemoryExecutor(),
            **options,
        )

    def recomputed(self) -> dict[str, pd.DataFrame]:
        """By pandas, from the files that there are."""
        rows = pd.concat([pd.read_parquet(file) for file in sorted(self.site.landing.glob("*.parquet"))])
        whole = rows.groupby(["device", rows["at"].dt.floor("D")])["value"].agg(["count", "sum"]).reset_index()
        closed = whole[whole["at"] < rows["at"].max().floor("D")]
        return {"readings": rows, "daily": closed, "state": rows.groupby("device")["value"].agg(["count", "sum"])}

    def assert_exact(self, state: bool = True) -> None:
        """Tables, and state, are what a recomputation of all input gives."""
        expected = self.recomputed()
        rows = self.site.table("readings")
        assert sorted(zip(rows["device"], rows["at"], rows["value"], strict=True)) == sorted(
            zip(expected["readings"]["device"], expected["readings"]["at"], expected["readings"]["value"], strict=True)
        )
        rows, closed = self.site.table("daily"), expected["daily"]
        assert sorted(
            zip(rows["device"], rows["window_start"], rows["readings"], rows["total"], strict=True)
        ) == sorted(zip(closed["device"], closed["at"], closed["count"], closed["sum"], strict=True))
        if state:
            devices = self.site.state("devices").set_index("device")
            assert devices["total"].to_dict() == expected["state"]["sum"].to_dict()
            assert devices["readings"].to_dict() == expected["state"]["count"].to_dict()

    @property
    def head(self):
        return open_storage(pipeline, self.site.settings)[1].head()


@pytest.fixture(scope="module")
def week(tmp_path_factory) -> Path:
    """Where seven days have been read: a directory `site`, and beside it a copy to put there anew."""
    root = tmp_path_factory.mktemp("week")
    plant = Plant.at(root / "site")
    plant.land(1, 2, 3, 4, 5, 6, 7)
    plant.run()
    shutil.copytree(root / "site", root / "copy")
    return root


@pytest.fixture
def seven(week) -> Plant:
    """Seven days as they came, where they came."""
    shutil.rmtree(week / "site")
    shutil.copytree(week / "copy", week / "site")
    return Plant.at(week / "site")


@pytest.fixture
def plant(seven) -> Plant:
    """Seven days, of which three have been corrected since they were read."""
    seven.land(4, 5, 6, value=100)
    return seven


def test_checkpoints_are_kept_to_backfill_from(plant):
    why = {fate.id: fate.reasons for fate in maintenance.explain(pipeline, plant.site.settings)[0]}
    assert why[3] == ("the newest before 2026-01-04 00:00, to backfill from",)
    assert sorted(why) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("replaces", sampled(["range", "since"]))
def test_corrected_days_are_replayed_and_promoted(plant, replaces):
    done = plant.backfill(4, 6, replaces=replaces, promote=True)
    assert (done.base, done.epochs, done.promoted.kind) == (3, 4, PROMOTION)
    counts = {table.table: table.counts for table in done.difference.tables}
    assert counts["readings"] == {"added": 0, "removed": 0, "changed": 216}
    assert counts["daily"] == {"added": 0, "removed": 0, "changed": 9}
    assert done.difference.tables[0].days.keys() == {"2026-01-04", "2026-01-05", "2026-01-06"}
    plant.assert_exact(state=replaces == "since")
    assert not forks.forks(pipeline, plant.site.settings), "a promoted backfill leaves no branch"
    plant.land(8, 9)
    plant.run()
    plant.assert_exact(state=replaces == "since")
    assert not fsck.examine(pipeline, plant.site.settings).findings


def test_a_range_leaves_state_and_other_days_alone(plant):
    before = plant.site.state("devices")
    untouched = plant.site.table("readings")
    plant.land(2, value=50)  # not of the range: not replaced, though it has changed
    plant.backfill(4, 5, replaces="range", promote=True)
    pd.testing.assert_frame_equal(plant.site.state("devices"), before)
    readings = plant.site.table("readings")
    for number, values in ((2, {2}), (4, {400}), (5, {500}), (6, {6}), (7, {7})):
        rows = readings[(readings["at"] >= day(number)) & (readings["at"] < day(number + 1))]
        assert set(rows["value"]) == values
        assert len(rows) == 72
    assert len(readings) == len(untouched)
    assert plant.head.parent_id == 7


@pytest.mark.long
def test_files_that_reach_over_the_edges_are_cut(tmp_path):
    plant = Plant.at(tmp_path)
    plant.site = replace(plant.site, options={**plant.site.options, "WEIR_EPOCH__MAX_FILES": "9"})
    plant.land(1)
    plant.run()
    plant.land(2, 3, 4)  # one epoch, so one file of a table has the rows of three days
    plant.run()
    plant.land(3, value=7)
    plant.backfill(3, 3, replaces="since", promote=False)
    forks.drop(pipeline, plant.site.settings, branch_name(day(3), day(4)))
    with pytest.raises(WeirError, match="the oldest, 1, has read landing to"):
        plant.backfill(1, 1)
    # From before day 2, since the epoch of days 2 to 4 cannot be parted.
    plant.backfill(2, 3, replaces="range", promote=True)
    plant.assert_exact(state=False)


@pytest.mark.parametrize("replaces", sampled(["range", "since"]))
def test_production_goes_on_while_a_backfill_waits_for_approval(plant, replaces):
    done = plant.backfill(4, 6, replaces=replaces)
    described.check_facts("backfill", done.to_dict())
    assert done.promoted is None
    plant.land(8)
    plant.run()
    assert set(plant.site.table("readings")["value"]) == {1, 2, 3, 4, 5, 6, 7, 8}, "untouched"
    (waiting,) = forks.forks(pipeline, plant.site.settings)
    promoted = approve(pipeline, plant.site.settings, waiting.branch.name, executor=InMemoryExecutor())
    assert promoted.kind == PROMOTION
    plant.assert_exact(state=replaces == "since")


@pytest.mark.long
def test_nothing_differs_nothing_is_promoted(tmp_path):
    plant = Plant.at(tmp_path)
    plant.land(1, 2, 3)
    plant.run()
    done = plant.backfill(2, 3, promote=True)
    assert (done.promoted, done.difference.same) == (None, True)
    assert plant.head.id == 3
    assert plant.backfill(2, 3).promoted is None
    assert not forks.forks(pipeline, plant.site.settings), "nothing waits: the next night's range overlaps it"


def test_what_no_replay_could_promote_is_refused_before_it(plant, monkeypatch):
    newest_rows = replace(daily, sink=delta.upsert("daily", key=["device", "window_start"]))
    site = replace(plant.site, pipeline=Pipeline("sensors", (devices, newest_rows), max_parallelism=8))
    with pytest.raises(WeirError, match="in the table daily: it has only the newest rows"):
        Plant(site).backfill(4, 4, replaces="range")
    monkeypatch.setattr(extras, "is_installed", lambda library: library != "duckdb")
    with pytest.raises(ConfigurationError, match="duckdb, which is not installed"):
        plant.backfill(4, 4)
    assert not forks.forks(pipeline, plant.site.settings)


class Peak(State):
    """Of one device, over all time, with its largest reading."""

    readings: int = 0
    total: int = 0
    peak: int | None = None


def test_a_field_that_a_backfill_fills_is_promoted_though_all_others_are_as_they_were(tmp_path):
    def with_peak(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, readings=agg.count(), total=agg.sum("value"), peak=agg.max("value"))
        return rows.select("device", "at", "value")

    plant = Plant.at(tmp_path)
    plant.land(1, 2, 3)
    plant.run()
    changed = altered(devices, function=with_peak, state=Peak)
    code = replace(pipeline, stages=(changed, with_input(daily, changed)))
    done = Plant(replace(plant.site, pipeline=code)).backfill(2, 3, promote=True)
    assert done.promoted is not None and not done.difference.same
    assert set(plant.site.state("devices")["peak"]) == {3}


@pytest.mark.long
def test_overlapping_backfills_are_refused_and_the_same_one_begins_anew(plant):
    plant.backfill(4, 6)
    with pytest.raises(WeirError, match="overlaps this range: backfill-20260104T00-20260107T00"):
        plant.backfill(5, 5)
    plant.land(5, value=1000)
    again = plant.backfill(4, 6, promote=True)
    assert (again.resumed, again.epochs) == (False, 4)
    plant.assert_exact()


def test_a_gate_holds_a_replay_and_production_is_untouched(plant):
    plant.land(6, value=100_000)
    with pytest.raises(GateError):
        plant.backfill(4, 6, promote=True)
    assert set(plant.site.table("readings")["value"]) == {1, 2, 3, 4, 5, 6, 7}
    plant.land(6, value=10)
    done = plant.backfill(4, 6, promote=True)
    assert (done.resumed, done.epochs) == (True, 2), "days 4 and 5 had been replayed"
    plant.assert_exact()


@pytest.mark.long
def test_a_replay_whose_input_changed_meanwhile_begins_anew(plant):
    plant.land(6, value=100_000)
    with pytest.raises(GateError):
        plant.backfill(4, 6, promote=True)
    plant.land(4, 6, value=10)
    done = plant.backfill(4, 6, promote=True)
    assert (done.resumed, done.epochs) == (False, 4)
    plant.assert_exact()


@pytest.mark.parametrize("replaces", sampled(["range", "since"]))
def test_a_promoted_backfill_can_be_taken_back(plant, replaces):
    plant.backfill(4, 6, promote=True, replaces=replaces)
    maintenance.rewind(pipeline, plant.site.settings, 7)
    assert set(plant.site.table("readings")["value"]) == {1, 2, 3, 4, 5, 6, 7}
    assert plant.site.state("devices")["total"].tolist() == [24 * sum(range(8))] * 3


def test_ranges_are_checked(plant):
    with pytest.raises(ConfigurationError, match="no whole hour"):
        backfill(pipeline, plant.site.settings, day(4) + timedelta(minutes=5), day(6))
    with pytest.raises(ConfigurationError, match="no range"):
        plant.backfill(6, 4)
    with pytest.raises(ConfigurationError, match="'Range' is nothing that a backfill replaces"):
        plant.backfill(4, 6, replaces="Range")
    now = datetime(2026, 1, 9, 3, 30, tzinfo=UTC)
    assert newest(plant.site.settings.pipelines["sensors"].backfill, now) == (day(6), day(9))


def test_a_checkpoint_that_has_seen_the_first_moment_of_a_day_is_not_before_it(tmp_path):
    plant = Plant.at(tmp_path)
    plant.land(1, 2)
    file = plant.site.landing / "00001.parquet"
    first = pq.read_table(file)
    midnight = pa.table(
        {"device": ["d0"], "at": pa.array([day(2)], pa.timestamp("us", tz="UTC")), "value": pa.array([1], pa.int64())}
    )
    pq.write_table(pa.concat_tables([first, midnight]), file)
    plant.run()
    with pytest.raises(WeirError, match="No retained checkpoint of sensors lies before 2026-01-02 00:00"):
        plant.backfill(2, 2)


def test_rows_without_an_event_time_are_in_no_range(tmp_path):
    local, target = tmp_path / "all", tmp_path / "rest"
    times = [day(1), day(2), None, day(3)]
    pq.write_table(pa.table({"at": pa.array(times, pa.timestamp("us", tz="UTC")), "n": [1, 2, 3, 4]}), local)
    wanted = Range(to_micros(day(2)), to_micros(day(3)))
    assert only(local, target, "at", wanted, inside=False) == 3
    assert pq.read_table(target)["n"].to_pylist() == [1, 3, 4]
    assert only(local, target, "at", wanted, inside=True) == 1
    dates = pa.table({"at": pa.array([at and at.date() for at in times], pa.date32()), "n": [1, 2, 3, 4]})
    pq.write_table(dates, local)
    assert only(local, target, "at", wanted, inside=True) == 1
    assert pq.read_table(target)["n"].to_pylist() == [2]


def waits(plant: Plant, first: int, last: int, **options) -> str:
    """The branch of a backfill that waits for approval."""
    return plant.backfill(first, last, **options).branch


def approved(plant: Plant, name: str):
    return approve(plant.site.pipeline, plant.site.settings, name, executor=InMemoryExecutor())


@pytest.mark.long
def test_a_range_needs_both_sides_to_have_applied_the_same_rows(plant):
    name = waits(plant, 4, 5, replaces="range")
    maintenance.rewind(pipeline, plant.site.settings, 6)
    with pytest.raises(WeirError, match=r"it has read files that the pipeline has not, e.g. 00007.parquet"):
        approved(plant, name)
    plant.run()
    assert approved(plant, name).kind == PROMOTION
    assert set(plant.site.table("readings")["value"]) == {1, 2, 3, 6, 7, 400, 500}


@pytest.mark.long
def test_a_range_is_not_replaced_where_a_drain_has_closed_its_windows(plant):
    list(run(pipeline, plant.site.settings, RunOptions(until_caught_up=True, drain=True), InMemoryExecutor()))
    before = plant.site.table("daily")
    with pytest.raises(WeirError, match="windows are closed in one and open in the other"):
        plant.backfill(5, 7, replaces="range", promote=True)
    pd.testing.assert_frame_equal(plant.site.table("daily"), before)


@pytest.mark.long
def test_a_range_is_not_replaced_while_rows_wait_in_front_of_a_stage(tmp_path):
    plant = Plant.at(tmp_path)
    plant.site.options["WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS"] = "0"
    plant.land(1, 2, 3, 4)
    reports = run(plant.site.pipeline, plant.site.settings, RunOptions(until_caught_up=True), InMemoryExecutor(8))
    rows = [report.checkpoint for report in reports]
    waits = [row for row in rows if any(stats.waiting for stats in row.operators.values())]
    maintenance.rewind(plant.site.pipeline, plant.site.settings, int(waits[-1].id))
    assert any(stats.waiting for stats in plant.head.operators.values())
    with pytest.raises(WeirError, match="rows wait in front of a stage"):
        plant.backfill(3, 4, replaces="range", promote=True)
    plant.run()
    plant.assert_exact()


@pytest.mark.long
def test_rows_of_a_range_that_were_there_before_the_fork_are_not_given_up(tmp_path):
    @stage(
        "devices",
        source=devices.inputs[0].origin,
        key="device",
        state=Device,
        order_by=["at"],
        sink=delta.append("readings", event_time="due"),
    )
    def late(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, readings=agg.count(), total=agg.sum("value"))
        return rows.select("device", "at", "value", due=pl.col("at") + pl.duration(days=1))

    plant = Plant.at(tmp_path)
    plant.site = replace(plant.site, pipeline=Pipeline("sensors", (late,), max_parallelism=8))
    plant.land(1, 2, 3, 4)
    plant.run()
    plant.land(3, value=9)
    with pytest.raises(
        WeirError, match="72 rows of 2026-01-03 00:00 to 2026-01-04 00:00 were in the table readings before"
    ):
        plant.backfill(3, 3, replaces="range", promote=True)
    assert len(plant.site.table("readings")) == 4 * 72


def test_a_table_of_days_is_not_replaced_by_hours():
    schema = pa.schema([("day", pa.date32())])
    check_bounds("days", schema, "day", Range(to_micros(day(3)), to_micros(day(4))))
    with pytest.raises(WeirError, match="knows only days"):
        check_bounds("days", schema, "day", Range(to_micros(day(3)) + 5 * 3_600_000_000, to_micros(day(4))))


@pytest.mark.long
def test_the_lateness_of_windows_does_not_make_a_checkpoint_look_older(tmp_path):
    by_day = window("daily", devices.inputs[0].origin, key="device", every="1d", on="at", lateness="1d", readings=agg.count(),
                    total=agg.sum("value"), sink=delta.append("daily"))  # fmt: skip
    plant = Plant.at(tmp_path)
    plant.site = replace(plant.site, pipeline=Pipeline("sensors", (by_day,), max_parallelism=8))
    plant.land(1, 2, 3, 4, 5)
    plant.run()
    plant.land(3, value=9)
    done = plant.backfill(3, 3, promote=True)
    assert (done.base, done.difference.same) == (2, False)
    daily = plant.site.table("daily")
    assert set(daily[daily["window_start"] == day(3)]["total"]) == {24 * 27}


@pytest.mark.long
def test_a_correction_of_what_was_replayed_early_is_seen_although_the_branch_has_pruned_since(plant):
    plant.land(7, value=100_000)
    with pytest.raises(GateError):
        plant.backfill(4, 7, promote=True)
    plant.land(4, 7, value=10)
    done = plant.backfill(4, 7, promote=True)
    assert (done.resumed, done.epochs) == (False, 4)
    plant.assert_exact()


def test_what_was_not_replayed_to_its_end_is_not_approved(plant):
    plant.land(6, value=100_000)
    with pytest.raises(GateError):
        plant.backfill(4, 6)
    with pytest.raises(WeirError, match="has not been replayed to its end"):
        approved(plant, branch_name(day(4), day(7)))


@pytest.mark.long
@pytest.mark.parametrize("replaces", sampled(["range", "since"]))
def test_a_branch_of_an_earlier_release_replaces_what_its_backfill_has_noted(plant, monkeypatch, replaces):
    """Its rows say nothing of a range, and the range beside them may be that of a fork that was cut off."""
    commit = forks.commit
    with monkeypatch.context() as broken:
        broken.setattr(forks, "commit", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            plant.backfill(4, 6, replaces="range")
    with monkeypatch.context() as earlier:
        earlier.setattr(forks, "commit", lambda *to, **how: commit(*to, **{**how, "beginning": {}}))
        name = waits(plant, 4, 6, replaces=replaces)
    assert (plan(plant.site.pipeline, plant.site.settings, name).only is not None) is (replaces == "range")
    approved(plant, name)
    plant.assert_exact(state=replaces == "since")


@pytest.mark.parametrize(
    ("replaces", "step"), sampled([pytest.param("range", 211), pytest.param("range", 151), pytest.param("since", 97)])
)
def test_cut_off_anywhere_the_same_call_finishes_it(tmp_path, monkeypatch, replaces, step):
    for stop_at in range(0, 500, step):
        plant = Plant.at(tmp_path / f"{replaces}-{stop_at}")
        plant.land(2, 3)
        plant.run()
        plant.land(3, value=100)
        done = False
        with changes_fail_from(monkeypatch, stop_at):
            try:
                plant.backfill(3, 3, promote=True, replaces=replaces)
                done = True
            except (WeirError, OSError):
                pass
        nobody_lives(plant)
        plant.land(4)
        plant.run()  # production goes on, and finishes a promotion that was decided
        if not set(plant.site.table("readings")["value"]) & {300}:
            assert set(plant.site.table("readings")["value"]) == {2, 3, 4}
        plant.backfill(3, 3, promote=True, replaces=replaces)
        plant.assert_exact(state=replaces == "since")
        if done:
            break
    assert stop_at > 60


def promoted_since(plant: Plant) -> int:
    """A branch is forked, then day 4 is corrected, replayed and promoted, and production goes on until the promotion is
    pruned."""
    forks.fork(pipeline, plant.site.settings, "fix")
    plant.land(4, value=100)
    promoted = plant.backfill(4, 4, replaces="range", promote=True).promoted
    for number in range(8, 16):
        plant.land(number)
        plant.run()
    plant.assert_exact(state=False)
    return promoted.id


@pytest.mark.long
def test_a_range_that_was_promoted_since_a_branch_was_forked_is_not_taken_back_in_silence(seven):
    settings = seven.site.settings
    promoted = promoted_since(seven)
    assert promoted not in [row.id for row in open_storage(pipeline, settings)[1].checkpoints()], "its row is pruned"
    shown = promotion.plan(pipeline, settings, "fix")
    (taken,) = shown.taken_back
    assert (taken.checkpoint, taken.tables) == (promoted, ("readings", "daily"))
    assert "2026-01-04 00:00 to 2026-01-05 00:00" in shown.obstacles[0]
    assert shown.to_dict()["taken_back"][0]["checkpoint"] == promoted
    with pytest.raises(WeirError, match="has taken over the rows of 2026-01-04") as refused:
        promotion.promote(pipeline, settings, "fix", executor=InMemoryExecutor())
    assert "weir fork sensors --drop fix" in refused.value.next and "--force" in refused.value.next
    seven.assert_exact(state=False)
    list(run(forks.branched(pipeline, settings, "fix"), settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    difference = branch_diff.diff(pipeline, settings, "fix")
    assert difference.taken_back == shown.taken_back
    assert f"checkpoint {promoted} has taken over" in difference.to_markdown()
    by_day = {table.table: table.days for table in difference.tables}
    assert by_day["readings"] == {"2026-01-04": {"added": 0, "removed": 0, "changed": 72}}, "what would come, and go"
    assert by_day["daily"]["2026-01-04"]["changed"] == 3 and set(by_day["daily"]) == {"2026-01-04"}
    sample = next(table.sample for table in difference.tables if table.table == "daily")
    assert [(row["change"], row["total"]) for row in sample][:2] == [("was", 9600), ("is", 96)]
    promotion.promote(pipeline, settings, "fix", executor=InMemoryExecutor(), accepted=shown.obstacles)
    assert set(seven.site.table("readings").query("value == 400")["value"]) == set(), "as it was told"


@pytest.mark.long
@pytest.mark.parametrize("cut_off", sampled([False, True]))
def test_what_is_promoted_between_a_branchs_pin_and_its_first_row_is_not_taken_back_in_silence(
    seven, monkeypatch, cut_off
):
    settings, asked = seven.site.settings, maintenance.asked

    def correct() -> None:
        seven.land(4, value=100)
        seven.backfill(4, 4, replaces="range", promote=True)

    def pins(*arguments) -> None:
        asked(*arguments)
        monkeypatch.undo()
        if cut_off:
            raise OSError("cut off")
        correct()

    monkeypatch.setattr(maintenance, "asked", pins)
    if cut_off:
        with pytest.raises(WeirError, match="cut off"):
            forks.fork(pipeline, settings, "fix")
        correct()
    forks.fork(pipeline, settings, "fix", 7)
    (taken,) = promotion.plan(pipeline, settings, "fix").taken_back
    assert taken.checkpoint == 8


@pytest.mark.long
def test_a_branch_that_is_forked_anew_has_what_was_promoted_before(seven):
    settings = seven.site.settings
    promoted_since(seven)
    forks.drop(pipeline, settings, "fix")
    forks.fork(pipeline, settings, "fix")
    seven.land(16)
    seven.run()
    promotion.promote(pipeline, settings, "fix", executor=InMemoryExecutor())
    seven.assert_exact(state=False)


@pytest.mark.long
def test_what_was_promoted_before_a_branch_was_forked_from_an_older_checkpoint_is_replayed_with_it(seven):
    seven.land(4, value=100)
    seven.backfill(4, 4, replaces="range", promote=True)
    seven.land(5, value=100)
    assert seven.backfill(4, 5, replaces="since", promote=True).promoted is not None, "as every night"
    seven.assert_exact()


@pytest.mark.long
def test_ranges_that_wait_are_promoted_one_after_the_other_unless_they_share_rows(seven):
    settings = seven.site.settings
    seven.land(4, 5, value=100)
    first, second = (seven.backfill(number, number, replaces="range").branch for number in (4, 5))
    forks.fork(pipeline, settings, "both", int(open_storage(pipeline, settings)[1].pinned("branch", first).checkpoint_id),
               only=Range(to_micros(day(4)), to_micros(day(6))))  # fmt: skip
    for name in (first, second):
        approve(pipeline, settings, name, executor=InMemoryExecutor())
    seven.assert_exact(state=False)
    with pytest.raises(WeirError, match="has taken over the rows of 2026-01-04"):
        promotion.promote(pipeline, settings, "both", executor=InMemoryExecutor())


@pytest.mark.long
def test_a_promotion_that_was_taken_back_is_no_obstacle(seven):
    settings = seven.site.settings
    forks.fork(pipeline, settings, "fix")
    seven.land(4, value=100)
    seven.backfill(4, 4, replaces="range", promote=True)
    maintenance.rewind(pipeline, settings, 7)
    assert not promotion.plan(pipeline, settings, "fix").obstacles


@pytest.mark.long
def test_a_backfill_that_was_cut_off_and_is_to_replace_something_else_begins_anew(seven, monkeypatch):
    seven.land(4, value=100)
    with monkeypatch.context() as broken:
        broken.setattr("weir.operations.backfill._note", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            seven.backfill(4, 4, replaces="range")
    done = seven.backfill(4, 4, replaces="since", promote=True)
    assert not done.resumed
    seven.assert_exact()


# -- files that have no statistics, as Spark's INT96 timestamps


LATE = window(
    "daily",
    files("{landing}/*.parquet", event_time="at", name="landing"),
    key="device",
    every="1d",
    on="at",
    lateness="2d",
    readings=agg.count(),
    total=agg.sum("value"),
    sink=delta.append("daily"),
)


def untold(root: Path, *stages_of) -> Plant:
    """Seven days in files without statistics, read by windows that wait two days for late rows; the fourth has been
    corrected since."""
    plant = Plant.at(root, keep=7)
    plant.site = replace(plant.site, pipeline=Pipeline("sensors", stages_of or (LATE,), max_parallelism=8))
    without_statistics(plant, 1, 2, 3, 4, 5, 6, 7)
    plant.run()
    without_statistics(plant, 4, value=100)
    return plant


def without_statistics(plant: Plant, *days: int, value: int = 1) -> None:
    plant.land(*days, value=value)
    for number in days:
        file = plant.site.landing / f"{number:05}.parquet"
        pq.write_table(pq.read_table(file), file, write_statistics=False)


def totals(plant: Plant, number: int) -> set[int]:
    """What the table says of a day, once later days have closed it."""
    without_statistics(plant, 8, 9, 10)
    list(
        run(plant.site.pipeline, plant.site.settings, RunOptions(until_caught_up=True, drain=True), InMemoryExecutor())
    )
    table = plant.site.table("daily")
    return set(table[table["window_start"] == day(number)]["total"])


@pytest.mark.long
def test_where_files_do_not_tell_a_time_it_is_the_one_that_the_acks_say(tmp_path, monkeypatch):
    """A column beside a struct whose field has its path is not read alone when files are planned."""
    monkeypatch.setattr(FileCheck, "newest", lambda *_: None)
    done = untold(tmp_path).backfill(4, 4)
    assert (done.base, done.note) == (3, None)


def _without_times(_context, flight, _parent):
    return {name: {**position, "newest": None} for name, position in flight.source_offsets.offsets.items()}


@pytest.mark.long
def test_storage_of_before_opens_and_its_base_is_an_earlier_one_which_is_said(tmp_path, monkeypatch, capsys):
    """The releases before noted the statistics of files alone, and nothing where there are none."""
    with monkeypatch.context() as before:
        before.setattr(steps, "_positions", _without_times)
        plant = untold(tmp_path)
    assert "untold" not in plant.head.offsets["landing"]
    done = plant.backfill(4, 4, promote=True)
    assert done.base == 2, "one before the newest that may not have seen the range"
    assert "checkpoint 2" in done.note
    assert "no statistics" in done.note
    assert "no statistics" in capsys.readouterr().out, "it is logged"
    assert totals(plant, 4) == {4 * 100 * 24}


def _with_times_of_some(_context, flight, _parent):
    return {name: {**position, "untold": True} for name, position in flight.source_offsets.offsets.items()}


@pytest.mark.long
@pytest.mark.parametrize("positions", sampled([_without_times, _with_times_of_some]))
def test_however_often_checkpoints_are_pruned_a_promised_days_base_stays(tmp_path, monkeypatch, positions):
    """Three files are a day, each of them an epoch that prunes, and of some rows nobody knows the event time."""
    monkeypatch.setattr(steps, "_positions", positions)
    plant = Plant.at(tmp_path, keep=3)
    plant.site = replace(
        plant.site,
        pipeline=Pipeline("sensors", (LATE,), max_parallelism=8),
        options={**plant.site.options, "WEIR_CHECKPOINTS__NUM_RETAINED": "2"},
    )
    history = []
    for number in range(1, 10):
        without_statistics(plant, number)
        whole = plant.site.landing / f"{number:05}.parquet"
        for part in range(3):
            rows = pq.read_table(whole).slice(part * 24, 24)
            pq.write_table(rows, whole.with_name(f"{number:05}-{part}.parquet"), write_statistics=False)
        whole.unlink()
        for report in plant.run():
            history.append(report.checkpoint)
            days = plant.site.pipeline.days
            newest_day = from_micros(event_time(history[-1], days)).day
            for promised in range(max(newest_day - 2, 3), newest_day + 1):
                base, _ = base_of(plant.site.pipeline, plant.site.settings, day(promised))
                earlier = before(history, to_micros(day(promised)), days)
                assert base.id == earlier[-2].id, f"day {promised} after checkpoint {report.checkpoint.id}"


def test_a_source_without_an_event_time_does_not_make_an_earlier_release_s_checkpoints_unsure(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "_positions", lambda _context, flight, _parent: dict(flight.source_offsets.offsets))
    plant = Plant.at(tmp_path, keep=7)
    counted = altered(devices, input=files("{landing}/*.parquet", name="counted"), gates=())
    plant.site = replace(plant.site, pipeline=Pipeline("sensors", (counted, LATE), max_parallelism=8))
    plant.land(1, 2, 3, 4, 5, 6, 7)
    plant.run()
    assert plant.head.offsets["counted"]["newest"] is None
    base, note = base_of(plant.site.pipeline, plant.site.settings, day(4))
    assert (base.id, note) == (3, None)


@pytest.mark.long
def test_rows_that_where_leaves_out_of_files_without_statistics_may_belong_to_the_range(tmp_path):
    """The last rows of a day are of the next one; yesterday's code left them out, today's takes them."""
    plant = untold(tmp_path, with_input(LATE, where="value > 0"))
    file = plant.site.landing / "00003.parquet"
    rows = pq.read_table(file)
    early = pa.table({"device": ["d0"], "at": [day(4)], "value": [-1]}).cast(rows.schema)
    pq.write_table(pa.concat_tables([rows, early]), file, write_statistics=False)
    plant.site = Plant.at(tmp_path / "again", keep=7).site
    plant.site = replace(
        plant.site,
        pipeline=Pipeline("sensors", (with_input(LATE, where="value > 0"),), max_parallelism=8),
        options={**plant.site.options, "WEIR_PIPELINES__SENSORS__PARAMS": json.dumps({"landing": str(file.parent)})},
    )
    plant.run()
    plant.site = replace(plant.site, pipeline=Pipeline("sensors", (LATE,), max_parallelism=8))
    done = plant.backfill(4, 4)
    assert (done.base, done.note) == (2, None), "the files' own times are read when they are planned"


@pytest.mark.long
def test_what_nobody_leaves_out_is_told_by_another_stage_that_reads_the_same_files(tmp_path):
    plant = untold(tmp_path, with_input(LATE, where="value > 3"), replace(LATE, uid="all", sink=delta.append("all")))
    assert (plant.backfill(4, 4).base, plant.backfill(4, 4).note) == (3, None)


# -- the code of a replay that was cut off


def of(function) -> Pipeline:
    """The pipeline with another function in its first stage, and no gate."""
    changed = altered(devices, function=function, gates=())
    return replace(pipeline, stages=(changed, with_input(daily, changed)))


def multiplied(by: int, most: int = 100_000):
    """A stage's function whose bytecode is the same whatever it closes over."""

    def readings(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        if len(rows) and rows["value"].max() >= most:
            raise ValueError("the release meets a row that it does not expect")
        state.fold(rows, readings=agg.count(), total=agg.sum("value"))
        return rows.select("device", "at", value=pl.col("value") * by)

    return readings


@pytest.mark.long
def test_a_replay_that_was_cut_off_begins_anew_with_other_code(plant):
    plant.site = replace(plant.site, pipeline=of(multiplied(1000, most=500)))
    with pytest.raises(StageError, match="does not expect"):
        plant.backfill(4, 6)
    plant.site = replace(plant.site, pipeline=of(multiplied(10)))
    done = plant.backfill(4, 6, promote=True)
    assert (done.resumed, done.epochs) == (False, 4)
    table = plant.site.table("readings")
    values = {number: set(table[table["at"].dt.day == number]["value"]) for number in (4, 5, 6, 7)}
    assert values == {4: {4000}, 5: {5000}, 6: {6000}, 7: {70}}, "of one version"


@pytest.mark.long
def test_a_replay_that_an_earlier_release_began_begins_anew(plant):
    plant.land(6, value=100_000)
    with pytest.raises(GateError):
        plant.backfill(4, 6)
    here = forks.branched(pipeline, plant.site.settings, branch_name(day(4), day(7)))
    storage, _ = open_storage(here, plant.site.settings)
    storage.put_bytes("backfill.json", json.dumps({"state": "replaying", "replaces": "since"}).encode())
    plant.land(6, value=10)
    assert plant.backfill(4, 6).resumed is False


# -- input that is corrected while a backfill waits for approval


@pytest.mark.long
@pytest.mark.parametrize("replaces", ["range", "since"])
def test_a_correction_while_a_backfill_waits_is_noticed_before_it_is_approved(plant, replaces):
    name = waits(plant, 4, 6, replaces=replaces)
    plant.land(5, value=7)
    with pytest.raises(WeirError, match=r"changed, or is gone, since the backfill .* 00005.parquet"):
        approved(plant, name)
    assert set(plant.site.table("readings")["value"]) == {1, 2, 3, 4, 5, 6, 7}, "untouched"
    plant.backfill(4, 6, replaces=replaces, promote=True)
    plant.assert_exact(state=replaces == "since")


@pytest.mark.long
def test_what_was_corrected_since_can_be_accepted_once_it_was_shown_and_other_files_do_not_matter(plant):
    settings, name = plant.site.settings, waits(plant, 4, 5)
    plant.land(2, value=7)
    plant.land(8)
    assert plan(pipeline, settings, name).obstacles == ()
    plant.land(5, value=7)
    shown = plan(pipeline, settings, name).obstacles
    plant.land(4, value=7)
    with pytest.raises(WeirError, match="2 files have changed") as refused:
        approve(pipeline, settings, name, executor=InMemoryExecutor(), accepted=shown)
    assert "ask for its range again" in refused.value.next
    shown = plan(pipeline, settings, name).obstacles
    done = approve(pipeline, settings, name, executor=InMemoryExecutor(), accepted=shown)
    assert done.kind == PROMOTION
    assert {400, 500} <= set(plant.site.table("readings")["value"])


@pytest.mark.long
@pytest.mark.parametrize("replaces", sampled(["range", "since"]))
@pytest.mark.parametrize("catches_up", sampled([1, 2]))
def test_a_correction_while_a_backfill_is_promoted_is_noticed(plant, replaces, catches_up, monkeypatch):
    """While the branch catches up beside the coordinator, and once that has ended."""
    name = waits(plant, 4, 6, replaces=replaces)
    catch_up, calls = promotion.catch_up, []

    def corrected_before(*args):
        calls.append(args)
        if len(calls) == catches_up:
            plant.land(5, value=7)
        return catch_up(*args)

    monkeypatch.setattr(promotion, "catch_up", corrected_before)
    with pytest.raises(WeirError, match=r"1 file has changed, or is gone, since the backfill .* 00005.parquet"):
        approved(plant, name)
    assert set(plant.site.table("readings")["value"]) == {1, 2, 3, 4, 5, 6, 7}, "untouched"


@pytest.mark.long
@pytest.mark.parametrize("meanwhile", sampled(["another file", "the same file again"]))
def test_only_corrections_that_somebody_was_shown_are_accepted(tmp_path, meanwhile):
    """Not all files are named, and those that are named may be corrected once more."""
    plant = Plant.at(tmp_path, keep=9)
    plant.land(*range(1, 9))
    plant.run()
    plant.land(*range(2, 8), value=100)
    settings, name = plant.site.settings, waits(plant, 2, 7)
    fifth = plant.site.landing / "00005.parquet"
    stat, content = fifth.stat(), fifth.read_bytes()
    plant.land(2, 3, 4, 5, value=9)
    shown = plan(pipeline, settings, name).obstacles
    if meanwhile == "another file":  # instead of one that is as it was again
        fifth.write_bytes(content)
        os.utime(fifth, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        plant.land(6, value=9)
    else:
        plant.land(2, value=11)
    with pytest.raises(WeirError, match="4 files have changed"):
        approve(pipeline, settings, name, executor=InMemoryExecutor(), accepted=shown)
    again = plan(pipeline, settings, name).obstacles
    assert approve(pipeline, settings, name, executor=InMemoryExecutor(), accepted=again).kind == PROMOTION
