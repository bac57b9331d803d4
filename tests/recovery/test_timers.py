"""Lists, timers and a TTL in a run that fails in the middle of firing, is killed after it, and goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import PipelineError, StageError
from state_ops.records.operator_stats import OperatorStats
from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from weir import Epoch, KeyedState, ListOf, MapOf, Pipeline, State, agg, delta, files, stage
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.operations import forks, promotion
from weir.operators.functions import function
from weir.run import maintenance
from weir.run.run import RunOptions, open_storage, run
from weir.settings.configuration import PROJECT

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
KEYS = [f"k{number}" for number in range(6)]
GOLDEN = Path(__file__).parents[1] / "golden" / "started-format-1"
FAIL = "WEIR_TEST_FAIL_IN_TIMER"

_DOOMED = """
import os, signal, sys
from pathlib import Path
from state_ops.snapshots import stage_upload as pending_upload
from tests.recovery.test_timers import Parking

real = pending_upload.upload

def upload(*args, **options):
    real(*args, **options)
    os.kill(os.getpid(), signal.SIGKILL)

pending_upload.upload = upload
Parking(Path(sys.argv[1])).epochs(*map(int, sys.argv[2:]))
"""


class Car(State):
    """Of one number plate."""

    parked: int = 0
    stops: ListOf[Annotated[int, pa.int32()]]
    fees: MapOf[str, int]


def overdue(fired: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
    """Nine minutes after each stop."""
    if os.environ.get(FAIL) and len(fired):
        raise ValueError("out of order")
    last = state.stops.last(fired)
    state.fees.fold(fired.with_columns(kind=pl.lit("fine")), fees_key="kind", fees=agg.count())
    return fired.join(last, on="id", how="left", maintain_order="left").select(
        "id", at=pl.col("at"), what=pl.lit("fine"), stop=pl.col("stops")
    )


@stage(
    "parking",
    source=files("{landing}/*.parquet", name="landing", event_time="at"),
    key="id",
    state=Car,
    order_by=["at"],
    sink=delta.append("events"),
    on_timer=overdue,
    ttl="365d",
)
def parking(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
    """Every stop is counted and listed, and nine minutes later there is a fine."""
    state.fold(rows, parked=agg.count())
    state.stops.append(rows, stops="stop")
    state.timers.set(rows.with_columns(due=pl.col("at") + pl.duration(minutes=9)), at="due")
    return rows.select("id", "at", what=pl.lit("stop"), stop="stop")


pipeline = Pipeline("parking", (parking,), max_parallelism=8)


class Watched(State):
    """Of one number plate: its timers alone."""

    seen: int = 0


def tick(fired: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
    """Every twenty minutes, for ever: what it sets is held until the next epoch."""
    state.timers.set(fired.with_columns(due=pl.col("at") + pl.duration(minutes=20)), at="due")
    return fired.select("id", "at", what=pl.lit("tick"))


@stage(
    "parking",
    source=files("{landing}/*.parquet", name="landing", event_time="at"),
    key="id",
    state=Watched,
    order_by=["at"],
    sink=delta.append("events"),
    on_timer=tick,
)
def watched(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
    """Twenty minutes after a key's stop of file 1 it ticks for the first time."""
    first = rows.filter(pl.col("stop") == 1)
    state.timers.set(first.with_columns(due=pl.col("at") + pl.duration(minutes=20)), at="due")
    return rows.select("id", "at", what=pl.lit("stop"))


ticking = Pipeline("parking", (watched,), max_parallelism=8)


class Parking:
    """Its site. File n has one stop of each key, the first at n times ten minutes after noon, one a minute."""

    def __init__(self, root: Path, piped: Pipeline = pipeline, **options: str) -> None:
        options = {"WEIR_EPOCH__MAX_FILES": "1", "WEIR_LEASE__HEARTBEAT_SECONDS": "0.5", **options}
        self.site = Site(root, options, piped, "tests.recovery.test_timers")

    def land(self, *numbers: int) -> None:
        self.site.landing.mkdir(parents=True, exist_ok=True)
        for number in numbers:
            moments = [_moment(number, key) for key in range(len(KEYS))]
            at = pa.array(moments, pa.timestamp("us", tz="UTC"))
            staging = self.site.landing / f".{number:05}"
            pq.write_table(pa.table({"id": KEYS, "at": at, "stop": [number] * len(KEYS)}), staging)
            staging.rename(self.site.landing / f"{number:05}.parquet")

    def epochs(self, *numbers: int, drain: bool = False, start_from: str | None = None) -> None:
        self.land(*numbers)
        asked = RunOptions(until_caught_up=True, drain=drain, start_from=start_from)
        list(run(self.site.pipeline, self.site.settings, asked, InMemoryExecutor()))

    def stats(self) -> OperatorStats:
        head = open_storage(self.site.pipeline, self.site.settings)[1].head()
        assert head is not None
        return head.operators["parking"]

    def assert_exact(self, upto: int, drained: bool) -> None:
        """Tables and state after files 1 to `upto`, whatever happened on the way."""
        newest = _moment(upto, len(KEYS) - 1)
        stops = [(KEYS[key], _moment(n, key), "stop", n) for n in range(1, upto + 1) for key in range(len(KEYS))]
        fines = []
        for plate, at, _, n in stops:
            due = at + timedelta(minutes=9)
            # It fires in the epoch whose newest row is not before it: the next one, or its own, or the drain.
            barrier = next((m for m in range(n, upto + 1) if _moment(m, len(KEYS) - 1) >= due), upto)
            if due <= newest or drained:
                fines.append((plate, due, "fine", barrier))
        table = self.site.table("events")
        actual = sorted(
            zip(
                table["id"],
                [moment.to_pydatetime() for moment in table["at"]],
                table["what"],
                table["stop"],
                strict=True,
            )
        )
        assert actual == sorted([*stops, *fines])
        rows = [
            row
            for table in state_reader.scan(self.site.pipeline, self.site.settings, "parking")
            for row in table.to_pylist()
        ]
        assert {row["id"] for row in rows} == set(KEYS)
        for row in rows:
            mine = sum(plate == row["id"] for plate, *_ in fines)
            assert row["parked"] == upto and row["stops"] == list(range(1, upto + 1))
            assert row["fees"] == ([{"fees_key": "fine", "fees": mine}] if mine else None)


def _moment(number: int, key: int) -> datetime:
    return NOON + timedelta(minutes=10 * number + key)


def test_timers_fire_once_although_the_run_fails_is_killed_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(function, "_SWEEP_ENTRIES", 5)
    lot = Parking(tmp_path)
    lot.epochs(1, 2)
    lot.assert_exact(2, drained=False)
    monkeypatch.setenv(FAIL, "1")
    with pytest.raises(StageError, match="out of order") as raised:
        lot.epochs(3)
    assert "overdue" in raised.value.traceback
    monkeypatch.delenv(FAIL)
    doomed = subprocess.run(
        [sys.executable, "-c", _DOOMED, str(tmp_path), "4"],
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )
    assert doomed.returncode == -signal.SIGKILL, doomed.stderr
    lot.epochs(5)
    lot.assert_exact(5, drained=False)
    assert state_reader.get(lot.site.pipeline, lot.site.settings, "parking", ["k0"])[0]["stops"] == [1, 2, 3, 4, 5]

    before = lot.stats()
    assert before.swept and set(before.collections) == {"stops", "fees"}
    lot.epochs(drain=True)
    lot.assert_exact(5, drained=True)
    lot.epochs(drain=True)
    lot.assert_exact(5, drained=True)
    after = lot.stats()
    assert after.swept != before.swept, "the sweep goes on from epoch to epoch"
    assert not after.files_new, "where nothing has expired, that it was looked at changes nothing"


class Less(State):
    parked: int = 0
    stops: ListOf[int]


class Recast(State):
    parked: int = 0
    stops: ListOf[str]
    fees: MapOf[bytes, int]


class Widened(State):
    parked: int = 0
    stops: ListOf[int]
    fees: MapOf[str, int]
    notes: ListOf[str]


def _with(state: type[State]) -> Pipeline:
    def nothing(fired: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
        """Timers are set already, so there has to be a function for them."""

    of_source = {"source": parking.inputs[0].origin, "key": "id", "order_by": ["at"], "sink": delta.append("events")}

    @stage("parking", state=state, on_timer=nothing, **of_source)
    def changed(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        state.stops.append(rows, stops="stop")
        return rows.select("id", "at", what=pl.lit("stop"), stop="stop")

    return Pipeline("parking", (changed,), max_parallelism=8)


def test_lists_and_maps_that_do_not_fit_what_is_stored_are_refused_and_wider_ones_read_it(tmp_path):
    Parking(tmp_path).epochs(1)
    for state, message in ((Less, "the map fees is gone"), (Recast, "fees was a map by string, is a map by binary")):
        with pytest.raises(PipelineError, match=message):
            Parking(tmp_path, _with(state)).epochs(2)
    with pytest.raises(PipelineError, match="stops: field stops changed its type from int32 to string"):
        Parking(tmp_path, _with(Recast)).epochs(2)
    wider = Parking(tmp_path, _with(Widened))
    wider.epochs(2)
    row = state_reader.get(wider.site.pipeline, wider.site.settings, "parking", ["k3"])[0]
    assert row == {"id": "k3", "parked": 1, "stops": [1, 2], "fees": None, "notes": None}


# -- timers that are pending where a run goes on from a savepoint, or goes back to one

DELAYS = (4, 16, 27)  # minutes after a stop; no two timers of a key are set for one moment


class Rung(State):
    """Of one number plate."""

    times: int = 0


def ring(fired: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
    """A row for each timer, and the how manyth of its key it is."""
    state.fold(fired, times=agg.count())
    return state.join(fired).select("id", "at", nth="times")


@stage(
    "bells",
    source=parking.inputs[0].origin,
    key="id",
    state=Rung,
    order_by=["at"],
    sink=delta.append("events"),
    on_timer=ring,
)
def bells(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
    """Each stop sets three timers, and is no row by itself."""
    for minutes in reversed(DELAYS):
        state.timers.set(rows.with_columns(due=pl.col("at") + pl.duration(minutes=minutes)), at="due")
    return rows.clear().select("id", "at", nth=pl.lit(0, pl.Int64))


ringing = Pipeline("bells", (bells,), max_parallelism=8)
Fired = dict[str, list[tuple[datetime, int]]]


def fired(lot: Parking) -> Fired:
    """By key, what has fired, as it lies in the files, which are read from the oldest epoch's on."""
    fired: Fired = {key: [] for key in KEYS}
    table = lot.site.table("events")
    for key, at, nth in zip(table["id"], table["at"], table["nth"], strict=True):
        fired[key].append((at.to_pydatetime(), nth))
    return fired


def due(upto: int, drained: bool = False) -> Fired:
    """What must have fired by the barrier of file `upto`: by key, everything that was due by then, in the order of
    time."""
    newest = _moment(upto, len(KEYS) - 1)
    fired = {}
    for number, key in enumerate(KEYS):
        stops = [_moment(n, number) for n in range(1, upto + 1)]
        moments = sorted(stop + timedelta(minutes=minutes) for stop in stops for minutes in DELAYS)
        fired[key] = [(at, nth) for nth, at in enumerate(moments, 1) if drained or at <= newest]
    return fired


def saved(lot: Parking) -> int:
    """Two epochs and a savepoint, at which each key has several pending timers, of both epochs; its checkpoint."""
    lot.epochs(1, 2)
    pin = maintenance.savepoint(lot.site.pipeline, lot.site.settings, "pending", "a test", 30)
    assert fired(lot) == due(2)
    for key, waiting in due(2, drained=True).items():
        pending = [at for at, _ in waiting[len(due(2)[key]) :]]
        assert len(pending) >= 4 and not set(pending) & {at for at, _ in fired(lot)[key]}
    return pin.checkpoint_id


def after_it(fired: Fired) -> Fired:
    """Without what had fired at the savepoint."""
    return {key: firings[len(due(2)[key]) :] for key, firings in fired.items()}


def test_timers_that_are_pending_at_a_savepoint_fire_once_and_in_order_in_a_pipeline_that_starts_from_it(tmp_path):
    lot = Parking(tmp_path, ringing)
    saved(lot)
    origin = lot.site.storage
    elsewhere = {**lot.site.options, "WEIR_LOCAL__WORK_DIR": str(tmp_path / "empty")}
    other = Parking(tmp_path)
    other.site = replace(lot.site, pipeline=replace(ringing, name="bells_again"), options=elsewhere)
    other.epochs(3, start_from=f"{origin}:pending")
    assert fired(other) == after_it(due(3)), "its table is its own; what had fired does not fire again"
    shutil.rmtree(origin)
    shutil.rmtree(tmp_path / "work")
    other.epochs(4)
    assert fired(other) == after_it(due(4))
    for _ in range(2):
        other.epochs(drain=True)
        assert fired(other) == after_it(due(4, drained=True))
    other.site.assert_no_orphans()


def ticks(lot: Parking) -> list[str]:
    """When the first key has ticked, by the time of the timers, oldest first."""
    table = lot.site.table("events")
    return sorted(f"{at:%H:%M}" for at in table[(table["id"] == KEYS[0]) & (table["what"] == "tick")]["at"])


@pytest.mark.parametrize("drained", [False, True], ids=["by the watermark", "by a drain"])
def test_a_timer_that_was_held_in_an_epoch_of_the_savepoint_is_held_in_none_of_the_pipeline_started_from_it(
    tmp_path, drained
):
    lot = Parking(tmp_path, ticking)
    lot.epochs(1, 2, 3)
    assert ticks(lot) == ["12:30"], "in epoch 3, which has set the one of 12:50 and held it"
    maintenance.savepoint(lot.site.pipeline, lot.site.settings, "held", "", 5)
    other = Parking(tmp_path)
    other.site = replace(lot.site, pipeline=replace(ticking, name="successor"))
    other.epochs(4, start_from=f"{lot.site.storage}:held")
    assert ticks(other) == []
    if drained:
        other.epochs(drain=True)
    else:
        other.epochs(5)
    assert ticks(other) == ["12:50"]
    head = open_storage(other.site.pipeline, other.site.settings)[1].head()
    assert head.id == 6, "the start is 4, above the savepoint, and two epochs follow"


@pytest.mark.long
def test_a_timer_that_was_held_on_a_branch_fires_on_time_after_its_promotion(tmp_path):
    many = Parking(tmp_path, ticking, WEIR_EPOCH__MAX_FILES="4", WEIR_CHECKPOINTS__NUM_RETAINED="5")
    many.epochs(1)
    forks.fork(many.site.pipeline, many.site.settings, "fix")
    many.epochs(2, 3, 4)
    slow = Parking(tmp_path, ticking, WEIR_CHECKPOINTS__NUM_RETAINED="5")
    promoted = promotion.promote(slow.site.pipeline, slow.site.settings, "fix", executor=InMemoryExecutor())
    assert promoted.id == 5, "the branch is at 4, the pipeline at 2"
    assert ticks(many) == ["12:30"]
    many.epochs(5)
    assert ticks(many) == ["12:30", "12:50"]


@pytest.mark.parametrize("drained", [False, True], ids=["by the watermark", "by a drain"])
def test_a_pipeline_that_an_older_release_started_from_a_savepoint_opens_and_its_timers_fire(tmp_path, drained):
    lot = Parking(tmp_path, replace(ticking, name="successor"), WEIR_STATE__BACKEND="filesystem")
    shutil.copytree(GOLDEN, lot.site.storage)
    head = open_storage(lot.site.pipeline, lot.site.settings)[1].head()
    assert (head.id, ticks(lot)) == (2, []), "epoch 3 of the savepoint's pipeline held the timer of 12:50"
    lot.land(1, 2, 3, 4)
    for name, ns in zip(head.offsets["landing"]["seen"], head.offsets["landing"]["seen_ns"], strict=True):
        os.utime(lot.site.landing / name, ns=(ns, ns))  # the very files, in another place
    lot.epochs(*() if drained else (5,), drain=drained, start_from="parking:held")  # as its command has always said
    assert ticks(lot) == ["12:50"], "in the epoch that is 3 here"


@pytest.mark.long
@pytest.mark.parametrize("here", sampled([False, True]), ids=["with an empty work directory", "on this host"])
def test_timers_that_are_pending_at_a_savepoint_fire_once_and_in_order_after_a_rewind_to_it(here, tmp_path):
    lot = Parking(tmp_path, ringing)
    checkpoint = saved(lot)
    lot.epochs(3, 4)
    assert fired(lot) == due(4), "they have fired before it"
    maintenance.rewind(lot.site.pipeline, lot.site.settings, checkpoint)
    assert fired(lot) == due(2), "and are pending again"
    if not here:
        shutil.rmtree(tmp_path / "work")
    lot.epochs()
    assert fired(lot) == due(4)
    lot.epochs(5)
    assert fired(lot) == due(5)
    for _ in range(2):
        lot.epochs(drain=True)
        assert fired(lot) == due(5, drained=True)
    lot.site.assert_no_orphans()
