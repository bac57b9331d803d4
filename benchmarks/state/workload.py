"""The input that every engine gets, as Parquet files, and what must come out of it.

    <scratch>/inputs/<workload>/
        preload/epoch-00000-{0,1}.parquet    one event per key, in large epochs; only where state is large at once
        events/epoch-00000-{0,1}.parquet     the measured epochs; where time counts, in events-<slices>, with two that
                                         close what is open
        expected-<slices>.parquet            by DuckDB: key, n, total, top after these slices

An event is `key` (int64), `value` (float64) and, in the 1 KB workloads, `payload` (a JSON text of 1,024 bytes). Two
things make results comparable to the last bit: a value is a multiple of 1/8, so sums do not depend on the order of
adding; and a key's payload is always the same text, so "the greatest one" is found wherever one looks. Keys are spread
over all of int64 by an odd factor: no engine gains from dense or sorted keys.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from state_ops.schema.key_groups import key_groups
from weir.definition import MAX_PARALLELISM

FILES = 2
CLOSER = 1
"""The key of the rows that are far in the future, so that all windows of others close; it has no other rows."""
"""Per epoch, so that two cores read side by side in every engine."""

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_PRELOAD_EVENTS, _PRELOAD_PAYLOADS = 5_000_000, 1_000_000
_PAYLOADS = 512
_ROW_GROUP = 125_000
_SECOND = 1_000_000
EPOCH_SECONDS, OUT_OF_ORDER_SECONDS, WINDOW_SECONDS, LATENESS_SECONDS = 10, 4, 10, 5
_START = 1_700_000_000 * _SECOND
_GRAIN = 3  # event times are multiples of so many microseconds: no two are a session's gap apart, which engines see
# differently


@dataclass(frozen=True, slots=True)
class Workload:
    """keys: how many there are; skew: "uniform", "zipf" (exponent 1), "half" (half of all rows have one key) or "group"
    (nine of ten have keys of one key group); payload: events and state carry a text of 1,024
    bytes; preload: every key has state before the measured epochs; epochs of so many events; hot: only so many keys
    change at all. operator: "aggregate"; or "window", "session" or "deduplicate", by the event time `at`, of which an
    epoch has ten seconds: rows are up to four seconds out of order, and the watermark is five behind. Half of the rows
    of "deduplicate" repeat a key of the epoch."""

    name: str
    keys: int
    skew: str = "uniform"
    payload: bool = False
    preload: bool = False
    epochs: int = 10
    events: int = 500_000
    hot: int | None = None
    operator: str = "aggregate"

    @property
    def timed(self) -> bool:
        return self.operator != "aggregate"

    @property
    def preload_events(self) -> int:
        """Of one epoch of the preload."""
        return min(self.keys, _PRELOAD_PAYLOADS if self.payload else _PRELOAD_EVENTS)


@dataclass(frozen=True, slots=True)
class Slices:
    """The part of a workload that a row gets: its first epochs, or, for slow engines, the first events in smaller
    epochs."""

    epochs: int
    events: int

    @property
    def total(self) -> int:
        return self.epochs * self.events


def preloaded(scratch: Path, workload: Workload) -> Path:
    """The directory of the events that give every key a state; written once."""
    directory = scratch / "inputs" / workload.name / "preload"
    if not (directory / "_DONE").exists():
        rng = np.random.default_rng(7)
        epochs = (
            np.arange(start, min(start + workload.preload_events, workload.keys), dtype=np.uint64)
            for start in range(0, workload.keys, workload.preload_events)
        )
        _write(directory, workload, epochs, rng, since=0)
    return directory


def sliced(scratch: Path, workload: Workload, slices: Slices) -> Path:
    """The directory of the measured events, cut as a row gets them; written once."""
    events = _events(scratch, workload)
    if not workload.timed and slices.events == workload.events and slices.epochs == workload.epochs:
        return events
    directory = events.with_name(f"events-{slices.epochs}x{slices.events}")
    if not (directory / "_DONE").exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        rows = ds.dataset(sorted(events.glob("*.parquet")), format="parquet").head(slices.total)
        for epoch in range(slices.epochs):
            _write_epoch(directory, epoch, rows.slice(epoch * slices.events, slices.events), since=1_000_000)
        if workload.timed:
            for number in range(2):  # engines that go by the watermark of the batch before need one more
                moment = _START + (slices.epochs * EPOCH_SECONDS + 1_000 * (number + 1)) * _SECOND
                at = pa.array([moment] * FILES).cast(rows.schema.field("at").type)
                closing = pa.table([[CLOSER] * FILES, [0.0] * FILES, at], schema=rows.schema)
                _write_epoch(directory, slices.epochs + number, closing, since=1_000_000)
        (directory / "_DONE").touch()
    return directory


def expected(scratch: Path, workload: Workload, slices: Slices, loaded: bool = True) -> Path:
    """Parquet of key, n, total, top (and payload's hash) after the preload and these slices, by DuckDB; computed
    once."""
    target = (
        scratch
        / "inputs"
        / workload.name
        / f"expected-{slices.epochs}x{slices.events}{'' if loaded else '-alone'}.parquet"
    )
    if not target.exists():
        inputs = [f"{sliced(scratch, workload, slices)}/*.parquet"]
        if workload.preload and loaded:
            inputs.append(f"{preloaded(scratch, workload)}/*.parquet")
        partial = target.with_suffix(".partial")
        with _database(scratch) as db:
            query = _timed(workload, inputs) if workload.timed else totals(inputs, workload.payload)
            db.execute(f"COPY {query} TO '{partial}' (FORMAT parquet)")
        partial.rename(target)
    return target


def verify(
    scratch: Path, workload: Workload, slices: Slices, output: list[str], form: str = "parquet", loaded: bool = True
) -> dict[str, int]:
    """Compare an engine's output with DuckDB's result: per key its last row (the one with the highest n) must be equal.

    output, form: as in engine.Result. loaded: whether the engine was
    given the preload. Returns how many keys there are on either side, and how many differ or are on one side only.
    """
    rows = f"read_parquet({output})"
    if form == "debezium-json":
        rows = f"(SELECT unnest(after) FROM read_json({output}, format='newline_delimited') WHERE op = 'c')"
    truth = f"read_parquet('{expected(scratch, workload, slices, loaded)}')"
    if workload.timed:
        return _compare_all(rows, truth, scratch, workload)
    return compare(rows, truth, scratch, workload.payload)


def compare(rows: str, truth: str, scratch: Path, payload: bool = False) -> dict[str, int]:
    """Compare key, n, total, top of each key's row with the highest n with a table that has one row a key.

    Returns:
        keys: on either side. differing: those that differ or are on one side only.
    """
    text = " OR o.payload IS DISTINCT FROM e.payload" if payload else ""
    last = ", hash(any_value(payload)) AS payload" if payload else ""
    with _database(scratch) as db:
        keys, differing = db.execute(
            f"WITH o AS (SELECT key, max(n) AS n, max_by(total, n) AS total, max_by(top, n) AS top{last}"
            f" FROM {rows} GROUP BY key)"
            " SELECT count(*), count(*) FILTER (o.n IS DISTINCT FROM e.n OR o.total IS DISTINCT FROM e.total"
            f" OR o.top IS DISTINCT FROM e.top{text}) FROM o FULL JOIN {truth} e ON o.key = e.key"
        ).fetchall()[0]
    return {"keys": keys, "differing": differing}


def totals(inputs: list[str], payload: bool = False) -> str:
    """The query that every engine answers."""
    text = ", hash(any_value(payload)) AS payload" if payload else ""
    return (
        f"(SELECT key, count(*) AS n, sum(value) AS total, max(value) AS top{text}"
        f" FROM read_parquet({inputs}) GROUP BY key)"
    )


_COLUMNS = {
    "window": "key, epoch_us(window_start) AS window_start, n, total, top",
    "session": "key, epoch_us(window_start) AS window_start, epoch_us(window_end) AS window_end, n, total, top",
    "deduplicate": "key, value",
}


def _compare_all(rows: str, truth: str, scratch: Path, workload: Workload) -> dict[str, int]:
    """Compare all rows, each as often as it is there."""
    columns = _COLUMNS[workload.operator]
    output = f"(SELECT {columns} FROM {rows} WHERE key <> {CLOSER})"
    truth = f"(FROM {truth})"
    with _database(scratch) as db:
        keys, differing = db.execute(
            f"SELECT (SELECT count(*) FROM {truth}), (SELECT count(*) FROM ({output} EXCEPT ALL {truth}))"
            f" + (SELECT count(*) FROM ({truth} EXCEPT ALL {output}))"
        ).fetchall()[0]
    return {"keys": keys, "differing": differing}


def _timed(workload: Workload, inputs: list[str]) -> str:
    """The query that every engine answers of events with a time."""
    rows = f'(SELECT *, epoch_us("at") AS us FROM read_parquet({inputs}) WHERE key <> {CLOSER})'
    aggregates = "count(*) AS n, sum(value) AS total, max(value) AS top"
    length = WINDOW_SECONDS * _SECOND
    if workload.operator == "deduplicate":
        return f"(SELECT DISTINCT key, value FROM {rows})"
    if workload.operator == "window":
        return f"(SELECT key, us // {length} * {length} AS window_start, {aggregates} FROM {rows} GROUP BY ALL)"
    before = "lag(us) OVER (PARTITION BY key ORDER BY us)"
    begun = f"(SELECT *, coalesce(us - {before} >= {length}, true)::INT AS begins FROM {rows})"
    so_far = "OVER (PARTITION BY key ORDER BY us, begins DESC ROWS UNBOUNDED PRECEDING)"
    numbered = f"(SELECT *, sum(begins) {so_far} AS s FROM {begun})"
    bounds = f"min(us) AS window_start, max(us) + {length} AS window_end"
    return f"(SELECT * EXCLUDE s FROM (SELECT key, s, {bounds}, {aggregates} FROM {numbered} GROUP BY key, s))"


def _database(scratch: Path) -> duckdb.DuckDBPyConnection:
    limits = {"memory_limit": "6GB", "threads": 2, "temp_directory": str(scratch / "duckdb")}
    return duckdb.connect(config=limits)


def _events(scratch: Path, workload: Workload) -> Path:
    directory = scratch / "inputs" / workload.name / "events"
    if not (directory / "_DONE").exists():
        rng = np.random.default_rng(1)
        _write(directory, workload, _ranks(workload, rng), rng, since=1_000_000)
    return directory


def _ranks(workload: Workload, rng: np.random.Generator) -> Iterator[np.ndarray]:
    if workload.operator == "deduplicate":
        half = workload.events // 2
        for epoch in range(workload.epochs):
            fresh = np.arange(epoch * half, (epoch + 1) * half, dtype=np.uint64)
            yield rng.permutation(np.concatenate([fresh, rng.choice(fresh, workload.events - half)]))
        return
    if workload.hot is not None:
        hot = rng.choice(workload.keys, workload.hot, replace=False).astype(np.uint64)
        for _ in range(workload.epochs):
            yield rng.permutation(np.resize(hot, workload.events))
        return
    if workload.skew == "uniform":
        for _ in range(workload.epochs):
            yield rng.integers(0, workload.keys, workload.events).astype(np.uint64)
        return
    if workload.skew in ("half", "group"):
        ranks = np.arange(workload.keys, dtype=np.uint64)
        with np.errstate(over="ignore"):
            groups = key_groups([pa.array((ranks * _SPREAD).view(np.int64))], MAX_PARALLELISM)
        heavy, share = (ranks[:1], 0.5) if workload.skew == "half" else (ranks[groups == groups[0]], 0.9)
        for _ in range(workload.epochs):
            of_heavy = rng.random(workload.events) < share
            yield np.where(of_heavy, rng.choice(heavy, workload.events), rng.choice(ranks, workload.events))
        return
    cumulative = np.cumsum(1.0 / np.arange(1, workload.keys + 1))
    cumulative /= cumulative[-1]
    for _ in range(workload.epochs):
        yield np.searchsorted(cumulative, rng.random(workload.events)).astype(np.uint64)


def _write(
    directory: Path, workload: Workload, epochs: Iterator[np.ndarray], rng: np.random.Generator, since: int
) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    texts = _texts() if workload.payload else None
    for epoch, ranks in enumerate(epochs):
        with np.errstate(over="ignore"):
            keys = (ranks * _SPREAD).view(np.int64)
        columns = {"key": pa.array(keys), "value": pa.array(rng.integers(0, 8_000, len(ranks)) / 8.0)}
        if workload.operator == "deduplicate":
            columns["value"] = pa.array((ranks % np.uint64(8_000)).astype(np.float64) / 8.0)
        if workload.timed:
            columns["at"] = _times(epoch, len(ranks), rng)
        if texts is not None:
            columns["payload"] = pa.DictionaryArray.from_arrays(pa.array((ranks % _PAYLOADS).astype(np.int16)), texts)
        _write_epoch(directory, epoch, pa.table(columns), since)
    (directory / "_DONE").touch()


def _times(epoch: int, number: int, rng: np.random.Generator) -> pa.Array:
    due = np.sort(rng.integers(0, EPOCH_SECONDS * _SECOND, number)) + _START + epoch * EPOCH_SECONDS * _SECOND
    times = due - rng.integers(0, OUT_OF_ORDER_SECONDS * _SECOND, number)
    return pa.array(times // _GRAIN * _GRAIN).cast(pa.timestamp("us", tz="UTC"))


def _write_epoch(directory: Path, epoch: int, rows: pa.Table, since: int) -> None:
    if "payload" in rows.column_names:  # a plain text to every reader; only the files stay small
        rows = rows.set_column(2, "payload", rows["payload"].cast(pa.dictionary(pa.int16(), pa.string())))
    half = -(-rows.num_rows // FILES)
    for number in range(FILES):
        file = directory / f"epoch-{since // 1_000_000}{epoch:05}-{number}.parquet"
        part = rows.slice(number * half, half)
        pq.write_table(part, file, row_group_size=_ROW_GROUP, compression="snappy", store_schema=False)
        at = 1_700_000_000 + since + epoch * 10 + number  # engines that take files by age take them in this order
        os.utime(file, (at, at))


def _texts() -> pa.Array:
    """Texts of 1,024 bytes that look like records: repeated field names, hexadecimal values."""
    rng = np.random.default_rng(3)
    texts = []
    for _ in range(_PAYLOADS):
        record = {f"attribute_{number:02}": rng.bytes(8).hex() for number in range(26)}
        texts.append(json.dumps(record, separators=(",", ":")).ljust(1024)[:1024])
    return pa.array(texts)
