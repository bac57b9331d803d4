"""Weir has one version, and what people and programs look at says it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version as installed
from pathlib import Path

import pytest

from state_ops import extras
from state_ops.checkpoints.registry import Registry
from state_ops.storage.storage import Storage
from tests.state_ops.checkpoints.test_registry import APP, put
from weir.settings.configuration import PROJECT

VERSION = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]


def test_in_a_checkout_the_version_is_that_of_its_pyproject():
    assert extras.version() == VERSION


@pytest.mark.parametrize(
    ("project", "version"),
    [
        (None, "the installed one"),  # as installed from a wheel
        ('[project]\nname = "weir-state"\nversion = "9.8.7"\n', "9.8.7"),  # a checkout, beside another one's metadata
        ('[project]\nname = "shop"\nversion = "5.0"\n', "the installed one"),  # of a project that has the code in it
    ],
)
def test_the_version_is_that_of_the_code_that_runs(tmp_path, project, version):
    shutil.copytree(PROJECT / "state_ops", tmp_path / "state_ops", ignore=shutil.ignore_patterns("__pycache__"))
    if project is not None:
        (tmp_path / "pyproject.toml").write_text(project)
    asked = [sys.executable, "-c", "from state_ops.extras import version; print(version())"]
    said = subprocess.run(asked, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert said.stdout.decode().strip() == (installed("weir-state") if version == "the installed one" else version)


def test_a_checkpoint_says_which_version_wrote_its_row(tmp_path, monkeypatch):
    storage = Storage(str(tmp_path / "pipeline"))
    registry = Registry(storage, APP)
    assert registry.take_over() == 1
    put(registry, 1, None)
    monkeypatch.setattr("state_ops.checkpoints.registry.version", lambda: "9.8.7")
    put(registry, 2, 1)
    rows = Registry(storage, APP).checkpoints()
    assert [row.weir_version for row in rows] == [VERSION, "9.8.7"]
    assert rows[0].to_dict()["weir_version"] == VERSION


def test_a_row_of_a_release_before_the_first_has_none():
    golden = Storage(str(Path(__file__).parents[1] / "golden" / "registry-format-1"))
    assert {row.weir_version for row in Registry(golden, APP).checkpoints()} == {None}


def test_the_command_says_the_version():
    done = subprocess.run([sys.executable, "-m", "weir.cli.main", "--version"], cwd=PROJECT, capture_output=True)
    assert (done.returncode, done.stdout.decode()) == (0, f"weir {VERSION}\n")
