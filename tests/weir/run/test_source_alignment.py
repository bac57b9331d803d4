"""No input of a stage with several is read much further than the slowest."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.storage.branches import Branch
from tests.recovery.harness import Site
from weir import Pipeline, deduplicate, delta, files, join
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run
from weir.run.source_alignment import WaitingSources, waiting_sources

START = datetime(2026, 1, 1, tzinfo=UTC)
DAY, MINUTE = 86_400_000_000, 60_000_000
SCHEMA = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))])


def pipeline_of(**more) -> Pipeline:
    fast = files("{landing}/fast/*.parquet", name="fast", event_time="at", max_ahead="2d", **more)
    slow = files("{landing}/slow/*.parquet", name="slow", event_time="at", **more)
    unique = deduplicate("unique", fast, key=["id", "at"])
    joined = join("joined", unique, slow, on="id", within=("0s", "1h"), how="left", sink=delta.append("joined"))
    return Pipeline("pace", (unique, joined), max_parallelism=4)


def at(newest: int | None, rows: int = 1) -> dict:
    return {"newest": newest, "files": rows}


@pytest.mark.parametrize(
    ("offsets", "quiet", "expected"),
    [
        ({}, {}, WaitingSources()),
        ({"fast": at(5 * DAY), "slow": at(4 * DAY)}, {}, WaitingSources()),
        ({"fast": at(5 * DAY), "slow": at(3 * DAY)}, {}, WaitingSources()),
        ({"fast": at(5 * DAY), "slow": at(2 * DAY)}, {}, WaitingSources(frozenset({"fast"}))),
        ({"fast": at(2 * DAY), "slow": at(5 * DAY)}, {}, WaitingSources()),
        ({"fast": at(5 * DAY)}, {}, WaitingSources(frozenset({"fast"}))),
        ({"fast": at(5 * DAY), "slow": at(None)}, {}, WaitingSources()),
        ({"fast": at(5 * DAY), "slow": at(2 * DAY)}, {"slow": 0}, WaitingSources(frozenset({"fast"}), frozenset({"fast"}))),
        ({"fast": at(5 * DAY), "slow": at(2 * DAY)}, {"slow": -4 * MINUTE}, WaitingSources()),
    ],
    ids=["nothing is read", "near", "as far as it may", "too far", "the other way", "nothing of the other",
         "the other says no times", "the other is quiet", "the other is idle"],
)  # fmt: skip
def test_who_waits(offsets, quiet, expected):
    assert waiting_sources(pipeline_of(), offsets, quiet, MINUTE) == expected


def test_on_a_branch_nobody_waits_for_who_has_come_to_the_end():
    branch = replace(pipeline_of(), branch=Branch("fix", "0123"))
    offsets = {"fast": at(5 * DAY), "slow": at(2 * DAY)}
    assert (
        waiting_sources(branch, offsets, {}, MINUTE).sources
        and not waiting_sources(branch, offsets, {"slow": MINUTE}, MINUTE).sources
    )


def land(site: Site, source: str, number: int) -> None:
    rows = [{"id": key, "at": START + timedelta(days=number, hours=key)} for key in range(3)]
    folder = site.landing / source
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / f".{number:03}")
    (folder / f".{number:03}").rename(folder / f"{number:03}.parquet")


def test_a_source_with_a_long_past_waits_for_the_slower_one_and_goes_on_once_that_is_idle(tmp_path):
    options = {"WEIR_EPOCH__MAX_FILES": "1", "WEIR_RUN__POLL_SECONDS": "0.02", "WEIR_CHECKPOINTS__NUM_RETAINED": "50"}
    site = Site(tmp_path, options, pipeline_of(idle_after="3s"), "tests.weir.run.test_source_alignment")
    for name in ("fast", "slow"):
        (site.landing / name).mkdir(parents=True)
    for number in range(12):
        land(site, "fast", number)
    for number in range(3):
        land(site, "slow", number)
    seen = []
    for report in run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()):
        fast, slow = (report.checkpoint.offsets[name]["newest"] for name in ("fast", "slow"))
        seen.append((report.checkpoint.epoch_now, (fast - slow) // DAY))
    first = {ahead: moment for moment, ahead in reversed(seen)}
    assert sorted(first) == list(range(10))
    assert sum(ahead == 3 for _, ahead in seen) <= 2, (
        "no epochs are begun one after the other while nothing may be read"
    )
    end = max(moment for moment, ahead in seen if ahead == 0)
    assert first[4] - end >= timedelta(seconds=3), "at three days ahead it waits until the slower one is idle"
    table = pl.read_delta(str(site.storage / "tables" / "joined"))
    assert table.filter(pl.col("at_right").is_not_null()).height == 9, (
        "each row of the slower one has found its partner"
    )
