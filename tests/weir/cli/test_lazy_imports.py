"""A command imports what it needs and no more: `weir status` is asked every few seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import typer

from tests.recovery.small import Bank
from tests.tools.sampling import sampled
from weir.cli import main
from weir.settings.configuration import PROJECT

_STATUS = """
import json, sys
from weir.cli.main import main
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)))
"""
_STAGE = """
from weir import Pipeline, State, Timestamp, ValueState, delta, files, stage
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


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Of a pipeline with two checkpoints, whose module imports little."""
    root = tmp_path_factory.mktemp("lean")
    bank = Bank.at(root / "site")
    bank.epochs(1, 2)
    (root / "lean.py").write_text(_STAGE)
    code = {"WEIR_PIPELINES__SMALL__OBJECT": "lean:pipeline", "PYTHONPATH": os.pathsep.join([str(PROJECT), str(root)])}
    return {**os.environ, **bank.site.env, **code}


def loaded_by(arguments: str, environment: dict[str, str]) -> tuple[str, list[str], str]:
    """What a command prints, the modules that it has loaded, and what it says on stderr."""
    command = [sys.executable, "-c", _STATUS, *arguments.split()]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    printed, loaded = done.stdout.rsplit("\n", 2)[:2]
    return printed, json.loads(loaded), done.stderr


@pytest.mark.parametrize(
    "command",
    sampled(
        [
            "state get small accounts --key k0",
            "checkpoints small",
            "savepoints small",
            "forks small",
            "state scan small accounts",
            "state count small accounts",
            "fsck small",
            "prune small --dry-run",
            "top small --once",
        ]
    ),
)
def test_a_command_that_reads_loads_neither_pandas_nor_spark_nor_structlog(environment, command):
    """pyarrow would import pandas at the first value that it converts, and structlog brings asyncio and more of
    rich."""
    _, loaded, _ = loaded_by(command, environment)
    assert not {name.partition(".")[0] for name in loaded} & {"pandas", "pyspark", "dagster", "structlog"}


@pytest.mark.long
def test_a_command_that_reads_takes_frames_of_pandas_and_logs_to_stderr(environment, tmp_path):
    """An author's module may import pandas and structlog, and do with them at once what it likes."""
    (tmp_path / "heavy.py").write_text(
        "import structlog, pyarrow as pa\nstructlog.get_logger().warning('loaded')\nfrom lean import pipeline\nimport pandas as pd\n"
        "assert pa.table({'a': [1]}).to_pandas().equals(pd.DataFrame({'a': [1]}))\n"
        "assert pa.Table.from_pandas(pd.DataFrame({'a': [pd.NaT, pd.Timestamp(0)]}))['a'].null_count == 1\n"
    )
    path = os.pathsep.join([environment["PYTHONPATH"], str(tmp_path)])
    heavy = {**environment, "PYTHONPATH": path, "WEIR_PIPELINES__SMALL__OBJECT": "heavy:pipeline"}
    printed, loaded, log = loaded_by("status small --json", heavy)
    assert json.loads(printed)["last_checkpoint"]["id"] == 2 and "loaded" in log
    assert {"pandas", "structlog"} <= set(loaded)


def test_a_command_that_reads_begins_no_threads_for_linear_algebra(environment):
    free = {name: value for name, value in environment.items() if name != "OPENBLAS_NUM_THREADS"}
    code = "import os\nfrom weir.cli.main import main\ntry:\n  main()\nfinally:\n  print(os.environ['OPENBLAS_NUM_THREADS'])"
    command = [sys.executable, "-c", code, "status", "small", "--json"]
    done = subprocess.run(command, cwd=PROJECT, env=free, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("\n1\n"), done.stderr


@pytest.mark.parametrize("command", sampled(["status small --json", "top small --json"]))
def test_what_is_asked_often_loads_neither_pandas_nor_spark_nor_what_runs_a_pipeline(environment, command):
    printed, loaded, _ = loaded_by(command, environment)
    shown = json.loads(printed)
    assert shown.get("last_checkpoint", {"id": 2})["id"] == 2 and shown.get("pipelines", [{}])[0].get("error") is None
    packages = {name.partition(".")[0] for name in loaded}
    heavy = {"pandas", "pyspark", "py4j", "dagster", "great_expectations", "duckdb", "matplotlib", "prometheus_client"}
    assert not packages & (heavy | {"structlog", "asyncio"})
    rooms = {".".join(name.split(".")[:3]) for name in loaded if name.startswith("weir.")}
    unneeded = {"operations", "run", "epoch", "restore", "gates", "execution", "task"}
    assert not rooms & {f"weir.{room}" for room in unneeded}


def test_each_command_of_the_table_is_the_one_of_its_module():
    commands = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]
    assert [command.name for command in commands.values()] == list(commands)


def test_the_list_of_commands_loads_none_of_their_modules():
    shown, loaded, _ = loaded_by("--help", dict(os.environ))
    assert all(f" {name} " in shown for name in main._MODULES)
    packages = {name.partition(".")[0] for name in loaded}
    assert not packages & {"numpy", "pyarrow", "polars", "pydantic", "structlog", "deltalake"}


def test_the_list_of_commands_says_of_each_what_it_says_itself():
    commands = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        assert " ".join(str(main._summary(name)).split()) == " ".join(str(command.help).split())


@pytest.mark.long
def test_nanoseconds_are_shown_without_pandas():
    """Of which Python has none, and which pyarrow otherwise makes values of pandas'."""
    code = """
import sys, pyarrow as pa
from weir.cli import main
main._without_pandas()
from state_ops.arrow.frames import python_rows
kinds = {"at": pa.timestamp("ns", "UTC"), "for": pa.duration("ns"), "clock": pa.time64("ns")}
columns = {name: pa.array([1_234_567, None], type) for name, type in kinds.items()}
nested = pa.StructArray.from_arrays([pa.array([[1_234_567], []], pa.list_(kinds["at"]))], ["times"])
print(*python_rows(pa.table({**columns, "nested": nested})), sep=chr(10))
print("pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    times = "'1970-01-01 00:00:00.001234567Z'"
    assert done.stdout.splitlines() == [
        f"{{'at': {times}, 'for': '1234567 nanoseconds', 'clock': datetime.time(0, 0, 0, 1234), "
        f"'nested': {{'times': [{times}]}}}}",
        "{'at': None, 'for': None, 'clock': None, 'nested': {'times': []}}",
        "False",
    ]
