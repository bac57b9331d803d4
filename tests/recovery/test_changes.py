"""Definitions that change, coordinators that are stopped and readers that come late: no state is lost or misread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from json import dumps
from types import SimpleNamespace

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.checkpoints.registry import Registry
from state_ops.coordination import lease, requests
from state_ops.coordination.lease import Heartbeat
from state_ops.errors import DamageError, GateError, PipelineError, RunEndedError, StageError, TransientError
from state_ops.rows.aggregates import Agg
from state_ops.snapshots import snapshot
from state_ops.storage.storage import Storage
from tests.recovery.harness import Site
from weir import Epoch, Pipeline, State, ValueState, agg, delta, expect, files, stage, window
from weir.definition import FileSource, Stage
from weir.epoch import failover, scheduler, transitions
from weir.inspection import state_reader
from weir.run import run
from weir.run.run import RunOptions

_NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
_METERS = ("a", "b", "c")
_HIGHEST = agg.max("value")


class Count(State):
    """Of one meter."""

    readings: int = 0


def _landing(name: str = "landing") -> FileSource:
    return files("{landing}/*.parquet", event_time="at", name=name)


def _counts(source: FileSource, uid: str = "counts", before: Callable[[pl.DataFrame], None] | None = None) -> Stage:
    @stage(uid, source=source, key="meter", state=Count, sink=delta.append("counted"))
    def counts(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        """Count a meter's readings, and hand them on."""
        if before is not None and len(rows):
            before(rows)
        state.fold(rows, readings=agg.count())
        return rows.select("meter", "value")

    return counts


def _peaks(source: FileSource, every: str = "1h", peak: Agg = _HIGHEST) -> Stage:
    return window("peaks", source, key="meter", every=every, on="at", sink=delta.append("peaks"), peak=peak)


def _both(source: FileSource) -> tuple[Stage, ...]:
    return _peaks(source), _counts(source)


pipeline = Pipeline("meters", _both(_landing()))


def _deliver(site: Site, hour: int, values: pa.Array | None = None) -> None:
    """A reading of every meter, `hour` hours and a quarter after noon: by default of 10 x hour, + 1, + 2."""
    site.landing.mkdir(parents=True, exist_ok=True)
    values = pa.array([10 * hour + index for index in range(len(_METERS))]) if values is None else values
    at = pa.array([_NOON + timedelta(hours=hour, minutes=15)] * len(_METERS), pa.timestamp("us", tz="UTC"))
    pq.write_table(pa.table({"meter": list(_METERS), "value": values, "at": at}), site.landing / f"{hour:02}.parquet")


def _rows(site: Site, table: str, *columns: str) -> list[tuple]:
    return sorted(site.table(table)[list(columns)].itertuples(index=False, name=None))


def _assert_exact(site: Site, hours: int, *, closed: int, counts: bool = True) -> None:
    """After files for the hours from 0 on; the first `closed` windows have closed."""
    values = [[(meter, 10 * hour + index) for index, meter in enumerate(_METERS)] for hour in range(hours)]
    starts = [_NOON + timedelta(hours=hour) for hour in range(hours)]
    peaks = [(meter, start, value) for start, rows in zip(starts, values, strict=True) for meter, value in rows]
    assert _rows(site, "peaks", "meter", "window_start", "peak") == sorted(
        row for row in peaks if row[1] < _NOON + timedelta(hours=closed)
    )
    if counts:
        assert _rows(site, "counted", "meter", "value") == sorted(row for rows in values for row in rows)
        assert _readings(site) == dict.fromkeys(_METERS, hours)
    site.assert_no_orphans()


def _readings(site: Site) -> dict[str, int]:
    return dict(site.state("counts").itertuples(index=False, name=None))


def _data(site: Site) -> dict:
    """All that a refused or declined epoch must leave as it was; a take-over leaves its mark in the registry's logs, a
    restore in its table."""
    marks = ("_delta_log", "registry/restores")
    kept = {name: digest for name, digest in site.objects().items() if not any(mark in name for mark in marks)}
    return kept | {"checkpoints": site.registry("checkpoints").to_json()}


@pytest.fixture(scope="module")
def base(tmp_path_factory, spark) -> Site:
    site = Site(tmp_path_factory.mktemp("changes") / "base", {}, pipeline, __name__)
    _deliver(site, 0)
    site.run()
    return site


@pytest.fixture
def meters(base, tmp_path) -> Site:
    """The first hour's file is read and its windows are open; nothing waits."""
    return base.copied_to(tmp_path / "site")


# -- another definition


def test_a_pipeline_that_lacks_what_the_checkpoint_holds_is_refused_until_it_is_retired(meters):
    _deliver(meters, 1)
    before, source = _data(meters), _landing()
    for what, changed in (
        ("source 'landing'", Pipeline("meters", _both(_landing("arrivals")))),
        ("source 'landing'", Pipeline("meters", _both(_landing("arrivals")), retired=("counts", "arrivals"))),
        ("stage 'counts'", Pipeline("meters", (_peaks(source),))),
        ("stage 'counts'", Pipeline("meters", (_peaks(source), _counts(source, "counters")))),
        ("stage 'counts'", Pipeline("meters", (_peaks(source),), retired=("landing", "counted"))),
    ):
        with pytest.raises(PipelineError, match=f"has a {what}, which the pipeline meters has no more") as refused:
            replace(meters, pipeline=changed).run()
        assert f"retired=({what.split()[1]},)" in str(refused.value)
        assert _data(meters) == before
    with pytest.raises(PipelineError, match="stage 'counts'"):
        run.check_fits(Pipeline("meters", (_peaks(_landing("arrivals")),), retired=("landing",)), _head(meters))
    again = Pipeline("meters", (_peaks(_landing("arrivals")),), retired=("landing", "counts"))
    with pytest.raises(
        PipelineError, match="'arrivals' is new, and all of its input would be read into the state that peaks"
    ):
        run.check_fits(again, _head(meters))
    run.check_fits(replace(again, added=("arrivals",)), _head(meters))

    orphan_listings = [
        meters.storage / "registry" / name
        for name in ("checkpoints/data/00000000000000000009-lost.parquet", ".probe-01/a.parquet")
    ]
    for orphan in orphan_listings:
        orphan.parent.mkdir(exist_ok=True)
        orphan.write_bytes(b"left by a crash")
    retired = replace(meters, pipeline=Pipeline("meters", (_peaks(source),), retired=("counts",)))
    retired = replace(retired, options={"WEIR_CHECKPOINTS__NUM_RETAINED": "1"})
    assert [report.checkpoint.id for report in retired.run()] == [2]

    assert not any(orphan.exists() for orphan in orphan_listings)
    _assert_exact(retired, 2, closed=1, counts=False)
    assert _rows(meters, "counted", "value") == [(0,), (1,), (2,)], "what it has published stays"
    assert not (meters.storage / "state" / "counts").exists(), "its state goes with the last checkpoint that has it"


def _head(site: Site):
    return run.open_storage(site.pipeline, site.settings)[1].head()


def test_a_window_that_means_something_else_is_refused(meters):
    _deliver(meters, 1)
    before, source = _data(meters), _landing()
    for was, now, changed in (
        ("were 1 h by at with", "are 2 h by at with", _peaks(source, every="2h")),
        ("peak = max(value)", "peak = min(value)", _peaks(source, peak=agg.min("value"))),
    ):
        with pytest.raises(PipelineError, match="peaks does not fit its stored state: its windows were") as refused:
            replace(meters, pipeline=Pipeline("meters", (changed, _counts(source)))).run()
        assert was in str(refused.value) and now in str(refused.value)
        assert _data(meters) == before

    meters.run()
    _assert_exact(meters, 2, closed=1)


# -- epochs that do not end, or end badly


def test_a_stage_that_hangs_is_cancelled_when_the_epochs_time_is_up(tmp_path, spark):
    hangs = tmp_path / "hangs"
    hangs.touch()

    def hang(rows: pl.DataFrame) -> None:
        if hangs.exists():
            for _ in range(600):
                if hangs.exists():
                    time.sleep(0.1)
            raise TimeoutError("woken")  # Spark cancels the task, but lets its worker sleep: it is to stage nothing now

    hanging = Pipeline("hanging", (_counts(_landing(), before=hang),))
    site = Site(tmp_path / "site", {}, hanging, __name__)
    _deliver(site, 0)
    started = time.monotonic()

    with pytest.raises(TransientError, match=r"Epoch 1 was aborted: it took longer than 4 s") as aborted:
        replace(
            site, options={"WEIR_CHECKPOINTS__TIMEOUT_SECONDS": "4", "WEIR_CHECKPOINTS__INTERVAL_SECONDS": "4"}
        ).run()

    assert 4 <= time.monotonic() - started < 30, "the job was cancelled, nobody waited for its end"
    assert "checkpoints.timeout_seconds" in str(aborted.value)
    assert not (site.storage / "state").exists() and not (site.storage / "tables").exists()
    hangs.unlink()
    assert [report.checkpoint.id for report in site.run()] == [2]
    assert _readings(site) == dict.fromkeys(_METERS, 1)
    assert _rows(site, "counted", "meter", "value") == [("a", 0), ("b", 1), ("c", 2)]
    site.assert_no_orphans()


def _refuse_nulls(rows: pl.DataFrame) -> None:
    if rows["value"].null_count():
        raise ValueError("a reading without a value")


@pytest.mark.parametrize("by", ["a gate", "an exception"])
def test_a_first_epoch_that_is_declined_leaves_no_table_of_the_wrong_type(tmp_path, spark, by):
    if by == "a gate":
        checked, error = _counts(_landing()), GateError
        checked = replace(checked, gates=(expect("ExpectColumnValuesToNotBeNull", column="value"),))
    else:
        checked, error = _counts(_landing(), before=_refuse_nulls), StageError
    site = Site(tmp_path / "site", {}, Pipeline("first", (checked,)), __name__)
    _deliver(site, 0, pa.array(["0", None, "2"]))

    with pytest.raises(error):
        site.run()

    assert not (site.storage / "tables").exists() and not (site.storage / "state").exists()
    _deliver(site, 0)
    site.run()
    assert _rows(site, "counted", "meter", "value") == [("a", 0), ("b", 1), ("c", 2)]
    assert _readings(site) == dict.fromkeys(_METERS, 1)
    site.assert_no_orphans()


@pytest.mark.long
def test_while_nobody_can_tell_whether_a_commit_landed_nothing_is_deleted(meters, monkeypatch):
    """The store goes away in the middle of a commit and stays away, so that the registry cannot be asked either."""
    tolerant = replace(meters, options={"WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "5"})
    commit, take_over = Registry.commit, Registry.take_over

    gone: list[bool] = []

    def away(self, after=None):
        if gone:
            raise OSError("no route to the store")
        return take_over(self, after=after)

    for hour, landed in ((1, False), (2, True)):
        _deliver(meters, hour)
        before = _data(meters)
        staged: dict = {}

        def lost(self, checkpoint, files, landed=landed, staged=staged):
            if landed:
                commit(self, checkpoint, files)
            staged.update(meters.objects())
            gone.append(True)
            raise OSError("the connection was lost")

        with monkeypatch.context() as patched:
            patched.setattr(Registry, "commit", lost)
            patched.setattr(Registry, "take_over", away)
            with pytest.raises(RunEndedError, match="Nobody can tell") as ended:
                tolerant.run()
        assert "the connection was lost; then: OSError: no route to the store" in str(ended.value)
        gone.clear()
        assert meters.objects() == staged and before.keys() - {"checkpoints"} < staged.keys()
        reports = meters.run()
        assert len(reports) == (0 if landed else 1), "the next run finds out"
        _assert_exact(meters, hour + 1, closed=hour)


# -- readers


def test_a_reader_whose_checkpoint_is_pruned_answers_from_the_next(meters, monkeypatch):
    site = replace(meters, options={"WEIR_CHECKPOINTS__NUM_RETAINED": "1"})
    overtaken = []

    def overtake(module, name: str, hour: int) -> None:
        real = getattr(module, name)

        def late(*args):
            monkeypatch.setattr(module, name, real)
            _deliver(site, hour)
            overtaken.extend(report.checkpoint.id for report in site.run())
            return real(*args)

        monkeypatch.setattr(module, name, late)

    site.run()  # fetches what the copy lacks, so that later runs need not
    overtake(state_reader, "_snapshots", 1)  # between its row and its listing
    overtake(snapshot, "fetch", 2)  # between its listing and its files
    assert state_reader.get(site.pipeline, site.settings, "counts", ["a"]) == [{"meter": "a", "readings": 3}]
    assert overtaken == [2, 3]

    for file in (site.storage / "state" / "counts").rglob("*.sst"):
        file.unlink()
    with pytest.raises(DamageError):
        state_reader.get(site.pipeline, site.settings, "counts", ["a"])


# -- weir stop


@contextmanager
def _coordinator(site: Site, ends: Callable[[Storage, Heartbeat], None]) -> Iterator[None]:
    """Holds the lease until somebody asks it to stop, then ends like a coordinator that did `ends` meanwhile."""
    storage, registry = run.open_storage(site.pipeline, site.settings)
    running = threading.Event()

    def coordinate() -> None:
        with Heartbeat(storage, registry.generation(), site.head(), 60.0, None) as heartbeat:
            running.set()
            _await(lambda: requests.pending(storage))
            ends(storage, heartbeat)

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(coordinate)
        assert running.wait(30)
        yield
    assert ended.exception() is None or str(ended.exception()) == "the disk is full"


def _await(met: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _fails(storage: Storage, heartbeat: Heartbeat) -> None:
    raise OSError("the disk is full")


def _is_replaced(storage: Storage, heartbeat: Heartbeat) -> None:
    holder = lease.read(storage)
    assert holder is not None
    successor = replace(holder, generation=holder.generation + 1, born="another process")  # type: ignore[arg-type]
    storage.put_bytes(lease.LEASE, dumps(asdict(successor)).encode())


def _stops_only(storage: Storage, heartbeat: Heartbeat) -> None:
    heartbeat.outcome = "stopped"  # somebody else had asked for that


def _ends(storage: Storage, heartbeat: Heartbeat) -> None:
    pass


@pytest.mark.parametrize(("ends", "how"), [(_fails, "failed"), (_is_replaced, "was replaced by another")])
def test_a_drain_that_did_not_happen_is_not_called_one(meters, weir, ends, how):
    storage, _ = run.open_storage(pipeline, meters.settings)
    before = meters.objects()
    with _coordinator(meters, ends):
        ended = weir(meters, "stop", "meters", "--drain")
    assert ended.code == 1
    assert f"{how} before it reached its barrier, and nothing was drained" in ended.err
    assert "weir run meters" in ended.err
    assert requests.pending(storage) == [], "the request does not wait for the next run"
    assert meters.objects() == before


@pytest.mark.parametrize("ends", [_ends, _stops_only])
def test_stop_drain_drains_itself_if_the_coordinator_had_ended(meters, weir, ends):
    with _coordinator(meters, ends):
        assert weir(meters, "stop", "meters", "--drain").code == 0
    _assert_exact(meters, 1, closed=1)
    holder = lease.read(run.open_storage(pipeline, meters.settings)[0])
    assert holder is not None and holder.outcome == "drained"


@pytest.mark.long
def test_a_coordinator_that_is_asked_to_drain_does_so_through_failures_and_beyond_its_time(meters, weir, monkeypatch):
    options = {"WEIR_EPOCH__MAX_FILES": "1", "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "1"}
    options["WEIR_CHECKPOINTS__MAX_CONCURRENT"] = "1"  # else one would be in flight when the clock jumps
    site = replace(meters, options=options)
    storage, _ = run.open_storage(pipeline, site.settings)
    for hour in (1, 2):
        _deliver(site, hour)
    run_stage, errors, late = transitions.run_stage, [TransientError("the cluster was away")], 0.0

    def flaky(context, flight, *work):
        if flight.plan.drain and errors:
            raise errors.pop()
        return run_stage(context, flight, *work)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late, sleep=time.sleep, perf_counter=time.perf_counter)
    monkeypatch.setattr(transitions, "run_stage", flaky)
    for module in (run, scheduler, transitions, failover):
        monkeypatch.setattr(module, "time", clock)
    with ThreadPoolExecutor(1) as pool:
        reports = run.run(pipeline, site.settings, RunOptions(max_seconds=3600))
        assert next(reports).checkpoint.id == 2
        stop = pool.submit(weir, site, "stop", "meters", "--drain")
        _await(lambda: requests.pending(storage) or stop.done())
        late = 7200.0
        rest = [report.checkpoint for report in reports]
        assert stop.result(60).code == 0

    assert [(row.id, row.trigger) for row in rest] == [(3, "manual"), (5, "drain")]
    assert not errors
    holder = lease.read(storage)
    assert holder is not None and holder.outcome == "drained"
    assert requests.pending(storage) == []
    _assert_exact(site, 3, closed=3)
