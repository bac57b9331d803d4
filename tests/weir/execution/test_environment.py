"""The environment that Weir's JVM gets, in processes whose own is meant for another Spark, or lacks something."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pyspark
import pytest

from state_ops.errors import ConfigurationError
from weir.execution.spark import environment
from weir.execution.spark.imports import SERIES
from weir.settings.configuration import PROJECT

_VARIABLES = [
    "SPARK_HOME",
    "SPARK_CONF_DIR",
    "HADOOP_CONF_DIR",
    "YARN_CONF_DIR",
    "PYSPARK_SUBMIT_ARGS",
    "SPARK_LOCAL_HOSTNAME",
    "SPARK_LOCAL_IP",
    "SPARK_REMOTE",
    "SPARK_CONNECT_MODE_ENABLED",
]


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", ["SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"])
def test_what_makes_pyspark_a_client_of_connect_is_named(monkeypatch, name):
    environment.check("local[2]")
    monkeypatch.setenv(name, "sc://elsewhere")
    with pytest.raises(ConfigurationError, match=name):
        environment.check("local[2]")


def test_a_local_spark_does_not_follow_what_is_meant_for_another(monkeypatch):
    for name in ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "PYSPARK_SUBMIT_ARGS"):
        monkeypatch.setenv(name, "/nowhere")
    with environment.environment(environment.variables("local[2]")):
        assert not {"HADOOP_CONF_DIR", "PYSPARK_SUBMIT_ARGS"} & os.environ.keys()
        # A JVM refuses an archive of classes where a directory with files is on its class path.
        assert not Path(os.environ["SPARK_CONF_DIR"]).exists()
        assert os.environ["SPARK_LOCAL_IP"] == "127.0.0.1"
    assert os.environ["PYSPARK_SUBMIT_ARGS"] == "/nowhere" and "SPARK_LOCAL_IP" not in os.environ
    assert environment.variables("spark://host:7077") == {}


def test_arguments_for_a_cluster_without_the_shell_are_named(monkeypatch):
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--packages a:b:1 pyspark-shell")
    environment.check("yarn")
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--packages a:b:1")
    with pytest.raises(ConfigurationError, match="pyspark-shell"):
        environment.check("yarn")


@pytest.mark.parametrize("version", ["3.5.1", None, pyspark.__version__])
def test_a_home_of_another_spark_is_not_followed(monkeypatch, tmp_path, version):
    (tmp_path / "jars").mkdir()
    if version is not None:
        (tmp_path / f"jars/spark-core_2.13-{version}.jar").touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    replaced = environment.variables("yarn").get("SPARK_HOME")
    assert replaced == (None if version == pyspark.__version__ else str(Path(pyspark.__file__).parent))


@pytest.mark.parametrize(
    ("code", "said"),
    [("raise ImportError('not for this Python')", "not for this Python"), ("__version__ = '3.5.1'", "PySpark 3.5.1")],
)
def test_another_pyspark_that_python_finds_first_is_named(tmp_path, code, said):
    other = tmp_path / "pyspark"
    for name in ["", "errors", *(f"sql{part}" for part in ("", "/functions", "/types", "/utils", "/window"))]:
        (other / name).mkdir(parents=True, exist_ok=True)
        (other / name / "__init__.py").touch()
    pandas = other / "sql" / "pandas"
    pandas.mkdir()
    for name in ("__init__", "conversion", "functions", "map_ops", "serializers", "typehints", "types", "utils"):
        (pandas / f"{name}.py").touch()
    (other / "__init__.py").write_text(code)
    asked = "from weir.execution.spark.imports import load_pyspark; load_pyspark()"
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PROJECT}"}
    answer = subprocess.run(
        [sys.executable, "-c", asked], env=env, cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert "ConfigurationError" in answer.stderr and said in answer.stderr
    assert str(other) in answer.stderr and "Unset PYTHONPATH" in answer.stderr


def test_the_pyspark_that_weir_is_written_for_is_the_projects():
    allowed = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert any(line.startswith(f"pyspark>={SERIES},") for line in allowed)


def test_a_machine_without_the_loopback_address_of_ipv4_is_told_so(monkeypatch):
    class Nowhere(socket.socket):
        def bind(self, address: object) -> None:
            raise OSError(errno.EADDRNOTAVAIL, f"no {address}")

    monkeypatch.setattr(socket, "socket", Nowhere)
    with pytest.raises(ConfigurationError, match=r"no address 127\.0\.0\.1"):
        environment.check("local[2]")


def test_a_user_without_a_name_is_told_the_line_that_is_missing(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(ConfigurationError) as raised:
        environment.check("local[2]")
    assert "weir:x:54321:" in str(raised.value)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Java has names of files in UTF-8")
@pytest.mark.parametrize(
    "given", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX"}, {"LANG": "C"}, {}, {"LC_ALL": "C.UTF-8"}], ids=str
)
def test_java_reads_names_of_files_as_python_does(given):
    code = (
        "import json, locale, os; from weir.execution.spark import environment\n"
        "print(json.dumps(os.environ | {k: v for k, v in environment.variables('yarn').items() if v}))"
    )
    env = {"PATH": os.environ["PATH"], **given}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, env=env, check=True
    )
    got = json.loads(done.stdout.splitlines()[-1])
    effective = got.get("LC_ALL") or got.get("LC_CTYPE") or got.get("LANG") or "C"
    assert effective.lower().replace("-", "").endswith("utf8"), effective
