"""The measurements as JSON, tables and a plot.

python -m benchmarks.state.report --scratch DIR     writes benchmarks/results/state.{json,md,png} from what was measured
python -m benchmarks.state.report --from-json PATH  writes PATH.md anew from PATH.json, with what is recorded there
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure

from benchmarks import harness
from benchmarks.state.measure import Measurement
from benchmarks.state.rows import ROWS, SCENARIOS, Scenario

RESULTS = harness.RESULTS / "state"
SCRATCH = Path(tempfile.gettempdir()) / "weir-bench-state"
_OURS = "weir-aggregate"
_PER_KEY, _COLLECTED = "weir-per-key", "-collected"
_FLAT = 0.20
_TARGETS = (
    {"group": "a", "title": "Spark's own aggregation", "target": 2.5, "reach": 5.0},
    {"group": "b", "title": "transformWithStateInPandas", "target": 200.0, "reach": None},
    {"group": "c", "title": "PyFlink SQL", "target": 2.0, "reach": None},
    {"group": "d", "title": "KeyedProcessFunction", "target": 200.0, "reach": None},
)

Summary = dict[str, dict[str, dict[str, Any]]]
"""By workload and row: medians, extremes, and Weir's speed as a multiple of the row's."""


def log(scratch: Path, quick: bool, again: bool = False) -> harness.Log:
    """All measurements below a scratch directory, the last of each kind."""
    file = scratch / ("measurements-quick.jsonl" if quick else "measurements.jsonl")
    return harness.Log(file, ("workload", "row", "repetition"), again)


def summary(measured: Iterable[Measurement]) -> Summary:
    """Medians of what was measured at the machine's usual pace, and what failed."""
    groups: dict[str, dict[str, list[Measurement]]] = {}
    for measurement in _usual(measured):
        groups.setdefault(measurement.workload, {}).setdefault(measurement.row, []).append(measurement)
    return {
        workload: _with_ratios({row: _row(ones) for row, ones in rows.items()}) for workload, rows in groups.items()
    }


def _usual(measured: Iterable[Measurement]) -> list[Measurement]:
    by_workload: dict[str, list[Measurement]] = {}
    for measurement in measured:
        by_workload.setdefault(measurement.workload, []).append(measurement)
    return [measurement for ones in by_workload.values() for measurement in harness.at_usual_pace(ones, _paces)]


def _paces(measurement: Measurement) -> list[float]:
    return [] if measurement.error else measurement.pace


def _row(ones: Sequence[Measurement]) -> dict[str, Any]:
    good = [measurement for measurement in ones if not measurement.error]
    if not good:
        return {"error": ones[-1].error}
    last = good[-1]
    epochs = [ms for measurement in good for ms in measurement.epoch_ms]
    return {
        "repetitions": len(good),
        "epochs": last.epochs,
        "events": last.events,
        "steady": statistics.median(measurement.steady for measurement in good),
        "steady_min": min(measurement.steady for measurement in good),
        "steady_max": max(measurement.steady for measurement in good),
        "whole": statistics.median(measurement.whole for measurement in good),
        "start_seconds": statistics.median(measurement.start_seconds for measurement in good),
        "cpu": statistics.median(measurement.cpu for measurement in good),
        "epoch_ms": statistics.median(epochs) if epochs else None,
        "epoch_ms_max": max(epochs) if epochs else None,
        "keys": last.keys,
        "differing": max(measurement.differing for measurement in good),
        "checked_apart": last.checked_apart,
        "phases": harness.medians([measurement.phases for measurement in reversed(good)]),
        "figures": last.figures,
        "error": next((measurement.error for measurement in ones if measurement.error), ""),
    }


def _with_ratios(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Nobody is fast by being wrong: a row whose result differs has no ratio, nor has any where Weir's own does."""
    right = {name: row for name, row in rows.items() if row.get("steady") and not row["differing"]}
    for name, row in right.items():
        alike = [_PER_KEY + _COLLECTED] if name.endswith(_COLLECTED) else [_PER_KEY, _OURS, "weir-stage"]
        ours = next((right[candidate] for candidate in alike if candidate in right), None)
        if ours is not None:
            row["ratio"] = ours["steady"] / row["steady"]
    return rows


def write(measured: list[Measurement], target: Path, command: str) -> None:
    """Write `target`.json and .md, and .png where there is anything to draw."""
    rows = summary(measured)
    figures = {
        "command": command,
        "machine": harness.machine(),
        "versions": {measurement.row: measurement.versions for measurement in measured if measurement.versions},
        "settings": {measurement.row: measurement.settings for measurement in measured if measurement.settings},
        "summary": rows,
        "measurements": [
            {k: v for k, v in asdict(measurement).items() if k not in ("settings", "versions")}
            for measurement in measured
        ],
    }
    harness.publish(target, figures, _page(figures, target.name))
    _plot(rows, target.with_suffix(".png"))


def page(target: Path) -> str:
    """The text of `target`.md from `target`.json: figures, machine and command are those that were recorded."""
    return _page(json.loads(target.with_suffix(".json").read_text()), target.with_suffix("").name)


def _page(figures: dict[str, Any], name: str) -> str:
    measured, rows = [Measurement(**row) for row in figures["measurements"]], figures["summary"]
    sizes = [
        (scenario.workload, rows.get(scenario.workload.name, {}).get(_OURS, {}))
        for scenario in SCENARIOS
        if scenario.workload.hot
    ]
    return harness.render(
        "state",
        **figures,
        name=name,
        rows=ROWS,
        loads=[measurement.load for measurement in measured if measurement.load],
        pace=harness.pace_sentence(measured, len(_usual(measured)), _paces),
        verdicts=_verdicts(rows),
        scenarios=_side_by_side(rows),
        flat=[size for size in sizes if size[1].get("epoch_ms")],
        sizes_missing=[workload.keys for workload, row in sizes if not row.get("epoch_ms")],
        target_flat=_FLAT,
        where=[
            (f"{workload}, {row.title}", ", ".join(f"{phase} {ms:,.0f}" for phase, ms in phases.items() if ms >= 1))
            for workload, summary in rows.items()
            for row in ROWS
            if (phases := summary.get(row.name, {}).get("phases"))
        ],
    )


def _side_by_side(rows: Summary) -> list[Scenario]:
    """Those measured that have a table of their own and a part of the plot: all but those that only Weir's own figures
    tell apart."""
    return [scenario for scenario in SCENARIOS if scenario.workload.hot is None and scenario.workload.name in rows]


def _verdicts(rows: Summary) -> list[dict[str, Any]]:
    """One for each group of peers that was measured."""
    verdicts: list[dict[str, Any]] = []
    for target in _TARGETS:
        names = [row.name for row in ROWS if row.group == target["group"]]
        ratios = [
            summary[name]["ratio"]
            for summary in rows.values()
            for name in names
            if _PER_KEY not in summary and "ratio" in summary.get(name, {})
        ]
        verdicts += [{**target, "ratios": ratios}] if ratios else []
    return verdicts


def _plot(rows: Summary, target: Path) -> None:
    shown = [scenario.workload.name for scenario in _side_by_side(rows)]
    if not shown:
        return
    figure = Figure(figsize=(3.2 + 3.4 * len(shown), 5), layout="constrained")
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)
    for axis, workload in zip(axes[0], shown, strict=True):
        for at, row in enumerate(reversed(ROWS)):
            summary = rows[workload].get(row.name, {})
            if "steady" in summary:
                spread = [[summary["steady"] - summary["steady_min"]], [summary["steady_max"] - summary["steady"]]]
                axis.barh(at, summary["steady"], color="tab:blue" if row.group == "weir" else "tab:gray", xerr=spread)
                axis.annotate(f" {summary['steady']:,.0f}", (summary["steady"], at), va="center", fontsize=7)
        axis.set(xscale="log", xlabel="events/s", title=workload, xlim=(100, 5e6))
    axes[0][0].set_yticks(range(len(ROWS)), [row.title for row in reversed(ROWS)], fontsize=8)
    figure.savefig(target, dpi=110)


def main(
    scratch: Path = SCRATCH,
    quick: Annotated[bool, typer.Option("--quick", help="what --quick measured")] = False,
    results: Path = RESULTS,
    command: Annotated[str, typer.Option(help="what to say it was made by")] = "make bench-state",
    from_json: Annotated[Path | None, typer.Option(help="write only PATH.md anew, from PATH.json")] = None,
) -> None:
    """Write the report of what was measured."""
    if from_json is not None:
        from_json.with_suffix(".md").write_text(page(from_json))
        return
    write([Measurement(**row) for row in log(scratch, quick).rows()], results, command)


if __name__ == "__main__":
    typer.run(main)
