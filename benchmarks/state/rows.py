"""The rows of the comparison and the workloads they run on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.state.workload import Slices, Workload


@dataclass(frozen=True, slots=True)
class Row:
    """One engine, set up in one way.

    group: "weir", or the letter of the peer: a Spark's aggregation, b transformWithStateInPandas, c Flink SQL, d
    KeyedProcessFunction, e Bytewax. module: its program. peers: name of the environment that it needs, if not the
    project's own. events: of one epoch, where the engine is too slow for all; seconds: after which a measurement is
    given up. checked: options of a run of its own that is compared instead, where the measured one hands out nothing.
    """

    name: str
    title: str
    group: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    peers: str | None = None
    events: int | None = None
    seconds: int = 900
    checked: dict[str, Any] | None = None

    def slices(self, workload: Workload, epochs: int) -> Slices:
        return Slices(3, self.events) if self.events else Slices(epochs, workload.events)


_MINI_BATCH = {
    "table.exec.mini-batch.enabled": "true",
    "table.exec.mini-batch.allow-latency": "3 s",
    "table.exec.mini-batch.size": "50000",
    "table.optimizer.agg-phase-strategy": "ONE_PHASE",
}
_PYTHON = {"python.state.cache-size": "100000", "python.fn-execution.bundle.size": "1000"}
_PROCESS = {"conf": {**_PYTHON, "python.execution-mode": "process"}}
_THREAD = {"conf": {**_PYTHON, "python.execution-mode": "thread"}}
_PANDAS = {"changelog": True, "sink": "parquet"}

ROWS = (
    Row("weir-aggregate", "Weir, `aggregate`", "weir", "weir", {"form": "aggregate"}),
    Row("weir-stage", "Weir, `@stage` with `state.fold`", "weir", "weir", {"form": "stage"}),
    Row(
        "weir-blocks",
        "Weir, `aggregate`, blocks through Spark's shuffle",
        "weir",
        "weir",
        {"form": "aggregate", "settings": {"spark": {"direct_read_mb": 0}}},
    ),
    Row(
        "weir-shuffled",
        "Weir, `aggregate`, rows through Spark's shuffle",
        "weir",
        "weir",
        {"form": "aggregate", "settings": {"spark": {"direct_read_mb": 0, "exchange": "rows"}}},
    ),
    Row(
        "spark-changelog",
        "Spark aggregation, changelog on, Parquet",
        "a",
        "spark_native",
        {"changelog": True, "sink": "parquet"},
    ),
    Row(
        "spark-snapshots",
        "Spark aggregation, changelog off, Parquet",
        "a",
        "spark_native",
        {"changelog": False, "sink": "parquet"},
    ),
    Row(
        "spark-noop",
        "Spark aggregation, changelog on, no output",
        "a",
        "spark_native",
        {"changelog": True, "sink": "noop"},
    ),
    Row(
        "spark-tws",
        "Spark transformWithStateInPandas",
        "b",
        "spark_tws",
        _PANDAS,
        events=10_000,
    ),
    Row("flink-sql", "PyFlink SQL, no output", "c", "flink", peers="flink", checked={"checked": True}),
    Row(
        "flink-sql-batched",
        "PyFlink SQL, mini-batches, no output",
        "c",
        "flink",
        {"conf": _MINI_BATCH},
        "flink",
        checked={"conf": _MINI_BATCH, "checked": True},
    ),
    Row(
        "flink-process",
        "PyFlink KeyedProcessFunction, process mode",
        "d",
        "flink_process",
        _PROCESS,
        "flink",
        events=10_000,
    ),
    Row(
        "flink-thread",
        "PyFlink KeyedProcessFunction, thread mode",
        "d",
        "flink_process",
        _THREAD,
        "flink",
        events=10_000,
    ),
    Row("weir-per-key", "Weir, a function per key", "weir", "weir", {"form": "per-key"}),
    *(
        Row(
            f"{name}-collected",
            f"{title}, with list, map and timer",
            group,
            module,
            {**options, "collected": True},
            peers,
            events,
        )
        for name, title, group, module, options, peers, events in (
            ("weir-per-key", "Weir, a function per key", "weir", "weir", {"form": "collected"}, None, None),
            ("spark-tws", "Spark transformWithStateInPandas", "b", "spark_tws", _PANDAS, None, 10_000),
            (
                "flink-process",
                "PyFlink KeyedProcessFunction, process mode",
                "d",
                "flink_process",
                _PROCESS,
                "flink",
                10_000,
            ),
            (
                "flink-thread",
                "PyFlink KeyedProcessFunction, thread mode",
                "d",
                "flink_process",
                _THREAD,
                "flink",
                20_000,
            ),
        )
    ),
    Row("bytewax", "Bytewax, recovery on, two processes", "e", "bytewax_flow", {"epoch_seconds": 3}, "bytewax"),
)

_PER_KEY = frozenset(
    f"{name}{kind}"
    for name in ("weir-per-key", "spark-tws", "flink-process", "flink-thread")
    for kind in ("", "-collected")
)
_OURS_PER_KEY = frozenset({"weir-per-key", "weir-per-key-collected"})
_SMALL = frozenset(row.name for row in ROWS if not row.name.endswith("-collected")) - _OURS_PER_KEY
_LARGE = frozenset(row.name for row in ROWS if row.name in _SMALL and row.group in ("weir", "a", "c")) - {"spark-noop"}
_FLAT = frozenset({"weir-aggregate"})


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload and who runs it. disk: bytes that it takes; it is left out where they are not free."""

    workload: Workload
    rows: frozenset[str]
    disk: int = 5 << 30


_TIMED = frozenset({"weir-aggregate", "weir-blocks", "spark-changelog"})
SCENARIOS = (
    Scenario(Workload("uniform-1m", 1_000_000), _SMALL),
    Scenario(Workload("zipf-1m", 1_000_000, "zipf"), _SMALL),
    Scenario(Workload("uniform-1m-1kb", 1_000_000, payload=True), _SMALL - {"spark-noop"}, 20 << 30),
    Scenario(Workload("zipf-1m-1kb", 1_000_000, "zipf", payload=True), _SMALL - {"spark-noop"}, 20 << 30),
    Scenario(Workload("uniform-20m", 20_000_000, preload=True), _LARGE, 20 << 30),
    Scenario(Workload("zipf-20m", 20_000_000, "zipf", preload=True), _LARGE, 20 << 30),
    Scenario(
        Workload("uniform-20m-1kb", 20_000_000, payload=True, preload=True),
        frozenset({"weir-aggregate", "spark-changelog"}),
        75 << 30,
    ),
    *(
        Scenario(Workload(f"{operator}-1m", 1_000_000, epochs=6, operator=operator), _TIMED)
        for operator in ("window", "session", "deduplicate")
    ),
    Scenario(Workload("per-key", 10_000, epochs=4, events=100_000), _PER_KEY | {"weir-aggregate"}),
    *(
        Scenario(Workload(f"{skew}-10k", 10_000, skew, epochs=4, events=100_000), _OURS_PER_KEY | {"weir-aggregate"})
        for skew in ("half", "group")
    ),
    Scenario(Workload("flat-1m", 1_000_000, preload=True, epochs=20, events=50_000, hot=50_000), _FLAT),
    Scenario(Workload("flat-5m", 5_000_000, preload=True, epochs=20, events=50_000, hot=50_000), _FLAT),
    Scenario(Workload("flat-20m", 20_000_000, preload=True, epochs=20, events=50_000, hot=50_000), _FLAT, 20 << 30),
)
