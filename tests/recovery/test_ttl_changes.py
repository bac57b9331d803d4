"""A time to live that changes between runs: what it has let expire stays expired, however far the sweep has come."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.records.operator_stats import OperatorStats
from tests.recovery.harness import Site
from tests.tools.reading import without
from tests.tools.sampling import sampled
from weir import (
    Epoch,
    KeyedState,
    KeyState,
    ListOf,
    MapOf,
    Pipeline,
    State,
    agg,
    deduplicate,
    delta,
    files,
    join,
    side,
    stage,
    top_n,
)
from weir.epoch import scheduler, steps
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.operations import forks
from weir.operations.state_import import import_rows
from weir.operators.deduplication import running as deduplication
from weir.operators.functions import function
from weir.run import maintenance
from weir.run.run import RunOptions, run

START = datetime(2024, 5, 1, tzinfo=UTC)
KEYS = [f"k{number}" for number in range(8)]
LANDING = files("{landing}/*.parquet", name="landing", event_time="at")
SWEEPS = (2, 10_000)  # entries of an epoch: next to nothing is swept in time, or all is


class Visits(State):
    n: int = 0
    stops: ListOf[int]
    fees: MapOf[str, int]


def visited(ttl: str | None, **options: Any) -> Pipeline:
    """Counts the visits of each key: in its row, as elements of its list, and in an entry of its map."""

    @stage("visits", source=LANDING, key="id", state=Visits, sink=delta.append("seen"), ttl=ttl, **options)
    def visits(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, n=agg.count())
        state.stops.append(rows, stops="number")
        fees = state.fees.fold(rows, fees_key="city", fees=agg.count())
        stops = state.stops.get(rows).group_by("id").agg(pl.len().cast(pl.Int64).alias("stops"))
        return state.join(rows, "n").join(stops, on="id").join(fees.select("id", "fees"), on="id")

    return Pipeline("lives", (visits,), max_parallelism=4)


def per_key(ttl: str | None) -> Pipeline:
    class Count(State):
        n: int = 0

    @stage(
        "visits",
        source=LANDING,
        key="id",
        state=Count,
        per_key=True,
        output={"id": pa.string(), "n": pa.int64()},
        sink=delta.append("seen"),
        ttl=ttl,
    )
    def visits(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> list[dict]:
        count = state.get()
        count.n += len(rows)
        state.update(count)
        return [{"id": key, "n": count.n}]

    return Pipeline("lives", (visits,), max_parallelism=4)


def unique(ttl: str | None, on: str | None = None) -> Pipeline:
    once = deduplicate("visits", LANDING, key="id", ttl=ttl, on=on, sink=delta.append("seen"))
    return Pipeline("lives", (once,), max_parallelism=4)


class Played:
    """Epochs at hours of a clock of their own, each of some keys, under whatever definition there is then."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, **options: str) -> None:
        self.monkeypatch = monkeypatch
        given = {"WEIR_EPOCH__MAX_FILES": "1", "WEIR_SPARK__PARALLELISM": "1", "WEIR_CHECKPOINTS__NUM_RETAINED": "99"}
        self.site = Site(root, {**given, **options}, visited("1h"), "tests.recovery.test_ttl_changes")

    def epoch(self, defined: Pipeline, hour: float, keys: Sequence[str], **options: Any) -> None:
        at = START + timedelta(hours=hour)
        self.site = replace(self.site, pipeline=defined)
        self.site.landing.mkdir(parents=True, exist_ok=True)
        number = len(list(self.site.landing.iterdir())) + 1
        rows = {"id": keys, "number": [number] * len(keys), "city": ["Oslo"] * len(keys)}
        times = pa.array([at] * len(keys), pa.timestamp("us", "UTC"))
        pq.write_table(pa.table({**rows, "at": times}), self.site.landing / f".{number}")
        (self.site.landing / f".{number}").rename(self.site.landing / f"{number:05}.parquet")
        self.run(defined, hour, **options)

    def run(self, defined: Pipeline, hour: float, **options: Any) -> None:
        at = START + timedelta(hours=hour)
        self.monkeypatch.setattr(scheduler, "datetime", SimpleNamespace(now=lambda _: at))
        asked = RunOptions(until_caught_up=True, **options)
        assert list(run(defined, self.site.settings, asked, InMemoryExecutor()))

    def last(self) -> dict[str, tuple]:
        """Of each key, what its newest visit was told: the visits in its row, its list and its map."""
        return contents(self.site)

    def views(self) -> list[list[dict]]:
        """The state at every checkpoint, as `weir state` shows it."""
        ids = self.site.registry("checkpoints")["id"]
        return [viewed(self.site, int(id)) for id in ids]


def contents(site: Site) -> dict[str, tuple]:
    table = site.table("seen")
    counts = [name for name in ("n", "stops", "fees") if name in table]
    return {row["id"]: tuple(row[name] for name in counts) for row in table.sort_values("n").to_dict("records")}


def viewed(site: Site, at: int | None = None) -> list[dict]:
    tables = list(state_reader.scan(site.pipeline, site.settings, "visits", at))
    return sorted((row for table in tables for row in table.to_pylist()), key=lambda row: row["id"])


def outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, play: Any, **options: str) -> Iterable[Played]:
    """The same epochs with a sweep that is slow, slower, or done at once."""
    for most in SWEEPS:
        monkeypatch.setattr(function, "_SWEEP_ENTRIES", most)
        monkeypatch.setattr(deduplication, "_SWEPT", most)
        played = Played(tmp_path / str(most), monkeypatch, **options)
        play(played)
        yield played


Step = tuple[float, str | None, list[str]]
# What each key's last visit is told. Of a list every element has a stamp of its own.
CHANGES: dict[str, tuple[list[Step], int | tuple[int, int, int]]] = {
    "longer": ([(0, "1h", KEYS), (5, "1h", ["x"]), (5, "24h", KEYS)], 1),
    "removed": ([(0, "1h", KEYS), (5, "1h", ["x"]), (5, None, KEYS)], 1),
    "shorter, then as before": ([(0, "24h", KEYS), (5, "1h", ["x"]), (5, "24h", KEYS)], 1),
    "removed, then back and longer": ([(0, "1h", KEYS), (5, "1h", ["x"]), (6, None, ["x"]), (7, "24h", KEYS)], 1),
    "longer before anything expired": ([(0, "1h", KEYS), (0.5, "1h", ["x"]), (5, "24h", KEYS)], 2),
    "removed before anything expired": ([(0, "1h", KEYS), (0.5, None, KEYS), (99, None, KEYS)], 3),
    "touched while there was none": (
        [(0, "1h", KEYS), (0.5, None, ["x"]), (9, None, KEYS), (9.5, "1h", KEYS)],
        (3, 2, 3),
    ),
    "not touched while there was none": ([(0, "1h", KEYS), (0.5, None, ["x"]), (9.5, "1h", KEYS)], 1),
    # State that is older than the first TTL counts as touched when that came: at 1, whenever the sweep looks at it.
    "added, and expired": ([(0, None, KEYS), (1, "2h", ["x"]), (2, "2h", ["x"]), (3, "2h", KEYS)], 1),
    "added, and alive": ([(0, None, KEYS), (1, "2h", ["x"]), (2, "2h", ["x"]), (2.9, "2h", KEYS)], 2),
    "added, expired, removed": ([(0, None, KEYS), (1, "2h", ["x"]), (3, "2h", ["x"]), (3, None, KEYS)], 1),
}


@pytest.mark.parametrize(
    ("change", "backend"),
    sampled([("longer", "rocksdb"), ("removed", "rocksdb"), *((change, "memory") for change in CHANGES)]),
)
def test_a_change_of_the_ttl_gives_the_same_however_far_the_sweep_has_come(tmp_path, monkeypatch, change, backend):
    steps, expectation = CHANGES[change]
    expected = expectation if isinstance(expectation, tuple) else (expectation,) * 3

    def play(played: Played) -> None:
        for hour, ttl, keys in steps:
            played.epoch(visited(ttl), hour, keys)

    first, *others = outcomes(tmp_path, monkeypatch, play, WEIR_STATE__BACKEND=backend)
    assert {key: first.last()[key] for key in KEYS} == dict.fromkeys(KEYS, expected)
    for other in others:
        assert other.last() == first.last()
        assert other.views() == first.views(), "and so is what is shown, at every checkpoint"
    of_keys = [row for row in first.views()[-1] if row["id"] in KEYS]
    assert [(row["n"], len(row["stops"]), row["fees"][0]["fees"]) for row in of_keys] == [expected] * len(KEYS)


@pytest.mark.parametrize("change", sampled(["longer", "removed", "removed before anything expired"]))
def test_so_it_is_for_a_state_cache_of_a_stage_whose_ttl_is_gone(tmp_path, monkeypatch, change):
    steps, expected = CHANGES[change]

    def play(played: Played) -> None:
        for hour, ttl, keys in steps:
            cached = {"WEIR_STATE__CACHES": json.dumps({"visits": {"l1": 4}})} if ttl is None else {}
            given = {name: value for name, value in played.site.options.items() if name != "WEIR_STATE__CACHES"}
            played.site = replace(played.site, options={**given, **cached})
            played.epoch(per_key(ttl), hour, keys)

    for played in outcomes(tmp_path, monkeypatch, play):
        assert {key: played.last()[key] for key in KEYS} == dict.fromkeys(KEYS, (expected,))


@pytest.mark.long
def test_reading_keeps_alive_no_more_once_the_ttl_is_gone(tmp_path, monkeypatch):
    """And a TTL that comes back goes by what was written meanwhile."""

    def play(played: Played) -> None:
        for hour, ttl, keys in [(0, "1h", KEYS), (0.5, None, KEYS[:4]), (1.2, "1h", KEYS)]:
            played.epoch(visited(ttl, ttl_on="read_and_write"), hour, keys)

    for played in outcomes(tmp_path, monkeypatch, play):
        assert {key: played.last()[key] for key in KEYS} == {
            key: ((3, 2, 3) if key in KEYS[:4] else (1, 1, 1)) for key in KEYS
        }


# -- the record goes along


def _rescaled(played: Played) -> Site:
    played.site = replace(played.site, options={**played.site.options, "WEIR_SPARK__PARALLELISM": "3"})
    played.epoch(visited("24h"), 5, KEYS)
    return played.site


def _forked(played: Played) -> Site:
    forks.fork(played.site.pipeline, played.site.settings, "fix", at=2)
    played.epoch(visited("1h"), 5, KEYS)
    branch = forks.branched(visited("24h"), played.site.settings, "fix")
    played.run(branch, 5)
    return replace(played.site, pipeline=branch)


def _started(played: Played) -> Site:
    maintenance.savepoint(played.site.pipeline, played.site.settings, "old", "", patience=1.0)
    origin = f"{played.site.storage}:old"
    other = replace(visited("24h"), name="others")
    played.site = replace(played.site, pipeline=other)
    played.epoch(other, 5, KEYS, start_from=origin)
    return played.site


def _imported(played: Played) -> Site:
    rows = pa.table({"id": ["new"], "n": [7]})
    import_rows(played.site.pipeline, played.site.settings, "visits", rows, executor=InMemoryExecutor())
    played.epoch(plain("24h"), 5, [*KEYS, "new"])
    assert played.last()["new"] == (8,)
    return played.site


def _rewound(played: Played) -> Site:
    played.epoch(visited("24h"), 5, KEYS)
    played.epoch(visited("24h"), 6, KEYS)
    maintenance.rewind(played.site.pipeline, played.site.settings, 2)
    played.run(visited(None), 7)
    return played.site


def plain(ttl: str | None) -> Pipeline:
    """State of rows alone, which may be imported."""

    class Count(State):
        n: int = 0

    @stage("visits", source=LANDING, key="id", state=Count, sink=delta.append("seen"), ttl=ttl)
    def visits(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, n=agg.count())
        return state.join(rows, "n")

    return Pipeline("lives", (visits,), max_parallelism=4)


@pytest.mark.parametrize(
    ("goes_on", "defined"),
    sampled([(_rescaled, visited), (_forked, visited), (_started, visited), (_imported, plain)]),
    ids=["another parallelism", "a fork", "a savepoint", "an import"],
)
def test_what_has_expired_stays_so_in_whatever_goes_on_from_the_checkpoint(tmp_path, monkeypatch, goes_on, defined):
    def play(played: Played) -> None:
        played.epoch(defined("1h"), 0, KEYS)
        played.epoch(defined("1h"), 5, ["x"])

    for played in outcomes(tmp_path, monkeypatch, play):
        counts = contents(goes_on(played))
        assert {counts[key][0] for key in KEYS} == {1}


@pytest.mark.long
def test_a_rewind_goes_back_to_what_was_forgotten_then(tmp_path, monkeypatch):
    def play(played: Played) -> None:
        played.epoch(visited("1h"), 0, KEYS)
        played.epoch(visited("1h"), 5, ["x"])

    for played in outcomes(tmp_path, monkeypatch, play):
        site = _rewound(played)
        assert {row["n"] for row in viewed(site) if row["id"] in KEYS} == {2}, "two epochs, read once more"


@pytest.mark.long
def test_a_checkpoint_of_an_earlier_release_says_by_its_ttl_what_is_forgotten(tmp_path, monkeypatch):
    """It has no record of its own of what has expired."""
    for most in SWEEPS:
        monkeypatch.setattr(function, "_SWEEP_ENTRIES", most)
        played = Played(tmp_path / str(most), monkeypatch)
        with monkeypatch.context() as earlier:
            stats = steps.figures_of

            def unaware(*arguments: Any, stats: Any = stats) -> OperatorStats:
                return without(stats(*arguments), "forgotten")

            earlier.setattr(steps, "figures_of", unaware)
            played.epoch(visited("1h"), 0, KEYS)
            played.epoch(visited("1h"), 5, ["x"])
        played.epoch(visited(None), 5, KEYS)
        assert {played.last()[key] for key in KEYS} == {(1,) * 3}


# -- deduplication


ENDS: dict[str, tuple[list[Step], int]] = {
    "longer": ([(0, "1h", KEYS), (5, "1h", ["x"]), (5, "24h", KEYS)], 2),
    "shorter": ([(0, "24h", KEYS), (5, "1h", ["x"]), (5, "1h", KEYS)], 1),
    "removed": ([(0, "1h", KEYS), (5, "1h", ["x"]), (5, None, KEYS)], 2),
    "removed before it expired": ([(0, "24h", KEYS), (5, None, ["x"]), (25, None, KEYS)], 2),
    "added": ([(0, None, KEYS), (5, "1h", ["x"]), (7, "1h", KEYS)], 1),
}


@pytest.mark.parametrize(
    ("change", "on"), sampled([*((change, None) for change in ENDS), ("longer", "at"), ("shorter", "at")])
)
def test_a_key_of_a_deduplication_ends_when_it_was_to_end(tmp_path, monkeypatch, change, on):
    steps, expected = ENDS[change]

    def play(played: Played) -> None:
        for hour, ttl, keys in steps:
            played.epoch(unique(ttl, on), hour, keys)

    first, *others = outcomes(tmp_path, monkeypatch, play)
    assert first.site.table("seen").groupby("id").size()[KEYS].tolist() == [expected] * len(KEYS)
    for other in others:
        assert other.views() == first.views(), "what has ended is shown no more, swept or not"


# -- what says by itself when it ends: keys of a deduplication, ranks, rows of a join


def ending(ttl: str | None) -> Pipeline:
    own = {"key": "id", "ttl": ttl}
    return Pipeline(
        "lives",
        (
            deduplicate("unique", LANDING, **own, sink=delta.append("unique")),
            top_n("first", LANDING, **own, by="number", n=1, rank=None, sink=delta.append("first")),
            join("pairs", LANDING, side(LANDING), on="id", ttl=ttl, sink=delta.append("pairs")),
        ),
        max_parallelism=4,
    )


KEPT: dict[str, tuple[list[Step], bool]] = {
    "longer": ([(0, "1h", KEYS), (0.5, "24h", ["x"]), (2, "24h", KEYS)], False),
    "removed": ([(0, "1h", KEYS), (0.5, None, ["x"]), (2, None, KEYS)], False),
    "longer, in its last moment": ([(0, "1h", KEYS), (0.5, "24h", ["x"]), (1, "24h", KEYS)], False),
    "longer, and in time": ([(0, "1h", KEYS), (0.5, "24h", ["x"]), (0.9, "24h", KEYS)], True),
    "shorter": ([(0, "24h", KEYS), (0.5, "1h", ["x"]), (2, "1h", KEYS)], True),
    "added": ([(0, None, KEYS), (0.5, "1h", ["x"]), (2, "1h", KEYS)], True),
}


@pytest.mark.parametrize("change", sampled(KEPT, keep=lambda change: change == "longer"))
def test_what_has_an_end_keeps_it_whatever_the_ttl_and_the_parallelism_are_since(tmp_path, monkeypatch, change):
    steps, is_kept = KEPT[change]

    def play(played: Played) -> None:
        for subtasks, (hour, ttl, keys) in zip("132", steps, strict=True):
            played.site = replace(played.site, options={**played.site.options, "WEIR_SPARK__PARALLELISM": subtasks})
            played.epoch(ending(ttl), hour, keys)

    for played in outcomes(tmp_path, monkeypatch, play):
        unique, first, pairs = (played.site.table(name).query("id != 'x'") for name in ("unique", "first", "pairs"))
        assert sorted(unique["number"]) == [1] * len(KEYS) + ([] if is_kept else [3] * len(KEYS))
        assert sorted(first["number"]) == sorted(unique["number"])
        both = pairs.query("number != number_right")
        assert len(both) == (2 * len(KEYS) if is_kept else 0) and len(pairs) == len(both) + 2 * len(KEYS)
