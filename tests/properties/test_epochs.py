"""Barrier-equivalent epochs: state at checkpoint n and outputs up to n are those of a replay of slices 1 to n.

The replay is plain Python over the raw rows and shares no code with Weir. It knows how the input was cut into slices,
since lateness is judged by the slices before; it knows nothing of batches, key groups or subtasks.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.tools.reading import state_at, table_at
from tests.tools.sampling import rounds
from weir import Epoch, Pipeline, State, ValueState, agg, delta, files, stage, testing, window
from weir.run.run import RunOptions, open_storage, run
from weir.settings.configuration import Settings

START = datetime(2024, 5, 1, tzinfo=UTC)
LATENESS = timedelta(minutes=20)
HOUR = timedelta(hours=1)


class Meter(State):
    readings: int = 0
    total: float = 0.0
    highest: float | None = None
    last: float | None = None
    last_at: datetime | None = None


@stage(
    "meters",
    source=files("{landing}/*.parquet", event_time="at"),
    key=["site", "meter"],
    state=Meter,
    order_by=["at", "seq"],
    where="seq IS NOT NULL",
    sink=delta.append("steps"),
)
def meters(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Each reading with the step from the meter's previous one."""
    before = state.lag(rows, last="value", last_at="at")
    state.fold(rows, readings=agg.count(), total=agg.sum("value"), highest=agg.max("value"))
    return rows.select(
        "site", "meter", "at", "seq", "value", step=rows["value"] - before["last"], previous_at=before["last_at"]
    )


hourly = window(
    "hourly",
    meters,
    key="site",
    every="1h",
    on="at",
    lateness="20m",
    readings=agg.count(),
    total=agg.sum("value"),
    mean=agg.mean("value"),
    lowest=agg.min("value"),
    biggest_step=agg.max("step"),
    sink=delta.append("hourly"),
    late=delta.append("hourly_late"),
)

pipeline = Pipeline("meters", (meters, hourly), max_parallelism=32)

SCHEMA = pa.schema(
    [
        ("site", pa.string()),
        ("meter", pa.int32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("seq", pa.int64()),
        ("value", pa.float64()),
    ]
)


# -- the replay


class Replay:
    """What the pipeline means, a row at a time."""

    def __init__(self) -> None:
        self.meters: dict[tuple, dict] = {}
        self.windows: dict[tuple, dict] = {}
        self.steps: list[tuple] = []
        self.hourly: list[tuple] = []
        self.late: list[tuple] = []
        self.newest: datetime | None = None  # of all rows that ever arrived, dropped ones too
        self.closed: datetime | None = None

    def slice(self, rows: list[dict], drain: bool = False) -> None:
        judged_by = self.closed
        for row in sorted((row for row in rows if row["seq"] is not None), key=lambda row: (row["at"], row["seq"])):
            self._reading(row, judged_by)
        self.newest = max([row["at"] for row in rows] + ([self.newest] if self.newest else []), default=None)
        if self.newest is not None:
            self.closed = max(self.newest - LATENESS, self.closed or self.newest - LATENESS)
        for site, start in sorted(self.windows):
            if drain or (self.closed is not None and start + HOUR <= self.closed):
                figures = self.windows.pop((site, start))
                self.hourly.append((site, start, start + HOUR, *_figures(figures)))
                if drain:
                    self.closed = max(self.closed or start + HOUR, start + HOUR)

    def _reading(self, row: dict, judged_by: datetime | None) -> None:
        fresh = {"readings": 0, "total": 0.0, "highest": None, "last": None, "last_at": None}
        meter = self.meters.setdefault((row["site"], row["meter"]), fresh)
        value, last = row["value"], meter["last"]
        step = None if value is None or last is None else value - last
        reading = (row["site"], row["meter"], row["at"], row["seq"], value, step, meter["last_at"])
        self.steps.append(reading)
        meter["readings"] += 1
        meter["last"], meter["last_at"] = value, row["at"]
        if value is not None:
            meter["total"] += value
            meter["highest"] = value if meter["highest"] is None else max(value, meter["highest"])
        start = row["at"].replace(minute=0, second=0, microsecond=0)
        if judged_by is not None and start + HOUR <= judged_by:
            self.late.append(reading)
            return
        figures = self.windows.setdefault((row["site"], start), {"readings": 0, "values": [], "steps": []})
        figures["readings"] += 1
        figures["values"] += [value] if value is not None else []
        figures["steps"] += [step] if step is not None else []


def _figures(figures: dict) -> tuple:
    values = figures["values"]
    mean = math.fsum(values) / len(values) if values else None
    return figures["readings"], float(sum(values)), mean, min(values, default=None), max(figures["steps"], default=None)


def rounded(rows: list[tuple]) -> Counter:
    """Rows as a multiset. The values are halves, so that only a mean can differ in its last bits."""
    return Counter(tuple(round(value, 9) if isinstance(value, float) else value for value in row) for row in rows)


# -- the input


def readings(sizes: list[int], seed: int) -> list[list[dict]]:
    """Slices of readings: out of order, late by hours, tying in time, null in value, or without a number, to be
    dropped."""
    chance, clock, seq = random.Random(seed), 0, 0
    cut = []
    for size in sizes:
        windows = []
        for _ in range(size):
            clock += chance.randrange(25)
            behind = chance.choice([0, 0, chance.randrange(30), chance.randrange(240)])
            seq += 1
            windows.append(
                {
                    "site": chance.choice(["north", "süd", ""]),
                    "meter": chance.randrange(4),
                    "at": START + timedelta(minutes=clock - behind),
                    "seq": None if chance.random() < 0.1 else seq,
                    "value": chance.choice([None, chance.randrange(-40, 40) / 2, chance.randrange(-40, 40) / 2]),
                }
            )
        cut.append(windows)
    return cut


# Rows come from a seed: what hypothesis draws one by one is mostly small and alike, and then nothing is late.
SIZES, SEEDS = st.lists(st.integers(0, 15), min_size=1, max_size=6), st.integers(0, 2**32)


def expected_windows(replay: Replay) -> dict[tuple, tuple]:
    return {key: _figures(figures) for key, figures in replay.windows.items()}


def check_tables(frames: dict[str, pl.DataFrame], replay: Replay, place: str) -> None:
    for name, rows in (("steps", replay.steps), ("hourly", replay.hourly), ("hourly_late", replay.late)):
        frame = frames[name]
        assert rounded(frame.rows()) == rounded(rows), f"{name}, {place}"


# -- on the keyed tasks


@rounds(3)
@given(SIZES, SEEDS, st.integers(1, 5), st.sampled_from([1, 2, 5, 1000]), st.booleans())
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
def test_every_checkpoint_is_a_replay_of_its_slices(round_, sizes, seed, parallelism, batch_rows, drained_twice):
    cut = readings(sizes, seed)
    running = testing.run_pipeline(pipeline, parallelism=parallelism, batch_rows=batch_rows, schema=SCHEMA)
    replay = Replay()
    steps = [(rows, False) for rows in cut] + [([], True)]
    if drained_twice:
        steps += [(cut[0], False), ([], True)]  # what comes after a drain is late, if its window was closed by it
    for number, (rows, drain) in enumerate(steps, 1):
        running.epoch(rows, drain=drain)
        replay.slice(rows, drain)
        place = f"epoch {number}"
        check_tables(running.tables, replay, place)
        meters = {key: value.as_dict() for key, value in running.states["meters"].items()}
        assert meters == replay.meters, place
        still = running.stages["hourly"].open_windows
        windows = {(row[0], row[1]): row[3:] for row in still.rows()}
        assert _same_windows(windows, expected_windows(replay)), place


def _same_windows(actual: dict[tuple, tuple], expected: dict[tuple, tuple]) -> bool:
    return rounded([(*key, *row) for key, row in actual.items()]) == rounded(
        [(*key, *row) for key, row in expected.items()]
    )


# -- on Spark


@pytest.mark.long
@pytest.mark.usefixtures("spark")
@given(st.lists(st.integers(0, 40), min_size=2, max_size=3), SEEDS)
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # shrinking would take many minutes
    suppress_health_check=list(HealthCheck),
)
def test_every_checkpoint_on_spark_is_a_replay_of_its_slices(tmp_path_factory, sizes, seed):
    cut = readings(sizes, seed)
    directory = tmp_path_factory.mktemp("meters")
    _land(directory / "landing", cut)
    configured = Settings.model_validate(
        {
            "storage": {"root": str(directory / "storage")},
            "local": {"work_dir": str(directory / "work")},
            "epoch": {"max_files": 1},
            "pipelines": {"meters": {"object": "x:y", "params": {"landing": str(directory / "landing")}}},
        }
    )
    storage, registry = open_storage(pipeline, configured)
    replay, steps = Replay(), iter([(rows, False) for rows in cut] + [([], True)])
    ids = []
    for report in run(pipeline, configured, RunOptions(until_caught_up=True, drain=True)):
        rows, drain = next(steps)
        replay.slice(rows, drain)
        head = registry.head()
        assert head == report.checkpoint
        ids.append(head.id)
        place = f"checkpoint {head.id}"
        check_tables({name: table_at(storage, name) for name in ("steps", "hourly", "hourly_late")}, replay, place)
        assert state_at(storage, registry, head, meters) == replay.meters, place
        windows = {key: tuple(row.values()) for key, row in state_at(storage, registry, head, hourly).items()}
        assert _same_windows(windows, expected_windows(replay)), place
    assert next(steps, None) is None
    assert ids == sorted(set(ids))


def _land(directory: Path, cut: list[list[dict]]) -> None:
    directory.mkdir()
    for number, rows in enumerate(cut):
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), directory / f"{number}.parquet")
