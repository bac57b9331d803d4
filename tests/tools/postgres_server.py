"""A real Postgres server, which the tests of a process start once for themselves."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.tools.servers import missing, needs

PLACES = ["/usr/lib/postgresql/*/bin", "/usr/local/pgsql/bin", "/opt/homebrew/opt/postgresql@*/bin"]
PASSWORD = "p@ss:w/rd 1"  # characters that a URL would take for something else


@dataclass(frozen=True)
class Postgres:
    """A server on 127.0.0.1 with empty databases: `dagster`, and `rows` for sources and sinks."""

    port: int
    command: tuple[str, ...] = ()
    log: Path = Path(os.devnull)
    options_of_process: dict[str, Any] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Start it and wait until it answers."""
        with self.log.open("ab") as output:
            process = subprocess.Popen(self.command, stdout=output, stderr=subprocess.STDOUT, **self.options_of_process)
        self.processes.append(process)
        _wait(self, process, self.log)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT ends sessions and closes files, SIGQUIT is a crash, SIGTERM waits for sessions."""
        process = self.processes.pop()
        process.send_signal(how)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "WEIR_DAGSTER_INSTANCE": "postgres",
            "DAGSTER_POSTGRES_HOST": "127.0.0.1",
            "DAGSTER_POSTGRES_PORT": str(self.port),
            "DAGSTER_POSTGRES_USER": "weir",
            "DAGSTER_POSTGRES_PASSWORD": PASSWORD,
            "DAGSTER_POSTGRES_DB": "dagster",
        }

    @property
    def options(self) -> dict[str, str]:
        """As a connection of the configuration has them."""
        where = {"host": "127.0.0.1", "port": str(self.port), "dbname": "rows"}
        return {**where, "user": "weir", "password": PASSWORD}

    def query(self, statement: str, database: str = "dagster") -> list[tuple[Any, ...]]:
        import psycopg2

        where = {"host": "127.0.0.1", "port": self.port, "user": "weir", "password": PASSWORD, "dbname": database}
        with closing(psycopg2.connect(**where, connect_timeout=30)) as connection:
            connection.autocommit = True  # a database cannot be created in a transaction
            with connection.cursor() as cursor:
                cursor.execute(statement)
                return cursor.fetchall() if cursor.description else []

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        return self.query(statement, "rows")


def _user() -> dict[str, Any]:
    """Who the server runs as: it refuses root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
            return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        except KeyError:
            continue
    return missing("Postgres refuses to run as root, and there is no user postgres or nobody")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with serving() as server:
        yield server


@contextmanager
def serving() -> Iterator[Postgres]:
    """A server with data of its own, which are gone afterwards."""
    initdb, server = (needs(name, "postgresql", PLACES) for name in ("initdb", "postgres"))
    who = _user()
    home = Path(tempfile.mkdtemp(prefix="weir-postgres-"))  # not below pytest's own directory, which is root's alone
    secret, data, log = home / "password", home / "data", home / "log"
    try:
        secret.write_text(PASSWORD)
        for path in (home, secret):
            os.chown(path, who.get("user", -1), who.get("group", -1))
        options = {**who, "cwd": home, "env": {"PATH": os.environ["PATH"], "LC_ALL": "C"}}
        command = [
            str(initdb),
            "-D",
            str(data),
            "-U",
            "weir",
            "-A",
            "scram-sha-256",
            f"--pwfile={secret}",
            "-E",
            "UTF8",
            "-N",
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120, **options)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            database = Postgres(free.getsockname()[1])
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off", "autovacuum": "off"}
        run = [str(server), "-D", str(data), "-p", str(database.port)]
        run += [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        database = replace(database, command=tuple(run), log=log, options_of_process=options)
        try:
            database.start()
            for name in ("dagster", "rows"):
                database.query(f"CREATE DATABASE {name}", "postgres")
            yield database
        finally:
            if database.processes:
                database.stop(signal.SIGTERM)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _wait(server: Postgres, process: subprocess.Popen, log: Path) -> None:
    import psycopg2

    deadline = time.monotonic() + 60
    while True:
        try:
            server.query("SELECT 1", "postgres")
            return
        except psycopg2.OperationalError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)
