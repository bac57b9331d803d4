"""Epochs of unaligned checkpoints are played again: what waited is applied first, and what the epoch left is left."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from state_ops.records.checkpoint import Checkpoint
from tests.recovery import test_unaligned as unaligned
from tests.recovery.harness import Site
from tests.recovery.unordered import epochs
from tests.tools.sampling import sampled
from tests.tools.stages import altered
from weir import Epoch, ValueState, debugging
from weir.definition import Stage


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Site, list[Checkpoint]]:
    """A site whose stages stop after each batch, and its epochs."""
    site = unaligned.site_at(tmp_path_factory.mktemp("unaligned"), WEIR_CHECKPOINTS__NUM_RETAINED="99")
    unaligned.land(site, 1)
    return site, epochs(site, drain=True)


def debug(site: Site, epoch: int, stage: str, **asked) -> debugging.Played:
    return debugging.debug(site.pipeline, epoch, stage=stage, settings=site.settings, **asked)


def has_left(row: Checkpoint, stage: str) -> bool:
    return any(batch["begun"] for batch in row.operators[stage].waiting)


@pytest.mark.parametrize("stage", sampled([stage.uid for stage in unaligned.pipeline.stages[1:]], 2))
def test_what_an_epoch_left_and_what_had_waited_is_told_apart(run, stage):
    site, history = run
    left = [row for row in history if has_left(row, stage)]
    assert left
    after = next(row for row in history if row.parent_id == left[-1].id)
    for row in (left[0], left[-1], after):
        seen = debug(site, row.id, stage)
        assert seen.is_same, seen.verdict
        assert seen.rows.height == row.operators[stage].rows_in


@pytest.mark.long
def test_a_key_whose_rows_had_waited_is_explained(run):
    site, _ = run
    row = site.table("timed").iloc[-1]
    seen = debugging.explain(
        site.pipeline, "timed", f"k = '{row['k']}' AND rows = {row['rows']}", settings=site.settings
    )
    assert seen.played is not None and seen.played.is_same
    assert not [of for of in seen.statements if "waited" in of.what]


def test_a_planted_wrong_key_is_found_where_rows_wait(run):
    site, history = run
    row = next(row for row in history if has_left(row, "timed"))
    right = unaligned.timed.function
    assert right is not None

    def wrong(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        return right(rows.filter(rows["k"] != rows["k"][0]) if rows.height else rows, state, epoch)

    stages = tuple(altered(stage, function=wrong) if stage.uid == "timed" else stage for stage in site.pipeline.stages)
    other: tuple[Stage, ...] = stages
    seen = debugging.debug(replace(site.pipeline, stages=other), row.id, stage="timed", settings=site.settings)
    assert not seen.is_same and "differs" in seen.verdict
