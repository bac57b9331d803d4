"""A project of its own for each test: flights, a few days landed, in a temporary storage."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from infra import flights_input


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
    }.items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def project(landing) -> Iterator[ModuleType]:
    """`assets.definitions`, loaded with this test's configuration."""
    sys.modules.pop("assets.definitions", None)
    yield importlib.import_module("assets.definitions")
    sys.modules.pop("assets.definitions", None)
