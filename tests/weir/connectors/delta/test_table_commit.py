"""What appends, replaced ranges and restored versions have in common: one commit, and an error where there is no
table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from state_ops.errors import DamageError
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.publications import Publication
from state_ops.records.sink_link import SinkLink
from state_ops.storage.storage import Storage
from tests.weir.connectors.delta.test_append import APP, SCHEMA, checkpoint, keys, staged
from weir.connectors.delta import append, replace_where, restore_version

Commit = Callable[[Storage, Checkpoint, Path], Publication]
WAYS: dict[str, Commit] = {
    "append": lambda storage, row, _: append.publish(storage, APP, "out", row, 2, []),
    "restore": lambda storage, row, _: restore_version.rewind(storage, APP, "out", row, row.sinks["out"].before),
    "replace": lambda storage, row, scratch: replace_where.overwrite(storage, APP, "out", row, [], scratch),
}


def taking_back(number: int, before: int, to: int, at: int) -> Checkpoint:
    """A rewind, or the promotion of a range in which no row lies."""
    sink = {"id": number, "before": before, "to": to, "at": at, "column": "n", "start": 0, "end": 0}
    return replace(checkpoint(number), sinks={"out": SinkLink.from_json(sink)})


@pytest.mark.parametrize("way", WAYS)
def test_a_table_that_is_gone_is_damage(tmp_path, way):
    storage = Storage(str(tmp_path / "p"))
    with pytest.raises(DamageError, match="the table is gone"):
        WAYS[way](storage, taking_back(3, 2, 1, 2), tmp_path)


def test_a_rewind_that_is_done_again_says_which_version_it_made(tmp_path):
    storage = Storage(str(tmp_path / "p"))
    append.ensure(storage, "out", SCHEMA)
    append.publish(storage, APP, "out", checkpoint(1), None, [staged(storage, 1, ["a"])])
    append.publish(storage, APP, "out", checkpoint(2), 1, [staged(storage, 2, ["b"])])
    first = restore_version.rewind(storage, APP, "out", taking_back(3, 2, 1, 2), 2)
    write_deltalake(storage.full("tables/out"), pa.table({"key": ["c"], "n": [1]}, schema=SCHEMA), mode="append")
    again = restore_version.rewind(storage, APP, "out", taking_back(3, 2, 1, 2), 2)
    assert keys(storage) == ["a", "c"]
    assert (first.delta_version, again.delta_version) == (3, 3)


def test_a_foreign_optimize_in_between_doubles_nothing(tmp_path, monkeypatch):
    """delta-rs puts a commit that removes files behind one that has removed the same ones, and keeps both ones' rows."""
    storage = Storage(str(tmp_path / "p"))
    append.ensure(storage, "out", SCHEMA)
    for number, key in enumerate("abc", 1):
        append.publish(storage, APP, "out", checkpoint(number), number - 1 or None, [staged(storage, number, [key])])
    named, optimized = restore_version.active_files, []

    def overtaken(handle):
        files = named(handle)
        if not optimized:
            optimized.append(DeltaTable(storage.full("tables/out")).optimize.compact())
        return files

    monkeypatch.setattr(restore_version, "active_files", overtaken)
    restore_version.rewind(storage, APP, "out", taking_back(4, 3, 1, 3), 3)
    assert optimized[0]["numFilesRemoved"] == 3
    assert keys(storage) == ["a"]
