"""The measurements as JSON and tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Row

RESULTS = harness.RESULTS / "asynchronous"
_TARGET = 0.9


def line_of(row: Row) -> str:
    """A line for one measurement."""
    wrong = f"; {row['differing']:,} OF {row['keys']:,} KEYS DIFFER" if row["differing"] else ""
    if row["kind"] != "latency":
        return f"{row['steady']:,.0f} events/s, at most {max(row['high_water']) / 1e6:,.0f} MB of local disk{wrong}"
    median, high = np.percentile(row["ms"], [50, 95])
    return f"median {median:,.0f} ms, p95 {high:,.0f} ms, {row['commits']} commits{wrong}"


def write(measured: Sequence[Row], target: Path, command: str) -> None:
    """Write `target`.json and .md."""
    valid = [row for row in measured if not row["error"]]
    good = harness.at_usual_pace(valid, _paces)
    facts = {
        "command": command,
        "machine": harness.machine(),
        "pace": harness.pace_sentence(valid, len(good), _paces),
        "throughput": [_throughput(ones) for ones in _grouped(good, "throughput", ("variant", "events"))],
        "alternating": [
            _alternating(ones) for ones in _grouped(good, "alternating", ("variant", "events")) if _shares(ones)
        ],
        "latency": [_latency(ones) for ones in _grouped(good, "latency", ("engine", "interval"))],
        "measurements": list(measured),
    }
    harness.publish(target, facts, page(facts))


def page(facts: Row) -> str:
    """The Markdown of what `write` keeps as JSON. Rows are compared with those that differ in the link alone."""
    free = {
        (row["variant"].partition("max_concurrent")[2], row["events"]): row
        for row in facts["throughput"]
        if row["variant"].startswith("no limit")
    }
    return harness.render("asynchronous", **facts, target=_TARGET, free=free).removesuffix("\n")


def _paces(row: Row) -> list[float]:
    paces: list[float] = row.get("pace", [])
    return paces


def _grouped(measured: Sequence[Row], kind: str, names: tuple[str, ...]) -> list[list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in measured:
        if row["kind"] == kind:
            groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.values())


def _throughput(ones: list[Row]) -> Row:
    def median(value: str) -> float:
        return statistics.median(row[value] for row in ones)

    def counter(name: str) -> float:
        return statistics.median(row["counters"][name] / row["epochs"] for row in ones)

    last = ones[-1]
    return {
        "variant": last["variant"],
        "repetitions": len(ones),
        "epochs": last["epochs"],
        "events": last["events"],
        "steady": median("steady"),
        "drained": median("drained"),
        "epoch_ms": statistics.median(ms for row in ones for ms in row["epoch_ms"]),
        "megabytes": counter("bytes_up") / 1e6,
        "requests": statistics.median(sum(row["counters"]["requests"].values()) / row["epochs"] for row in ones),
        "link_ms": counter("busy") * 1e3,
        "server_cpu_ms": (counter("server_cpu") + counter("link_cpu")) * 1e3,
        "server": last["counters"]["server"],
        "kinds": {kind: count / last["epochs"] for kind, count in last["counters"]["requests"].items()},
        "high_water": [max(row["high_water"][half] for row in ones) for half in (0, 1)],
        "state_bytes": last["state_bytes"],
        "phases": harness.medians([row["phases"] for row in reversed(ones)]),
        "differing": max(row["differing"] for row in ones),
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
        "limited": statistics.median(speed for row in ones for number, speed in _numbered(row) if number % 2),
        "megabytes": megabytes,
        "bound": float(last["variant"].split(" ")[0]) / megabytes * last["events"],
        "free": statistics.median(speed for row in ones for number, speed in _numbered(row) if not number % 2),
        "high_water": [max(row["high_water"][half] for row in ones) for half in (0, 1)],
        "differing": max(row["differing"] for row in ones),
    }


def _megabytes(ones: list[Row]) -> float:
    """Of an epoch, both ways."""
    return statistics.median(
        (row["counters"]["bytes_up"] + row["counters"]["bytes_down"]) / row["epochs"] / 1e6 for row in ones
    )


def _numbered(row: Row) -> list[tuple[int, float]]:
    return list(enumerate(row["stretches"], row["first_stretch"]))


def _shares(ones: list[Row]) -> list[float]:
    """Of each stretch with limits between two without: its speed as a share of their mean."""
    ratios = []
    for row in ones:
        speeds = dict(_numbered(row))
        for number, speed in speeds.items():
            if number % 2 and number - 1 in speeds and number + 1 in speeds:
                ratios.append(2 * speed / (speeds[number - 1] + speeds[number + 1]))
    return ratios


def _latency(ones: list[Row]) -> Row:
    ms = [value for row in ones for value in row["ms"]]
    p50, p95, p99 = np.percentile(ms, [50, 95, 99])
    return {
        "engine": ones[-1]["engine"],
        "interval": ones[-1]["interval"],
        "files": len(ms),
        "commits": sum(row["commits"] for row in ones),
        "p50": float(p50),
        "p95": float(p95),
        "p99": float(p99),
        "max": max(ms),
        "cpu": statistics.median(row["cpu"] for row in ones),
        "differing": max(row["differing"] for row in ones),
        "doubled": max(row["doubled"] for row in ones),
        "load": statistics.median(row["load"] for row in ones),
    }
