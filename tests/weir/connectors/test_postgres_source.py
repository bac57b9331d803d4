"""The Postgres source on a real server: the contract, and transactions that commit late."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import psycopg2
import pytest

from state_ops.errors import InputError, PipelineError, TransientError, VanishedError
from tests.tools.postgres_server import PASSWORD, Postgres
from tests.tools.sampling import long_tests
from weir.connectors.postgres.source import PostgresSource
from weir.definition.source import Connector, Limits, Opening
from weir.testing import SourceContract, SourceSystem
from weir.testing.source_contract import LARGE, begin, plan, read

NUMBERS = itertools.count()


class PostgresSystem(SourceSystem):
    secrets = (PASSWORD, "another secret")

    def __init__(self, server: Postgres, cursor: str = "tx") -> None:
        self.server, self._count, self._cursor = server, 0, cursor
        self.starts_at_times = cursor == "at"
        self.table = f"source_{next(NUMBERS)}"
        server.rows(
            f"CREATE TABLE {self.table} (id int8, price numeric(8, 2), "
            "at timestamptz DEFAULT clock_timestamp(), tx xid8 DEFAULT pg_current_xact_id())"
        )
        server.rows(f"CREATE INDEX ON {self.table} (tx)")

    @property
    def source(self) -> PostgresSource:
        query = f"SELECT * FROM {self.table} -- as it is"
        return PostgresSource(
            query=query,
            cursor=self._cursor,
            event_time="at",
            may_miss=self._cursor != "tx",
            on_bad="quarantine",
            connection="db",
        )

    @property
    def opening(self) -> Opening:
        return Opening("contract", str, self.server.options)

    def append(self, count: int) -> None:
        first, self._count = self._count, self._count + count
        insert = f"INSERT INTO {self.table} (id, price) VALUES (i, i / 3.0)"
        self.server.rows(f"DO $$ BEGIN FOR i IN {first}..{first + count - 1} LOOP {insert}; COMMIT; END LOOP; END $$")

    def append_bad(self) -> None:
        self.server.rows(f"INSERT INTO {self.table} (id, price) VALUES (-1, 'NaN')")

    def alter(self) -> None:
        self.server.rows(f"UPDATE {self.table} SET price = 7 WHERE id = 3")

    def unreachable(self) -> Opening:
        return replace(self.opening, options={**self.server.options, "port": "1"})

    def refused(self) -> Opening:
        return replace(self.opening, options={**self.server.options, "password": "another secret"})


@pytest.fixture(params=["tx", pytest.param("at", marks=pytest.mark.long), pytest.param("id", marks=pytest.mark.long)])
def system(request: pytest.FixtureRequest, postgres: Postgres) -> PostgresSystem:
    return PostgresSystem(postgres, request.param)


@pytest.fixture
def by_transaction(postgres: Postgres) -> PostgresSystem:
    return PostgresSystem(postgres)


@long_tests("test_limits_are_kept", "test_a_branch_reads_no_further_than_its_pipeline", "test_a_position_stays_small")
class TestPostgres(SourceContract):
    pass


@contextmanager
def transaction(system: PostgresSystem, *ids: int) -> Iterator[Any]:
    """One that has inserted rows and is not yet committed."""
    connection = psycopg2.connect(**{**system.server.options, "port": system.server.port})
    try:
        with connection.cursor() as cursor:
            for id in ids:
                cursor.execute(f"SAVEPOINT s; INSERT INTO {system.table} (id) VALUES ({id})")
        yield connection
    finally:
        connection.close()


@contextmanager
def opened(source: PostgresSource, system: PostgresSystem) -> Iterator[Connector]:
    connector = source.open(system.opening)
    yield connector
    connector.close()


def ids(system: PostgresSystem, planned: Any) -> list[int]:
    with opened(system.source, system) as connector:
        return [row["id"] for part in planned.parts for row in read(connector, part)[0]]


def test_rows_that_commit_late_come_once(by_transaction: PostgresSystem):
    system = by_transaction
    system.append(2)
    with transaction(system, 100, 101) as early:
        system.append(3)
        first = plan(system, begin(system), LARGE)
        assert ids(system, first) == [0, 1]
        assert first.ends == {"rows": False} and not first.limited, (
            "what is committed and not yet readable is not the end"
        )
        with opened(system.source, system) as connector:
            assert connector.lag(first.position).rows == 3
            assert connector.begin("latest") == first.position | {"after": connector.begin("latest")["after"]}
        early.commit()
        second = plan(system, first.position, LARGE)
        assert sorted(ids(system, second)) == [2, 3, 4, 100, 101] and second.ends == {"rows": True}
    with transaction(system, 102) as undone:
        system.append(1)
        assert ids(system, plan(system, second.position, LARGE)) == []
        undone.rollback()
    assert ids(system, plan(system, second.position, LARGE)) == [5]


def test_another_cursor_misses_them_so_it_has_to_be_said(postgres: Postgres):
    system = PostgresSystem(postgres, "id")
    system.append(1)
    with opened(replace(system.source, may_miss=False), system) as connector:
        for call in (lambda: connector.begin("earliest"), lambda: connector.plan({"after": None}, LARGE)):
            with pytest.raises(PipelineError, match="would be missed") as refused:
                call()
        assert "xid8" in refused.value.next
    with transaction(system, 5) as late:
        postgres.rows(f"INSERT INTO {system.table} (id) VALUES (6)")
        planned = plan(system, begin(system), LARGE)
        late.commit()
    assert plan(system, planned.position, LARGE).parts == (), "5 is missed"
    with opened(system.source, system) as connector, pytest.raises(VanishedError):
        connector.verify(planned.parts)  # which saves those that have come before the epoch's commit


def test_one_transaction_is_one_part(by_transaction: PostgresSystem):
    system = by_transaction
    system.append(3)
    system.server.rows(f"INSERT INTO {system.table} (id) SELECT 3 + i FROM generate_series(0, 9) AS i")
    system.append(1)
    position, sizes = begin(system), []
    while (planned := plan(system, position, Limits(10, 4, 1 << 30))).parts:
        sizes.append([part.rows for part in planned.parts])
        position = planned.position
    assert sizes == [[3], [10], [1]]


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM {0} WHERE id = 2",
        "UPDATE {0} SET price = NULL WHERE id = 2",
        "INSERT INTO {0} SELECT * FROM {0} WHERE id = 2",
        "TRUNCATE {0}",
    ],
)
def test_rows_that_change_below_the_cursor_are_noticed(by_transaction: PostgresSystem, change: str):
    system = by_transaction
    system.append(5)
    planned = plan(system, begin(system), LARGE)
    system.server.rows(change.format(system.table))
    with opened(system.source, system) as connector:
        with pytest.raises(InputError, match="not what they were") as changed:
            connector.verify(planned.parts)
        assert not isinstance(changed.value, VanishedError)
        with pytest.raises(InputError, match="not what they were"):
            read(connector, planned.parts[0])


def test_types(by_transaction: PostgresSystem):
    system = by_transaction
    server, table = system.server, f"{by_transaction.table}_types"
    server.rows(
        f"""CREATE TABLE {table} (tx xid8 DEFAULT pg_current_xact_id(), b bool, i2 int2, i4 int4, i8 int8, f4 float4, f8 float8, t text,
        v varchar(5), c char(3), y bytea, d date, tm time, ts timestamp, tz timestamptz, n numeric(20, 4), j json, jb jsonb, u uuid, a4 int[], at text[], o oid)"""
    )
    stamp = datetime(2026, 3, 1, 12, 0, 0, 123456)
    values = {
        "b": True, "i2": -5, "i4": 1 << 30, "i8": -(1 << 62), "f4": 1.5, "f8": 0.1, "t": "ä\n\\", "v": "ab", "c": "ab ",
        "y": b"\0\1", "d": date(1, 1, 1), "tm": time(23, 59, 59), "ts": stamp, "tz": stamp.replace(tzinfo=UTC),
        "n": Decimal("-1234567890123456.7891"), "j": '{"a":  1}', "jb": '{"a": 1}', "u": "00000000-0000-0000-0000-00000000000a",
        "a4": [1, None], "at": ["x", None], "o": 4000000000,
    }  # fmt: skip
    connection = psycopg2.connect(**{**server.options, "port": server.port})
    with connection, connection.cursor() as cursor:
        names = ", ".join(values)
        cursor.execute(
            f"INSERT INTO {table} ({names}) VALUES ({', '.join(['%s'] * len(values))})", list(values.values())
        )
        cursor.execute(f"INSERT INTO {table} DEFAULT VALUES")
    connection.close()
    with opened(PostgresSource(query=f"SELECT * FROM {table}", cursor="tx"), system) as connector:
        (part,) = connector.plan({"after": None}, LARGE).parts
        first, second = sorted(read(connector, part)[0], key=lambda row: row["b"] is None)
    assert {name: first[name] for name in values} == values
    assert {second[name] for name in values} == {None} and first["tx"] == second["tx"] > 0


@pytest.mark.parametrize(
    ("array", "read_as"),
    [
        ("'[0:1]={foo,bar}'::text[]", ["foo", "bar"]),
        ("'[-3:-2]={7,8}'::int8[]", [7, 8]),
        ("'[5:6]={t,NULL}'::bool[]", [True, None]),
        ("'[2:2]={abc}'::varchar(3)[]", ["abc"]),
        ("'[0:0]={-0.5}'::float8[]", [-0.5]),
        ("'{}'::int4[]", []),
    ],
)
def test_arrays_that_count_from_elsewhere_are_read(by_transaction: PostgresSystem, array: str, read_as: list[Any]):
    system = by_transaction
    system.append(3)
    query = f"SELECT id, tx, CASE WHEN id = 1 THEN {array} END AS list FROM {system.table}"
    with opened(PostgresSource(query=query, cursor="tx"), system) as connector:
        (part,) = connector.plan({"after": None}, LARGE).parts
        rows, rejected = read(connector, part)
    assert rejected == [] or rejected == ()
    assert {row["id"]: row["list"] for row in rows} == {
        id: read_as if id == 1 else None for id in {r["id"] for r in rows}
    }


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ("'NaN'::numeric(5, 2)", "is NaN"),
        ("'infinity'::timestamptz", "is infinite"),
        ("'-infinity'::timestamp", "is infinite"),
        ("'294276-12-31'::timestamp", "outside of the years"),
        ("'10000-01-01 00:00+00'::timestamptz", "outside of the years"),
        ("'4000-01-01 BC'::timestamptz", "outside of the years"),
        ("'4000-01-01 BC'::date", "outside of the years"),
        ("'10000-01-01'::date", "outside of the years"),
        ("'infinity'::date", "is infinite"),
        ("'24:00'::time", "is 24:00"),
        ("'{{1,2},{3,4}}'::int[]", "several dimensions"),
        ("'9223372036854775808'::xid8", "larger than a whole number of 64 bits"),
    ],
)
def test_values_without_a_like_are_rejected_alone(by_transaction: PostgresSystem, column: str, reason: str):
    system = by_transaction
    system.append(3)
    query = f"SELECT id, tx, CASE WHEN id = 1 THEN {column} END AS strange FROM {system.table}"
    query = query.replace(
        "CASE WHEN id = 1 THEN 'NaN'::numeric(5, 2) END", "(CASE WHEN id = 1 THEN 'NaN'::numeric END)::numeric(5, 2)"
    )
    with opened(PostgresSource(query=query, cursor="tx"), system) as connector:
        (part,) = connector.plan({"after": None}, LARGE).parts
        rows, (rejected,) = read(connector, part)
    assert [row["id"] for row in rows] == [0, 2] and rejected.number == 2
    assert rejected.reason.startswith("strange is") and reason in rejected.reason and rejected.raw.startswith("(1,")


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_texts_of_a_database_in_another_encoding_are_read_as_they_are(by_transaction: PostgresSystem, encoding: str):
    server, name = by_transaction.server, f"encoded_{encoding.lower()}"
    server.query(f"CREATE DATABASE {name} ENCODING {encoding} LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    try:
        server.query("CREATE TABLE t (id int8, tx xid8 DEFAULT pg_current_xact_id(), text text)", name)
        server.query("INSERT INTO t (id, text) VALUES (1, 'caf' || chr(233))" if encoding == "LATIN1" else
                     r"INSERT INTO t (id, text) VALUES (1, E'caf\303\251')", name)  # fmt: skip
        opening = Opening("p", str, {**server.options, "dbname": name, "client_encoding": "LATIN1"})
        connector = PostgresSource(query='SELECT id, tx, text AS "é" FROM t', cursor="tx").open(opening)
        (part,) = connector.plan({"after": None}, LARGE).parts
        rows, _ = read(connector, part)
        connector.close()
        assert [row["é"] for row in rows] == ["café"]
    finally:
        server.query(f"DROP DATABASE {name} WITH (FORCE)")


def test_a_value_that_the_query_cannot_work_with_says_what_to_do(by_transaction: PostgresSystem):
    by_transaction.append(3)
    source = PostgresSource(query=f"SELECT tx, 1 / (id - 1) AS x FROM {by_transaction.table}", cursor="tx")
    with opened(source, by_transaction) as connector, pytest.raises(InputError, match="leave such rows out by WHERE"):
        connector.plan({"after": None}, LARGE)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ("tx, 1.5::numeric AS n", "n is a numeric"),
        ("tx, 1.5::numeric(50, 2) AS n", "n is a numeric"),
        ("tx, now() - now() AS since", r"since is of a type .*interval"),
        ("tx, '1.1.1.1'::inet AS ip", "ip is of a type"),
        ("tx, '[1,2]'::int4range AS r", "r is of a type"),
        ("tx, ARRAY[now()] AS times", "times is of a type"),
        ("tx, id AS tx", "no single column tx"),
        ("tx, id AS weir_q", "no single column weir_q"),
        ("tx, 'a'::mood AS m", "m is of a type that has no like"),
        ("tx, $1 AS p", "parameter"),
        ("id", "cursor tx is no column"),
        ("id::text AS tx", "cursor tx is of type text"),
        ("nope, tx", 'column "nope" does not exist'),
        ("tx FROM nowhere --", 'relation "nowhere" does not exist'),
        ("tx, FROM", "syntax error"),
        ("nullif(tx, tx) AS tx", "tx is null"),
        ("tx, 1 / (id - 3) AS x", "division by zero"),
    ],
)
def test_queries_that_do_not_fit_are_refused_by_column(by_transaction: PostgresSystem, columns: str, reason: str):
    system = by_transaction
    system.append(5)
    system.server.rows("DROP TYPE IF EXISTS mood; CREATE TYPE mood AS ENUM ('a', 'b')")
    source = PostgresSource(query=f"SELECT {columns} FROM {system.table}", cursor="tx")
    with opened(source, system) as connector, pytest.raises(InputError, match=reason) as refused:
        for part in connector.plan({"after": None}, LARGE).parts:
            read(connector, part)
    assert refused.value.where.startswith("source postgres")


def test_an_event_time_that_is_none_is_named(by_transaction: PostgresSystem):
    with (
        opened(replace(by_transaction.source, event_time="id"), by_transaction) as connector,
        pytest.raises(InputError, match="event time id"),
    ):
        connector.begin("earliest")


def test_a_table_that_is_gone_or_altered_is_named(by_transaction: PostgresSystem):
    system = by_transaction
    system.append(5)
    planned = plan(system, begin(system), LARGE)
    with opened(system.source, system) as connector:
        system.server.rows(f"ALTER TABLE {system.table} ALTER price TYPE numeric(8, 1)")
        with pytest.raises(InputError):
            connector.verify(planned.parts)
        again = connector.plan({"after": None}, LARGE)
        system.server.rows(f"ALTER TABLE {system.table} RENAME price TO cost")
        with pytest.raises(InputError, match="not what they were"):
            read(connector, planned.parts[0])
        with pytest.raises(InputError, match="does not exist"):
            read(connector, again.parts[0])
        system.server.rows(f"DROP TABLE {system.table}")
        for call in (lambda: connector.plan(planned.position, LARGE), lambda: connector.lag(planned.position)):
            with pytest.raises(InputError, match="does not exist"):
                call()


def test_a_server_that_has_gone_back_is_noticed(by_transaction: PostgresSystem):
    by_transaction.append(1)
    with (
        opened(by_transaction.source, by_transaction) as connector,
        pytest.raises(InputError, match="has not come that far"),
    ):
        connector.plan({"after": str(1 << 60)}, LARGE)


def test_it_begins_at_a_time_of_its_cursor(postgres: Postgres):
    table = f"source_{next(NUMBERS)}"
    for kind, step in (("timestamptz", "1 minute"), ("timestamp", "1 minute"), ("date", "1 day")):
        postgres.rows(
            f"CREATE TABLE {table}_{kind} AS SELECT i AS id, ('2026-01-01'::{kind} + i * interval '{step}')::{kind} AS at FROM generate_series(0, 9) AS i"
        )
        source = PostgresSource(query=f"SELECT * FROM {table}_{kind}", cursor="at", may_miss=True)
        connector = source.open(Opening("p", str, postgres.options))
        start = datetime(2026, 1, 1, tzinfo=UTC) + 3 * (timedelta(days=1) if kind == "date" else timedelta(minutes=1))
        (part,) = connector.plan(connector.begin(start), LARGE).parts
        assert [row["id"] for row in read(connector, part)[0]] == list(range(3, 10)), kind
        assert connector.plan(connector.begin("latest"), LARGE).parts == ()
        connector.close()


def test_a_session_that_is_killed_while_it_reads(by_transaction: PostgresSystem):
    system = by_transaction
    system.server.rows(f"INSERT INTO {system.table} (id, price) SELECT i, 1 FROM generate_series(1, 200000) AS i")
    with opened(system.source, system) as connector:
        planned = connector.plan({"after": None}, LARGE)
        (part,) = planned.parts
        batches = connector.read(part)
        next(batches)
        system.server.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'weir' AND state <> 'idle'"
        )
        with pytest.raises(TransientError):
            for _ in batches:
                pass
        assert sum(batch.rows.num_rows for batch in connector.read(part)) == 200_000
        half = connector.read(part)
        next(half)
        half.close()  # nobody reads on
        connector.verify(planned.parts)


@pytest.mark.parametrize("wrong", [{"query": " "}, {"cursor": ""}, {"archive": False}])
def test_definitions_that_do_not_fit_are_refused(wrong: dict[str, Any]):
    with pytest.raises(PipelineError, match=r"empty|cursor|archived"):
        PostgresSource(**{"query": "SELECT 1", "cursor": "tx", **wrong})


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM {0};",
        "SELECT * FROM {0} -- all; of it",
        "SELECT * FROM {0} /* ; */ ;  ",
        "WITH r AS (SELECT * FROM {0}) SELECT * FROM r -- '",
        "SELECT id, tx, '100%' AS share, '{{}}' AS braces, '?' AS mark FROM {0}",
        "TABLE {0}",
        "VALUES (0, '1'::xid8), (1, '2'::xid8), (2, '3'::xid8)",
    ],
)
def test_queries_are_taken_as_they_are(by_transaction: PostgresSystem, query: str):
    system = by_transaction
    system.append(3)
    cursor, number = ("column2", "column1") if query.startswith("VALUES") else ("tx", "id")
    with opened(PostgresSource(query=query.format(system.table), cursor=cursor), system) as connector:
        rows = [row for part in connector.plan({"after": None}, LARGE).parts for row in read(connector, part)[0]]
    assert [row[number] for row in rows] == [0, 1, 2]


@pytest.mark.parametrize(
    "query", ["SELECT * FROM {0}; DROP TABLE {0}", "WITH gone AS (DELETE FROM {0} RETURNING *) SELECT * FROM gone"]
)
def test_a_query_that_does_more_than_read_is_refused(by_transaction: PostgresSystem, query: str):
    system = by_transaction
    system.append(3)
    source = PostgresSource(query=query.format(system.table), cursor="tx")
    with opened(source, system) as connector, pytest.raises(InputError):
        connector.plan({"after": None}, LARGE)
    assert system.server.rows(f"SELECT count(*) FROM {system.table}") == [(3,)]


def test_a_transaction_that_holds_rows_back_is_named_once(by_transaction: PostgresSystem, capsys: Any):
    system = by_transaction
    with transaction(system, 1) as idle, opened(system.source, system) as connector:
        pid = idle.get_backend_pid()
        system.append(1)
        for _ in range(3):
            planned = connector.plan({"after": None}, LARGE)
            assert planned.parts == () and planned.ends == {"rows": False}
        printed = capsys.readouterr().out
        assert printed.count("rows wait for a transaction") == 1 and f"pid {pid}, idle in transaction" in printed
        idle.commit()
        (part,) = connector.plan({"after": None}, LARGE).parts
        assert part.rows == 2 and "wait" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "value"), [("timestamptz", "infinity"), ("date", "-infinity"), ("numeric(9, 2)", "NaN")]
)
def test_a_cursor_behind_which_nothing_comes_is_refused(postgres: Postgres, kind: str, value: str):
    table = f"source_{next(NUMBERS)}"
    postgres.rows(f"CREATE TABLE {table} AS SELECT 1 AS id, '{value}'::{kind} AS c")
    connector = PostgresSource(query=f"TABLE {table}", cursor="c", may_miss=True).open(
        Opening("p", str, postgres.options)
    )
    with pytest.raises(InputError, match="infinite or NaN"):
        connector.plan({"after": None}, LARGE)
    connector.close()


def test_a_column_that_comes_or_is_widened_is_read_from_the_next_plan_on(by_transaction: PostgresSystem):
    system = by_transaction
    system.append(1)
    with opened(system.source, system) as connector:
        first = connector.plan({"after": None}, LARGE)
        assert "more" not in read(connector, first.parts[0])[0][0]
        system.server.rows(f"ALTER TABLE {system.table} ADD more text, ALTER price TYPE numeric(38, 2)")
        system.server.rows(f"INSERT INTO {system.table} (id, price, more) VALUES (1, 1e30, 'x')")
        second = connector.plan(first.position, LARGE)
        (row,) = read(connector, second.parts[0])[0]
    assert row["more"] == "x" and row["price"] == Decimal(10) ** 30


def test_a_cursor_may_lie_beyond_32_bits(by_transaction: PostgresSystem):
    system = by_transaction
    query = f"SELECT id, ((1::int8 << 33) + id)::text::xid8 AS far, tx FROM {system.table}"
    system.append(3)
    with opened(PostgresSource(query=query, cursor="far"), system) as connector:
        assert connector.plan({"after": None}, LARGE).parts == (), "no transaction of the server is that far"
        assert connector.lag({"after": str((1 << 33) + 1)}).rows == 1
        assert connector.begin({"after": f" {1 << 33}"}) == {"after": str(1 << 33)}
