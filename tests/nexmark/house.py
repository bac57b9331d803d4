"""An auction house in which nothing happens: an input without rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.nexmark.generate import side_input

_KINDS = {"int": pa.int64(), "text": pa.string(), "time": pa.timestamp("us", tz="UTC")}


def _schema(**columns: str) -> pa.Schema:
    return pa.schema([(name, _KINDS[kind]) for kind, names in columns.items() for name in names.split()])


SCHEMAS = {
    "person": _schema(int="id seq", text="name email_address credit_card city state extra", time="date_time"),
    "auction": _schema(
        int="id initial_bid reserve seller category seq", text="item_name description extra", time="date_time expires"
    ),
    "bid": _schema(int="auction bidder price seq", text="channel url extra", time="date_time"),
}


def write(root: Path) -> Path:
    """Write an input of one file a kind."""
    for name, schema in SCHEMAS.items():
        (root / name).mkdir(parents=True)
        pq.write_table(schema.empty_table(), root / name / "part-00000.parquet")
    pq.write_table(side_input(), root / "side_input.parquet")
    return root
