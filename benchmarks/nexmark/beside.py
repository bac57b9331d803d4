"""Measure queries of Nexmark on Weir, Spark Structured Streaming and Flink SQL, in turns, and compare with the truth.

python -m benchmarks.nexmark.beside --events 200000 --queries q11,q17,q18 --reps 3

Measurements are kept below the scratch directory as they are made: a command that was interrupted goes on. With `--add`
those count too that the results have: repetitions may be made one at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from matplotlib.figure import Figure

from benchmarks import harness
from benchmarks.nexmark import flink, generate, spark, truth
from benchmarks.nexmark.clock import Took
from benchmarks.nexmark.compare import compare
from benchmarks.nexmark.run import Options, available, run_query

SCRATCH = Path(tempfile.gettempdir()) / "weir-bench-nexmark"
STATELESS = ("q0", "q1", "q2", "q10", "q14", "q21", "q22")
_FIGURES = ("rows", "seconds", "cpu")
_COLOURS = {"weir": "tab:blue", "spark": "tab:orange", "flink": "tab:gray"}
_OF_SPARK, _STATELESS_OF_SPARK = 3.0, 1.2


def on_weir(query: str, source: Path, out: Path, scratch: Path) -> Took:
    """Weir's run of a query, in a process whose Spark has started."""
    from weir.execution.spark.spark_session import session
    from weir.settings.configuration import load

    session(load({"WEIR_SPARK__MASTER": "local[2]"}), app="nexmark").range(1).count()
    return run_query(query, source, out, scratch / "work", Options(files=1)).took


def on_spark(query: str, source: Path, out: Path, scratch: Path) -> Took:
    """Spark's run of a query, in a process whose Spark has started."""
    running = spark.session(scratch)
    running.range(1).count()
    return spark.run_query(running, query, source, out, scratch, files=1)


def on_flink(query: str, source: Path, out: Path, scratch: Path) -> Took:
    """Flink's run of a query, in a process that has run another statement before."""
    return flink.run_query(query, flink.copied(source, source.parent / "input-flink"), out, scratch)


ENGINES: dict[str, Callable[[str, Path, Path, Path], Took]] = {"weir": on_weir, "spark": on_spark, "flink": on_flink}


def has(engine: str, query: str) -> bool:
    """Whether an engine expresses a query."""
    return query in {"weir": available(), "spark": spark.QUERIES, "flink": flink.QUERIES}[engine]


def measured(
    root: Path, log: harness.Log, events: generate.Options, queries: Sequence[str], engines: Sequence[str], reps: int
) -> None:
    """Measure each query, engine and repetition that the log does not have yet."""
    shutil.rmtree(root, ignore_errors=True)
    generate.generate(events, root / "input")
    flink.copied(root / "input", root / "input-flink")
    truth.write(root / "input", root / "truths", queries)
    for rep in range(reps):
        for query in queries:
            for engine in engines:
                place = {"query": query, "engine": engine, "rep": rep}
                if has(engine, query) and not log.has(**place):
                    figures = _measure(root, query, engine)
                    log.add({**place, **figures})
                    print(f"{query} {engine}: {figures}", flush=True)


def _measure(root: Path, query: str, engine: str) -> harness.Row:
    """Run once. What fails, or hands out something else than the truth, is an error without figures."""
    scratch = root / "run"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    load = os.getloadavg()[0]
    try:
        took = harness.in_fresh_process(ENGINES[engine], query, root / "input", scratch / "out", scratch)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".replace(str(root), "")[-2000:], "load": load}
    result = compare(root / "truths" / f"{query}.parquet", scratch / "out" / f"{query}.parquet")
    error = "" if result.equal else f"{result} {result.examples}"
    return {"error": error, "load": load, "rows": result.rows, **asdict(took)}


def published(results: Path, events: int, files: int) -> list[harness.Row]:
    """The measurements of earlier repetitions, if they were made with as many events and files."""
    file = results.with_suffix(".json")
    figures = json.loads(file.read_text()) if file.exists() else {}
    return figures["measurements"] if (figures.get("events"), figures.get("epochs")) == (events, files) else []


def summed(rows: Sequence[harness.Row]) -> dict[str, dict[str, Any]]:
    """By query: its engines' medians, how they compare with Weir's, and what of the targets is missed."""
    table: dict[str, dict[str, Any]] = {}
    for query in truth.QUERIES:
        engines = {
            engine: [row for row in rows if (row["query"], row["engine"]) == (query, engine) and not row["error"]]
            for engine in ENGINES
        }
        medians = {
            engine: harness.medians_of({name: [row[name] for row in some] for name in _FIGURES})
            for engine, some in engines.items()
            if some
        }
        if "weir" in medians:
            table[query] = {**medians, "missed": ", ".join(_missed(query, medians))}
    return table


def _missed(query: str, medians: dict[str, dict[str, float]]) -> list[str]:
    """What a query misses of the targets, by wall time."""
    times = {engine: figures["seconds"] / medians["weir"]["seconds"] for engine, figures in medians.items()}
    missed = []
    if "spark" in times and query in STATELESS and times["spark"] * _STATELESS_OF_SPARK < 1:
        missed.append(f"{1 / times['spark']:.2f} times Spark's time")
    if "spark" in times and query not in STATELESS and times["spark"] < _OF_SPARK:
        missed.append(f"{times['spark']:.1f} x Spark")
    if "flink" in times and query not in STATELESS and times["flink"] < 1:
        missed.append(f"{times['flink']:.1f} x Flink")
    return missed


def plot(table: dict[str, dict[str, Any]], target: Path) -> None:
    """Wall time and processor time of each query and engine."""
    figure = Figure(figsize=(10, 1.5 + 0.42 * len(table)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, name, title in zip(axes, ("seconds", "cpu"), ("seconds", "processor seconds"), strict=True):
        for place, (engine, colour) in enumerate(_COLOURS.items()):
            there = [(at, row[engine][name]) for at, row in enumerate(table.values()) if engine in row]
            heights = [at + (place - 1) * 0.27 for at, _ in there]
            axis.barh(heights, [value for _, value in there], height=0.25, color=colour, label=engine.title())
        axis.set(xscale="log", xlabel=title)
    axes[0].set_yticks(range(len(table)), list(table))
    axes[0].set_ylim(len(table) - 0.4, -0.6)
    axes[1].legend(loc="upper right")
    figure.savefig(target, dpi=110)


def page(figures: dict[str, Any]) -> str:
    """The report."""
    rows = figures["measurements"]
    errors = [row for row in rows if row["error"]]
    modes = {query: spark.QUERIES[query].mode for query in spark.QUERIES}
    return harness.render(
        "nexmark", **figures, table=summed(rows), modes=modes, errors=errors, stateless=STATELESS,
        repetitions=repetitions(rows), checkpoint=flink.CHECKPOINT_SECONDS, loads=[row["load"] for row in rows],
    )  # fmt: skip


def repetitions(rows: Sequence[harness.Row]) -> str:
    """How often each engine's queries were measured, for people."""
    texts = []
    for engine in ENGINES:
        counts = Counter(row["query"] for row in rows if row["engine"] == engine and not row["error"]).values()
        if counts:
            few, many = min(counts), max(counts)
            texts.append(f"{engine.title()} {few if few == many else f'{few} to {many}'}")
    return ", ".join(texts)


def main(
    events: int = 200_000,
    files: int = 8,
    queries: str = "",
    engines: str = ",".join(ENGINES),
    reps: int = 3,
    scratch: Path = SCRATCH,
    again: bool = False,
    add: bool = False,
    results: Path = harness.RESULTS / "nexmark",
) -> None:
    """Weir beside Spark and Flink.

    files: of each stream; one is an epoch. queries: by default all that Weir has. engines: that are measured now; the
    table also has what was measured of others before. again: forget what was measured. add: to what the
    results have, other queries too, if it is of as many events and files.
    """
    asked = truth.names(queries) if queries else available()
    log = harness.Log(scratch / f"measured-{events}-{files}.jsonl", ("query", "engine", "rep"), again)
    for row in published(results, events, files) if add else []:
        if not log.has(**{name: row[name] for name in ("query", "engine", "rep")}):
            log.add(row)
    measured(scratch / "work", log, generate.Options(events, files=files), asked, engines.split(","), reps)
    rows = [row for row in log.rows() if add or (row["query"] in asked and row["rep"] < reps)]
    figures = {
        "machine": harness.machine(),
        "command": harness.command("benchmarks.nexmark.beside"),
        "events": events,
        "epochs": files,
        "reps": reps,
        "plot": results.with_suffix(".png").name,
        "measurements": rows,
    }
    harness.publish(results, figures, page(figures))
    plot(summed(rows), results.with_suffix(".png"))
    shutil.rmtree(scratch / "work", ignore_errors=True)


if __name__ == "__main__":
    typer.run(main)
