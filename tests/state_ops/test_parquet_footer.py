"""What of a footer is refused before Arrow is asked of it, by whoever opens files of other writers."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.parquet.footer import check, end_of
from state_ops.storage.storage import Storage
from weir.connectors.delta_table.data_file import rows_of
from weir.connectors.formats.stored_rows import stored_rows

COLUMNS = pa.schema([("n", pa.int64())])


def sound(**options: Any) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table({"n": range(10)}, schema=COLUMNS), stream, **options)
    return stream.getvalue()


def trap() -> bytes:
    """A file that Arrow opens, and whose codec it does not know."""
    data = sound(compression="snappy")
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    path = b"\x19\x18\x01n\x15\x02"  # the path of the column, and its codec
    assert data.count(path, begin) == 1
    at = data.index(path, begin) + len(path) - 1
    return data[:at] + b"\x42" + data[at + 1 :]


def by_a_row(path: Path) -> None:
    list(rows_of(path, COLUMNS, {}))


def by_a_table(path: Path) -> None:
    with stored_rows(path):
        pass


def by_a_stream(path: Path) -> None:
    with stored_rows(pa.BufferReader(path.read_bytes())):
        pass


def by_storage(path: Path) -> None:
    Storage(str(path.parent)).parquet_footer(path.name)


@pytest.mark.parametrize("opened", [by_a_row, by_a_table, by_a_stream, by_storage])
def test_whoever_opens_a_file_has_its_footer_checked(tmp_path: Path, opened: Callable[[Path], None]):
    path = tmp_path / "1.parquet"
    path.write_bytes(trap())
    assert pq.read_metadata(path).num_rows == 10, "Arrow opens it"
    with pytest.raises(pa.ArrowInvalid, match=r"its footer is damaged: the column 'n' has the codec 33"):
        opened(path)
    path.write_bytes(sound())
    opened(path)


def test_a_footer_longer_than_what_is_read_at_first_is_read_whole():
    wide = pa.table({f"{number:0200}": [number] for number in range(300)})
    stream = io.BytesIO()
    pq.write_table(wide, stream)
    source = pa.BufferReader(stream.getvalue())
    end = end_of(source)
    assert len(end) > 1 << 16 and source.tell() == 0
    check(end)


@pytest.mark.parametrize("end", [b"", b"PAR1", b"\x00" * 100, b"\xff\xff\xff\x7fPAR1", b"\x04\x00\x00\x00PARE"])
def test_what_is_no_parquet_is_left_to_arrow(end: bytes):
    check(end)
