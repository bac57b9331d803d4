"""How files travel and what stays behind: bounds, cancellation, deadlines, full snapshots, full disks, local
directories."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from infra import flights_input
from state_ops.backends.base import BackendOptions
from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.errors import TransientError
from state_ops.ids import CheckpointId, Generation
from state_ops.records.acks import Ack, PendingUpload
from state_ops.records.snapshot_files import STATE, Snapshot, StateFile, snapshots_of
from state_ops.snapshots import snapshot, stage_upload
from state_ops.storage.storage import Storage
from state_ops.storage.transfers import together
from tests.recovery.harness import Site
from tests.state_ops.snapshots.test_snapshot import Subtask, entries
from tests.tools.sampling import sampled
from weir import Epoch, State, ValueState, files, stage
from weir.definition import Progress
from weir.execution.in_process import InMemoryExecutor, routed
from weir.operators.shapes import shapes
from weir.run.run import RunOptions, run
from weir.task import run_task
from weir.task.run_task import KeyedTask

_PATIENCE_SECONDS = 20.0
_BATCH_ROWS = 40
NONE: Mapping[int, bytes] = {}
_SCHEMA = pa.schema([("key", pa.int64()), ("note", pa.binary()), ("remember", pa.bool_())])


# -- several at a time


def test_results_come_in_order_and_no_more_than_allowed_run_at_once():
    three, lock, running, most = threading.Barrier(3), threading.Lock(), [0], [0]

    def move(number: int, cancelled: Event) -> int:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        three.wait(_PATIENCE_SECONDS)  # passes only if three are here at the same time
        with lock:
            running[0] -= 1
        return number * number

    assert together(move, range(12), at_once=3) == [number * number for number in range(12)]
    assert most == [3]


def test_the_first_failure_stops_the_running_ones_and_the_others_never_begin():
    begun, stopped, both = [], [], threading.Barrier(2)

    def move(number: int, cancelled: Event) -> None:
        begun.append(number)
        both.wait(_PATIENCE_SECONDS)
        if number == 1:
            raise PermissionError("no access")
        assert cancelled.wait(_PATIENCE_SECONDS)
        stopped.append(number)
        raise TransientError("cancelled")

    with pytest.raises(PermissionError, match="no access"):
        together(move, range(50), at_once=2, grace=3 * _PATIENCE_SECONDS)
    assert sorted(begun) == [0, 1]
    assert stopped == [0]


def test_at_the_deadline_transfers_stop_with_a_typed_error():
    stopped = Event()

    def move(number: int, cancelled: Event) -> None:
        if number > 0:
            assert cancelled.wait(_PATIENCE_SECONDS)
            stopped.set()

    with pytest.raises(TransientError, match="1 of 3 files was transferred when the epoch's time was up"):
        together(move, range(3), at_once=2, deadline=time.monotonic() + 0.2)
    assert stopped.is_set()


def test_after_the_deadline_nothing_begins():
    begun = []
    with pytest.raises(TransientError, match="0 of 2 files"):
        together(lambda number, _: begun.append(number), range(2), at_once=2, deadline=time.monotonic())
    assert begun == []


def test_a_transfer_that_hangs_is_left_behind():
    hung, ended = Event(), Event()

    def move(number: int, cancelled: Event) -> None:
        hung.wait(_PATIENCE_SECONDS)  # does not look at `cancelled`
        ended.set()

    try:
        with pytest.raises(TransientError, match="0 of 1 file were"):
            together(move, [0], at_once=1, deadline=time.monotonic() + 0.05, grace=0.05)
        assert not ended.is_set()
    finally:
        hung.set()
    assert ended.wait(_PATIENCE_SECONDS)


def test_a_process_exits_although_a_transfer_hangs():
    hangs = "from threading import Event; from state_ops.storage.transfers import {}; forever = Event(); "
    alone = (
        hangs.format("together")
        + "together(lambda *_: forever.wait(), [0], at_once=1, deadline=monotonic() + 0.1, grace=0)"
    )
    steps = hangs.format("at_once") + (
        "from threading import Thread; from functools import partial; "
        "Thread(target=partial(at_once, [forever.wait, forever.wait]), daemon=True).start()"
    )
    for script, code in ((alone, 1), (steps, 0)):
        ran = [sys.executable, "-c", f"from time import monotonic; {script}"]
        assert subprocess.run(ran, timeout=2 * _PATIENCE_SECONDS, capture_output=True).returncode == code


# -- storage that fails


class Failing(Storage):
    """Storage that fails to take what matches; every other upload to the same place waits until it is told to stop."""

    def __init__(self, uri: str, matches: str, *, others_wait: bool = False) -> None:
        super().__init__(uri)
        self.matches, self.others_wait = matches, others_wait

    def put_file(self, local: Path, path: str, *, cancelled: Any = None) -> tuple[int, str]:
        if self.matches in path:
            raise OSError("the store is down")
        if self.others_wait:
            assert cancelled.wait(_PATIENCE_SECONDS)
        return super().put_file(local, path, cancelled=cancelled)


@pytest.fixture
def subtask(tmp_path: Path) -> Subtask:
    return Subtask(tmp_path)


def objects(storage: Storage, below: str = "") -> set[str]:
    return {file.path for file in storage.list(below, unfinished=True)}


def test_case_21_an_upload_that_fails_midway_leaves_the_checkpoint_before_and_no_other(subtask):
    base = subtask.epoch(1, None, entries(1))
    before = objects(subtask.storage)
    sound, attempt = subtask.storage, subtask.attempt(2)
    subtask.storage = Failing(sound.uri, "MANIFEST")
    with pytest.raises(OSError, match="the store is down"):
        subtask.write(attempt, base, entries(2))
    subtask.storage = sound
    assert not (attempt.directory / "manifest.json").exists()
    snapshot.discard(sound, attempt)
    assert objects(sound) == before
    assert subtask.read(base) == entries(1)
    subtask.forget_local()
    assert subtask.read(base) == entries(1)


def test_a_failed_upload_stops_the_others_before_they_become_objects(subtask):
    subtask.storage = Failing(subtask.storage.uri, "MANIFEST", others_wait=True)
    with pytest.raises(OSError, match="the store is down"):
        subtask.epoch(1, None, entries(1))
    assert objects(subtask.storage) == set()


def test_discarding_an_attempt_deletes_nothing_of_another_one(subtask):
    base = subtask.epoch(1, None, entries(1))
    lost, won = subtask.attempt(2), subtask.attempt(2)
    subtask.write(lost, base, entries(2))
    kept = subtask.write(won, base, entries(3))
    snapshot.discard(subtask.storage, lost)
    assert not any(lost.id in path for path in objects(subtask.storage))
    subtask.forget_local()
    assert subtask.read(kept) == entries(1, 3)
    assert subtask.read(base) == entries(1)


# -- full and incremental


def new(snapshot: Snapshot) -> set[str]:
    return {file.path for file in snapshot.files if file.new}


def paths(snapshot: Snapshot) -> set[str]:
    return {file.path for file in snapshot.files}


def test_incremental_and_full_snapshots_follow_each_other_without_conversion(subtask):
    first = subtask.epoch(1, None, entries(1))
    second = subtask.epoch(2, first, entries(2))
    third = subtask.epoch(3, second, entries(3), full=True)
    fourth = subtask.epoch(4, third, entries(4))
    fifth = subtask.epoch(5, fourth, {}, full=True)  # nothing was written
    sixth = subtask.epoch(6, fifth, entries(6), full=True)
    seventh = subtask.epoch(7, sixth, entries(7))

    assert paths(second) & paths(first), "incremental: what did not change is named again"
    for full in (third, fifth, sixth):
        assert new(full) == paths(full), "full: all its own"
        before = [earlier for earlier in (first, second, third, fourth, fifth, sixth) if earlier is not full]
        assert not any(new(full) & new(earlier) for earlier in before)
    assert paths(fourth) & paths(third), "an incremental snapshot may build on a full one"
    assert paths(seventh) & paths(sixth)

    states = {
        first: entries(1),
        second: entries(1, 2),
        third: entries(1, 2, 3),
        fourth: entries(1, 2, 3, 4),
        fifth: entries(1, 2, 3, 4),
        sixth: entries(1, 2, 3, 4, 6),
        seventh: entries(1, 2, 3, 4, 6, 7),
    }
    for taken, state in states.items():
        assert subtask.read(taken) == state
    subtask.forget_local()
    for taken, state in states.items():
        assert subtask.read(taken) == state

    for path in objects(subtask.storage) - paths(fifth):
        subtask.storage.delete(path)
    subtask.forget_local()
    assert subtask.read(fifth) == states[fifth], "a full one needs nothing of any other"


def test_a_full_snapshot_refuses_to_vouch_for_a_local_file_that_rotted(subtask):
    base = subtask.epoch(1, None, entries(*range(50)))
    attempt = subtask.attempt(2)
    forked = snapshot.working_copy(subtask.storage, attempt, base)
    backend = RocksDBBackend(forked.db, 16)
    local = snapshot.take(attempt, backend)
    backend.close()
    (table,) = [file for file in local if file.suffix == ".sst"]
    flip(table)
    prepared = snapshot.prepare(attempt, forked, local)
    handed = PendingUpload(base.attempt, prepared, (), str(attempt.directory))
    ack = Ack("counts", 0, attempt.id, attempt.epoch, attempt.generation, pending_upload=handed)
    with pytest.raises(TransientError, match="is not what it was when it was new"):
        stage_upload.upload(subtask.storage, [ack], {0: base}, full=True, channels=False, deadline=None)
    assert not subtask.home.joinpath("manifest.json").exists()
    assert subtask.read(base) == entries(*range(50)), "from storage: the local copy is not used again"


def flip(file: Path) -> None:
    """Flip one bit in the middle, in place."""
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 0x10]))


@pytest.mark.long
@pytest.mark.parametrize("restored_from", sampled(["local files", "storage"]))
def test_the_mode_is_a_setting_that_can_change_between_runs(tmp_path, restored_from):
    days = flights_input.prepare(tmp_path / "days")[:6]
    site = Site(tmp_path / "site", {"WEIR_EPOCH__MAX_FILES": "1", "WEIR_CHECKPOINTS__NUM_RETAINED": "20"})
    checkpoints = []
    for number, mode in enumerate(["incremental", "full", "incremental"]):
        site.land(days[2 * number : 2 * number + 2])
        switched = replace(site, options={**site.options, "WEIR_CHECKPOINTS__MODE": mode})
        if restored_from == "storage":
            shutil.rmtree(site.root / "work", ignore_errors=True)
        last = RunOptions(until_caught_up=True, drain=number == 2)
        checkpoints += [
            report.checkpoint for report in run(switched.pipeline, switched.settings, last, InMemoryExecutor())
        ]
    assert [row.id for row in checkpoints] == [1, 2, 3, 4, 5, 6, 7]
    shares = [row.bytes_new / row.bytes_total for row in checkpoints]
    assert shares[2:4] == [1, 1], "full checkpoints upload all of it"
    assert all(share < 1 for share in (shares[1], shares[4], shares[5])), shares
    site.assert_exact(6)
    site.assert_no_orphans()


def test_tasks_know_the_time_that_their_epoch_has_left_and_the_stages_there_are(tmp_path):
    site = Site(tmp_path / "site", {"WEIR_CHECKPOINTS__TIMEOUT_SECONDS": "77"})
    site.land(flights_input.prepare(tmp_path / "days")[:1])
    tasks = []

    class Noting(InMemoryExecutor):
        def run(self, task: KeyedTask, *other: Any) -> list[Ack]:
            tasks.append(task)
            return super().run(task, *other)

    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True, linger_seconds=0), Noting()))
    assert len(tasks) == len(site.pipeline.stages) > 1
    seconds = [task.seconds for task in tasks]
    assert 77 > seconds[0] > seconds[1] > 0
    assert {task.stages for task in tasks} == {tuple(stage.uid for stage in site.pipeline.stages)}


# -- a keyed task


class Note(State):
    note: bytes | None = None


@stage("notes", source=files("{landing}/*.parquet", name="landing"), key="key", state=Note)
def notes(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Remember the notes that are to be remembered, hand out the others; fail at the key -1."""
    if -1 in rows["key"]:
        raise ValueError("a note that cannot be read")
    state.put(rows.filter("remember").select("key", "note"))
    return rows.filter(~pl.col("remember"))


@dataclass
class Notes:
    """One subtask of the stage `notes`, epoch after epoch."""

    storage: Storage
    work: Path
    base: Snapshot | None = None

    def run(
        self, epoch: int, remember: Mapping[int, bytes] = NONE, hand_out: Mapping[int, bytes] = NONE, **other: Any
    ) -> Ack:
        """One attempt. Notes by key: those to remember become state, the others output."""
        rows = [(key, note, True) for key, note in remember.items()]
        rows += [(key, note, False) for key, note in hand_out.items()]
        table = pa.Table.from_pylist([dict(zip(_SCHEMA.names, row, strict=True)) for row in rows], _SCHEMA)
        task = KeyedTask(
            stage=notes,
            shapes=shapes(notes, _SCHEMA),
            epoch=CheckpointId(epoch),
            generation=Generation(1),
            now=datetime(2024, 5, 1, tzinfo=UTC),
            progress=Progress(None, None, False),
            parallelism=1,
            max_parallelism=16,
            storage=self.storage,
            work_dir=self.work,
            bases={} if self.base is None else {0: self.base},
            tables={},
            channels=frozenset({"main"}),
            options=BackendOptions(memory_mb=16),
            stages=("notes",),
        )
        (batches,) = routed(notes, table, 1, 16, _BATCH_ROWS)
        return Ack.from_json(run_task.run(replace(task, **other), 0, iter(batches)).to_json())

    def commit(self, ack: Ack) -> tuple[StateFile, ...]:
        assert ack.error is None, ack.error
        self.base = snapshots_of(ack.files, "notes").get(0)
        return tuple(file for file in ack.files if file.kind == STATE)

    def local(self) -> list[str]:
        return sorted(path.name for path in (self.work / "notes" / "0").glob("*"))

    def state(self) -> int:
        """How many keys there are, from storage alone."""
        assert self.base is not None
        target = self.work / f"restored-{random.random()}"
        target.mkdir(parents=True)
        snapshot.fetch(self.storage, self.base, target)
        backend = RocksDBBackend(target, 16)
        try:
            return sum(1 for _ in backend.scan(b"", b"\xff" * 9))
        finally:
            backend.close()


@pytest.fixture
def task(tmp_path: Path) -> Notes:
    return Notes(Storage(str(tmp_path / "storage")), tmp_path / "work")


def some(*keys: int, size: int = 10) -> dict[int, bytes]:
    return {key: random.Random(key).randbytes(size) for key in keys}


def test_an_attempt_that_fails_when_its_state_is_uploaded_leaves_no_object(task):
    task.commit(task.run(1, some(1)))
    before, local, sound = objects(task.storage), task.local(), task.storage
    task.storage = Failing(sound.uri, "channels/")
    ack = task.run(2, some(2), hand_out=some(3))
    assert ack.error is not None and ack.error["kind"] == "TransientError"
    assert "the store is down" in ack.error["what"]
    assert objects(sound) == before
    assert task.local() == local


def test_an_attempt_whose_time_is_up_declines_and_leaves_no_object(task):
    ack = task.run(1, some(1), seconds=0.0)
    assert ack.error is not None and ack.error["kind"] == "TransientError"
    assert "the epoch's time was up" in ack.error["what"]
    assert objects(task.storage) == set()
    assert task.local() == []
    task.commit(task.run(2, some(1), seconds=60.0))
    assert task.state() == 1


def test_a_subtask_that_wrote_nothing_is_whole_in_a_full_checkpoint_too(task):
    first = task.commit(task.run(1, some(1, 2)))
    same = task.commit(task.run(2))
    assert {file.path for file in same} == {file.path for file in first}
    assert not any(file.new for file in same)
    full = task.commit(task.run(3, full=True))
    assert all(file.new for file in full)
    assert not {file.path for file in full} & {file.path for file in first}
    assert task.state() == 2
    assert {file.path for file in task.commit(task.run(4))} == {file.path for file in full}


def test_a_subtask_without_any_state_has_none_in_a_full_checkpoint(task):
    assert task.run(1, hand_out=some(1), full=True).files[0].kind != STATE
    assert [file.kind for file in task.run(2, full=True).files] == []


def test_flush_and_upload_are_measured_apart(task):
    ack = task.run(1, some(1))
    assert {"open", "process", "sync", "upload"} <= ack.ms.keys()
    never = Event()

    class Slow(Storage):
        def put_file(self, local: Path, path: str, *, cancelled: Any = None) -> tuple[int, str]:
            never.wait(0.05)
            return super().put_file(local, path, cancelled=cancelled)

    task.storage = Slow(task.storage.uri)
    assert task.run(2, some(1)).ms["upload"] >= 50


def test_damage_in_local_files_costs_one_epoch_and_no_hands(task):
    task.commit(task.run(1, some(*range(50), size=100)))
    (table,) = task.work.rglob("snapshot/*.sst")
    flip(table)
    ack = task.run(2, some(99), full=True)
    assert ack.error is not None and ack.error["kind"] == "TransientError"
    assert "local copy of the state is damaged and was removed" in ack.error["what"]
    task.commit(task.run(3, some(99), full=True))
    assert task.state() == 51


def test_an_idle_subtask_on_a_new_host_fetches_its_state_once(task):
    task.commit(task.run(1, some(1)))
    shutil.rmtree(task.work)
    fetched = []

    class Counting(Storage):
        def get_file(self, path: str, local: Path, **options) -> None:
            fetched.append(path)
            super().get_file(path, local, **options)

    task.storage = Counting(task.storage.uri)
    for epoch in range(2, 6):
        task.commit(task.run(epoch))
    assert task.base is not None
    assert sorted(fetched) == sorted(file.path for file in task.base.files)


# -- local directories


def test_a_host_holds_the_base_and_the_running_attempt_of_a_subtask_and_no_more(task):
    held: list[int] = []
    real = RocksDBBackend.__init__

    def watching(backend: RocksDBBackend, *args: object, **options: object) -> None:
        held.append(len(task.local()))
        real(backend, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RocksDBBackend, "__init__", watching)
        for epoch in range(1, 20):
            ack = task.run(epoch, some(*range(epoch * 10), size=100))
            if epoch % 3 == 0:
                task.run(epoch, some(0))  # another attempt of the same epoch, which loses
            if epoch % 4 != 0:  # else the epoch is declined: another subtask failed
                task.commit(ack)
    assert max(held) <= 3, "the base, this attempt, and one that runs or lost in this very epoch"
    assert sorted(set(held))[:2] == [1, 2]
    task.run(20)
    assert len(task.local()) == 1, "an attempt that wrote nothing leaves nothing but its base"
    assert not list(task.work.rglob("db")), "working copies go with the upload"
    files = [path for path in task.work.rglob("*") if path.is_file()]
    assert sum(path.suffix == ".arrow" for path in files) <= 1, "a resident table stays with its base alone"
    on_disk = sum(path.stat().st_size for path in files if not path.name.startswith("resident-"))
    assert task.base is not None and on_disk < 2 * sum(file.bytes for file in task.base.files)


def test_a_declined_attempt_removes_its_directory(task):
    task.commit(task.run(1, some(1)))
    base = task.local()
    sound = task.storage
    task.storage = Failing(sound.uri, ".sst")
    assert task.run(2, some(2)).error is not None
    task.storage = sound
    assert task.local() == base
    ack = task.run(3, some(2))
    assert sum(file.new for file in task.commit(ack)) < len(ack.files), "the base's files were still there to build on"
    assert task.state() == 2


def leave(work: Path, stage: str, subtask: int, name: str) -> Path:
    directory = work / stage / str(subtask) / name
    (directory / "snapshot").mkdir(parents=True)
    return directory


def test_directories_of_stages_and_subtasks_that_are_no_more_go_too(task):
    removed = [
        leave(task.work, "gone", 0, "g1-e1-aaa"),
        leave(task.work, "gone", 7, "g0-e9-bbb"),
        leave(task.work, "notes", 1, "g1-e4-ccc"),  # parallelism is 1
        leave(task.work, "notes", 0, "g0-e7-ddd"),
    ]
    kept = [
        leave(task.work, "other", 0, "g0-e1-eee"),  # another stage of the pipeline sweeps for itself
        leave(task.work, "gone", 1, "g2-e1-fff"),  # of a newer coordinator, which knows more
        leave(task.work, "notes", 2, "g2-e1-ggg"),
        task.work / "scratch" / "7" / "mine",
        task.work / "empty",
    ]
    for path in kept[3:]:
        path.mkdir(parents=True)
    task.commit(task.run(5, some(1), stages=("notes", "other")))
    assert [path for path in removed if path.exists()] == []
    assert [path for path in kept if not path.exists()] == []
    assert not (task.work / "gone" / "0").exists()


def test_an_earlier_epoch_in_flight_on_another_subtask_keeps_its_directory(task):
    running = leave(task.work, "notes", 1, "g1-e4-aaa")
    fenced = leave(task.work, "notes", 1, "g0-e4-bbb")
    task.run(5, some(1), parallelism=2)
    assert running.exists()
    assert not fenced.exists()


# -- a full disk


def _may_mount() -> bool:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return False
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


class SmallDisk:
    """A directory on which, once `leave` was called, nothing larger fits."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def leave(self, bytes: int) -> None:
        """From now on there is room for so many bytes: on a mounted file system, in all."""
        filler = self.path / "filler"
        room = os.statvfs(self.path)
        filler.write_bytes(b"\0" * max(0, room.f_bavail * room.f_bsize - bytes))

    def free(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)


class LimitedFiles(SmallDisk):
    """The same where nothing can be mounted: no file of this process can grow beyond the limit."""

    def leave(self, bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def free(self) -> None:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@pytest.fixture(params=["limited files", *(["full file system"] if _may_mount() else [])])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = request.param == "full file system"
    if mounted:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], check=True)
    disk = SmallDisk(place) if mounted else LimitedFiles(place)
    try:
        yield disk
    finally:
        disk.free()
        if mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


def _flush(task: Notes) -> Ack:
    return task.run(2, some(*range(100, 140), size=100_000))


def _staging(task: Notes) -> Ack:
    return task.run(2, hand_out=some(*range(100, 140), size=100_000))


@pytest.mark.parametrize("fill", [_flush, _staging])
def test_case_25_disk_full_in_an_attempt(tmp_path, disk, fill: Callable[[Notes], Ack]):
    task = Notes(Storage(str(tmp_path / "storage")), disk.path / "work")
    task.commit(task.run(1, some(1, 2, 3)))
    before, local = objects(task.storage), task.local()
    disk.leave(1 << 20)
    ack = fill(task)
    disk.free()
    assert ack.error is not None and ack.error["kind"] == "TransientError", ack.error
    assert any(os.strerror(code) in ack.error["what"] for code in (27, 28)), ack.error  # EFBIG, ENOSPC
    assert task.local() == local, "space is freed"
    assert objects(task.storage) == before
    assert task.state() == 3
    task.commit(fill(task))
    assert task.state() == (43 if fill is _flush else 3)


def test_an_error_of_the_author_is_reported_also_when_the_disk_is_full(tmp_path, disk):
    task = Notes(Storage(str(tmp_path / "storage")), disk.path / "work")
    disk.leave(1 << 20)
    ack = task.run(1, some(*range(_BATCH_ROWS), size=100_000) | some(-1))
    disk.free()
    assert ack.error is not None and ack.error["kind"] == "StageError", "and not what closing the database said"
    assert "a note that cannot be read" in ack.error["what"]
    assert task.local() == []


def test_case_25_disk_full_when_the_state_is_opened(tmp_path, disk):
    task = Notes(Storage(str(tmp_path / "storage")), disk.path / "work")
    task.commit(task.run(1, some(1)))
    disk.leave(2048)
    ack = task.run(2, some(2))
    disk.free()
    assert ack.error is not None and ack.error["kind"] == "TransientError", "nothing is damaged"
    assert len(task.local()) == 1
    task.commit(task.run(3, some(2)))
    assert task.state() == 2


def test_case_25_disk_full_in_the_snapshot(tmp_path, disk):
    subtask = Subtask(disk.path)
    subtask.storage = Storage(str(tmp_path / "storage"))
    base = subtask.epoch(1, None, entries(1))
    attempt = subtask.attempt(2)
    backend = RocksDBBackend(snapshot.working_copy(subtask.storage, attempt, base).db, 16)
    backend.write(list(entries(2).items()))
    backend._db.flush(wait=True)
    disk.leave(0)
    with pytest.raises(TransientError, match="could not take its snapshot"):
        snapshot.take(attempt, backend)
    disk.free()
    backend.close()
    assert subtask.read(base) == entries(1)
    assert subtask.read(subtask.epoch(3, base, entries(2))) == entries(1, 2)


def test_case_25_disk_full_in_storage(tmp_path, disk):
    task = Notes(Storage(str(disk.path / "storage")), tmp_path / "work")
    task.commit(task.run(1, some(1)))
    before = objects(task.storage)
    subtask = Subtask(tmp_path)
    subtask.storage = task.storage
    attempt = subtask.attempt(2)
    forked = snapshot.working_copy(task.storage, attempt, None)
    backend = RocksDBBackend(forked.db, 16)
    backend.write(list({b"large": random.Random(1).randbytes(4 << 20)}.items()))
    local = snapshot.take(attempt, backend)
    backend.close()
    disk.leave(1 << 20)
    with pytest.raises(OSError, match=r"large|space"):
        snapshot.upload(task.storage, attempt, snapshot.prepare(attempt, forked, local), None)
    snapshot.discard(task.storage, attempt)
    assert objects(task.storage) == before
    disk.free()
    assert task.state() == 1
    task.commit(task.run(3, some(2)))
    assert task.state() == 2
