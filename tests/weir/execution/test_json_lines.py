"""Log lines as JSON in every process of a run on Spark: the coordinator, the Python workers, the JVM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from state_ops import logs
from tests.recovery.small import Bank
from tests.state_ops.test_logs import lines
from weir.settings.configuration import PROJECT

_STAGE = """
import logging, warnings

import polars as pl
import structlog

from weir import Epoch, Pipeline, State, ValueState, agg, delta, files, stage

class Account(State):
    rows: int = 0

@stage("accounts", source=files("{landing}/*.parquet", name="landing"), key="id", state=Account, sink=delta.append("booked"))
def accounts(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    state.fold(rows, rows=agg.count())
    structlog.get_logger("author").info("by structlog", subtask=epoch.subtask)
    logging.getLogger("author").warning("by logging\\nGrüße")
    warnings.warn(f"by warnings in epoch {epoch.id}")
    return rows

pipeline = Pipeline("small", (accounts,), max_parallelism=8)
"""


@pytest.mark.long
def test_every_process_of_a_run_writes_json(tmp_path: Path):
    bank = Bank.at(tmp_path / "site")
    bank.land(1, 2)
    (tmp_path / "talking.py").write_text(_STAGE)
    env = {
        **os.environ,
        **bank.site.env,
        logs.FORMAT: "json",
        "WEIR_PIPELINES__SMALL__OBJECT": "talking:pipeline",
        "WEIR_SPARK__CONF": json.dumps({"spark.log.level": "INFO"}),
        "PYTHONPATH": os.pathsep.join([str(PROJECT), str(tmp_path)]),
    }
    command = [sys.executable, "-m", "weir.cli.main", "run", "small", "--until-caught-up"]
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    events = [fields["event"] for fields in lines(done.stderr)]
    assert events.count("epoch") == 2

    written = (bank.site.settings.work_dir / "spark.log").read_text().splitlines()
    # The JVM itself, and Spark as it starts, say something beside log4j.
    fields = [json.loads(line) for line in written if line.startswith("{")]
    others = [line for line in written if not line.startswith("{")]
    beside = ("WARNING: ", "Picked up ", "OpenJDK ", "Using Spark", "Setting ", "To adjust logging level")
    assert not [line for line in others if not line.startswith(beside)]
    assert all({"timestamp", "level", "logger", "event"} <= entry.keys() for entry in fields)
    of_workers = {(entry["logger"], entry["event"]) for entry in fields}
    assert {("author", "by structlog"), ("author", "by logging\nGrüße")} <= of_workers
    assert any(logger == "py.warnings" and event.startswith("by warnings in epoch") for logger, event in of_workers)
    of_the_jvm = [entry for entry in fields if entry["logger"].startswith("org.apache.spark")]
    assert of_the_jvm and {entry["level"] for entry in of_the_jvm} <= {"info", "warn", "error"}
