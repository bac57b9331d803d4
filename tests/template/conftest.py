"""This repository as a template, once for a test run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.template.projects import repository
from tests.tools.postgres_server import postgres  # noqa: F401


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("template") / "weir")
