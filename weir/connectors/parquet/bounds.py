"""Bounds of reading Parquet: how much is decoded at once, and the point at which a file asks for too much.

A file asks for too much if its size cannot be worth that.

A file of some hundred bytes can stand for gigabytes: a text that a dictionary has once and a billion rows refer to, a
page that decompresses to a thousand times its size, a list of a billion nulls. What counts is what is decoded:

    rows a batch    so few that those of one batch take some 64 MiB, by the greatest value of each dictionary
    a whole file    256 MiB, or a thousand times its size where that is more
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from weir.connectors.formats.old_calendar import leaf_count
from weir.connectors.parquet.pages import DELTA_BYTE_ARRAY, Page, pages

MOST_BYTES, MOST_TIMES = 256 << 20, 1_000
MOST_COLUMNS, MOST_DEPTH = 20_000, 100
_BATCH_BYTES = 64 << 20
_LOOKED_AT = 1_024  # rows, of which one has a value in all likelihood
_LEAST_ROW = 8  # bytes that any row counts for
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
# Codecs by which 256 MiB may lie in fewer bytes than any footer has; of others the size on disk bounds the pages.
_DENSE = frozenset({"ZSTD", "GZIP", "BROTLI", "LZ4", "LZ4_RAW", "LZO"})
_SNAPPY = 32  # no page decompresses to more than so many times its size


class TooMuchError(Exception):
    """A file stands for more than its size can be worth; the text says what, as a clause."""


def check(footer: pq.FileMetaData, size: int) -> None:
    """Refuse what its footer alone tells.

    Args:
        size: Of the file in bytes.

    Raises:
        TooMuchError: It has too many columns, or rows.
        pa.ArrowInvalid: Its numbers of rows make no sense.
    """
    if footer.num_columns > MOST_COLUMNS:
        raise TooMuchError(f"has {footer.num_columns:,} columns, and at most {MOST_COLUMNS:,} are read")
    rows = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
    if min(rows, default=0) < 0 or sum(rows) != footer.num_rows:
        raise pa.ArrowInvalid(f"the row groups have {sum(rows)} rows, and the footer says {footer.num_rows}")
    if footer.num_rows * _LEAST_ROW > most(size):
        raise TooMuchError(f"has {footer.num_rows:,} rows in {size:,} bytes")


def most(size: int) -> int:
    """Return how many bytes may be decoded of a file of so many bytes."""
    return max(MOST_BYTES, MOST_TIMES * size)


class Decoding:
    """Counts what is decoded of one file. size: its own in bytes."""

    def __init__(self, size: int) -> None:
        self._size, self._bytes = size, 0

    def count(self, rows: pa.RecordBatch) -> None:
        """Take note of some more rows. Raises TooMuchError."""
        self._bytes += max(rows.nbytes, rows.num_rows * _LEAST_ROW)
        if self._bytes > most(self._size):
            raise TooMuchError(
                f"has {self._size:,} bytes and is decoded to more than {most(self._size):,}: what one file may take"
            )


def rows_at_once(
    source: Any, parquet: pq.ParquetFile, names: Collection[str], groups: Sequence[int], rows: int, size: int
) -> int:
    """Return how many rows of a file to decode at once, at least one.

    Args:
        source: What the file is read from.
        names: The columns that are read.
        groups: Numbers of the row groups that are read.
        rows: The most.
        size: Of the file in bytes.

    Raises:
        TooMuchError: A column chunk decompresses to more than the file may.
        ValueError: Pages are damaged.
    """
    fixed, footer = _LEAST_ROW, parquet.metadata
    groups = [group for group in groups if footer.row_group(group).num_rows]  # of others, writers note no place
    varying = dict.fromkeys(groups, 0)  # bytes of a row in all columns of values that are not of one width
    stored = footer.schema
    for _, leaf in leaves(parquet.schema_arrow, names):
        column = stored.column(leaf)
        is_bytes, is_nested = column.physical_type == "BYTE_ARRAY", column.max_repetition_level > 0
        width = 16 if is_bytes else _WIDTHS.get(column.physical_type) or max(column.length or 0, 1)
        if not is_nested:
            fixed += width
        for group in groups:
            chunk = footer.row_group(group).column(leaf)
            looked_at = _pages(source, chunk, size) if _is_dense(chunk, size) else None
            if not is_bytes and not is_nested:
                continue
            count = footer.row_group(group).num_rows
            values, wide = max(chunk.num_values, 1), width
            if is_bytes:
                wide = _value_bytes(source, parquet, (group, leaf), looked_at, min(rows, values))
                if is_nested and values * wide > most(size) and chunk.has_dictionary_page:
                    _check_items(source, parquet, (group, leaf), size)
            elif values * width > most(size):
                raise TooMuchError(f"has {values:,} values in one row group of the column {chunk.path_in_schema!r}")
            varying[group] += -(-values * wide // count)
    return max(1, min(rows, _BATCH_BYTES // (fixed + max(varying.values(), default=0))))


def leaves(schema: pa.Schema, names: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield some columns with the number that each has in the file, where a nested one may have several."""
    at, names = 0, frozenset(names)
    for field in schema:
        count = leaf_count(field.type)
        if field.name in names:
            yield from ((field.name, number) for number in range(at, at + count))
        at += count


def _is_dense(chunk: pq.ColumnChunkMetaData, size: int) -> bool:
    """Return whether a chunk's pages may decompress to more than the file may, whatever the footer says."""
    if chunk.compression == "UNCOMPRESSED":
        return False
    return chunk.compression in _DENSE or min(chunk.total_compressed_size, size) * _SNAPPY > MOST_BYTES


def _pages(source: Any, chunk: pq.ColumnChunkMetaData, size: int) -> list[Page] | None:
    """Return a chunk's pages, where its bytes are in memory. Raises as `rows_at_once`."""
    if not isinstance(source, pa.BufferReader):
        if chunk.total_uncompressed_size > most(size):
            raise TooMuchError(f"has {chunk.total_uncompressed_size:,} bytes in the column {chunk.path_in_schema!r}")
        return None
    first = chunk.data_page_offset
    if 0 < (chunk.dictionary_page_offset or 0) < first:  # 0 is what some writers note where there is none
        first = chunk.dictionary_page_offset
    if first < 0 or chunk.total_compressed_size < 0 or first + chunk.total_compressed_size > size:
        raise ValueError("a column chunk lies outside of the file")
    source.seek(first)
    data = source.read_buffer(chunk.total_compressed_size)
    source.seek(0)
    found = list(pages(memoryview(data).cast("B")))
    decompressed = sum(page.bytes for page in found)
    if decompressed > most(size):
        raise TooMuchError(
            f"has {size:,} bytes, of which the column {chunk.path_in_schema!r} decompresses to {decompressed:,}"
        )
    return found


def _value_bytes(
    source: Any, parquet: pq.ParquetFile, place: tuple[int, int], looked_at: Sequence[Page] | None, rows: int
) -> int:
    """Return how many bytes a value of a column of texts or bytes may take.

    It is the greatest value if a few bytes of the file can stand for many values, otherwise the mean.
    """
    group, leaf = place
    chunk = parquet.metadata.row_group(group).column(leaf)
    whole, values = max(int(chunk.total_uncompressed_size), 0), max(int(chunk.num_values), 1)
    if looked_at is not None:
        whole = sum(page.bytes for page in looked_at)
    mean = -(-whole // values)
    if whole * rows <= _BATCH_BYTES:
        return mean
    if "DELTA_BYTE_ARRAY" in chunk.encodings:
        fronts = [page.bytes for page in looked_at or () if page.encoding == DELTA_BYTE_ARRAY]
        return max([*fronts, mean]) if looked_at is not None else whole
    if not chunk.has_dictionary_page:
        return mean
    longest = _longest(source, parquet, group, leaf)
    return max(mean, whole if longest is None else longest)


def _longest(source: Any, parquet: pq.ParquetFile, group: int, leaf: int) -> int | None:
    """Return the bytes of the longest value of a chunk's dictionary; None: the rows that were looked at have none."""
    path = parquet.schema.column(leaf).path
    with pq.ParquetFile(source, metadata=parquet.metadata, read_dictionary=[path]) as indexed:
        batches = indexed.iter_batches(_LOOKED_AT, row_groups=[group], columns=[path], use_threads=False)
        found = [length for column in next(batches).columns for length in _lengths(column)]
    return max(found, default=None)


def _check_items(source: Any, parquet: pq.ParquetFile, place: tuple[int, int], size: int) -> None:
    """Raise TooMuchError for a chunk whose lists have more bytes than the file may: one row can have all of them. Only
    the places of the values in its dictionary are decoded."""
    group, leaf = place
    path, left = parquet.schema.column(leaf).path, most(size)
    if parquet.metadata.row_group(group).column(leaf).num_values * _WIDTHS["INT32"] > left:
        raise TooMuchError(f"has too many values in one row group of the column {path!r}")
    with pq.ParquetFile(source, metadata=parquet.metadata, read_dictionary=[path]) as indexed:
        for batch in indexed.iter_batches(_LOOKED_AT, row_groups=[group], columns=[path], use_threads=False):
            for dictionary in (found for column in batch.columns for found in _dictionaries(column)):
                lengths = pc.binary_length(dictionary.dictionary).cast(pa.int64())
                left -= pc.sum(lengths.take(dictionary.indices)).as_py() or 0
                if left < 0:
                    raise TooMuchError(
                        f"has {size:,} bytes, and the lists of the column {path!r} more than {most(size):,}"
                    )


def _lengths(array: pa.Array) -> Iterator[int]:
    """Yield the bytes of the longest value of each dictionary in an array."""
    for dictionary in _dictionaries(array):
        longest = pc.max(pc.binary_length(dictionary.dictionary)).as_py()
        if longest is not None:
            yield longest


def _dictionaries(array: pa.Array) -> Iterator[pa.DictionaryArray]:
    """Yield the arrays with a dictionary that an array consists of."""
    if pa.types.is_dictionary(array.type):
        yield array
    elif pa.types.is_struct(array.type):
        for number in range(array.type.num_fields):
            yield from _dictionaries(array.field(number))
    elif pa.types.is_nested(array.type):
        yield from _dictionaries(array.values)
