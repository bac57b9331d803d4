"""The measurements as JSON, tables and a plot.

python -m benchmarks.state.report --scratch DIR     writes benchmarks/results/state.{json,md,png} from what was measured
python -m benchmarks.state.report --from-json PATH  writes PATH.md anew from PATH.json, with what is recorded there
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import pace
from benchmarks.state.measure import Measurement
from benchmarks.state.rows import ROWS, SCENARIOS, Row, Scenario

RESULTS = Path(__file__).resolve().parents[1] / "results" / "state"
_OURS = "weir-aggregate"
_TARGETS = {"a": 2.5, "b": 200.0, "c": 2.0, "d": 200.0}
_REACH = {"a": 5.0}
_FLAT = 0.20


def load(log: Path) -> list[Measurement]:
    """All measurements in a log, the last of each kind; a line that an interrupted run left half-written is skipped."""
    found: dict[tuple[str, str, int], Measurement] = {}
    for line in log.read_text().splitlines() if log.exists() else []:
        try:
            one = Measurement(**json.loads(line))
        except ValueError:
            continue
        found[one.workload, one.row, one.repetition] = one
    return list(found.values())


def summary(measured: Iterable[Measurement]) -> dict[str, dict[str, dict[str, Any]]]:
    """By workload and row: medians, extremes, and Weir's speed as a multiple of the row's."""
    groups: dict[str, dict[str, list[Measurement]]] = {}
    for one in _usual(measured):
        groups.setdefault(one.workload, {}).setdefault(one.row, []).append(one)
    return {
        workload: _with_ratios({row: _row(ones) for row, ones in rows.items()}) for workload, rows in groups.items()
    }


def _usual(measured: Iterable[Measurement]) -> list[Measurement]:
    """Of each workload those made at the machine's usual pace, and what failed."""
    by_workload: dict[str, list[Measurement]] = {}
    for one in measured:
        by_workload.setdefault(one.workload, []).append(one)
    return [one for ones in by_workload.values() for one in pace.usual(ones, _paces)]


def _paces(one: Measurement) -> list[float]:
    return [] if one.error else one.pace


def _row(ones: Sequence[Measurement]) -> dict[str, Any]:
    good = [one for one in ones if not one.error]
    if not good:
        return {"error": ones[-1].error}
    last = good[-1]
    epochs = [ms for one in good for ms in one.epoch_ms]
    return {
        "repetitions": len(good),
        "epochs": last.epochs,
        "events": last.events,
        "steady": statistics.median(one.steady for one in good),
        "steady_min": min(one.steady for one in good),
        "steady_max": max(one.steady for one in good),
        "whole": statistics.median(one.whole for one in good),
        "start_seconds": statistics.median(one.start_seconds for one in good),
        "epoch_ms": statistics.median(epochs) if epochs else None,
        "epoch_ms_max": max(epochs) if epochs else None,
        "keys": last.keys,
        "differing": max(one.differing for one in good),
        "checked_apart": last.checked_apart,
        "phases": {name: statistics.median(one.phases.get(name, 0.0) for one in good) for name in last.phases},
        "figures": last.figures,
        "error": next((one.error for one in ones if one.error), ""),
    }


def _with_ratios(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Nobody is fast by being wrong: a row whose result differs has no ratio, nor has any where Weir's own does."""
    right = {name: row for name, row in rows.items() if row.get("steady") and not row["differing"]}
    ours = right.get(_OURS) or right.get("weir-stage")
    if ours is not None:
        for row in right.values():
            row["ratio"] = ours["steady"] / row["steady"]
    return rows


def write(measured: list[Measurement], target: Path, command: str) -> None:
    """Write `target`.json and .md, and .png where there is anything to draw."""
    rows = summary(measured)
    facts = {
        "command": command,
        "machine": machine(),
        "versions": {one.row: one.versions for one in measured if one.versions},
        "settings": {one.row: one.settings for one in measured if one.settings},
        "summary": rows,
        "measurements": [
            {k: v for k, v in asdict(one).items() if k not in ("settings", "versions")} for one in measured
        ],
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    target.with_suffix(".md").write_text(_markdown(facts, measured, target.name))
    _plot(rows, target.with_suffix(".png"))


def page(target: Path) -> str:
    """The text of `target`.md from `target`.json: figures, machine and command are those that were recorded."""
    facts = json.loads(target.with_suffix(".json").read_text())
    return _markdown(facts, [Measurement(**one) for one in facts["measurements"]], target.with_suffix("").name)


def machine() -> str:
    """Cores, memory, system and Python, for a report."""
    model = ""
    if (info := Path("/proc/cpuinfo")).exists():
        model = next(
            (line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line), ""
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores{f' ({model})' if model else ''}, {memory:.0f} GiB of memory, {platform.system()}, Python {platform.python_version()}"


def _markdown(facts: dict[str, Any], measured: list[Measurement], name: str) -> str:
    rows = facts["summary"]
    loads = [one.load for one in measured if one.load]
    steady = pace.told(measured, len(_usual(measured)), _paces)
    load = f" Load average before a measurement: median {statistics.median(loads):.1f}." if loads else ""
    head = [
        f"Sum, count and maximum per key. {facts['machine']}. Made by `{facts['command']}`; what is measured, and what the peers are"
        f" given, stands in `benchmarks/README.md`.{load}",
        *([steady] if steady else []),
    ]
    tables = [
        [*_table(scenario, rows[scenario.workload.name]), *_not_measured(scenario, rows[scenario.workload.name])]
        for scenario in _side_by_side(rows)
    ]
    plot = [f"![Events per second]({name}.png)"] if _side_by_side(rows) else []
    sections = [
        ["# Keyed aggregation: Weir and its peers"],
        head,
        _verdicts(rows),
        *tables,
        _flat(rows),
        _where(rows),
        _settings(facts),
        plot,
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _side_by_side(rows: dict[str, dict[str, dict[str, Any]]]) -> list[Scenario]:
    """Those measured that have a table of their own and a part of the plot: all but the ones that only Weir's own figures tell apart."""
    return [one for one in SCENARIOS if one.workload.hot is None and one.workload.name in rows]


def _verdicts(rows: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """A line for each group of peers that was measured; nothing where none was."""
    lines = []
    titles = {
        "a": "Spark's own aggregation",
        "b": "transformWithStateInPandas",
        "c": "PyFlink SQL",
        "d": "KeyedProcessFunction",
    }
    for group, target in _TARGETS.items():
        ratios = [
            rows[workload][row.name]["ratio"]
            for workload in rows
            for row in ROWS
            if row.group == group and "ratio" in rows[workload].get(row.name, {})
        ]
        if ratios:
            low, high = min(ratios), max(ratios)
            reach = f", reaching for {_REACH[group]:g}" if group in _REACH else ""
            reached = "yes" if low >= target else "in part" if high >= target else "no"
            lines.append(
                f"| ({group}) {titles[group]} | {target:g} x{reach} | {low:.1f} to {high:.1f} x | {len(ratios)} rows | {reached} |"
            )
    head = ["| peer | target | Weir is faster by | measured | reached |", "|---|---:|---:|---:|---|"]
    return [*head, *lines] if lines else []


def _table(scenario: Scenario, rows: dict[str, dict[str, Any]]) -> list[str]:
    workload = scenario.workload
    value = "values of 1 KB" if workload.payload else "values of 24 bytes"
    before = ", all of them with state before" if workload.preload else ""
    lines = [
        f"## {workload.keys:,} keys, {workload.skew}, {value}{before}",
        "",
        "| row | events/s, median (least to most) | with start-up | Weir is faster by | epoch, ms | input | result |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for row in ROWS:
        if row.name in rows:
            lines.append(_line(row, rows[row.name]))
        elif row.name not in scenario.rows:
            lines.append(f"| {row.title} | - | | | | | not part of this workload |")
    return lines


def _not_measured(scenario: Scenario, rows: dict[str, dict[str, Any]]) -> list[str]:
    """What the scenario asks for and nobody measured; rows that failed are in the table, with why."""
    missing = [row.title for row in ROWS if row.name in scenario.rows and row.name not in rows]
    return ["", f"Not measured: {'; '.join(missing)}."] if missing else []


def _line(row: Row, found: dict[str, Any]) -> str:
    if "steady" not in found:
        return f"| {row.title} | - | | | | | {found['error'].replace('|', '/')} |"
    times = found.get("ratio")
    ratio = "-" if times is None else f"{times:.1f} x" if times < 10 else f"{times:.0f} x"
    epoch = f"{found['epoch_ms']:,.0f}" if found["epoch_ms"] else "-"
    right = f"{found['keys']:,} keys, equal" if not found["differing"] else f"**{found['differing']:,} keys differ**"
    apart = " (in a run of its own)" if found["checked_apart"] else ""
    return (
        f"| {row.title} | {found['steady']:,.0f} ({found['steady_min']:,.0f} to {found['steady_max']:,.0f})"
        f" | {found['whole']:,.0f} | {ratio} | {epoch} | {found['epochs']} x {found['events']:,}, {found['repetitions']} times"
        f" | {right}{apart} |"
    )


def _flat(rows: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    asked = [scenario.workload for scenario in SCENARIOS if scenario.workload.hot is not None]
    found = {one.name: rows.get(one.name, {}).get(_OURS, {}) for one in asked}
    flat = [(one, found[one.name]) for one in asked if found[one.name].get("epoch_ms")]
    if not flat:
        return []
    missing = [f"{one.keys:,} keys" for one in asked if not found[one.name].get("epoch_ms")]
    smallest = flat[0][1]["epoch_ms"]
    lines = [
        "## An epoch's time by the size of the state",
        "",
        f"The same {flat[0][0].hot:,} keys change in each of {flat[0][0].epochs} epochs; Weir, `aggregate`. Target: within {_FLAT:.0%}.",
        "",
        "| keys | state, MB | epoch, ms, median | worst | against the smallest |",
        "|---:|---:|---:|---:|---:|",
    ]
    for workload, row in flat:
        lines.append(
            f"| {workload.keys:,} | {row['figures'].get('state_bytes', 0) / 1e6:,.0f} | {row['epoch_ms']:,.0f}"
            f" | {row['epoch_ms_max']:,.0f} | {row['epoch_ms'] / smallest - 1:+.0%} |"
        )
    return [*lines, "", f"Not measured: {'; '.join(missing)}."] if missing else lines


def _where(rows: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = ["## Where an epoch's time goes", "", "Milliseconds, medians over epochs, as the engine reports them.", ""]
    for workload, found in rows.items():
        for row in ROWS:
            phases = found.get(row.name, {}).get("phases")
            if phases:
                shown = ", ".join(f"{name} {ms:,.0f}" for name, ms in phases.items() if ms >= 1)
                lines.append(f"- {workload}, {row.title}: {shown}")
    return lines if len(lines) > 4 else []


def _settings(facts: dict[str, Any]) -> list[str]:
    lines = ["## Versions and settings", ""]
    for row in ROWS:
        if row.name in facts["settings"]:
            versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].get(row.name, {}).items())
            settings = json.dumps(facts["settings"][row.name], sort_keys=True)
            lines.append(f"- {row.title}: {versions}. `{settings}`")
    return lines


def _plot(rows: dict[str, dict[str, dict[str, Any]]], target: Path) -> None:
    import matplotlib  # only here: the figures are worth having where it is not installed

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [scenario.workload.name for scenario in _side_by_side(rows)]
    if not shown:
        return
    figure, axes = plt.subplots(
        1, len(shown), figsize=(3.2 + 3.4 * len(shown), 5), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, workload in zip(axes[0], shown, strict=True):
        for at, row in enumerate(reversed(ROWS)):
            found = rows[workload].get(row.name, {})
            if "steady" in found:
                spread = [[found["steady"] - found["steady_min"]], [found["steady_max"] - found["steady"]]]
                axis.barh(at, found["steady"], color="tab:blue" if row.group == "weir" else "tab:gray", xerr=spread)
                axis.annotate(f" {found['steady']:,.0f}", (found["steady"], at), va="center", fontsize=7)
        axis.set(xscale="log", xlabel="events/s", title=workload, xlim=(100, 5e6))
    axes[0][0].set_yticks(range(len(ROWS)), [row.title for row in reversed(ROWS)], fontsize=8)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "weir-bench-state")
    parser.add_argument("--quick", action="store_true", help="what --quick measured")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--command", default="make bench-state", help="what to say it was made by")
    parser.add_argument("--from-json", type=Path, metavar="PATH", help="write only PATH.md anew, from PATH.json")
    given = parser.parse_args()
    if given.from_json is not None:
        given.from_json.with_suffix(".md").write_text(page(given.from_json))
        return
    log = given.scratch / ("measurements-quick.jsonl" if given.quick else "measurements.jsonl")
    write(load(log), given.results, given.command)


if __name__ == "__main__":
    main()
