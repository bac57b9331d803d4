"""What RocksDB's two compressions cost: bytes of a snapshot, and processor time of writing and reading.

    python -m benchmarks.storage.compression                            # two minutes
    python -m benchmarks.storage.compression --quick --results /tmp/compression

The two take turns, and each repetition begins with an empty database. What is measured: benchmarks/README.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks import harness
from benchmarks.harness import Row
from state_ops.backends.base import Compression, SortedRun
from state_ops.backends.rocksdb import RocksDBBackend

KINDS: tuple[Compression, ...] = ("lz4", "zstd")
SHARES = (0.01, 0.2)
_MEMORY_MB = 128
_ONE_SHARD = 4096.0


def numbers(keys: int, rng: np.random.Generator) -> list[bytes]:
    """A count and two sums of eighths, as an aggregation keeps them: 26 bytes."""
    counts = rng.integers(1, 9, keys).astype("<i8")
    sums = rng.integers(0, 8000, (2, keys)) / 8
    return [
        b"\x01\x00" + count.tobytes() + first.tobytes() + second.tobytes()
        for count, first, second in zip(counts, *sums, strict=True)
    ]


def texts(keys: int, rng: np.random.Generator) -> list[bytes]:
    """JSON of a customer with 24 items, some 900 bytes: names that repeat, and numbers that do not."""
    cities = ("Aarhus", "Bergen", "Odense")
    return [
        json.dumps(
            {
                "user": int(rng.integers(1_000_000_000)),
                "city": cities[number % len(cities)],
                "items": [{"sku": int(sku), "price": int(sku) / 8} for sku in rng.integers(0, 1_000_000, 24)],
            }
        ).encode()
        for number in range(keys)
    ]


def _compared(
    values: str, number: int, make: Callable[[int, np.random.Generator], list[bytes]], repetitions: int
) -> Iterator[Row]:
    rng = np.random.default_rng(1)
    keys = [int(key).to_bytes(8, "big") for key in np.unique(rng.integers(0, 1 << 63, number))]
    run = SortedRun(keys, make(len(keys), rng))
    asked = {share: [keys[at] for at in rng.choice(len(keys), int(len(keys) * share), False)] for share in SHARES}
    for _ in range(repetitions):
        for kind in KINDS:
            yield harness.in_scratch(_once, values, kind, run, asked)


def _once(scratch: Path, values: str, kind: Compression, run: SortedRun, asked: dict[float, list[bytes]]) -> Row:
    """Bytes of the snapshot, per key, and microseconds of processor time per key to write, and to read so many at
    once."""

    def opened() -> closing[RocksDBBackend]:
        return closing(RocksDBBackend(scratch / "db", _MEMORY_MB, _ONE_SHARD, kind))

    with opened() as backend:
        begun = time.process_time()
        backend.write(run)
        files = backend.snapshot(scratch / "snapshot")
        write = (time.process_time() - begun) / len(run) * 1e6
    read = {}
    for share, keys in asked.items():
        with opened() as backend:
            begun = time.process_time()
            got = backend.multi_get(keys)
            read[share] = (time.process_time() - begun) / len(keys) * 1e6
        if None in got:
            raise RuntimeError(f"{kind} lost keys")
    size = sum(file.stat().st_size for file in files) / len(run)
    return {"values": values, "keys": len(run), "kind": kind, "bytes": size, "write": write, "read": read}


def report(figures: Row) -> str:
    """The Markdown of what was measured: medians by kind of values and of compression."""
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for values in dict.fromkeys(row["values"] for row in figures["measurements"]):
        for kind in KINDS:
            same = [row for row in figures["measurements"] if (row["values"], row["kind"]) == (values, kind)]
            flat = [{"bytes": row["bytes"], "write": row["write"], **row["read"]} for row in same]
            rows.setdefault(values, {})[kind] = harness.medians(flat)
    return harness.render("compression", **figures, rows=rows, shares=SHARES)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a fiftieth of the keys, once")] = False,
    reps: int = 5,
    results: Annotated[Path, typer.Option(help="report's path, without suffix")] = harness.RESULTS / "compression",
) -> None:
    """What RocksDB's two compressions cost: bytes of a snapshot, and processor time of writing and reading."""
    shrink, repetitions = (50, 1) if quick else (1, reps)
    measurements: list[Row] = []
    for values, keys, make in (("numbers", 2_000_000, numbers), ("texts", 200_000, texts)):
        measurements += _compared(values, keys // shrink, make, repetitions)
    figures = {"machine": harness.machine(), "repetitions": repetitions, "measurements": measurements}
    harness.publish(results, figures, report(figures))


if __name__ == "__main__":
    typer.run(main)
