"""The engine on S3: fencing, the registry, retention, restores and whole runs, as on a local disk."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake.exceptions import CommitFailedError, DeltaError

from state_ops.checkpoints import retention
from state_ops.checkpoints.reader_holds import HoldWatcher
from state_ops.checkpoints.registry import Registry
from state_ops.delta import fenced_table
from state_ops.errors import ConfigurationError, DamageError, FencedError
from state_ops.ids import Generation
from state_ops.storage.storage import Storage, UnavailableError
from tests.state_ops.checkpoints.test_registry import APP, a_checkpoint, a_file, put
from tests.storage import counting
from tests.storage.conftest import Bucket
from tests.storage.proxy import Proxy, Request
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run

CAUGHT_UP = RunOptions(until_caught_up=True)
Opened = Callable[[], Storage]
Misbehaving = Callable[[str], int]


# -- the registry


@pytest.mark.long
def test_the_rows_of_many_checkpoints_are_asked_for_together(bucket: Bucket, proxy: Proxy):
    registry = Registry(bucket.storage(), APP)
    registry.take_over()
    for id in range(1, 9):
        put(registry, id, id - 1 or None, [a_file(f"{id}.sst")])
    met = threading.Barrier(4)

    def behave(request: Request) -> None:
        if request.method == "GET" and request.at("registry/checkpoints/data/"):
            met.wait(10)  # where they come one by one it breaks, and so does the answer

    proxy.behave = behave
    reader = Registry(bucket.storage(proxy.port, max_attempts=1), APP)
    assert [row.id for row in reader.checkpoints()] == list(range(1, 9))
    assert not met.broken


# -- fencing


def test_of_two_takers_one_wins(anywhere: Opened):
    first = Registry(anywhere(), APP)
    assert first.take_over() == 1
    together = threading.Barrier(2)

    def take(_: int) -> Generation | str:
        mine = Registry(anywhere(), APP)
        together.wait()
        try:
            return mine.take_over(after=Generation(1))
        except FencedError:
            return "fenced"

    with ThreadPoolExecutor(2) as pool:
        assert sorted(map(str, pool.map(take, range(2)))) == ["2", "fenced"]
    assert Registry(anywhere(), APP).generation() == 2


def test_a_zombie_is_fenced_and_its_successor_goes_on(anywhere: Opened):
    zombie = Registry(anywhere(), APP)
    zombie.take_over()
    put(zombie, 1, None, [a_file("1.sst")])
    successor = Registry(anywhere(), APP)
    assert successor.take_over() == 2
    with pytest.raises(FencedError):
        put(zombie, 2, 1, [a_file("2.sst")])
    with pytest.raises(FencedError):
        zombie.drop_rows(Generation(1), [a_checkpoint(1, None).id])
    put(successor, 2, 1, [a_file("2.sst", "b")], generation=2)
    reader = Registry(anywhere(), APP)
    assert [(row.id, row.generation) for row in reader.checkpoints()] == [(1, 1), (2, 2)]


def test_pruning_and_cleaning_leave_exactly_what_is_named(anywhere: Opened):
    storage = anywhere()
    old = Registry(storage, APP)
    old.take_over()
    shared, gone = a_file("shared.sst"), a_file("gone.sst")
    lost = replace(a_file("lost.sst"), path="state/counts/g1-e9/0-dead/lost.sst")
    for file in (shared, gone, lost):
        storage.put_bytes(file.path, b"x" * 10)
    put(old, 1, None, [shared, gone])
    registry = Registry(anywhere(), APP)
    generation = registry.take_over()
    put(registry, 2, 1, [replace(shared, new=False)], generation=generation)
    listings = {row.id: registry.files(row) for row in registry.checkpoints()}
    retention.apply(
        registry, storage, generation, retention.plan(registry.checkpoints(), listings, keep=1), HoldWatcher()
    )
    storage.put_bytes("registry/checkpoints/data/00000000000000000002-lost.parquet", b"x")
    registry.remove_unnamed(generation)
    listed = [registry.files(row) for row in registry.checkpoints()]
    for orphan in retention.orphans(storage, listed, generation):
        storage.delete(orphan.path)
    assert [file.path for file in storage.list("state")] == [shared.path]
    assert [row.id for row in registry.checkpoints()] == [2]
    assert not [file for file in storage.list("registry") if "lost.parquet" in file.path]
    assert not [name for name in storage.list_dirs("registry") if name.startswith(fenced_table.PROBE)]


# -- what storage must be able to do


def test_a_store_that_takes_a_second_conditional_put_is_refused(bucket: Bucket, misbehaving: Misbehaving):
    """As a store does that does not know the header: nothing would fence a zombie there."""
    with pytest.raises(ConfigurationError, match="lets two writers commit the same table version"):
        Registry(bucket.storage(misbehaving("ignores If-None-Match")), APP).take_over()
    assert bucket.objects() == [], "the probe is gone, and there is no registry"


@pytest.mark.long
def test_delta_commits_by_conditional_puts(bucket: Bucket, misbehaving: Misbehaving):
    Registry(bucket.storage(), APP).take_over()
    with pytest.raises((CommitFailedError, FencedError)):
        Registry(bucket.storage(misbehaving("has every version already")), APP).take_over()
    assert Registry(bucket.storage(), APP).generation() == 1


def test_delta_gives_a_store_that_hangs_up_too(bucket: Bucket, misbehaving: Misbehaving):
    """delta-rs has a client of its own: it gets the same limits."""
    storage = bucket.storage(misbehaving("hangs"), request_timeout_seconds=0.3, max_attempts=2)
    started = time.monotonic()
    with pytest.raises((DeltaError, OSError), match="timed out"):
        fenced_table.open_table(storage, "registry/checkpoints")
    assert time.monotonic() - started < 20


# -- case 10: a listing that fails


def test_case_10_nothing_is_deleted_when_a_listing_fails(bucket: Bucket, misbehaving: Misbehaving, quick_retries: None):
    storage = bucket.storage()
    old = Registry(storage, APP)
    old.take_over()
    put(old, 1, None, [a_file("1.sst")])
    lost = "state/counts/g1-e9/0-dead/lost.sst"
    for path in (a_file("1.sst").path, lost, "registry/checkpoints/data/00000000000000000002-lost.parquet"):
        storage.put_bytes(path, b"x" * 10)

    watched = bucket.storage(misbehaving("refuses to list what may be deleted"), max_attempts=2)
    registry = Registry(watched, APP)
    generation = registry.take_over()
    listings = [registry.files(row) for row in registry.checkpoints()]
    before = bucket.objects()
    with pytest.raises(UnavailableError):
        retention.orphans(watched, listings, generation)
    with pytest.raises(UnavailableError):
        registry.remove_unnamed(generation)
    assert bucket.objects() == before
    assert [file.path for file in retention.orphans(storage, listings, generation)] == [lost]


# -- whole runs


def test_a_pipeline_lives_in_a_bucket(bucket: Bucket, tmp_path: Path):
    counting.land(bucket, 1, 2)
    settings = counting.configured(bucket, tmp_path / "work")
    reports = list(run(counting.pipeline, settings, CAUGHT_UP, InMemoryExecutor()))
    assert [report.checkpoint.id for report in reports] == [1, 2]
    assert counting.counted(bucket) == counting.rows_of(1) + counting.rows_of(2)

    # Another host goes on: nothing but the bucket is left.
    shutil.rmtree(tmp_path / "work")
    counting.land(bucket, 3)
    [report] = run(counting.pipeline, settings, CAUGHT_UP, InMemoryExecutor())
    assert counting.counted(bucket) == [row for number in (1, 2, 3) for row in counting.rows_of(number)]

    registry = Registry(bucket.storage(prefix="root/counting"), counting.pipeline.app_id)
    named = {f"root/counting/{file.path}" for file in registry.files(report.checkpoint) if file.kind == "state"}
    assert {key for key in bucket.objects() if "/state/" in key} == named, (
        "pruned objects are gone, the others are there"
    )
    assert bucket.half_done() == []


@pytest.mark.long
def test_damage_in_the_bucket_is_found_before_it_is_used(bucket: Bucket, tmp_path: Path):
    counting.land(bucket, 1)
    settings = counting.configured(bucket, tmp_path / "work")
    list(run(counting.pipeline, settings, CAUGHT_UP, InMemoryExecutor()))
    sst = next(key for key in bucket.objects() if key.endswith(".sst"))
    flipped = bytearray(bucket.content(sst))
    flipped[len(flipped) // 2] ^= 1
    bucket.client.put_object(Bucket=bucket.name, Key=sst, Body=bytes(flipped))
    shutil.rmtree(tmp_path / "work")
    counting.land(bucket, 2)
    with pytest.raises(DamageError, match="altered or truncated") as damage:
        list(run(counting.pipeline, settings, CAUGHT_UP, InMemoryExecutor()))
    assert sst.removeprefix("root/") in str(damage.value)
    assert counting.counted(bucket) == counting.rows_of(1)


@pytest.mark.long
def test_a_throttled_bucket_slows_a_run_down_and_no_more(bucket: Bucket, misbehaving: Misbehaving, tmp_path: Path):
    """A fifth of the requests is refused, whoever asks: Weir, delta-rs or pyarrow."""
    counting.land(bucket, 1, 2)
    port = misbehaving("throttles a fifth of the requests")
    settings = counting.configured(bucket, tmp_path / "work", port, WEIR_STORAGE__S3__MAX_ATTEMPTS="8")
    list(run(counting.pipeline, settings, CAUGHT_UP, InMemoryExecutor()))
    assert counting.counted(bucket) == counting.rows_of(1) + counting.rows_of(2)
