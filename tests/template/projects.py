"""Projects that are made of this repository by Copier, and what is run in them.

Weir's own environment serves, with the project's code before it: `.venv` of each project would take two gigabytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import copier

from weir.settings.configuration import PROJECT

_AUTHOR = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.com", "-c", "commit.gpgsign=false")
_QUIET = ("init.defaultBranch=main",)
IGNORED = ("weir_", "pythonpath", "git_")


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder, and return what it prints."""
    command = ["git", *(part for setting in _QUIET for part in ("-c", setting)), *_AUTHOR, *arguments]
    ran = subprocess.run(command, cwd=folder, env=clean(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"git {' '.join(arguments)}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def clean() -> dict[str, str]:
    """The environment without what this test run says of Weir, of Python's path and of git."""
    return {key: value for key, value in os.environ.items() if not key.lower().startswith(IGNORED)}


def repository(folder: Path) -> Path:
    """A repository with the files of this one as they are, committed or not, as one commit with the tag v0.0.1."""
    folder.mkdir(parents=True)
    copy_files(folder)
    git(folder, "init", "-q")
    release(folder, "v0.0.1")
    return folder


def release(repository: Path, tag: str) -> None:
    """Commit all that is in a repository's folder, under a tag."""
    git(repository, "add", "--all", "--force")
    git(repository, "commit", "-qm", f"Release {tag}")
    git(repository, "tag", tag)


def copy_files(folder: Path) -> None:
    """Copy the files of this repository as they are, committed or not."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        capture_output=True,
        check=True,
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        if name.startswith("tests/golden/") or not (PROJECT / name).is_file():
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((PROJECT / name).read_bytes())


def generate(
    template: Path,
    folder: Path,
    answers: Mapping[str, Any] = {},
    *,
    commits: bool = False,
    release: str | None = None,
) -> Path:
    """A project of a release of the template.

    Args:
        release: Its tag; None: the newest one.
        commits: Keep the project in a git repository of its own, as `copier update` wants it.
    """
    copier.run_copy(str(template), folder, data=dict(answers), defaults=True, quiet=True, vcs_ref=release)
    if commits:
        git(folder, "init", "-q")
        git(folder, "add", "--all")
        git(folder, "commit", "-qm", "From Weir's template")
    return folder


def run(project: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python module with arguments in a project, on the code of the project alone."""
    environment = {**clean(), "PYTHONPATH": str(project), "PYTHONSAFEPATH": "1", **variables}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


def passes(project: Path, *command: str, **variables: str) -> str:
    """The same; fails with its output where its exit code is not 0."""
    ran = run(project, *command, **variables)
    assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout
