"""On a cluster of several hosts a subtask runs where its state is, and anywhere where that host is gone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.recovery.placed import TURNS
from tests.recovery.small import until
from tests.tools.spark_cluster import cluster, kill_family
from weir.execution.spark.placement import fair
from weir.settings.configuration import PROJECT

EPOCHS, SUBTASKS = 12, 5


@pytest.mark.parametrize(
    ("hosts", "alive", "expected"),
    [
        ("aabb", "ab", "aabb"),
        ("aabb", "a", "aa.."),
        ("aaaa", "ab", "aa.."),
        ("aaab.", "ab", "aaab."),
        ("aaaa", "abcde", "a..."),
        ("....", "", "...."),
        ("aa", "", ".."),
    ],
)
def test_a_host_is_preferred_by_its_share_as_long_as_it_lives(hosts: str, alive: str, expected: str):
    preferred = fair([host.replace(".", "") for host in hosts], set(alive))
    assert "".join(host or "." for host in preferred) == expected


def go_on(run: subprocess.Popen[str]) -> list[Any]:
    assert run.stdin is not None and run.stdout is not None
    run.stdin.write("go on\n")
    run.stdin.flush()
    return json.loads(run.stdout.readline())


@pytest.mark.long
@pytest.mark.parametrize(("way", "keys"), [("direct", 100), ("files-staged", 1_000_000)])
def test_subtasks_stay_on_their_hosts_and_leave_one_that_is_gone(tmp_path: Path, way: str, keys: int):
    shared = tmp_path / "storage"
    with cluster(tmp_path / "cluster", shared, workers=2) as spark:
        landing = shared / "landing"
        landing.mkdir()
        env = {
            "WEIR_STORAGE__ROOT": str(shared),
            "WEIR_LOCAL__WORK_DIR": str(tmp_path / "work"),
            "WEIR_PIPELINES__PLACED__OBJECT": "tests.recovery.placed:pipeline",
            "WEIR_PIPELINES__PLACED__PARAMS": json.dumps({"landing": str(landing)}),
            "WEIR_SPARK__PARALLELISM": str(SUBTASKS),
            "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "5",
            **spark.settings,
        }
        if way != "direct":  # the state of so many keys is what `second_hop: auto` finds worth two jobs
            env |= {"WEIR_SPARK__DIRECT_READ_MB": "0"}
        command = [sys.executable, "-m", "tests.recovery.placed", json.dumps(env), str(EPOCHS), str(landing), str(keys)]
        with subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdin is not None and run.stdout is not None
            moved, stayed, subtasks = json.loads(run.stdout.readline())
            assert moved <= 2 and stayed == EPOCHS * SUBTASKS - moved, "the first epoch is not always even"
            assert subtasks == [2, 3]

            kill_family(spark.workers[0].pid)
            moved_then, _, subtasks = go_on(run)
            assert 2 <= moved_then - moved <= 3 and subtasks == [5], "those of the host that is gone, once"

            added = spark.add_worker()
            until(lambda: added.children(recursive=True), 240)  # its executor
            moved_last, _, subtasks = go_on(run)
            assert moved_last - moved_then == 2 and subtasks == [2, 3], "the new host gets its share"
            assert run.wait(60) == 0
    sums = pl.read_delta(str(shared / "placed" / "tables" / "sums"))
    newest = sums.group_by("key").agg(pl.col("rows").max()).sort("key")
    assert newest["rows"].to_list() == [TURNS * EPOCHS] * 100 + [1] * (keys - 100)
    checkpoints = pl.read_delta(str(shared / "placed" / "registry" / "checkpoints"))
    newest_operators = json.loads(checkpoints.sort("id")["operators"][-1])
    assert newest_operators["sums"]["exchange"] == way
