"""Blocks of the exchange in a bucket, between workers that share nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from state_ops.checkpoints.registry import Registry
from tests.storage import counting
from tests.storage.conftest import Bucket
from tests.tools.spark_cluster import cluster
from weir.settings.configuration import PROJECT


@pytest.mark.s3
def test_blocks_go_through_a_bucket_and_are_removed(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    secrets = {"ACCESS_KEY_ID": "BUCKETS_ID", "SECRET_ACCESS_KEY": "BUCKETS_SECRET"}
    for variable in secrets.values():  # workers of the cluster get no variable of Weir's
        monkeypatch.setenv(variable, "test")
    counting.land(bucket, *range(1, 7), more=200)
    with cluster(tmp_path / "cluster", tmp_path / "shared", workers=2) as spark:
        given = counting.environment(
            bucket,
            **spark.settings,
            **{f"WEIR_STORAGE__S3__{name}__ENV": variable for name, variable in secrets.items()},
            WEIR_LOCAL__WORK_DIR=str(tmp_path / "work"),
            WEIR_SPARK__PARALLELISM="4",
            WEIR_SPARK__DIRECT_READ_MB="0",
            WEIR_SPARK__SECOND_HOP="on",
        )
        command = [sys.executable, "-m", "weir.cli.main", "run", "counting", "--until-caught-up"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")} | given
        ran = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=500)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    plain = [row for row in counting.counted(bucket) if row["at"] < 100]
    assert plain == [row for number in range(1, 7) for row in counting.rows_of(number)]
    head = Registry(bucket.storage(prefix="root/counting"), "counting/main").head()
    assert head is not None and head.operators["counts"].exchange == "files-staged", json.dumps(head.totals)
    assert not [key for key in bucket.objects() if "/exchange/" in key]
