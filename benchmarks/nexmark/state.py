"""The state of queries by epoch, over an input that is ten times as long as the suite's of a million events.

    python -m benchmarks.nexmark.state --events 10000000 --files 100

Each stage's bytes and entries are those of its checkpoints. A state that is bounded is as large after all of the input
as after some of it. What is bounded by the query's meaning alone is not expected to be: q6 keeps ten prices of
each seller, and the sums of q12 are one a bidder.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from matplotlib.figure import Figure

from benchmarks import harness
from benchmarks.nexmark import generate, truth
from benchmarks.nexmark.run import Options, played
from weir.epoch.model import EpochReport

BOUNDED = {
    "q4": ("bids_on_auctions", "winning_bids", "averages"),
    "q5": ("counts", "hottest"),
    "q6": ("bids_on_auctions", "won", "in_order"),
    "q7": ("highest",),
    "q8": ("new_sellers",),
    "q9": ("bids_on_auctions", "winning_bids"),
    "q11": ("sessions",),
    "q12": ("windows",),
}
"""By query the stages whose state does not grow with the input."""
SCRATCH = Path(tempfile.gettempdir()) / "weir-bench-nexmark-state"


def curve(reports: Iterable[EpochReport]) -> dict[str, dict[str, list[int]]]:
    """By stage: bytes and entries of its state after each epoch but the last one, which closes what is open."""
    stages: dict[str, dict[str, list[int]]] = {}
    for report in reports:
        for uid, operator in report.checkpoint.operators.items():
            figures = stages.setdefault(uid, {"bytes": [], "entries": []})
            figures["bytes"].append(operator.bytes_total)
            figures["entries"].append(operator.entries or 0)
    return {uid: {name: values[:-1] for name, values in figures.items()} for uid, figures in stages.items()}


def growth(values: list[int]) -> float:
    """How much larger the state has become, at most, after the first third of the epochs than it was within it.

    Files of a state are merged every few epochs, so that it is now smaller and now larger. What grows with the input
    becomes three times as large.
    """
    third = len(values) // 3
    return max(values[third:]) / max(*values[:third], 1)


def measured(root: Path, events: generate.Options, queries: list[str], parallelism: int) -> dict[str, Any]:
    """The curves of each query, of one run each."""
    generate.generate(events, root / "input")
    curves = {}
    for query in queries:
        curves[query] = curve(played(query, root / "input", root / "work", Options(parallelism, files=1)))
        shutil.rmtree(root / "work")
        for uid in BOUNDED[query]:
            figures = curves[query][uid]
            print(f"{query} {uid}: bytes x {growth(figures['bytes']):.2f}, entries x {growth(figures['entries']):.2f}")
    return curves


def plot(curves: dict[str, Any], target: Path) -> None:
    """Bytes of each bounded stage's state by epoch."""
    figure = Figure(figsize=(12, 3 * -(-len(curves) // 4)), layout="constrained")
    axes = figure.subplots(-(-len(curves) // 4), 4, squeeze=False)
    for axis, (query, stages) in zip(axes.flat, curves.items(), strict=False):
        for uid in BOUNDED[query]:
            axis.plot([size / 2**20 for size in stages[uid]["bytes"]], label=uid, lw=1)
        axis.set(title=query, xlabel="epoch", ylabel="MiB", ylim=(0, None))
        axis.legend(fontsize=7)
    figure.savefig(target, dpi=110)


def page(figures: dict[str, Any]) -> str:
    """The report."""
    rows = [
        (query, uid, stages[uid], {name: growth(stages[uid][name]) for name in ("bytes", "entries")})
        for query, stages in figures["curves"].items()
        for uid in BOUNDED[query]
    ]
    return harness.render("nexmark-state", **figures, rows=rows)


def main(
    events: int = 10_000_000,
    files: int = 100,
    queries: str = ",".join(BOUNDED),
    rate: float = 50.0,
    parallelism: int = 2,
    scratch: Path = SCRATCH,
    results: Path = harness.RESULTS / "nexmark-state",
) -> None:
    """Curves of state. files: of each stream; one is an epoch. rate: events in a second of event time."""
    asked = [query for query in truth.names(queries) if query in BOUNDED]
    shutil.rmtree(scratch, ignore_errors=True)
    curves = measured(scratch, generate.Options(events, files=files, rate=rate), asked, parallelism)
    figures = {
        "machine": harness.machine(),
        "command": harness.command("benchmarks.nexmark.state"),
        "events": events,
        "epochs": files,
        "plot": results.with_suffix(".png").name,
        "curves": curves,
    }
    harness.publish(results, figures, page(figures))
    plot(curves, results.with_suffix(".png"))
    shutil.rmtree(scratch)


if __name__ == "__main__":
    typer.run(main)
