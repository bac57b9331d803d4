"""Files that are landed for a slice go when nobody can name them any more, while the run goes on."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from state_ops.errors import InputError, TransientError
from state_ops.storage.instrumented_store import NAMES
from tests.weir.sources import test_decoded_files as decoded
from tests.weir.sources.partitions import Partitions, put, row
from tests.weir.sources.test_connector_reader import ARCHIVED, READ, SOURCE, epochs, landed, site_of, totals
from weir import files
from weir.epoch.scheduler import EpochScheduler
from weir.execution.in_process import InMemoryExecutor
from weir.operations import drill, plan
from weir.ownership.pipeline_storage import readers
from weir.run import fsck
from weir.run.run import RunOptions, run
from weir.sources.source_directory import LandingDirectory

NO_FAILURE = {"WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "0"}


class FailingOnce(InMemoryExecutor):
    """Its first job fails."""

    failed = False

    def run(self, *what: Any) -> Any:
        if not self.failed:
            self.failed = True
            raise TransientError("The cluster is away.")
        return super().run(*what)


@pytest.mark.parametrize("source", [SOURCE, ARCHIVED], ids=["landed", "archived"])
def test_what_other_parts_have_landed_goes_where_one_cannot_be_read(tmp_path, monkeypatch, source):
    site = site_of(tmp_path, source, NO_FAILURE)
    for name in "pqrst":
        put(site.landing, name, row("a", 1, 1))
    begun: list[str] = []

    def read(self: Partitions, part: Any) -> Any:
        begun.append(part.partition)
        if part.partition == "s":
            while len(begun) < 4 or len(landed(site)) < 2:
                time.sleep(0.01)
            raise TransientError("The server is away.")
        if part.partition == "r":  # comes after the others have failed
            time.sleep(0.5)
        return READ(self, part)

    monkeypatch.setattr(Partitions, "read", read)
    with pytest.raises(TransientError):
        epochs(site)
    assert "s" in begun and landed(site) == []


def test_what_a_plan_has_landed_goes_that_is_not_begun(tmp_path, monkeypatch):
    site = site_of(tmp_path)
    put(site.landing, "p", row("a", 1, 1))
    begin, refused = EpochScheduler.begin, list[int]()

    def refusing(self: EpochScheduler, plan: Any) -> bool:
        if len(refused) < 2:
            refused.append(len(landed(site)))
            return False
        assert len(landed(site)) == 1
        return begin(self, plan)

    monkeypatch.setattr(EpochScheduler, "begin", refusing)
    epochs(site)
    assert refused == [1, 1] and totals(site) == {"a": (1, 1)} and landed(site) == []


def test_what_an_archived_source_has_landed_goes_with_its_epoch(tmp_path):
    site = site_of(
        tmp_path, ARCHIVED, {"WEIR_CHECKPOINTS__NUM_RETAINED": "9", "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "3"}
    )
    for n in range(3):
        put(site.landing, "p", row("a", n, n))
        list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor=FailingOnce()))
        assert len(landed(site)) == n + 1
    assert totals(site) == {"a": (3, 3)} and fsck.examine(site.pipeline, site.settings).findings == ()


def test_what_a_run_has_landed_goes_with_the_failure_that_ends_it(tmp_path):
    site = site_of(tmp_path, ARCHIVED, NO_FAILURE)
    put(site.landing, "p", row("a", 1, 1))
    with pytest.raises(TransientError):
        list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor=FailingOnce()))
    assert not [file for file in (site.storage / "landed").rglob("*") if file.is_file()]


SOURCE_OF_JSON = files("{landing}/*.json", format="json", schema=decoded.SCHEMA, event_time="at")
GOOD = json.dumps({"id": "a", "n": 1, "at": "2026-05-01T12:00:00Z"})


def test_what_files_before_have_landed_goes_where_one_cannot_be_decoded(tmp_path):
    site = decoded.site_of(tmp_path, SOURCE_OF_JSON)
    (site.landing / "1.json").write_text(f"{GOOD}\n")
    (site.landing / "2.json").write_text("no json\n")
    with pytest.raises(InputError):
        decoded.epochs(site)
    assert landed(site) == []


def test_a_file_that_is_set_aside_once_it_is_landed_leaves_nothing(tmp_path):
    source = files("{landing}/*.csv", format="csv", on_bad="quarantine")
    site = decoded.site_of(tmp_path, source)
    (site.landing / "1.csv").write_text("id,n\na,1\n")
    (site.landing / "2.csv").write_text("id,other\na,1\n")
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor=InMemoryExecutor()))
    assert decoded.totals(site) == {"a": (1, 1)} and landed(site) == []


def test_weir_plan_lands_nothing_of_files_in_the_pipelines_storage(tmp_path):
    site = decoded.site_of(tmp_path, SOURCE_OF_JSON)
    (site.landing / "1.json").write_text(f"{GOOD}\n")
    assert plan.plan(site.pipeline, site.settings) is not None
    assert not list(Path(tmp_path).rglob("*.parquet"))


def test_a_file_that_waits_decoded_is_decoded_anew_where_it_is_gone(tmp_path):
    site = decoded.site_of(tmp_path, SOURCE_OF_JSON, WEIR_EPOCH__MAX_ROWS="3")
    for number in range(3):
        (site.landing / f"{number}.json").write_text(f"{GOOD}\n{GOOD}\n")
    reader, limits = readers(site.pipeline, site.settings)["files"], site.settings.epoch
    first = reader.plan(None, limits, None)
    assert first.limited and len(landed(site)) == 2, "that of the next file too"
    for file in landed(site):  # as requested maintenance does between two epochs
        file.unlink()
    second = reader.plan(reader.advance(None, first), limits, first.schema)
    ((_, rows),) = reader.batches(second.files[0], second.schema, 9)
    assert rows.to_pylist()[0]["n"] == 1


def test_requests_for_what_is_landed_are_in_an_epochs_totals(tmp_path):
    counts = []
    for name, partitions in (("one", "p"), ("many", "pqrstuvwxy")):
        site = site_of(tmp_path / name)
        for partition in partitions:
            put(site.landing, partition, row("a", 1, 1))
        (first,) = epochs(site)
        put(site.landing, "p", row("a", 1, 1))
        (second,) = epochs(site)
        counts.append([{name: done.checkpoint.totals[name] for name in NAMES} for done in (first, second)])
    (single, single_after), (many, many_after) = counts
    assert many["requests_put"] - single["requests_put"] == 9, "a file for each part"
    assert many["bytes_up"] - single["bytes_up"] > 9 * 500
    assert many_after["requests_put"] - many["requests_put"] == single_after["requests_put"] - single["requests_put"]


@pytest.mark.parametrize("name", ["a[b]", "a*?", "[!a]{b}"])
def test_a_storage_root_may_have_any_characters(tmp_path, name):
    site = site_of(tmp_path / name, ARCHIVED, {"WEIR_CHECKPOINTS__NUM_RETAINED": "2"})
    for n in range(2):
        put(site.landing, "p", row("a", n, n))
        epochs(site)
    rows = DeltaTable(site.storage / "tables" / "sums").to_pyarrow_table().sort_by("epoch").to_pylist()
    assert [(row["n"], row["total"]) for row in rows] == [(1, 0), (2, 1)]
    assert fsck.examine(site.pipeline, site.settings).findings == ()
    if "[" not in name:  # a restore is recorded by delta-rs' writer, which takes no such path
        done = drill.drill(site.pipeline, site.settings, executor=InMemoryExecutor())
        assert done.replay is not None and not done.problems, done


def test_a_character_that_is_no_wildcard_can_be_written_in_a_pattern(tmp_path):
    home = tmp_path / "a[1]" / "b*"
    home.mkdir(parents=True)
    (home / "1.csv").touch()
    escaped = f"{tmp_path}/a[[]1]/b[*]"
    for pattern in (f"{escaped}/*.csv", f"{tmp_path}/a[[]1]/*/*.csv", f"{tmp_path}/a?1?/b[*]/*.csv"):
        assert [file.name.rpartition("/")[2] for file in LandingDirectory(pattern, "here", None).files()] == ["1.csv"]
    assert LandingDirectory(f"{escaped}/*.csv", "here", None).directory == str(home)


def test_bad_rows_of_all_parts_of_a_slice_are_bounded_together(tmp_path):
    site = site_of(tmp_path, replace(SOURCE, on_bad="quarantine"), NO_FAILURE)
    for name in "pqrst":
        put(site.landing, name, *("x" * 4000 for _ in range(1000)))  # 16 MiB as Python may hold them
    with pytest.raises(InputError, match="do not fit into 64 MiB") as refused:
        epochs(site)
    assert "epoch.max_rows" in str(refused.value) and landed(site) == []
    smaller = replace(site, options={**site.options, "WEIR_EPOCH__MAX_FILES": "2"})
    for name in "pqrst":
        put(site.landing, name, row("a", 1, 1))
    epochs(smaller)
    assert totals(smaller) == {"a": (5, 5)} and site.table("sums_quarantine").shape[0] == 5000


def test_a_file_whose_bad_rows_have_no_room_in_a_slice_waits_for_the_next(tmp_path):
    source = replace(SOURCE_OF_JSON, on_bad="quarantine")
    site = decoded.site_of(tmp_path, source)
    for number in range(9):
        (site.landing / f"{number}.json").write_text(f"{GOOD}\n" + ("x" * 4000 + "\n") * 1000)
    done = decoded.epochs(site)
    assert [done.checkpoint.slice["files"]["bad_rows"] for done in done] == [4000, 4000, 1000]
    assert decoded.totals(site) == {"a": (9, 9)} and site.table("sums_quarantine").shape[0] == 9000
