"""What a large epoch changes leaves the keyed task as files that it wrote itself (`state_ops.backends.rocksdb`)."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from state_ops.backends import rocksdb
from weir import Epoch, KeyedState, KeyState, Stage, State, agg, aggregate, files, stage, testing

EVENTS = files("x/*.parquet")
# RocksDB's mark in a table that was written outside a database and handed over to it.
HANDED_OVER = b"external_sst_file"


class Count(State):
    n: int = 0


@stage("counted", source=EVENTS, key="k", state=Count)
def by_columns(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
    state.fold(rows, n=agg.count())


@stage("counted", source=EVENTS, key="k", state=Count, per_key=True, output={"k": pa.int64()})
def per_key(key: int, rows: list[dict], state: KeyState, epoch: Epoch) -> None:
    state.update(Count(n=state.get().n + len(rows)))


def tables(run: testing.StageRun) -> list[bytes]:
    """The tables that the last epoch has added to the state."""
    new = [file for ack in run.acks for file in ack.files if file.new and rocksdb.is_table(file.name)]
    return [Path(run.epochs.context.storage.full(file.path)).read_bytes() for file in new]


@pytest.mark.parametrize(
    "keyed",
    [aggregate("counted", EVENTS, key="k", n=agg.count()), by_columns, per_key],
    ids=["an aggregate", "a function", "a function per key"],
)
def test_a_large_epoch_is_handed_over_as_one_file_and_a_small_one_is_not(keyed: Stage, monkeypatch):
    monkeypatch.setattr(rocksdb, "_FILE_ENTRIES", 100)
    run = testing.run(keyed)
    for number, (keys, is_large) in enumerate([(100, True), (99, False), (150, True)], start=1):
        run.epoch(pa.table({"k": range(keys)}))
        (table,) = tables(run)
        assert (HANDED_OVER in table) == is_large
        assert run.acks[0].entries >= min(keys, 100), "what is held is counted too"
        assert run.state[0].n == number
    assert {key: state.n for key, state in run.state.items()} == {
        **dict.fromkeys(range(99), 3),
        99: 2,
        **dict.fromkeys(range(100, 150), 1),
    }
