"""The one budget of memory that all RocksDB databases of a process share."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from state_ops.backends import memory_budget as memory
from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.errors import DamageError
from tests.tools.memory import SLACK_MB, phases
from tests.tools.task_memory import CASES, SKEWED, Sizes, task_phases

BUDGET_MB = 16


@pytest.fixture
def databases(tmp_path: Path) -> Iterator[list[RocksDBBackend]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(RocksDBBackend(tmp_path / str(number), BUDGET_MB))) for number in range(4)]


def entries(number: int, value_bytes: int, seed: int = 0) -> list[tuple[bytes, bytes]]:
    draw = random.Random(seed)
    return [(draw.randbytes(12), draw.randbytes(value_bytes)) for _ in range(number)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's figures of a process")
def test_a_worker_stays_within_its_budget_however_large_its_state_is():
    """The short version of `make memory`: six times the budget. Unbounded, the cache alone would hold it all."""
    seen = list(phases(BUDGET_MB, 6 * BUDGET_MB, 1000))
    assert [phase.name for phase in seen][-2:] == ["two databases", "closed"]
    assert max(phase.state for phase in seen) > 5 * BUDGET_MB
    for phase in seen:
        assert phase.peak <= BUDGET_MB + SLACK_MB, phase
        assert phase.cache <= BUDGET_MB, phase


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's figures of a process")
@pytest.mark.parametrize("case", [case for case in CASES if case not in SKEWED])
def test_a_keyed_task_stays_within_the_sum_of_its_parts_however_large_its_state_is(case: str):
    """The short version again, with less that may be pending: what is allowed must be well below the state. Skewed keys
    are for `make memory`: what holds them is not made smaller here."""
    sizes = Sizes(BUDGET_MB, resident_mb=0, batch_rows=512, pending_mb=4)
    allowed = sizes.allowed(SLACK_MB, case)
    state_mb = int(1.2 * allowed)
    seen = list(task_phases(sizes, state_mb, case))
    assert seen[-1].state > 0.9 * state_mb > allowed
    for phase in seen:
        assert phase.peak <= allowed, phase


def test_there_is_one_budget_in_a_process_and_it_can_be_resized():
    budget = memory.budget(64)
    assert memory.budget(64) is budget
    files = budget.files
    assert memory.budget(BUDGET_MB) is budget
    assert budget.files < files
    assert budget.memtables.get_buffer_size() == BUDGET_MB << 19
    memory.budget(64)
    assert budget.files == files
    memory.budget(BUDGET_MB)


def test_memtables_of_all_databases_together_keep_to_one_share(databases):
    shared = memory.budget(BUDGET_MB)
    for number, database in enumerate(databases):
        for part in range(6):
            database.write(entries(100, 5000, seed=6 * number + part))
            # 12 MB are written, and no database by itself has to flush at 3. After each batch, less than a sixteenth is
            # left over.
            assert shared.memtables.get_usage() <= shared.memtable_bytes * 5 // 4
    assert shared.cache.get_usage() >= shared.memtables.get_usage()


def test_blocks_index_and_filters_are_in_the_common_cache_and_not_beside_it(databases):
    some = entries(50_000, 10)
    cache = memory.budget(BUDGET_MB).cache
    databases[0].write(some)
    databases[0].snapshot(databases[0].path.parent / "snapshot")
    cache.set_capacity(0)  # empties it
    cache.set_capacity(BUDGET_MB * 3 << 18)
    databases[0].multi_get([key for key, _ in some])
    assert cache.get_usage() > 1 << 20  # of blocks, of which 1.1 MB were read
    beside = sum(shard.property_int_value("rocksdb.estimate-table-readers-mem") or 0 for shard in databases[0]._shards)
    assert 0 < beside < 20_000  # the filter alone has 10 bits for each of 50,000 keys


def test_open_files_are_shared_out_and_come_back(tmp_path):
    shared = memory.budget(BUDGET_MB)
    before = shared.files
    with ExitStack() as stack:
        opened = [stack.enter_context(closing(RocksDBBackend(tmp_path / f"{n}", BUDGET_MB))) for n in range(3)]
        shares = [database._files for database in opened]
        assert shares[0] > shares[1] >= shares[2] >= 32
        assert shared.files == before - sum(shares)
    assert shared.files == before
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "CURRENT").write_text("MANIFEST-000001\n")
    with pytest.raises(DamageError):
        RocksDBBackend(tmp_path / "broken", BUDGET_MB)
    assert shared.files == before
