"""A restore that takes longer than an epoch may, or that breaks off: it comes to its end, and fetches nothing twice."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from state_ops.snapshots import snapshot
from state_ops.snapshots.sweep import sweep
from state_ops.storage.storage import Storage, UnavailableError
from tests.state_ops.snapshots.test_snapshot import Subtask
from tests.storage import counting
from tests.storage.conftest import Bucket
from tests.storage.proxy import Cut, Proxy, Request
from weir.cli.status import status_of
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run

CAUGHT_UP = RunOptions(until_caught_up=True)
_TIMEOUT = 4.0


@pytest.mark.long
def test_a_restore_of_three_times_an_epochs_deadline_ends_and_says_how_far_it_is(
    bucket: Bucket, misbehaving: Callable[[str], int], tmp_path: Path
):
    counting.land(bucket, 1, more=30_000)
    settings = counting.configured(bucket, tmp_path / "work")
    [first] = run(counting.pipeline, settings, CAUGHT_UP, InMemoryExecutor())
    counting.land(bucket, 2)
    elsewhere = {  # workers do not share this disk: each fetches what it lacks, in the epoch
        "WEIR_SPARK__MASTER": "spark://elsewhere:7077",
        "WEIR_CHECKPOINTS__TIMEOUT_SECONDS": str(_TIMEOUT),
        "WEIR_CHECKPOINTS__INTERVAL_SECONDS": "1",
        "WEIR_STORAGE__S3__REQUEST_TIMEOUT_SECONDS": "3",
        "WEIR_STORAGE__S3__TRANSFERS": "1",
    }
    slow = misbehaving("brings state slowly")
    settings = counting.configured(bucket, tmp_path / "another", slow, **elsewhere)
    seen: list[dict] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.5):
            seen.extend(status_of(counting.pipeline, settings)["restoring"])

    looking = threading.Thread(target=look)
    looking.start()
    began = time.monotonic()
    try:
        with capture_logs() as logs:
            [second] = run(counting.pipeline, settings, CAUGHT_UP, InMemoryExecutor())
    finally:
        ended.set()
        looking.join()
    assert time.monotonic() - began > 3 * _TIMEOUT
    fetched = second.checkpoint.totals["bytes_down"] - first.checkpoint.totals["bytes_down"]
    assert first.checkpoint.bytes_total > 500_000
    assert fetched <= 1.2 * first.checkpoint.bytes_total
    assert [row for row in counting.counted(bucket) if row["at"] < 100] == counting.rows_of(1) + counting.rows_of(2)
    assert {note["subtask"] for note in seen} == {0, 1}
    assert all(note["stage"] == "counts" and 0 <= note["bytes"] <= note["bytes_total"] for note in seen)
    assert any(note["bytes"] for note in seen)
    assert [line for line in logs if line["event"] == "state is being fetched"]
    assert status_of(counting.pipeline, settings)["restoring"] == []
    assert not [line for line in logs if line["log_level"] == "warning"], "no epoch failed"


@pytest.fixture
def subtask(tmp_path: Path, bucket: Bucket, proxy: Proxy, quick_retries: None) -> Subtask:
    """With 2 MiB of state in the bucket, and nothing of it on this host."""
    subtask = Subtask(tmp_path)
    subtask.storage = bucket.storage(proxy.port, max_attempts=1)
    return subtask


def _written(subtask: Subtask) -> tuple[snapshot.Snapshot, dict[bytes, bytes]]:
    draw = random.Random(3)
    entries = {f"key{number:05}".encode(): draw.randbytes(1024) for number in range(2048)}
    base = subtask.epoch(1, None, entries)
    subtask.forget_local()
    return base, entries


def _down(storage: Storage) -> int:
    return storage.request_counts.counts()["bytes_down"]


def test_a_restore_that_breaks_off_goes_on_in_the_middle_of_a_file(subtask: Subtask, proxy: Proxy):
    base, entries = _written(subtask)
    large = max(base.files, key=lambda file: file.bytes)
    cut: list[Request] = []

    def once(request: Request):
        if request.method == "GET" and request.at(large.path) and not cut:
            cut.append(request)
            return Cut()
        return None

    proxy.behave = once
    before = _down(subtask.storage)
    with pytest.raises(UnavailableError):
        snapshot.working_copy(subtask.storage, subtask.attempt(2), base)
    assert cut
    assert subtask.read(base) == entries
    assert _down(subtask.storage) - before <= 1.2 * sum(file.bytes for file in base.files)
    ranges = [request.headers.get("range") for request in proxy.requests if request.at(large.path)]
    assert any(asked and asked.startswith("bytes=") and asked != "bytes=0-" for asked in ranges), ranges


def test_a_file_that_rotted_while_a_restore_was_interrupted_is_fetched_again(subtask: Subtask, proxy: Proxy):
    base, entries = _written(subtask)
    large = max(base.files, key=lambda file: file.bytes)
    proxy.behave = lambda request: Cut() if request.method == "GET" and request.at(large.path) else None
    with pytest.raises(UnavailableError):
        snapshot.working_copy(subtask.storage, subtask.attempt(2), base)
    proxy.behave = lambda _: None
    left = [path for path in subtask.home.rglob("*") if path.is_file() and path.stat().st_size]
    assert left
    for path in left:
        with path.open("r+b") as file:
            file.write(b"rotten")
    assert subtask.read(base) == entries


def test_what_a_killed_restore_left_is_removed_once_nobody_builds_on_it(subtask: Subtask, proxy: Proxy):
    base, _ = _written(subtask)
    proxy.behave = lambda request: Cut() if request.method == "GET" and request.at(".sst") else None
    with pytest.raises(UnavailableError):
        snapshot.working_copy(subtask.storage, subtask.attempt(2), base)
    proxy.behave = lambda _: None
    assert list(subtask.home.glob(".restoring-*"))
    after = subtask.attempt(3)
    sweep(after, {base.attempt}, ["counts"], 1)
    assert list(subtask.home.glob(".restoring-*"))
    sweep(after, set(), ["counts"], 1)
    assert not list(subtask.home.glob(".restoring-*"))
