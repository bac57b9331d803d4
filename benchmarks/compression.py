"""What RocksDB's two compressions cost: bytes of a snapshot, and processor time of writing and reading.

    python -m benchmarks.compression                            # two minutes
    python -m benchmarks.compression --quick --results /tmp/compression

The two take turns, and each repetition begins with an empty database. What is measured: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.state.report import machine
from state_ops.backends.base import Compression, SortedRun
from state_ops.backends.rocksdb import RocksDBBackend

RESULTS = Path(__file__).parent / "results" / "compression"
KINDS: tuple[Compression, ...] = ("lz4", "zstd")
SHARES = (0.01, 0.2)
_MEMORY_MB = 128
_ONE_SHARD = 4096.0


@dataclass(frozen=True, slots=True)
class Measured:
    """bytes: of the snapshot, per key. write: microseconds of processor time per key; read: the same, by share of the keys that one
    multi-get asks for."""

    values: str
    keys: int
    kind: str
    bytes: float
    write: float
    read: dict[float, float]


def numbers(keys: int, rng: np.random.Generator) -> list[bytes]:
    """A count and two sums of eighths, as an aggregation keeps them: 26 bytes."""
    counts = rng.integers(1, 9, keys).astype("<i8")
    sums = rng.integers(0, 8000, (2, keys)) / 8
    return [
        b"\x01\x00" + count.tobytes() + one.tobytes() + two.tobytes()
        for count, one, two in zip(counts, *sums, strict=True)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a fiftieth of the keys, once")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS, help="report's path, without suffix")
    given = parser.parse_args()
    shrink, repetitions = (50, 1) if given.quick else (1, given.reps)
    found = [
        one
        for values, keys, make in (("numbers", 2_000_000, numbers), ("texts", 200_000, texts))
        for one in _compared(values, keys // shrink, make, repetitions)
    ]
    facts = {"machine": machine(), "repetitions": repetitions, "measurements": [asdict(one) for one in found]}
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    given.results.with_suffix(".md").write_text(_markdown(facts, found))
    print(given.results.with_suffix(".md").read_text())


def _compared(
    values: str, number: int, make: Callable[[int, np.random.Generator], list[bytes]], repetitions: int
) -> Iterator[Measured]:
    rng = np.random.default_rng(1)
    keys = [int(key).to_bytes(8, "big") for key in np.unique(rng.integers(0, 1 << 63, number))]
    run = SortedRun(keys, make(len(keys), rng))
    asked = {share: [keys[at] for at in rng.choice(len(keys), int(len(keys) * share), False)] for share in SHARES}
    for _ in range(repetitions):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as scratch:
                yield _once(Path(scratch), values, kind, run, asked)


def _once(scratch: Path, values: str, kind: Compression, run: SortedRun, asked: dict[float, list[bytes]]) -> Measured:
    def opened() -> closing[RocksDBBackend]:
        return closing(RocksDBBackend(scratch / "db", _MEMORY_MB, _ONE_SHARD, kind))

    with opened() as backend:
        begun = time.process_time()
        backend.write(run)
        files = backend.snapshot(scratch / "snapshot")
        write = time.process_time() - begun
    read = {}
    for share, keys in asked.items():
        with opened() as backend:
            begun = time.process_time()
            got = backend.multi_get(keys)
            read[share] = (time.process_time() - begun) / len(keys) * 1e6
        if None in got:
            raise RuntimeError(f"{kind} lost keys")
    size = sum(file.stat().st_size for file in files)
    return Measured(values, len(run), kind, size / len(run), write / len(run) * 1e6, read)


def _markdown(facts: dict[str, Any], found: Sequence[Measured]) -> str:
    lines = [
        "# Compression of RocksDB's files",
        "",
        f"{facts['machine']}. Made by `python -m benchmarks.compression`, {facts['repetitions']} repetitions in turns, medians; what is measured"
        " stands in `benchmarks/README.md`. Times are of the processor, in microseconds for each key.",
        "",
        "| values | compression | bytes of the snapshot per key | write | " + " | ".join(f"read {share:.0%} of the keys" for share in SHARES) + " |",
        "|---|---|---:|---:|" + "---:|" * len(SHARES),
    ]  # fmt: skip
    for values in dict.fromkeys(one.values for one in found):
        medians = {kind: _medians([one for one in found if (one.values, one.kind) == (values, kind)]) for kind in KINDS}
        lines += [
            f"| {values} | {kind} | " + " | ".join(f"{value:.1f}" for value in row) + " |"
            for kind, row in medians.items()
        ]
        of = [packed / fast for packed, fast in zip(medians["zstd"], medians["lz4"], strict=True)]
        lines.append(f"| {values} | zstd to lz4 | " + " | ".join(f"**{ratio:.2f}**" for ratio in of) + " |")
    return "\n".join([*lines, ""])


def _medians(ones: Sequence[Measured]) -> list[float]:
    return [
        statistics.median(one.bytes for one in ones),
        statistics.median(one.write for one in ones),
        *(statistics.median(one.read[share] for one in ones) for share in SHARES),
    ]


if __name__ == "__main__":
    main()
