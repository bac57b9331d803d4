"""A Spark Connect server on this machine, whose tasks find no file of the project: its code comes with the session."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from tests.tools.servers import free_port, missing
from tests.tools.spark_cluster import kill_family
from weir.execution.spark.java import java_home
from weir.execution.spark.spark_session import reach
from weir.settings.configuration import load

_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
_PACKAGES = ("grpc", "grpc_status", "zstandard")
_PATIENCE = 120.0


@contextmanager
def connect_server(home: Path) -> Iterator[str]:
    """Serve in `home`, and give the server's address as `spark.master` takes it.

    Skips the test, or fails it, where the packages of Spark Connect's client are not installed.
    """
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            missing(f"there is no {package} here: pip install 'pyspark[connect]'")
    home.mkdir(parents=True)
    port, log = free_port(), home / "server.log"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WEIR_", "PYTHON", "PYSPARK_"))}
    env |= {"JAVA_HOME": str(java_home(load({}).cache_dir)), "PYSPARK_PYTHON": sys.executable}
    conf = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    command = [str(Path(pyspark.__file__).parent / "bin/spark-submit"), "--master", "local[2]", "--class", _CLASS]
    command += [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
    with log.open("wb") as sink:
        server = subprocess.Popen([*command, "spark-internal"], env=env, cwd=home, stdout=sink, stderr=sink)
    try:
        _wait(server, f"sc://127.0.0.1:{port}", log)
        yield f"sc://127.0.0.1:{port}"
    finally:
        kill_family(server.pid)
        server.wait()


def _wait(server: subprocess.Popen[bytes], master: str, log: Path) -> None:
    until = time.monotonic() + _PATIENCE
    while server.poll() is None and time.monotonic() < until:
        try:
            reach(master)
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")
