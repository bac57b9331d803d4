"""Blocks of the exchange as objects in storage: each subtask gets what Spark's shuffle would have brought it, or an
error."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from state_ops.errors import TransientError
from state_ops.ids import AttemptId, CheckpointId, Generation
from state_ops.records.snapshot_files import CHANNEL, STATE, LocalFile, LocalSnapshot, Snapshot, StagedFile, StateFile
from state_ops.storage.paths import is_staged
from state_ops.storage.storage import Storage
from weir import State, files, stage
from weir.execution import exchange, staged_blocks
from weir.execution.executor import Channel, InputRows

SUBTASKS, GROUPS = 5, 16


class Seen(State):
    """Of one key."""

    rows: int = 0


@stage("seen", source=files("{landing}/*.parquet"), key="key", state=Seen)
def seen(rows: pa.Table, state: Any, epoch: Any) -> None:
    pass


PLACE = staged_blocks.directory(seen, Generation(3), CheckpointId(17))


def table(side: int, seed: int, count: int) -> pa.Table:
    draw = np.random.default_rng(seed)
    columns: dict[str, Any] = {"key": draw.integers(0, 50, count), "text": [f"{seed}-{row}" for row in range(count)]}
    return pa.table(columns | ({"more": draw.random(count)} if side else {}))


def cut(side: int, seed: int, count: int) -> list[pa.RecordBatch]:
    rows = table(side, seed, count)
    parts = [rows.slice(at, 40) for at in range(0, count, 40)]
    return list(exchange.cut(seen.inputs[0], parts, SUBTASKS, GROUPS, side))


COLUMNS = [table(side, 0, 0).schema for side in (0, 1)]


def put_all(storage: Storage, monkeypatch: pytest.MonkeyPatch, most: int) -> tuple[list[list[pa.RecordBatch]], Any]:
    """What four map tasks cut, some of nothing, and where it is."""
    monkeypatch.setattr(exchange, "_CUT_ROWS", 40)
    monkeypatch.setattr(exchange, "_ROWS_A_BLOCK", 1)
    monkeypatch.setattr(staged_blocks, "MOST_BYTES", most)
    tasks = [cut(0, 1, 300), [], cut(1, 2, 200), [*cut(0, 3, 7), *cut(1, 4, 90)]]
    answers = [staged_blocks.put(storage, PLACE, number, blocks) for number, blocks in enumerate(tasks)]
    return tasks, staged_blocks.collected(storage, answers)


@pytest.mark.parametrize("most", [1, 6_000, 1 << 20])
def test_each_subtask_gets_its_blocks_however_many_objects_there_are(
    anywhere: Callable[[], Storage],
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    storage = anywhere()
    tasks, extents = put_all(storage, monkeypatch, most)
    paths = {file.path for file in storage.list("exchange")}
    assert len(paths) > 12 if most == 1 else len(paths) == 3 if most == 1 << 20 else 3 < len(paths) <= 12
    assert all(is_staged(path) for path in paths), "the next owner knows them"
    assert {extent.path for mine in extents.values() for extent in mine} == paths
    monkeypatch.setattr(staged_blocks, "_AT_ONCE_BYTES", random.Random(most).choice([1, 9_000, 1 << 20]))
    for subtask in range(SUBTASKS):
        blocks = [
            block.slice(at, 1)
            for task in tasks
            for block in task
            for at, owner in enumerate(block["subtask"].to_pylist())
            if owner == subtask
        ]
        expected = list(exchange.opened(blocks, COLUMNS))
        got = list(staged_blocks.opened(storage, extents[subtask], COLUMNS, 60.0))
        assert got == expected and sum(rows.num_rows for _, rows in got) > 50, "in the order of map tasks, too"
    staged_blocks.remove(storage, PLACE)
    assert not list(storage.list("exchange", unfinished=True))


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (
            lambda path, data: path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]),
            "xxh3 is not the recorded",
        ),
        (lambda path, data: path.write_bytes(data[:-1]), "xxh3 is not the recorded"),
        (lambda path, _: path.write_bytes(b""), "xxh3 is not the recorded"),
        (lambda path, _: path.unlink(), "the object is gone"),
    ],
    ids=["flipped", "short", "empty", "gone"],
)
def test_a_damaged_block_is_noticed_and_the_epoch_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path, bytes], object], problem: str
) -> None:
    storage = Storage(str(tmp_path))
    _, extents = put_all(storage, monkeypatch, 1 << 20)
    mine = extents[SUBTASKS - 1]
    path = Path(storage.full(mine[-1].path))
    harm(path, path.read_bytes())
    opened = staged_blocks.opened(storage, mine, COLUMNS, None)
    with pytest.raises(TransientError, match=f"cannot be read: .*{problem}") as raised:
        list(opened)
    assert re.search(rf"{path.name}, bytes \d+ to \d+", raised.value.where or "") and "replayed" in (
        raised.value.next or ""
    )


def test_nothing_counts_where_spark_alone_can_judge_a_row(tmp_path: Path) -> None:
    storage, nothing = Storage(str(tmp_path)), pa.array([0], pa.int32())
    null = pa.RecordBatch.from_arrays([nothing, nothing, pa.nulls(1, pa.binary())], ["subtask", "side", "block"])
    answers = [staged_blocks.put(storage, PLACE, 0, cut(0, 1, 9)), staged_blocks.put(storage, PLACE, 1, [null])]
    assert answers[1] is None and staged_blocks.collected(storage, answers) is None


def test_requests_of_map_tasks_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = Storage(str(tmp_path)), Storage(str(tmp_path))
    answer = staged_blocks.put(there, PLACE, 0, cut(0, 1, 300))
    staged_blocks.collected(here, [answer])
    assert here.request_counts.counts()["requests_put"] == 1 and there.request_counts.counts()["requests_put"] == 0
    assert here.request_counts.counts()["bytes_up"] == sum(file.bytes for file in here.list("exchange"))


def state_of(megabytes: int) -> dict[int, Snapshot]:
    """Four subtasks with as much together, in files of which each names the others' as after a rescale."""
    attempt = AttemptId("a")
    shared = [
        StateFile("seen", 0, STATE, f"{number}.sst", f"state/{number}", megabytes << 18, "", True, attempt)
        for number in range(4)
    ]
    return {subtask: Snapshot(subtask, attempt, tuple(shared), rescaled=True) for subtask in range(4)}


@pytest.mark.parametrize(
    ("state", "rows", "subtasks", "hosts", "expected"),
    [
        (0, 1, 4, 2, False),
        (28, 2, 4, 2, True),
        (110, 10, 4, 2, True),
        (110, 10, 16, 2, True),
        (110, 10, 64, 2, False),
        (110, 40, 4, 2, False),
        (110, 30, 4, 4, True),
        (3, 40, 4, 2, False),
    ],
)
def test_the_hop_is_taken_where_state_is_large_beside_rows_and_requests(state, rows, subtasks, hosts, expected):
    file = StagedFile(CHANNEL, "main", "", "", rows << 20, None, 1)
    task: Any = SimpleNamespace(bases=state_of(state), parallelism=subtasks)
    rows_in = InputRows.of(Channel(table(0, 0, 0).schema, Storage("/nowhere"), (file,)))
    assert staged_blocks.pays(task, rows_in, hosts) is expected
    local = LocalFile("1.sst", 8 << 30, None, False)
    task.bases = {0: LocalSnapshot(0, AttemptId("b"), (local,))}
    assert staged_blocks.pays(task, rows_in, hosts), "what one of the hosts alone has is fetched by none of the others"
