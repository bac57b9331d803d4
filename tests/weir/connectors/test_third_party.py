"""A source and a sink of somebody else: built as a wheel, installed, found by name, and kept to the contracts."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weir import ConfigurationError, PipelineError, sink, source
from weir.settings.configuration import PROJECT

PACKAGE = Path(__file__).with_name("third_party")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel is installed."""
    home = tmp_path_factory.mktemp("third-party")
    shutil.copytree(PACKAGE, home / "package", ignore=shutil.ignore_patterns("__pycache__"))  # a build writes there
    uv = [str(Path(sys.executable).with_name("uv")), "--quiet", "--offline", "--no-cache"]
    build = [*uv, "build", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(home)]
    subprocess.run([*build, str(home / "package")], check=True, capture_output=True)
    (wheel,) = home.glob("*.whl")
    install = [*uv, "pip", "install", "--no-deps", "--python", sys.executable, "--target", str(home / "site")]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    return home / "site"


def test_it_imports_the_api_alone():
    tree = ast.parse((PACKAGE / "weir_counter" / "__init__.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    ours = {name for name in modules if name.split(".")[0] in ("pipelines", "state_ops", "weir", "assets")}
    assert ours == {"weir"}


@pytest.mark.long
def test_its_source_and_sink_pass_the_contracts(installed: Path):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        str(PACKAGE / "suite.py"),
    ]
    environment = {**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{PROJECT}"}
    ran = subprocess.run(command, cwd=installed, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    passed = int(ran.stdout.rsplit(" passed", 1)[0].split()[-1])
    assert passed > 30, ran.stdout


def test_what_every_source_says_is_said_to_a_function_that_makes_one_too(installed: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    timed = {"event_time": "at", "idle_after": "9s", "max_ahead": "1h"}
    for kind in ("counter", "lines_of"):
        made = source(kind, path="lines", **timed)
        assert {name: getattr(made, name) for name in timed} == timed
    with pytest.raises(PipelineError, match=r"does not take these arguments.*colour"):
        source("lines_of", path="lines", colour="red")


def test_what_is_not_there_is_named(installed: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(installed))
    assert source("counter", path="lines", event_time="at").event_time == "at"
    assert sink("shelf", name="out", path="db").kind == "shelf"
    with pytest.raises(ConfigurationError, match="'kounter'") as missing:
        source("kounter")
    assert "counter" in str(missing.value.next)
    with pytest.raises(ConfigurationError, match="cannot be imported"):
        sink("gone")
    with pytest.raises(PipelineError, match=r"does not take these arguments.*path"):
        source("counter")
    with pytest.raises(PipelineError, match="makes a Shelf, which is no Sink"):
        sink("no_sink", path=":memory:", app_id="x")
