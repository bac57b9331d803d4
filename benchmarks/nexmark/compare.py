"""Compare what queries have handed out with their truths, row by row.

    python -m benchmarks.nexmark.compare --truths DIR --out DIR --queries q3,q7

Columns have the same names, order and types on both sides. Rows may come in any order, each as often as in the other
side. Floats are equal if they agree to six digits. The command ends with status 1 if a query differs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import duckdb

from benchmarks.nexmark.truth import QUERIES, database, names

_FLOATS = ("FLOAT", "DOUBLE")


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the content of a query compares with its truth.

    Attributes:
        rows: How many the truth has.
        differing: Rows that one side has and the other has not, counted on both sides, or whose floats differ.
        examples: Some of them, as texts.
        problem: Why rows cannot be compared; empty if they can.
    """

    rows: int = 0
    differing: int = 0
    examples: tuple[str, ...] = ()
    problem: str = ""

    @property
    def equal(self) -> bool:
        return not self.problem and not self.differing

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        return f"{self.rows} rows, equal" if self.equal else f"{self.rows} rows, {self.differing} DIFFER"


def compare(truth: Path, content: Path) -> Comparison:
    """Compare two Parquet files.

    Args:
        truth: What DuckDB has written.
        content: What is compared with it.
    """
    for file in (truth, content):
        if not file.exists():
            return Comparison(problem=f"there is no {file}")
    with database(content.parent) as db:
        db.execute(f"CREATE VIEW truth AS FROM read_parquet('{truth}')")
        db.execute(f"CREATE VIEW content AS FROM read_parquet('{content}')")
        columns, others = _columns(db, "truth"), _columns(db, "content")
        if columns != others:
            return Comparison(problem=f"columns are {others} and not {columns}")
        return _rows(db, columns)


def _columns(db: duckdb.DuckDBPyConnection, view: str) -> list[tuple[str, str]]:
    return [(name, kind) for name, kind, *_ in db.execute(f"DESCRIBE {view}").fetchall()]


def _rows(db: duckdb.DuckDBPyConnection, columns: list[tuple[str, str]]) -> Comparison:
    """Pair rows that agree in all columns but floats, by the order of their floats, and look at these."""
    floats = [f'"{name}"' for name, kind in columns if kind in _FLOATS]
    others = [f'"{name}"' for name, kind in columns if kind not in _FLOATS]
    order = ", ".join(floats or others)
    numbered = f"SELECT *, row_number() OVER (PARTITION BY {', '.join(others)} ORDER BY {order}) AS __number"
    same = " AND ".join(f"__t.{name} IS NOT DISTINCT FROM __c.{name}" for name in [*others, "__number"])
    far = [
        f"(__t.{name} IS DISTINCT FROM __c.{name}"
        f" AND coalesce(abs(__t.{name} - __c.{name}) > 1e-6 * greatest(abs(__t.{name}), abs(__c.{name})), true))"
        for name in floats
    ]
    differs = " OR ".join(["__t.__number IS NULL", "__c.__number IS NULL", *far])
    db.execute(
        f"CREATE TEMP TABLE differing AS SELECT __t, __c FROM ({numbered} FROM truth) __t"
        f" FULL JOIN ({numbered} FROM content) __c ON {same} WHERE {differs}"
    )
    (differing,) = db.execute("SELECT count(*) FROM differing").fetchall()[0]
    (rows,) = db.execute("SELECT count(*) FROM truth").fetchall()[0]
    examples = db.execute(
        "SELECT 'truth: ' || __t::TEXT || ', content: ' || __c::TEXT FROM differing LIMIT 3"
    ).fetchall()
    return Comparison(rows, differing, tuple(text for (text,) in examples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truths", type=Path, required=True, help="what benchmarks.nexmark.truth has written")
    parser.add_argument("--out", type=Path, required=True, help="what benchmarks.nexmark.run has written")
    parser.add_argument("--queries", type=names, help="e.g. q3,q7; without it all that are in --out")
    given = parser.parse_args()
    there = [query for query in QUERIES if (given.out / f"{query}.parquet").exists()]
    queries = there if given.queries is None else given.queries
    results = {query: compare(given.truths / f"{query}.parquet", given.out / f"{query}.parquet") for query in queries}
    for query, result in results.items():
        print(f"{query}: {result}", *result.examples, sep="\n    ")
    if not results:
        print(f"There is nothing to compare in {given.out}.")
    sys.exit(not results or not all(result.equal for result in results.values()))


if __name__ == "__main__":
    main()
