"""What a landing directory takes for a file of its pattern, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pyarrow.fs as pafs
import pytest

from state_ops.errors import ConfigurationError
from weir.sources import source_directory
from weir.sources.source_directory import LandingDirectory


@pytest.mark.parametrize("pattern", ["[prod]/*.csv", "[prod]/in/*.csv", "[prod]/1.csv", "plain/data[1].csv"])
def test_brackets_that_are_meant_for_themselves_are_refused_with_how_to_write_them(tmp_path: Path, pattern: str):
    for name in ("[prod]/1.csv", "[prod]/in/1.csv", "plain/data[1].csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a\n1\n")
    with pytest.raises(ConfigurationError, match="matches nothing") as refused:
        LandingDirectory(f"{tmp_path}/{pattern}", "source s", None)
    assert "[[]" in str(refused.value.next)
    escaped = pattern.replace("[", "[[]")
    assert len(list(LandingDirectory(f"{tmp_path}/{escaped}", "source s", None).files())) == 1


def test_brackets_that_match_something_are_taken(tmp_path: Path):
    for name in ("[ab]", "a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.csv").write_text("a\n1\n")
    found = LandingDirectory(f"{tmp_path}/[ab]/*.csv", "source s", None).files()
    assert sorted(file.name for file in found) == ["a/1.csv", "b/1.csv"]
    assert list(LandingDirectory(f"{tmp_path}/[xy]/*.csv", "source s", None).files()) == []


def test_an_object_without_a_byte_that_stands_for_a_directory_is_no_file(tmp_path: Path, monkeypatch):
    (tmp_path / "day=1").mkdir()
    for name, text in (("day=1/1.json", "{}\n"), ("day=2", ""), ("2.json", ""), ("plain", "{}\n")):
        (tmp_path / name).write_text(text)
    pattern = f"{tmp_path}/**"
    assert {file.name for file in LandingDirectory(pattern, "s", None).files()} == {
        "day=1/1.json", "day=2", "2.json", "plain",
    }  # fmt: skip
    monkeypatch.setattr(source_directory, "_OBJECT_STORES", frozenset({"local"}))
    monkeypatch.setattr(LandingDirectory, "_on_disk", LandingDirectory._listed)
    found = {file.name for file in LandingDirectory(pattern, "s", None).files()}
    assert found == {"day=1/1.json", "2.json", "plain"}


def test_an_empty_object_above_others_is_a_directory_whatever_its_name():
    file, directory = pafs.FileType.File, pafs.FileType.Directory
    infos = [
        pafs.FileInfo("b/in/day.1", file, size=0), pafs.FileInfo("b/in/day.1", directory),
        pafs.FileInfo("b/in/x.y", file, size=0), pafs.FileInfo("b/in/x.y/1.json", file, size=3),
        pafs.FileInfo("b/in/empty.json", file, size=0),
    ]  # fmt: skip
    assert source_directory._markers(infos) == {"b/in/day.1", "b/in/x.y"}
