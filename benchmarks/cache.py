"""What a state cache is worth: none, one layer, two layers, on sessions of users with large values.

    python -m benchmarks.cache                 about five minutes; writes benchmarks/results/cache.*
    python -m benchmarks.cache --reps 3        the same events three times; figures are medians
    python -m benchmarks.cache --quick --results /tmp/cache

The shape is that of the deployment whose figures stand beside ours: many users, few of them active at a time; a session
of many events, most of them close together, then nothing for long; each event reads its user's value and updates it;
the value is a map of a dozen substates, one of them above 10 KB. Sizes are scaled down in one ratio (20,000 entries to
2,000 + 23,000).

One subtask, driven as the keyed task drives it: fork the last snapshot, open it, apply an epoch's events, flush the
cache and take the snapshot (the sync phase), upload (off the path of the events). Service times are measured; arrivals
are not: events come at one fixed rate, the same for all, and the latency of each follows from the queue that the
measured times make. The vectorised path is measured on its own: state of a whole batch of keys through a cache, and by
one multi-get.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import typer
from matplotlib.figure import Figure

from benchmarks import harness
from benchmarks.harness import Row, Stopwatch, seconds
from benchmarks.storage.incremental import SnapshotChain
from state_ops.backends.base import Backend, Compression
from state_ops.backends.rocksdb import SHARD_MB, RocksDBBackend
from state_ops.keyed.per_key.state_cache import CacheFigures, CacheSizes, StateCache, ValueStore
from state_ops.schema.row_codec import decode_rows, encode_rows
from state_ops.schema.state_schema import StateSchema
from state_ops.storage.storage import Storage

_MEMORY_MB = 128  # as configs/sections.py has them
_COMPRESSION: Compression = "lz4"  # likewise
_SEED = 1
_LARGE_BYTES = 10 << 10
_SESSION_EVENTS = 25
_PREFIX = 10  # without a cache a tenth of each epoch's events is applied, for their time alone
_UTILISATION = 0.5  # of the slower of the two caches; the rate of the events follows from it

Value = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """users: in the state. active: sessions at a time. one, l1, l2: entries. events: of an epoch. warm: epochs before
    those that count."""

    users: int = 40_000
    active: int = 2_000
    one: int = 4_000
    l1: int = 400
    l2: int = 4_600
    events: int = 100_000
    warm: int = 1
    epochs: int = 8


QUICK = Load(users=4_000, active=100, one=200, l1=20, l2=230, events=4_000, warm=1, epochs=4)


@dataclass(slots=True)
class Run:
    """One variant. epochs: of each that counts, milliseconds of sync (flush and snapshot), flush (the cache's part of
    it) and opening, and bytes uploaded and in all. service, latency: ms per event."""

    name: str
    epochs: list[dict[str, float]] = field(default_factory=list)
    service: list[np.ndarray] = field(default_factory=list)
    figures: CacheFigures = field(default_factory=CacheFigures)
    latency: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def busy(self) -> float:
        """Milliseconds of work on the path of the events."""
        return float(np.concatenate(self.service).sum()) + sum(
            epoch["sync"] + epoch["opening"] for epoch in self.epochs
        )


class Through:
    """No cache: every get and update goes to the store."""

    def __init__(self, store: ValueStore[Value]) -> None:
        self._store = store
        self.reads = 0

    def get(self, key: bytes) -> Value | None:
        self.reads += 1
        return self._store.get([key])[0]

    def update(self, key: bytes, value: Value) -> None:
        self._store.write({key: value})

    def barrier(self) -> CacheFigures:
        return CacheFigures(misses=self.reads)


def sessions(load: Load, events: int, rng: np.random.Generator) -> np.ndarray:
    """The user of every event, int64[events]. Among the active users the next event is one of a recent user's,
    Zipf-like."""
    active = rng.choice(load.users, load.active, replace=False).tolist()
    left = rng.geometric(1 / _SESSION_EVENTS, load.active).tolist()
    weights = 1 / np.arange(1, load.active + 1) ** 1.1
    ranks = rng.choice(load.active, events, p=weights / weights.sum()).tolist()
    fresh, lengths = rng.integers(0, load.users, events).tolist(), rng.geometric(1 / _SESSION_EVENTS, events).tolist()
    chosen = np.empty(events, np.int64)
    for number, rank in enumerate(ranks):
        user, remaining = active.pop(rank), left.pop(rank) - 1
        chosen[number] = user
        if remaining:
            active.insert(0, user)
            left.insert(0, remaining)
        else:  # the session is over; another user's begins
            active.append(fresh[number])
            left.append(lengths[number])
    return chosen


def a_value(user: int, rng: np.random.Generator) -> Value:
    """A dozen substates, one of them large."""
    items = _LARGE_BYTES // 22
    names = rng.integers(1 << 40, 1 << 41, items).astype(str).tolist()
    large = dict(zip(names, rng.integers(0, 9999, items).tolist(), strict=True))
    return {
        "user": user,
        **{f"substate-{n}": {"count": 0, "sum": float(n), "last": "-"} for n in range(11)},
        "items": large,
    }


def applied(value: Value | None, number: int) -> Value:
    """The user's value after an event: another map, with the substates that did not change in both."""
    assert value is not None
    name = f"substate-{number % 11}"
    old = value[name]
    return {**value, name: {"count": old["count"] + 1, "sum": old["sum"] + number % 7, "last": str(number)}}


def store(backend: Backend) -> ValueStore[Value]:
    return ValueStore(
        backend,
        lambda values: [json.dumps(value).encode() for value in values],
        lambda values: [json.loads(v) for v in values],
    )


def key_of(user: int) -> bytes:
    return int(user).to_bytes(8, "big")


class Driver(SnapshotChain):
    """The databases of one variant, from snapshot to snapshot."""

    def __init__(self, root: Path, name: str) -> None:
        super().__init__(Storage(str(root / "storage")), root / "work" / "users" / "0", compression=_COMPRESSION)
        self.run = Run(name)

    def begin(self, load: Load, rng: np.random.Generator) -> None:
        """The first snapshot: a value of every user."""
        self.open(1)
        values = store(self.backend)
        for start in range(0, load.users, 500):
            users = range(start, min(start + 500, load.users))
            values.write({key_of(user): a_value(user, rng) for user in users})
        self.take()
        self.upload()

    def epoch(self, number: int, users: Sequence[int], cached: Callable[[ValueStore[Value]], Any], counts: bool) -> Any:
        """Apply an epoch's events and take its snapshot. cached: makes the cache above this epoch's backend."""
        with Stopwatch() as opening:
            self.open(number)
            cache = cached(store(self.backend))
        times = np.empty(len(users) + 1)
        for at, user in enumerate(users):
            times[at] = time.perf_counter()
            key = key_of(user)
            cache.update(key, applied(cache.get(key), at))
        times[-1] = time.perf_counter()
        with Stopwatch() as flush:
            figures = cache.barrier()
        sync = flush.ms + self.take().ms
        self.upload()
        if counts:
            files = self.retained[-1].files
            uploaded, size = sum(file.bytes for file in files if file.new), sum(file.bytes for file in files)
            phases = {"sync": sync, "flush": flush.ms, "opening": opening.ms}
            self.run.epochs.append({**phases, "uploaded": uploaded, "size": size})
            self.run.service.append(np.diff(times) * 1e3)
            self.run.figures += figures
        return cache


def variants(load: Load) -> dict[str, Callable[..., Any]]:
    """By name, what makes the cache above a store, with what the one before held."""
    return {
        "none": lambda below, _: Through(below),
        "one layer": lambda below, warm: StateCache(below, CacheSizes(load.one), warm),
        "two layers": lambda below, warm: StateCache(below, CacheSizes(load.l1, load.l2), warm),
    }


def measure(load: Load, root: Path, seed: int = _SEED) -> list[Run]:
    """All variants over the very same events, epoch by epoch in turn, so that they share the machine's moods."""
    users = sessions(load, load.events * (load.warm + load.epochs), np.random.default_rng(seed)).tolist()
    first = Driver(root / "first", "")
    first.begin(load, np.random.default_rng(seed))
    drivers, caches = {}, {}
    for name in variants(load):
        place = root / name.replace(" ", "-")
        shutil.copytree(root / "first", place, copy_function=os.link)
        drivers[name], caches[name] = Driver(place, name), None
        drivers[name].retained = [first.retained[-1]]
    for number in range(load.warm + load.epochs):
        part = users[number * load.events : (number + 1) * load.events]
        for name, cached in variants(load).items():
            held = caches[name]
            warm = held.contents() if isinstance(held, StateCache) else None
            caches[name] = drivers[name].epoch(
                number + 2,
                part if name != "none" else part[: load.events // _PREFIX],
                lambda below, cached=cached, warm=warm: cached(below, warm),
                number >= load.warm,
            )
        print(f"epoch {number + 1} of {load.warm + load.epochs}", flush=True)
    runs = [driver.run for driver in drivers.values()]
    slower = max(run.busy for run in runs if run.figures.l1_hits)
    for run in runs[1:]:
        run.latency = latencies(run, slower / _UTILISATION / (load.events * load.epochs))
    return runs


def latencies(run: Run, gap: float) -> np.ndarray:
    """Of every event, ms from its arrival to its end; one event every `gap` ms, served in order; the barrier blocks.

    Lindley's recursion for a queue with one server: end(i) = max(end(i - 1), arrival(i)) + service(i).
    """
    service = [times.copy() for times in run.service]
    for number, blocked in enumerate(service):
        blocked[0] += run.epochs[number]["opening"] + (run.epochs[number - 1]["sync"] if number else 0)
    served = np.concatenate(service)
    arrivals = np.arange(len(served)) * gap
    done = np.cumsum(served)
    # max over j <= i of arrival(j) + service(j) + ... + service(i)
    return np.maximum.accumulate(arrivals - (done - served)) + done - arrivals


# The vectorised path: the state of a batch of keys as columns


@dataclass(frozen=True, slots=True)
class Batches:
    """Rows of `width` bytes in a database of `number` keys, in it and in a cache that holds them all."""

    schema: StateSchema
    backend: RocksDBBackend
    cache: StateCache[tuple[Any, ...]]
    names: list[bytes]

    def direct(self, batches: list[list[bytes]]) -> None:
        """An epoch without a cache: each batch costs one multi-get and one write."""
        for batch in batches:
            rows = decode_rows(self.schema, self.backend.multi_get(batch))  # type: ignore[arg-type]
            self.backend.write(list(zip(batch, encode_rows(self.schema, _counted(rows)), strict=True)))

    def cached(self, batches: list[list[bytes]]) -> None:
        """The same through a cache: no batch costs a get or a put, the barrier writes what changed."""
        for batch in batches:
            rows = _counted(_columns(self.schema, self.cache.get_many(batch)))
            for key, row in zip(batch, _tuples(rows), strict=True):
                self.cache.update(key, row)
        self.cache.barrier()


def _batches(width: int, number: int, place: Path) -> Batches:
    schema = StateSchema.build([("count", pa.int64(), False, None), ("data", pa.binary(), False, None)])
    backend = RocksDBBackend(place, _MEMORY_MB, compression=_COMPRESSION)
    rng = np.random.default_rng(width)
    data = pa.array([rng.bytes(width) for _ in range(number)], pa.binary())
    names = [key_of(user) for user in rng.permutation(number)]
    rows = pa.table([pa.array(np.arange(number)), data], schema=schema.arrow)
    backend.write(list(zip(names, encode_rows(schema, rows), strict=True)))
    backend.snapshot(place.with_name(f"{place.name}-snapshot"))
    below = ValueStore(
        backend,
        lambda rows: encode_rows(schema, _columns(schema, rows)),
        lambda rows: _tuples(decode_rows(schema, rows)),
    )
    batches = Batches(schema, backend, StateCache(below, CacheSizes(number)), names)
    batches.cache.get_many(names)
    return batches


def vectorised(keys: int, root: Path) -> list[dict[str, Any]]:
    """Microseconds per key and batch to read the state of a whole batch as columns, change one, and write it back."""
    figures = []
    for width in (8, 1 << 10, 12 << 10):
        number = keys if width < _LARGE_BYTES else keys // 8
        batch = _batches(width, number, root / f"vectorised-{width}")
        rng = np.random.default_rng(_SEED)
        for times in (1, 10):
            size = number // 4
            batches = [[batch.names[index] for index in rng.permutation(number)[:size].tolist()] for _ in range(times)]
            direct, cached = (_best(call, batches) / size / times for call in (batch.direct, batch.cached))
            figures.append(
                {"bytes": width + 8, "keys": size, "batches": times, "direct_us": direct, "cached_us": cached}
            )
        batch.backend.close()
    return figures


def _columns(schema: StateSchema, rows: Sequence[Any]) -> pa.Table:
    columns = zip(*rows, strict=True)
    return pa.table(
        [pa.array(column, f.type) for column, f in zip(columns, schema.fields, strict=True)], schema=schema.arrow
    )


def _tuples(rows: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def _counted(rows: pa.Table) -> pa.Table:
    return rows.set_column(0, rows.schema.field(0), pc.add(rows.column(0), 1))


def _best(call: Callable[[list[list[bytes]]], None], batches: list[list[bytes]]) -> float:
    """Microseconds, the best of five."""
    return min(seconds(lambda: call(batches)) for _ in range(5)) * 1e6


# What is written

# One layer of 20,000 entries, then 2,000 + 23,000: as reported.
PRODUCTION = {"latency": (90, 35), "min": (26, 4), "avg": (41, 9), "max": (57, 14), "size": (1720, 2150)}


def figures(run: Run) -> dict[str, float]:
    """What is kept of a variant's run."""
    service, epochs = np.concatenate(run.service), pl.DataFrame(run.epochs)
    mean = epochs.mean().row(0, named=True)
    return {
        "events_per_second_busy": len(service) / run.busy * 1e3,
        "event_us_mean": float(service.mean()) * 1e3,
        "sync_ms_min": epochs["sync"].min(),
        "sync_ms_avg": mean["sync"],
        "sync_ms_max": epochs["sync"].max(),
        "flush_ms_avg": mean["flush"],
        "opening_ms_avg": mean["opening"],
        "latency_ms_max": float(run.latency.max(initial=0)),
        "latency_ms_p99": float(np.quantile(run.latency, 0.99)) if len(run.latency) else 0.0,
        "uploaded_mb_avg": mean["uploaded"] / 1e6,
        "checkpoint_mb_avg": mean["size"] / 1e6,
        "hit_rate": run.figures.hit_rate,
        "l1_hit_rate": run.figures.l1_hits / len(service),
        **{f"entries_{name}": value for name, value in asdict(run.figures).items()},
    }


def once(root: Path, load: Load, keys: int) -> tuple[list[Run], Row]:
    """One repetition: the variants' runs, and what is kept of them. keys: of the vectorised path."""
    runs = measure(load, root)
    return runs, {
        "figures": {run.name: figures(run) for run in runs},
        "epochs": {run.name: pl.DataFrame(run.epochs).to_dict(as_series=False) for run in runs},
        "vectorised": vectorised(keys, root),
    }


def summary(repetitions: Sequence[Row]) -> Row:
    """Medians over repetitions of every figure of every variant, and of every line of the vectorised path."""
    return {
        "figures": {
            name: harness.medians([repetition["figures"][name] for repetition in repetitions])
            for name in repetitions[0]["figures"]
        },
        "vectorised": [
            harness.medians(same)
            for same in zip(*(repetition["vectorised"] for repetition in repetitions), strict=True)
        ],
    }


def versions() -> dict[str, str]:
    """Of what is measured, and of what values and events are made with."""
    return {
        **{name: version(name) for name in ("rocksdict", "pyarrow", "numpy")},
        "python": platform.python_version(),
    }


def constants() -> dict[str, Any]:
    """What is set besides the load. Memory and shards in MiB, values in bytes; shares of the events and of the rate."""
    return {
        "backend": "rocksdb",
        "memory_mb": _MEMORY_MB,
        "shard_mb": SHARD_MB,
        "compression": _COMPRESSION,
        "value_bytes": _LARGE_BYTES,
        "session_events": _SESSION_EVENTS,
        "applied_without_cache": 1 / _PREFIX,
        "utilisation": _UTILISATION,
        "seed": _SEED,
    }


_ROWS = (
    ("latency of an event, max, ms", "latency_ms_max", ",.0f", "latency", "s"),
    ("latency of an event, 99 %, ms", "latency_ms_p99", ",.1f", "", ""),
    ("sync phase, min, ms", "sync_ms_min", ",.0f", "min", "s"),
    ("sync phase, avg, ms", "sync_ms_avg", ",.0f", "avg", "s"),
    ("sync phase, max, ms", "sync_ms_max", ",.0f", "max", "s"),
    ("- flush of the cache, avg, ms", "flush_ms_avg", ",.1f", "", ""),
    ("checkpoint, avg, MB", "checkpoint_mb_avg", ",.0f", "size", "GB"),
    ("- of that uploaded, avg, MB", "uploaded_mb_avg", ",.1f", "", ""),
    ("hits, L1 + L2", "hit_rate", ".1%", "", ""),
    ("hits, L1", "l1_hit_rate", ".1%", "", ""),
    ("entries written before the barrier", "entries_evicted", ",.0f", "", ""),
    ("entries written at the barrier", "entries_flushed", ",.0f", "", ""),
    ("one event, mean, us", "event_us_mean", ",.0f", "", ""),
    ("events/s when never idle", "events_per_second_busy", ",.0f", "", ""),
)
"""Of the report: title, figure, format, and what production reported, with its unit."""


def report(facts: Row) -> str:
    """The page of what `main` keeps as JSON."""
    return harness.render(
        "cache",
        **facts,
        rows=_ROWS,
        large_kb=_LARGE_BYTES / 1024,
        session_events=_SESSION_EVENTS,
        utilisation=_UTILISATION,
    )


def plot(runs: list[Run], target: Path) -> None:
    """Draw the latency of every event, and the sync phase of every epoch."""
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for run, shade in zip(runs[1:], ("tab:orange", "tab:blue"), strict=True):
        at = np.arange(0, len(run.latency), max(1, len(run.latency) // 4000))
        left.plot(at, run.latency[at], lw=0.8, color=shade, label=run.name)
        numbers = range(1, len(run.epochs) + 1)
        sync, flush = ([epoch[phase] for epoch in run.epochs] for phase in ("sync", "flush"))
        right.plot(numbers, sync, marker="o", ms=3, color=shade, label=f"{run.name}: sync phase")
        right.plot(numbers, flush, ls=":", color=shade, label=f"{run.name}: flush of the cache")
    left.set(xlabel="event", ylabel="ms", title="Latency of an event")
    right.set(xlabel="epoch", ylabel="ms", ylim=(0, None), title="What the barrier waits for")
    for side in (left, right):
        side.legend(fontsize=8)
    figure.savefig(target, dpi=110)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="half a minute, a fifth of the sizes")] = False,
    results: Path = harness.RESULTS / "cache",
    reps: Annotated[int, typer.Option(min=1, help="repetitions")] = 1,
) -> None:
    """What a state cache is worth: none, one layer, two layers, on sessions of users with large values."""
    load, keys = (QUICK, 10_000) if quick else (Load(), 40_000)
    started = time.monotonic()
    done = [harness.in_scratch(once, load, keys) for _ in range(reps)]
    repetitions = [figures for _, figures in done]
    facts = {
        "command": harness.command("benchmarks.cache", "bench-cache"),
        "machine": harness.machine(),
        "minutes": (time.monotonic() - started) / 60,
        "versions": versions(),
        "settings": constants(),
        "load": asdict(load),
        "production": PRODUCTION,
        **summary(repetitions),
        "repetitions": repetitions,
        "plot": results.with_suffix(".png").name,
    }
    harness.publish(results, facts, report(facts))
    plot(done[0][0], results.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
