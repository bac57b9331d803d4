"""Find which rows of a table change when it is taken back, so that a person sees them before it is done.

Files are compared by their rows: tables with keys, and replaced partitions, write unchanged rows anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from state_ops.delta import fenced_table
from state_ops.delta.log_entries import DataFile
from state_ops.errors import plainly
from state_ops.logs import Logger
from state_ops.storage.storage import Storage
from weir.connectors.delta.restore_version import RowsBack, TableRewind
from weir.connectors.delta.table_commit import local_file, table_path
from weir.definition import Pipeline
from weir.inspection.database import database, quoted

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection as Connection

log = Logger("weir.rewind")

_MOST_BYTES = 1 << 30  # that are read for a count; of more only the log's numbers are said
_BY_KEY = """
    SELECT count(*) FILTER (a.row <> b.row), count(*) FILTER (b.row IS NULL), count(*) FILTER (a.row IS NULL)
    FROM (FROM seen WHERE goes) a FULL JOIN (FROM seen WHERE NOT goes) b USING (key)
"""
_BY_ROW = """
    SELECT 0, coalesce(sum(greatest(surplus, 0)), 0), coalesce(sum(greatest(-surplus, 0)), 0)
    FROM (SELECT sum(CASE WHEN goes THEN 1 ELSE -1 END) AS surplus FROM seen GROUP BY row)
"""


def looked_at(pipeline: Pipeline, storage: Storage, table: TableRewind, scratch: Path) -> TableRewind:
    """Return a table's rewind with the numbers of rows that change back, go and come back.

    Files are read if some of them come back.

    Args:
        scratch: A directory for files that are fetched, one at a time.
    """
    if not table.comes:
        return replace(table, becomes=RowsBack(0, sum(file.rows for file in table.goes), 0))
    if sum(file.bytes for file in (*table.goes, *table.comes)) > _MOST_BYTES:
        return table
    try:
        return replace(table, becomes=_compared(pipeline, storage, table, scratch))
    except Exception as error:  # a file is gone or damaged, which need not keep anybody from a rewind
        log.warning("what becomes of a table's rows cannot be counted", table=table.table, error=plainly(error))
        return table


def _compared(pipeline: Pipeline, storage: Storage, table: TableRewind, scratch: Path) -> RowsBack:
    sink = pipeline.sink(table.table)
    key = pipeline.capabilities(sink).newest_of if sink is not None else ()
    handle = fenced_table.open_table(storage, table_path(table.table), table.version)
    names = [field.name for field in handle.schema().fields]
    with database() as connection:
        connection.execute("CREATE TABLE seen (goes BOOLEAN, key UBIGINT, row UBIGINT)")
        for goes, files in ((True, table.goes), (False, table.comes)):
            for file in files:
                with local_file(storage, table.table, file, scratch) as local:
                    _note(connection, local, file, names, key, goes=goes)
        counts = connection.execute(_BY_KEY if key else _BY_ROW).fetchone()
        assert counts is not None, "a count has a row"
        return RowsBack(*map(int, counts))


def _note(
    connection: Connection, local: Path, file: DataFile, names: Sequence[str], key: Sequence[str], *, goes: bool
) -> None:
    """Note a file's rows by digests of their key and of all that they have.

    Args:
        names: The table's columns. A file that lacks some has null there, or what the log says of its partition.
    """
    there, partition = set(pq.read_schema(local).names), dict(file.partition)
    values: list[str | None] = []

    def column(name: str) -> str:
        if name in there:
            return f"CAST({quoted(name)} AS VARCHAR)" if name in partition else quoted(name)
        values.append(partition.get(name))
        return "CAST(? AS VARCHAR)"

    key_digest, row_digest = (f"hash({', '.join(map(column, of))})" if of else "NULL" for of in (key, names))
    query = f"INSERT INTO seen SELECT {goes}, {key_digest}, {row_digest} FROM read_parquet(?)"
    connection.execute(query, [*values, str(local)])
