"""A project of its own for each test: flights, a few days landed, in a temporary storage."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import dagster as dg
import pytest

from infra import flights_input
from tests.recovery.small import Bank
from tests.weir.dagster.dagster_daemon import served  # noqa: F401
from tests.weir.dagster.dagster_site import options, page, site  # noqa: F401
from tests.weir.dagster.without_spark import RETAINED, House, in_this_process


@pytest.fixture(scope="session")
def days(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("flights") / "days"
    flights_input.prepare(folder)
    return folder


@pytest.fixture
def landing(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "landing"
    for name, value in {
        "WEIR_STORAGE__ROOT": str(tmp_path / "storage"),
        "WEIR_LOCAL__WORK_DIR": str(tmp_path / "work"),
        "WEIR_PIPELINES__FLIGHTS__PARAMS": json.dumps({"landing": str(folder)}),
        "WEIR_RUN__LINGER_SECONDS": "0",
        "WEIR_EPOCH__MAX_FILES": "2",
        "WEIR_DAGSTER__OBSERVE_SECONDS": "0",
    }.items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def project(landing) -> Iterator[ModuleType]:
    """`assets.definitions`, loaded with this test's configuration."""
    sys.modules.pop("assets.definitions", None)
    yield importlib.import_module("assets.definitions")
    sys.modules.pop("assets.definitions", None)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


@pytest.fixture(scope="session")
def three(tmp_path_factory) -> Path:
    """Where the small pipeline has made three epochs: a directory `site`, and beside it a copy to put there anew."""
    root = tmp_path_factory.mktemp("three")
    Bank.at(root / "site", **RETAINED).epochs(1, 2, 3)
    shutil.copytree(root / "site", root / "copy")
    return root


@pytest.fixture
def house(three, monkeypatch, instance) -> House:
    """Three epochs of the small pipeline, in Dagster, without Spark."""
    in_this_process(monkeypatch)
    shutil.rmtree(three / "site")
    shutil.copytree(three / "copy", three / "site")
    return House(Bank.at(three / "site", **RETAINED), instance)
