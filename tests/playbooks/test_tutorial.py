"""The tutorial is done as it stands there, box by box: files are written, commands run, what they show is compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.playbooks import page as reading
from tests.playbooks.conftest import forking
from tests.playbooks.project import Project
from weir.settings.configuration import PROJECT

PAGE = PROJECT / "docs" / "tutorial.md"


class Shop(Project):
    """The folder in which `copier copy` makes the project, then the project."""

    @property
    def folder(self) -> Path:
        project = self.root / "shop"
        return project if project.exists() else self.root

    def make(self) -> Shop:
        """A clone of this repository, as far as it is committed, for `copier copy`; and `weir`, for the project."""
        clone = self.root / "weir-repository"
        subprocess.run(["git", "clone", "--quiet", "--no-tags", "--depth=1", PROJECT.as_uri(), clone], check=True)
        self.make_command(self.root / "shop")
        author = {
            f"GIT_{who}_{what}": "you@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
        }
        self.env |= author | {"WEIR": str(clone)}
        return self

    def install(self) -> None:
        """What `make venv` installs is what the tests run in, and is there already."""
        (self.folder / ".venv").symlink_to(sys.prefix)
        for name in ("requirements.lock", "requirements.txt", "pyproject.toml"):
            os.utime(self.folder / name, (0, 0))


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Shop]:
    with forking("great_expectations") as door:
        project = Shop(tmp_path, [], door).make()
        yield project
        project.close()


@pytest.mark.long
def test_every_box_does_what_the_page_says(project: Shop):
    for step in reading.steps(PAGE):
        where = f"{PAGE.name}:{step.line}"
        if step.kind == "file":
            target = project.folder / reading.file_of(step.text)
            target.parent.mkdir(exist_ok=True)
            target.write_text(step.text)
        elif step.kind == "bash":
            code, shown = project.bash(step.text)
            assert code == step.code, f"{where}: exit code {code}, not {step.code}, of\n{step.text}\n{shown}"
        elif step.kind == "act":
            assert step.text == "the packages are there", where
            project.install()
        else:
            assert step.kind == "text", where
            lacking = reading.missing(step.text, project.shown)
            assert lacking is None, f"{where}: it was not said: {lacking}\nSaid was:\n{project.shown}"
    (asked,) = re.findall(
        r"^weir state sql flights .*$", (PROJECT / "docs" / "cost.md").read_text(), flags=re.MULTILINE
    )
    code, shown = project.bash(asked.replace("flights", "orders"))
    assert code == 0 and "bytes_up" in shown, "what the page on cost asks of the registry"


def test_the_pipeline_passes_its_test(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "shop", types.ModuleType("shop"))
    for step in reading.steps(PAGE):
        if step.kind == "file" and reading.file_of(step.text).endswith(".py"):
            path = reading.file_of(step.text)
            module = types.ModuleType(path.removesuffix(".py").replace("/", "."))
            monkeypatch.setitem(sys.modules, module.__name__, module)
            exec(compile(step.text, path, "exec"), module.__dict__)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()
