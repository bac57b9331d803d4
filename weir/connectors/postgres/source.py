"""A growing source from a query on a Postgres server: rows behind a cursor, which is a column that only rises.

A part is a closed range of the cursor, with the number of its rows and a digest of them, which the server computes when
the range is planned and again before an epoch is committed.

**Why the cursor has to be an xid8.** A row with cursor 7 may be committed after one with cursor 8 was read, since
sequences and clocks are read before the commit. With the id of the transaction that wrote the row (`xid8 DEFAULT
pg_current_xact_id()`) there is a bound: below `pg_snapshot_xmin(pg_current_snapshot())` every transaction has ended,
and what it has written is seen or will never be there. Rows at or above it wait for the next plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from state_ops.errors import InputError, PipelineError, VanishedError, WeirError
from state_ops.logs import Logger
from weir.connectors.postgres.connection import Connection, Server, literal, quoted
from weir.definition.source import (
    EARLIEST,
    LATEST,
    Batch,
    Connector,
    Lag,
    Limits,
    Opening,
    Part,
    Planned,
    Position,
    Rejected,
    Source,
    no_position,
)

log = Logger("weir.source")

_PARTITION = "rows"
_PART_ROWS = 50_000
_COUNTED = 1_000_000  # rows that wait are counted up to here
_RAW = 4000  # characters
_Q, _REASON, _RAW_TEXT = "weir_q", "weir_reason", "weir_raw"
_CURSORS = ("xid8", "int2", "int4", "int8", "numeric", "date", "timestamp", "timestamptz")
_SIMPLE = {
    "bool": pa.bool_(),
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "text": pa.string(),
    "varchar": pa.string(),
    "bpchar": pa.string(),
    "name": pa.string(),
    "bytea": pa.binary(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
}
_CAST: dict[str, tuple[str, pa.DataType]] = {
    "json": ("::text", pa.string()),
    "jsonb": ("::text", pa.string()),
    "uuid": ("::text", pa.string()),
    "oid": ("::int8", pa.int64()),
    "xid8": ("::text::int8", pa.int64()),
}
_OUTSIDE = "is infinite, or outside of the years 1 to 9999"
_BAD = {
    "date": ("NOT {0} BETWEEN '0001-01-01' AND '9999-12-31'", _OUTSIDE),
    "time": ("{0} = '24:00'", "is 24:00"),
    "timestamp": ("{0} < '0001-01-01 00:00+00' OR {0} >= '10000-01-01 00:00+00'", _OUTSIDE),
    "numeric": ("{0} = 'NaN'", "is NaN, which a decimal cannot be"),
    "array": ("array_ndims({0}) > 1", "is an array of several dimensions"),
    "xid8": ("{0} > '9223372036854775807'", "is larger than a whole number of 64 bits"),
}
_BAD["timestamptz"] = _BAD["timestamp"]
_ENDLESS = {
    **dict.fromkeys(("date", "timestamp", "timestamptz"), "NOT isfinite({0})"),
    "numeric": "{0} IN ('NaN', 'Infinity', '-Infinity')",
}
_HOLDER = (  # the oldest transaction that runs
    "SELECT xid::text AS transaction, holder, since::text FROM (SELECT backend_xid AS xid, "
    "'pid ' || pid || coalesce(', ' || state, '') || coalesce(', ' || nullif(application_name, ''), '') AS "
    "holder, xact_start AS since FROM pg_stat_activity UNION ALL SELECT transaction, 'prepared as ' || gid, "
    "prepared FROM pg_prepared_xacts) AS running WHERE xid = pg_snapshot_xmin(pg_current_snapshot())::xid"
)
_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresSource(Source):
    """The result of a query, over tables to which rows are only added.

    Attributes:
        query: A SELECT without ORDER BY and LIMIT.
        cursor: Its column that only rises. For exactly once it has the type xid8.
        may_miss: Another cursor will do: rows that are committed late, below what was read, are never read.
    """

    name: str = "postgres"
    query: str
    cursor: str
    may_miss: bool = False
    archive: bool = True

    def __post_init__(self) -> None:
        for holds, what, next in (
            (self.query.strip(), "The query is empty.", "Write a SELECT."),
            (self.cursor, "No cursor is named.", "Name the column that only rises."),
            (
                self.archive,
                "A table keeps no history, so what was read has to be archived for replays.",
                "Leave archive=False out.",
            ),
        ):
            if not holds:
                raise PipelineError(what, where=f"source {self.name}", next=next)

    def open(self, opening: Opening) -> Connector:
        return _Connector(self, opening)


class _Column(NamedTuple):
    """A column of the query. select: its value in SQL. bad: a condition for values that Arrow does not have, and what
    such a value is."""

    name: str
    kind: str
    type: pa.DataType
    select: str
    bad: tuple[str, str] | None


class _Connector:
    def __init__(self, source: PostgresSource, opening: Opening) -> None:
        self._source = source
        self._where = f"source {source.name}" + (f" of connection {source.connection}" if source.connection else "")
        self._server = Server(opening.options, self._where, InputError, opening.patience)
        self._query = f"(\n{source.query.strip().rstrip(';')}\n) AS {_Q}"
        self._cursor = f"{_Q}.{quoted(source.cursor)}"
        self._order = f'ORDER BY {self._cursor}, {_Q}::text COLLATE "C"'
        self._read_columns: list[_Column] | None = None
        self._holder: str | None = None

    def begin(self, start: str | datetime | Position) -> Position:
        with self._server.connection() as connection:
            kind = self._cursor_kind(connection)
            if isinstance(start, Mapping):
                return self._checked(connection, kind, start)
            if start == EARLIEST:
                return _position(None)
            if start == LATEST:
                return _position(self._newest(connection, kind))
        if isinstance(start, datetime) and kind in ("date", "timestamp", "timestamptz"):
            before = (start.astimezone(UTC).replace(tzinfo=None) if start.tzinfo else start) - timedelta(microseconds=1)
            if kind == "date":
                return _position(before.date().isoformat())
            return _position(f"{before.isoformat(' ')}{'+00' if kind == 'timestamptz' else ''}")
        raise PipelineError(
            f"start={start!r} is no place to begin, by a cursor of type {kind}.",
            where=self._where,
            next='Say "earliest", "latest", a position {"after": "..."}; or a time where the cursor is one.',
        )

    def _checked(self, connection: Connection, kind: str, position: Position) -> Position:
        """Return a position that a person has written, as the server spells it. Raises ConfigurationError."""
        after = position.get("after")
        if set(position) != {"after"} or not isinstance(after, str | None):
            raise no_position(position, '{"after": "..."}', self._where)
        if after is None:
            return _position(None)
        try:
            (there,) = connection.rows(f"SELECT {literal(after)}::{kind}::text AS after")
        except InputError as error:
            raise no_position(position, f'{{"after": "..."}}, of type {kind}', self._where) from error
        return _position(there["after"])

    def plan(
        self, position: Position, limits: Limits, upto: Position | None = None, hold: Collection[str] = ()
    ) -> Planned:
        after = position["after"]
        if hold:  # it has one partition
            return Planned((), _position(after), True, {_PARTITION: False})
        with self._server.connection() as connection:
            self._read_columns = None  # the table may have other columns by now
            kind = self._cursor_kind(connection)
            connection.execute(_SNAPSHOT)
            self._check(connection, kind, after)
            newest = self._newest(connection, kind)
            bounds = [newest] if upto is None else [newest, upto["after"]]
            parts: tuple[Part, ...] = ()
            more = False
            if None not in bounds:
                within = [f"{self._cursor} <= {literal(bound)}::{kind}" for bound in bounds if bound is not None]
                parts = self._parts(connection, kind, [*self._behind(kind, after), *within], limits)
                after = parts[-1].place["high"] if parts else after
                more = self._any(connection, [*self._behind(kind, after), *within])
            at_end = not more and not self._any(connection, self._behind(kind, after))
            if not (parts or at_end) and kind == "xid8" and upto is None:
                self._say_who_holds(connection)
            connection.execute("COMMIT")
        return Planned(parts, _position(after), more, {_PARTITION: at_end})

    def read(self, part: Part) -> Iterator[Batch]:
        with self._server.connection() as connection:
            kind, columns = self._cursor_kind(connection), self._columns(connection)
            reason = _reason(columns)
            selected = ", ".join(f"{column.select} AS {quoted(column.name)}" for column in columns)
            raw = f"CASE WHEN {reason} IS NOT NULL THEN left({_Q}::text, {_RAW}) END"
            query = (
                f"SELECT {selected}, {reason} AS {_REASON}, {raw} AS {_RAW_TEXT} FROM {self._query} "
                f"WHERE {self._within(kind, part)} {self._order}"
            )
            number = 0
            connection.execute(_SNAPSHOT)  # what is compared is what is read
            self._compare(connection, kind, part)
            with connection.stream(query) as reader:
                for batch in reader:
                    yield _decoded(batch, columns, number, self._source.cursor)
                    number += batch.num_rows
            connection.execute("COMMIT")

    def verify(self, parts: Sequence[Part]) -> None:
        with self._server.connection() as connection:
            kind = self._cursor_kind(connection) if parts else ""
            for part in parts:
                self._compare(connection, kind, part)

    def _compare(self, connection: Connection, kind: str, part: Part) -> None:
        """Raise InputError if the rows of a part are not those that were planned."""
        (there,) = connection.rows(
            f"SELECT count(*) AS rows, sum(hashtextextended({_Q}::text, 0))::text AS digest "
            f"FROM {self._query} WHERE {self._within(kind, part)}"
        )
        if (there["rows"], there["digest"]) != (part.rows, part.place["digest"]):
            raise self._changed(part)

    def lag(self, position: Position) -> Lag:
        with self._server.connection() as connection:
            kind = self._cursor_kind(connection)
            waiting = (
                f"SELECT 1 FROM {self._query} {_where(self._behind(kind, position['after']))} LIMIT {_COUNTED + 1}"
            )
            (counted,) = connection.rows(f"SELECT count(*) AS rows FROM ({waiting}) AS waiting")
        return Lag(counted["rows"], is_estimate=counted["rows"] > _COUNTED)

    def where(self, part: Part) -> str:
        return f"{self._where}, {self.title(part)}"

    def title(self, part: Part) -> str:
        return f"rows with {self._source.cursor} from {part.place['low']} to {part.place['high']}"

    def places(self, part: Part, rows: int) -> Sequence[str | None]:
        cursors: list[str] = []
        with suppress(WeirError), self._server.connection() as connection:
            self._compare(connection, self._cursor_kind(connection), part)
            kind, reason = self._cursor_kind(connection), _reason(self._columns(connection))
            good = f"{self._within(kind, part)} AND {reason} IS NULL"
            found = connection.rows(f"SELECT {self._cursor}::text AS c FROM {self._query} WHERE {good} {self._order}")
            cursors = [row["c"] for row in found]
        return [f"{self._source.cursor} = {cursor}" for cursor in cursors] if len(cursors) == rows else [None] * rows

    def committed(self, position: Position) -> None:
        pass

    def close(self) -> None:
        self._server.close()

    def _columns(self, connection: Connection) -> list[_Column]:
        """Return the query's columns. Raises InputError for one of a type that has no like in Arrow."""
        if self._read_columns is None:
            fields = list(connection.columns(f"SELECT * FROM {self._query}"))
            names = [field.name for field in fields]
            twice = {name for name in names if names.count(name) > 1} | {_Q, _REASON, _RAW_TEXT} & set(names)
            if twice:
                raise self._refusal(
                    f"The query has no single column {min(twice)}.", "Give each column a name of its own, with AS."
                )
            self._read_columns = [self._column(field) for field in fields]
            self._check_event_time(self._read_columns)
        return self._read_columns

    def _column(self, field: pa.Field) -> _Column:
        metadata = field.metadata or {}
        kind = metadata.get(b"POSTGRESQL:type", b"?").decode()
        name = f"{_Q}.{quoted(field.name)}"
        cast, type, bad = "", _SIMPLE.get(kind), _BAD.get(kind)
        if kind in _CAST:
            cast, type = _CAST[kind]
        elif kind == "numeric":
            modifier = int(metadata.get(b"POSTGRESQL:typmod", b"-1"))
            precision, scale = (modifier - 4) >> 16, (modifier - 4) & 0x7FF
            if modifier < 0 or precision > 38 or scale > precision:
                raise self._refusal(
                    f"The column {field.name} is a numeric that no decimal of 38 digits holds for certain.",
                    f"Say its digits in the query: {field.name}::numeric(38, 9), or hand out {field.name}::text, which "
                    "holds each value.",
                )
            type = pa.decimal128(precision, scale)
        elif kind.startswith("_") and kind[1:] in _SIMPLE and kind[1:] not in _BAD:
            # A slice counts its values from 1: the driver fails over an array that counts from elsewhere.
            cast, type, bad = "[:]", pa.list_(_SIMPLE[kind[1:]]), _BAD["array"]
        if type is None:
            raise self._refusal(
                f"The column {field.name} is of a type that has no like in Arrow ({kind}).",
                f"Cast it in the query, e.g. {field.name}::text, or leave it out.",
            )
        if bad is None:
            return _Column(field.name, kind, type, f"{name}{cast}", None)
        condition = bad[0].format(name)
        value = f"CASE WHEN {condition} THEN NULL ELSE ({name}){cast} END"
        return _Column(field.name, kind, type, value, (condition, bad[1]))

    def _check_event_time(self, columns: list[_Column]) -> None:
        named = self._source.event_time
        kinds = {column.name: column.kind for column in columns}
        if named is not None and kinds.get(named) not in ("timestamp", "timestamptz"):
            raise self._refusal(f"The event time {named} is no timestamp of the query.", f"It has {', '.join(kinds)}.")

    def _cursor_kind(self, connection: Connection) -> str:
        """Return the cursor's type. Raises PipelineError where rows could be missed and nobody has said that they
        may."""
        kind = next((column.kind for column in self._columns(connection) if column.name == self._source.cursor), None)
        if kind not in _CURSORS:
            what = "is no column of the query" if kind is None else f"is of type {kind}"
            raise self._refusal(
                f"The cursor {self._source.cursor} {what}.", f"It has to be of type {', '.join(_CURSORS)}."
            )
        if kind != "xid8" and not self._source.may_miss:
            raise PipelineError(
                f"The cursor {self._source.cursor} is of type {kind}: rows that are committed late, below what was "
                "read, would be missed.",
                where=self._where,
                next="Add a column of type xid8 DEFAULT pg_current_xact_id() and name it, or say may_miss=True.",
            )
        return kind

    def _check(self, connection: Connection, kind: str, after: str | None) -> None:
        if self._any(connection, [f"{self._cursor} IS NULL"]):
            raise self._refusal(
                f"There are rows whose {self._source.cursor} is null, so they would never be read.",
                "Give them a value, or leave them out in the query.",
            )
        if kind in _ENDLESS and self._any(connection, [_ENDLESS[kind].format(self._cursor)]):
            raise self._refusal(
                f"There are rows whose {self._source.cursor} is infinite or NaN, so nothing could come behind them.",
                "Give them a value, or leave them out in the query.",
            )
        if kind == "xid8" and after is not None:
            (there,) = connection.rows("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8 AS next")
            if int(after) >= there["next"]:
                raise self._refusal(
                    f"Rows of transaction {after} have been read, but the server has not come that far "
                    f"({there['next']}): it was restored, or is another one, so that new rows would be missed.",
                    "Bring the server back, or seek the source to where it is to go on.",
                )

    def _say_who_holds(self, connection: Connection) -> None:
        """Warn once that rows wait for the oldest running transaction."""
        holder = connection.rows(_HOLDER)
        if holder and holder[0]["transaction"] != self._holder:
            self._holder = holder[0]["transaction"]
            log.warning(
                "rows wait for a transaction that was begun before they were written, and still runs",
                source=self._source.name,
                **holder[0],
                next="End it, and the rows behind it are read.",
            )

    def _newest(self, connection: Connection, kind: str) -> str | None:
        """Return the last value of the cursor that may be read; None if there is none."""
        if kind == "xid8":
            newest = "(pg_snapshot_xmin(pg_current_snapshot())::text::int8 - 1)::text"
            (row,) = connection.rows(f"SELECT {newest} AS newest")
        else:
            (row,) = connection.rows(f"SELECT max({self._cursor})::text AS newest FROM {self._query}")
        newest_cursor: str | None = row["newest"]
        return newest_cursor

    def _parts(self, connection: Connection, kind: str, conditions: list[str], limits: Limits) -> tuple[Part, ...]:
        """Return the next ranges: as many rows and bytes as fit, and at least one value of the cursor."""
        cursor = f"{self._cursor}::text::int8" if kind == "xid8" else self._cursor
        rows, size = max(1, min(limits.rows, _PART_ROWS)), max(1, limits.bytes)
        first = (
            f"SELECT {cursor} AS c, octet_length({_Q}::text) AS size, hashtextextended({_Q}::text, 0) AS hash "
            f"FROM {self._query} {_where(conditions)} ORDER BY {self._cursor} "
            f"FETCH FIRST {max(1, min(limits.rows, rows * limits.parts))} ROWS WITH TIES"
        )
        numbered = (  # rows of one cursor have one number
            f"SELECT *, (count(*) OVER (ORDER BY c) - 1) / {rows} AS by_rows, "
            f"(sum(size) OVER (ORDER BY c) - 1) / {size} AS by_size FROM ({first}) AS first"
        )
        ranges = connection.rows(
            "SELECT min(c)::text AS low, max(c)::text AS high, count(*) AS rows, sum(size)::int8 AS bytes, "
            f"sum(hash)::text AS digest FROM ({numbered}) AS numbered GROUP BY by_rows, by_size ORDER BY min(c)"
        )
        parts: list[Part] = []
        total_rows = total_bytes = 0
        for place in ranges[: max(1, limits.parts)]:
            count, length = place.pop("rows"), place.pop("bytes")
            total_rows, total_bytes = total_rows + count, total_bytes + length
            if parts and (total_rows > limits.rows or total_bytes > limits.bytes):
                break
            named = repr((self._source.query, self._source.cursor, sorted(place.items())))
            parts.append(Part(xxhash.xxh128_hexdigest(named.encode()), _PARTITION, place, count, length))
        return tuple(parts)

    def _behind(self, kind: str, after: str | None) -> list[str]:
        return [] if after is None else [f"{self._cursor} > {literal(after)}::{kind}"]

    def _within(self, kind: str, part: Part) -> str:
        low, high = (f"{literal(part.place[end])}::{kind}" for end in ("low", "high"))
        return f"{self._cursor} BETWEEN {low} AND {high}"

    def _any(self, connection: Connection, conditions: list[str]) -> bool:
        (row,) = connection.rows(f"SELECT EXISTS (SELECT FROM {self._query} {_where(conditions)}) AS there")
        return bool(row["there"])

    def _refusal(self, what: str, next: str) -> InputError:
        return InputError(what, where=self._where, next=next)

    def _changed(self, part: Part) -> InputError:
        """Return the error for rows that changed.

        If rows may be missed, a row that has just been committed is no damage: the next plan has it.
        """
        kind = VanishedError if self._source.may_miss else InputError
        return kind(
            "Rows are not what they were when they were planned: some were changed, deleted or added below the cursor.",
            where=self.where(part),
            next="Read only tables to which rows are added. A new run reads the rows as they are now.",
        )


def _reason(columns: list[_Column]) -> str:
    """Why a row cannot be decoded, in SQL; null if it can be."""
    reasons = " ".join(
        f"WHEN {column.bad[0]} THEN {literal(f'{column.name} {column.bad[1]}')}" for column in columns if column.bad
    )
    return f"CASE {reasons} END" if reasons else "NULL::text"


def _decoded(batch: pa.RecordBatch, columns: list[_Column], before: int, cursor: str) -> Batch:
    """Return the rows that Arrow can hold, and those with a value that it cannot.

    before: The number of the part's rows before these.
    """
    reasons, raw, at = batch.column(_REASON), batch.column(_RAW_TEXT), batch.column(cursor)
    rejected = tuple(
        Rejected(before + number + 1, f"{reason} (of the row with {cursor} = {at[number]})", raw[number].as_py())
        for number, reason in enumerate(reasons)
        if reasons.null_count < len(reasons) and reason.is_valid
    )
    arrays = [_typed(batch.column(column.name), column.type) for column in columns]
    rows = pa.table(arrays, schema=pa.schema([(column.name, column.type) for column in columns]))
    return Batch(rows.filter(pc.is_null(reasons)) if rejected else rows, rejected)


def _typed(array: pa.Array, type: pa.DataType) -> pa.Array:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array if array.type == type else array.cast(type)


def _where(conditions: list[str]) -> str:
    return f"WHERE {' AND '.join(f'({condition})' for condition in conditions)}" if conditions else ""


def _position(after: str | None) -> dict[str, Any]:
    return {"after": after}
