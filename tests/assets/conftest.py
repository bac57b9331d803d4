"""A project of its own for each test: flights, a few days landed, in a temporary storage."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import dagster as dg
import pytest

from infra import flights_input
from tests.assets.dagster_site import options, page, site  # noqa: F401
from tests.assets.without_spark import RETAINED, House, in_this_process
from tests.recovery.small import Bank


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


@pytest.fixture
def house(tmp_path, monkeypatch, instance) -> House:
    """Three epochs of the small pipeline, in Dagster, without Spark."""
    in_this_process(monkeypatch)
    bank = Bank.at(tmp_path / "site", **RETAINED)
    bank.epochs(1, 2, 3)
    return House(bank, instance)
