"""Connections to a Postgres server, and what its errors mean to the operator.

ADBC's driver is loaded when the first connection is made, so that definitions can be imported without it.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pyarrow as pa

from state_ops import extras
from state_ops.errors import ConfigurationError, InputError, TransientError, WeirError, plainly
from state_ops.logs import Logger
from weir.definition.source import RUNNING

log = Logger("weir.sink")

Done = TypeVar("Done")

_DEFAULTS = {
    "application_name": "weir",
    "tcp_user_timeout": "60000",  # milliseconds in which a server that is gone is noticed
    "keepalives_idle": "30",  # seconds, and the same while its answer is waited for
    "keepalives_interval": "10",
    "keepalives_count": "3",
}
# What texts of values look like, and so digests of rows, must not depend on how the role or the database is set up.
_SETTINGS = {
    "TimeZone": "UTC",
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
}
# The driver writes and takes for UTF-8 whatever a session speaks, which without a word is the database's own encoding.
# A database without one hands out bytes, and what is no text among them is found where all values are looked at.
_ENCODING = "CASE current_setting('server_encoding') WHEN 'SQL_ASCII' THEN 'SQL_ASCII' ELSE 'UTF8' END"
_CONNECT_SECONDS = 10
_SECRETS = ("password", "sslpassword")
_TRANSIENT = ("08", "25P03", "25P04", "53", "55006", "55P03", "57", "58", "72", "XX")
_CONFLICTS = ("40",)
_READ_ONLY = "25006"
_VALUES = "22"
_CONFIGURATION = ("28", "3D", "42501")
_REACHED = "See whether it is up and can be reached from here, then run again."
_NEXT = {
    "55P03": "Somebody else's transaction holds the lock: find it by pg_locks and pg_stat_activity, and end it.",
    "57014": "Run again. If it was statement_timeout and comes again, raise that for this role, or in the connection: "
    "options: -c statement_timeout=10min.",
    "25P04": "Run again. If it comes again, raise transaction_timeout for this role.",
}
_OF_A_QUERY = (
    "A row has a value that the query cannot work with: leave such rows out by WHERE, or hand the value out as text."
)
_ATTEMPTS = 8
_FIRST_PAUSE = 0.1  # seconds; each later one is twice as long
_DETAIL = re.compile(r"^DETAIL:\s+(.*)$", re.MULTILINE)
_NAMED = (("constraint", "CONSTRAINT_NAME"), ("column", "COLUMN_NAME"))
_MOST_SHOWN = 200  # characters of what the server says of a row
_AWAY = ("connect", "server closed", "canceling", "terminating", "could not receive", "could not send")
_SEVERITY = re.compile(r"^.*(?:ERROR|FATAL|PANIC):  ")
# A server that starts, or has no connection left, speaks of roles and databases too.
_REFUSALS = re.compile(
    "authentication|password|pg_hba|SSL|certificate|invalid connection option|permission denied|not permitted"
    '|(?:role|database) "[^"]*" does not exist|configuration parameter|for parameter'
)


class Connection:
    """One connection. Statements are transactions of their own outside of BEGIN and COMMIT.

    Args:
        refused: What is raised for statements that the server does not take as they are.
    """

    def __init__(self, connected: Any, where: str, refused: type[WeirError]) -> None:
        self._connected, self._where, self._refused = connected, where, refused

    def execute(self, statement: str, *parameters: Any) -> None:
        """Run a statement. parameters: $1, $2, ..., none of which is None."""
        self.rows(statement, *parameters)

    def rows(self, statement: str, *parameters: Any) -> list[dict[str, Any]]:
        """Run a statement and return what it answers."""
        with translated(self._where, self._refused), self._connected.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            rows: list[dict[str, Any]] = cursor.fetch_arrow_table().to_pylist()
            return rows

    @contextmanager
    def stream(self, query: str, *parameters: Any) -> Iterator[pa.RecordBatchReader]:
        """Run a query whose answer comes in batches. It has to be read to its end before the next statement."""
        with translated(self._where, self._refused), self._connected.cursor() as cursor:
            cursor.execute(query, parameters or None)
            yield cursor.fetch_record_batch()

    def columns(self, query: str) -> pa.Schema:
        """Return the columns of a query, with the server's types in their metadata. The query is not run."""
        with translated(self._where, self._refused), self._connected.cursor() as cursor:
            return cursor.adbc_execute_schema(query)

    def copy(self, table: str, batches: pa.RecordBatchReader) -> None:
        """COPY batches into a temporary table of this connection."""
        with translated(self._where, self._refused), self._connected.cursor() as cursor:
            cursor.adbc_ingest(table, batches, mode="append", temporary=True)

    def answers(self) -> bool:
        """Return whether the server still has the connection.

        An idle connection is ended by a restart, a time limit or a proxy.
        """
        try:
            self.execute("SELECT 1")
        except WeirError:
            return False
        return True

    def close(self) -> None:
        self._connected.close()


class Server:
    """A server, with the connections that nobody uses at the moment.

    Args:
        options: Keywords of libpq: host, port, dbname, user, password, sslmode, ...
        where: What errors say of the place.
        refused: As for `Connection`.
        patience: Seconds after which a server that does not answer, or somebody's lock, is waited for no longer.
    """

    def __init__(
        self, options: Mapping[str, str], where: str, refused: type[WeirError], patience: float = RUNNING
    ) -> None:
        self._options, self._where, self._refused, self._patience = options, where, refused, patience
        self._idle: list[Connection] = []

    def patiently(self, action: Callable[[Connection], Done]) -> Done:
        """Return what an action by a connection returns. Where it fails in a way that may pass, do it again.

        Args:
            action: It changes nothing if it is done twice: nobody knows whether a COMMIT without an answer has landed.
        """
        until = time.monotonic() + self._patience
        for attempt in range(_ATTEMPTS - 1):
            try:
                with self.connection() as connection:
                    return action(connection)
            except TransientError as error:
                pause = random.uniform(0.5, 1) * _FIRST_PAUSE * 2**attempt
                if time.monotonic() + pause > until:
                    raise
                log.warning("the Postgres server is asked again", where=self._where, error=plainly(error))
                time.sleep(pause)
        with self.connection() as connection:
            return action(connection)

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Yield a connection for the calling thread. After an error it is closed, which rolls back what it has done."""
        connection = self._waiting() or self._connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)

    def _waiting(self) -> Connection | None:
        """Return a connection that nobody uses and that the server still has."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.answers():
                return connection
            connection.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _connect(self) -> Connection:
        with extras.needed_for("Postgres", self._where):
            from adbc_driver_postgresql import dbapi
        secrets = [value for name, value in self._options.items() if name in _SECRETS]
        with translated(self._where, self._refused, secrets):
            connected = dbapi.connect(_info(self._options, self._patience), autocommit=True)
            connection = Connection(connected, self._where, self._refused)
        settings = {**_SETTINGS, "lock_timeout": f"{math.ceil(self._patience)}s"}
        calls = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in settings.items())
        connection.execute(f"SELECT set_config('client_encoding', {_ENCODING}, false), {calls}")
        return connection


@contextmanager
def translated(where: str, refused: type[WeirError], secrets: list[str] | None = None) -> Iterator[None]:
    """Errors of the driver as errors that say what to do. They are raised from nothing: the driver's own say less, and
    might show what must not be shown."""
    from adbc_driver_manager import Error

    try:
        yield
    except (Error, pa.ArrowException, OSError) as error:  # Arrow's reader has no error but its own
        meaning = _meaning(error, where, refused, secrets or [])
    else:
        return
    raise meaning


def _meaning(error: Any, where: str, refused: type[WeirError], secrets: list[str]) -> WeirError:
    details = {_text(name): value for name, value in getattr(error, "details", ())}
    if not details and (said := _DETAIL.search(str(error))):  # Arrow's reader has the server's words alone
        details["PG_DIAG_MESSAGE_DETAIL"] = said[1]
    primary = details.get("PG_DIAG_MESSAGE_PRIMARY", str(error).rpartition("[libpq] ")[2] or str(error))
    text = primary.decode(errors="replace") if isinstance(primary, bytes) else primary
    for secret in secrets:
        text = text.replace(secret, "***")
    text = text.strip().splitlines()[0].rstrip(".")  # what follows may show rows
    state = _state(error, text)
    if "Failed to connect" not in text:
        text = _SEVERITY.sub("", text)
    if state.startswith(_CONFIGURATION):
        return ConfigurationError(
            f"The Postgres server refuses: {text}.",
            where=where,
            next="Correct the connection's options, or grant the right.",
        )
    if state.startswith(_CONFLICTS):
        return TransientError(f"A transaction lost against another one: {text}.", where=where, next="Run again.")
    if state == _READ_ONLY:
        return takes_no_writes(text, where)
    if not state or state.startswith(_TRANSIENT):
        return TransientError(
            f"The Postgres server could not be asked: {text}.", where=where, next=_NEXT.get(state, _REACHED)
        )
    named = [
        f"{what} {name}" for what, field in _NAMED if (name := _said(details, field, secrets)) and name not in text
    ]
    more = [*([f"SQLSTATE {state}"] if state != "?" else []), *named]
    listed, row = ", ".join(more), _said(details, "MESSAGE_DETAIL", secrets)
    return refused(
        f"The Postgres server refuses a statement: {text}{f' ({listed})' if more else ''}.",
        where=f"{where}: {row}" if row else where,
        next=_OF_A_QUERY if refused is InputError and state.startswith(_VALUES) else "",
    )


def takes_no_writes(why: str, where: str) -> TransientError:
    """Return the error of a server, database or role that only reads.

    Args:
        why: What says so, as a clause.
        where: The place, for a person.
    """
    return TransientError(
        f"The Postgres server takes no writes: {why}.",
        where=where,
        next="It is a standby, or default_transaction_read_only is on for its database or this role: wait until it is "
        "the primary, name all hosts with target_session_attrs=read-write, or reset that; then run again.",
    )


def _state(error: Any, text: str) -> str:
    """Return the SQLSTATE of an error; where the driver has none, "" for a server that is away and "?" for others."""
    from adbc_driver_manager import AdbcStatusCode

    state: str | None = getattr(error, "sqlstate", None)
    if state:
        return state
    if "Failed to connect" in text and _REFUSALS.search(text.rpartition(" failed: ")[2]):
        return "28000"
    is_away = getattr(error, "status_code", None) == AdbcStatusCode.IO or any(words in text for words in _AWAY)
    return "" if is_away else "?"


def _text(raw: Any) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)


def _said(details: Mapping[str, Any], field: str, secrets: Sequence[str]) -> str:
    """Return one field of the server's error on one line, without control characters; empty if it has none.

    The detail names the row, by its key or its first columns, which is what a person needs to find it.
    """
    text = _text(details.get(f"PG_DIAG_{field}", ""))
    for secret in secrets:
        text = text.replace(secret, "***")
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _info(options: Mapping[str, str], patience: float) -> str:
    """Return the options as libpq takes them in one text."""
    options = {**_DEFAULTS, "connect_timeout": str(math.ceil(min(patience, _CONNECT_SECONDS))), **options}
    quoted = {name: value.replace("\\", r"\\").replace("'", r"\'") for name, value in options.items()}
    return " ".join(f"{name}='{value}'" for name, value in quoted.items())


def quoted(name: str) -> str:
    """Return a name of a column, table or schema as SQL has it, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text as SQL has it."""
    escaped = text.replace("\\", "\\\\").replace("'", "''")
    return f"E'{escaped}'"
