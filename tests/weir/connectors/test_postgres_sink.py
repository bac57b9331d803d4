"""The Postgres sink on a real server: the contract, and what only a server can do to it."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from state_ops.errors import ConfigurationError, DamageError, PipelineError, TransientError
from tests.tools.postgres_server import PASSWORD, Postgres
from weir.connectors.postgres.sink import PostgresSink
from weir.definition.sink import Publisher, SinkOpening, no_rows
from weir.testing import SinkContract, SinkSystem
from weir.testing.sink_contract import SCHEMA, GivenRows, given, publish

NUMBERS = itertools.count()


class PostgresSystem(SinkSystem):
    secrets = (PASSWORD, "another secret")

    def __init__(self, server: Postgres, key: tuple[str, ...] = ()) -> None:
        self.server, self.key, self.keyed = server, key, bool(key)
        self.schema = f"sink_{next(NUMBERS)}"
        server.rows(f"CREATE SCHEMA {self.schema}")

    @property
    def sink(self) -> PostgresSink:
        return PostgresSink(name="out", table=f"{self.schema}.Rows", key=self.key, connection="db")

    @property
    def opening(self) -> SinkOpening:
        return SinkOpening("contract/main/out", str, self.server.options, lambda: None)

    @property
    def table(self) -> str:
        return f'{self.schema}."Rows"'

    def contents(self) -> list[tuple[int, str]]:
        (there,) = self.server.rows(f"SELECT to_regclass('{self.table}') IS NOT NULL")
        return self.server.rows(f"SELECT id, text FROM {self.table}") if there[0] else []

    def refused_rows(self) -> pa.Table:
        return pa.table([[1, 2], ["a", "b\0"], [None, None]], schema=SCHEMA)

    def break_marker(self) -> None:
        self.server.rows(f"DELETE FROM {self.schema}.weir_markers")

    def unreachable(self) -> SinkOpening:
        return replace(self.opening, options={**self.server.options, "port": "1"}, patience=0.5)

    def refused(self) -> SinkOpening:
        return replace(self.opening, options={**self.server.options, "password": "another secret"})


@pytest.fixture(params=[pytest.param((), marks=pytest.mark.long), ("id",)], ids=["rows", "keyed"])
def system(request: pytest.FixtureRequest, postgres: Postgres) -> PostgresSystem:
    return PostgresSystem(postgres, request.param)


@pytest.fixture
def keyed(postgres: Postgres) -> PostgresSystem:
    return PostgresSystem(postgres, ("id",))


class TestPostgres(SinkContract):
    pass


class Changes:
    """Rows of changes, in one batch."""

    def __init__(self, *rows: tuple[str, int, str]) -> None:
        kinds, ids, texts = zip(*rows, strict=True)
        self._table = pa.table({"id": pa.array(ids, pa.int64()), "text": texts, "_change_type": kinds})

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    @property
    def count(self) -> int:
        return self._table.num_rows

    def batches(self) -> Iterator[pa.RecordBatch]:
        return iter(self._table.to_batches())


class Table(Changes):
    def __init__(self, **columns: pa.Array) -> None:
        self._table = pa.table(columns)


def test_changes_update_and_delete(keyed: PostgresSystem):
    publish(keyed, None, 1, Changes(("insert", 1, "a"), ("insert", 2, "b"), ("insert", 3, "c")))
    changes = Changes(
        ("delete", 1, "a"),
        ("update_preimage", 2, "b"),
        ("update_postimage", 2, "B"),
        ("delete", 9, "never there"),
        ("insert", 4, "d"),
        ("delete", 4, "d"),
        ("delete", 3, "c"),
        ("insert", 3, "C"),
        ("insert", 5, "key before"),
        ("update_preimage", 5, "key before"),
        ("update_postimage", 6, "key after"),
    )
    assert publish(keyed, 1, 2, changes).rows == 4  # 1 is gone, 2 and 3 are others, 6 is new
    assert sorted(keyed.contents()) == [(2, "B"), (3, "C"), (6, "key after")]
    with pytest.raises(PipelineError, match="'upsert' in _change_type"):
        publish(keyed, 2, 3, Changes(("upsert", 1, "a")))


def test_changes_need_a_key(postgres: Postgres):
    with pytest.raises(PipelineError, match="need a key"):
        publish(PostgresSystem(postgres), None, 1, Changes(("insert", 1, "a")))


def test_null_keys_are_refused(keyed: PostgresSystem):
    publish(keyed, None, 1, given(1))
    with pytest.raises(PipelineError, match="id is in the key, and null in 1 rows"):
        publish(keyed, 1, 2, Table(id=pa.array([2, None]), text=pa.array(["a", "b"])))
    assert keyed.contents() == [(1, "a1")]
    with pytest.raises(PipelineError, match="no column id"):
        publish(keyed, 1, 2, Table(text=pa.array(["a"])))


def test_every_type_comes_as_it_is(postgres: Postgres):
    system = PostgresSystem(postgres)
    at = datetime(2026, 3, 1, 12, 30, 15, 123456)
    values: list[tuple[pa.DataType, Any, str]] = [
        (pa.bool_(), True, "boolean"),
        (pa.int8(), -128, "smallint"),
        (pa.uint8(), 255, "smallint"),
        (pa.int16(), -32768, "smallint"),
        (pa.uint16(), 65535, "integer"),
        (pa.int32(), -(1 << 31), "integer"),
        (pa.uint32(), (1 << 32) - 1, "bigint"),
        (pa.int64(), -(1 << 63), "bigint"),
        (pa.float32(), 1.5, "real"),
        (pa.float64(), 0.1, "double precision"),
        (pa.string(), "ä'\"\\\n\t", "text"),
        (pa.large_string(), "", "text"),
        (pa.binary(), b"\0\xff", "bytea"),
        (pa.date32(), date(1, 1, 1), "date"),
        (pa.time64("us"), at.time(), "time without time zone"),
        (pa.timestamp("us"), at, "timestamp without time zone"),
        (pa.timestamp("us", "Europe/Berlin"), at.replace(tzinfo=UTC), "timestamp with time zone"),
        (pa.timestamp("ms"), at.replace(microsecond=123000), "timestamp without time zone"),
        (pa.decimal128(38, 10), Decimal("-1234567890123456789012345678.0123456789"), "numeric(38,10)"),
        (pa.decimal128(5, 0), Decimal("12345"), "numeric(5,0)"),
        (pa.list_(pa.int32()), [1, None, 3], "integer[]"),
        (pa.list_(pa.string()), ["a,b", None, "{}"], "text[]"),
        (pa.dictionary(pa.int32(), pa.string()), "word", "text"),
    ]
    columns = {f"c{number}": pa.array([value, None], type) for number, (type, value, _) in enumerate(values)}
    publish(system, None, 1, Table(**columns))
    publish(system, 1, 2, Table(**columns))
    (first, nothing, *again) = system.server.rows(f"SELECT * FROM {system.table}")
    assert set(nothing) == {None} and again == [first, nothing]
    for number, (type, value, expected) in enumerate(values):
        stored = bytes(first[number]) if isinstance(value, bytes) else first[number]
        assert stored == value, type
        (name,) = system.server.rows(
            f"SELECT format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = '{system.table}'::regclass AND attname = 'c{number}'"
        )
        assert name == (expected,)


@pytest.mark.parametrize(
    "type",
    [
        pa.uint64(),
        pa.timestamp("ns"),
        pa.struct([("a", pa.int64())]),
        pa.map_(pa.string(), pa.int64()),
        pa.duration("us"),
        pa.list_(pa.list_(pa.int64())),
        pa.decimal128(5, -2),
        pa.null(),
    ],
    ids=str,
)
def test_types_without_a_like_are_refused(postgres: Postgres, type: pa.DataType):
    sink = PostgresSink(name="out", table="nowhere").open(
        SinkOpening("p/main/out", str, postgres.options, lambda: None)
    )
    with pytest.raises(PipelineError, match="column strange is a"):
        sink.check(pa.schema([("strange", type)]))
    sink.close()


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ("id int8 PRIMARY KEY, text text", "no column at"),
        ("id int4 PRIMARY KEY, text text, at timestamptz", "column id is of type int4"),
        ("id int8 PRIMARY KEY, text text, at timestamp", "column at is of type timestamp"),
        ("id int8 PRIMARY KEY, text text, at timestamptz(3)", "keeps 3 digits"),
        ("id int8 PRIMARY KEY, text text, at timestamptz, more int NOT NULL", "column more must not be null"),
        ("id int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY, text text, at timestamptz", "generated by the server"),
        ("id numeric(20, 2) PRIMARY KEY, text text, at timestamptz", "too few digits"),
        ("id int8, text text, at timestamptz, UNIQUE (id, text)", "no unique index"),
        ("id int8 UNIQUE DEFERRABLE, text text, at timestamptz", "no unique index"),
        ("id int8, text bool, at timestamptz", "column text is of type bool"),
    ],
)
def test_tables_that_do_not_fit_are_refused_by_column(keyed: PostgresSystem, columns: str, reason: str):
    keyed.server.rows(f"CREATE TABLE {keyed.table} ({columns})")
    with opened(keyed) as sink, pytest.raises(PipelineError, match=reason) as refused:
        sink.check(SCHEMA)
    assert keyed.schema in str(refused.value) and refused.value.next


class opened:
    def __init__(self, system: PostgresSystem, opening: SinkOpening | None = None) -> None:
        self._sink = system.sink.open(opening or system.opening)

    def __enter__(self) -> Publisher:
        return self._sink

    def __exit__(self, *_: object) -> None:
        self._sink.close()


def test_a_table_of_others_is_written_to(keyed: PostgresSystem):
    keyed.server.rows(
        f"CREATE TABLE {keyed.table} (more int DEFAULT 7, at timestamptz, text jsonb, id numeric(19, 0) NOT NULL UNIQUE) PARTITION BY RANGE (id)"
    )
    keyed.server.rows(f"CREATE TABLE {keyed.schema}.part PARTITION OF {keyed.table} DEFAULT")
    publish(keyed, None, 1, Table(id=pa.array([1, 2]), text=pa.array(['{"a": 1}', "[]"])))
    assert sorted(keyed.server.rows(f"SELECT id, text, more, at FROM {keyed.table}")) == [
        (1, {"a": 1}, 7, None),
        (2, [], 7, None),
    ]
    publish(keyed, 1, 2, Table(id=pa.array([1]), text=pa.array(["3"])))
    assert sorted(keyed.server.rows(f"SELECT id, text FROM {keyed.table}")) == [(1, 3), (2, [])]


def test_texts_become_uuids_and_enums_and_rows_of_one_key_are_told_apart_by_them(keyed: PostgresSystem):
    server, low = keyed.server, "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
    server.rows(f"""CREATE TYPE {keyed.schema}."The mood" AS ENUM ('sad', 'glad')""")
    server.rows(f'CREATE TABLE {keyed.table} (id uuid PRIMARY KEY, text {keyed.schema}."The mood", more int)')
    texts = Table(id=pa.array([low, low.upper()]), text=pa.array(["sad", "glad"]))
    assert publish(keyed, None, 1, texts).rows == 1
    with pytest.raises(PipelineError, match="invalid input value for enum"):
        publish(keyed, 1, 2, Table(id=pa.array([low]), text=pa.array(["so so"])))
    gone = Table(id=pa.array([low.upper()]), text=pa.array(["sad"]), _change_type=pa.array(["delete"]))
    assert server.rows(f"SELECT id::text, text::text FROM {keyed.table}") == [(low, "glad")]
    assert publish(keyed, 1, 2, gone).rows == 1
    assert server.rows(f"SELECT * FROM {keyed.table}") == []


def test_what_a_statement_violates_is_named(keyed: PostgresSystem):
    server, schema = keyed.server, keyed.schema
    server.rows(f"CREATE TABLE {schema}.owners (id int8 PRIMARY KEY)")
    server.rows(
        f"CREATE TABLE {keyed.table} (id int8 PRIMARY KEY CONSTRAINT owner REFERENCES {schema}.owners, "
        "text text NOT NULL, at timestamptz, twice int8 GENERATED ALWAYS AS (id * 2) STORED, "
        "number int GENERATED BY DEFAULT AS IDENTITY)"
    )
    server.rows(f"INSERT INTO {schema}.owners VALUES (1), (2)")
    publish(keyed, None, 1, given(1, 2))
    assert server.rows(f"SELECT id, twice, number FROM {keyed.table} ORDER BY id") == [(1, 2, 1), (2, 4, 2)]
    with pytest.raises(PipelineError, match=r'foreign key constraint "owner".*23503') as violated:
        publish(keyed, 1, 2, given(3))
    assert keyed.schema in str(violated.value) and "a3" not in str(violated.value)
    empty = Table(id=pa.array([1]), text=pa.nulls(1, pa.string()), at=pa.nulls(1, pa.timestamp("us", "UTC")))
    with pytest.raises(PipelineError, match='null value in column "text"'):
        publish(keyed, 1, 2, empty)
    server.rows(f"INSERT INTO {schema}.owners VALUES (3)")
    publish(keyed, 1, 2, given(3))
    server.rows(f"DROP TABLE {schema}.weir_markers")
    with pytest.raises(DamageError, match="marker is at no checkpoint, but 2 was published"):
        publish(keyed, 2, 3, given(1))


def test_a_deadlock_with_somebody_elses_transaction_is_tried_again(keyed: PostgresSystem):
    import psycopg2

    publish(keyed, None, 1, given(1, 2))
    other = psycopg2.connect(**keyed.server.options)
    try:
        with other.cursor() as cursor:
            cursor.execute("SET deadlock_timeout = '60s'")  # so that the publisher is the one who notices, and loses
            cursor.execute(f"UPDATE {keyed.table} SET text = 'theirs' WHERE id = 2")
            publisher = threading.Thread(target=publish, args=(keyed, 1, 2, given(1, 2, text="ours")))
            publisher.start()
            deadline = time.monotonic() + 30
            while not keyed.server.rows("SELECT 1 FROM pg_locks WHERE NOT granted"):
                assert time.monotonic() < deadline and publisher.is_alive()
                time.sleep(0.02)
            cursor.execute(f"UPDATE {keyed.table} SET text = 'theirs' WHERE id = 1")
            other.commit()
            publisher.join(30)
    finally:
        other.close()
    assert sorted(keyed.contents()) == [(1, "ours1"), (2, "ours2")]
    assert keyed.server.rows("SELECT deadlocks > 0 FROM pg_stat_database WHERE datname = 'rows'") == [(True,)]


def test_a_server_that_speaks_no_tls_is_refused_where_it_is_asked_for(keyed: PostgresSystem):
    with pytest.raises(ConfigurationError, match="SSL") as refused:
        publish(
            keyed, None, 1, given(1), replace(keyed.opening, options={**keyed.server.options, "sslmode": "require"})
        )
    assert PASSWORD not in str(refused.value)


def test_a_view_is_refused(postgres: Postgres):
    system = PostgresSystem(postgres)
    postgres.rows(f"CREATE VIEW {system.table} AS SELECT 1::int8 AS id, 'a' AS text, now() AS at")
    with opened(system) as sink, pytest.raises(PipelineError, match="a view"):
        sink.check(SCHEMA)


def test_a_table_of_keys_alone(keyed: PostgresSystem):
    publish(keyed, None, 1, Table(id=pa.array([1, 2, 1])))
    assert publish(keyed, 1, 2, Table(id=pa.array([2, 3]))).rows == 1
    assert sorted(keyed.server.rows(f"SELECT id FROM {keyed.table}")) == [(1,), (2,), (3,)]


@pytest.mark.parametrize("name", ["weir_staging", "{schema}.weir_staging", "{schema}.weir_markers"])
def test_tables_called_like_one_of_weirs_own_are_refused(postgres: Postgres, name: str):
    """Rows of the first would go into the temporary table, and be dropped with it."""
    system = PostgresSystem(postgres)
    sink = PostgresSink(name="out", table=name.replace("{schema}", system.schema))
    with pytest.raises(PipelineError, match="cannot be called weir_"):
        sink.open(system.opening)


def test_a_connection_that_the_server_has_ended_meanwhile_is_replaced(system: PostgresSystem):
    """A restart, or a limit for idle sessions that is shorter than an epoch, is no reason to do the epoch again."""
    with opened(system) as sink:
        sink.prepare(SCHEMA)
        sink.publish(None, 1, given(1))
        idle = "FROM pg_stat_activity WHERE application_name = 'weir' AND datname = 'rows' AND state = 'idle'"
        assert system.server.rows(f"SELECT pg_terminate_backend(pid) {idle}")
        assert sink.publish(1, 2, given(2)).rows == 1
    assert len(system.contents()) == 2


def test_a_server_that_takes_no_writes_for_now_is_asked_again(keyed: PostgresSystem):
    """As a standby before it is promoted, or a primary that was demoted."""
    publish(keyed, None, 1, given(1))
    standby = {**keyed.server.options, "options": "-c default_transaction_read_only=on"}
    with opened(keyed, replace(keyed.opening, options=standby, patience=0.5)) as publisher:
        for step in (publisher.check, publisher.prepare):
            with pytest.raises(TransientError, match="takes no writes: its transactions are read-only"):
                step(SCHEMA)
        with pytest.raises(TransientError, match="takes no writes: cannot execute"):
            publisher.publish(1, 2, given(2))
    assert publish(keyed, 1, 2, given(2)).rows == 1


def test_constraints_of_the_table_refuse_the_whole(system: PostgresSystem):
    publish(system, None, 1, given(1))
    system.server.rows(f"ALTER TABLE {system.table} ADD CHECK (id < 5)")
    with pytest.raises(PipelineError, match="check constraint"):
        publish(system, 1, 2, given(2, 3, 7))
    with pytest.raises(PipelineError, match=r"encoding|0x00"):
        publish(
            system, 1, 2, Table(id=pa.array([2]), text=pa.array(["a\0b"]), at=pa.nulls(1, pa.timestamp("us", "UTC")))
        )
    assert system.contents() == [(1, "a1")]
    system.server.rows(f'ALTER TABLE {system.table} DROP CONSTRAINT "Rows_id_check"')
    publish(system, 1, 2, given(2, 3, 7))
    assert len(system.contents()) == 4


def test_a_table_that_is_dropped_is_named(system: PostgresSystem):
    publish(system, None, 1, given(1))
    with opened(system) as sink:
        system.server.rows(f"DROP TABLE {system.table}")
        with pytest.raises(PipelineError, match="does not exist"):
            sink.publish(1, 2, given(2))


@pytest.mark.parametrize(
    ("alter", "reason"),
    [
        ("ALTER COLUMN share TYPE int8", "is of type int8"),
        ("ALTER COLUMN price TYPE numeric(8, 0)", "too few digits"),
        ("ALTER COLUMN at TYPE timestamptz(0)", "would be rounded"),
        ("RENAME share TO part", "has no column share"),
    ],
)
def test_a_column_that_is_altered_between_commit_and_publish_changes_no_value(system, alter: str, reason: str):
    rows = Table(
        id=pa.array([1], pa.int64()),
        share=pa.array([1.5]),
        price=pa.array([Decimal("2.75")], pa.decimal128(8, 2)),
        at=pa.array([datetime(2026, 1, 1, 0, 0, 0, 5, UTC)], pa.timestamp("us", "UTC")),
    )
    with opened(system) as sink:
        sink.prepare(rows.schema)
        system.server.rows(f"ALTER TABLE {system.table} {alter}")
        with pytest.raises(PipelineError, match=reason):
            sink.publish(None, 1, rows)
        assert sink.marker() is None and system.server.rows(f"SELECT FROM {system.table}") == []


def test_a_table_that_is_made_behind_published_checkpoints_is_said(system: PostgresSystem, capsys):
    publish(system, None, 1, given(1))
    system.server.rows(f"DROP TABLE {system.table}")
    with opened(system) as sink:
        sink.prepare(SCHEMA)
        assert "rows of earlier checkpoints" in capsys.readouterr().out and system.contents() == []
        sink.prepare(SCHEMA)
        assert "rows of earlier checkpoints" not in capsys.readouterr().out


def test_serialization_failures_are_tried_again(system: PostgresSystem, monkeypatch: pytest.MonkeyPatch):
    """A trigger fails three times, as a server would whose transactions conflict."""
    monkeypatch.setattr(random, "uniform", lambda *_: 0.05)
    publish(system, None, 1, given(1))
    schema = system.schema
    system.server.rows(f"CREATE SEQUENCE {schema}.tries")
    system.server.rows(
        f"""CREATE FUNCTION {schema}.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF nextval('{schema}.tries') <= 3 THEN RAISE EXCEPTION 'could not serialize' USING ERRCODE = '40001'; END IF;
        RETURN NEW; END $$"""
    )
    system.server.rows(
        f"CREATE TRIGGER fail BEFORE INSERT ON {system.table} FOR EACH STATEMENT EXECUTE FUNCTION {schema}.fail()"
    )
    assert publish(system, 1, 2, given(2, 3)).rows == 2
    assert system.server.rows(f"SELECT last_value FROM {schema}.tries") == [(4,)]
    assert len(system.contents()) == 3
    system.server.rows(f"ALTER SEQUENCE {schema}.tries RESTART MINVALUE -1000 START -1000")
    with pytest.raises(TransientError, match="could not serialize"):
        publish(system, 2, 3, given(4))
    assert len(system.contents()) == 3


def sessions(system: PostgresSystem) -> str:
    return "SELECT pid FROM pg_stat_activity WHERE application_name = 'weir' AND datname = 'rows' AND state <> 'idle'"


def kill(system: PostgresSystem) -> None:
    assert system.server.rows(f"SELECT pg_terminate_backend(pid) FROM ({sessions(system)}) AS s"), "nobody is at work"


def test_a_session_that_is_killed_in_copy_has_done_nothing(system: PostgresSystem, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weir.connectors.postgres.connection._FIRST_PAUSE", 0.001)
    publish(system, None, 1, given(1))
    rows = given(*range(2, 60))
    with pytest.raises(TransientError, match=r"terminat|closed|could not be asked"):
        publish(system, 1, 2, replace(rows, after=(10, lambda: kill(system))))
    assert system.contents() == [(1, "a1")]
    publish(system, 1, 2, rows)
    assert len(system.contents()) == 59


def test_a_zombie_that_hangs_with_the_lock_is_thrown_out(system: PostgresSystem, monkeypatch: pytest.MonkeyPatch):
    """It is frozen right before its commit; the server ends its session, so that the owner goes on. When it wakes up and
    tries again, the marker tells it that there is nothing to do."""
    from weir.connectors.postgres import connection, sink

    publish(system, None, 1, given(1))
    monkeypatch.setattr(sink, "_PATIENCE", sink._PATIENCE.replace("60s", "700ms"))
    frozen, go_on = threading.Event(), threading.Event()
    execute, published = connection.Connection.execute, []

    def freeze(self: Any, statement: str, *parameters: Any) -> None:
        if statement == "COMMIT" and threading.current_thread() is zombie:
            frozen.set()
            go_on.wait(30)
        execute(self, statement, *parameters)

    def be_zombie() -> None:
        published.append(publish(system, 1, 2, given(2)).rows)

    with monkeypatch.context() as patched:
        zombie = threading.Thread(target=be_zombie)
        patched.setattr(connection.Connection, "execute", freeze)
        zombie.start()
        assert frozen.wait(30)
        begun = time.monotonic()
        publish(system, 1, 7, no_rows())  # a rewind
        assert 0.2 < time.monotonic() - begun < 20
        go_on.set()
        zombie.join()
    assert published == [0] and system.contents() == [(1, "a1")]
    publish(system, 7, 8, given(3))
    assert sorted(system.contents()) == [(1, "a1"), (3, "a3")]


def test_other_transactions_hold_rows_back_only_as_long_as_they_last(keyed: PostgresSystem):
    publish(keyed, None, 1, given(1))
    import psycopg2

    other = psycopg2.connect(**{**keyed.server.options, "port": keyed.server.port})
    try:
        with other.cursor() as cursor:
            cursor.execute(f"UPDATE {keyed.table} SET text = 'theirs' WHERE id = 1")
            publisher = threading.Thread(target=publish, args=(keyed, 1, 2, given(1, 2, text="ours")))
            publisher.start()
            publisher.join(0.3)
            assert publisher.is_alive()
            other.commit()
            publisher.join(30)
    finally:
        other.close()
    assert sorted(keyed.contents()) == [(1, "ours1"), (2, "ours2")]


def test_rights_that_are_missing_are_named(system: PostgresSystem):
    server, schema = system.server, system.schema
    publish(system, None, 1, given(1))
    server.rows(f"DROP ROLE IF EXISTS reader_{schema}")
    server.rows(f"CREATE ROLE reader_{schema} LOGIN PASSWORD 'another secret'")
    server.rows(f"GRANT USAGE ON SCHEMA {schema} TO reader_{schema}")
    options = {**server.options, "user": f"reader_{schema}", "password": "another secret"}
    with pytest.raises(Exception, match="permission denied") as refused:
        publish(system, 1, 2, given(2), replace(system.opening, options=options))
    assert "another secret" not in str(refused.value) and type(refused.value).__name__ == "ConfigurationError"


@pytest.fixture
def role(keyed: PostgresSystem) -> tuple[str, SinkOpening]:
    """A role with the least rights on a table that is there, and an opening by it."""
    publish(keyed, None, 1, given(1))
    server, schema, name = keyed.server, keyed.schema, f"least_{keyed.schema}"
    server.rows(f"CREATE ROLE {name} LOGIN PASSWORD 'another secret'")
    server.rows(f"GRANT USAGE ON SCHEMA {schema} TO {name}")
    server.rows(f"GRANT SELECT, UPDATE ON {schema}.weir_markers TO {name}")
    server.rows(f"GRANT SELECT, INSERT, DELETE ON {keyed.table} TO {name}")
    server.rows(f"GRANT UPDATE (text, at) ON {keyed.table} TO {name}")
    options = {**server.options, "user": name, "password": "another secret"}
    return name, replace(keyed.opening, options=options, patience=0.5)


@pytest.mark.parametrize(
    ("right", "named"),
    [
        ("INSERT ON {table}", 'INSERT ON "{schema}"."Rows"'),
        ("SELECT ON {table}", 'SELECT ON "{schema}"."Rows"'),
        ("UPDATE (text) ON {table}", 'UPDATE ON "{schema}"."Rows"'),
        ("DELETE ON {table}", 'DELETE ON "{schema}"."Rows"'),
        ("UPDATE ON {schema}.weir_markers", 'UPDATE ON "{schema}"."weir_markers"'),
        ("TEMPORARY ON DATABASE rows", "TEMPORARY ON DATABASE rows"),
    ],
)
def test_a_right_that_is_missing_is_found_before_the_commit(keyed: PostgresSystem, role, right: str, named: str):
    name, opening = role
    changes = Changes(("delete", 1, "a1"), ("insert", 2, "b"))
    schema = changes.schema
    with opened(keyed, opening) as publisher:
        publisher.check(schema)
        spelled = right.format(table=keyed.table, schema=keyed.schema)
        keyed.server.rows(f"REVOKE {spelled} FROM {name}, public")
        try:
            for step in (publisher.check, publisher.prepare):
                with pytest.raises(ConfigurationError, match="permission denied") as refused:
                    step(schema)
                assert refused.value.next == f"GRANT {named.format(schema=keyed.schema)} TO {name};"
            keyed.server.rows(refused.value.next or "")
            publisher.prepare(schema)
            publisher.publish(1, 2, changes)
        finally:
            keyed.server.rows("GRANT TEMPORARY ON DATABASE rows TO public")
    assert keyed.contents() == [(2, "b")]


def test_rows_that_only_come_need_no_right_to_delete(keyed: PostgresSystem, role):
    name, opening = role
    keyed.server.rows(f"REVOKE DELETE ON {keyed.table} FROM {name}")
    publish(keyed, 1, 2, given(2), opening)
    assert len(keyed.contents()) == 2


def test_a_role_that_may_insert_and_no_more_adds_rows(postgres: Postgres):
    system = PostgresSystem(postgres)
    publish(system, None, 1, given(1))
    server, role, schema = system.server, f"writer_{system.schema}", system.schema
    server.rows(f"CREATE ROLE {role} LOGIN PASSWORD 'another secret'")
    server.rows(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
    server.rows(f"GRANT SELECT, INSERT, UPDATE ON {schema}.weir_markers TO {role}")
    server.rows(f"GRANT INSERT ON {system.table} TO {role}")
    options = {**server.options, "user": role, "password": "another secret"}
    publish(system, 1, 2, given(2), replace(system.opening, options=options))
    assert sorted(id for id, _ in system.contents()) == [1, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: PostgresSink(name="out", table="a.b.c"),
        lambda: PostgresSink(name="out", table=""),
        lambda: PostgresSink(name="out", table="a", key=("b", "b")),
    ],
)
def test_definitions_that_do_not_fit_are_refused(make: Callable[[], Any]):
    with pytest.raises(PipelineError, match=r"sink|name"):
        make()


def test_strange_names_stay_what_they_are(postgres: Postgres):
    system = PostgresSystem(postgres)
    name = """a"b'; DROP TABLE x; --%s $1 {x}"""
    sink = PostgresSink(name="out", table=f"{system.schema}.{name}", key=(name,))
    opened_sink = sink.open(replace(system.opening, app_id="a'b/\"c", resolve=lambda text: text))
    rows = Table(**{name: pa.array([1, 1, 2]), "select": pa.array(["a", "b", "c"])})
    opened_sink.prepare(rows.schema)
    opened_sink.publish(None, 1, rows)
    assert opened_sink.marker() == 1
    opened_sink.close()
    assert sorted(postgres.rows(f'SELECT * FROM {system.schema}."{name.replace(chr(34), chr(34) * 2)}"')) == [
        (1, "b"),
        (2, "c"),
    ]


def test_a_long_history_leaves_one_marker(system: PostgresSystem):
    began = datetime.now(UTC)
    with opened(system) as opened_sink:
        opened_sink.prepare(SCHEMA)
        for checkpoint in range(1, 20):
            opened_sink.publish(checkpoint - 1 or None, checkpoint, no_rows())
    ((app_id, checkpoint, at),) = system.server.rows(f"SELECT * FROM {system.schema}.weir_markers")
    assert (app_id, checkpoint) == ("contract/main/out", 19) and at > began - timedelta(minutes=1)


def test_what_the_server_refuses_names_constraint_column_and_row(postgres):
    system = PostgresSystem(postgres)
    publish(system, None, 1, given(1))
    postgres.rows(f"ALTER TABLE {system.table} ADD CONSTRAINT few CHECK (id < 3)")
    with pytest.raises(PipelineError) as refused:
        publish(system, 1, 2, GivenRows([(2, "a"), (7, "b\x1b[31m" + "c" * 500)]))
    error = refused.value
    assert 'violates check constraint "few"' in error.what
    assert "Failing row contains (7, b" in error.where and "\x1b" not in error.where
    assert "ccc" not in error.what and len(error.where) < 400
