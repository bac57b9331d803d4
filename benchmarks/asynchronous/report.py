"""The measurements as JSON and tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pace
from benchmarks.state.report import machine

RESULTS = Path(__file__).resolve().parents[1] / "results" / "asynchronous"
_TARGET = 0.9

Row = dict[str, Any]


def load(log: Path) -> list[Row]:
    """All measurements in a log, the last of each key; a line that an interrupted run left half-written is skipped."""
    found: dict[str, Row] = {}
    for line in log.read_text().splitlines() if log.exists() else []:
        try:
            one = json.loads(line)
        except ValueError:
            continue
        found[one["key"]] = one
    return list(found.values())


def said(one: Row) -> str:
    """A line for one measurement."""
    wrong = f"; {one['differing']:,} OF {one['keys']:,} KEYS DIFFER" if one["differing"] else ""
    if one["kind"] != "latency":
        return f"{one['steady']:,.0f} events/s, at most {max(one['high_water']) / 1e6:,.0f} MB of local disk{wrong}"
    median, high = np.percentile(one["ms"], [50, 95])
    return f"median {median:,.0f} ms, p95 {high:,.0f} ms, {one['commits']} commits{wrong}"


def write(measured: Sequence[Row], target: Path, command: str) -> None:
    """Write `target`.json and .md."""
    made = [one for one in measured if not one["error"]]
    good = pace.usual(made, _paces)
    facts = {
        "command": command,
        "machine": machine(),
        "pace": pace.told(made, len(good), _paces),
        "throughput": [_throughput(ones) for ones in _grouped(good, "throughput", ("variant", "events"))],
        "alternating": [
            _alternating(ones) for ones in _grouped(good, "alternating", ("variant", "events")) if _shares(ones)
        ],
        "stall": [_stall(ones) for ones in _grouped(good, "stall", ("variant", "events"))],
        "latency": [_latency(ones) for ones in _grouped(good, "latency", ("engine", "interval"))],
        "measurements": list(measured),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    target.with_suffix(".md").write_text(_markdown(facts))


def _paces(one: Row) -> list[float]:
    paces: list[float] = one.get("pace", [])
    return paces


def _grouped(measured: Sequence[Row], kind: str, names: tuple[str, ...]) -> list[list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for one in measured:
        if one["kind"] == kind:
            groups.setdefault(tuple(one[name] for name in names), []).append(one)
    return list(groups.values())


def _throughput(ones: list[Row]) -> Row:
    def median(value: str) -> float:
        return statistics.median(one[value] for one in ones)

    def counter(name: str) -> float:
        return statistics.median(one["counters"][name] / one["epochs"] for one in ones)

    last = ones[-1]
    return {
        "variant": last["variant"],
        "repetitions": len(ones),
        "epochs": last["epochs"],
        "events": last["events"],
        "steady": median("steady"),
        "drained": median("drained"),
        "epoch_ms": statistics.median(ms for one in ones for ms in one["epoch_ms"]),
        "megabytes": counter("bytes_up") / 1e6,
        "requests": statistics.median(sum(one["counters"]["requests"].values()) / one["epochs"] for one in ones),
        "link_ms": counter("busy") * 1e3,
        "server_cpu_ms": (counter("server_cpu") + counter("link_cpu")) * 1e3,
        "server": last["counters"]["server"],
        "kinds": {kind: count / last["epochs"] for kind, count in last["counters"]["requests"].items()},
        "high_water": [max(one["high_water"][half] for one in ones) for half in (0, 1)],
        "state_bytes": last["state_bytes"],
        "phases": {
            name: statistics.median(one["phases"].get(name, 0.0) for one in ones) for name in last["phases"]
        },
        "differing": max(one["differing"] for one in ones),
        "load": median("load"),
    }  # fmt: skip


def _alternating(ones: list[Row]) -> Row:
    shares, megabytes = _shares(ones), _megabytes(ones)
    last = ones[-1]
    return {
        "variant": last["variant"],
        "events": last["events"],
        "shares": shares,
        "share": statistics.median(shares),
        "limited": statistics.median(speed for one in ones for number, speed in _numbered(one) if number % 2),
        "megabytes": megabytes,
        "bound": float(last["variant"].split(" ")[0]) / megabytes * last["events"],
        "free": statistics.median(speed for one in ones for number, speed in _numbered(one) if not number % 2),
        "high_water": [max(one["high_water"][half] for one in ones) for half in (0, 1)],
        "differing": max(one["differing"] for one in ones),
    }


def _megabytes(ones: list[Row]) -> float:
    """Of an epoch, both ways."""
    return statistics.median(
        (one["counters"]["bytes_up"] + one["counters"]["bytes_down"]) / one["epochs"] / 1e6 for one in ones
    )


def _numbered(one: Row) -> list[tuple[int, float]]:
    return list(enumerate(one["stretches"], one["first_stretch"]))


def _shares(ones: list[Row]) -> list[float]:
    """Of each stretch with limits between two without: its speed as a share of their mean."""
    found = []
    for one in ones:
        speeds = dict(_numbered(one))
        for number, speed in speeds.items():
            if number % 2 and number - 1 in speeds and number + 1 in speeds:
                found.append(2 * speed / (speeds[number - 1] + speeds[number + 1]))
    return found


def _stall(ones: list[Row]) -> Row:
    return {
        "variant": ones[-1]["variant"],
        "seconds": statistics.median(sum(one["epoch_ms"]) / 1e3 for one in ones),
        "longest": max(max(one["epoch_ms"]) / 1e3 for one in ones),
        "stalled": statistics.median(one["counters"]["stalled"] for one in ones),
        "high_water": [max(one["high_water"][half] for one in ones) for half in (0, 1)],
        "memory": [max(one["memory"][half] for one in ones) for half in (0, 1)],
        "differing": max(one["differing"] for one in ones),
    }


def _latency(ones: list[Row]) -> Row:
    ms = [value for one in ones for value in one["ms"]]
    p50, p95, p99 = np.percentile(ms, [50, 95, 99])
    return {
        "engine": ones[-1]["engine"],
        "interval": ones[-1]["interval"],
        "files": len(ms),
        "commits": sum(one["commits"] for one in ones),
        "p50": float(p50),
        "p95": float(p95),
        "p99": float(p99),
        "max": max(ms),
        "cpu": statistics.median(one["cpu"] for one in ones),
        "differing": max(one["differing"] for one in ones),
        "doubled": max(one["doubled"] for one in ones),
        "load": statistics.median(one["load"] for one in ones),
    }


def _markdown(facts: Row) -> str:
    lines = [
        "# Asynchronous checkpoints",
        "",
        f"{facts['machine']}. Made by `{facts['command']}`; what is measured stands in `benchmarks/README.md`. {facts['pace']}".rstrip(),
        "",
        *_on_slow_storage(facts["throughput"]),
        *_come_and_go(facts["alternating"]),
        *_stalled(facts["stall"]),
        *_landed_to_visible(facts["latency"]),
    ]
    errors = [f"- {one['key']}: {one['error']}" for one in facts["measurements"] if one["error"]]
    if errors:
        lines += ["## Failed", "", *errors, ""]
    return "\n".join(lines)


def _on_slow_storage(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    one = rows[0]
    free = {_apart_from_limits(row): row for row in rows if row["variant"].startswith("no limit")}
    lines = [
        "## Throughput on slow storage",
        "",
        f"{one['epochs']} epochs, a checkpoint each, on S3 ({one['server']}) behind a link. Target:"
        f" {_TARGET:.0%} of what it is without limits.",
        "",
        "| link | events an epoch | events/s | of no limit | to the last commit | epoch, ms | sent, MB an epoch | requests an epoch | local disk at most, MB: first half, second | result |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        against = free.get(_apart_from_limits(row))
        share = f"{row['steady'] / against['steady']:.0%}" if against else "-"
        first, second = (f"{size / 1e6:,.0f}" for size in row["high_water"])
        lines.append(
            f"| {row['variant']} | {row['events']:,} | {row['steady']:,.0f} | {share} | {row['drained']:,.0f} | {row['epoch_ms']:,.0f}"
            f" | {row['megabytes']:,.1f} | {row['requests']:,.0f} | {first}, {second} | {_verdict(row)} |"
        )
    lines += [
        "",
        "Where an epoch's time goes, in milliseconds, medians; per epoch, what the link and the requests alone take:",
        "",
    ]
    for row in rows:
        phases = ", ".join(f"{name} {ms:,.0f}" for name, ms in row["phases"].items() if ms >= 1)
        kinds = ", ".join(f"{kind} {count:,.0f}" for kind, count in sorted(row["kinds"].items(), key=lambda at: -at[1]))
        lines.append(
            f"- {row['variant']}, {row['events']:,} events: {phases}. Bytes at the link's rate {row['link_ms']:,.0f}; processor time of server and link"
            f" {row['server_cpu_ms']:,.0f}. Requests: {kinds}. Load before: {row['load']:.1f}."
        )
    return [*lines, ""]


def _come_and_go(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    lines = [
        "## Limits that come and go",
        "",
        "The same in one run, whose link has limits in every second stretch: each is compared with the mean of its two neighbours, so that a machine that"
        " changes its pace by the minute changes it for both. *At most* is what the link's bytes per second let through, if it never stood idle.",
        "",
        "| link | events an epoch | events/s without limits | with | of no limit, median | each stretch | MB an epoch | at most | local disk at most, MB: first half, second | result |",
        "|---|---:|---:|---:|---:|---|---:|---:|---:|---|",
    ]
    for row in rows:
        each = ", ".join(f"{share:.0%}" for share in row["shares"])
        first, second = (f"{size / 1e6:,.0f}" for size in row["high_water"])
        lines.append(
            f"| {row['variant']} | {row['events']:,} | {row['free']:,.0f} | {row['limited']:,.0f} | {row['share']:.0%} | {each}"
            f" | {row['megabytes']:,.1f} | {row['bound']:,.0f} | {first}, {second} | {_verdict(row)} |"
        )
    return [*lines, ""]


def _apart_from_limits(row: Row) -> tuple[str, int]:
    """What two rows have in common that differ in the link alone."""
    return row["variant"].partition("max_concurrent")[2], row["events"]


def _verdict(row: Row) -> str:
    return "equal to DuckDB's" if not row["differing"] else f"**{row['differing']:,} keys differ**"


def _stalled(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    lines = [
        "## Tables that stand still",
        "",
        "All epochs but the first; from the fifth or so on nothing that is asked for below `tables` goes through for a minute, rows, logs and listings.",
        "",
        "| tables | seconds in all | longest epoch, s | requests that waited | local disk at most, MB: first half, second | memory at most, MB: first half, second | result |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        disk, memory = (", ".join(f"{size / 1e6:,.0f}" for size in row[what]) for what in ("high_water", "memory"))
        lines.append(
            f"| {row['variant']} | {row['seconds']:,.1f} | {row['longest']:,.1f} | {row['stalled']:,.0f} | {disk} | {memory} | {_verdict(row)} |"
        )
    return [*lines, ""]


def _landed_to_visible(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    lines = [
        "## From a file's landing to its row in the Delta table",
        "",
        "| interval | engine | median, ms | p95 | p99 | longest | files | commits | processors busy | result |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["interval"], row["engine"] != "weir")):
        interval = f"{row['interval']:g} s" if row["interval"] else "as soon as possible"
        wrong = [f"**{row[what]} {what}**" for what in ("differing", "doubled") if row[what]]
        title = {"weir": "Weir", "spark": "Spark Structured Streaming"}[row["engine"]]
        lines.append(
            f"| {interval} | {title} | {row['p50']:,.0f} | {row['p95']:,.0f} | {row['p99']:,.0f} | {row['max']:,.0f}"
            f" | {row['files']:,} | {row['commits']:,} | {row['cpu']:.2f} | {', '.join(wrong) or 'each row once, equal'} |"
        )
    return [*lines, ""]
