"""Regular expressions in `where` and `select`: what is taken finds what Spark finds, and the rest is refused."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from tests.tools.sampling import sampled
from weir.where import Refused, projected

TEXTS = [
    None, "", "a", "b", "ab", "ba", "aab", "abab", "aé", "é", "ÉÉ", "😀a", "a😀b", "a\nb", "a\r\nb", "a\u2028b", "\u0085", "\ta b",
    "1", "12", "٣", "a1_b", "-", "a-b", "]", "[a]", "^a", "a$", "(a)", "a|b", "a.b", "a\\b", "a&b", "a&&b", "~", "#", "{a}", "a+b", "K", "\u017f",
    "https://x.y/item.htm?query=1&channel_id=123", "channel_id=&channel_id=7", "x&channel_id=a&b", "\x0b\x0c", "\x1c", "\u00a0",
]  # fmt: skip
ROWS = pa.table({"s": pa.array(TEXTS, pa.string())})
ATOMS = [
    "a",
    "b",
    "1",
    "é",
    "😀",
    ".",
    r"\d",
    r"\w",
    r"\s",
    r"\D",
    r"\W",
    r"\S",
    r"\.",
    r"\[",
    r"\-",
    r"\&",
    "-",
    "&",
    "~",
    "#",
    " ",
    "_",
]
CLASSES = [
    "[ab]",
    "[^a]",
    "[^&]",
    "[a-c]",
    r"[\d_]",
    r"[^\s]",
    "[-a]",
    "[a-]",
    "[&a]",
    r"[\]\[]",
    "[.]",
    "[~#]",
    "[^-a]",
    r"[\^a]",
    "[+-9]",
]
REPETITIONS = ["", "", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,}", "{0,2}", "{1,2}?"]
REFUSED = [
    "a$", r"\bword", r"\Aa", r"a\z", "(?i)a", "(?=a)", "(?<n>a)", r"(a)\1", "a++", "a**", "(ab)+", "(a*)?", "(?:a|b)*", "[", "[]", "[^]", "[a&&b]",
    "[a[b]]", "[b-a]", "[a-z-9]", r"[\d-9]", r"[\n]", r"\n", "a{", "a{,2}", "a{2,1}", "a{1000}", "(", ")", "a)", "(a", "*a", "^*", "a]", "a}", "\\", r"\p{L}",
    r"\Qa\E", r"[\D]", "[--a]", "[+--]", "[a-&&b]",
]  # fmt: skip


def sequence(chance: random.Random, depth: int = 0) -> str:
    written = chance.choice(["", "", "", "^"])
    for _ in range(chance.randint(0 if depth else 1, 3)):
        if depth < 2 and chance.random() < 0.3:
            inner = "|".join(sequence(chance, depth + 1) for _ in range(chance.randint(1, 3)))
            written += f"({chance.choice(['', '', '?:'])}{inner}){chance.choice(['', '', '?'])}"
        else:
            written += chance.choice([*ATOMS, *ATOMS, *CLASSES]) + chance.choice(REPETITIONS)
    return written


def literal(pattern: str) -> str:
    return "'" + pattern.replace("\\", "\\\\").replace("'", "\\'") + "'"


def asked(pattern: str) -> list[str]:
    """Columns of all that a pattern may be asked for and that is taken."""
    columns = [f"s RLIKE {literal(pattern)}", *(f"regexp_extract(s, {literal(pattern)}, {n})" for n in range(5))]
    return [column for column in columns if taken(column)]


def taken(column: str) -> bool:
    try:
        projected((f"{column} AS c",), ROWS.schema)
    except Refused:
        return False
    return True


def compare(spark, columns: list[str]) -> None:
    named = tuple(f"{column} AS c{number}" for number, column in enumerate(columns))
    ours = projected(named, ROWS.schema).of(ROWS).to_pydict()
    frame = spark.createDataFrame([(number, text) for number, text in enumerate(TEXTS)], "at int, s string").coalesce(1)
    theirs = frame.selectExpr("at", *named).orderBy("at").toArrow().to_pydict()
    for number, column in enumerate(columns):
        wrong = [
            (text, a, b) for text, a, b in zip(TEXTS, ours[f"c{number}"], theirs[f"c{number}"], strict=True) if a != b
        ]
        assert not wrong, (column, wrong[:3])


@pytest.mark.parametrize("seed", sampled(range(10)))
def test_random_patterns_find_what_spark_finds(spark, seed):
    chance = random.Random(seed)
    patterns = [sequence(chance) for _ in range(120)]
    columns = [column for pattern in patterns for column in asked(pattern)]
    assert sum(column.startswith("s RLIKE") for column in columns) > 60, "most of them are taken"
    for start in range(0, len(columns), 100):
        compare(spark, columns[start : start + 100])


def test_patterns_as_people_write_them_find_what_spark_finds(spark):
    patterns = [
        r"(&|^)channel_id=([^&]*)", "^https?://", r"^(\w+)@(\w+)\.com", r"\d{1,3}-\d+", "a|b|", r"[A-Za-z_][A-Za-z0-9_]*", r"\s+", "", "()",
        r"q(uery)?=(\d)", "(a)|(b)", "(é|a)(b?)", r"\w+\.htm\?query=(.*?)&",
    ]  # fmt: skip
    columns = [column for pattern in patterns for column in asked(pattern)]
    assert sum(column.startswith("s RLIKE") for column in columns) == len(patterns)
    compare(spark, [*columns, "s NOT REGEXP 'a'", "regexp_like(s, 'a')", "regexp_extract(s, '(a)(b)')"])


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_java_reads_otherwise_is_left_to_spark(pattern):
    assert asked(pattern) == []


def test_groups_are_numbered_and_written_out():
    assert taken("regexp_extract(s, '(a)(b)', 2)") and not taken("regexp_extract(s, '(a)(b)', 3)")
    assert not taken("regexp_extract(s, 'a')") and taken("regexp_extract(s, 'a', 0)")
    assert not taken("regexp_extract(s, s, 0)") and not taken("s RLIKE NULL") and not taken("s RLIKE s")
    assert not taken("regexp_extract(s, 'a', -1)") and not taken("regexp_extract(s, 'a', length(s))")
