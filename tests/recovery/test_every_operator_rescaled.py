"""Every operator where the number of subtasks changes, where checkpoints do not wait, where its state is read at older
checkpoints, and where rows are delivered otherwise than exactly once: always what DuckDB says of the input."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from state_ops.checkpoints.registry import Registry
from state_ops.errors import WeirError
from state_ops.records.checkpoint import Checkpoint
from tests.recovery import every_operator as every
from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from weir import testing
from weir.epoch import steps
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.run.run import RunOptions, run

BEHIND_STAGES = {
    "windowed", "counts", "alike", "highs", "named", "strictly", "best", "sums", "lately", "unique", "visits"
}  # fmt: skip
"""Stages of one input that read another stage, and in front of which rows are left; `final` has few."""


def ran(site: Site, parallelism: int, epochs: int | None = None, **options: bool) -> list[Checkpoint]:
    """A run of that many subtasks until all is read, or for some epochs."""
    site = replace(site, options={**site.options, "WEIR_SPARK__PARALLELISM": str(parallelism)})
    reports = run(site.pipeline, site.settings, RunOptions(until_caught_up=True, **options), InMemoryExecutor(7))
    some = [report.checkpoint for _, report in zip(range(epochs or 1000), reports, strict=False)]
    reports.close()
    return some


def comparable(frame: pl.DataFrame) -> list[tuple]:
    return sorted(frame.with_columns(pl.col(pl.Datetime).dt.epoch("us")).rows(), key=str)


def assert_tables(site: Site) -> None:
    """After a drain."""
    for name, wanted in every.said_by_duckdb(site, every.TABLES).items():
        table = pl.read_delta(str(site.storage / "tables" / name))
        assert comparable(table.select(wanted.columns)) == comparable(wanted), name
    low, lately = (pl.read_delta(str(site.storage / "tables" / name)) for name in ("low", "lately"))
    assert comparable(lately.group_by("k").agg(pl.col("n").sum())) == comparable(low.group_by("k").agg(n=pl.len()))


def assert_state(site: Site, checkpoint: Checkpoint, upto: int) -> None:
    """State at a checkpoint is what DuckDB makes of the first files."""
    for uid, wanted in every.said_by_duckdb(site, every.STATES, upto, checkpoint).items():
        tables = list(state_reader.scan(site.pipeline, site.settings, uid, at=int(checkpoint.id)))
        kept = pl.concat(map(pl.DataFrame, tables)) if tables else wanted.clear()
        assert comparable(kept.select(wanted.columns)) == comparable(wanted), (uid, checkpoint.id)


def test_at_any_parallelism_and_at_any_checkpoint_it_is_what_duckdb_says(tmp_path):
    site = every.site_at(tmp_path)
    history = []
    for number, parallelism in enumerate((2, 3, 1), 1):
        every.land(site, number)
        *_, checkpoint = ran(site, parallelism)  # windows that close make epochs of their own
        history.append(checkpoint)
    ran(site, 2, drain=True)
    assert_tables(site)
    for number, checkpoint in enumerate(history, 1):
        assert_state(site, checkpoint, number)
    site.assert_no_orphans()


@pytest.mark.long
def test_in_a_test_slicing_does_not_matter(tmp_path):
    site = every.site_at(tmp_path)
    every.land(site, 1)
    rows = {name: pl.read_parquet(str(site.landing / name / "*.parquet"))[:20] for name in ("bids", "asks", "quiet")}
    names = pl.read_delta(str(site.landing / "names"))
    tables = {"named": names, "strictly": names}
    testing.assert_slicing_does_not_matter(every.pipeline, rows, tables=tables, trials=2)


def test_where_checkpoints_do_not_wait_it_is_the_same_at_any_parallelism(tmp_path):
    """A run ends at its first checkpoint, which has left rows in front of stages, and others go on with them."""
    site = every.site_at(
        tmp_path, WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS="0", WEIR_CHECKPOINTS__MAX_CONCURRENT="1"
    )
    every.land(site, 1, 2)
    history = [checkpoint for parallelism in (2, 3, 1) for checkpoint in ran(site, parallelism, epochs=1)]
    history += ran(site, 2, drain=True)
    waiting = [{uid for uid, stats in row.operators.items() if stats.rows_waiting} for row in history]
    assert set().union(*waiting) - {"final"} == BEHIND_STAGES and all(waiting[:3]) and not waiting[-1]
    assert_tables(site)
    assert_state(site, history[-1], 2)
    site.assert_no_orphans()


def cut_off(*asked, **options):
    raise OSError("cut off")


@pytest.mark.parametrize(
    ("delivery", "step", "read"),
    sampled(
        [("at_least_once", (Registry, "commit"), (1, 2, 3)), ("at_most_once", (steps, "completed"), (1, 3))], keep=0
    ),
)
def test_an_epoch_that_fails_is_in_state_once_or_was_never_there(tmp_path, monkeypatch, delivery, step, read):
    """At least once its rows are in tables, doubled at the most; at most once nothing is left of them."""
    site = every.site_at(tmp_path)
    site = replace(site, pipeline=replace(site.pipeline, delivery=delivery))
    every.land(site, 1)
    ran(site, 2)
    every.land(site, 2)
    with monkeypatch.context() as patched:
        patched.setattr(*step, cut_off)
        with pytest.raises(WeirError):
            ran(site, 2)
    every.land(site, 3)
    checkpoint = ran(site, 2)[-1]
    if 2 not in read:
        for name in ("bids", "asks"):
            (site.landing / name / "2.parquet").unlink()
    assert_state(site, checkpoint, len(read))
    ran(site, 2, drain=True)
    for name, wanted in every.said_by_duckdb(site, every.TABLES).items():
        shown = comparable(pl.read_delta(str(site.storage / "tables" / name)).select(wanted.columns))
        if delivery == "at_least_once":
            assert set(shown) == set(comparable(wanted)), name
        else:
            assert shown == comparable(wanted), name
