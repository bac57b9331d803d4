"""A standalone cluster whose workers share the storage root with the coordinator, and nothing else: not even the
project."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import duckdb
import pandas as pd
import polars as pl
import pytest

from tests.recovery import clustered
from tests.recovery.harness import Child, Site, child
from tests.recovery.small import until
from tests.tools.sampling import sampled
from tests.tools.spark_cluster import Cluster, cluster, kill_family
from weir.ownership.ownership import claimed
from weir.run import fsck
from weir.settings.configuration import PROJECT

_EPOCHS, _ROWS = 5, 200
_LAST_RESORT = 10**6  # an epoch that there is not


def _land(site: Site, landing: Path, gates: dict[int, Path], epochs: int = _EPOCHS) -> None:
    """A file for each epoch. gates: by epoch, what the rows of one key wait for."""
    landing.mkdir(parents=True)
    draw = random.Random(4)
    hidden = [str(PROJECT), str(site.root / "work" / "of the coordinator")]
    for epoch in range(1, epochs + 1):
        ids = [draw.randrange(50) for _ in range(_ROWS)]
        waits = str(gates[epoch]) if epoch in gates else None
        rows = {
            "id": ids,
            "group": [key % 7 for key in ids],
            "amount": [draw.randrange(99) for _ in ids],
            "hidden": [hidden[number % 2] for number in range(_ROWS)],
            "gate": [waits if key == ids[0] else None for key in ids],
        }
        pl.DataFrame(rows, schema_overrides={"gate": pl.String}).write_parquet(landing / f"{epoch:03}.parquet")


def _held_by(run: Child, gate: Path, attempts: int = 1) -> int:
    """One of the Python workers that wait at a gate, as soon as there are so many."""

    def waiting() -> list[Path]:
        assert run.process.poll() is None, run.output.read_text()
        return list(gate.parent.glob(f"{gate.name}.*"))

    until(lambda: len(waiting()) >= attempts, 240)
    return int(waiting()[0].suffix[1:])


_SPECULATING = {"spark.speculation": "true", "spark.speculation.multiplier": "1.1", "spark.speculation.quantile": "0.1"}
WAYS: dict[str, dict[str, Any]] = {
    "direct": {},
    "files": {"WEIR_SPARK__DIRECT_READ_MB": "0", "WEIR_SPARK__EXCHANGE": "blocks", "WEIR_SPARK__CONF": _SPECULATING},
    "staged": {"WEIR_SPARK__DIRECT_READ_MB": "0", "WEIR_SPARK__SECOND_HOP": "on", "WEIR_SPARK__CONF": _SPECULATING},
    "rows": {"WEIR_SPARK__DIRECT_READ_MB": "0", "WEIR_SPARK__EXCHANGE": "rows", "WEIR_SPARK__CONF": _SPECULATING},
}


def _site(root: Path, spark: Cluster, way: str, **options: str) -> Site:
    """A run of the cluster in which rows take this way to their subtasks; each file is an epoch."""
    conf = json.loads(spark.settings["WEIR_SPARK__CONF"]) | WAYS[way].get("WEIR_SPARK__CONF", {})
    given = {
        "WEIR_EPOCH__MAX_FILES": "1",
        "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "5",
        "WEIR_PIPELINES__CLUSTERED__PARAMS": json.dumps({"landing": str(root / "storage" / "landing")}),
        **spark.settings,
        **WAYS[way],
        **options,
        "WEIR_SPARK__CONF": json.dumps(conf),
    }
    return Site(root, given, clustered.pipeline, "tests.recovery.clustered")


def _assert_exact(site: Site, landing: Path) -> None:
    landed = f"read_parquet('{landing}/*.parquet')"
    columns = ["id", "group", "amount"]
    booked = site.table("grouped")[columns].sort_values(columns, ignore_index=True)
    rows = duckdb.sql(f'SELECT id, "group", amount FROM {landed} ORDER BY ALL').df()
    pd.testing.assert_frame_equal(booked, rows, check_dtype=False)
    for stage, key in (("by_id", "id"), ("by_group", "group")):
        replayed = duckdb.sql(
            f'SELECT "{key}", count(*) AS rows, sum(amount) AS total FROM {landed} GROUP BY ALL ORDER BY 1'
        )
        state = site.state(stage).sort_values(key, ignore_index=True)
        pd.testing.assert_frame_equal(state[[key, "rows", "total"]], replayed.df(), check_dtype=False)
    site.assert_no_orphans()


def _taken(site: Site) -> set[str | None]:
    """How rows came to both stages in the epochs of the checkpoints that are retained."""
    rows = map(json.loads, site.registry("checkpoints")["operators"])
    return {stats.get("exchange") for row in rows for stats in row.values()}


@pytest.mark.parametrize("way", sampled(["direct", "files", "staged", "rows"]))
def test_two_stages_are_exact_although_a_worker_joins_late_and_the_one_that_holds_a_subtask_is_killed(tmp_path, way):
    shared, landing = tmp_path / "site" / "storage", tmp_path / "site" / "storage" / "landing"
    with cluster(tmp_path / "cluster", shared, workers=1) as spark:
        site = _site(tmp_path / "site", spark, way)
        gates = {1: shared / "late", 2: shared / "killed"}
        _land(site, landing, gates, epochs=3)
        for path in (site.root / "work" / "of the coordinator", *gates.values()):
            path.parent.mkdir(exist_ok=True)
            path.touch()
        with child(site, "in a stage", _LAST_RESORT) as run:
            _held_by(run, gates[1])
            late = spark.add_worker()
            until(lambda: late.children(recursive=True), 240)  # its executor fetches the code only now
            gates[1].unlink()
            kill_family(spark.worker_of(_held_by(run, gates[2])).pid)
            gates[2].unlink()
            assert run.process.wait(240) == 0, run.output.read_text()
    _assert_exact(site, landing)


@pytest.mark.long
@pytest.mark.parametrize("way", ["files", "staged", "rows"])
def test_a_subtask_that_is_slow_is_run_twice_by_speculation_and_counts_once(tmp_path, way):
    shared, landing = tmp_path / "site" / "storage", tmp_path / "site" / "storage" / "landing"
    with cluster(tmp_path / "cluster", shared, workers=2) as spark:
        site = _site(tmp_path / "site", spark, way, WEIR_SPARK__PARALLELISM="3")
        gates = {epoch: shared / f"slow-{epoch}" for epoch in (2, 4)}
        _land(site, landing, gates)
        for gate in gates.values():
            gate.touch()
        with child(site, "in a stage", _LAST_RESORT) as run:
            for gate in gates.values():
                _held_by(run, gate, attempts=2)
                gate.unlink()
            assert run.process.wait(240) == 0, run.output.read_text()
        until(spark.executors_have_ended, 60)
        winner = min((site.storage / "tables" / "grouped" / "data").glob("g*-e2/*.parquet"))
        twin = winner.with_name(f"{winner.name.partition('-')[0]}-{uuid4().hex}.parquet")
        shutil.copy(winner, twin)  # not each of these runs has a twin that is as slow as that
        with child(site, "in a stage", _LAST_RESORT) as run:  # takes away what the slower twins have uploaded
            assert run.process.wait(240) == 0, run.output.read_text()
        with claimed(site.pipeline, site.settings) as owner:  # and their rows for the table, which are in no log
            repaired = fsck.repair(owner.context)
    assert not repaired.publish and not repaired.drop
    deleted = {site.storage / finding.path for finding in repaired.delete}
    assert twin in deleted and all(twin.parent.parent in path.parents for path in deleted)
    _assert_exact(site, landing)


@pytest.mark.long
@pytest.mark.parametrize("adaptive", ["false", "true"])
def test_blocks_on_storage_are_proven_and_leave_nothing_although_the_coordinator_is_killed_between_two_jobs(
    tmp_path, adaptive
):
    """A block is damaged in the second epoch, which is declined; of a later one the coordinator is killed once all its
    blocks are there."""
    shared, landing = tmp_path / "site" / "storage", tmp_path / "site" / "storage" / "landing"
    with cluster(tmp_path / "cluster", shared, workers=2) as spark:
        conf = {**WAYS["staged"]["WEIR_SPARK__CONF"], "spark.sql.adaptive.enabled": adaptive}
        site = _site(tmp_path / "site", spark, "staged", WEIR_CHECKPOINTS__NUM_RETAINED="9")
        conf = json.loads(site.options["WEIR_SPARK__CONF"]) | conf
        site = replace(site, options={**site.options, "WEIR_SPARK__CONF": json.dumps(conf)})
        _land(site, landing, {})
        later = sorted(landing.iterdir())[3:]
        for file in later:
            file.rename(file.with_suffix(".later"))
        with child(site, "between two jobs", 2) as run:
            run.wait_until_held()
            blocks = [site.storage / name for name in site.left_of_exchange()]
            assert blocks and all("g1-e2" in str(block) for block in blocks)
            for block in blocks:
                data = bytearray(block.read_bytes())
                data[-1] ^= 1
                block.write_bytes(data)
            run.release.touch()
            assert run.process.wait(240) == 0, run.output.read_text()
            assert "xxh3 is not the recorded one" in run.output.read_text()
        assert not site.left_of_exchange() and "files-staged" in _taken(site)
        for file in (run.marker, run.release):
            file.unlink()
        for file in later:
            file.with_suffix(".later").rename(file)
        with child(site, "between two jobs", (site.head() or 0) + 2) as run:
            run.wait_until_held()
            assert site.left_of_exchange()
            kill_family(run.process.pid)
            run.process.wait()
        assert site.left_of_exchange(), "what the next owner has to remove"
        with child(site, "in a stage", _LAST_RESORT) as run:
            assert run.process.wait(240) == 0, run.output.read_text()
    _assert_exact(site, landing)
