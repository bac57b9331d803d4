"""The operator of another package, installed for tests that use it by its entry point."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.distributions import describe
from weir.operators import kinds

MODULE = Path(__file__).with_name("third_party") / "weir_threshold.py"


def install(site: Path) -> None:
    """Install the package into a folder, as pip would, and let this process find it."""
    shutil.copy(MODULE, site)
    describe(site, "weir-threshold", "weir.operators", {"threshold": "weir_threshold:Threshold"})
    sys.path.insert(0, str(site))
    kinds.of_others.cache_clear()


def remove(site: Path) -> None:
    """Let this process find it no more."""
    sys.path.remove(str(site))
    sys.modules.pop("weir_threshold", None)
    kinds.of_others.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For all tests of a module that imports this fixture, the operator is installed."""
    site = tmp_path_factory.mktemp("site")
    install(site)
    yield
    remove(site)
