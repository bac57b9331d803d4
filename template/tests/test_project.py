"""That the project is whole: its settings, its pipelines and what Dagster makes of them load."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from weir.loading import load_pipeline
from weir.settings.configuration import PROJECT, load

ENVIRONMENTS = sorted(file.stem for file in (PROJECT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_the_pipelines_of_each_configuration_load(environment: str) -> None:
    settings = load({"WEIR_ENV": environment})
    for name in settings.pipelines:
        assert load_pipeline(name, settings).name == name


def test_dagster_loads_what_the_workspace_names() -> None:
    code = (
        "import dagster as dg; from assets import definitions\n"
        "(defs,) = [value for value in vars(definitions).values() if isinstance(value, dg.Definitions)]\n"
        "dg.Definitions.validate_loadable(defs)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, env={**os.environ, "WEIR_ENV": "dev"}, capture_output=True, text=True
    )
    assert loaded.returncode == 0, loaded.stderr
