"""A command imports what it needs and no more: `weir status` is asked every few seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import typer

from configs.settings import PROJECT
from pipelines.cli import main
from tests.recovery.small import Bank

_STATUS = """
import json, sys
from pipelines.cli.main import main
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)))
"""
_STAGE = """
from pipelines.api import Pipeline, State, Timestamp, ValueState, delta, files, stage
import polars as pl

class Account(State):
    rows: int = 0
    name: str = ""
    share: float = 0.0
    since: Timestamp | None = None

@stage("accounts", source=files("{landing}/*.parquet", name="landing"), key="id", state=Account, sink=delta.append("booked"))
def accounts(rows: pl.DataFrame, state: ValueState, epoch) -> pl.DataFrame:
    return rows

pipeline = Pipeline("small", (accounts,), max_parallelism=8)
"""


def test_status_loads_neither_pandas_nor_spark_nor_what_runs_a_pipeline(tmp_path: Path):
    """pyarrow imports pandas by itself when a Python value becomes Arrow's, or a time with a zone Python's: status
    reads checkpoints without either."""
    bank = Bank.at(tmp_path / "site")
    bank.epochs(1, 2)
    (tmp_path / "lean.py").write_text(_STAGE)
    environment = {
        **os.environ,
        **bank.site.env,
        "WEIR_PIPELINES__SMALL__OBJECT": "lean:pipeline",
        "PYTHONPATH": os.pathsep.join([str(PROJECT), str(tmp_path)]),
    }
    command = [sys.executable, "-c", _STATUS, "status", "small", "--json"]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    facts, loaded = done.stdout.rsplit("\n", 2)[:2]
    assert json.loads(facts)["last_checkpoint"]["id"] == 2
    packages = {name.partition(".")[0] for name in json.loads(loaded)}
    heavy = {"pandas", "pyspark", "py4j", "dagster", "great_expectations", "duckdb", "matplotlib", "prometheus_client"}
    assert not packages & heavy
    rooms = {".".join(name.split(".")[:3]) for name in json.loads(loaded) if name.startswith("pipelines.runtime.")}
    unneeded = {"operations", "run", "epoch", "restore", "gates", "execution", "task"}
    assert not rooms & {f"pipelines.runtime.{room}" for room in unneeded}


def test_each_command_of_the_table_is_the_one_of_its_module():
    commands = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]
    assert [command.name for command in commands.values()] == list(commands)


def test_the_list_of_commands_loads_none_of_their_modules():
    command = [sys.executable, "-c", _STATUS, "--help"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shown, loaded = done.stdout.rsplit("\n", 2)[:2]
    assert all(f" {name} " in shown for name in main._MODULES)
    packages = {name.partition(".")[0] for name in json.loads(loaded)}
    assert not packages & {"numpy", "pyarrow", "polars", "pydantic", "structlog", "deltalake"}


def test_the_list_of_commands_says_of_each_what_it_says_itself():
    commands = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        assert " ".join(str(main._summary(name)).split()) == " ".join(str(command.help).split())
