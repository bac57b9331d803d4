"""What an installation without any extra does: a pipeline runs, and what needs an extra names it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from state_ops import extras
from state_ops.errors import ConfigurationError
from tests.recovery.small import Bank
from weir.settings.configuration import PROJECT

# In every process below the command, Spark's workers too: Python imports it as it starts.
_BLOCKER = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec

def lacking(name, path=None, target=None):
    return None if name.partition(".")[0] in {blocked} else find(name, path, target)

PathFinder.find_spec = lacking
"""
_PIPELINES = """
from dataclasses import replace

from weir import Pipeline, expect
from tests.recovery.small import accounts, pipeline

gated = Pipeline("gated", (replace(accounts, gates=(expect("ExpectColumnValuesToNotBeNull", column="id"),)),), max_parallelism=8)
"""
_IN_PROCESS = """
from weir.execution.in_process import InMemoryExecutor
from weir.execution.spark import spark_executor

class Small(InMemoryExecutor):
    ready_at = None
    def __init__(self, *_, **__):
        super().__init__()

spark_executor.SparkExecutor = Small
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict[str, str]:
    """The environment of an installation without extras, with a pipeline that has files to read."""
    root = tmp_path_factory.mktemp("base")
    bank = Bank.at(root / "site")
    bank.epochs(1)
    bank.land(2, 3)
    blocked = sorted(extras._LIBRARIES)
    (root / "sitecustomize.py").write_text(_BLOCKER.format(blocked=blocked))
    (root / "lean.py").write_text(_PIPELINES)
    code = {
        "WEIR_PIPELINES__SMALL__OBJECT": "lean:pipeline",
        "WEIR_PIPELINES__GATED__OBJECT": "lean:gated",
        "PYTHONPATH": os.pathsep.join([str(root), str(PROJECT)]),
    }
    return {**os.environ, **bank.site.env, **code}


def weir(arguments: str, environment: dict[str, str], before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{before}\nfrom weir.cli.main import process\nprocess()"
    command = [sys.executable, "-c", code, *arguments.split()]
    return subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300)


def test_a_pipeline_is_planned_and_run_without_any_extra(base):
    done = weir("plan small", base)
    assert done.returncode == 0, done.stderr
    done = weir("run small --until-caught-up", base, _IN_PROCESS)
    assert done.returncode == 0, done.stderr
    assert '"last_checkpoint"' in (shown := weir("status small --json", base).stdout) and '"id": 3' in shown


@pytest.mark.long
def test_a_pipeline_runs_on_spark_without_any_extra(base):
    done = weir("run small --until-caught-up", base)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "what", "extra"),
    [
        ("run gated --until-caught-up", "A quality gate needs great-expectations", "gates"),
        ("plan gated", "A quality gate needs great-expectations", "gates"),
        ("ci small --in-process", "weir ci needs duckdb", "sql"),
        ("state sql small SELECT", "weir state sql needs duckdb", "sql"),
    ],
)
def test_what_needs_an_extra_names_it(base, command, what, extra):
    done = weir(command, base)
    assert done.returncode == 2
    message = " ".join(done.stderr.split())
    assert f"{what}, which is not installed." in message and f"pip install -e '{PROJECT}[{extra}]'" in message
    assert "Traceback" not in message


@pytest.mark.long
def test_traces_that_are_asked_for_name_their_extra_before_the_run_begins(base):
    done = weir("run small --until-caught-up", {**base, "WEIR_TELEMETRY__TRACES": "true"}, _IN_PROCESS)
    message = " ".join(done.stderr.split())
    assert done.returncode == 2 and "Sending traces needs opentelemetry-exporter-otlp-proto-http" in message
    assert f"pip install -e '{PROJECT}[otel]'" in message and "generation" not in message


@pytest.mark.parametrize("library", sorted(extras._LIBRARIES))
def test_every_library_belongs_to_an_extra_of_the_package(library, monkeypatch):
    parts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    package, extra = extras._LIBRARIES[library]
    assert any(line.startswith(package) for line in parts[extra])
    monkeypatch.setitem(sys.modules, library, None)
    assert not extras.is_installed(library)
    with pytest.raises(ConfigurationError, match=package) as failure, extras.needed_for("This"):
        __import__(library)
    assert failure.value.next.startswith(f"pip install -e '{PROJECT}[{extra}]'")
    with pytest.raises(ConfigurationError, match=package):
        extras.check(library, "This")


def test_where_weir_is_a_package_the_projects_own_file_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "_FOLDER", tmp_path)
    assert extras.install("sql").startswith("add sql to the brackets of weir-state[...] in pyproject.toml")


def test_an_import_that_fails_otherwise_comes_out_as_it_is():
    with pytest.raises(ModuleNotFoundError, match="nobody_has_this"), extras.needed_for("This"):
        import nobody_has_this  # noqa: F401


def test_the_base_has_no_library_of_an_extra():
    dependencies = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    of_extras = {package for package, _ in extras._LIBRARIES.values()}
    assert not [line for line in dependencies if line.startswith(tuple(of_extras))]


def test_what_the_demo_installs_is_a_part_of_what_the_tests_run_with():
    def locked(name: str) -> set[str]:
        """Packages in their versions. For which machines they are may differ: more ask for them in the larger part."""
        return set(re.findall(r"^([\w.-]+==\S+) ", Path(PROJECT, name).read_text(), flags=re.MULTILINE))

    assert locked("requirements-demo.lock") < locked("requirements.lock")
