"""Run queries of Nexmark on Weir, each as a pipeline of its own, until the input is used up.

    python -m benchmarks.nexmark.run --input DIR --queries q3,q7 --out DIR

Each query's final content is written as `q3.parquet`. Windows that are still open when there is no more input are
closed by a watermark at the end of time (a drain), which a pipeline that runs for good never sees.

A run that was killed goes on where it was if it is given the same `--work`. The command ends with status 1 if rows came
too late for the windows of a query, or if a query that was asked for by name has no pipeline yet.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from benchmarks.nexmark.clock import Clock, Took
from benchmarks.nexmark.content import hand_out
from benchmarks.nexmark.truth import QUERIES, names
from weir.epoch.model import EpochReport
from weir.execution.executor import Executor
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run
from weir.settings.configuration import Settings

_PACKAGE = "benchmarks.nexmark.queries"


@dataclass(frozen=True, slots=True)
class Options:
    """How queries are run.

    Attributes:
        parallelism: Subtasks of every stage.
        files: Of each source in one epoch.
        master: Spark's.
    """

    parallelism: int = 2
    files: int = 4
    master: str = "local[2]"


@dataclass(frozen=True, slots=True)
class Measured:
    """How a query has run.

    Attributes:
        rows: Of its final content.
        epochs: Of this run.
        late: Rows that came too late for a window that had closed. The content lacks them.
        took: Until all was published, without the writing of the content.
    """

    rows: int
    epochs: int
    late: int
    took: Took


def available() -> list[str]:
    """The queries that have a pipeline."""
    return [query for query in QUERIES if (Path(__file__).parent / "queries" / f"{query}.py").exists()]


def run_query(
    query: str, source: Path, out: Path, work: Path, options: Options = Options(), executor: Executor | None = None
) -> Measured:
    """Run one query until the input is used up, and write its final content.

    Args:
        query: Its name.
        source: The directory of the input.
        out: Where the content is written.
        work: Where the pipeline's storage is. One that is there already goes on.
        options: How it is run.
        executor: What runs stages, by default Spark.
    """
    clock, epochs, late = Clock(), 0, 0
    for report in played(query, source, work, options, executor):
        clock.epoch()
        epochs += 1
        late += sum(operator.rows_late for operator in report.checkpoint.operators.values())
    took = clock.took()
    table = work / "storage" / query / "tables" / query
    rows = hand_out(query, table, out / f"{query}.parquet", getattr(_module(query), "columns", {}))
    return Measured(rows, epochs, late, took)


def played(
    query: str, source: Path, work: Path, options: Options = Options(), executor: Executor | None = None
) -> Iterator[EpochReport]:
    """Run one query until the input is used up: its epochs, as they end. The arguments are those of `run_query`."""
    module = _module(query)
    settings = _settings(module, source, work, options)
    yield from run(module.pipeline, settings, RunOptions(until_caught_up=True, drain=True), executor)


def _module(query: str) -> ModuleType:
    return importlib.import_module(f"{_PACKAGE}.{query}")


def _settings(module: ModuleType, source: Path, work: Path, options: Options) -> Settings:
    pipeline = {"object": f"{module.__name__}:pipeline", "params": {"input": str(source.absolute())}}
    return Settings.model_validate(
        {
            "storage": {"root": str(work.absolute() / "storage")},
            "local": {"work_dir": str(work.absolute() / "local")},
            "checkpoints": {"timeout_seconds": 3600},
            "epoch": {"max_files": options.files, "max_rows": 10_000_000},
            "run": {"poll_seconds": 0.05},
            "spark": {"master": options.master, "parallelism": options.parallelism},
            "pipelines": {module.pipeline.name: pipeline},
        }
    )


def main() -> None:
    defaults = Options()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="what benchmarks.nexmark.generate has written")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--queries", type=names, help="e.g. q3,q7; all without it")
    parser.add_argument("--parallelism", type=int, default=defaults.parallelism, help="subtasks of every stage")
    parser.add_argument("--files", type=int, default=defaults.files, help="of each folder in one epoch")
    parser.add_argument("--master", default=defaults.master, help="Spark's")
    parser.add_argument("--in-process", action="store_true", help="run stages here, without Spark")
    parser.add_argument("--work", type=Path, help="where storage is kept; else it goes with the run")
    given = parser.parse_args()
    queries, there = given.queries or QUERIES, available()
    missing = [query for query in queries if query not in there]
    options = Options(given.parallelism, given.files, given.master)
    executor = InMemoryExecutor() if given.in_process else None
    late = 0
    with tempfile.TemporaryDirectory(prefix="weir-nexmark-") as scratch:
        for query in queries:
            if query in there:
                measured = run_query(query, given.input, given.out, given.work or Path(scratch), options, executor)
                print(_line(query, measured), flush=True)
                late += measured.late
    if missing:
        print(f"Left out, since Weir has no pipeline for them yet: {', '.join(missing)}", file=sys.stderr)
    status = int(late > 0 or (bool(missing) and given.queries is not None))
    if given.in_process:  # threads of native libraries may abort an interpreter that winds up
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _line(query: str, measured: Measured) -> str:
    late = f", {measured.late} ROWS CAME TOO LATE AND ARE NOT IN IT" if measured.late else ""
    return (
        f"{query}: {measured.rows} rows in {measured.epochs} epochs, {measured.took.seconds:.1f} s,"
        f" {measured.took.cpu:.1f} s of processors{late}"
    )


if __name__ == "__main__":
    main()
