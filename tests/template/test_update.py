"""`copier update` brings a release into a project that has gone its own way; nothing of either is lost."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import copier
import pytest
import yaml

from tests.template.projects import clean, generate, git, passes, repository

pytestmark = pytest.mark.long


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, (file, old)
    file.write_text(text.replace(old, new))


def first_release(folder: Path) -> Path:
    """A repository whose template has one file more, which the next release has no longer."""
    template = repository(folder)
    (template / "template" / "infra" / "until_v1.py").write_text('"""Gone in v0.0.2."""\n')
    git(template, "add", "--all")
    git(template, "commit", "-qm", "The first release", "--amend")
    git(template, "tag", "--force", "v0.0.1")
    return template


def release(template: Path) -> None:
    """What a release changes: Weir, definitions, tools, a target, settings, a file that is new and one that goes."""
    files = template / "template"
    edit(files / "assets" / "definitions.py", "What Dagster loads:", "Since v0.0.2, what Dagster loads:")
    edit(files / "pyproject.toml.jinja", '"mypy>=1.14"', '"mypy>=1.14.1"')
    edit(files / "Makefile.jinja", "## Test your pipelines: no JVM, no server", "## Test the pipelines")
    edit(files / "configs" / "dev.yaml.jinja", "num_retained: 50", "num_retained: 40")
    (files / "infra" / "since_v2.py").write_text('"""New in v0.0.2."""\n')
    (files / "infra" / "until_v1.py").unlink()
    git(template, "add", "--all")
    git(template, "commit", "-qm", "The next release")
    git(template, "tag", "v0.0.2")


def diverge(project: Path) -> None:
    """Five files are edited, one is new, one is deleted."""
    edit(project / "assets" / "definitions.py", "assets=[]", "assets=[report]")
    edit(
        project / "assets" / "definitions.py",
        "\ndefs =",
        """

@dg.asset(deps=[dg.AssetKey(["orders", "tables", "orders"])])
def report() -> None:
    \"\"\"Ours.\"\"\"


defs =""",
    )
    edit(
        project / "pipelines" / "orders.py",
        'total=agg.sum("amount")',
        'total=agg.sum("amount"), largest=agg.max("amount")',
    )
    edit(
        project / "pipelines" / "orders.py",
        "    total: float = 0.0\n",
        "    total: float = 0.0\n    largest: float | None = None\n",
    )
    edit(project / "configs" / "dev.yaml", "num_retained: 50", "num_retained: 70")
    edit(project / "pyproject.toml", 'description = "Pipelines with keyed state, on Weir"', 'description = "Our shop"')
    makefile = project / "Makefile"
    makefile.write_text(makefile.read_text().rstrip() + "\n\nhello: ## Ours\n\t@echo hello\n")
    (project / "pipelines" / "helpers.py").write_text('"""Ours."""\n')
    (project / "tests" / "test_orders.py").unlink()
    git(project, "add", "--all")
    git(project, "commit", "-qm", "Ours")


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of v0.0.1, edited, and updated to v0.0.2."""
    folder = tmp_path_factory.mktemp("update")
    template = first_release(folder / "weir")
    project = generate(template, folder / "shop", commits=True)
    assert (project / "infra" / "until_v1.py").exists()
    diverge(project)
    release(template)
    copier.run_update(project, defaults=True, overwrite=True, quiet=True)
    return project


def test_the_release_has_come(updated: Path):
    assert yaml.safe_load((updated / ".copier-answers.yml").read_text())["_commit"] == "v0.0.2"
    assert "Since v0.0.2" in (updated / "assets" / "definitions.py").read_text()
    pyproject = (updated / "pyproject.toml").read_text()
    assert '"mypy>=1.14.1"' in pyproject and "@v0.0.2" in pyproject and "@v0.0.1" not in pyproject
    assert "## Test the pipelines" in (updated / "Makefile").read_text()
    assert (updated / "infra" / "since_v2.py").exists()
    assert not (updated / "infra" / "until_v1.py").exists()


def test_what_is_the_users_has_stayed(updated: Path):
    assert "def report()" in (updated / "assets" / "definitions.py").read_text()
    assert "largest=agg.max" in (updated / "pipelines" / "orders.py").read_text()
    assert "num_retained: 70" in (updated / "configs" / "dev.yaml").read_text()
    assert 'description = "Our shop"' in (updated / "pyproject.toml").read_text()
    assert (updated / "Makefile").read_text().endswith("hello: ## Ours\n\t@echo hello\n")
    assert (updated / "pipelines" / "helpers.py").exists()
    assert not (updated / "tests" / "test_orders.py").exists()
    changed = git(updated, "status", "--porcelain")
    assert not re.search(r"^(U|AA|DD)|\.rej$|pipelines/|dev\.yaml", changed, flags=re.MULTILINE), changed
    assert not subprocess.run(["grep", "-rl", "^<<<<<<< ", "."], cwd=updated, capture_output=True, text=True).stdout


def test_the_updated_project_passes_its_tests(updated: Path):
    passes(updated, "pytest", "tests")


def test_both_commands_run_in_the_updated_project(updated: Path):
    """`make demo` and `make ui`, in an environment of the project's own, as somebody types them."""
    subprocess.run(["make", "demo"], cwd=updated, env=clean(), check=True, timeout=1500)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pages = subprocess.Popen(["make", "ui"], cwd=updated, env={**clean(), "PORT": str(port)}, start_new_session=True)
    try:
        assert "report" in asset_keys(port, time.monotonic() + 600, pages)
    finally:
        os.killpg(pages.pid, signal.SIGINT)
        pages.wait(60)


def asset_keys(port: int, deadline: float, pages: subprocess.Popen[bytes]) -> str:
    """The keys of all assets that Dagster's page knows, once it answers."""
    query = b'{"query": "{assetNodes {assetKey {path}}}"}'
    request = urllib.request.Request(f"http://127.0.0.1:{port}/graphql", query, {"Content-Type": "application/json"})
    while time.monotonic() < deadline and pages.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                text = answer.read().decode()
                if "path" in text:
                    return text
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(1)
    raise AssertionError(f"The pages did not answer; make ui: {pages.poll()}")
