"""`state.compression`: what RocksDB writes from now on, over states that were written otherwise."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path

import pytest

from infra import flights_input
from state_ops.backends.base import BackendOptions
from state_ops.backends.rocksdb import ROCKSDB, is_table
from tests.recovery.harness import Site
from tests.state_ops.test_runs import Subtask, run_of
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run

MANY = 12_000  # a run of as many is a file that the backend writes itself


def texts(number: int, seed: int) -> dict[bytes, bytes]:
    draw = random.Random(seed)
    return {
        draw.randbytes(8): json.dumps({"city": draw.choice(["Aarhus", "Bergen"]), "fare": draw.randrange(999)}).encode()
        for _ in range(number)
    }


def compression_of(table: Path) -> str:
    """As RocksDB notes it at the end of the file, among its properties."""
    properties = table.read_bytes()[-4096:]
    return next(name for name in ("ZSTD", "LZ4", "NoCompression") if name.encode() in properties)


def tables(subtask: Subtask) -> dict[Path, str]:
    """What packs each table that is in storage."""
    return {path: compression_of(path) for path in (subtask.home.parents[2] / "storage").rglob("*.sst")}


@pytest.mark.parametrize("way", [lambda entries: list(entries.items()), run_of], ids=["memtable", "run"])
def test_a_state_goes_on_under_another_compression_and_its_old_files_stay(tmp_path, way):
    first, second = texts(MANY, 1), texts(MANY, 2)
    subtask = Subtask(tmp_path)
    subtask.epoch((way(first),))
    before = tables(subtask)
    assert set(before.values()) == {"LZ4"}
    subtask.compression = "zstd"
    named = {file.name for file in subtask.epoch((way(second),)).files}
    assert {path.name for path in before} < named
    assert {kind for path, kind in tables(subtask).items() if path not in before} == {"ZSTD"}
    assert before.items() <= tables(subtask).items()
    subtask.compression = "lz4"
    subtask.epoch(([(b"\x00", b"")],))
    assert subtask.entries(tmp_path / "read") == {**first, **second, b"\x00": b""}


def test_zstd_takes_less_than_lz4_for_rows_of_text(tmp_path):
    sizes = {}
    for kind in ("lz4", "zstd"):
        subtask = Subtask(tmp_path / kind, compression=kind)
        sizes[kind] = sum(file.bytes for file in subtask.epoch((run_of(texts(MANY, 1)),)).files)
    assert sizes["zstd"] < 0.9 * sizes["lz4"]


def test_what_the_backend_is_asked_for_is_what_it_writes(tmp_path):
    for kind, noted in (("lz4", "LZ4"), ("zstd", "ZSTD")):
        place = tmp_path / kind
        with closing(ROCKSDB.open(place / "db", BackendOptions(16, compression=kind))) as backend:
            backend.write(list(texts(100, 1).items()))
            written = [file for file in backend.snapshot(place / "snapshot") if is_table(file.name)]
            assert {compression_of(file) for file in written} == {noted}


@pytest.mark.long
def test_the_setting_reaches_the_subtasks_and_may_change_between_two_runs(tmp_path):
    days = flights_input.prepare(tmp_path / "days")[:4]
    kinds = []
    for number, kind in enumerate(("lz4", "zstd")):
        site = Site(tmp_path / "site", {"WEIR_STATE__COMPRESSION": kind, "WEIR_EPOCH__MAX_FILES": "2"})
        site.land(days[2 * number : 2 * number + 2])
        options = RunOptions(until_caught_up=True, drain=number == 1)
        list(run(site.pipeline, site.settings, options, InMemoryExecutor(batch_rows=500)))
        kinds.append({compression_of(file) for file in Path(site.settings.storage.root).rglob("*.sst")})
    assert kinds == [{"LZ4"}, {"LZ4", "ZSTD"}]
    site.assert_exact(4)
