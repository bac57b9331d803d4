"""Fixtures that several packages of tests share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from configs import settings
from pipelines.runtime import spark as runtime

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One local Spark for all tests, made as runs make it, with Delta's jars; starts only where a test asks for it."""
    session = runtime.session(settings.load({}), app="weir-tests", delta=True)
    yield session
    session.stop()


def pytest_unconfigure() -> None:
    """Arrow aborts a process that ends right after a threaded read (apache/arrow#34314): let its threads come to rest."""
    time.sleep(0.3)
