"""Weir as a dependency of a Dagster project that is there: packages called `assets`, `configs` and `pipelines` are theirs.

Weir's wheel is installed in an environment of theirs, in their one code location, and runs under a real daemon.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import polars as pl
import pytest

from tests.template.projects import clean
from weir.local import dagster_home
from weir.settings.configuration import PROJECT

pytestmark = pytest.mark.long

_FILES = {
    "pyproject.toml": '[project]\nname = "platform"\n\n[tool.weir]\nconfigs = "weir_settings"\n',
    "weir_settings/dev.yaml": (
        "pipelines:\n  orders: {object: 'pipelines.orders:pipeline', params: {landing: .weir/landing/orders}}\n"
    ),
    "configs/__init__.py": 'TABLE = "orders"\n',
    "configs/dev.yaml": "theirs: true\n",
    "pipelines/__init__.py": "",
    "pipelines/orders.py": """
from weir import Pipeline, agg, aggregate, delta, files

totals = aggregate(
    "totals",
    files("{landing}/*.parquet", event_time="at"),
    key="customer",
    total=agg.sum("amount"),
    sink=delta.upsert("orders", key="customer"),
)
pipeline = Pipeline("orders", (totals,))
""",
    "assets/__init__.py": "",
    "assets/definitions.py": '''
import dagster as dg

import weir.dagster
from configs import TABLE


@dg.asset(deps=[dg.AssetKey(["orders", "tables", TABLE])], automation_condition=dg.AutomationCondition.eager())
def report() -> None:
    """Follows Weir's table."""


follow = dg.AutomationConditionSensorDefinition(
    "follow", target="*", default_status=dg.DefaultSensorStatus.RUNNING, minimum_interval_seconds=5
)
defs = dg.Definitions.merge(weir.dagster.definitions(), dg.Definitions(assets=[report], sensors=[follow]))
''',
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with Weir's wheel, and of this environment every package but Weir."""
    folder = tmp_path_factory.mktemp("theirs")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    for package in ("weir", "state_ops"):
        shutil.copytree(PROJECT / package, source / package, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source)
    subprocess.run([*build, str(source)], check=True, env=clean())
    venv.create(folder / ".venv", symlinks=True)
    (site,) = (folder / ".venv").glob("lib/python*/site-packages")
    (wheel,) = folder.glob("weir_state-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        tops = {name.split("/")[0] for name in packed.namelist()}
        packed.extractall(site)
    assert {top for top in tops if not top.endswith(".dist-info")} == {"weir", "state_ops"}
    # A path in a .pth file is searched, but its own .pth files, of which one is Weir's, are not read.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / ".venv" / "bin" / "python"


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their project."""
    platform = tmp_path_factory.mktemp("platform")
    for name, text in _FILES.items():
        (platform / name).parent.mkdir(exist_ok=True)
        (platform / name).write_text(text)
    (platform / "home").mkdir()
    shutil.copyfile(PROJECT / "weir" / "local" / "dagster.yaml", platform / "home" / "dagster.yaml")
    return platform


@pytest.fixture
def daemon(platform: Path, python: Path) -> Iterator[subprocess.Popen[bytes]]:
    home = platform / "home"
    variables = {
        **clean(),
        "DAGSTER_HOME": str(home),
        "WEIR_DAGSTER__SENSOR_SECONDS": "5",
        "WEIR_RUN__LINGER_SECONDS": "0",
        "WEIR_LOCAL__CACHE_DIR": str(PROJECT / ".weir" / "cache"),
    }
    with dg.DagsterInstance.from_config(str(home)):
        pass  # makes Dagster's databases before two processes could
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [python, "-m", "dagster._daemon", "run", "-m", "assets.definitions", "-d", "."],
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


def test_weir_runs_in_their_location_and_their_asset_follows_its_table(platform: Path, daemon: subprocess.Popen[bytes]):
    landing = platform / ".weir" / "landing" / "orders"
    landing.mkdir(parents=True)
    at = datetime(2026, 1, 1, 9, tzinfo=UTC)
    rows = pl.DataFrame({"customer": ["ada", "bob", "ada"], "amount": [5.0, 7.0, 1.0], "at": [at, at, at]})
    rows.write_parquet(landing / "1.parquet")
    report, table = dg.AssetKey(["report"]), dg.AssetKey(["orders", "tables", "orders"])
    home = platform / "home"
    with dg.DagsterInstance.from_config(str(home)) as instance:
        deadline = time.monotonic() + 400
        while instance.get_latest_materialization_event(report) is None:
            assert daemon.poll() is None and time.monotonic() < deadline, (home / "log").read_text()[-4000:]
            time.sleep(1)
        theirs, weirs = (instance.get_latest_materialization_event(key) for key in (report, table))
    assert weirs is not None and theirs is not None and weirs.timestamp < theirs.timestamp
    totals = pl.read_delta(str(platform / ".weir" / "storage" / "orders" / "tables" / "orders"))
    assert dict(totals.select("customer", "total").rows()) == {"ada": 6.0, "bob": 7.0}


def test_the_command_finds_their_project(platform: Path, python: Path):
    command = [python, "-m", "weir.cli.main", "plan", "orders"]
    ran = subprocess.run(command, cwd=platform / "assets", env=clean(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
