"""The classic example of incremental checkpoints, on real RocksDB files: what is uploaded, counted and deleted, and
when.

One operator, one subtask, two checkpoints retained. RocksDB's own universal compaction makes the files: it merges runs
of like size, newest first, and stops at one that is much larger or much smaller. So the sizes steer what it merges, and
the number of runs that it waits for steers when.

              local files                     uploaded        counts afterwards                        deleted
    CP1       1 2                             1 2             1:1 2:1
    CP2       1 2 3 4                         3 4             1:2 2:2 3:1 4:1
    CP3       (1,2,3) 4 5                     (1,2,3) 5       1:1 2:1 3:1 4:2 5:1 (1,2,3):1            CP1
    CP4       (1,2,3) (4,5,6)                 (4,5,6)         (1,2,3):2 (4,5,6):1 4:1 5:1              CP2, hence 1 2 3
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable

from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.checkpoints import retention
from state_ops.checkpoints.reader_holds import HoldWatcher
from state_ops.checkpoints.registry import Registry
from state_ops.ids import AttemptId, CheckpointId, Generation, new_attempt_id
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.snapshot_files import Snapshot, snapshots_of
from state_ops.snapshots import snapshot
from state_ops.snapshots.attempt import Attempt
from state_ops.snapshots.sweep import sweep
from state_ops.storage.storage import Storage
from tests.state_ops.checkpoints.test_registry import APP, a_checkpoint

_KEEP = 2
_PATIENCE_SECONDS = 20.0
# KiB: 1, 2 and 3 are alike and 4 is small, so that 4 stays out of their merge; 4, 5 and 6 are alike, and (1,2,3) is
# large. 1 is the largest: else the newer runs were more than twice the oldest, and everything would be merged.
_SIZES = {"1": 150, "2": 100, "3": 105, "4": 10, "5": 11, "6": 12}


@dataclass
class Subtask:
    """The only subtask of the only operator. names: the example's name of each real SST."""

    root: Path
    names: dict[str, str] = field(default_factory=dict)
    model: dict[bytes, bytes] = field(default_factory=dict)
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.storage = Storage(str(self.root / "storage"))
        self.registry = Registry(self.storage, APP)
        self.generation = self.registry.take_over()
        self.watcher = HoldWatcher()

    def checkpoint(self, id: int, steps: Callable[[RocksDBBackend], None]) -> Checkpoint:
        """One epoch as the engine does it: fork the head, `steps`, snapshot, upload, commit, prune."""
        head = self.registry.head()
        base = snapshots_of(self.registry.files(head), "counts")[0] if head else None
        attempt = self.attempt(id)
        sweep(attempt, {base.attempt} if base else (), ("counts",), 1)
        forked = snapshot.working_copy(self.storage, attempt, base)
        backend = RocksDBBackend(forked.db, 16)
        try:
            steps(backend)
            files = snapshot.take(attempt, backend)
        finally:
            backend.close()
        prepared = snapshot.prepare(attempt, forked, files)
        listing = snapshot.upload(self.storage, attempt, prepared, base).files
        checkpoint = a_checkpoint(id, head.id if head else None, listing, self.generation)
        self.registry.commit(checkpoint, listing)
        completed = self.registry.checkpoints()
        listings = {row.id: self.registry.files(row) for row in completed}
        plan = retention.plan(completed, listings, _KEEP, self.registry.pins())
        retention.apply(self.registry, self.storage, self.generation, plan, self.watcher)
        return checkpoint

    def attempt(self, id: int) -> Attempt:
        home = self.root / "work" / "counts" / "0"
        return Attempt("counts", 0, Generation(self.generation), CheckpointId(id), AttemptId(new_attempt_id()), home)

    def flush(self, backend: RocksDBBackend, name: str) -> None:
        """Make file `name` arise, of its size."""
        before = live(backend)
        entries = {b"%06d" % self.chance.randrange(10**6): self.chance.randbytes(1000) for _ in range(_SIZES[name])}
        backend.write(list(entries.items()))
        self.model |= entries
        backend._db.flush(wait=True)
        (file,) = live(backend) - before
        self.names[file] = name

    def merge(self, backend: RocksDBBackend, runs: int, into: str, left: set[str]) -> None:
        """Let RocksDB compact, now that there are `runs` runs: everything but the files named `left` becomes `into`."""
        backend._db.set_options({"level0_file_num_compaction_trigger": str(runs)})
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while len(live(backend)) != len(left) + 1:
            assert time.monotonic() < deadline, backend._db.live_files()
        (file,) = live(backend) - {real for real, name in self.names.items() if name in left}
        self.names[file] = into

    def name(self, real: str) -> str:
        return self.names[real.rpartition("/")[2]]

    # -- what the registry and the storage say

    def local(self, id: int) -> set[str]:
        """The SSTs that a checkpoint lists."""
        rows = self.sql("SELECT f.name FROM files f JOIN checkpoints c USING (commit_id) WHERE c.id = ?", id)
        return {self.name(name) for (name,) in rows if name.endswith(".sst")}

    def uploaded(self, id: int) -> set[str]:
        rows = self.sql("SELECT f.name FROM files f JOIN checkpoints c USING (commit_id) WHERE c.id = ? AND new", id)
        return {self.name(name) for (name,) in rows if name.endswith(".sst")}

    def counts(self) -> dict[str, int]:
        rows = self.sql("SELECT path, count(*) FROM files JOIN checkpoints USING (commit_id) GROUP BY path")
        return {self.name(path): count for path, count in rows if path.endswith(".sst")}

    def retained(self) -> list[int]:
        return [id for (id,) in self.sql("SELECT id FROM checkpoints ORDER BY id")]

    def objects(self) -> set[str]:
        return {self.name(file.path) for file in self.storage.list("state") if file.path.endswith(".sst")}

    def others(self) -> set[str]:
        """The epochs whose MANIFEST and CURRENT are in storage: RocksDB writes those anew for each snapshot."""
        return {file.path.split("/")[2] for file in self.storage.list("state") if not file.path.endswith(".sst")}

    def sql(self, query: str, *values: object) -> list[tuple]:
        with duckdb.connect() as connection:
            for name, table in (("checkpoints", "checkpoints"), ("files", "state_files")):
                rows = DeltaTable(self.storage.full(f"registry/{table}")).to_pyarrow_table()
                connection.register(name, rows)
            return connection.execute(query, values).fetchall()

    def restored(self, id: int) -> dict[bytes, bytes]:
        """The state of a checkpoint, from storage alone."""
        (row,) = [row for row in self.registry.checkpoints() if row.id == id]
        base: Snapshot = snapshots_of(self.registry.files(row), "counts")[0]
        target = self.root / f"restored-{new_attempt_id()}"
        target.mkdir()
        snapshot.fetch(self.storage, base, target)
        backend = RocksDBBackend(target, 16)
        try:
            return dict(backend.scan(b"", b"\xff"))
        finally:
            backend.close()


def live(backend: RocksDBBackend) -> set[str]:
    return {file["name"].lstrip("/") for file in backend._db.live_files()}


@pytest.fixture
def subtask(tmp_path: Path) -> Subtask:
    return Subtask(tmp_path)


def test_worked_example_1_on_real_rocksdb_files(subtask):
    states: dict[int, dict[bytes, bytes]] = {}

    def first(backend: RocksDBBackend) -> None:
        subtask.flush(backend, "1")
        subtask.flush(backend, "2")

    subtask.checkpoint(1, first)
    states[1] = dict(subtask.model)
    assert subtask.local(1) == {"1", "2"}
    assert subtask.uploaded(1) == {"1", "2"}
    assert subtask.counts() == {"1": 1, "2": 1}
    assert subtask.objects() == {"1", "2"}
    assert subtask.retained() == [1]

    def second(backend: RocksDBBackend) -> None:
        subtask.flush(backend, "3")
        subtask.flush(backend, "4")

    subtask.checkpoint(2, second)
    states[2] = dict(subtask.model)
    assert subtask.local(2) == {"1", "2", "3", "4"}
    assert subtask.uploaded(2) == {"3", "4"}
    assert subtask.counts() == {"1": 2, "2": 2, "3": 1, "4": 1}
    assert subtask.objects() == {"1", "2", "3", "4"}
    assert subtask.retained() == [1, 2]

    def third(backend: RocksDBBackend) -> None:
        subtask.merge(backend, runs=4, into="(1,2,3)", left={"4"})
        subtask.flush(backend, "5")

    subtask.checkpoint(3, third)
    states[3] = dict(subtask.model)
    assert subtask.local(3) == {"(1,2,3)", "4", "5"}
    assert subtask.uploaded(3) == {"(1,2,3)", "5"}
    assert subtask.counts() == {"1": 1, "2": 1, "3": 1, "4": 2, "5": 1, "(1,2,3)": 1}
    assert subtask.retained() == [2, 3]
    assert subtask.objects() == {"1", "2", "3", "4", "5", "(1,2,3)"}, "CP1 went, but CP2 names its files still"
    assert subtask.others() == {"g1-e2", "g1-e3"}

    def fourth(backend: RocksDBBackend) -> None:
        subtask.flush(backend, "6")
        subtask.merge(backend, runs=4, into="(4,5,6)", left={"(1,2,3)"})

    subtask.checkpoint(4, fourth)
    states[4] = dict(subtask.model)
    assert subtask.local(4) == {"(1,2,3)", "(4,5,6)"}
    assert subtask.uploaded(4) == {"(4,5,6)"}
    assert subtask.counts() == {"(1,2,3)": 2, "(4,5,6)": 1, "4": 1, "5": 1}
    assert subtask.retained() == [3, 4]
    assert subtask.objects() == {"(1,2,3)", "(4,5,6)", "4", "5"}, "1, 2 and 3 reached 0 and left storage; 6 never came"
    assert subtask.others() == {"g1-e3", "g1-e4"}

    assert subtask.restored(3) == states[3]
    assert subtask.restored(4) == states[4]
    assert states[3] != states[4]
