"""The peers' own environments: what their Python packages pin does not go together with the project's, or each other's.

    <scratch>/peers/<name>/    a virtual environment
    <scratch>/cache/jars/      Flink's Parquet format, which its Python package lacks; its Hadoop is PySpark's

Made on first use by uv, from the package index that uv is configured for.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from weir.execution.spark.java import java_home
from weir.execution.spark.spark_jars import LockedJar, fetch

PACKAGES = {
    "flink": ("apache-flink==2.3.0",),
    "bytewax": ("bytewax==0.21.1", "pyarrow==26.0.1"),
}
_PARQUET = LockedJar(
    "flink",
    "org.apache.flink",
    "flink-sql-parquet",
    "2.3.0",
    "f30617f4a5a6d437750f155ff72178ab34439aec91df64d96621c260559ba5fd",
)
_INSTALL_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Environment:
    """python: its interpreter; variables: what its programs need in their environment."""

    python: str
    variables: dict[str, str]


def environment(name: str | None, scratch: Path) -> Environment:
    """The environment of this name, None for the project's own. Raises RuntimeError with the installer's words."""
    java = {"JAVA_HOME": str(java_home(scratch / "cache"))}
    if name is None:
        return Environment(sys.executable, java)
    directory = scratch / "peers" / name
    if not (directory / "_DONE").exists():
        print(f"making an environment for {name}: {', '.join(PACKAGES[name])}", flush=True)
        uv = str(Path(sys.executable).with_name("uv"))
        _do([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(directory)])
        _do([uv, "pip", "install", "--quiet", "--python", str(directory / "bin" / "python"), *PACKAGES[name]])
        (directory / "_DONE").touch()
    variables = dict(java)
    if name == "flink":
        pyspark = find_spec("pyspark")
        assert pyspark is not None and pyspark.origin is not None, "a dependency of the project"
        jars = [*Path(pyspark.origin).parent.glob("jars/hadoop-client-*.jar"), *fetch([_PARQUET], scratch / "cache")]
        variables["HADOOP_CLASSPATH"] = ":".join(map(str, jars))
        # Thread mode embeds an interpreter in the JVM, which does not know of virtual environments.
        variables["PYTHONPATH"] = str(next(directory.glob("lib/python*/site-packages")))
    return Environment(str(directory / "bin" / "python"), variables)


def _do(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-1000:])
