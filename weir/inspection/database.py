"""A DuckDB database in a temporary directory, for questions about state: filled in a stream, then sealed, then asked.

What is loaded lies on disk, so that it may be larger than memory and be scanned twice. Once sealed, it reaches no file,
no network and
no Python variable: a query sees what was loaded and nothing else.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from state_ops import extras
from state_ops.arrow.types import mapped
from state_ops.errors import ConfigurationError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection as Connection

_BATCH_ROWS = 10_000
WHOLE = b"weir.whole"
"""Of a column of a result: DuckDB has it as a whole number of 128 bits, which Arrow has as a decimal."""
_MEMORY = "1GB"  # of DuckDB; what does not fit lies on disk
_OFFLINE = (
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET python_enable_replacements = false",
    "SET TimeZone = 'UTC'",
)


@contextmanager
def database() -> Iterator[Connection]:
    """Yield an empty database in TMPDIR, which is deleted afterwards."""
    with extras.needed_for("SQL over state"):
        import duckdb

    with tempfile.TemporaryDirectory(prefix="weir-sql-") as scratch:
        connection = duckdb.connect(
            str(Path(scratch) / "weir.duckdb"),
            config={"memory_limit": _MEMORY, "temp_directory": str(Path(scratch) / "spilled")},
        )
        try:
            for setting in _OFFLINE:
                connection.execute(setting)
            yield connection
        finally:
            connection.close()


def load(connection: Connection, name: str, tables: Iterable[pa.Table], schema: pa.Schema) -> None:
    """Make the table `name`, in SQL, of Arrow tables, batch by batch."""
    given = [field.name for field in schema]
    fitting = pa.schema([(field.name, _known_to_duckdb(field.type)) for field in schema])
    cast = (table if table.schema.equals(fitting) else table.cast(fitting) for table in tables)
    with streamed(cast, fitting) as reader:
        connection.register("__weir_incoming", reader)
        connection.execute(f"CREATE TABLE {name} AS SELECT {', '.join(map(quoted, given))} FROM __weir_incoming")
    connection.unregister("__weir_incoming")


def _known_to_duckdb(type: pa.DataType) -> pa.DataType:
    """Return the nearest type that DuckDB can take in; every part of a nested type is nullable."""
    if pa.types.is_float16(type):
        return pa.float32()
    return pa.string() if pa.types.is_decimal256(type) else mapped(type, _known_to_duckdb, loose=True)


@contextmanager
def streamed(tables: Iterable[pa.Table], schema: pa.Schema) -> Iterator[pa.RecordBatchReader]:
    """Tables as what DuckDB, delta-rs and Arrow's writers take in. An error in one of them comes out as what it is, not
    as what the consumer makes of it."""
    failed: list[BaseException] = []

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            for table in tables:
                yield from table.to_batches(_BATCH_ROWS)
        except BaseException as error:
            failed.append(error)
            raise

    try:
        yield pa.RecordBatchReader.from_batches(schema, batches())
    except Exception as error:
        if failed and failed[0] is not error:
            raise failed[0] from None
        raise


def seal(connection: Connection, schemas: Sequence[str] = ()) -> None:
    """Allow nothing but queries from now on.

    Args:
        schemas: Where names are looked for, in this order.
    """
    if schemas:
        connection.execute(f"SET search_path = '{','.join(schemas)}'")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


@contextmanager
def asked(connection: Connection, query: str) -> Iterator[tuple[pa.Schema, Iterator[pa.Table]]]:
    """Yield the result of one query: its columns, and its rows in tables of bounded size. Raises `duckdb.Error`, also
    while it is read."""
    relation = connection.sql(query)
    whole = [{WHOLE: b""} if str(type) in ("HUGEINT", "UHUGEINT") else None for type in relation.types]
    reader = relation.to_arrow_reader(_BATCH_ROWS)
    fields = zip(reader.schema, whole, strict=True)
    schema = pa.schema([pa.field(field.name, field.type, metadata=mark) for field, mark in fields])
    try:
        yield schema, (pa.Table.from_batches([batch]).cast(schema) for batch in reader if batch.num_rows)
    finally:
        reader.close()


def quoted(name: str) -> str:
    """Return a name as SQL takes it whatever it contains."""
    return '"' + name.replace('"', '""') + '"'


def tables_of(connection: Connection, query: str) -> set[tuple[str, str]]:
    """Return the schema ("" if none is said) and name, in lower case, of each table that a query names, and of what it
    names itself in WITH.

    Raises:
        ConfigurationError: Unless it is one query that reads.
    """
    import json

    import duckdb

    try:
        number = len(connection.extract_statements(query))
        ((serialized,),) = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [query]).fetchall()
    except duckdb.Error as error:
        raise _no_query(str(error)) from error
    parsed = json.loads(serialized)
    if parsed.get("error"):
        raise _no_query(parsed["error_message"])
    if number != 1:
        raise _no_query(f"It has {number} statements, not one.")
    return set(_named(parsed))


def _named(node: Any) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        if node.get("type") == "BASE_TABLE":
            yield node.get("schema_name", "").lower(), node["table_name"].lower()
        for value in node.values():
            yield from _named(value)
    elif isinstance(node, list):
        for value in node:
            yield from _named(value)


def _no_query(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"This is no query: {why}",
        where="weir state sql",
        next="Write one SELECT in DuckDB's SQL; nothing can be changed by it.",
    )
