"""The format that a file seems to have, by its first bytes and its name, for errors about a file of another format."""

from __future__ import annotations

from weir.connectors.formats.stream import COMPRESSED

HEAD = 512  # bytes of a file that tell
_MAGIC = {
    b"PAR1": "parquet", b"Obj\x01": "avro", b"ORC": "ORC", b"ARROW1": "Arrow", b"PK\x03\x04": "a ZIP archive"
}  # fmt: skip
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\x04\x22\x4d\x18", b"\xfd7zXZ")
_NAMED = {
    ".parquet": "parquet", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv",
    ".avro": "avro",
}  # fmt: skip
_PACKED_DATA = (
    "compressed data",
    'Give such files the ending of their compression, such as .csv.gz, and the source the format="csv" or "json"',
)
FORMATS = {"parquet": "Parquet", "json": "JSON", "csv": "CSV", "avro": "Avro"}


def by_name(name: str) -> str | None:
    """Return the format of `files` that a file's name, or a pattern of names, tells; None: none of them.

    Example:
        >>> from weir.connectors.formats.looks import by_name
        >>> by_name("orders.jsonl.gz")
        'json'
    """
    bare = name.lower()
    if packed := next((ending for ending in COMPRESSED if bare.endswith(ending)), None):
        bare = bare.removesuffix(packed)
    return next((format for ending, format in _NAMED.items() if bare.endswith(ending)), None)


def other(format: str, name: str, head: bytes) -> tuple[str, str] | None:
    """Return what a file that cannot be read as `format` looks like, and the next step; None where nothing tells.

    Args:
        head: Its first bytes, as they are stored.
    """
    seems = next((found for magic, found in _MAGIC.items() if head.startswith(magic)), None)
    if seems is None:
        seems = by_name(name)
        text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
        if seems in (None, "parquet") and text[:1] in (b"{", b"["):
            seems = "json"
        elif seems in (None, "parquet") and head.startswith(_PACKED):
            return _PACKED_DATA
    if seems is None or seems == format:
        return None
    if seems not in FORMATS:
        return seems, "Convert it to Parquet, JSON lines, CSV or Avro"
    return FORMATS[seems], f'Say format="{seems}" in files(...) if the source\'s files are {FORMATS[seems]}'
