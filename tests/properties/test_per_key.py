"""A function called once per key does what the same one does in columns, and what a replay in plain Python does."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from state_ops.keyed.per_key.state_cache import CacheSizes
from weir import Epoch, KeyState, State, ValueState, agg, delta, files, stage, testing

START = datetime(2024, 5, 1, tzinfo=UTC)
SOURCE = files("x/*.parquet", event_time="at")
COLUMNS = pa.schema(
    [("site", pa.string()), ("meter", pa.int64()), ("at", pa.timestamp("us", tz="UTC")), ("value", pa.float64())]
)


class Meter(State):
    readings: int = 0
    total: float = 0.0
    last: float | None = None
    last_at: datetime | None = None


@stage("columns", source=SOURCE, key=["site", "meter"], state=Meter, order_by=["at"], sink=delta.append("columns"))
def in_columns(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    before = state.lag(rows, last="value", last_at="at")
    state.fold(rows, readings=agg.count(), total=agg.sum("value"))
    return rows.select("site", "meter", "at", step=rows["value"] - before["last"], previous_at=before["last_at"])


@stage(
    "keys",
    source=SOURCE,
    key=["site", "meter"],
    state=Meter,
    order_by=["at"],
    per_key=True,
    output={
        **dict(zip(COLUMNS.names[:3], COLUMNS.types, strict=False)),
        "step": pa.float64(),
        "previous_at": COLUMNS.types[2],
    },
    sink=delta.append("keys"),
)
def by_key(key: tuple[str, int], rows: list[dict], state: KeyState, epoch: Epoch) -> list[dict]:
    mine, out = state.get(), []
    for row in rows:
        step = None if mine.last is None else row["value"] - mine.last
        out.append({"site": key[0], "meter": key[1], "at": row["at"], "step": step, "previous_at": mine.last_at})
        mine.readings, mine.total = mine.readings + 1, mine.total + row["value"]
        mine.last, mine.last_at = row["value"], row["at"]
    state.update(mine)
    return out


class Replay:
    """What should come out, row by row, in plain Python."""

    def __init__(self) -> None:
        self.state: dict[tuple[str, int], dict[str, Any]] = {}

    def epoch(self, rows: list[dict]) -> list[tuple]:
        out = []
        for row in sorted(rows, key=lambda row: row["at"]):
            mine = self.state.setdefault((row["site"], row["meter"]), Meter().as_dict())
            step = None if mine["last"] is None else row["value"] - mine["last"]
            out.append((row["site"], row["meter"], row["at"], step, mine["last_at"]))
            mine["readings"] += 1
            mine["total"] += row["value"]
            mine["last"], mine["last_at"] = row["value"], row["at"]
        return sorted(out, key=str)


@settings(max_examples=12)
@given(
    slices=st.lists(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4), st.integers(-8, 8)), max_size=15), max_size=5
    ),
    parallelism=st.integers(1, 3),
    batch_rows=st.integers(1, 20),
    sizes=st.one_of(st.none(), st.builds(CacheSizes, st.integers(1, 4), st.integers(0, 4))),
)
def test_per_key_is_vectorised_is_a_replay(slices, parallelism, batch_rows, sizes) -> None:
    columns = testing.run(in_columns, parallelism=parallelism, batch_rows=batch_rows, schema=COLUMNS)
    keys = testing.run(by_key, parallelism=parallelism, batch_rows=batch_rows, schema=COLUMNS)
    if sizes is not None:
        keys.epochs.context.settings.state.caches["keys"] = sizes
    replay, clock = Replay(), START
    for part in slices:
        rows = []
        for site, meter, value in part:
            clock += timedelta(minutes=1)
            rows.append({"site": site, "meter": meter, "at": clock, "value": float(value)})
        expected = replay.epoch(rows)
        assert sorted(keys.epoch(rows).rows(), key=str) == expected
        assert sorted(columns.epoch(rows).rows(), key=str) == expected
        meters = {key: meter.as_dict() for key, meter in keys.state.items()}
        assert meters == replay.state
        assert meters == {key: meter.as_dict() for key, meter in columns.state.items()}
    keys.close()
    columns.close()
