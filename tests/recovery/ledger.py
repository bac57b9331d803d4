"""A sink that is no table, for tests: a database of SQLite, whose transactions hold marker and rows together."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from state_ops.errors import DamageError, PipelineError
from weir.definition.sink import Published, Publisher, Rows, Sink, SinkOpening


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSink(Sink):
    """What it is given can be looked at with `rows_of`."""

    path: str
    takes_back: bool = False

    @property
    def stays(self) -> str | None:
        return None if self.takes_back else "what ledger has been given cannot be taken back"

    def open(self, opening: SinkOpening) -> Publisher:
        return Ledger(opening.resolve(self.path), opening.app_id)


class Ledger:
    def __init__(self, path: str, app_id: str) -> None:
        self._path, self._app = path, app_id
        self.open = True

    def check(self, schema: pa.Schema) -> None:
        if "refused" in schema.names:
            raise PipelineError("The ledger takes no column 'refused'.", next="Leave it out.")

    def prepare(self, schema: pa.Schema) -> None:  # noqa: ARG002  the signature is the Protocol's
        with transaction(self._path):
            pass

    def marker(self) -> int | None:
        with transaction(self._path) as connection:
            return _marker(connection, self._app)

    def publish(self, previous: int | None, checkpoint: int, rows: Rows) -> Published:
        with transaction(self._path) as connection:
            marker = _marker(connection, self._app)
            if marker is not None and marker >= checkpoint:
                return Published(0)
            return self._booked(connection, marker, previous, checkpoint, rows)

    def take_back(self, previous: int | None, checkpoint: int, to: int | None, rows: Rows) -> Published:
        with transaction(self._path) as connection:
            marker = _marker(connection, self._app)
            if marker is not None and marker >= checkpoint:
                return Published(0)
            connection.execute("DELETE FROM booked WHERE checkpoint > ?", (to or 0,))
            return self._booked(connection, marker, previous, checkpoint, rows)

    def _booked(
        self, connection: sqlite3.Connection, marker: int | None, previous: int | None, checkpoint: int, rows: Rows
    ) -> Published:
        if marker != previous:
            raise DamageError(f"The ledger is at {marker}, not at {previous}.")
        given = [row for batch in rows.batches() for row in batch.to_pylist()]
        assert len(given) == rows.count
        connection.executemany(
            "INSERT INTO booked VALUES (?, ?, ?)", [(checkpoint, row["id"], row["amount"]) for row in given]
        )
        connection.execute("INSERT OR REPLACE INTO markers VALUES (?, ?)", (self._app, checkpoint))
        return Published(len(given))

    def close(self) -> None:
        self.open = False


def _marker(connection: sqlite3.Connection, app: str) -> int | None:
    row = connection.execute("SELECT id FROM markers WHERE app = ?", (app,)).fetchone()
    return row[0] if row else None


@contextmanager
def transaction(path: str) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE IF NOT EXISTS booked (checkpoint INTEGER, id TEXT, amount INTEGER)")
        connection.execute("CREATE TABLE IF NOT EXISTS markers (app TEXT PRIMARY KEY, id INTEGER)")
        yield connection
        connection.execute("COMMIT")
    finally:
        connection.close()  # what is not committed is rolled back


def rows_of(path: str) -> list[tuple[str, int]]:
    """What the ledger has, sorted."""
    with transaction(path) as connection:
        return sorted(connection.execute("SELECT id, amount FROM booked").fetchall())
