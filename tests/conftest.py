"""Fixtures that several packages of tests share."""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from tests.tools.postgres_server import postgres as postgres
from weir.execution.spark import spark_session as runtime
from weir.settings import configuration as settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.tools.kafka import KafkaTopics

if find_spec("hypothesis"):  # what `make demo` installs lacks it, and runs tests of pipelines
    import hypothesis

    hypothesis.settings.register_profile("weir", deadline=None)  # how long an example takes is the machine's affair
    hypothesis.settings.load_profile("weir")

# Hundreds of processes start here, in each of which NumPy would begin threads that spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_start_spark = runtime.session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One local Spark for all tests, made as runs make it, with Delta's jars; starts only where a test asks for it."""
    session = _start_spark(settings.load({}), app="weir-tests", delta=True)
    yield session
    session.stop()


@pytest.fixture(autouse=True)
def spark_where_it_is_asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that needs Spark says so. Otherwise it would start a JVM without Delta's jars, which stays in this process
    for all tests after it."""

    def session(*arguments: Any, **options: Any) -> SparkSession:
        if "spark" not in request.fixturenames:
            pytest.fail('this test needs Spark and does not say so: @pytest.mark.usefixtures("spark")')
        return _start_spark(*arguments, **options)

    monkeypatch.setattr(runtime, "session", session)


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """A command in the tests' process sends the lines of structlog to stderr, for all that follows in this process."""
    configured, before = structlog.is_configured(), structlog.get_config()
    yield
    if configured:
        structlog.configure(**before)
    else:
        structlog.reset_defaults()


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaTopics]:
    """A broker, started where a test asks for it, and what tests do to it. It runs again before each test that uses
    it."""
    from tests.tools.kafka import KafkaTopics, broker_of_tests

    with broker_of_tests() as broker:
        yield KafkaTopics(broker)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pin-workers", action="store_true", help="keep each worker of xdist to one processor")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Two JVMs for all tests on Spark, one broker for all tests of Kafka, and one Postgres."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.tools.scheduling import ServerScheduling

    return ServerScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nine thousand items are made, of which none becomes garbage: the collector would look through them again and
    again, and at each full collection of the tests after that."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes share the tests, those that need a server begin first."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.tools.scheduling import servers_first

        servers_first(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """After the second since 1970 that `LONG_TESTS_UNTIL` names, no test with the mark `long` begins."""
    until = os.environ.get("LONG_TESTS_UNTIL")
    if until and item.get_closest_marker("long") and time.time() > float(until):
        pytest.skip("there was no time left for it (LONG_TESTS_UNTIL)")


def pytest_configure(config: pytest.Config) -> None:
    """Threads that hand over to each other all the time do so in a quarter less time on one processor than across
    two. Processes that tests start may use all: a JVM on one would leave the other idle."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and config.getoption("--pin-workers") and hasattr(os, "sched_setaffinity"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[int(worker.removeprefix("gw")) % len(processors)]})
        started = subprocess.Popen.__init__

        def start(*args: Any, **kwargs: Any) -> None:
            pinned = os.sched_getaffinity(0)
            os.sched_setaffinity(0, processors)
            try:
                started(*args, **kwargs)
            finally:
                os.sched_setaffinity(0, pinned)

        subprocess.Popen.__init__ = start


_status: list[int] = []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(exitstatus: int) -> None:
    _status.append(int(exitstatus))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Arrow's threads may abort a process that tears down (apache/arrow#34314): leave with pytest's status before
    that, and with what is to be done at the end done, like the removal of temporary directories."""
    if _status:
        atexit._run_exitfuncs()
        config.get_terminal_writer().flush()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status[-1])
