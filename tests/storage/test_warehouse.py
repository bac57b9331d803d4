"""Tables elsewhere in S3, of every kind, and files in nested directories there: killed, raced, refused, and optimised
by others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from state_ops.storage.storage import Storage
from tests.storage import warehouse
from tests.storage.conftest import Bucket
from tests.storage.proxy import Proxy, Request
from tests.storage.warehouse import TABLES, expected, opened, stored
from tests.tools.sampling import sampled
from weir.connectors.delta import replace_partitions, upsert
from weir.execution.in_process import InMemoryExecutor
from weir.run import fsck, maintenance
from weir.run.run import RunOptions, run
from weir.settings import configuration as settings
from weir.settings.configuration import PROJECT

Misbehaving = Callable[[str], int]


def caught_up(bucket: Bucket, work: Path, port: int | None = None) -> None:
    asked = RunOptions(until_caught_up=True)
    configured = settings.load(warehouse.environment(bucket, work, port))
    list(run(warehouse.pipeline, configured, asked, InMemoryExecutor()))


def assert_exact(bucket: Bucket, work: Path, *numbers: int) -> Storage:
    """All tables are those of these files, and storage is sound."""
    storage, rows = bucket.storage(prefix="warehouse"), expected(*numbers)
    for table in TABLES:
        assert stored(storage, table) == rows[table]
    assert not fsck.examine(warehouse.pipeline, settings.load(warehouse.environment(bucket, work))).findings
    assert not bucket.half_done()
    return storage


@pytest.mark.parametrize(("table", "when"), sampled((table, when) for table in TABLES for when in ("after", "before")))
def test_a_publish_that_was_killed_is_made_good_although_others_optimise(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, table: str, when: str
):
    """Killed as the store gets the entry of the table's fourth epoch, or has just carried it out."""
    warehouse.land(bucket, 1, 2, 3)
    caught_up(bucket, tmp_path / "work")
    next = f"warehouse/{table}/_delta_log/{opened(bucket.storage(prefix='warehouse'), table).version() + 1:020}.json"
    died = threading.Event()

    def behave(request: Request) -> None:
        if request.method == "PUT" and request.at(next) and not died.is_set():
            assert request.headers["if-none-match"] == "*"
            if when == "after":
                client = bucket.client
                client.put_object(Bucket=bucket.name, Key=next, Body=request.body, IfNoneMatch="*")
            os.kill(child.pid, signal.SIGKILL)
            died.set()

    warehouse.land(bucket, 4)
    proxy.behave = behave
    environment = {**os.environ, **warehouse.environment(bucket, tmp_path / "child", proxy.port)}
    child = subprocess.Popen([sys.executable, "-m", "tests.storage.warehouse"], cwd=PROJECT, env=environment)
    assert child.wait(60) == -signal.SIGKILL
    storage = bucket.storage(prefix="warehouse")
    opened(storage, table).optimize.compact()
    warehouse.land(bucket, 5)
    caught_up(bucket, tmp_path / "work")
    assert_exact(bucket, tmp_path / "work", 1, 2, 3, 4, 5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("table", "module", "asked"),
    [("totals", upsert, "_merged"), ("days", replace_partitions, "within")],
)
def test_whoever_optimises_while_a_publish_is_made_is_respected(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, module: ModuleType, asked: str
):
    warehouse.land(bucket, 1, 2, 3)
    caught_up(bucket, tmp_path / "work")
    original, optimised = getattr(module, asked), []

    def overtaken(*arguments: Any) -> Any:
        change = original(*arguments)
        if not optimised:
            optimised.append(opened(bucket.storage(prefix="warehouse"), table).optimize.z_order(["id"]))
        return change

    monkeypatch.setattr(module, asked, overtaken)
    warehouse.land(bucket, 4)
    caught_up(bucket, tmp_path / "work")
    assert optimised[0]["numFilesRemoved"]
    assert_exact(bucket, tmp_path / "work", 1, 2, 3, 4)


@pytest.mark.long
@pytest.mark.parametrize(
    "behaviour", ["loses its answer to the first claim of each object", "is busy with each object at first"]
)
def test_a_store_that_answers_badly_gets_each_commit_once(
    bucket: Bucket, misbehaving: Misbehaving, tmp_path: Path, quick_retries: None, behaviour: str
):
    warehouse.land(bucket, 1, 2, 3)
    caught_up(bucket, tmp_path / "work", misbehaving(behaviour))
    storage = assert_exact(bucket, tmp_path / "work", 1, 2, 3)
    for table in TABLES:
        published = [
            entry["weir.checkpoint"] for entry in opened(storage, table).history() if "weir.checkpoint" in entry
        ]
        assert published == ["3", "2", "1"]


@pytest.mark.long
def test_a_rewind_takes_tables_in_a_bucket_back(bucket: Bucket, tmp_path: Path):
    warehouse.land(bucket, 1, 2, 3, 4)
    caught_up(bucket, tmp_path / "work")
    configured = settings.load(warehouse.environment(bucket, tmp_path / "work"))
    maintenance.rewind(warehouse.pipeline, configured, 2)
    assert_exact(bucket, tmp_path / "work", 3, 1)  # their days come first
    caught_up(bucket, tmp_path / "work")
    assert_exact(bucket, tmp_path / "work", 1, 2, 3, 4)
