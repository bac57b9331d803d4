"""Real days of flights, and a pipeline to land them in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from infra import flights_input
from tests.recovery.harness import Site


@pytest.fixture(scope="session")
def days(tmp_path_factory) -> list[Path]:
    return flights_input.prepare(tmp_path_factory.mktemp("flights") / "days")


@pytest.fixture
def site(tmp_path) -> Callable[..., Site]:
    """Makes a site: `site(max_files=7, parallelism=2)`."""

    def made(*, max_files: int, parallelism: int = 2) -> Site:
        options = {"WEIR_EPOCH__MAX_FILES": str(max_files), "WEIR_SPARK__PARALLELISM": str(parallelism)}
        return Site(tmp_path / "site", options)

    return made
