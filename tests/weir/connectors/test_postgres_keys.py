"""Rows of one key are told apart as the table's unique index does it, by a real server."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from state_ops.errors import PipelineError
from tests.tools.postgres_server import Postgres
from tests.weir.connectors.test_postgres_sink import PostgresSystem, Table, opened
from weir.testing.sink_contract import publish

CI = "CREATE COLLATION {s}.ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
FOLDED = (  # an operator class of one's own: texts by their lower case
    "CREATE FUNCTION {s}.eq(text, text) RETURNS bool LANGUAGE sql IMMUTABLE STRICT AS 'SELECT lower($1) = lower($2)'",
    "CREATE FUNCTION {s}.lt(text, text) RETURNS bool LANGUAGE sql IMMUTABLE STRICT AS 'SELECT lower($1) < lower($2)'",
    "CREATE FUNCTION {s}.le(text, text) RETURNS bool LANGUAGE sql IMMUTABLE STRICT AS 'SELECT lower($1) <= lower($2)'",
    "CREATE FUNCTION {s}.gt(text, text) RETURNS bool LANGUAGE sql IMMUTABLE STRICT AS 'SELECT lower($1) > lower($2)'",
    "CREATE FUNCTION {s}.ge(text, text) RETURNS bool LANGUAGE sql IMMUTABLE STRICT AS 'SELECT lower($1) >= lower($2)'",
    "CREATE FUNCTION {s}.cmp(text, text) RETURNS int LANGUAGE sql IMMUTABLE STRICT AS "
    "'SELECT CASE WHEN lower($1) < lower($2) THEN -1 WHEN lower($1) > lower($2) THEN 1 ELSE 0 END'",
    *(
        f"CREATE OPERATOR {{s}}.{operator} (LEFTARG = text, RIGHTARG = text, FUNCTION = {{s}}.{function})"
        for operator, function in (("=", "eq"), ("<", "lt"), ("<=", "le"), (">", "gt"), (">=", "ge"))
    ),
    "CREATE OPERATOR CLASS {s}.folded FOR TYPE text USING btree AS OPERATOR 1 {s}.<, OPERATOR 2 {s}.<=, "
    "OPERATOR 3 {s}.=, OPERATOR 4 {s}.>=, OPERATOR 5 {s}.>, FUNCTION 1 {s}.cmp(text, text)",
)
ONE = {
    "collation of the column": ([CI, "CREATE TABLE {t} (id text COLLATE {s}.ci PRIMARY KEY, v int8)"], "A", "a"),
    "collation of the index": (
        [CI, "CREATE TABLE {t} (id text NOT NULL, v int8)", "CREATE UNIQUE INDEX ON {t} (id COLLATE {s}.ci)"],
        "A",
        "a",
    ),
    "another index beside it": (
        [CI, "CREATE TABLE {t} (id text PRIMARY KEY, v int8)", "CREATE UNIQUE INDEX ON {t} (id COLLATE {s}.ci)"],
        "A",
        "a",
    ),
    "operator class": (
        [*FOLDED, "CREATE TABLE {t} (id text NOT NULL, v int8)", "CREATE UNIQUE INDEX ON {t} (id {s}.folded)"],
        "A",
        "a",
    ),
    "blanks at the end": (["CREATE TABLE {t} (id varchar(2) PRIMARY KEY, v int8)"], "ab", "ab  "),
    "blanks, and a collation": ([CI, "CREATE TABLE {t} (id varchar(2) COLLATE {s}.ci PRIMARY KEY, v int8)"], "ab", "AB "),
    "patterns": (
        ["CREATE TABLE {t} (id varchar(2) NOT NULL, v int8)", "CREATE UNIQUE INDEX ON {t} (id varchar_pattern_ops)"],
        "ab",
        "ab ",
    ),
    "blanks, by the operator class": (
        ["CREATE TABLE {t} (id text NOT NULL, v int8)", "CREATE UNIQUE INDEX ON {t} (id bpchar_ops)"],
        "ab",
        "ab  ",
    ),
    "enum": (
        ["CREATE TYPE {s}.mood AS ENUM ('glad', 'sad')", "CREATE TABLE {t} (id {s}.mood PRIMARY KEY, v int8)"],
        "glad",
        "glad",
    ),
    "texts": ([CI, "CREATE TABLE {t} (id text[] COLLATE {s}.ci PRIMARY KEY, v int8)"], ["A", "b"], ["a", "B"]),
    "wider numbers": (["CREATE TABLE {t} (id numeric PRIMARY KEY, v int8)"], 1, 1),
    "uuid": (["CREATE TABLE {t} (id uuid PRIMARY KEY, v int8)"], f"{'A' * 32}", f"{{{'a' * 32}}}"),
    "jsonb": (["CREATE TABLE {t} (id jsonb PRIMARY KEY, v int8)"], '{"a": 1}', '{"a":1.0}'),
    "zeros": (["CREATE TABLE {t} (id float8 PRIMARY KEY, v int8)"], -0.0, 0.0),
    "no number": (["CREATE TABLE {t} (id float8 PRIMARY KEY, v int8)"], float("nan"), -float("nan")),
}  # fmt: skip


@pytest.fixture
def keyed(postgres: Postgres) -> PostgresSystem:
    return PostgresSystem(postgres, ("id",))


def made(system: PostgresSystem, statements: list[str]) -> None:
    for statement in statements:
        system.server.rows(statement.format(s=system.schema, t=system.table))


def put(*rows: tuple[Any, int]) -> Table:
    keys, values = zip(*rows, strict=True)
    return Table(id=pa.array(keys), v=pa.array(values, pa.int64()))


def change(*rows: tuple[str, Any, int]) -> Table:
    kinds, keys, values = zip(*rows, strict=True)
    return Table(id=pa.array(keys), v=pa.array(values, pa.int64()), _change_type=pa.array(kinds))


def values(system: PostgresSystem) -> list[int]:
    return [value for (value,) in system.server.rows(f"SELECT v FROM {system.table} ORDER BY v")]


@pytest.mark.parametrize("case", ONE)
def test_two_spellings_of_a_key_are_one_row(keyed: PostgresSystem, case: str):
    statements, one, other = ONE[case]
    made(keyed, statements)
    assert publish(keyed, None, 1, put((one, 1), (other, 2))).rows == 1
    assert values(keyed) == [2]
    assert publish(keyed, 1, 2, put((one, 3))).rows == 1
    assert values(keyed) == [3]
    assert publish(keyed, 2, 3, change(("insert", one, 4), ("delete", other, 4), ("insert", one, 5))).rows == 1
    assert values(keyed) == [5]
    assert publish(keyed, 3, 4, change(("delete", other, 5))).rows == 1
    publish(keyed, 4, 5, change(("insert", one, 6), ("insert", other, 7), ("delete", one, 7)))
    assert values(keyed) == []


def test_an_index_that_tells_more_apart_than_the_column(keyed: PostgresSystem):
    """The column's collation takes both for one, and the index for two: both rows stay, and one goes alone."""
    made(keyed, [CI, "CREATE TABLE {t} (id text COLLATE {s}.ci NOT NULL, v int8)"])
    made(keyed, ['CREATE UNIQUE INDEX ON {t} (id COLLATE "C")'])
    publish(keyed, None, 1, put(("A", 1), ("a", 2)))
    assert values(keyed) == [1, 2]
    publish(keyed, 1, 2, change(("delete", "a", 2)))
    assert values(keyed) == [1]


def test_the_last_spelling_of_a_key_stays_wherever_epochs_end(postgres: Postgres):
    for together in (True, False):
        keyed = PostgresSystem(postgres, ("id",))
        made(keyed, [CI, "CREATE TABLE {t} (id text COLLATE {s}.ci PRIMARY KEY, v int8)"])
        if together:
            publish(keyed, None, 1, put(("A", 1), ("a", 2)))
        else:
            publish(keyed, None, 1, put(("A", 1)))
            publish(keyed, 1, 2, put(("a", 2)))
        assert keyed.server.rows(f'SELECT id COLLATE "C", v FROM {keyed.table}') == [("a", 2)]


def test_a_key_of_several_columns_is_compared_column_by_column(postgres: Postgres):
    keyed = PostgresSystem(postgres, ("id", "of"))
    made(keyed, [CI, 'CREATE TABLE {t} (v int8, "of" text COLLATE {s}.ci, id int8, PRIMARY KEY ("of", id))'])
    rows = {"id": pa.array([1, 2, 1]), "of": pa.array(["x", "x", "X"]), "v": pa.array([1, 2, 3])}
    assert publish(keyed, None, 1, Table(**rows)).rows == 2
    assert values(keyed) == [2, 3]


def test_indexes_of_which_none_covers_the_others_are_refused(keyed: PostgresSystem):
    """With one collation A and a are one row, with the other a and \u00e1: then which rows go is not clear."""
    accents = "CREATE COLLATION {s}.ai (provider = icu, locale = 'und-u-ks-level1-kc-true', deterministic = false)"
    made(keyed, [CI, accents, "CREATE TABLE {t} (id text NOT NULL, v int8)"])
    made(keyed, [f"CREATE UNIQUE INDEX ON {{t}} (id COLLATE {{s}}.{name})" for name in ("ci", "ai")])
    with opened(keyed) as sink, pytest.raises(PipelineError, match="several unique indexes") as refused:
        sink.check(put(("A", 1)).schema)
    assert "Drop all" in (refused.value.next or "")


def test_a_text_is_never_cut_to_be_a_key(keyed: PostgresSystem):
    made(keyed, ["CREATE TABLE {t} (id varchar(2) PRIMARY KEY, v int8)"])
    with pytest.raises(PipelineError, match="value too long"):
        publish(keyed, None, 1, put(("abc", 1), ("ab", 2)))
    assert values(keyed) == []
