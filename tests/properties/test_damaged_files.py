"""Files that are damaged or forged: rows, bad rows, or an error with the file's name, in bounded memory and time."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from state_ops.errors import InputError
from weir.connectors.formats.decoding import UnforeseenInputError, decode, infer

SCHEMA = {
    "type": "record", "name": "Top", "fields": [
        {"name": "id", "type": "long"},
        {"name": "text", "type": ["null", "string"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "kinds", "type": {"type": "array", "items": {"type": "enum", "name": "K", "symbols": ["A", "B"]}}},
        {"name": "more", "type": {"type": "map", "values": "double"}},
    ],
}  # fmt: skip


def _avro(codec: str) -> bytes:
    rows = [
        {"id": n, "text": "é" * n if n % 3 else None, "at": 1_700_000_000_000 + n, "day": n, "price": n,
         "kinds": ["A", "B"][: n % 3], "more": {str(n): 0.5}}
        for n in range(20)
    ]  # fmt: skip
    file = io.BytesIO()
    fields = [{**field, "type": "bytes"} if field["name"] == "price" else field for field in SCHEMA["fields"]]
    plain = json.loads(json.dumps({**SCHEMA, "fields": fields}))
    for row in rows:
        row["price"] = int(row["price"]).to_bytes(4, "big")
    fastavro.writer(file, fastavro.parse_schema(plain), rows, codec, 100)
    text = json.dumps(SCHEMA).encode()
    data = file.getvalue()
    at = data.index(b"avro.schema") + len(b"avro.schema")
    size, after = _number(data, at)
    return data[:at] + _written(len(text)) + text + data[after + size :]


def _number(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        number |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return number >> 1, at


def _written(number: int) -> bytes:
    number, data = (number << 1) ^ (-1 if number < 0 else 0), bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


CSV = 'id,text,at,price,"b ""c"""\n' + "".join(
    f'{n},"é, {n}",2026-01-0{n % 9 + 1}T00:00:00Z,{n}.25,x\n' for n in range(20)
)
JSON = "".join(
    json.dumps(
        {"id": n, "text": "é", "at": f"2026-01-0{n % 9 + 1}", "o": {"l": [n, 0.5, {"x": None}]}},
        ensure_ascii=n % 2 == 0,
    )
    + "\n"
    for n in range(20)
)
FILES: dict[str, tuple[str, bytes]] = {
    "a.csv": ("csv", CSV.encode()),
    "a.csv.gz": ("csv", gzip.compress(CSV.encode())),
    "a.csv.xz": ("csv", lzma.compress(CSV.encode())),
    "a.json": ("json", JSON.encode()),
    "a.json.bz2": ("json", bz2.compress(JSON.encode())),
    "a.json.zst": ("json", pa.compress(JSON.encode(), "zstd", asbytes=True)),
    "a.avro": ("avro", _avro("null")),
    "deflated.avro": ("avro", _avro("deflate")),
    "xz.avro": ("avro", _avro("xz")),
}


def _read(name: str, format: str, data: bytes, schema: pa.Schema | None) -> None:
    """Read a file as a run does. Raises InputError with the file's name, and nothing else."""
    try:
        columns = schema or infer(format, {}, io.BytesIO(data), name)
        for batch in decode(format, {}, io.BytesIO(data), columns, name, keeps_digits=schema is None):
            batch.rows.validate(full=True)
            batch.rows.to_pylist()
            assert all(row.number >= 1 and row.reason for row in batch.rejected)
    except InputError as refused:
        assert not isinstance(refused, UnforeseenInputError), refused
        assert refused.where == name and refused.next


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "inferred"])
def test_any_damage_makes_rows_bad_rows_or_an_error_with_the_files_name(name: str, is_declared: bool):
    format, data = FILES[name]
    schema = infer(format, {}, io.BytesIO(data), name) if is_declared else None
    chance = random.Random(name)
    for _ in range(150):
        broken = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(broken))
            how = chance.randrange(4)
            if how == 0:
                broken[at] ^= 1 << chance.randrange(8)
            elif how == 1:
                broken[at : at + 1] = chance.choice(
                    [b"\xff", b"\0", b'"', b"{", b"\n", b"9" * 25, b"\x80" * 9 + b"\1", b"1e999"]
                )
            elif how == 2 and len(broken) > 20:
                del broken[at : at + chance.randint(1, 20)]
            elif how == 3:
                broken = broken[: max(at, 1)]
        _read(name, format, bytes(broken), schema)


def _forged_avro(fields: list[Any], body: bytes, rows: int, codec: bytes = b"null") -> bytes:
    schema, sync = json.dumps({"type": "record", "name": "R", "fields": fields}).encode(), b"s" * 16
    head = b"Obj\1" + _written(2) + b"\x16avro.schema" + _written(len(schema)) + schema
    head += b"\x14avro.codec" + _written(len(codec)) + codec + b"\0" + sync
    return head + _written(rows) + _written(len(body)) + body + sync


def _level(at: int, last: int) -> dict[str, Any]:
    fields = [{"name": "v", "type": "int"}]
    if at < last:
        fields = [{"name": "x", "type": _level(at + 1, last)}, {"name": "y", "type": f"L{at + 1}"}]
    return {"type": "record", "name": f"L{at}", "fields": fields}


LISTS = {"type": "array", "items": {"type": "array", "items": "int"}}
BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "deflate.avro": ("avro", lambda: _forged_avro([{"name": "v", "type": "bytes"}], _deflated(1 << 28), 1 << 28, b"deflate")),
    "bzip2.avro": ("avro", lambda: _forged_avro([{"name": "v", "type": "bytes"}], bz2.compress(bytes(1 << 28)), 1 << 28, b"bzip2")),
    "xz.avro": ("avro", lambda: _forged_avro([{"name": "v", "type": "bytes"}], lzma.compress(bytes(1 << 28)), 1 << 28, b"xz")),
    "zstd.avro": ("avro", lambda: _forged_avro([{"name": "v", "type": "bytes"}], pa.compress(bytes(1 << 28), "zstd", asbytes=True), 1 << 28, b"zstandard")),
    "snappy.avro": ("avro", lambda: _forged_avro([{"name": "v", "type": "bytes"}], b"\xff\xff\xff\xff\x0f" + bytes(9), 1, b"snappy")),
    "rows.avro": ("avro", lambda: _forged_avro([{"name": "v", "type": "int"}], bytes(100), 1 << 30)),
    "length.avro": ("avro", lambda: _forged_avro([{"name": "v", "type": "string"}], b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\1" + bytes(9), 1)),
    "items.avro": ("avro", lambda: _forged_avro([{"name": "v", "type": {"type": "array", "items": "int"}}], b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\1" + bytes(9), 1)),
    "symbols.avro": ("avro", lambda: _forged_avro([{"name": "v", "type": {"type": "enum", "name": "E", "symbols": ["A" * (1 << 20)]}}], bytes(60_000), 60_000)),
    "nested.avro": ("avro", lambda: _forged_avro([{"name": n, "type": {"type": "array", "items": {"type": "enum", "name": f"E{n}", "symbols": ["A" * (1 << 14)]}}} for n in "uv"], (_written(9_000) + bytes(9_001)) * 2, 1)),
    "empty.avro": ("avro", lambda: _forged_avro([{"name": "v", "type": {"type": "array", "items": "int"}}], _deflated(60_000_000), 60_000_000, b"deflate")),
    "lists.avro": ("avro", lambda: _forged_avro([{"name": "v", "type": LISTS}], _deflate((_written(1_000_000) + bytes(1_000_000)) * 50 + b"\0"), 1, b"deflate")),
    "sized.avro": ("avro", lambda: _forged_avro([{"name": "v", "type": LISTS}], _deflate((_written(-1) + _written(1) + bytes(1)) * 15_000_000 + b"\0"), 1, b"deflate")),
    "null.avro": ("avro", lambda: _forged_avro([{"name": "v", "type": {"type": "array", "items": ["null", {"type": "record", "name": "R", "fields": [{"name": f"f{n}", "type": "string"} for n in range(1_000)]}]}}], _written(200_000) + bytes(200_001), 1)),
    "endless.avro": ("avro", lambda: _forged_avro([{"name": "v", "type": LISTS}], _deflate(b"\xff" * 12_000_000), 1, b"deflate")),
    "nothing.avro": ("avro", lambda: _forged_avro([{"name": "v", "type": {"type": "fixed", "name": "F", "size": 0}}], b"", 1 << 30)),
    "header.avro": ("avro", lambda: b"Obj\1" + _written(2) + _written(1 << 63)),
    "schema.avro": ("avro", lambda: _forged_avro([{"name": "v", "type": _level(0, 24)}], b"", 0)),
    "twice.json": ("json", lambda: ("{" + ",".join(f'"k{n}":1' for n in range(60_000)) + ',"k59999":2}\n').encode()),
    "deep.json": ("json", lambda: b'{"a":' * 500_000 + b"1" + b"}" * 500_000),
    "wide.json": ("json", lambda: b'{"v":1,' + b",".join(b'"k%d":1' % n for n in range(1_500_000)) + b"}\n"),
    "fields.json": ("json", lambda: b"".join(b'{"k%d":1}\n' % n for n in range(200_000))),
    "line.csv": ("csv", lambda: b"a,b\n1," + b"x" * (70 << 20)),
    "columns.csv": ("csv", lambda: b",".join(b"%d" % n for n in range(200_000)) + b"\n"),
    "bomb.csv.gz": ("csv", lambda: gzip.compress(b"a\n" + bytes(300 << 20))),
    "bomb.csv.bz2": ("csv", lambda: bz2.compress(b"a\n" + b"\n" * (300 << 20))),
    "bomb.json.zst": ("json", lambda: pa.compress(b"\n" * (300 << 20), "zstd", asbytes=True)),
}  # fmt: skip


def _deflate(data: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-15)
    return deflater.compress(data) + deflater.flush()


def _deflated(size: int) -> bytes:
    import zlib

    return zlib.compress(bytes(size))[2:-4]


TRIES = """
import json, os, resource, sys
from pathlib import Path
import pyarrow as pa, polars
from weir.connectors.formats.decoding import UnforeseenInputError, decode, infer
from state_ops.errors import InputError

def refused(name, call):
    try:
        call()
    except InputError as error:
        assert error.where == name and not isinstance(error, UnforeseenInputError), error
        assert "symbols" not in name or "malloc" not in str(error), error
        return True
    return False

def tried(name, format, at):
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    bad = []
    def inferred():
        with at.open("rb") as stream:
            infer(format, {}, stream, name)
    def read():
        with at.open("rb") as stream:
            for batch in decode(format, {}, stream, pa.schema([("v", pa.string())]), name):
                bad.extend(batch.rejected)
    is_refused, is_read = refused(name, inferred), not refused(name, read)
    sys.exit(0 if is_refused or not is_read or bad else 3)

for line in sys.stdin:
    name, format, file = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(file + ".said", os.O_WRONLY | os.O_CREAT), 2)
        tried(name, format, Path(file))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def tries() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported all that reads files, and reads each in a child of its own."""
    with subprocess.Popen([sys.executable, "-c", TRIES], stdin=PIPE, stdout=PIPE, text=True) as process:
        yield process


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_asks_for_much_is_refused_in_bounded_memory(name: str, tmp_path, tries):
    format, made = BOMBS[name]
    file = tmp_path / name
    file.write_bytes(made())
    tries.stdin.write(json.dumps([name, format, str(file)]) + "\n")
    tries.stdin.flush()
    assert tries.stdout.readline() == "0\n", Path(f"{file}.said").read_text()[-2000:]
