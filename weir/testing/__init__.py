"""Unit tests of stages and pipelines: no JVM, nothing to configure, in milliseconds.

    run = testing.run(aircraft_rotation, state={"N1": Aircraft(legs=1, last_arr_delay=40)})
    out = run.epoch([{"tailnum": "N1", "dest": "BOS", ...}])
    assert run.state["N1"].legs == 2

A run takes the real steps of an epoch of `weir run`. Each subtask has a real RocksDB, which snapshots each epoch and
forks the next one from it, in a temporary directory that goes with the run. Rows are routed and sorted as Spark does
it. Three parts of a stage need more than that:

- `where` is Spark SQL, of which a part is evaluated here, exactly as Spark does it: comparisons, AND, OR, NOT, IS, IN,
  BETWEEN, LIKE, arithmetic, CAST and some functions, on booleans, numbers, texts, dates, timestamps and fields of
  structs (docs/reference/where.md). Everything else is refused by name, as are conversions that Spark would make by
  itself (`v = '3'`).
- `transform` is not applied: give `run` rows as the transform returns them. A pipeline with one needs Spark.
- Gates are not evaluated.

`SourceContract`, `SinkContract`, `OperatorContract` and `BackendContract` are the tests that every source, sink,
operator and state backend must pass, to be subclassed: docs/how-to/connectors.md, docs/how-to/operators.md,
docs/how-to/state-backend.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from state_ops.schema.state_class import State
from weir.definition import MAX_PARALLELISM, Pipeline, Stage
from weir.testing.backend_contract import BackendContract, BackendSystem
from weir.testing.epochs import Epochs
from weir.testing.operator_contract import OperatorContract, OperatorSystem
from weir.testing.rows import Rows, Schema
from weir.testing.sink_contract import SinkContract, SinkSystem
from weir.testing.slicing import assert_slicing_does_not_matter
from weir.testing.source_contract import SourceContract, SourceSystem
from weir.testing.stage_run import PipelineRun, StageRun

__all__ = [
    "BackendContract",
    "BackendSystem",
    "OperatorContract",
    "OperatorSystem",
    "PipelineRun",
    "Rows",
    "SinkContract",
    "SinkSystem",
    "SourceContract",
    "SourceSystem",
    "StageRun",
    "assert_slicing_does_not_matter",
    "run",
    "run_pipeline",
]


def run(
    stage: Stage,
    state: Mapping[Any, State] | None = None,
    *,
    parallelism: int = 1,
    batch_rows: int = 65_536,
    max_parallelism: int = MAX_PARALLELISM,
    schema: pa.Schema | Mapping[str, pa.DataType] | None = None,
    table: Rows | None = None,
) -> StageRun:
    """Start one stage on its own.

    Args:
        stage: The stage.
        state: The state of keys before the first epoch, by key; a tuple if the key has several columns.
        parallelism: The number of subtasks.
        batch_rows: The largest number of rows that the function gets at once.
        max_parallelism: The number of key groups.
        schema: The input's columns; by default as the first rows tell. It is needed if those have only nulls in a
            column.
        table: For a lookup, all rows of its table. An epoch may replace them (`StageRun.epoch`).

    Raises:
        TypeError: `stage` is no stage.
        PipelineError: `state` has other instances than those of the stage's State class.

    Example:
        >>> from weir import agg, aggregate, files, testing
        >>> totals = aggregate("totals", files("{landing}/*.parquet"), key="carrier", delay=agg.sum("delay"))
        >>> run = testing.run(totals, parallelism=2)
        >>> run.epoch([{"carrier": "AA", "delay": 5}, {"carrier": "AA", "delay": 7}])["delay"].to_list()
        [12]
    """
    if not isinstance(stage, Stage):
        raise TypeError(f"testing.run takes a stage, not {_kind(stage)}. testing.run_pipeline runs a pipeline.")
    epochs = Epochs(stage, parallelism, max_parallelism, batch_rows, schema, state or {})
    epochs.put({} if table is None else {stage.uid: table})
    return StageRun(epochs, stage, state or {})


def run_pipeline(
    pipeline: Pipeline,
    slices: Iterable[Rows | Mapping[str, Rows]] = (),
    *,
    parallelism: int = 1,
    batch_rows: int = 65_536,
    drain: bool = False,
    schema: Schema = None,
    tables: Mapping[str, Rows] = MappingProxyType({}),
) -> PipelineRun:
    """Run a pipeline over slices, an epoch each. More epochs may follow with `PipelineRun.epoch`.

    Args:
        pipeline: The pipeline.
        slices: The rows of each epoch: of the source, or by source name if there are several.
        parallelism: The number of subtasks of each stage.
        batch_rows: The largest number of rows that a function gets at once.
        drain: Close every window at the end.
        schema: The columns of the source, or of each source by its name; by default as the first rows tell.
        tables: By a lookup's uid, all rows of its table. An epoch may replace them (`PipelineRun.epoch`).

    Raises:
        TypeError: `pipeline` is no pipeline.
        WeirError: An epoch is declined.

    Example:
        >>> from weir import Pipeline, agg, aggregate, delta, files, testing
        >>> source = files("{landing}/*.parquet")
        >>> totals = aggregate("totals", source, key="carrier", delay=agg.sum("delay"), sink=delta.append("totals"))
        >>> slices: list[testing.Rows] = [[{"carrier": "AA", "delay": 5}], [{"carrier": "AA", "delay": 7}]]
        >>> run = testing.run_pipeline(Pipeline("delays", (totals,)), slices)
        >>> run.tables["totals"].to_dicts()
        [{'carrier': 'AA', 'delay': 5, 'epoch': 1}, {'carrier': 'AA', 'delay': 12, 'epoch': 2}]
    """
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"testing.run_pipeline takes a pipeline, not {_kind(pipeline)}. testing.run runs a stage.")
    started = PipelineRun(pipeline, parallelism, batch_rows, schema, tables)
    for rows in slices:
        started.epoch(rows)
    if drain:
        started.epoch(drain=True)
    return started


def _kind(given: object) -> str:
    """Return what was given, with its article, for an error."""
    return "a pipeline" if isinstance(given, Pipeline) else "a stage" if isinstance(given, Stage) else repr(given)
