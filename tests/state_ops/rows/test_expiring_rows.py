"""Rows that are over at a moment, against a dict: the index says of each row when it is over, and of nothing else."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state_ops.backends.base import SortedRun
from state_ops.backends.memory import MemoryBackend
from state_ops.keyed.keyed_state import VALUE_STATE, scan_values
from state_ops.rows import row_store, time_index
from state_ops.rows.expiring_rows import ExpiringRows
from state_ops.rows.resident_table import Residence
from state_ops.schema.key_codec import decode_keys
from state_ops.schema.key_groups import xxhash64
from state_ops.schema.state_schema import StateSchema
from tests.state_ops.rows.test_row_store import GROUPS, KEYS, ROOMY, frame_of
from tests.tools.sampling import rounds, sampled

SCHEMA = StateSchema.build([("over", pa.timestamp("us", tz="UTC"), True, None)])
NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
TYPE = pl.Datetime("us", "UTC")

Key = tuple[str, int]
keys = st.tuples(st.sampled_from(["", "ab", "b\0"]), st.integers(-1, 1))
# An epoch: batches of rows with the minute at which each is over, None for never; and up to when rows are forgotten.
epochs = st.lists(
    st.tuples(
        st.lists(st.dictionaries(keys, st.none() | st.integers(0, 6), max_size=8), max_size=3),
        st.none() | st.integers(0, 6),
        st.booleans(),
    ),
    max_size=6,
)


class Strict(MemoryBackend):
    """Takes a run only as a backend that keeps it as it is could take it."""

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes] = ()) -> None:
        if isinstance(puts, SortedRun):
            for ascending in (puts.ascending, deletes):
                assert all(first < second for first, second in pairwise(ascending))
        super().write(puts, deletes)


def micros(minute: int) -> int:
    return int((NOON + timedelta(minutes=minute)).timestamp() * 1_000_000)


def stored(backend: MemoryBackend) -> dict[Key, datetime | None]:
    tables = scan_values(backend, SCHEMA, KEYS, range(GROUPS))
    return {row[:2]: row[2] for table in tables for row in pl.from_arrow(table).rows()}  # type: ignore[union-attr]


def indexed(backend: MemoryBackend) -> list[tuple[Key, int]]:
    """What the index has: keys, and the microsecond at which each is over."""
    entries = [entry for group in range(GROUPS) for entry in time_index.first(backend, group, None, 1000)]
    _, (moments, *columns) = decode_keys(entries, [pa.int64(), *KEYS.types])
    owners = zip(*(column.to_pylist() for column in columns), strict=True)
    return sorted(zip(owners, moments.to_pylist(), strict=True))


@pytest.mark.parametrize("modulus", sampled([pytest.param(3, id="collisions"), pytest.param(1 << 62, id="hashes")]))
@rounds(3)
@given(epochs=epochs, most_bytes=st.sampled_from([0, 150, ROOMY]), pending_bytes=st.sampled_from([0, ROOMY]))
@settings(max_examples=20)
def test_what_is_over_is_forgotten_with_its_entries_and_nothing_else(
    round_, modulus, epochs, most_bytes, pending_bytes
):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as scratch:
        patch.setattr(row_store, "xxhash64", lambda columns: xxhash64(columns) % np.uint64(modulus))
        patch.setattr(row_store, "_PENDING_BYTES", pending_bytes)
        backend, source = Strict(), None
        model: dict[Key, datetime | None] = {}
        for number, (batches, upto, lost) in enumerate(epochs):
            target = Path(scratch, str(number))
            target.mkdir()
            residence = Residence(source, target, most_bytes, range(GROUPS), fresh=number == 0)
            rows = ExpiringRows(backend, SCHEMA, KEYS, VALUE_STATE, residence, "over")
            seen_before: set[Key] = set()
            for given_ in batches:
                batch = {key: end for key, end in given_.items() if key not in seen_before}
                seen_before |= batch.keys()
                ends = {key: None if end is None else NOON + timedelta(minutes=end) for key, end in batch.items()}
                frame = frame_of(list(batch))
                old, seen = rows.get(frame)
                assert dict(zip(batch, old["over"], strict=True)) == {key: model.get(key) for key in batch}
                before = pl.concat([frame, old], how="horizontal").filter(pl.Series(seen, dtype=pl.Boolean))
                rows.replace(frame, pl.DataFrame({"over": list(ends.values())}, schema={"over": TYPE}), before)
                model.update(ends)
            if upto is not None:
                rows.forget(micros(upto), most=1000)
                moment = NOON + timedelta(minutes=upto)
                model = {key: end for key, end in model.items() if end is None or end > moment}
            rows.barrier()
            assert stored(backend) == model
            moments = [(key, int(end.timestamp() * 1_000_000)) for key, end in model.items() if end is not None]
            assert indexed(backend) == sorted(moments)
            source = None if lost else target
        backend.close()
