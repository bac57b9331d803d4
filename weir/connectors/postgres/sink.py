"""A table of Postgres as a sink: rows and marker come in one transaction of the server.

Rows are first copied into a temporary table, which locks nothing. Then the transaction locks the row of
`weir_markers` that is this sink's own, compares the checkpoint in it, brings the rows in and sets it. So whoever
publishes at the same time waits, and finds the marker moved. A publisher that hangs with that lock is thrown out by the
server after a minute (`idle_in_transaction_session_timeout`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from state_ops.errors import DamageError, PipelineError
from state_ops.logs import Logger
from weir.connectors.postgres import rights
from weir.connectors.postgres.connection import Connection, Server, literal, quoted
from weir.connectors.postgres.keys import UniqueKey, matches, newest, unique_keys, widest
from weir.connectors.postgres.values import PostgresRules, TextRule, codec_of
from weir.definition.sink import Published, Publisher, Rows, Sink, SinkOpening

log = Logger("weir.sink")

MARKERS = "weir_markers"
CHANGE = "_change_type"
DELETES = ("delete", "update_preimage")
CHANGES = ("insert", "update_postimage", *DELETES)
_STAGING, _ROW = "weir_staging", "weir_row"
_LONGEST_NAME = 63
_TABLE = re.compile(r"[^.]+(\.[^.]+)?")

_TYPES = {
    pa.bool_(): "bool",
    pa.int8(): "int2",
    pa.uint8(): "int2",
    pa.int16(): "int2",
    pa.uint16(): "int4",
    pa.int32(): "int4",
    pa.uint32(): "int8",
    pa.int64(): "int8",
    pa.float32(): "float4",
    pa.float64(): "float8",
    pa.string(): "text",
    pa.large_string(): "text",
    pa.binary(): "bytea",
    pa.large_binary(): "bytea",
    pa.date32(): "date",
    pa.time64("us"): "time",
}
_WIDER = {
    "int2": ("int2", "int4", "int8", "numeric"),
    "int4": ("int4", "int8", "numeric"),
    "int8": ("int8", "numeric"),
    "float4": ("float4", "float8"),
    "text": ("text", "varchar", "uuid", "json", "jsonb"),
}
_DIGITS = {"int2": 5, "int4": 10, "int8": 19}
_PATIENCE = """
SELECT set_config('idle_in_transaction_session_timeout', '60s', true), set_config('lock_timeout', '120s', true)"""
_COLUMNS = """
SELECT a.attname::text AS name, t.typname::text AS type, t.typtype = 'e' AS enum,
  format_type(a.atttypid, NULL) AS written, a.atttypmod AS modifier, a.attnotnull AS required,
  (SELECT array_agg(e.enumlabel::text) FROM pg_enum e WHERE e.enumtypid = t.oid) AS labels,
  a.atthasdef OR a.attidentity <> '' AS filled, a.attgenerated <> '' OR a.attidentity = 'a' AS generated
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresSink(Sink):
    """A table of a Postgres server.

    Attributes:
        table: Its name, or schema.name, exactly as it is spelled; with {placeholders}. It is created if it is absent.
        key: The columns by which rows replace each other: the last one of a key stays. Without it rows are added.
    """

    table: str
    key: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _TABLE.fullmatch(self.table):
            raise PipelineError(
                f"{self.table!r} is no name of a table.",
                where=f"sink {self.name}",
                next="Write table, or schema.table.",
            )
        if len(set(self.key)) < len(self.key) or CHANGE in self.key:
            raise PipelineError(
                f"key={self.key!r} does not name columns, each once.", where=f"sink {self.name}", next="Correct it."
            )

    def publishes_by(self, resolve: Callable[[str], str]) -> dict[str, Any]:
        return {"table": resolve(self.table), "key": self.key}

    def open(self, opening: SinkOpening) -> Publisher:
        return _Publisher(self, opening)


class _Publisher:
    def __init__(self, sink: PostgresSink, opening: SinkOpening) -> None:
        self._sink, self._app_id = sink, opening.app_id
        name = opening.resolve(sink.table)
        self._where = f"sink {sink.name}, table {name}" + (
            f" of connection {sink.connection}" if sink.connection else ""
        )
        parts = name.split(".")
        if parts[-1] in (MARKERS, _STAGING):
            raise self._refusal(f"A table of rows cannot be called {parts[-1]}, as one of Weir's own is.", "Rename it.")
        self._table = ".".join(map(quoted, parts))
        self._markers = ".".join(map(quoted, [*parts[:-1], MARKERS]))
        self._server = Server(opening.options, self._where, PipelineError, opening.patience)

    def check(self, schema: pa.Schema) -> None:
        columns = self._columns(schema)

        def look(connection: Connection) -> None:
            self._check_table(connection, columns)
            self._check_rights(connection, schema)

        self._server.patiently(look)

    def rules(self, schema: pa.Schema) -> PostgresRules:
        columns = self._columns(schema)
        asked = "SELECT current_setting('server_encoding') AS encoding"
        described, (server,) = self._server.patiently(
            lambda connection: (connection.rows(_COLUMNS, self._table), connection.rows(asked))
        )
        there = {column["name"]: column for column in described}
        required = [
            name for name in columns if name in there and there[name]["required"] and name not in self._sink.key
        ]
        texts = [
            (name, _text_rule(there.get(name, {"type": type, "enum": False, "modifier": -1})))
            for name, type in columns.items()
            if type in ("text", "text[]")
        ]
        try:
            codec_of(server["encoding"])
        except LookupError:
            raise self._refusal(
                f"The database is in {server['encoding']}, and which letters that has is not known here.",
                "Take a database in UTF8.",
            ) from None
        change = (CHANGE, CHANGES, DELETES)
        return PostgresRules(self._sink.key, tuple(required), tuple(texts), server["encoding"], change)

    def prepare(self, schema: pa.Schema) -> None:
        columns = self._columns(schema)

        def create(connection: Connection) -> None:
            self._create(connection, self._markers, "app_id text PRIMARY KEY, checkpoint int8, at timestamptz")
            lines = [f"{quoted(name)} {type}" for name, type in columns.items()]
            if self._sink.key:
                lines.append(f"PRIMARY KEY ({', '.join(map(quoted, self._sink.key))})")
            marker = self._marker(connection)
            if marker is not None and not _exists(connection, self._table):
                log.warning(
                    "the table is not there and is made; rows of earlier checkpoints, if there were any, are not in it",
                    sink=self._sink.name, table=self._table, published=marker,
                )  # fmt: skip
            self._create(connection, self._table, ", ".join(lines))
            self._check_table(connection, columns)
            self._check_rights(connection, schema)

        self._server.patiently(create)

    def marker(self) -> int | None:
        return self._server.patiently(self._marker)

    def publish(self, previous: int | None, checkpoint: int, rows: Rows) -> Published:
        return self._server.patiently(lambda connection: self._publish(connection, previous, checkpoint, rows))

    def close(self) -> None:
        self._server.close()

    def _publish(self, connection: Connection, previous: int | None, checkpoint: int, rows: Rows) -> Published:
        marker = self._marker(connection)
        if marker is not None and marker >= checkpoint:
            return Published(0)
        if previous is None:
            self._create(connection, self._markers, "app_id text PRIMARY KEY, checkpoint int8, at timestamptz")
        elif marker is None:
            raise self._damage(None, previous, checkpoint)
        connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        connection.execute(_PATIENCE)
        columns = self._stage(connection, rows) if rows.count and rows.schema is not None else None
        if previous is None:
            connection.execute(f"INSERT INTO {self._markers} VALUES ($1) ON CONFLICT DO NOTHING", self._app_id)
        marker = self._marker(connection, "FOR UPDATE")
        if marker is not None and marker >= checkpoint:
            connection.execute("ROLLBACK")
            return Published(0)
        if marker != previous:
            raise self._damage(marker, previous, checkpoint)
        changed = self._apply(connection, columns, rows.schema) if columns is not None else 0
        connection.execute(
            f"UPDATE {self._markers} SET checkpoint = $2, at = now() WHERE app_id = $1", self._app_id, checkpoint
        )
        connection.execute("COMMIT")
        return Published(changed)

    def _marker(self, connection: Connection, lock: str = "") -> int | None:
        if not _exists(connection, self._markers):
            return None
        query = f"SELECT checkpoint FROM {self._markers} WHERE app_id = $1 {lock}"
        return next((row["checkpoint"] for row in connection.rows(query, self._app_id)), None)

    def _damage(self, marker: int | None, previous: int | None, checkpoint: int) -> DamageError:
        return DamageError(
            f"The table's marker is at {'no checkpoint' if marker is None else f'checkpoint {marker}'}, but "
            f"{'none' if previous is None else previous} was published before {checkpoint}.",
            where=f"{self._where}, {MARKERS} of {self._app_id}",
            next="Somebody has restored or altered the database. Bring it back as it was; or rewind the pipeline to "
            f"the checkpoint that the table has, with --to {marker or 0} --force. Is the marker alone gone, and are "
            f"the rows of checkpoint {previous or 0} there? INSERT INTO {self._markers} VALUES "
            f"({literal(self._app_id)}, {previous or 0}, now());",
        )

    def _create(self, connection: Connection, table: str, columns: str) -> None:
        """CREATE TABLE, unless it is there: one at a time, since two at once fail, with or without IF NOT EXISTS."""
        if _exists(connection, table):
            return
        connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        connection.execute("SELECT pg_advisory_xact_lock(hashtext('weir_markers'))")
        connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")
        connection.execute("COMMIT")

    def _columns(self, schema: pa.Schema) -> dict[str, str]:
        """Return the table's columns for rows of these, with their types in Postgres. Raises PipelineError."""
        for name in self._sink.key:
            if name not in schema.names:
                raise self._refusal(f"The rows have no column {name}, which is in the key.", "Correct the key.")
        if CHANGE in schema.names and not self._sink.key:
            raise self._refusal(
                "Rows of changes need a key, by which they replace and delete each other.", "Say key=... for this sink."
            )
        columns = {}
        for field in schema:
            if field.name == CHANGE:
                continue
            type = _type(field.type)
            if type is None:
                raise self._refusal(
                    f"The column {field.name} is a {field.type}, which has no type in Postgres here.",
                    "Hand out another type, or leave the column out.",
                )
            if len(field.name.encode()) > _LONGEST_NAME or field.name == _ROW:
                raise self._refusal(f"A column of Postgres cannot be called {field.name}.", "Rename it.")
            columns[field.name] = type
        return columns

    def _check_table(self, connection: Connection, columns: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Return what the table's columns are, by name; nothing of a table that is not there. Raises PipelineError."""
        kinds = connection.rows("SELECT relkind::text AS kind FROM pg_class WHERE oid = to_regclass($1)", self._table)
        if not kinds:
            return {}
        if kinds[0]["kind"] not in ("r", "p"):
            raise self._refusal("It is no table but a view, or something else of that name.", "Name a table.")
        there = {column["name"]: column for column in connection.rows(_COLUMNS, self._table)}
        for name, type in columns.items():
            if name not in there:
                raise self._refusal(
                    f"The table has no column {name}.",
                    f"ALTER TABLE {self._table} ADD COLUMN {quoted(name)} {type}; or leave the column out.",
                )
            reason = _misfit(type, there[name])
            if reason:
                raise self._refusal(
                    f"The table's column {name} {reason}.", f"Change it, or hand out what it takes: rows have {type}."
                )
        for name, column in there.items():
            if name not in columns and column["required"] and not (column["filled"] or column["generated"]):
                raise self._refusal(
                    f"The table's column {name} must not be null, and rows do not have it.", "Give it a default."
                )
        if self._sink.key:
            self._unique_key(connection)
        return there

    def _check_rights(self, connection: Connection, schema: pa.Schema) -> None:
        names = [name for name in schema.names if name != CHANGE]
        changes = CHANGE in schema.names
        rights.check(connection, self._where, self._table, self._markers, names, self._sink.key, changes)

    def _unique_key(self, connection: Connection) -> UniqueKey:
        """Return which values of the key the table takes for equal. Raises PipelineError."""
        keys, columns = unique_keys(connection, self._table, self._sink.key), ", ".join(map(quoted, self._sink.key))
        if not keys:
            raise self._refusal(
                f"The table has no unique index on {columns}, so rows cannot replace each other by it.",
                f"CREATE UNIQUE INDEX ON {self._table} ({columns});",
            )
        key = widest(keys)
        if key is None:
            raise self._refusal(
                f"The table has several unique indexes on {columns}, and each takes other values for equal.",
                "Drop all of them but the one by which rows replace each other.",
            )
        return key

    def _refusal(self, what: str, next: str) -> PipelineError:
        return PipelineError(what, where=self._where, next=next)

    def _stage(self, connection: Connection, rows: Rows) -> dict[str, str]:
        """Copy the rows, numbered, into a temporary table that the transaction's end drops."""
        schema = rows.schema
        assert schema is not None, "there are rows"
        columns = self._columns(schema)
        # Blanks at the end that a varchar(n) cuts off are cut off before keys are compared, by the server itself.
        types = columns | {
            column["name"]: f"varchar({column['modifier'] - 4})"
            for column in connection.rows(_COLUMNS, self._table)
            if column["type"] == "varchar" and column["modifier"] >= 4 and columns.get(column["name"]) == "text"
        }
        lines = [f"{quoted(field.name)} {types.get(field.name, 'text')}" for field in schema]
        connection.execute(f"CREATE TEMP TABLE {_STAGING} ({', '.join(lines)}, {_ROW} int8) ON COMMIT DROP")
        failures: list[Exception] = []
        numbered = pa.RecordBatchReader.from_batches(
            schema.append(pa.field(_ROW, pa.int64())), self._numbered(schema, rows, failures)
        )
        try:
            connection.copy(_STAGING, numbered)
        except Exception:
            if failures:  # the driver only says that its input has failed
                raise failures[0] from None
            raise
        return columns

    def _numbered(self, schema: pa.Schema, rows: Rows, failures: list[Exception]) -> Iterator[pa.RecordBatch]:
        number = 0
        try:
            for batch in rows.batches():
                for name in self._sink.key:
                    if batch.column(name).null_count:
                        raise self._refusal(
                            f"The column {name} is in the key, and null in {batch.column(name).null_count} rows.",
                            "Leave such rows out, or give them a value.",
                        )
                if CHANGE in schema.names:
                    unknown = set(pc.unique(batch.column(CHANGE)).to_pylist()) - set(CHANGES)
                    if unknown:
                        raise self._refusal(
                            f"{unknown.pop()!r} in {CHANGE} is no change.", f"It is {', '.join(CHANGES)}."
                        )
                numbers = pa.array(range(number, number + batch.num_rows), pa.int64())
                yield pa.RecordBatch.from_arrays([*batch.columns, numbers], [*schema.names, _ROW])
                number += batch.num_rows
        except Exception as error:
            failures.append(error)
            raise

    def _apply(self, connection: Connection, columns: dict[str, str], schema: Any) -> int:
        """Bring the staged rows into the table; returns how many rows of it have changed."""
        # The lock of any update: columns and indexes stay as they are read here. Somebody may have altered the table
        # since the commit, and a cast to another type would change values without a word. Servers before 16 let nobody
        # LOCK TABLE who may only insert, so a statement takes it that is not run.
        if not _exists(connection, self._table):
            raise self._refusal("The table does not exist: it was dropped or renamed.", "Bring it back, and run again.")
        connection.execute(f"PREPARE weir_lock AS INSERT INTO {self._table} SELECT WHERE false")
        connection.execute("DEALLOCATE weir_lock")
        there = self._check_table(connection, columns)
        into = ", ".join(map(quoted, columns))
        # Two texts may be one value of another type, so rows of one key are told apart by the table's.
        values = ", ".join(
            f"{quoted(name)}::{there[name]['written']} AS {quoted(name)}" if name in there else quoted(name)
            for name in columns
        )
        more = f", {CHANGE}" if CHANGE in schema.names else ""
        staged = f"(SELECT {values}, {_ROW}{more} FROM {_STAGING})"
        insert = f"INSERT INTO {self._table} ({into}) SELECT {into} FROM"
        if not self._sink.key:
            return self._changed(connection, f"{insert} {staged} AS typed ORDER BY {_ROW}")
        key = self._unique_key(connection)
        last = f"({newest(staged, key, _ROW)}) AS staged"
        is_delete = f"{CHANGE} IN {DELETES}"
        # The last row's spelling of a key stays too, else what the table has would depend on where epochs end.
        same = {column.name for column in key if not column.spelled}
        rest = ", ".join(f"{quoted(name)} = EXCLUDED.{quoted(name)}" for name in columns if name not in same)
        replace = f"ON CONFLICT ({', '.join(map(quoted, self._sink.key))}) DO "
        replace += f"UPDATE SET {rest}" if rest else "NOTHING"
        if CHANGE not in schema.names:
            return self._changed(connection, f"{insert} {last} {replace}")
        goes = f"{matches(key, 'stored', 'staged')} AND {is_delete}"
        return self._changed(connection, f"DELETE FROM {self._table} AS stored USING {last} WHERE {goes}") + (
            self._changed(connection, f"{insert} {last} WHERE NOT {is_delete} {replace}")
        )

    def _changed(self, connection: Connection, statement: str) -> int:
        (row,) = connection.rows(f"WITH changed AS ({statement} RETURNING 1) SELECT count(*) AS rows FROM changed")
        return int(row["rows"])


def _exists(connection: Connection, table: str) -> bool:
    (row,) = connection.rows("SELECT to_regclass($1) IS NOT NULL AS there", table)
    return bool(row["there"])


def _type(type: pa.DataType) -> str | None:
    """Return the Postgres name of an Arrow type, or None if Postgres has none that holds all its values."""
    if pa.types.is_timestamp(type) and type.unit != "ns":
        return "timestamptz" if type.tz else "timestamp"
    if pa.types.is_decimal(type) and type.scale >= 0:
        return f"numeric({type.precision},{type.scale})"
    if pa.types.is_list(type):
        of = _type(type.value_type)
        return f"{of}[]" if of is not None and not of.endswith("]") and not of.startswith("numeric") else None
    if pa.types.is_dictionary(type):
        return _type(type.value_type)
    return _TYPES.get(type)


def _text_rule(column: dict[str, Any]) -> TextRule:
    """Return the rule of a table's column for texts."""
    if column["enum"]:
        return TextRule("enum", labels=tuple(column["labels"]))
    type, modifier = column["type"].replace("text[]", "_text"), column["modifier"]
    return TextRule(type, modifier - 4 if type == "varchar" and modifier >= 4 else None)


def _misfit(type: str, column: dict[str, Any]) -> str | None:
    """Why a column of the table does not take values of a type; None if it does, and keeps each as it is."""
    if column["generated"]:
        return "is generated by the server"
    name, _, arguments = type.partition("(")
    if name.endswith("[]"):
        name = "_" + name.removesuffix("[]")
    if column["enum"] and name == "text":
        return None
    if column["type"] not in _WIDER.get(name, (name,)):
        return f"is of type {column['type']}"
    modifier = column["modifier"]
    if modifier >= 0 and column["type"] in ("timestamp", "timestamptz", "time") and modifier < 6:
        return f"keeps {modifier} digits of a second, so times would be rounded"
    if modifier >= 0 and column["type"] == "numeric":
        precision, scale = (modifier - 4) >> 16, (modifier - 4) & 0x7FF
        digits = [int(part) for part in arguments.rstrip(")").split(",")] if arguments else [_DIGITS[name], 0]
        if scale < digits[1] or precision - scale < digits[0] - digits[1]:
            return f"is numeric({precision},{scale}), which has too few digits"
    return None
