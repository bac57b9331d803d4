from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from state_ops.errors import ConfigurationError, DamageError, TransientError
from weir.execution.spark import java, spark_jars
from weir.execution.spark.spark_jars import delta_jars, fetch, locked_jars

CACHE = Path(__file__).parents[3] / ".weir" / "cache"  # shared with everything else that starts Spark here

STORAGE = next(jar for jar in locked_jars("delta") if jar.module == "delta-storage")  # the small one


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("something was started where the jars are already there")

    monkeypatch.setattr(spark_jars.subprocess, "run", start)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A cache directory of this test's own, with the jars."""
    (tmp_path / "cache" / "jars").mkdir(parents=True)
    for jar in delta_jars(CACHE):  # these alone: another process may be fetching others there
        shutil.copy(jar, tmp_path / "cache" / "jars")
    return tmp_path / "cache"


def visible(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir() if not file.name.startswith(".lock"))


def test_the_locked_jars_are_fetched():
    paths = delta_jars(CACHE)
    assert [path.name for path in paths] == ["delta-spark_4.2_2.13-4.4.0.jar", "delta-storage-4.4.0.jar"]
    assert all(path.is_file() and path.is_absolute() for path in paths)


@pytest.mark.usefixtures("no_java")
def test_a_second_call_starts_no_java_and_takes_milliseconds(filled):
    started = time.perf_counter()
    delta_jars(filled)
    assert time.perf_counter() - started < 0.5


def test_an_altered_or_truncated_jar_in_the_cache_is_fetched_anew_and_nothing_else_stays_behind(filled):
    jar = filled / "jars" / STORAGE.file_name
    whole = jar.read_bytes()
    jar.write_bytes(whole[:-1])
    before = visible(filled / "jars")
    delta_jars(filled)
    assert jar.read_bytes() == whole
    assert visible(filled / "jars") == before


@pytest.mark.long
def test_a_download_that_is_not_what_the_lock_says_is_refused_and_not_kept(tmp_path):
    with pytest.raises(DamageError, match=r"delta-storage-4\.4\.0\.jar is not the file") as failure:
        fetch([replace(STORAGE, sha256="0" * 64)], tmp_path)
    assert STORAGE.sha256 in str(failure.value)
    assert visible(tmp_path / "jars") == []


@pytest.mark.long
def test_what_a_killed_fetch_left_is_removed_by_the_next(tmp_path):
    leftover = tmp_path / "jars" / ".fetch-killed" / "jars"
    leftover.mkdir(parents=True)
    (leftover / STORAGE.file_name).write_bytes(b"half")
    fetch([STORAGE], tmp_path)
    assert visible(tmp_path / "jars") == [STORAGE.file_name]


def test_without_a_network_the_error_says_what_next_and_nothing_is_left(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=1")  # nobody listens there
    with pytest.raises(TransientError) as failure:
        fetch([STORAGE], tmp_path)
    assert STORAGE.file_name in str(failure.value)
    assert "connect this machine to the internet once" in str(failure.value)
    assert visible(tmp_path / "jars") == []


@pytest.mark.long
def test_the_packaged_java_fetches_too_in_a_directory_of_any_name(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(java, "_usual_places", list)
    # The wrapper is a shell script of builtins and one absolute path: it needs no PATH.
    [path] = fetch([STORAGE], tmp_path / "a cache [of] (mine)")
    assert path.is_file()


def test_a_lock_line_is_organisation_module_revision_and_digest():
    assert STORAGE.organisation == "io.delta"
    assert STORAGE.revision == "4.4.0"
    assert len(STORAGE.sha256) == 64


@pytest.mark.parametrize(
    ("installed", "fits"), [("4.2.0", True), ("4.2.17", True), ("4.20.0", False), ("5.2.0", False)]
)
def test_the_jars_are_for_the_minor_version_of_pyspark_that_is_installed(installed, fits, monkeypatch, tmp_path):
    monkeypatch.setattr(spark_jars, "fetch", lambda jars, _: jars)
    monkeypatch.setattr(spark_jars.metadata, "version", {"pyspark": installed}.__getitem__)
    if fits:
        assert spark_jars.delta_jars(tmp_path)
        return
    with pytest.raises(ConfigurationError, match=rf"PySpark {installed} is installed.* for Spark 4\.2\.") as refused:
        spark_jars.delta_jars(tmp_path)
    assert refused.value.next == "pip install 'pyspark==4.2.*'"
