"""A project for each page, closed at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra import flights_input
from tests.playbooks.project import Project


@pytest.fixture(scope="session")
def days(tmp_path_factory) -> list[Path]:
    return flights_input.prepare(tmp_path_factory.mktemp("flights") / "days")


@pytest.fixture(scope="session")
def door() -> Iterator[Path]:
    """Of a process that forks for each `weir`."""
    with forking() as door:
        yield door


@contextmanager
def forking(*modules: str) -> Iterator[Path]:
    """The door of a process that forks for each `weir`, and has loaded these modules beside those that all need."""
    with tempfile.TemporaryDirectory(prefix="weir-") as folder:  # not pytest's: a socket's path has at most 107 letters
        where = Path(folder) / "door"
        env = {name: text for name, text in os.environ.items() if not name.startswith("WEIR_")}
        command = [sys.executable, "-P", str(Path(__file__).with_name("forked.py")), "serve", str(where), *modules]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            yield where
        finally:
            server.kill()
            server.wait()


@pytest.fixture
def project(tmp_path, days, door) -> Iterator[Project]:
    project = Project(tmp_path, days, door).make()
    yield project
    project.close()
