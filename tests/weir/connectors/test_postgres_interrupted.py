"""The Postgres sink while connections, sessions and the server end at bad moments: each row is there once."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import adbc_driver_manager
import pytest
import stamina

from state_ops.errors import ConfigurationError, PipelineError, TransientError
from tests.recovery.harness import Site
from tests.tools.postgres_proxy import AFTER, AT_ONCE, BEFORE, SILENT, PostgresProxy
from tests.tools.postgres_server import Postgres
from tests.tools.sampling import sampled
from tests.weir.connectors.test_postgres_sink import PostgresSystem, opened
from weir import api
from weir.connectors.postgres import connection, sink
from weir.connectors.postgres.connection import Connection, translated
from weir.definition.sink import Publisher, SinkOpening
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run
from weir.testing.sink_contract import SCHEMA, given, publish


@pytest.fixture(params=[pytest.param((), marks=pytest.mark.long), ("id",)], ids=["rows", "keyed"])
def system(request: pytest.FixtureRequest, postgres: Postgres) -> PostgresSystem:
    return PostgresSystem(postgres, request.param)


def through(system: PostgresSystem, *, patience: float = 30, **options: str) -> SinkOpening:
    """An opening of the system with these options."""
    return replace(system.opening, options={**system.server.options, **options}, patience=patience)


@contextmanager
def publisher_of(system: PostgresSystem, opening: SinkOpening) -> Iterator[Publisher]:
    made = system.sink.open(opening)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def locked(system: PostgresSystem) -> Iterator[Any]:
    """Somebody else's transaction has locked the table."""
    import psycopg2

    with closing(psycopg2.connect(**system.server.options)) as other, other.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {system.table} IN ACCESS EXCLUSIVE MODE")
        yield other


def sessions(system: PostgresSystem) -> int:
    """End all of Weir's sessions; returns how many there were."""
    return len(
        system.server.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'weir' AND datname = 'rows'"
        )
    )


@pytest.mark.parametrize("how", [BEFORE, AFTER, AT_ONCE])
@pytest.mark.parametrize("lost", sampled([1, 3]))
def test_commits_without_an_answer_are_made_once(system: PostgresSystem, how: str, lost: int):
    with PostgresProxy(system.server.port, how, lost=0) as proxy:
        behind = through(system, port=str(proxy.port))
        with publisher_of(system, behind) as publisher:
            publisher.prepare(SCHEMA)
            for checkpoint in (1, 2):
                proxy.lost, proxy.seen = lost, 0
                publisher.publish(checkpoint - 1 or None, checkpoint, given(2 * checkpoint, 2 * checkpoint + 1))
                assert proxy.seen >= 1
                assert publisher.marker() == checkpoint
    assert sorted(system.contents()) == [(id, f"a{id}") for id in (2, 3, 4, 5)]


def test_a_server_that_never_hears_of_the_cut_lets_the_next_attempt_in(system: PostgresSystem, monkeypatch):
    """Its session holds the marker's lock until the server ends it."""
    monkeypatch.setattr(sink, "_PATIENCE", sink._PATIENCE.replace("60s", "700ms"))
    publish(system, None, 1, given(1))
    with PostgresProxy(system.server.port, SILENT) as proxy:
        publish(system, 1, 2, given(2), through(system, port=str(proxy.port)))
        assert proxy.seen == 1
    assert sorted(system.contents()) == [(1, "a1"), (2, "a2")]


def test_a_commit_that_is_lost_each_time_is_said_and_made_by_the_next_run(system: PostgresSystem, monkeypatch):
    monkeypatch.setattr(connection, "_FIRST_PAUSE", 0.001)
    publish(system, None, 1, given(1))
    with PostgresProxy(system.server.port, BEFORE, lost=1_000) as proxy:
        with pytest.raises(TransientError, match="could not be asked"):
            publish(system, 1, 2, given(2), through(system, port=str(proxy.port)))
        assert proxy.seen > 5
    publish(system, 1, 2, given(2))
    assert sorted(system.contents()) == [(1, "a1"), (2, "a2")]


STATEMENTS = ['"weir_markers" WHERE app_id', "BEGIN", "CREATE TEMP", "FOR UPDATE", "INSERT INTO", "UPDATE", "COMMIT"]


@pytest.mark.parametrize("before", STATEMENTS)
def test_a_session_that_is_ended_between_two_statements_begins_anew(system: PostgresSystem, monkeypatch, before: str):
    publish(system, None, 1, given(1))
    run, ended = Connection.rows, []

    def end(self: Connection, statement: str, *parameters: Any) -> list[dict[str, Any]]:
        if before in statement and not ended:
            ended.append(sessions(system))
        return run(self, statement, *parameters)

    monkeypatch.setattr(Connection, "rows", end)
    assert publish(system, 1, 2, given(2, 3)).rows == 2
    assert ended and ended[0]
    assert sorted(system.contents()) == [(1, "a1"), (2, "a2"), (3, "a3")]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["restart", "crash"])
def test_the_server_restarts_in_the_middle_of_a_publish(system: PostgresSystem, how: signal.Signals):
    publish(system, None, 1, given(1))
    starts: list[threading.Thread] = []

    def restart() -> None:
        if not starts:
            system.server.stop(how)
            starts.append(threading.Thread(target=system.server.start))
            starts[0].start()

    try:
        assert publish(system, 1, 2, replace(given(*range(2, 9)), after=(2, restart))).rows == 7
    finally:
        starts[0].join(60)
    assert sorted(system.contents()) == [(id, f"a{id}") for id in range(1, 9)]


def test_the_server_restarts_between_two_publishes(system: PostgresSystem):
    with opened(system) as publisher:
        publisher.prepare(SCHEMA)
        publisher.publish(None, 1, given(1))
        system.server.stop()
        start = threading.Timer(0.5, system.server.start)
        start.start()
        try:
            publisher.publish(1, 2, given(2))
        finally:
            start.join(60)
    assert sorted(system.contents()) == [(1, "a1"), (2, "a2")]


@pytest.mark.parametrize("isolation", ["serializable", "repeatable\\ read"])
def test_isolation_of_the_database_changes_nothing(system: PostgresSystem, isolation: str):
    """Another transaction writes the same rows meanwhile."""
    publish(system, None, 1, given(1))
    isolated = through(system, options=f"-c default_transaction_isolation={isolation}")
    with locked(system) as other:
        publishing = threading.Thread(target=publish, args=(system, 1, 2, given(1, 2, text="ours"), isolated))
        publishing.start()
        with other.cursor() as cursor:
            cursor.execute(f"UPDATE {system.table} SET text = 'theirs'")
        publishing.join(0.3)
        assert publishing.is_alive()
        other.commit()
        publishing.join(30)
    ours = [(1, "ours1"), (2, "ours2")]
    assert sorted(system.contents()) == (ours if system.keyed else [ours[0], (1, "theirs"), ours[1]])


def test_a_time_limit_for_statements_is_named_and_waited_for(system: PostgresSystem):
    publish(system, None, 1, given(1))
    hasty, limit = through(system, options="-c statement_timeout=200ms"), "statement timeout"
    impatient = replace(hasty, patience=3)
    with locked(system), publisher_of(system, impatient) as publisher, pytest.raises(TransientError, match=limit) as no:
        publisher.publish(1, 2, given(2))
    assert "statement_timeout=10min" in (no.value.next or "")
    with locked(system) as other:
        release = threading.Timer(0.7, other.rollback)
        release.start()
        with publisher_of(system, hasty) as publisher:
            publisher.publish(1, 2, given(2))
        release.join()
    assert sorted(system.contents()) == [(1, "a1"), (2, "a2")]


def test_somebody_elses_lock_is_named(system: PostgresSystem, monkeypatch):
    monkeypatch.setattr(sink, "_PATIENCE", sink._PATIENCE.replace("120s", "200ms"))
    publish(system, None, 1, given(1))
    opening, limit = through(system, patience=3), "lock timeout"
    with locked(system), publisher_of(system, opening) as publisher, pytest.raises(TransientError, match=limit) as no:
        publisher.publish(1, 2, given(2))
    assert "pg_locks" in (no.value.next or "")


@pytest.mark.parametrize(
    ("statement", "undo", "kind"),
    [
        ("ALTER ROLE plain CONNECTION LIMIT 0", "ALTER ROLE plain CONNECTION LIMIT -1", TransientError),
        ("ALTER DATABASE rows CONNECTION LIMIT 0", "ALTER DATABASE rows CONNECTION LIMIT -1", TransientError),
        ("ALTER DATABASE rows ALLOW_CONNECTIONS false", "ALTER DATABASE rows ALLOW_CONNECTIONS true", TransientError),
        ("ALTER ROLE plain NOLOGIN", "ALTER ROLE plain LOGIN", ConfigurationError),
        ("ALTER ROLE plain RENAME TO other", "ALTER ROLE other RENAME TO plain", ConfigurationError),
        ("REVOKE CONNECT ON DATABASE rows FROM public", "GRANT CONNECT ON DATABASE rows TO public", ConfigurationError),
    ],
)
def test_connections_that_a_server_has_none_left_for_may_come_later(postgres: Postgres, statement, undo, kind):
    postgres.query("DROP ROLE IF EXISTS plain", "postgres")
    postgres.query("CREATE ROLE plain LOGIN PASSWORD 'another secret'", "postgres")
    system = PostgresSystem(postgres)
    options = {**postgres.options, "user": "plain", "password": "another secret"}
    postgres.query(statement, "postgres")
    try:
        publisher = system.sink.open(replace(system.opening, options=options, patience=3))
        with pytest.raises(kind):
            publisher.marker()
    finally:
        postgres.query(undo, "postgres")


@pytest.mark.parametrize(
    "error",
    [
        adbc_driver_manager.OperationalError(
            "IO: Failed to prepare query: FATAL:  Verbindung wird abgebrochen",
            status_code=adbc_driver_manager.AdbcStatusCode.IO,
        ),
        adbc_driver_manager.OperationalError(
            "IO: [libpq] Failed to connect: connection to server at \"password-role.internal\" (10.0.0.1), port 5432 "
            "failed: FATAL:  the database system is starting up",
            status_code=adbc_driver_manager.AdbcStatusCode.IO,
        ),
        OSError("[libpq] PQgetCopyData() failed: server closed the connection unexpectedly\n\tThis probably means"),
    ],
)  # fmt: skip
def test_a_connection_that_ends_is_no_refusal_in_any_language(error: Exception):
    with pytest.raises(TransientError), translated("somewhere", PipelineError):
        raise error


def test_an_object_that_lacks_what_a_statement_needs_is_refused(keyed_changes: PostgresSystem):
    """SQLSTATE 55000 comes again each time, where 55P03 passes."""
    system = keyed_changes
    system.server.rows(
        f"CREATE FUNCTION {system.schema}.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "RAISE EXCEPTION 'cannot update: no replica identity' USING ERRCODE = '55000'; END $$"
    )
    system.server.rows(
        f"CREATE TRIGGER fail BEFORE INSERT ON {system.table} FOR EACH STATEMENT "
        f"EXECUTE FUNCTION {system.schema}.fail()"
    )
    with pytest.raises(PipelineError, match="replica identity"):
        publish(system, 1, 2, given(2))


@pytest.fixture
def keyed_changes(postgres: Postgres) -> PostgresSystem:
    system = PostgresSystem(postgres, ("id",))
    publish(system, None, 1, given(1))
    return system


@pytest.mark.parametrize("seed", sampled(range(6)))
def test_sessions_of_source_and_sink_end_at_random_statements(postgres, tmp_path, monkeypatch, seed: int):
    """Each row is counted once, and each sum is written once, whatever had to be begun anew."""
    monkeypatch.setenv("WEIR_TEST_PASSWORD", postgres.options["password"])
    system = PostgresSystem(postgres)
    postgres.rows(f"CREATE TABLE {system.schema}.orders (id int8, amount int8, tx xid8 DEFAULT pg_current_xact_id())")
    options = {name: value for name, value in postgres.options.items() if name != "password"}
    source = api.postgres(f"SELECT * FROM {system.schema}.orders", cursor="tx", connection="rows")
    sink = api.postgres.sink(f"{system.schema}.sums", connection="rows", name="sums")
    sums = api.aggregate("sums", source, key="id", sink=sink, total=api.agg.sum("amount"), rows=api.agg.count())
    env = {
        "WEIR_CONNECTIONS": json.dumps({"rows": {"options": {**options, "password": {"env": "WEIR_TEST_PASSWORD"}}}}),
        "WEIR_RUN__POLL_SECONDS": "0.01",
    }
    site = Site(tmp_path, env, api.Pipeline("orders", (sums,), max_parallelism=4), __name__)
    chance, run_, ended = random.Random(seed), Connection.rows, []

    def at_random(self: Connection, statement: str, *parameters: Any) -> list[dict[str, Any]]:
        if chance.random() < 0.03:
            ended.append(sessions(system))
        return run_(self, statement, *parameters)

    written = []
    for day in range(4):
        postgres.rows(f"INSERT INTO {system.schema}.orders SELECT i % 3, {day} FROM generate_series(0, 8) AS i")
        written += [(id, 3 * sum(range(day + 1)), 3 * (day + 1)) for id in range(3)]
        with monkeypatch.context() as patched:
            patched.setattr(Connection, "rows", at_random)
            for attempt in stamina.retry_context(TransientError, attempts=20, wait_initial=0.01, wait_max=0.1):
                with attempt:
                    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    assert sum(ended) > 3
    assert sorted(postgres.rows(f"SELECT id, total, rows FROM {system.schema}.sums")) == sorted(written)
