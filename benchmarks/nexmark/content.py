"""The columns that each query hands out, in their order, and its table as a file with these columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

_RANKS = " ".join(
    f"{level}_{what}:int" for what in ("bids", "bidders", "auctions") for level in ("total", "rank1", "rank2", "rank3")
)
_TYPES = {"int": pa.int64(), "float": pa.float64(), "text": pa.string(), "time": pa.timestamp("us", tz="UTC")}
_COLUMNS = {
    "q0": "auction:int bidder:int price:int date_time:time extra:text",
    "q1": "auction:int bidder:int price:float date_time:time extra:text",
    "q2": "auction:int price:int",
    "q3": "name:text city:text state:text id:int",
    "q4": "category:int avg_final:float",
    "q5": "auction:int num:int window_start:time",
    "q6": "seller:int auction:int avg_price:float",
    "q7": "auction:int price:int bidder:int date_time:time extra:text",
    "q8": "id:int name:text starttime:time",
    "q9": "id:int seller:int category:int bidder:int price:int bid_date_time:time bid_extra:text",
    "q10": "auction:int bidder:int price:int date_time:time extra:text dt:text hm:text",
    "q11": "bidder:int bid_count:int starttime:time endtime:time",
    "q12": "bidder:int bid_count:int",
    "q13": "auction:int bidder:int price:int date_time:time value:text",
    "q14": "auction:int bidder:int price:float bid_time_type:text date_time:time extra:text c_counts:int",
    "q15": f"day:text {_RANKS}",
    "q16": f"channel:text day:text minute:text {_RANKS}",
    "q17": "auction:int day:text total_bids:int rank1_bids:int rank2_bids:int rank3_bids:int"
    " min_price:int max_price:int avg_price:float sum_price:int",
    "q18": "auction:int bidder:int price:int channel:text url:text date_time:time extra:text",
    "q19": "auction:int bidder:int price:int date_time:time seq:int rank_number:int",
    "q20": "auction:int bidder:int price:int bid_seq:int item_name:text seller:int category:int",
    "q21": "auction:int bidder:int price:int channel:text channel_id:text seq:int",
    "q22": "auction:int bidder:int price:int channel:text dir1:text dir2:text dir3:text seq:int",
    "q23": "bidder:int price:int bid_seq:int name:text auction:int item_name:text",
}


def schema_of(query: str) -> pa.Schema:
    """The columns that a query hands out."""
    pairs = (column.split(":") for column in _COLUMNS[query].split())
    return pa.schema([(name, _TYPES[kind]) for name, kind in pairs])


def hand_out(query: str, table: Path, file: Path, columns: Mapping[str, str]) -> int:
    """Write a Delta table's rows as the final content of a query.

    Args:
        query: Its name.
        table: The table's directory. A query that has never handed out a row has none.
        file: What is written.
        columns: By column of the content the table's, where that has another name.

    Returns:
        The number of rows.
    """
    schema, rows = schema_of(query), 0
    file.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        try:
            dataset = DeltaTable(table).to_pyarrow_dataset()
        except TableNotFoundError:
            return 0
        wanted = {name: pc.field(columns.get(name, name)) for name in schema.names}
        for batch in dataset.to_batches(columns=wanted):
            writer.write_batch(batch.cast(schema))
            rows += batch.num_rows
    return rows
