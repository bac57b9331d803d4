"""The direction of imports, and what must not be loaded where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weir.settings.configuration import PROJECT


def test_the_contracts_on_imports_hold():
    """assets, pipelines, infra -> weir -> state_ops; the state engine without Spark and Dagster, pipelines without
    Dagster."""
    lint = Path(sys.executable).with_name("lint-imports")
    checked = subprocess.run([lint, "--no-cache"], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "0 broken" in checked.stdout


@pytest.mark.parametrize(
    ("imports", "absent"),
    [
        ("weir.settings.configuration", ["pyarrow", "polars", "pyspark", "dagster", "great_expectations"]),
        (
            "state_ops.checkpoints.registry, state_ops.snapshots.snapshot, state_ops.keyed.keyed_state",
            ["pyspark", "py4j", "dagster", "great_expectations"],
        ),
        ("pipelines.flights, weir.cli.main", ["pyspark", "py4j", "dagster", "great_expectations", "pandas"]),
    ],
    ids=["settings", "state_ops", "pipelines"],
)
def test_what_is_not_needed_is_not_loaded(imports, absent):
    """Also what is loaded on the way: the control plane and `weir status` must not wait for Spark or Dagster."""
    code = f"import sys, {imports}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert not set(absent) & set(ran.stdout.split())


def test_names_of_authors_are_imported_without_what_they_use_later():
    """A pipeline's file is imported by every command."""
    code = "import sys; from weir import Pipeline, agg, delta, files, stage; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in ran.stdout.split()}
    assert not loaded & {"pyarrow", "polars", "numpy", "pandas", "deltalake", "pyspark", "dagster"}
