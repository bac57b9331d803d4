"""Weir beside a Dagster project that owns packages `assets` and `configs`: two code locations in one workspace.

Each has a process and an environment of its own. Their asset depends on Weir's table by its key, and a condition of theirs
follows it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import polars as pl
import pytest
import yaml

from tests.template.projects import clean, generate
from weir.local import dagster_home
from weir.settings.configuration import PROJECT

_THEIR_ASSETS = '''
import dagster as dg

from configs import TABLE


@dg.asset(deps=[dg.AssetKey(["orders", "tables", TABLE])], automation_condition=dg.AutomationCondition.eager())
def report() -> None:
    """Follows Weir's table."""


follow = dg.AutomationConditionSensorDefinition(
    "follow", target="*", default_status=dg.DefaultSensorStatus.RUNNING, minimum_interval_seconds=5
)
defs = dg.Definitions(assets=[report], sensors=[follow])
'''
_WITHOUT_SPARK = """
from weir.execution.in_process import InMemoryExecutor
from weir.ownership import ownership

ownership.SparkExecutor = lambda settings, **_: InMemoryExecutor()

from weir.definitions import defs  # noqa: E402
"""


def environment(folder: Path, *paths: Path) -> Path:
    """An environment with the packages of this one, but without Weir, which is installed there in place.

    Args:
        paths: What it has besides.

    Returns:
        Its Python.
    """
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file is searched, but its own .pth files are not read.
    (site / "packages.pth").write_text("".join(f"{path}\n" for path in (*paths, sysconfig.get_path("purelib"))))
    return folder / "bin" / "python"


@pytest.fixture
def platform(template: Path, tmp_path: Path) -> Path:
    """Their project with Weir in a folder of it."""
    platform = tmp_path / "platform"
    weir = generate(template, platform / "weir")
    for package, text in {"assets": "", "configs": 'TABLE = "orders"\n'}.items():
        (platform / package).mkdir()
        (platform / package / "__init__.py").write_text(text)
    (platform / "assets" / "definitions.py").write_text(_THEIR_ASSETS)
    (platform / "configs" / "dev.yaml").write_text("theirs: true\n")
    (weir / "without_spark.py").write_text(_WITHOUT_SPARK)
    locations = [
        {"location_name": "platform", "module_name": "assets.definitions", "working_directory": "."}
        | {"executable_path": str(environment(platform / ".venv"))},
        {"location_name": "weir", "module_name": "without_spark", "working_directory": "weir"}
        | {"executable_path": str(environment(weir / ".venv", weir))},
    ]
    (platform / "workspace.yaml").write_text(yaml.safe_dump({"load_from": [{"python_module": at} for at in locations]}))
    return platform


@pytest.fixture
def home(platform: Path) -> Path:
    home = platform / "home"
    home.mkdir()
    shutil.copyfile(PROJECT / "weir" / "local" / "dagster.yaml", home / "dagster.yaml")
    return home


@pytest.mark.long
def test_both_locations_load(platform: Path, home: Path):
    command = [sys.executable, "-m", "dagster", "definitions", "validate", "-w", "workspace.yaml"]
    variables = {**clean(), "DAGSTER_HOME": str(home)}
    ran = subprocess.run(command, cwd=platform, env=variables, capture_output=True, text=True, timeout=400, check=False)
    printed = ran.stdout + ran.stderr
    assert ran.returncode == 0, printed
    assert "platform" in printed and "weir" in printed


@pytest.fixture
def daemon(platform: Path, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    variables = {
        **clean(),
        "DAGSTER_HOME": str(home),
        "WEIR_DAGSTER__SENSOR_SECONDS": "5",
        "WEIR_RUN__LINGER_SECONDS": "0",
    }
    with dg.DagsterInstance.from_config(str(home)):
        pass  # makes Dagster's databases before two processes could
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [dagster_home.program("dagster-daemon"), "run", "-w", "workspace.yaml"],
            cwd=platform,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        dagster_home.end(process)


@pytest.mark.long
def test_their_asset_follows_weirs_table(platform: Path, home: Path, daemon: subprocess.Popen[bytes]):
    landing = platform / "weir" / ".weir" / "landing" / "orders"
    landing.mkdir(parents=True)
    at = datetime(2026, 1, 1, 9, tzinfo=UTC)
    pl.DataFrame({"customer": ["ada", "bob"], "amount": [5.0, 7.0], "at": [at, at]}).write_parquet(
        landing / "1.parquet"
    )
    report, table = dg.AssetKey(["report"]), dg.AssetKey(["orders", "tables", "orders"])
    with dg.DagsterInstance.from_config(str(home)) as instance:
        deadline = time.monotonic() + 400
        while instance.get_latest_materialization_event(report) is None:
            assert daemon.poll() is None and time.monotonic() < deadline, (home / "log").read_text()[-4000:]
            time.sleep(1)
        theirs, weirs = (instance.get_latest_materialization_event(key) for key in (report, table))
    assert weirs is not None and theirs is not None and weirs.timestamp < theirs.timestamp
    rows = pl.read_delta(str(platform / "weir" / ".weir" / "storage" / "orders" / "tables" / "orders"))
    assert sorted(rows["customer"]) == ["ada", "bob"]
    assert not (platform / ".weir").exists(), json.dumps([str(path) for path in platform.iterdir()])
