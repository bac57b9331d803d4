"""A worker's memory while its state is many times the budget: `python -m tests.tools.memory` (`make memory`).

A child process imports the backend, notes its resident size, and then loads, reads, changes, scans and snapshots a
state, alone and with a second database open. After each phase it reports the highest resident size that the kernel has
seen in it (VmHWM, so nothing hides between samples). What a batch takes in Python is small: 4096 entries at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from state_ops.backends import memory_budget as memory
from state_ops.backends.rocksdb import RocksDBBackend, is_table
from tests.tools.resident_size import forget_peak, resident
from tests.tools.task_memory import CASES, Sizes, task_phases
from weir.settings.configuration import PROJECT

SLACK_MB = 24  # code of the libraries that is used only now, fragments, and the batch at hand; measured: 12 to 19
BUDGET_MB, STATE_MB, VALUE_BYTES = 24, 480, 100

_BATCH = 4096
_KEY_BYTES = 16
_ODD = 0x9E3779B97F4A7C15  # spreads numbers over all keys


@dataclass(frozen=True, slots=True)
class Phase:
    """Memory in MiB: resident size above the baseline now, and at most since the phase began; what the budget's parts
    hold."""

    name: str
    seconds: float
    now: float
    peak: float
    cache: float
    memtables: float
    state: float


def phases(budget_mb: int, state_mb: int, value_bytes: int) -> Iterator[Phase]:
    """Run a child through all phases. It is a process of its own, so nothing of this one counts."""
    with tempfile.TemporaryDirectory(prefix="weir-memory-") as scratch:
        asked = [str(budget_mb), str(state_mb), str(value_bytes)]
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.tools.memory", "--child", scratch, *asked],
            stdout=subprocess.PIPE,
            text=True,
            cwd=PROJECT,
        )
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                yield Phase(**json.loads(line))
        if child.wait():
            raise RuntimeError(f"the child ended with {child.returncode}")


class _Child:
    """The work, and its report on standard output."""

    def __init__(self, scratch: Path, budget_mb: int, state_mb: int, value_bytes: int) -> None:
        self._scratch, self._budget_mb, self._value_bytes = scratch, budget_mb, value_bytes
        self._entries = (state_mb << 20) // (value_bytes + _KEY_BYTES)
        self._rounds = state_mb // 12  # so that a small state is not written several times
        self._draw = random.Random(1)
        self._noise = self._draw.randbytes(1 << 20)
        self._batch(range(_BATCH))
        self._baseline = resident("VmRSS")

    def run(self) -> None:
        self._begin()
        backend = RocksDBBackend(self._scratch / "db", self._budget_mb)
        for start in range(0, self._entries, _BATCH):
            backend.write(self._batch(range(start, min(start + _BATCH, self._entries))))
        self._report("load", backend)
        backend.snapshot(self._scratch / "one")
        self._report("snapshot", backend)
        for _ in range(self._rounds):
            assert None not in backend.multi_get(self._keys(self._some()))
        self._report("read at random", backend)
        for _ in range(self._rounds):
            numbers = self._some()
            backend.multi_get(self._keys(numbers))
            backend.write(self._batch(numbers), self._keys(self._some()[:10]))
        self._report("change at random", backend)
        assert sum(1 for _ in backend.scan(b"", b"\xff" * 20)) > 0.99 * self._entries
        self._report("scan everything", backend)
        files = backend.snapshot(self._scratch / "two")
        self._report("snapshot again", backend)
        other = RocksDBBackend(_forked(files, self._scratch / "other"), self._budget_mb)
        for _ in range(self._rounds // 2):
            for each in (backend, other):
                each.multi_get(self._keys(self._some()))
                each.write(self._batch(self._some()))
        self._report("two databases", other)
        other.snapshot(self._scratch / "three")
        other.close()
        backend.close()
        self._report("closed", None)

    def _some(self) -> list[int]:
        return [self._draw.randrange(self._entries) for _ in range(_BATCH)]

    @staticmethod
    def _keys(numbers: list[int]) -> list[bytes]:
        return [(number * _ODD % (1 << 64)).to_bytes(8, "big") + number.to_bytes(8, "big") for number in numbers]

    def _batch(self, numbers: list[int] | range) -> list[tuple[bytes, bytes]]:
        last = len(self._noise) - self._value_bytes
        starts = (self._draw.randrange(last) for _ in numbers)
        return [
            (key, self._noise[at : at + self._value_bytes])
            for key, at in zip(self._keys(list(numbers)), starts, strict=True)
        ]

    def _begin(self) -> None:
        forget_peak()
        self._clock = time.monotonic()

    def _report(self, name: str, backend: RocksDBBackend | None) -> None:
        shared = memory.budget(self._budget_mb)
        state = sum(file["size"] for file in backend._db.live_files()) if backend is not None else 0
        phase = Phase(
            name,
            round(time.monotonic() - self._clock, 2),
            *(round(resident(field) - self._baseline, 1) for field in ("VmRSS", "VmHWM")),
            *(round(part / (1 << 20), 1) for part in (shared.cache.get_usage(), shared.memtables.get_usage(), state)),
        )
        print(json.dumps(asdict(phase)), flush=True)
        self._begin()


def _forked(files: list[Path], target: Path) -> Path:
    target.mkdir()
    for file in files:
        (os.link if is_table(file.name) else shutil.copyfile)(file, target / file.name)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=4)
    parser.add_argument("--budget", type=int, default=BUDGET_MB, help="state.memory_mb")
    parser.add_argument("--state", type=int, default=STATE_MB, help="MiB of keys and values")
    asked = parser.parse_args()
    if asked.child:
        _Child(Path(asked.child[0]), *map(int, asked.child[1:])).run()
        return 0
    print(
        f"budget {asked.budget} MiB, state {asked.state} MiB, allowed above the baseline: {asked.budget + SLACK_MB} MiB"
    )
    print(f"{'phase':18}{'seconds':>9}{'now':>8}{'peak':>8}{'cache':>8}{'memtables':>11}{'on disk':>9}")
    highest = 0.0
    for phase in phases(asked.budget, asked.state, VALUE_BYTES):
        highest = max(highest, phase.peak)
        print(
            f"{phase.name:18}{phase.seconds:9.1f}{phase.now:8.1f}{phase.peak:8.1f}{phase.cache:8.1f}{phase.memtables:11.1f}{phase.state:9.1f}"
        )
    print(
        f"highest: {highest:.1f} MiB above the baseline, {'within' if highest <= asked.budget + SLACK_MB else 'ABOVE'}"
    )
    above = highest > asked.budget + SLACK_MB
    return int(any([above, *[_is_above(asked.budget, asked.state, case) for case in CASES]]))


def _is_above(budget: int, state: int, case: str) -> bool:
    """Print what a keyed task takes in one case, and return whether that is more than it may."""
    sizes = Sizes(budget, resident_mb=16, batch_rows=2048)
    allowed = sizes.allowed(SLACK_MB, case)
    print(f"\na keyed task, {case}, state {state} MiB, {sizes}: allowed above the baseline: {allowed:.0f} MiB")
    print(f"{'epoch':18}{'seconds':>9}{'now':>8}{'peak':>8}{'in storage':>12}")
    highest = 0.0
    for phase in task_phases(sizes, state, case):
        highest = max(highest, phase.peak)
        print(f"{phase.name:18}{phase.seconds:9.1f}{phase.now:8.1f}{phase.peak:8.1f}{phase.state:12.1f}")
    print(f"highest: {highest:.1f} MiB above the baseline, {'within' if highest <= allowed else 'ABOVE'}")
    return highest > allowed


if __name__ == "__main__":
    sys.exit(main())
