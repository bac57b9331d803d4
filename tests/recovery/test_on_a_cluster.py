"""A master that is not local: executors are JVMs of their own, and a stage's rows go to the next one through storage."""

from __future__ import annotations

import random
from contextlib import suppress

import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from configs.settings import PROJECT
from tests.recovery import clustered
from tests.recovery.harness import Child, Site, child
from tests.recovery.small import until

_FILES, _ROWS = 8, 200
_LAST_RESORT = 10**6  # an epoch that there is not


def _executors(run: Child) -> list[psutil.Process]:
    found = []
    for one in run.family():
        with suppress(psutil.Error):
            if any("CoarseGrainedExecutorBackend" in word for word in one.cmdline()):
                found.append(one)
    return found


def test_two_stages_are_exact_on_a_cluster_although_an_executor_dies(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))  # the executors' workers begin elsewhere
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    options = {
        "WEIR_SPARK__MASTER": "local-cluster[2,1,1024]",
        "WEIR_EPOCH__MAX_FILES": "1",
        "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "5",
    }
    site = Site(tmp_path / "site", options, clustered.pipeline, "tests.recovery.clustered")
    site.landing.mkdir(parents=True)
    draw, parts = random.Random(4), []
    for number in range(_FILES):
        ids = [draw.randrange(50) for _ in range(_ROWS)]
        part = pd.DataFrame({"id": ids, "group": [one % 7 for one in ids], "amount": [draw.randrange(99) for _ in ids]})
        pq.write_table(pa.Table.from_pandas(part, preserve_index=False), site.landing / f"{number:03}.parquet")
        parts.append(part)
    with child(site, "in a stage", _LAST_RESORT) as run:
        log = site.storage / "tables" / "grouped" / "_delta_log"
        until(lambda: len(list(log.glob("[0-9]*.json"))) > 1 or run.process.poll() is not None, 240)
        assert run.process.poll() is None, run.output.read_text()
        _executors(run)[0].kill()
        assert run.process.wait(240) == 0, run.output.read_text()
    rows = pd.concat(parts)
    columns = ["id", "group", "amount"]
    booked = site.table("grouped")[columns].sort_values(columns, ignore_index=True)
    pd.testing.assert_frame_equal(booked, rows.sort_values(columns, ignore_index=True), check_dtype=False)
    for stage, key in (("by_id", "id"), ("by_group", "group")):
        wanted = rows.groupby(key)["amount"].agg(rows="count", total="sum").reset_index()
        found = site.state(stage).sort_values(key, ignore_index=True)
        pd.testing.assert_frame_equal(found[[key, "rows", "total"]], wanted, check_dtype=False)
    site.assert_no_orphans()
