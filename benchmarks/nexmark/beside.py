"""Measure queries of Nexmark on Weir and on Spark Structured Streaming, in turns, and compare both with the truth.

python -m benchmarks.nexmark.beside --events 200000 --queries q11,q17,q18 --reps 3
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from benchmarks import harness
from benchmarks.nexmark import generate, spark, truth
from benchmarks.nexmark.clock import Took
from benchmarks.nexmark.compare import compare
from benchmarks.nexmark.run import Options, available, run_query

_FILES = 8  # of each folder; one is an epoch


def on_weir(query: str, source: Path, out: Path, scratch: Path) -> Took:
    """Weir's run of a query, in a process whose Spark has started."""
    from configs.settings import load
    from pipelines.runtime.execution.spark.spark_session import session

    session(load({"WEIR_SPARK__MASTER": "local[2]"}), app="nexmark").range(1).count()
    return run_query(query, source, out, scratch / "work", Options(files=1)).took


def on_spark(query: str, source: Path, out: Path, scratch: Path) -> Took:
    """Spark's run of a query, in a process whose Spark has started."""
    running = spark.session(scratch)
    running.range(1).count()
    return spark.run_query(running, query, source, out, scratch, files=1)


ENGINES: dict[str, Callable[[str, Path, Path, Path], Took]] = {"weir": on_weir, "spark": on_spark}


def measured(root: Path, events: int, queries: Sequence[str], reps: int) -> list[dict[str, Any]]:
    """A row for each query, engine and repetition.

    Raises:
        AssertionError: What an engine has handed out is not the truth.
    """
    generate.generate(generate.Options(events, files=_FILES), root / "input")
    truth.write(root / "input", root / "truths", queries)
    rows = []
    for rep in range(reps):
        for query in queries:
            for engine, run in ENGINES.items():
                scratch = root / f"{query}-{engine}-{rep}"
                scratch.mkdir()
                took = harness.in_fresh_process(run, query, root / "input", scratch / "out", scratch)
                result = compare(root / "truths" / f"{query}.parquet", scratch / "out" / f"{query}.parquet")
                assert result.equal, (query, engine, str(result), result.examples)
                rows.append({"query": query, "engine": engine, "rep": rep, "rows": result.rows, **asdict(took)})
                print(f"{query} {engine}: {took}", flush=True)
    return rows


def page(figures: dict[str, Any]) -> str:
    """The report: medians of each query and engine."""
    queries: dict[str, dict[str, Any]] = {}
    for row in figures["measurements"]:
        queries.setdefault(row["query"], {}).setdefault(row["engine"], []).append(row)
    table = {
        query: {
            engine: harness.medians_of({name: [row[name] for row in rows] for name in _FIGURES})
            for engine, rows in engines.items()
        }
        for query, engines in queries.items()
    }
    modes = {query: spark.QUERIES[query].mode for query in table}
    return harness.render("nexmark", **figures, table=table, modes=modes)


_FIGURES = ("rows", "seconds", "cpu", "later_seconds", "later_cpu")


def main(
    events: int = 200_000,
    queries: str = "",
    reps: int = 3,
    results: Path = harness.RESULTS / "nexmark",
) -> None:
    """Weir beside Spark. queries: by default all that both have."""
    both = [query for query in available() if query in spark.QUERIES]
    asked = truth.names(queries) if queries else both
    rows = harness.in_scratch(measured, events, asked, reps)
    figures = {
        "machine": harness.machine(),
        "command": harness.command("benchmarks.nexmark.beside"),
        "events": events,
        "epochs": _FILES,
        "reps": reps,
        "load": os.getloadavg()[0],
        "measurements": rows,
    }
    harness.publish(results, figures, page(figures))


if __name__ == "__main__":
    typer.run(main)
