"""What Spark may do to rows on their way to subtasks, and slices that ask much of it: results are exact, in a time that
the number of files bounds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from benchmarks.harness import cpu_seconds
from tests.recovery import totals
from tests.recovery.harness import Site
from tests.recovery.totals import WAYS, assert_exact, land
from tests.tools.connect_server import connect_server
from tests.tools.sampling import sampled
from weir.execution import exchange
from weir.settings.configuration import PROJECT

SHUFFLES = [exchange.FILES, exchange.CUT, exchange.ROWS]
_SHAPES = [(500, 40), (1, 1), (0, 1), (0, 1), (300, 2), (300, 40)]
_SECONDS, _SECONDS_A_FILE = 10.0, 0.004  # of all processes: measured 0.8 and 0.0006 to 0.0013


def _site(root: Path, way: str, **options: str) -> Site:
    return Site(root, {"WEIR_EPOCH__MAX_FILES": "2", **WAYS[way], **options}, totals.pipeline, totals.__name__)


@pytest.mark.parametrize("is_adaptive", sampled(["true", "false"]))
@pytest.mark.parametrize("way", sampled(SHUFFLES))
def test_rows_are_exact_whether_plans_are_adaptive_or_not(tmp_path: Path, spark: SparkSession, way, is_adaptive):
    site = _site(tmp_path, way, WEIR_SPARK__PARALLELISM="5")
    land(site, _SHAPES)
    spark.conf.set("spark.sql.adaptive.enabled", is_adaptive)  # of a session that is there already
    try:
        reports = site.run()
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", "false")
    taken = {report.checkpoint.operators["totals"].exchange for report in reports}
    assert way in taken and taken <= {way, None}
    assert_exact(site)


@pytest.mark.long
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("count", sampled([500, 10_000]))
@pytest.mark.parametrize("way", sampled([exchange.FILES, exchange.DIRECT]))
def test_a_slice_of_very_many_files_takes_time_by_their_number(tmp_path: Path, way, count):
    site = _site(tmp_path, way, WEIR_EPOCH__MAX_FILES=str(count), WEIR_RUN__POLL_SECONDS="60")  # a poll lists them all
    land(site, [(5, 100)] * count)
    used = cpu_seconds()
    (report,) = site.run()
    assert cpu_seconds() - used < _SECONDS + _SECONDS_A_FILE * count
    assert report.checkpoint.operators["totals"].exchange == way
    assert_exact(site)


@pytest.mark.long
def test_blocks_are_exact_on_a_spark_connect_server(tmp_path: Path):
    with connect_server(tmp_path / "server") as master:
        for way in (exchange.FILES, exchange.CUT):
            site = _site(tmp_path / way, way, WEIR_SPARK__MASTER=master, WEIR_CHECKPOINTS__NUM_RETAINED="9")
            land(site, _SHAPES)
            command = [sys.executable, "-m", "weir.cli.main", "run", "totals", "--until-caught-up"]
            env = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")} | site.env
            ran = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=240)
            assert ran.returncode == 0, ran.stdout + ran.stderr
            assert way in totals.ways_taken(site) <= {way, None}
            assert_exact(site)
