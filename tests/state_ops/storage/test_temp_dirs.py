"""Directories of processes that were killed go; those of processes that live stay, whatever their pids are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from state_ops.storage import temp_dirs as directories
from state_ops.storage.storage import Storage
from state_ops.storage.temp_dirs import resumable, scratch

_HOLDS = (
    "import os, sys, time; from pathlib import Path; from state_ops.storage.temp_dirs import scratch\n"
    "os.getpid = lambda: 1  # as in a container\n"
    "with scratch(Path(sys.argv[1]), '.') as own:\n"
    "    (own / 'kept').mkdir(); print(own.name, flush=True); time.sleep(600)\n"
)


@pytest.fixture
def another(tmp_path):
    """A process at work in a directory of its own; the directory."""
    with subprocess.Popen([sys.executable, "-c", _HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, tmp_path / process.stdout.readline().strip()
        process.kill()


def names(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir())


def test_a_directory_goes_with_its_block(tmp_path):
    with pytest.raises(ValueError, match="in the middle"), scratch(tmp_path / "new", ".gates-") as directory:
        assert directory.name.startswith(f".gates-{os.getpid()}-")
        (directory / "file").write_text("x")
        raise ValueError("in the middle")
    assert names(tmp_path / "new") == []


def test_a_killed_process_leaves_nothing_for_long_although_its_pid_comes_again(tmp_path, another, monkeypatch):
    process, left = another
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with scratch(tmp_path, "."):
        assert left.exists(), "it lives"
    process.kill()
    process.wait()
    assert names(tmp_path) == [left.name]
    with scratch(tmp_path, ".") as directory:
        assert names(tmp_path) == [directory.name]


def test_copies_of_objects_that_a_killed_process_had_fetched_go(tmp_path):
    storage, left = Storage(str(tmp_path / "pipeline")), tmp_path / "work" / f"weir-fetched-{os.getpid()}-a"
    storage.put_bytes("object", b"content")
    left.mkdir(parents=True)
    with storage.fetched("object", tmp_path / "work") as local:
        assert local.read_bytes() == b"content" and not left.exists()
    assert names(tmp_path / "work") == []


def test_other_names_and_other_threads_directories_stay(tmp_path):
    for name in (".hidden-file", "1-a", ".gates-1-a"):
        (tmp_path / name).mkdir()
    with scratch(tmp_path, ".") as first, scratch(tmp_path, ".") as second:
        assert first.exists() and second.exists()
    assert names(tmp_path) == [".gates-1-a", ".hidden-file", "1-a"]


def test_one_that_is_swept_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    locked, swept = directories.fcntl.flock, []

    def late(lock, how):
        if not swept:
            swept.extend(tmp_path.iterdir())
            shutil.rmtree(swept[0])
        locked(lock, how)

    monkeypatch.setattr(directories.fcntl, "flock", late)
    with scratch(tmp_path, ".") as directory:
        assert directory.exists() and directory not in swept


@pytest.mark.parametrize("made_again", [False, True])
def test_work_that_somebody_ends_before_it_is_locked_is_begun_anew(tmp_path, monkeypatch, made_again):
    """Who ends it renames the directory, whose lock is then one on something else."""
    locked, target = directories.fcntl.flock, tmp_path / ".restoring-a"

    def late(lock, how):
        if not (tmp_path / "done").exists():
            target.rename(tmp_path / "done")
            if made_again:
                target.mkdir()
        locked(lock, how)

    monkeypatch.setattr(directories.fcntl, "flock", late)
    with resumable(tmp_path, ".restoring-", "a") as kept:
        assert kept == target and target.exists()
        with resumable(tmp_path, ".restoring-", "a") as second:
            assert second is None, "it is locked"


def test_a_directory_that_is_made_again_before_it_is_removed_stays(tmp_path, monkeypatch):
    locked, target = directories.fcntl.flock, tmp_path / ".restoring-a"
    target.mkdir()

    def late(lock, how):
        target.rename(tmp_path / "done")
        target.mkdir()
        locked(lock, how)

    monkeypatch.setattr(directories.fcntl, "flock", late)
    directories.remove_left(target)
    assert target.exists()


def test_what_is_no_directory_of_ours_is_left_alone_and_blocks_nobody(tmp_path):
    """The machine's temporary directory is everybody's: a pipe there would keep whoever opens it waiting for ever."""
    os.mkfifo(tmp_path / "weir-spark-1-abc")
    (tmp_path / "precious").mkdir()
    (tmp_path / "weir-spark-2-abc").symlink_to(tmp_path / "precious")
    (tmp_path / "weir-spark-3-abc").write_text("somebody's")
    with scratch(tmp_path, "weir-spark-") as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
    with resumable(tmp_path, "weir-spark-", "work") as directory:
        assert directory is not None and directory.stat().st_mode & 0o777 == 0o700
    assert names(tmp_path) == [
        "precious",
        "weir-spark-1-abc",
        "weir-spark-2-abc",
        "weir-spark-3-abc",
        "weir-spark-work",
    ]


def test_a_directory_of_another_user_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "weir-spark-1-abc").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    directories.remove_left(tmp_path / "weir-spark-1-abc")
    assert names(tmp_path) == ["weir-spark-1-abc"]
