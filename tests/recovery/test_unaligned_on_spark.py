"""Unaligned checkpoints of the flights on Spark: the second stage stops after each batch; real kills, and the replay's
results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.recovery.harness import Site, child
from weir import Epoch, Pipeline, State, ValueState, agg, delta, files, stage
from weir.execution.spark.spark_executor import SparkExecutor
from weir.ownership.backlog import unapplied

_DAYS = 6
_ODD = {
    "nothing": ("null", pa.null()),
    "part": ("named_struct('v', v, 'nothing', null)", pa.struct([("v", pa.int64()), ("nothing", pa.null())])),
    "parts": ("map('a', array(null))", pa.map_(pa.string(), pa.list_(pa.null()))),
    "span": ("make_dt_interval(0, 0, 0, v)", pa.duration("us")),
    "local": ("timestamp_ntz'2026-01-02 03:04:05'", pa.timestamp("us", tz="UTC")),
    "document": ("parse_json('[1, 2]')", pa.struct([("value", pa.binary()), ("metadata", pa.binary())])),
}
"""Columns of a transform, by their SQL, and their types in a stage's function."""


class Seen(State):
    """Of one key."""

    rows: int = 0


@stage("passed", source=files("{landing}/*.parquet", name="landing"), key="k", state=Seen)
def passed(rows: pa.Table, state: ValueState, epoch: Epoch) -> pa.Table:
    """Every row as it came."""
    state.fold(rows, rows=agg.count())
    return rows


def _widened(rows):
    return rows.selectExpr("*", *(f"{sql} AS {name}" for name, (sql, _) in _ODD.items()))


@stage("odd", source=passed, key="k", state=Seen, transform=_widened, sink=delta.append("odd"))
def odd(rows: pa.Table, state: ValueState, epoch: Epoch) -> pa.Table:
    """The seconds of each row's span, once its columns are what the transform has made of them."""
    assert {name: rows.schema.field(name).type for name in _ODD} == {name: type for name, (_, type) in _ODD.items()}
    state.fold(rows, rows=agg.count())
    return rows.select(["k"]).append_column("seconds", rows["span"].cast(pa.int64()))


@pytest.fixture
def through_storage(monkeypatch) -> dict[str, str]:
    """Lets all blocks go through storage, as if there were several hosts; returns the settings for that."""
    monkeypatch.setattr(SparkExecutor, "_is_staged", lambda *_: True)
    return {"WEIR_SPARK__DIRECT_READ_MB": "0"}


@pytest.fixture
def site(tmp_path) -> Site:
    return Site(
        tmp_path / "site",
        {
            "WEIR_EPOCH__MAX_FILES": "3",
            "WEIR_SPARK__BATCH_ROWS": "800",
            "WEIR_CHECKPOINTS__NUM_RETAINED": "2",
            "WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS": "0",
        },
    )


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_a_run_whose_second_stage_never_applies_all_is_exact(site, days):
    site.land(days[:_DAYS])
    history = [report.checkpoint for report in site.run(drain=True)]
    assert sum(bool(unapplied(checkpoint)) for checkpoint in history) >= 2
    site.assert_exact(_DAYS)
    site.assert_no_orphans()


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_rows_that_wait_go_through_storage_too(site, days, through_storage):
    site = replace(site, options={**site.options, **through_storage})
    site.land(days[:_DAYS])
    history = [report.checkpoint for report in site.run(drain=True)]
    assert sum(bool(unapplied(checkpoint)) for checkpoint in history) >= 2
    ways = {stats.exchange for checkpoint in history for stats in checkpoint.operators.values()}
    assert ways & {"files-staged", "cut-staged"} and ways <= {"files-staged", "cut-staged", None}
    site.assert_exact(_DAYS)
    site.assert_no_orphans()


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_a_run_that_is_killed_while_rows_wait_goes_on_exactly(site, days):
    site.land(days[:_DAYS])
    with child(site, "before the row", 2) as coordinator:
        coordinator.wait_until_held()
        coordinator.kill()
    assert site.head() == 1
    waiting = site.registry("checkpoints").sort_values("id")["operators"].iloc[-1]
    assert '"begun": true' in waiting or '"begun":true' in waiting, "the killed run had left rows"

    site.run(drain=True)

    site.assert_exact(_DAYS)
    site.assert_no_orphans()


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("staged", [False, pytest.param(True, marks=pytest.mark.long)])
def test_rows_wait_with_every_column_that_a_transform_can_make(tmp_path, request, staged):
    options = {
        **(request.getfixturevalue("through_storage") if staged else {}),
        "WEIR_SPARK__BATCH_ROWS": "50",
        "WEIR_EPOCH__MAX_FILES": "1",
        "WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS": "0",
    }
    site = Site(tmp_path / "site", options, Pipeline("odd", (passed, odd), max_parallelism=4))
    site.landing.mkdir(parents=True)
    values = np.arange(600)
    for number, part in enumerate(np.split(values, 3)):
        pq.write_table(pa.table({"k": part % 7, "v": part}), site.landing / f"{number}.parquet")

    history = [report.checkpoint for report in site.run(drain=True)]

    assert sum(bool(unapplied(checkpoint)) for checkpoint in history) >= 2
    rows = DeltaTable(site.storage / "tables" / "odd").to_pyarrow_table().to_pandas()
    assert sorted(rows["seconds"]) == (values * 1_000_000).tolist()
    assert (rows["k"] == rows["seconds"] // 1_000_000 % 7).all()
