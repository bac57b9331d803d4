"""Fixtures that several packages of tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from configs import settings
from pipelines.runtime.execution import spark_session as runtime

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One local Spark for all tests, made as runs make it, with Delta's jars; starts only where a test asks for it."""
    session = runtime.session(settings.load({}), app="weir-tests", delta=True)
    yield session
    session.stop()


_status: list[int] = []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(exitstatus: int) -> None:
    _status.append(int(exitstatus))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Arrow's threads may abort a process that tears down (apache/arrow#34314): leave with pytest's status before that."""
    if _status:
        config.get_terminal_writer().flush()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status[-1])
