"""Checkpoints that do not wait for a slow stage: what it has not applied is part of them; nothing is lost, doubled or
judged otherwise.

With a time of 0 s each subtask applies one batch an epoch, so where stages stop is the same in every run.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest

from state_ops.coordination import requests
from state_ops.coordination.requests import Request
from state_ops.errors import DamageError, PipelineError
from state_ops.records.checkpoint import WITH_WAITING, Checkpoint
from state_ops.records.snapshot_files import CHANNEL, STATE
from tests.recovery.harness import Site
from tests.recovery.unordered import SOURCE, epochs, first_epoch, land_rows, site_of
from tests.tools.sampling import sampled
from tests.tools.stages import with_input
from weir import (
    Epoch,
    Pipeline,
    State,
    ValueState,
    agg,
    aggregate,
    deduplicate,
    delta,
    select,
    stage,
    window,
)
from weir.cli import status
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.ownership import savepoints
from weir.restore.recovery import owning
from weir.run import run, sensor
from weir.run.run import RunOptions


class Seen(State):
    """Of one key."""

    rows: int = 0
    fired: int = 0


@stage("passed", source=SOURCE, key="k", state=Seen)
def passed(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Every row as it came."""
    state.fold(rows, rows=agg.count())
    return rows


def ring(due: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """A row for each timer, and how many rows its key had by then."""
    state.fold(due, fired=agg.count())
    return state.join(due).select("k", "at", "rows", "fired")


@stage("timed", source=passed, key="k", order_by=["at", "v"], state=Seen, sink=delta.append("timed"), on_timer=ring)
def timed(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Nothing by itself: each row sets a timer."""
    state.fold(rows, rows=agg.count())
    state.timers.set(rows.with_columns(due=pl.col("at") + pl.duration(minutes=7)), at="due")
    return rows.clear().select("k", "at", rows=pl.lit(0, pl.Int64), fired=pl.lit(0, pl.Int64))


unique = deduplicate(
    "unique", passed, key=["k", "v"], on="at", ttl="20m", sink=delta.append("unique"), late=delta.append("unique_late")
)


class Last(State):
    """Of one key."""

    v: int = -1


@stage("ordered", source=unique, key="k", order_by=["at", "v"], state=Last, sink=delta.append("ordered"))
def ordered(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Each row with the one before, in the order of all rows of its epoch."""
    return rows.select("k", "at", "v", before=state.lag(rows, v="v")["v"])


sums = {"rows": agg.count(), "total": agg.sum("v")}
tumbling = window(
    "tumbling", unique, key="k", on="at", every="10m", sink=delta.append("tumbling"), late=delta.append("late"), **sums
)
hopping = window("hopping", passed, key="k", on="at", every="5m", size="15m", sink=delta.append("hopping"), **sums)
sessions = window(
    "sessions", passed, key="k", on="at", gap="6m", sink=delta.append("sessions"), late=delta.append("over"), **sums
)
totals = aggregate("totals", passed, key="k", sink=delta.append("totals"), where="v > 2", **sums)
pipeline = Pipeline(
    "unaligned", (passed, timed, unique, ordered, tumbling, hopping, sessions, totals), max_parallelism=4
)
short = replace(pipeline, stages=(passed, timed))
TABLES = {
    "timed": ["k", "at", "rows", "fired"],
    "unique": ["k", "v", "at"],
    "unique_late": ["k", "v", "at"],
    "ordered": ["k", "at", "v", "before"],
    "tumbling": ["k", "window_start", "rows", "total"],
    "late": ["k", "v", "at"],
    "hopping": ["k", "window_start", "rows", "total"],
    "sessions": ["k", "window_start", "window_end", "rows", "total"],
    "over": ["k", "v", "at"],
}


def site_at(root: Path, alignment: float | None = 0.0, pipeline: Pipeline = pipeline, **options: str) -> Site:
    return site_of(root, alignment, pipeline, "tests.recovery.test_unaligned", **options)


def land(site: Site, seed: int, count: int = 4) -> None:
    """Some rows come twice."""
    rng = np.random.default_rng(seed)
    land_rows(site, range(count), lambda _: rng, 6)


ONE_BY_ONE = {"WEIR_CHECKPOINTS__MAX_CONCURRENT": "1"}  # when a report comes, nothing newer is under way


def waiting(checkpoint: Checkpoint) -> int:
    return sum(stats.rows_waiting for stats in checkpoint.operators.values())


def state_of(site: Site) -> list[dict[str, object]]:
    tables = state_reader.scan(site.pipeline, site.settings, "timed")
    return sorted((row for table in tables for row in table.to_pylist()), key=lambda row: str(row["k"]))


def tables(site: Site) -> dict[str, pd.DataFrame]:
    tables = {
        name: site.table(name)[columns].sort_values(columns, ignore_index=True) for name, columns in TABLES.items()
    }
    newest = site.table("totals").sort_values("epoch").groupby("k")[["rows", "total"]].last()
    return {**tables, "totals": newest}


@pytest.mark.parametrize("seed", sampled(range(2)))
def test_what_comes_out_is_what_an_aligned_run_makes_of_the_same_epochs(seed, tmp_path):
    sites = {alignment: site_at(tmp_path / f"{alignment}", alignment) for alignment in (None, 0.0)}
    for alignment, site in sites.items():
        land(site, seed)
        history = epochs(site, drain=True)
        assert (max(map(waiting, history)) > 0) == (alignment is not None)
        assert waiting(history[-1]) == 0
        site.assert_no_orphans()
    aligned, unaligned = (tables(site) for site in sites.values())
    for name, rows in aligned.items():
        pd.testing.assert_frame_equal(unaligned[name], rows, check_dtype=False, obj=name)
    assert len(aligned["over"]) + len(aligned["late"]), "late rows are part of the comparison"


def in_parts(site: Site) -> list[Checkpoint]:
    """Epochs of one run each: every one is restored from the checkpoint before."""
    history: list[Checkpoint] = []
    while checkpoint := first_epoch(site):
        history.append(checkpoint)
        assert len(history) < 200, "it never catches up"
    return history


@pytest.mark.long
def test_a_restore_goes_on_with_what_a_checkpoint_has_not_applied(tmp_path):
    aligned, parts = site_at(tmp_path / "aligned", None), site_at(tmp_path / "parts")
    for site in (aligned, parts):
        land(site, 7, count=1)
    epochs(aligned, drain=True)
    history = in_parts(parts)
    assert len([row for row in history if waiting(row)]) > 2, "nearly every run has begun with rows that wait"
    assert {row.format_version for row in history if waiting(row)} == {WITH_WAITING}
    epochs(parts, drain=True)
    for name, rows in tables(aligned).items():
        pd.testing.assert_frame_equal(tables(parts)[name], rows, check_dtype=False, obj=name)
    parts.assert_no_orphans()


def test_rows_that_wait_are_named_like_state_and_go_when_they_are_applied(tmp_path):
    site = site_at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="2")
    land(site, 1, count=3)
    _, registry = run.open_storage(site.pipeline, site.settings)
    for report in run.run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor(4)):
        channels = {file.path for file in registry.files(report.checkpoint) if file.kind == CHANNEL}
        wanted = {
            path
            for stats in report.checkpoint.operators.values()
            for epoch in stats.waiting
            for layer in epoch["layers"]
            for path in layer
        }
        assert channels == wanted
    site.assert_no_orphans()
    assert not [name for name in site.objects() if name.startswith("channels/")], "all has been applied"


def test_no_further_slice_is_read_while_a_stage_is_too_far_behind(tmp_path):
    site = site_at(
        tmp_path / "site", 0.0, short, WEIR_CHECKPOINTS__MAX_WAITING_EPOCHS="2", WEIR_CHECKPOINTS__MAX_CONCURRENT="3"
    )
    land(site, 2)
    history = epochs(site)
    behind = [
        max(sum(bool(epoch["layers"]) for epoch in stats.waiting) for stats in c.operators.values()) for c in history
    ]
    assert max(behind) <= 2 + 3 - 1, "what is in flight when the bound is reached may add to it"
    assert any(not row.slice for row in history), "it has held back"


@pytest.mark.long
def test_what_gets_a_name_leaves_no_rows_behind(tmp_path):
    site = site_at(tmp_path / "site", 0.0, short, WEIR_CHECKPOINTS__MAX_WAITING_EPOCHS="8")
    land(site, 3, count=4)
    storage, registry = run.open_storage(site.pipeline, site.settings)
    reports = run.run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor(4))
    assert waiting(next(reports).checkpoint)
    request = requests.send(storage, Request(requests.NAME, reason="before the release", savepoint="release"))
    for report in reports:
        if report.checkpoint.trigger == "savepoint":
            assert not waiting(report.checkpoint)
    assert [pin.name for pin in registry.pins()] == ["release"]
    assert storage.read_bytes(request.name) is None


@pytest.mark.parametrize("drain", sampled([True, False]))
def test_a_stop_that_drains_or_names_lets_stages_apply_all_rows_first(drain, tmp_path):
    site = site_at(tmp_path / "site")
    land(site, 4, count=2)
    storage, _ = run.open_storage(site.pipeline, site.settings)
    reports = run.run(site.pipeline, site.settings, RunOptions(interval=3600.0), InMemoryExecutor(4))
    assert waiting(next(reports).checkpoint)
    requests.send(storage, Request(requests.STOP, savepoint="" if drain else "end", drain=drain))
    last = [report.checkpoint for report in reports][-1]
    assert not waiting(last)
    assert drain == (last.trigger == "drain")


def first_waiting(site: Site, checkpoint: Checkpoint, begun: bool) -> Path:
    for stats in checkpoint.operators.values():
        for epoch in stats.waiting:
            if epoch["begun"] == begun and epoch["layers"]:
                return site.storage / epoch["layers"][0][0]
    raise AssertionError("nothing waits")


@pytest.mark.parametrize("begun", sampled([True, False]))
@pytest.mark.parametrize("damage", sampled(["flip", "cut", "remove"]))
def test_damaged_rows_are_never_applied(damage, begun, tmp_path):
    site = site_at(tmp_path / "site", pipeline=short, **ONE_BY_ONE)
    land(site, 5, count=3)
    reports = run.run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor(4))
    checkpoint = next(report.checkpoint for report in reports if report.checkpoint.id > 1)
    reports.close()
    head = run.open_storage(site.pipeline, site.settings)[1].head()
    file = first_waiting(site, head or checkpoint, begun)
    data = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(data[: len(data) // 2] if damage == "cut" else bytes([*data[:-9], data[-9] ^ 1, *data[-8:]]))
    with pytest.raises(DamageError, match=r"front of a stage|A file of checkpoint") as raised:
        epochs(site)
    assert file.name in str(raised.value.where)
    file.write_bytes(data)
    assert waiting(epochs(site)[-1]) == 0, "nothing was lost meanwhile"


def test_rows_that_wait_under_another_definition_are_refused(tmp_path):
    site = site_at(tmp_path / "site", pipeline=short)
    land(site, 6, count=2)
    first_epoch(site)

    @stage("passed", source=SOURCE, key="k", state=Seen)
    def wider(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, rows=agg.count())
        return rows.with_columns(more=pl.lit(1))

    changed = replace(short, stages=(wider, with_input(timed, wider)))
    with pytest.raises(PipelineError, match="other columns"):
        epochs(replace(site, pipeline=changed))
    assert waiting(epochs(site)[-1]) == 0


@pytest.mark.long
def test_a_slow_stage_lengthens_aligned_checkpoints_and_not_unaligned_ones(tmp_path):
    """By the number of batches that a checkpoint has waited for, which is what its duration is made of."""

    class Counting(InMemoryExecutor):
        """Counts the batches that a slow stage has applied."""

        def __init__(self) -> None:
            super().__init__(4)
            self.rows: list[int] = []

        def run(self, task, *work):
            acks = super().run(task, *work)
            if task.stage.uid == "timed":
                self.rows.append(max(ack.rows_in for ack in acks))
            return acks

    most = {}
    for alignment in (None, 0.0):
        site, executor = site_at(tmp_path / f"{alignment}", alignment, short), Counting()
        land(site, 8)
        list(run.run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor))
        most[alignment] = max(executor.rows)
    assert most[0.0] <= 4 < 8 <= most[None]


@pytest.mark.long
def test_rows_that_wait_go_along_to_a_pipeline_that_starts_from_a_savepoint(tmp_path):
    site = site_at(tmp_path / "site", 0.0, short)
    read_there = {"WEIR_PIPELINES__UNALIGNED__PARAMS": json.dumps({"landing": str(site.landing)})}
    after, aligned = (
        site_at(tmp_path / "after", 0.0, short, **read_there),
        site_at(tmp_path / "aligned", None, short, **read_there),
    )
    land(site, 9, count=2)
    first_epoch(site)
    with owning(site.pipeline, site.settings, InMemoryExecutor()) as owner:
        savepoints.save(owner.context, owner.head, "moved", "a test")
    assert waiting(owner.head)
    origin = f"{site.storage}:moved"
    started = first_epoch(after, start_from=origin)
    assert waiting(started) and started.watermarks
    shutil.rmtree(site.storage)  # whatever is still to be read has been copied
    epochs(after, drain=True)
    epochs(aligned, drain=True)
    assert state_of(after) == state_of(aligned)
    after.assert_no_orphans()


def test_status_and_sensor_know_of_rows_that_wait(tmp_path):
    site = site_at(tmp_path / "site", 0.0, short)
    land(site, 9, count=1)
    first = first_epoch(site)
    assert status.status_of(site.pipeline, site.settings)["unapplied"] == {"timed": waiting(first)}
    seen = sensor.observe(site.pipeline, site.settings)
    assert seen.unapplied and not seen.waiting
    decided = sensor.decide(seen, sensor.SensorMemory(), 0)
    assert decided.action is sensor.Action.RUN and "rows of earlier epochs" in decided.reason
    epochs(site)
    assert (
        sensor.decide(sensor.observe(site.pipeline, site.settings), sensor.SensorMemory(), 0).action
        is sensor.Action.WAIT
    )


def left_waiting(root: Path, pipeline: Pipeline = short, seed: int = 6) -> Site:
    """A site whose last run has ended with rows in front of its second stage."""
    site = site_at(root, 0.0, pipeline, **ONE_BY_ONE)
    land(site, seed, count=2)
    assert waiting(first_epoch(site))
    return site


def test_a_stage_that_rows_wait_for_can_be_neither_retired_nor_given_another_input(tmp_path):
    site = left_waiting(tmp_path / "site")
    gone = replace(short, stages=(passed,), retired=("timed",))
    rewired = replace(short, stages=(passed, with_input(timed, SOURCE)))
    for changed in (gone, rewired):
        with pytest.raises(PipelineError, match=r"rows of passed wait for the stage timed"):
            epochs(replace(site, pipeline=changed))
    assert waiting(epochs(site)[-1]) == 0


def test_rows_that_wait_can_be_left_out_like_others(tmp_path):
    site = left_waiting(tmp_path / "site", replace(short, stages=(passed, with_input(totals, where=None))))
    counted = site.table("totals")["rows"].sum()
    epochs(replace(site, pipeline=replace(short, stages=(passed, with_input(totals, where="false")))))
    assert site.table("totals")["rows"].sum() == counted, "no further row was counted"


@pytest.mark.parametrize("columns", [("k", "at", "v + 100 AS v"), ("k AS who", "v")], ids=["changed", "renamed"])
def test_rows_that_wait_for_a_select_are_in_its_columns_once(columns, tmp_path):
    selected = select("selected", passed, *columns, where="v > 1 AND v < 90", sink=delta.append("selected"))
    rows = {}
    for alignment in (None, 0.0):
        site = site_at(tmp_path / f"{alignment}", alignment, replace(short, stages=(passed, selected)))
        land(site, 6, count=2)
        history = epochs(site)
        left = [epoch for row in history for epoch in row.operators["selected"].waiting if epoch["begun"]]
        assert bool(left) == (alignment is not None)
        table = site.table("selected").drop(columns=["epoch", "subtask"], errors="ignore")
        rows[alignment] = sorted(table.astype(str).itertuples(index=False, name=None))
    assert rows[0.0] == rows[None]


def test_a_run_does_not_go_on_from_rows_that_are_gone_behind_others(tmp_path):
    site = left_waiting(tmp_path / "site")
    head = run.open_storage(site.pipeline, site.settings)[1].head()
    assert head is not None
    *_, last = (path for epoch in head.operators["timed"].waiting for layer in epoch["layers"] for path in layer)
    (site.storage / last).unlink()
    before = site.objects()
    with pytest.raises(DamageError, match="is missing"):
        epochs(site)
    assert site.objects().keys() >= before.keys(), "nothing was pruned"


@pytest.mark.long
def test_every_savepoint_of_several_stops_is_one_without_rows_that_wait(tmp_path):
    site = site_at(tmp_path / "site", 0.0, short)
    land(site, 4, count=2)
    storage, registry = run.open_storage(site.pipeline, site.settings)
    reports = run.run(site.pipeline, site.settings, RunOptions(interval=3600.0), InMemoryExecutor(4))
    assert waiting(next(reports).checkpoint)
    requests.send(storage, Request(requests.STOP))
    requests.send(storage, Request(requests.STOP, savepoint="end"))
    assert not waiting([report.checkpoint for report in reports][-1])
    assert [pin.name for pin in registry.pins()] == ["end"]


def test_full_checkpoints_name_no_state_of_others_while_a_stage_has_nothing_to_do(tmp_path):
    site = site_at(
        tmp_path / "site", 0.0, replace(pipeline, stages=(passed, unique, tumbling)), WEIR_CHECKPOINTS__MODE="full"
    )
    land(site, 1, count=2)
    _, registry = run.open_storage(site.pipeline, site.settings)
    for report in run.run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor(4)):
        prefix = f"-e{report.checkpoint.id}/"
        assert all(prefix in file.path for file in registry.files(report.checkpoint) if file.kind == STATE)
