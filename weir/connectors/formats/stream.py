"""The bytes of a file: decompressed by its name, and cut into blocks of whole lines."""

from __future__ import annotations

import codecs
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa

from state_ops.errors import InputError, TransientError, first_line

_CODECS = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bz2",
    ".lz4": "lz4",
    ".br": "brotli",
}
_XZ = (".xz", ".lzma")
_UNREADABLE = (".snappy", ".lzo", ".zip", ".7z", ".z", ".deflate")
COMPRESSED = (*_CODECS, *_XZ, *_UNREADABLE)
LONGEST_LINE = 64 << 20  # bytes
_SURE, _MOST_TIMES = 256 << 20, 1000  # bytes that any file may have, and how far compression goes in larger ones
_DICTIONARY = 256 << 20  # bytes that xz may take

Bounds = Callable[[bytes, bool], int]
"""Where the last whole record of some bytes ends, 0 if none does. The second argument: whether the file ends there."""


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of a file.

    Attributes:
        first: The number of the first of them, from 1.
        weight: The bytes that it may take in memory where these are more than its own; 0: nobody has weighed it.
    """

    data: bytes
    first: int
    weight: int = 0


class Bytes:
    """A file's bytes, decompressed as its name says, in UTF-8.

    Args:
        stream: The file, opened; anything with `read`.
        where: The file as people know it: for its compression, and for errors.
        encoding: In which its text is written.
    """

    def __init__(self, stream: IO[bytes] | pa.NativeFile, where: str, encoding: str = "utf-8") -> None:
        self.where = where
        self._raw, self._unpacked = _Raw(stream), 0
        self._stream = self._decompressed(where.lower())
        utf8 = codecs.lookup(encoding).name == "utf-8"
        self._decoder = None if utf8 else codecs.getincrementaldecoder(encoding)()

    def read(self, size: int) -> bytes:
        """Return about so many bytes; none at the end.

        Raises:
            InputError: They are damaged.
            TransientError: Storage fails.
        """
        try:
            while True:
                data = bytes(self._stream.read(size))
                self._unpacked += len(data)
                self.check_size(self._unpacked, self._raw.count)
                if self._decoder is None:
                    return data
                text = self._decoder.decode(data, final=not data).encode()
                if text or not data:
                    return text
        except (OSError, EOFError, ValueError, lzma.LZMAError, pa.ArrowException) as error:
            if self._raw.failed is not None:
                raise TransientError(
                    f"An input file cannot be read now: {first_line(self._raw.failed)}",
                    where=self.where,
                    next="Look at the storage and at who may read the file, and run again.",
                ) from error
            raise self.damaged(first_line(error)) from error

    def blocks(self, size: int, bounds: Bounds) -> Iterator[Block]:
        """Yield the file in blocks of whole records of about so many bytes, without a mark of the byte order."""
        rest, line, is_first = b"", 1, True
        while data := self.read(size):
            rest += data
            if is_first and len(rest) >= 3:
                rest, is_first = rest.removeprefix(codecs.BOM_UTF8), False
            end = bounds(rest, False)
            if end:
                is_first = False
                yield Block(rest[:end], line)
                line, rest = line + line_ends(rest[:end]), rest[end:]
            elif len(rest) > LONGEST_LINE:
                raise self.damaged(f"the row at line {line} has more than {LONGEST_LINE >> 20} MiB")
        rest = rest.removeprefix(codecs.BOM_UTF8) if is_first else rest
        while rest:
            end = bounds(rest, True)
            yield Block(rest[:end], line)
            line, rest = line + line_ends(rest[:end]), rest[end:]

    def check_size(self, unpacked: int, packed: int) -> None:
        """Raise InputError if so many bytes cannot come of the bytes that are stored."""
        if unpacked > _SURE + _MOST_TIMES * packed:
            raise self.damaged(f"it is more than {_MOST_TIMES} times as large as it is compressed")

    def damaged(self, what: str) -> InputError:
        """Return the error to raise if the file cannot be read from some place on."""
        return InputError(
            f"An input file is damaged: {what}.",
            where=self.where,
            next="Repair the file, or move it away; nothing of this epoch was applied.",
        )

    def _decompressed(self, name: str) -> Any:
        ending = next((ending for ending in COMPRESSED if name.endswith(ending)), None)
        if ending in _UNREADABLE:
            raise InputError(
                f"Files that end in {ending} cannot be decompressed.",
                where=self.where,
                next="Write them uncompressed, or as .gz, .zst, .bz2, .lz4, .xz or .br.",
            )
        if ending in _XZ:
            return _Lzma(self._raw)
        return pa.CompressedInputStream(pa.PythonFile(self._raw, "r"), _CODECS[ending]) if ending else self._raw


class _Lzma:
    """The streams of an xz file, in bounded memory, which the library's own class does not have."""

    def __init__(self, raw: _Raw) -> None:
        self._raw, self._rest = raw, b""
        self._unpacker: lzma.LZMADecompressor | None = None

    def read(self, size: int) -> bytes:
        while True:
            if self._unpacker is None or self._unpacker.needs_input:
                self._rest = self._rest or self._raw.read(1 << 16)
                if not self._rest and self._unpacker is None:
                    return b""
                if not self._rest:
                    raise EOFError("it ends within a stream of xz")
            self._unpacker = self._unpacker or lzma.LZMADecompressor(memlimit=_DICTIONARY)
            data, self._rest = self._unpacker.decompress(self._rest, size), b""
            if self._unpacker.eof:
                self._rest, self._unpacker = self._unpacker.unused_data.lstrip(b"\0"), None
            if data:
                return data


class _Raw:
    """The stored bytes, which know whether their storage failed: a decompressor raises OSError for damage too."""

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.failed: OSError | None = None
        self.count = 0

    def read(self, size: int = -1) -> bytes:
        try:
            data = bytes(self._stream.read(size) if size >= 0 else self._stream.read())
            self.count += len(data)
            return data
        except OSError as error:
            self.failed = error
            raise

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: the caller that opened the stream closes it."""

    def flush(self) -> None:
        """Do nothing: no bytes are written."""


def in_pieces(block: Block, most: int) -> Iterator[Block]:
    """Yield a block in pieces of no more than so many lines that end with a line feed."""
    if block.data.count(b"\n") <= most:
        yield block
        return
    ends = np.flatnonzero(np.frombuffer(block.data, np.uint8) == ord("\n"))[most - 1 :: most] + 1
    starts = [0, *ends.tolist()]
    line = block.first
    for start, end in zip(starts, [*starts[1:], len(block.data)], strict=True):
        if piece := block.data[start:end]:
            yield Block(piece, line)
            line += line_ends(piece)


def in_chunks(block: Block, size: int) -> Iterator[Block]:
    """Yield a block in pieces of whole lines, each of about so many bytes."""
    data, start, line = block.data, 0, block.first
    while start < len(data):
        end = data.rfind(b"\n", start, start + size) + 1 or data.find(b"\n", start + size) + 1 or len(data)
        yield Block(data[start:end], line)
        start, line = end, line + line_ends(data[start:end])


def line_ends(data: bytes) -> int:
    """Return how many lines end in some bytes: with a line feed, a carriage return, or both."""
    ends = data.count(b"\n")
    return ends + (data.count(b"\r") - data.count(b"\r\n") if b"\r" in data else 0)


def last_line(data: bytes, is_end: bool) -> int:
    """Return the end of the last whole line; see `Bounds`."""
    if is_end:
        return len(data)
    return data.rfind(b"\n") + 1 or data.rfind(b"\r", 0, len(data) - 1) + 1


def is_utf8(data: bytes) -> bool:
    """Return whether bytes are text in UTF-8."""
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
