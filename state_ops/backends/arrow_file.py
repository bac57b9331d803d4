"""A whole state in one file: sorted keys and values as an Arrow IPC stream, and a digest behind it.

    stream of record batches (key: large_binary, value: large_binary)  |  xxh3-128 of the stream, 16 bytes  |
                                                                       b"WEIRENT1"

Written once and never changed. It is hard-linked unread, so it carries its own digest, which every reader verifies.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO

import pyarrow as pa
import xxhash

from state_ops.errors import DamageError

SCHEMA = pa.schema([pa.field("key", pa.large_binary(), False), pa.field("value", pa.large_binary(), False)])

_END = b"WEIRENT1"
_DIGEST_BYTES = 16
_BATCH_ENTRIES, _BATCH_BYTES = 16_384, 16 << 20
_READ_BYTES = 1 << 20


def write(file: Path, keys: list[bytes], entries: Mapping[bytes, bytes]) -> None:
    """Write the entries of `keys`, which are sorted, to a new file."""
    with file.open("xb") as out:
        hashed = _Hashed(out)
        with pa.ipc.new_stream(pa.PythonFile(hashed, "w"), SCHEMA) as stream:
            for some in _batches(keys, entries):
                values = [entries[key] for key in some]
                columns = [pa.array(some, pa.large_binary()), pa.array(values, pa.large_binary())]
                stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
        out.write(hashed.digest.digest() + _END)


def read(file: Path) -> dict[bytes, bytes]:
    """Return the entries in key order. Raises DamageError for a file that is not, bit by bit, what was written."""
    _verify(file)
    entries: dict[bytes, bytes] = {}
    number = 0
    try:
        with pa.OSFile(str(file)) as opened, pa.ipc.open_stream(opened) as stream:
            if not stream.schema.equals(SCHEMA):
                raise _damaged(file, f"its columns are {stream.schema.names} of {stream.schema.types}")
            for batch in stream:
                batch.validate(full=True)
                entries.update(zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True))
                number += batch.num_rows
    except (pa.ArrowException, EOFError) as error:
        raise _damaged(file, str(error)) from error
    in_order = len(entries) == number and all(map(operator.lt, entries, islice(entries, 1, None)))
    if not in_order:
        raise _damaged(file, "its keys are not in order")
    return entries


def _verify(file: Path) -> None:
    left = file.stat().st_size - _DIGEST_BYTES - len(_END)
    hashed = xxhash.xxh3_128()
    with file.open("rb") as stored:
        while left > 0 and (chunk := stored.read(min(left, _READ_BYTES))):
            hashed.update(chunk)
            left -= len(chunk)
        if left or stored.read() != hashed.digest() + _END:
            raise _damaged(file, "it is cut off, or its digest does not fit its content")


def _batches(keys: list[bytes], entries: Mapping[bytes, bytes]) -> Iterator[list[bytes]]:
    """Yield runs of keys that are bounded by number and, but for single large entries, by bytes."""
    for at in range(0, len(keys), _BATCH_ENTRIES):
        some = keys[at : at + _BATCH_ENTRIES]
        size = sum(map(len, some)) + sum(len(entries[key]) for key in some)
        parts = max(1, min(len(some), size // _BATCH_BYTES))
        step = -(-len(some) // parts)
        yield from (some[start : start + step] for start in range(0, len(some), step))


class _Hashed:
    """A file to write to that hashes what passes."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out, self.digest, self.closed = out, xxhash.xxh3_128(), False

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._out.write(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _damaged(file: Path, how: str) -> DamageError:
    return DamageError(
        f"The state's file {file.name} cannot be read: {how}.",
        where=str(file),
        next="Delete the local work directory: the state is fetched again from storage and verified.",
    )
