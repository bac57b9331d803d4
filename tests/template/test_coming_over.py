"""A project that has Weir's code in it comes over to the package by the steps of docs/how-to/project.md."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import copier
import polars as pl
import pytest

from tests.template.projects import copy_files, generate, git, passes, release
from weir.settings.configuration import PROJECT

pytestmark = pytest.mark.long

BEFORE = "6f1d71a6"  # the last commit whose projects had Weir's code in them
AT = datetime(2026, 1, 1, 9, tzinfo=UTC)
STORAGE = Path(".weir", "storage", "orders", "tables", "orders")


def deliver(project: Path, number: int) -> None:
    """Land an order of each customer, an hour after those before."""
    landing = project / ".weir" / "landing" / "orders"
    landing.mkdir(parents=True, exist_ok=True)
    at = AT + timedelta(hours=number)
    rows = pl.DataFrame({"customer": ["ada", "bob"], "amount": [5.0, 7.0], "at": [at, at]})
    rows.write_parquet(landing / f"{number}.parquet")


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A repository with the release of before and that of today."""
    template, packed = tmp_path / "weir", tmp_path / "before.tar"
    archive = ["git", "archive", "-o", str(packed), BEFORE, "--", ".", ":!tests/golden"]
    archived = subprocess.run(archive, cwd=PROJECT, capture_output=True, text=True, check=False)
    if archived.returncode:
        pytest.skip(f"this clone has no commit {BEFORE}: git fetch --unshallow")
    template.mkdir()
    shutil.unpack_archive(packed, template)
    git(template, "init", "-q")
    release(template, "v0.0.1")
    for entry in template.iterdir():
        if entry.name != ".git":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    copy_files(template)
    release(template, "v0.0.2")
    return template


def test_a_project_of_before_comes_over_with_its_state(template: Path, tmp_path: Path):
    project = generate(template, tmp_path / "shop", {"package": "shop"}, commits=True, release="v0.0.1")
    assert (project / "state_ops").is_dir()
    deliver(project, 1)
    passes(project, "pipelines.cli.main", "run", "orders", "--until-caught-up")

    copier.run_update(project, defaults=True, overwrite=True, quiet=True, vcs_ref="v0.0.2")
    assert not re.search("^(U|.U)", git(project, "status", "--porcelain"), re.MULTILINE)
    assert not [name for name in ("state_ops", "pipelines", "docs", "benchmarks") if (project / name).exists()]
    assert {path.name for path in (project / "configs").iterdir()} == {"dev.yaml", "prod.yaml"}
    (project / "shop" / "definitions.py").unlink()
    (project / "requirements.txt").unlink()
    (step,) = re.findall(r"```\n( *sed .*?)```", (PROJECT / "docs" / "how-to" / "project.md").read_text(), re.DOTALL)
    subprocess.run(["bash", "-c", step], cwd=project, check=True)
    assert "from weir import" in (project / "shop" / "orders.py").read_text()

    planned = passes(project, "weir.cli.main", "plan", "orders")
    assert "compatible" in planned and "has changed" not in planned, planned
    passes(project, "pytest", "tests")
    deliver(project, 2)
    passes(project, "weir.cli.main", "run", "orders", "--until-caught-up")
    rows = pl.read_delta(str(project / STORAGE)).sort("at", "customer")
    assert rows["customer"].to_list() == ["ada", "bob"] * 2
    assert rows["minutes_since_previous"].to_list() == [None, None, 60, 60]
