"""A keyed task's memory while its state is many times the budget; part of `python -m tests.tools.memory`.

A child process runs what a Spark worker runs, `run_task.run`, epoch after epoch: it loads a state, changes some of
it and a quarter of it, and reports after each epoch the highest resident size that the kernel has seen. Rows come in
batches that are made as they are asked for. There is a case for each kind of state that has a memory of its own: a
function's rows, an aggregate's (sorted runs that follow each other), the values of a few keys over changes, windows
and keys of a deduplication (resident tables); and for skew: one key that has half of all rows, and one key group that has nine of ten.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.backends.base import BackendOptions
from state_ops.ids import CheckpointId, Generation
from state_ops.records.snapshot_files import STATE, Snapshot, snapshots_of
from state_ops.rows import key_aggregation
from state_ops.rows import row_store as rows_module
from state_ops.schema.key_groups import key_groups
from state_ops.storage.storage import Storage
from tests.tools.resident_size import forget_peak, resident
from weir import Epoch, State, ValueState, agg, aggregate, deduplicate, delta, files, stage, window
from weir.definition import Progress, Stage
from weir.execution.direct_read import with_owners
from weir.operators.shapes import shapes
from weir.settings.configuration import PROJECT
from weir.task import run_task
from weir.task.run_task import KeyedTask

TEXT_BYTES, PENDING_MB = 1000, 32
_FREED_MB = 48  # that glibc keeps of what Polars and Python have freed, and libraries that only a task uses
_LOADS = 4
_ENTRY_BYTES = TEXT_BYTES + 40
_SCHEMA = pa.schema([("k", pa.int64()), ("note", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])
_NOW = datetime(2024, 5, 1, tzinfo=UTC)
_GROUPS = 16
_KEYS_WITH_VALUES = 8


class Kept(State):
    """Of one key."""

    rows: int = 0
    note: str | None = None


@stage("kept", source=files("x/*.parquet"), key="k", state=Kept, sink=delta.append("kept"))
def kept(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Each key's newest note."""
    state.fold(rows, rows=agg.count(), note=agg.max("note"))
    return rows.select("k")


_SOURCE = files("x/*.parquet", event_time="at")
_totals = aggregate("totals", _SOURCE, key="k", sink=delta.append("totals"), rows=agg.count(), note=agg.max("note"))
_values = aggregate(
    "values", _SOURCE, key="k", sink=delta.append("values"), notes=agg.count_distinct("note"), most=agg.max("note")
)
_hours = window(
    "hours", _SOURCE, key="k", on="at", every="1h", sink=delta.append("hours"), rows=agg.count(), note=agg.max("note")
)
_firsts = deduplicate("firsts", _SOURCE, key=["k", "note"], sink=delta.append("firsts"))

FUNCTION, HALF, GROUP = "a function", "one key has half of all rows", "one key group has nine of ten keys"
VALUES = "values of changes"
CASES: dict[str, Stage] = {
    FUNCTION: kept,
    "an aggregate": _totals,
    VALUES: _values,
    "windows": _hours,
    "a deduplication": _firsts,
    HALF: _totals,
    GROUP: _totals,
}
SKEWED = (HALF, GROUP)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What bounds the task's memory, in MiB and rows. pending_mb: `row_store._PENDING_BYTES`, which is no setting; also
    `key_aggregation._PART_BYTES`, and half of its `PARTIAL_BYTES`."""

    memory_mb: int
    resident_mb: int
    batch_rows: int
    pending_mb: int = PENDING_MB

    def allowed(self, slack_mb: int, case: str) -> float:
        """The sum of what docs/reference/backends.md names, in MiB above the size after imports."""
        batch = self.batch_rows * _ENTRY_BYTES / (1 << 20)
        gathered = 0 if case == FUNCTION else 4 * (2 * self.pending_mb + 16)
        gathered *= 2 if case == VALUES else 1
        buffers = 6 * self.pending_mb + 3 * self.resident_mb + 10 * batch
        return self.memory_mb + slack_mb + _FREED_MB + buffers + gathered


@dataclass(frozen=True, slots=True)
class TaskPhase:
    """One epoch: memory in MiB above the baseline, now and at most; state: MiB of its checkpoint."""

    name: str
    seconds: float
    now: float
    peak: float
    state: float


def task_phases(sizes: Sizes, state_mb: int, case: str = FUNCTION) -> Iterator[TaskPhase]:
    """Run a child through all epochs of a case."""
    with tempfile.TemporaryDirectory(prefix="weir-memory-") as scratch:
        asked = json.dumps({**asdict(sizes), "state_mb": state_mb, "scratch": scratch, "case": case})
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.tools.task_memory", asked], stdout=subprocess.PIPE, text=True, cwd=PROJECT
        )
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                yield TaskPhase(**json.loads(line))
        if child.wait():
            raise RuntimeError(f"the child ended with {child.returncode}")


class _Task:
    def __init__(self, sizes: Sizes, state_mb: int, scratch: Path, case: str) -> None:
        rows_module._PENDING_BYTES = sizes.pending_mb << 20
        rows_module._WRITE_BYTES = min(rows_module._WRITE_BYTES, sizes.pending_mb << 19)
        key_aggregation.PARTIAL_BYTES = sizes.pending_mb << 21
        key_aggregation._PART_BYTES = sizes.pending_mb << 20
        self._sizes, self._scratch = sizes, scratch
        self._case, self._stage = case, CASES[case]
        self._schema = _SCHEMA.append(pa.field("_change_type", pa.string())) if case == VALUES else _SCHEMA
        self._storage, self._shapes = Storage(str(scratch / "storage")), shapes(self._stage, self._schema)
        self._keys = (state_mb << 20) // _ENTRY_BYTES
        self._key_of = _mostly_of_one_group(self._keys) if case == GROUP else None
        self._draw = np.random.default_rng(1)
        self._noise = np.frombuffer(self._draw.bytes(1 << 19).hex().encode(), np.uint8)
        self._bases: dict[int, Snapshot] = {}
        self._epoch = 0
        self._run(np.arange(10))  # modules that are imported only now
        self._baseline = resident("VmRSS")

    def run(self) -> None:
        loads = 1 if self._case == HALF else _LOADS
        for part in np.array_split(self._draw.permutation(self._keys), loads):
            self._report("load", part)
        for name, share in (("some", 50), ("some again", 50), ("a quarter", 4)):
            self._report(name, self._draw.integers(0, self._keys, self._keys // share))

    def _report(self, name: str, numbers: np.ndarray) -> None:
        forget_peak()
        clock = time.monotonic()
        state = self._run(numbers)
        now, peak = (round(resident(field) - self._baseline, 1) for field in ("VmRSS", "VmHWM"))
        phase = TaskPhase(name, round(time.monotonic() - clock, 2), now, peak, round(state / (1 << 20), 1))
        print(json.dumps(asdict(phase)), flush=True)

    def _run(self, numbers: np.ndarray) -> int:
        self._epoch += 1
        task = KeyedTask(
            stage=self._stage,
            shapes=self._shapes,
            epoch=CheckpointId(self._epoch),
            generation=Generation(1),
            now=_NOW,
            progress=Progress(None, None, False),
            parallelism=1,
            max_parallelism=_GROUPS,
            storage=self._storage,
            work_dir=self._scratch / "work",
            bases=self._bases,
            tables={},
            channels=frozenset({"main"}),
            options=BackendOptions(memory_mb=self._sizes.memory_mb),
            resident_mb=self._sizes.resident_mb,
            stages=(self._stage.uid,),
        )
        ack = run_task.run(task, 0, self._batches(numbers))
        assert ack.error is None, ack.error
        gc.collect()  # as Spark's daemon does after each task
        self._bases = dict(snapshots_of(ack.files, self._stage.uid))
        return sum(file.bytes for file in ack.files if file.kind == STATE)

    def _batches(self, numbers: np.ndarray) -> Iterator[pa.RecordBatch]:
        for at in range(0, len(numbers), self._sizes.batch_rows):
            some = numbers[at : at + self._sizes.batch_rows]
            starts = self._draw.integers(0, len(self._noise) - TEXT_BYTES, len(some))
            text = np.lib.stride_tricks.sliding_window_view(self._noise, TEXT_BYTES)[starts]
            offsets = pa.py_buffer(np.arange(len(some) + 1, dtype=np.int32) * TEXT_BYTES)
            notes = pa.Array.from_buffers(pa.string(), len(some), [None, offsets, pa.py_buffer(text.tobytes())])
            if self._case == HALF:
                some = np.where(np.arange(len(some)) % 2, some, 0)
            keys = some if self._key_of is None else self._key_of[some]
            columns = [notes, pa.array([_NOW] * len(some), _SCHEMA.field("at").type)]
            if self._case == VALUES:
                keys = some % _KEYS_WITH_VALUES
                columns.append(pa.array(["insert"] * len(some)))
            table = pa.table([pa.array(keys), *columns], schema=self._schema)
            yield from with_owners(self._stage, table, 1, _GROUPS)[0].combine_chunks().to_batches()


def _mostly_of_one_group(count: int) -> np.ndarray:
    """So many keys, of which nine of ten have the same key group."""
    keys = np.arange(count * _GROUPS)
    is_first = key_groups([pa.array(keys)], _GROUPS) == 0
    of_group = keys[is_first][: count - count // 10]
    chosen = np.concatenate([of_group, keys[~is_first][: count - len(of_group)]])
    return np.random.default_rng(2).permutation(chosen)


def main() -> None:
    asked = json.loads(sys.argv[1])
    state_mb, scratch, case = asked.pop("state_mb"), Path(asked.pop("scratch")), asked.pop("case")
    _Task(Sizes(**asked), state_mb, scratch, case).run()


if __name__ == "__main__":
    main()
