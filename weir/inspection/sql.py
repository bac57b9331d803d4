"""One SQL query over a pipeline's state, registry and tables, answered by DuckDB without Spark.

    state.<uid>            a stage's state at the chosen checkpoint, a row a key (of windows: a row for each that is
                           open)
    state.<uid>_history    the same in every retained checkpoint that leads to it, with the column checkpoint_id
    state.<uid>_changes    of these, the rows that the retained checkpoint before did not have or had otherwise
    tables.<table>         a sink's Delta table as it is now
    registry.checkpoints, registry.state_files, registry.publications, registry.pins

Names are looked for in this order, so that the schema need only be said where a stage and a table have one name.
Nothing is read but what the query names.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake.exceptions import DeltaError, TableNotFoundError

from state_ops import extras
from state_ops.checkpoints.registry import CHECKPOINTS, JSON_COLUMNS, PINS, PUBLICATIONS, STATE_FILES, Registry
from state_ops.delta import fenced_table
from state_ops.errors import ConfigurationError, PrunedError, TransientError, WeirError, look_there, plainly
from state_ops.logs import Logger
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.recorded import Recorded
from state_ops.redaction import scrub
from state_ops.storage.storage import Storage
from state_ops.value_text import as_json
from weir.connectors.delta.table_commit import table_path
from weir.definition import Pipeline
from weir.inspection.database import asked, database, load, quoted, seal, tables_of
from weir.inspection.state_reader import At, chain, held, view_at
from weir.inspection.view import View
from weir.settings.configuration import Settings

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection as Connection

STATE, TABLES, REGISTRY = "state", "tables", "registry"
_SCHEMAS = (STATE, TABLES, REGISTRY)
_PURPOSE = "weir state sql"

log = Logger("weir.sql")

Catalog = Mapping[tuple[str, str], Callable[["Connection"], None]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """The state, registry and tables that a query asks. checkpoint: the chosen one."""

    pipeline: Pipeline
    settings: Settings
    storage: Storage
    registry: Registry
    checkpoint: Checkpoint

    def view(self, uid: str) -> AbstractContextManager[View | None]:
        """Return a stage's state in the checkpoint."""
        return view_at(self.pipeline, self.settings, self.storage, self.registry, self.checkpoint, uid, _PURPOSE)


@contextmanager
def answered(
    pipeline: Pipeline, settings: Settings, query: str, at: At = None
) -> Iterator[tuple[pa.Schema, Iterator[pa.Table]]]:
    """Yield the columns and rows of a query's result, in tables of bounded size.

    Raises:
        ConfigurationError: For what is no single query, or names tables or columns that are not there: it lists those
            that are.
    """
    with extras.needed_for("weir state sql"):
        import duckdb

    with held(pipeline, settings, at, _PURPOSE) as (storage, registry, checkpoint), database() as connection:
        named = tables_of(connection, query)
        catalog = _catalog(_Source(pipeline, settings, storage, registry, checkpoint))
        try:
            for schema in _SCHEMAS:
                connection.execute(f"CREATE SCHEMA {schema}")
            _tell_of_tables(catalog, named)
            for table in dict.fromkeys(_resolved(catalog, *name) for name in named):
                if table is not None:
                    catalog[table](connection)
            seal(connection, _SCHEMAS)
            with asked(connection, query) as answer:
                yield answer
        except duckdb.Error as error:
            raise _explained(error, connection, catalog) from error


def _catalog(source: _Source) -> Catalog:
    """Return what there is to be named, and what makes it."""
    catalog: dict[tuple[str, str], Callable[[Connection], None]] = {}
    uids = source.checkpoint.stages_with_state
    for uid in uids:
        catalog[STATE, f"{uid}_history"] = partial(_load_history, source, uid)
        catalog[STATE, f"{uid}_changes"] = partial(_load_changes, source, uid)
    for uid in uids:
        catalog[STATE, uid] = partial(_load_state, source, uid)
    lost = [name for name, link in source.checkpoint.sinks.items() if link.kind is None]
    tables = [sink.name for sink in source.pipeline.tables]
    elsewhere = [sink.name for sink in source.pipeline.sinks if sink.name not in tables]
    for table in dict.fromkeys([*tables, *(name for name in lost if name not in elsewhere)]):
        catalog[TABLES, table] = partial(_load_table, source, table)
    catalog[REGISTRY, "checkpoints"] = partial(_load_checkpoints, source.registry)
    catalog[REGISTRY, "state_files"] = partial(_load_state_files, source.registry)
    catalog[REGISTRY, "publications"] = partial(
        _load_rows, "publications", lambda: list(map(dataclasses.asdict, source.registry.publications())), PUBLICATIONS
    )
    catalog[REGISTRY, "pins"] = partial(
        _load_rows, "pins", lambda: list(map(dataclasses.asdict, source.registry.pins())), PINS
    )
    return catalog


def _resolved(catalog: Catalog, schema: str, name: str) -> tuple[str, str] | None:
    return next(
        ((candidate, name) for candidate in _SCHEMAS if schema in ("", candidate) and (candidate, name) in catalog),
        None,
    )


def _tell_of_tables(catalog: Catalog, named: Iterable[tuple[str, str]]) -> None:
    """Log which names of a query mean state although a table is called so too."""
    for schema, name in sorted(named):
        if not schema and (STATE, name) in catalog and (TABLES, name) in catalog:
            log.info(f"{name} is the stage's state here; the table is {TABLES}.{quoted(name)}")


# -- state


def _load_state(source: _Source, uid: str, connection: Connection) -> None:
    with source.view(uid) as view:
        assert view is not None
        load(connection, f"{STATE}.{quoted(uid)}", view.tables(), view.schema)


def _load_history(source: _Source, uid: str, connection: Connection) -> None:
    name = f"{STATE}.{quoted(uid + '_history')}"
    _make_history(source, uid, connection)
    connection.execute(f"CREATE VIEW {name} AS SELECT * EXCLUDE __weir_nth FROM {_all(uid)}")


def _load_changes(source: _Source, uid: str, connection: Connection) -> None:
    """Load the rows of which the retained checkpoint before has no other with the same key and the same values."""
    name = f"{STATE}.{quoted(uid + '_changes')}"
    keys, values = _make_history(source, uid, connection)
    row = f"ROW({', '.join(map(quoted, values))})" if values else "NULL"
    connection.execute(
        f"CREATE VIEW {name} AS SELECT * EXCLUDE (__weir_nth, __weir_last, __weir_was) FROM ("
        f"SELECT *, lag(__weir_nth) OVER one AS __weir_last, lag({row}) OVER one AS __weir_was FROM {_all(uid)} "
        f"WINDOW one AS (PARTITION BY {', '.join(map(quoted, keys))} ORDER BY __weir_nth)) "
        f"WHERE __weir_last IS NULL OR __weir_last < __weir_nth - 1 OR __weir_was IS DISTINCT FROM {row}"
    )


def _all(uid: str) -> str:
    return f"{STATE}.{quoted('__weir_all_' + uid)}"


def _make_history(source: _Source, uid: str, connection: Connection) -> tuple[list[str], list[str]]:
    """Return the rows of every retained checkpoint, each loaded once, whatever asks for them; returns key columns and
    other columns."""
    keys: list[str] = []
    columns: dict[str, None] = {}
    parts: list[str] = []
    for row in chain(source.registry, source.checkpoint):
        part = f"{STATE}.{quoted(f'__weir_{uid}_{row.id}')}"
        try:
            with dataclasses.replace(source, checkpoint=row).view(uid) as view:
                if view is None:
                    continue
                if not _exists(connection, f"__weir_{uid}_{row.id}"):
                    load(connection, part, view.tables(), view.schema)
        except PrunedError:  # it is retained no more
            connection.execute(f"DROP TABLE IF EXISTS {part}")
            continue
        keys = list(view.identity)
        columns.update(dict.fromkeys(view.schema.names))
        parts.append(f"SELECT {row.id}::BIGINT AS checkpoint_id, {len(parts)} AS __weir_nth, * FROM {part}")
    connection.execute(f"CREATE OR REPLACE VIEW {_all(uid)} AS {' UNION ALL BY NAME '.join(parts)}")
    return keys, [name for name in columns if name not in keys]


def _exists(connection: Connection, table: str) -> bool:
    return bool(connection.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = ?", [table]).fetchall())


# -- registry and tables


def _load_rows(name: str, rows: Callable[[], list[dict[str, Any]]], schema: pa.Schema, connection: Connection) -> None:
    load(connection, f"{REGISTRY}.{name}", [pa.Table.from_pylist(rows(), schema=schema)], schema)


def _load_checkpoints(registry: Registry, connection: Connection) -> None:
    rows = [
        {name: getattr(row, name) for name in CHECKPOINTS.names}
        | {name: _json(getattr(row, name)) for name in JSON_COLUMNS}
        for row in registry.checkpoints()
    ]
    _load_rows("checkpoints", lambda: rows, CHECKPOINTS, connection)
    for name in JSON_COLUMNS:
        connection.execute(f"ALTER TABLE {REGISTRY}.checkpoints ALTER {quoted(name)} TYPE JSON")


def _json(column: Any) -> str | None:
    """Return a nested column as the registry's table has it, but for numbers that JSON lacks."""
    return None if column is None else as_json(json.loads(json.dumps(column, default=Recorded.to_json)))


def _load_state_files(registry: Registry, connection: Connection) -> None:
    def listings() -> Iterator[pa.Table]:
        for row in registry.checkpoints():
            try:
                files = registry.files(row)
            except PrunedError:
                continue
            ids = {"checkpoint_id": row.id, "commit_id": row.commit_id}
            yield pa.Table.from_pylist([dataclasses.asdict(file) | ids for file in files], schema=STATE_FILES)

    load(connection, f"{REGISTRY}.state_files", listings(), STATE_FILES)


def _load_table(source: _Source, table: str, connection: Connection) -> None:
    """Load a table as a view on its files, read when and as far as the query needs them."""
    try:
        handle = fenced_table.open_table(source.storage, table_path(table))
    except TableNotFoundError as error:
        raise WeirError(
            f"The table {table} does not exist yet.",
            where=source.storage.full(table_path(table)),
            next="It is made by the first epoch that has rows for it.",
        ) from error
    try:
        dataset = handle.to_pyarrow_dataset()
    except DeltaError as error:  # a feature of the table that it does not know
        raise WeirError(
            f"The table {table} cannot be read here: {plainly(error)}",
            where=handle.table_uri,
            next="Read it with Spark.",
        ) from error
    connection.register(f"__weir_table_{table}", dataset)
    connection.execute(f"CREATE VIEW {TABLES}.{quoted(table)} AS SELECT * FROM {quoted(f'__weir_table_{table}')}")


# -- errors


def _explained(error: Exception, connection: Connection, catalog: Catalog) -> WeirError:
    """DuckDB's error, with what there is."""
    import duckdb

    scrub(error)  # it repeats what storage has answered while the table was read
    if "failed: IOError" in str(error):
        return TransientError(plainly(error), where=_PURPOSE, next=f"{look_there(error)}.")
    message = str(error).splitlines()[0].partition(" Error: ")[2] or str(error)
    if isinstance(error, duckdb.CatalogException):
        return ConfigurationError(message, where=_PURPOSE, next=_there_is(catalog))
    if isinstance(error, duckdb.BinderException):
        return ConfigurationError(message, where=_PURPOSE, next=_columns(connection) or _there_is(catalog))
    if isinstance(error, duckdb.OutOfMemoryException | duckdb.IOException):
        return WeirError(message, where=_PURPOSE, next="Select fewer rows or columns, or give TMPDIR a larger disk.")
    return ConfigurationError(message, where=_PURPOSE, next="Correct the query; it changed nothing.")


def _there_is(catalog: Catalog) -> str:
    derived = {uid + ending for _, uid in catalog for ending in ("_history", "_changes")}
    named = {schema: [name for of, name in catalog if of == schema] for schema in _SCHEMAS}
    stages = [name for name in named[STATE] if name not in derived]
    return (
        f"State: {', '.join(stages) or 'none'}, each also as NAME_history and NAME_changes. "
        f"Tables: {', '.join(named[TABLES]) or 'none'}. Registry: {', '.join(named[REGISTRY])}."
    )


def _columns(connection: Connection) -> str:
    rows = connection.execute(
        "SELECT schema_name, table_name, string_agg(column_name, ', ' ORDER BY column_index) FROM duckdb_columns() "
        "WHERE schema_name IN ('state', 'tables', 'registry') AND NOT starts_with(table_name, '__weir') GROUP BY ALL "
        "ORDER BY ALL"
    ).fetchall()
    return " ".join(f"Columns of {schema}.{table}: {columns}." for schema, table, columns in rows)
