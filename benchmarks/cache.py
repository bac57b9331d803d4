"""What a state cache is worth: none, one layer, two layers, on sessions of users with large values.

    python -m benchmarks.cache                 about five minutes; writes benchmarks/results/cache.*
    python -m benchmarks.cache --reps 3        the same events three times; figures are medians
    python -m benchmarks.cache --quick --results /tmp/cache

The shape is that of the deployment whose figures stand beside ours: many users, few of them active at a time; a session of
many events, most of them close together, then nothing for long; each event reads its user's value and updates it; the value
is a map of a dozen substates, one of them above 10 KB. Sizes are scaled down in one ratio (20,000 entries to 2,000 + 23,000).

One subtask, driven as the keyed task drives it: fork the last snapshot, open it, apply an epoch's events, flush the cache and
take the snapshot (the sync phase), upload (off the path of the events). Service times are measured; arrivals are not:
events come at one fixed rate, the same for all, and the latency of each follows from the queue that the measured times
make. The vectorised path is measured on its own: state of a whole batch of keys through a cache, and by one multi-get.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.incremental import Subtask
from benchmarks.state.report import machine
from state_ops.backends.base import Backend, Compression
from state_ops.backends.rocksdb import SHARD_MB, RocksDBBackend
from state_ops.ids import AttemptId, CheckpointId, Generation, new_attempt_id
from state_ops.keyed.state_cache import CacheFigures, CacheSizes, StateCache, ValueStore
from state_ops.schema.row_codec import decode_rows, encode_rows
from state_ops.schema.state_schema import StateSchema
from state_ops.snapshots import snapshot
from state_ops.snapshots.attempt import Attempt
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
    """One variant, epoch by epoch. sync: flush and snapshot; flush: the cache's part of it; ms. service: ms per event."""

    name: str
    sync: list[float] = field(default_factory=list)
    flush: list[float] = field(default_factory=list)
    opening: list[float] = field(default_factory=list)
    uploaded: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    service: list[np.ndarray] = field(default_factory=list)
    figures: CacheFigures = field(default_factory=CacheFigures)
    latency: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def busy(self) -> float:
        """Milliseconds of work on the path of the events."""
        return sum(float(times.sum()) for times in self.service) + sum(self.sync) + sum(self.opening)


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
    """The user of every event, int64[events]. Among the active users the next event is one of a recent user's, Zipf-like."""
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
        lambda found: [json.loads(v) for v in found],
    )


def key_of(user: int) -> bytes:
    return int(user).to_bytes(8, "big")


class Driver:
    """The databases of one variant, from snapshot to snapshot."""

    def __init__(self, root: Path, name: str) -> None:
        self.storage = Storage(str(root / "storage"))
        self.home = root / "work" / "users" / "0"
        self.retained: list[snapshot.Snapshot] = []
        self.run = Run(name)

    def begin(self, load: Load, rng: np.random.Generator) -> None:
        """The first snapshot: a value of every user."""
        attempt, forked, backend = self._opened(1)
        values = store(backend)
        for start in range(0, load.users, 500):
            users = range(start, min(start + 500, load.users))
            values.write({key_of(user): a_value(user, rng) for user in users})
        self._taken(attempt, forked, backend)

    def epoch(self, number: int, users: Sequence[int], cached: Callable[[ValueStore[Value]], Any], counts: bool) -> Any:
        """Apply an epoch's events and take its snapshot. cached: makes the cache above this epoch's backend."""
        clock = time.perf_counter()
        attempt, forked, backend = self._opened(number)
        cache = cached(store(backend))
        opening = time.perf_counter() - clock
        times = np.empty(len(users) + 1)
        for at, user in enumerate(users):
            times[at] = time.perf_counter()
            key = key_of(user)
            cache.update(key, applied(cache.get(key), at))
        times[-1] = time.perf_counter()
        figures = cache.barrier()
        flush = time.perf_counter() - times[-1]
        sync, taken = self._taken(attempt, forked, backend)
        if counts:
            run = self.run
            run.opening.append(opening * 1e3)
            run.flush.append(flush * 1e3)
            run.sync.append((flush + sync) * 1e3)
            run.service.append(np.diff(times) * 1e3)
            run.uploaded.append(sum(file.bytes for file in taken.files if file.new))
            run.size.append(sum(file.bytes for file in taken.files))
            run.figures += figures
        return cache

    def _opened(self, number: int) -> tuple[Attempt, snapshot.WorkingCopy, RocksDBBackend]:
        attempt = Attempt("users", 0, Generation(1), CheckpointId(number), AttemptId(new_attempt_id()), self.home)
        forked = snapshot.working_copy(self.storage, attempt, self.retained[-1] if self.retained else None)
        return attempt, forked, RocksDBBackend(forked.db, _MEMORY_MB, compression=_COMPRESSION)

    def _taken(
        self, attempt: Attempt, forked: snapshot.WorkingCopy, backend: RocksDBBackend
    ) -> tuple[float, snapshot.Snapshot]:
        clock = time.perf_counter()
        files = snapshot.take(attempt, backend)
        sync = time.perf_counter() - clock
        backend.close()
        prepared = snapshot.prepare(attempt, forked, files)
        taken = snapshot.upload(self.storage, attempt, prepared, self.retained[-1] if self.retained else None)
        self._keep(taken)
        return sync, taken

    _keep, _prune = Subtask._keep, Subtask._prune


def variants(load: Load) -> dict[str, Callable[..., Any]]:
    def through(below: ValueStore[Value], _: Any) -> Any:
        return Through(below)

    def one(below: ValueStore[Value], warm: Any) -> Any:
        return StateCache(below, CacheSizes(load.one), warm)

    def two(below: ValueStore[Value], warm: Any) -> Any:
        return StateCache(below, CacheSizes(load.l1, load.l2), warm)

    return {"none": through, "one layer": one, "two layers": two}


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
    service = []
    for number, times in enumerate(run.service):
        blocked = times.copy()
        blocked[0] += run.opening[number] + (run.sync[number - 1] if number else 0)
        service.append(blocked)
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
        lambda found: _tuples(decode_rows(schema, found)),
    )
    made = Batches(schema, backend, StateCache(below, CacheSizes(number)), names)
    made.cache.get_many(names)
    return made


def vectorised(keys: int, root: Path) -> list[dict[str, Any]]:
    """Microseconds per key and batch to read the state of a whole batch as columns, change one, and write it back."""
    found = []
    for width in (8, 1 << 10, 12 << 10):
        number = keys if width < _LARGE_BYTES else keys // 8
        made = _batches(width, number, root / f"vectorised-{width}")
        rng = np.random.default_rng(_SEED)
        for times in (1, 10):
            size = number // 4
            batches = [[made.names[index] for index in rng.permutation(number)[:size].tolist()] for _ in range(times)]
            direct, cached = (_best(call, batches) / size / times for call in (made.direct, made.cached))
            found.append({"bytes": width + 8, "keys": size, "batches": times, "direct_us": direct, "cached_us": cached})
        made.backend.close()
    return found


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

    def once() -> float:
        clock = time.perf_counter()
        call(batches)
        return (time.perf_counter() - clock) * 1e6

    return min(once() for _ in range(5))


# What is written

# One layer of 20,000 entries, then 2,000 + 23,000: as reported.
PRODUCTION = {"latency": (90, 35), "min": (26, 4), "avg": (41, 9), "max": (57, 14), "size": (1720, 2150)}


def figures(run: Run) -> dict[str, float]:
    events = sum(len(times) for times in run.service)
    return {
        "events_per_second_busy": events
        / (sum(float(t.sum()) for t in run.service) + sum(run.sync) + sum(run.opening))
        * 1e3,
        "event_us_mean": float(np.concatenate(run.service).mean()) * 1e3,
        "sync_ms_min": min(run.sync),
        "sync_ms_avg": statistics.fmean(run.sync),
        "sync_ms_max": max(run.sync),
        "flush_ms_avg": statistics.fmean(run.flush),
        "opening_ms_avg": statistics.fmean(run.opening),
        "latency_ms_max": float(run.latency.max(initial=0)),
        "latency_ms_p99": float(np.quantile(run.latency, 0.99)) if len(run.latency) else 0.0,
        "uploaded_mb_avg": statistics.fmean(run.uploaded) / 1e6,
        "checkpoint_mb_avg": statistics.fmean(run.size) / 1e6,
        "hit_rate": run.figures.hit_rate,
        "l1_hit_rate": run.figures.l1_hits / events,
        **{f"entries_{name}": value for name, value in asdict(run.figures).items()},
    }


def once(load: Load, keys: int) -> tuple[list[Run], dict[str, Any]]:
    """One repetition, with directories of its own: the variants' runs, and what is kept of them. keys: of the vectorised path."""
    with tempfile.TemporaryDirectory(prefix="weir-cache-") as root:
        runs = measure(load, Path(root))
        batches = vectorised(keys, Path(root))
    return runs, {
        "figures": {run.name: figures(run) for run in runs},
        "epochs": {
            run.name: {name: getattr(run, name) for name in ("sync", "flush", "opening", "uploaded", "size")}
            for run in runs
        },
        "vectorised": batches,
    }


def summary(repetitions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over repetitions of every figure of every variant, and of every line of the vectorised path."""
    return {
        "figures": {
            name: _medians([one["figures"][name] for one in repetitions]) for name in repetitions[0]["figures"]
        },
        "vectorised": [_medians(same) for same in zip(*(one["vectorised"] for one in repetitions), strict=True)],
    }


def _medians(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


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


def report(facts: dict[str, Any]) -> str:
    """The page of what `main` keeps as JSON."""
    load = Load(**facts["load"])
    none, one, two = (facts["figures"][name] for name in variants(load))
    times = len(facts["repetitions"])
    often = "one repetition" if times == 1 else f"medians over {times} repetitions of the same events"

    def row(label: str, key: str, form: str, production: tuple[float, float] | None = None, unit: str = "") -> str:
        ours = two[key] / one[key] - 1 if one[key] else 0.0
        theirs = (
            ""
            if production is None
            else f"{production[0]} -> {production[1]} {unit} ({production[1] / production[0] - 1:+.0%})"
        )
        return f"| {label} | {one[key]:{form}} | {two[key]:{form}} | {ours:+.0%} | {theirs} |"

    lines = [
        "# State cache: none, one layer, two layers",
        "",
        f"{load.users:,} users with values of about {_LARGE_BYTES / 1024:.0f} KB, {load.active:,} sessions at a time of"
        f" {_SESSION_EVENTS} events on average; {load.epochs} epochs of {load.events:,} events. One layer: {load.one:,} entries;"
        f" two layers: {load.l1:,} + {load.l2:,}. {facts['machine']}. Made by `{facts['command']}` in {facts['minutes']:.1f} minutes,"
        f" {often}; how it is measured stands in `benchmarks/cache.py`.",
        "",
        "| | one layer | two layers | change | production: one -> two |",
        "|---|---:|---:|---:|---:|",
        row("latency of an event, max, ms", "latency_ms_max", ",.0f", PRODUCTION["latency"], "s"),
        row("latency of an event, 99 %, ms", "latency_ms_p99", ",.1f"),
        row("sync phase, min, ms", "sync_ms_min", ",.0f", PRODUCTION["min"], "s"),
        row("sync phase, avg, ms", "sync_ms_avg", ",.0f", PRODUCTION["avg"], "s"),
        row("sync phase, max, ms", "sync_ms_max", ",.0f", PRODUCTION["max"], "s"),
        row("- flush of the cache, avg, ms", "flush_ms_avg", ",.1f"),
        row("checkpoint, avg, MB", "checkpoint_mb_avg", ",.0f", PRODUCTION["size"], "GB"),
        row("- of that uploaded, avg, MB", "uploaded_mb_avg", ",.1f"),
        row("hits, L1 + L2", "hit_rate", ".1%"),
        row("hits, L1", "l1_hit_rate", ".1%"),
        row("entries written before the barrier", "entries_evicted", ",.0f"),
        row("entries written at the barrier", "entries_flushed", ",.0f"),
        row("one event, mean, us", "event_us_mean", ",.0f"),
        row("events/s when never idle", "events_per_second_busy", ",.0f"),
        "",
        f"Without a cache an event takes {none['event_us_mean']:,.0f} us (a tenth of each epoch's events was applied). The events come"
        f" at {_UTILISATION:.0%} of the rate that the slower of the two caches can take. Production: hit rates (L1 + L2) of 93 % and 98 %"
        " in its two caches, an interval of 15 minutes.",
        "",
        "## The vectorised path",
        "",
        "Batches of distinct keys: the state as columns, one column changed, and written back. Without a cache that is one sorted"
        " multi-get, one decode, one encode and one write for each batch; with one that holds every key, the best case that there is,"
        " the barrier alone writes. Microseconds per key and batch.",
        "",
        "| value, bytes | keys in a batch | batches between barriers | no cache | cache, all hits | with the cache |",
        "|---:|---:|---:|---:|---:|---|",
    ]
    for batch in facts["vectorised"]:
        lines.append(
            f"| {batch['bytes']:,.0f} | {batch['keys']:,.0f} | {batch['batches']:.0f} | {batch['direct_us']:.2f} | {batch['cached_us']:.2f}"
            f" | {batch['direct_us'] / batch['cached_us']:.1f} x as fast |"
        )
    found = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    lines += ["", "## Versions and settings", "", f"{found}. `{json.dumps(facts['settings'], sort_keys=True)}`"]
    which = "" if times == 1 else ", in the first repetition"
    return "\n".join([*lines, "", f"![Latency of every event, and the sync phase{which}]({facts['plot']})", ""])


def plot(runs: list[Run], target: Path) -> None:
    import matplotlib  # only here: the figures are worth having where it is not installed

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.5), width_ratios=(3, 2), layout="constrained")
    for run, shade in zip(runs[1:], ("tab:orange", "tab:blue"), strict=True):
        at = range(0, len(run.latency), max(1, len(run.latency) // 4000))
        left.plot(list(at), [run.latency[i] for i in at], lw=0.8, color=shade, label=run.name)
        right.plot(
            range(1, len(run.sync) + 1), run.sync, marker="o", ms=3, color=shade, label=f"{run.name}: sync phase"
        )
        right.plot(
            range(1, len(run.flush) + 1), run.flush, ls=":", color=shade, label=f"{run.name}: flush of the cache"
        )
    left.set(xlabel="event", ylabel="ms", title="Latency of an event")
    right.set(xlabel="epoch", ylabel="ms", ylim=(0, None), title="What the barrier waits for")
    for side in (left, right):
        side.legend(fontsize=8)
    figure.savefig(target, dpi=110)


def _command(quick: bool, repetitions: int) -> str:
    """What made the figures, without where they were put."""
    asked = [*(["--quick"] if quick else []), *([f"--reps {repetitions}"] if repetitions > 1 else [])]
    return f"python -m benchmarks.cache {' '.join(asked)}" if asked else "make bench-cache"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="half a minute, a fifth of the sizes")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "cache")
    parser.add_argument("--reps", type=int, default=1, help="repetitions (1)")
    given = parser.parse_args()
    if given.reps < 1:
        parser.error("--reps is 1 or more")
    load, keys = (QUICK, 10_000) if given.quick else (Load(), 40_000)
    started = time.monotonic()
    done = [once(load, keys) for _ in range(given.reps)]
    minutes = (time.monotonic() - started) / 60
    repetitions = [found for _, found in done]
    target = given.results
    facts = {
        "command": _command(given.quick, given.reps),
        "machine": machine(),
        "minutes": minutes,
        "versions": versions(),
        "settings": constants(),
        "load": asdict(load),
        "production": PRODUCTION,
        **summary(repetitions),
        "repetitions": repetitions,
        "plot": target.with_suffix(".png").name,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    target.with_suffix(".md").write_text(report(facts))
    plot(done[0][0], target.with_suffix(".png"))
    print(target.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
