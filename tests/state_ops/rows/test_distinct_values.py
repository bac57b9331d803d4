"""Where the values that are counted lie in a state, and when they go."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pyarrow as pa

from state_ops.backends.base import BEYOND
from state_ops.backends.memory import MemoryBackend
from state_ops.rows.aggregates import count_distinct
from state_ops.rows.distinct_values import DistinctValues, collections
from state_ops.schema.descriptors import GROUP

KEYS, ROWS = pa.schema([("k", pa.string())]), pa.schema([("v", pa.int16())])
WANTED = (("n", count_distinct("v")),)


class Counting(MemoryBackend):
    puts = 0

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes] = ()) -> None:
        self.puts += len(puts)
        super().write(puts, deletes)


def partials(*rows: tuple[int, int, str, list[int]]) -> pl.DataFrame:
    """Group, end of the window, key and values."""
    schema = {GROUP: pl.Int32, "end": pl.Int64, "k": pl.String, "n": pl.List(pl.Int64)}
    return pl.DataFrame(rows, schema=schema, orient="row")


def test_entries_have_the_bytes_that_they_once_were_given():
    backend = MemoryBackend()
    kept = collections(WANTED, ROWS, ["n"])
    for window in (None, "end"):
        values = DistinctValues(WANTED, kept, backend, KEYS, window)
        values.counted(partials((5, 60, "a", [-1])))
        values.barrier()
    assert {key.hex(): value.hex() for key, value in backend.scan(b"", BEYOND)} == {
        "0005056e1a8f4b6100007fffffffffffffff": "01f7923f5e55a1154a0001",
        "00050a800000000000003c6e1a8f4b6100007fffffffffffffff": "01f7923f5e55a1154a0001",
    }


def test_values_are_new_once_and_go_with_their_window():
    backend = Counting()
    values = DistinctValues(WANTED, collections(WANTED, ROWS, ["n"]), backend, KEYS, "end")
    first = partials((0, 60, "a", [1, 2]), (0, 60, "b", []), (1, 90, "a", [1]))
    assert values.counted(first)["n"].to_list() == [2, 0, 1]
    values.flush()
    second = partials((0, 60, "a", [1, 3]), (1, 90, "a", [1]))
    assert values.counted(second, keep=False)["n"].to_list() == [1, 0]
    assert values.counted(second)["n"].to_list() == [1, 0]
    assert values.counted(second)["n"].to_list() == [0, 0]
    values.flush()
    assert backend.puts == 3 + 1, "of values that are known nothing is written again"
    sizes = []
    for before, upto in ((None, 59), (59, 60), (60, None)):
        values.forget(range(2), before, upto)
        sizes.append(len(list(backend.scan(b"", BEYOND))))
    assert sizes == [4, 1, 0]
