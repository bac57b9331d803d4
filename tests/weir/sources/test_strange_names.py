"""Names of files and columns that something in between cannot take: refused by name, or set aside."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import InputError
from tests.recovery.harness import Site
from weir import Pipeline, delta, files, select
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run
from weir.sources.source_directory import LandingDirectory

FORMATS = ["parquet", "csv", "json"]


def site_of(root: Path, format: str, on_bad: str, pattern: str = "*") -> Site:
    source = files("{landing}/" + pattern, name="landing", format=format, on_bad=on_bad)
    kept = select("kept", source, "*", sink=delta.append("kept"))
    site = Site(root, {}, Pipeline("odd", (kept,), max_parallelism=8), __name__)
    site.landing.mkdir()
    return site


def put(path: Path, format: str, name: str = "x") -> None:
    if format == "parquet":
        with path.open("wb") as file:
            pq.write_table(pa.table({"n": [1], name: ["a"]}), file)
    else:
        path.write_text(f"n,{name}\n1,a\n" if format == "csv" else json.dumps({"n": 1, name: "a"}) + "\n")


def played(site: Site) -> list[Any]:
    return list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))


def set_aside(reports: list[Any]) -> list[str]:
    return [file["name"] for report in reports for file in report.checkpoint.slice["landing"].get("set_aside", ())]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("pattern", "below"), [("*", b""), ("**", b"d\xfe/")])
def test_a_file_whose_name_is_not_utf8_is_refused_by_name(tmp_path: Path, format: str, pattern: str, below: bytes):
    for on_bad in ("fail", "quarantine"):
        (root := tmp_path / on_bad).mkdir()
        site = site_of(root, format, on_bad, pattern)
        file = site.landing / os.fsdecode(below + b"a\xff")
        file.parent.mkdir(exist_ok=True)
        put(file, format)
        put(site.landing / "b", format)
        name = (below + b"a\xff").decode("utf-8", "backslashreplace")
        if on_bad == "fail":
            with pytest.raises(InputError, match="has a name that is not UTF-8") as refused:
                played(site)
            assert refused.value.where == f"{site.landing}/{name}"
            continue
        assert set_aside(played(site)) == [name]
        assert len(site.table("kept")) == 1 and not played(site)


@pytest.mark.parametrize("format", FORMATS)
def test_a_column_whose_name_has_a_nul_is_refused_by_name_and_left_alone_where_nobody_reads_it(
    tmp_path: Path, format: str
):
    site = site_of(tmp_path, format, "fail")
    put(site.landing / "a", format, "x\0y")
    with pytest.raises(InputError, match="NUL"):
        played(site)
    put(site.landing / "a", format)
    played(site)
    if format == "parquet":
        pq.write_table(pa.table({"n": [2], "x": ["b"], "x\0y": ["c"]}), site.landing / "b")
        played(site)
        assert sorted(site.table("kept")["x"]) == ["a", "b"]


def test_a_nul_in_the_name_of_a_field_within_a_column_is_found(tmp_path: Path):
    site = site_of(tmp_path, "parquet", "quarantine")
    pq.write_table(pa.table({"n": [[{"a\0": 1}]]}), site.landing / "a")
    assert set_aside(played(site)) == ["a"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_column_of_the_name_by_which_rows_are_told_apart_is_refused(tmp_path: Path, format: str):
    site = site_of(tmp_path, format, "fail")
    put(site.landing / "a", format, "_weir_row")
    with pytest.raises(InputError, match="'_weir_row'"):
        played(site)


@pytest.mark.parametrize("format", FORMATS)
def test_a_link_that_leads_back_to_where_it_lies_gives_no_row_twice(tmp_path: Path, format: str):
    site = site_of(tmp_path, format, "fail", "**")
    below = site.landing / "day"
    below.mkdir()
    put(below / "a", format)
    (site.landing / "self").symlink_to(site.landing)
    (below / "up").symlink_to(site.landing)
    (below / "here").symlink_to(below)
    played(site)
    assert len(site.table("kept")) == 1


def test_links_that_lead_to_each_other_end(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    put(tmp_path / "a" / "rows", "csv")
    (tmp_path / "a" / "over").symlink_to("../b")
    (tmp_path / "b" / "back").symlink_to("../a")
    landing = LandingDirectory(f"{tmp_path}/**", "source landing", None)
    assert {file.name for file in landing.files()} == {"a/rows", "b/back/rows"}


def test_a_first_file_without_a_column_is_refused_by_name(tmp_path: Path):
    site = site_of(tmp_path, "parquet", "fail")
    pq.write_table(pa.table({"n": [1]}).select([]), site.landing / "a")
    with pytest.raises(InputError, match="The input file a has no columns"):
        played(site)


@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_a_pipe_that_takes_a_files_place_holds_nobody(tmp_path: Path, format: str):
    put(tmp_path / "a", format)
    landing = LandingDirectory(f"{tmp_path}/*", "source landing", None)
    (file,) = landing.files()
    (tmp_path / "a").unlink()
    os.mkfifo(tmp_path / "a")
    with pytest.raises(InputError, match="A file changed"):
        landing.opened(file)
    with pytest.raises(InputError, match="A file changed"):
        landing.parquet.footer(file)
