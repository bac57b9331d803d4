"""What each query of Nexmark hands out of an input, by DuckDB: one statement a query, in `truths/`.

python -m benchmarks.nexmark.truth --input DIR --out DIR --queries q3,q7
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import duckdb

from benchmarks.nexmark.generate import STREAMS

QUERIES = tuple(f"q{number}" for number in range(24))
_STATEMENTS = Path(__file__).parent / "truths"


def write(source: Path, out: Path, queries: Sequence[str] = QUERIES) -> None:
    """Write the final content of queries as `out`/q3.parquet and so on.

    Args:
        source: The directory with the folders of persons, auctions and bids.
        out: A directory, which is created.
        queries: Their names.
    """
    out.mkdir(parents=True, exist_ok=True)
    with database(out) as db:
        for name in STREAMS:
            db.execute(f"CREATE VIEW {name} AS FROM read_parquet({_quoted(source / name / '*.parquet')})")
        if (source / "side_input.parquet").exists():
            db.execute(f"CREATE VIEW side_input AS FROM read_parquet({_quoted(source / 'side_input.parquet')})")
        db.execute(f"CREATE VIEW winning_bid AS {statement('winning_bid')}")
        for query in queries:
            db.execute(f"COPY ({statement(query)}) TO {_quoted(out / f'{query}.parquet')} (FORMAT parquet)")


def statement(query: str) -> str:
    """The SQL of a query, over the views person, auction, bid, side_input and winning_bid."""
    return (_STATEMENTS / f"{query}.sql").read_text()


def database(scratch: Path) -> duckdb.DuckDBPyConnection:
    """A database in memory, with little of it, and with times in UTC.

    Args:
        scratch: The directory for what does not fit into memory.
    """
    limits = {"memory_limit": "4GB", "threads": 2, "temp_directory": str(scratch / "duckdb.tmp")}
    db = duckdb.connect(config=limits)
    db.execute("SET TimeZone = 'UTC'")
    return db


def names(text: str) -> list[str]:
    """The queries that a command's option says.

    Raises:
        argparse.ArgumentTypeError: One of them is no query.
    """
    queries = [name.strip() for name in text.split(",")]
    unknown = [name for name in queries if name not in QUERIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no query {', '.join(unknown)}: queries are q0 to q23")
    return queries


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="what benchmarks.nexmark.generate has written")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--queries", type=names, default=QUERIES, help="e.g. q3,q7; all without it")
    given = parser.parse_args()
    write(given.input, given.out, given.queries)


if __name__ == "__main__":
    main()
