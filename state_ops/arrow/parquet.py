"""Writes staged rows to Parquet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PARTITION = "weir.partition"  # in a file's metadata: the values of the partition that it belongs to, as Delta's texts
WHERE = "weir.where"  # in a file's metadata: the condition whose rows the file's replace


def partition_json(values: Mapping[str, Any]) -> str:
    """Values of partition columns as Delta's log has them: texts, or null. An empty text is null there."""

    def text(value: Any) -> str | None:
        if value is None or value == "":
            return None
        if isinstance(value, bool):
            return str(value).lower()
        return value.isoformat() if isinstance(value, date) else str(value)

    return json.dumps({name: text(value) for name, value in values.items()})


def partition_of(footer: pq.FileMetaData) -> tuple[tuple[str, str | None], ...]:
    """Return the partition that a staged file belongs to; none: its table has no partitions."""
    raw = (footer.metadata or {}).get(PARTITION.encode())
    return tuple(json.loads(raw).items()) if raw else ()


def where_of(footer: pq.FileMetaData) -> str | None:
    """Return the condition whose rows a staged file's replace; None: they replace those of partitions, or none."""
    raw = (footer.metadata or {}).get(WHERE.encode())
    return raw.decode() if raw else None


def staged_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    texts = [field.name for field in schema if pa.types.is_string(field.type)]
    return pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=texts, write_page_checksum=True)
