"""What the Postgres sink refuses before the commit is what a real server refuses, no less and no more."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from state_ops.errors import WeirError
from tests.tools.postgres_server import Postgres
from tests.tools.sampling import rounds
from weir.connectors.postgres.sink import CHANGE, PostgresSink
from weir.connectors.postgres.values import PostgresRules, TextRule
from weir.connectors.staged_rows import StagedRows
from weir.definition.sink import Publisher, SinkOpening

NUMBERS = itertools.count()
DEEP = 3_000
TEXTS = {
    "text": ["", "ok", "a\0b", "\0", "ü€😀", "x" * 10_000],
    "varchar(3)": ["", "abc", "abcd", "abc  ", "üüü", "😀😀😀😀", "a\0"],
    "uuid": [
        "6f0f8b1e-0000-4000-8000-0123456789ab", "{6F0F8B1E-0000-4000-8000-0123456789AB}",
        "6f0f8b1e000040008000-0123456789ab", "6f0f-8b1e-0000-4000-8000-0123-4567-89ab", "", "6f0f8b1e", " ",
        "6f0f8b1e-0000-4000-8000-0123456789a", "{6f0f8b1e-0000-4000-8000-0123456789ab", "6f0f8b1e00004000800001234567-89ab",
        "6f0f8b1-e0000-4000-8000-0123456789ab", "6f0f8b1e-0000-4000-8000-0123456789ab\n", "6f0f8b1e--0000-4000-8000-0123456789ab",
    ],
    "json": [
        "{}", "[1, 2.5e-3]", '"a"', " null\n", "", "nope", "NaN", "-Infinity", "[1,]", "{'a': 1}", '{"a": 01}', "[1] x",
        '"\\u0000"', '"\\ud800"', '"\\ud83d\\ude00"', '"a\tb"', "1e400000", "9" * 5_000, '{"a":1,"a":2}', "\ufeff{}", '"\\x"',
        "1.", "-", "-0", "+1", ".5", "1E+2", "[" * 40 + "]" * 40, '"\\/"', "true", "True", "\u00a01",
    ],
    "mood": ["good", "bad", "", "worse", "Good", "good ", "x" * 100],
}  # fmt: skip
TEXTS["jsonb"] = [*TEXTS["json"], "1e131071", "1e131072", "0e999999", "1e-16383", "1e-16384", "9" * 131_072, '{"a": "\\u0000"}',
                  '{"\\u0000": 1}', '["\\\\u0000"]', '"\\udc00\\ud800"', '"\\ud800x"', "9" * 131_073]  # fmt: skip


class Table:
    """A table with a column v of some type."""

    def __init__(self, server: Postgres, declared: str, more: str = "") -> None:
        self.server, self.schema = server, f"values_{next(NUMBERS)}"
        server.rows(f"CREATE SCHEMA {self.schema}")
        server.rows(f"CREATE TYPE {self.schema}.mood AS ENUM ('good', 'bad')")
        type = f"{self.schema}.mood" if declared == "mood" else declared
        server.rows(f"CREATE TABLE {self.schema}.t (id int8, v {type} {more})")

    @contextmanager
    def opened(self, key: tuple[str, ...] = ()) -> Iterator[Publisher]:
        sink = PostgresSink(name="out", table=f"{self.schema}.t", key=key, connection="db")
        publisher = sink.open(SinkOpening("p/main/out", str, self.server.options, lambda: None))
        try:
            yield publisher
        finally:
            publisher.close()


class Batch(StagedRows):
    """Rows at hand."""

    def __init__(self, rows: pa.Table) -> None:
        self.rows, self.since = rows, None

    @property
    def schema(self) -> pa.Schema:
        return self.rows.schema

    @property
    def count(self) -> int:
        return self.rows.num_rows

    def batches(self) -> Iterator[pa.RecordBatch]:
        return iter(self.rows.to_batches())


def takes(publisher: Publisher, rows: pa.Table) -> bool:
    """Whether the server takes rows."""
    before = publisher.marker()
    try:
        publisher.publish(before, (before or 0) + 1, Batch(rows))
    except WeirError:
        return False
    return True


def agree(publisher: Publisher, rows: pa.Table) -> None:
    rules = pickle.loads(pickle.dumps(publisher.rules(rows.schema)))
    refused = list(rules.refused(rows))
    assert takes(publisher, rows) == (not refused), (rows.to_pylist(), refused)
    assert all(value.row < rows.num_rows for value in refused)


ENCODINGS = """LATIN1 LATIN2 LATIN3 LATIN4 LATIN5 LATIN6 LATIN7 LATIN8 LATIN9 LATIN10 WIN866 WIN874 WIN1250 WIN1251 WIN1252
WIN1253 WIN1254 WIN1255 WIN1256 WIN1257 WIN1258 KOI8R KOI8U ISO_8859_5 ISO_8859_6 ISO_8859_7 ISO_8859_8 EUC_CN EUC_JP EUC_KR"""
QUICK = ("LATIN1", "WIN1252", "EUC_JP", "EUC_KR")
LETTERS_OF = """
CREATE OR REPLACE FUNCTION letters_of(encoding text) RETURNS int[] LANGUAGE plpgsql AS $$
DECLARE found int[] := '{}'; letter int;
BEGIN
  FOR letter IN 1..65535 LOOP
    CONTINUE WHEN letter BETWEEN 55296 AND 57343;
    BEGIN PERFORM convert_to(chr(letter), encoding); found := found || letter;
    EXCEPTION WHEN OTHERS THEN NULL; END;
  END LOOP;
  RETURN found;
END $$"""


@pytest.mark.parametrize(
    "encoding", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in ENCODINGS.split()]
)
def test_letters_are_refused_that_the_encoding_of_the_database_lacks(postgres, encoding):
    """All of the basic plane; of a few symbols of EUC_JP and EUC_KR the rules are stricter than the server."""
    postgres.query(LETTERS_OF)
    ((has,),) = postgres.query(f"SELECT letters_of('{encoding}')")
    letters = [code for code in range(1, 1 << 16) if not 0xD800 <= code < 0xE000]
    rules = PostgresRules((), (), (("v", TextRule("text")),), encoding, (CHANGE, (), ()))
    refused = {letters[value.row] for value in rules.refused(pa.table({"v": [chr(code) for code in letters]}))}
    taken = set(letters) - refused
    assert taken <= set(has)
    assert len(set(has) - taken) <= {"EUC_JP": 173, "EUC_KR": 1}.get(encoding, 0)
    row = pa.table({"v": ["ok", "a\U0001f600"]})
    assert [value.row for value in rules.refused(row)] == [1]


@pytest.mark.parametrize("encoding", ["LATIN1", "EUC_JP", "SQL_ASCII", "EUC_TW"])
def test_rows_are_written_into_a_database_in_another_encoding(postgres, encoding):
    database, has_word = f"sink_{encoding.lower()}", {"LATIN1": "café", "EUC_JP": "日本"}.get(encoding, "a")
    options = "LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    postgres.query(f"CREATE DATABASE {database} ENCODING '{encoding}' {options}")
    try:
        sink = PostgresSink(name="out", table=f"t_{has_word}", key=("id",), connection="db")
        opening = SinkOpening("p/main/out", str, {**postgres.options, "dbname": database}, lambda: None)
        publisher = sink.open(opening)
        rows = pa.table({"id": [1], "v": [has_word], "of": [[has_word]]})
        try:
            if encoding == "EUC_TW":
                with pytest.raises(WeirError, match="in EUC_TW, and which letters that has is not known"):
                    publisher.rules(rows.schema)
                return
            assert not list(publisher.rules(rows.schema).refused(rows))
            publisher.prepare(rows.schema)
            publisher.publish(None, 1, Batch(rows))
        finally:
            publisher.close()
        ((v, of, letters),) = postgres.query(f'SELECT v, of, length(v) FROM "t_{has_word}"', database)
        assert (v, of, letters) == (has_word, [has_word], len(has_word))
    finally:
        postgres.query(f"DROP DATABASE {database} WITH (FORCE)")


@pytest.mark.parametrize("declared", TEXTS)
def test_texts_are_refused_that_the_server_refuses(postgres, declared):
    with Table(postgres, declared).opened() as publisher:
        for text in [*TEXTS[declared], None]:
            agree(publisher, pa.table({"id": [1], "v": pa.array([text], pa.string())}))


def test_the_row_and_the_problem_are_told(postgres):
    with Table(postgres, "jsonb", "NOT NULL").opened(()) as publisher:
        rows = pa.table({"id": [1, 2, 3, 4], "v": ["{}", "{", None, '"\\u0000"']})
        told = [(value.row, value.column, value.problem) for value in publisher.rules(rows.schema).refused(rows)]
    assert [at for at, _, _ in told] == [2, 1, 3]
    assert all(column == "v" for _, column, _ in told)
    assert "NOT NULL" in told[0][2] and "no JSON: '{'" in told[1][2] and "\\u0000" in told[2][2]


def test_nulls_are_told_in_rows_that_come_and_not_in_those_that_go(postgres):
    table = Table(postgres, "text", "NOT NULL")
    postgres.rows(f"CREATE UNIQUE INDEX ON {table.schema}.t (id)")
    with table.opened(("id",)) as publisher:
        for kind, id, v in [
            ("insert", 1, "a"),
            ("delete", 1, None),
            ("insert", 1, None),
            ("what", 1, "a"),
            (None, 1, "a"),
        ]:
            agree(
                publisher,
                pa.table({"id": [id], "v": pa.array([v], pa.string()), CHANGE: pa.array([kind], pa.string())}),
            )
        rows = pa.table({"id": pa.array([None], pa.int64()), "v": ["a"]})
        assert [value.column for value in publisher.rules(rows.schema).refused(rows)] == ["id"]


def test_texts_in_lists_are_judged_too(postgres):
    with Table(postgres, "text[]").opened() as publisher:
        for value in ([], ["a", None], ["a", "b\0"], None):
            agree(publisher, pa.table({"id": [1], "v": pa.array([value], pa.list_(pa.string()))}))
        rows = pa.table({"id": [1, 2, 3], "v": [["a"], [], ["b", "\0"]]})
        assert [value.row for value in publisher.rules(rows.schema).refused(rows)] == [2]


def test_rows_of_a_table_that_is_not_there_yet_are_judged_by_the_one_that_will_be(postgres):
    table = Table(postgres, "text")
    postgres.rows(f"DROP TABLE {table.schema}.t")
    with table.opened(("id",)) as publisher:
        rows = pa.table({"id": pa.array([1, None], pa.int64()), "v": ["a\0", "b"]})
        assert [(v.row, v.column) for v in publisher.rules(rows.schema).refused(rows)] == [(1, "id"), (0, "v")]


@pytest.fixture(scope="module")
def publishers(postgres):
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield {declared: stack.enter_context(Table(postgres, declared).opened()) for declared in TEXTS}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda of: st.lists(of) | st.dictionaries(st.text(), of),
)


@rounds(3)
@given(data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_judged_as_the_server_does(publishers, round_, data):
    import json as library

    declared = data.draw(st.sampled_from(list(TEXTS)))
    of_json = st.builds(library.dumps, _JSON, ensure_ascii=st.booleans()).filter(lambda text: text.isprintable())
    text = data.draw(st.sampled_from(TEXTS[declared]) | st.text(max_size=6) | of_json)
    cut = data.draw(st.integers(0, 3))
    text = text[: len(text) - cut].encode(errors="ignore").decode()
    agree(publishers[declared], pa.table({"id": [1], "v": pa.array([text], pa.string())}))
