"""Tests by random trials that results do not depend on how input is cut into epochs, batches and subtasks.

Each trial is compared with the plainest one.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.counts import counted
from state_ops.errors import PipelineError
from state_ops.rows.sketches import DISTINCT, QUANTILE
from state_ops.schema.state_class import State
from weir.definition import LATE, MAIN, MAX_PARALLELISM, Pipeline, Source, Stage, is_clocked, sources_of
from weir.definition.change_feed import CHANGE_TYPE, TAKEN_BACK
from weir.execution.row_order import ordered
from weir.testing.epochs import FIRST_NOW, Epochs, columns_of
from weir.testing.rows import Rows, Schema, table_of
from weir.testing.stage_run import StageRun, stacked

_CLOSE = 1e-9  # relative; sums of floats differ in their last bits with the order of adding


@dataclass(frozen=True, slots=True)
class _Slicing:
    """The cuts of one trial. cuts: where epochs end, as shares of the rows."""

    cuts: tuple[float, ...]
    batch_rows: int
    parallelism: int
    seed: int

    def sizes(self, rows: int) -> list[int]:
        ends = [round(cut * rows) for cut in self.cuts] + [rows]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of a trial. sketches: by stage, the fields of its state that are not compared."""

    tables: dict[str, pl.DataFrame]
    states: dict[str, dict[Any, State]]
    sketches: dict[str, tuple[str, ...]]


def assert_slicing_does_not_matter(
    target: Stage | Pipeline,
    rows: Rows | Mapping[str, Rows],
    *,
    state: Mapping[Any, State] | None = None,
    trials: int = 10,
    seed: int = 0,
    schema: Schema = None,
    tables: Mapping[str, Rows] = MappingProxyType({}),
) -> None:
    """Check that a stage or a pipeline gives the same rows and the same final state however its input is cut.

    Where epochs and batches end, and how many subtasks there are, is chance in production, so nothing may depend on it.
    Each trial cuts the rows at random places into epochs, some of them empty, and into batches, for 1 to 4 subtasks. It
    closes every window at the end, and must agree with one epoch in one batch on one subtask.

    Epochs get the rows in the order of `order_by`, or of event time without it. Rows that tie come in any order, and so
    do all rows of an epoch if the stage declares no order. `epoch.now` is always the same.

    Compared are:

    - The rows of all outputs. Floats may differ in their last bits.
    - For running aggregates, the last row of each key.
    - For changes (with the column `_change_type`), the rows that are not taken back in the end.
    - For sketches, the estimates of `approx_distinct`. Those of `approx_quantile` depend a little on how the input is
      cut, and are not compared.

    Left out are windows by processing time (`on=None`) and facts that wait for no version (`as_of(wait=False)`), with
    the stages that read them: their rows depend on when epochs begin.

    Args:
        target: The stage or pipeline.
        rows: All rows of its source, or by source name if there are several.
        state: The state of a stage's keys before the first epoch.
        trials: The number of random cuts.
        seed: The seed of the cuts.
        schema: The columns of the source, or of each source by its name; by default as the rows tell.
        tables: By a lookup's uid, all rows of its table.

    Raises:
        AssertionError: A cut gives other rows or state. The message has the first difference, and the cut.
        PipelineError: Nothing is left that can be compared.

    Example:
        >>> import polars as pl
        >>> from weir import files, stage, testing
        >>> @stage("numbered", source=files("{landing}/*.parquet"), key=None)
        ... def numbered(rows: pl.DataFrame, epoch) -> pl.DataFrame:
        ...     return rows.with_row_index("number")
        >>> try:
        ...     testing.assert_slicing_does_not_matter(numbered, [{"id": 1}, {"id": 2}])
        ... except AssertionError as error:
        ...     print(str(error).splitlines()[0])
        numbered depends on how its input is sliced.
    """
    _refuse_clocked(target)
    played = _player(target, rows, (state if isinstance(target, Stage) else None) or {}, schema, tables)
    plain = played(_Slicing((), 1 << 30, 1, seed))
    chance = random.Random(seed)
    for trial in range(trials):
        slicing = _slicing(chance, trial)
        try:
            difference = _difference(plain, played(slicing))
        except Exception as error:
            error.add_note(f"slicing: {_described(slicing)} (trial {trial}, seed {seed})")
            raise
        if difference:
            raise AssertionError(
                f"{target.uid if isinstance(target, Stage) else target.name} depends on how its input is sliced.\n"
                f"  first difference: {difference}\n"
                f"  slicing: {_described(slicing)} (trial {trial}, seed {seed}); compared with one epoch in one "
                f"batch on one subtask"
            )


def _goes_by_epochs(stage: Stage) -> bool:
    """Return whether a stage's output depends on how its input is cut, as its author has said."""
    return stage.operator.goes_by_epochs or is_clocked(stage) or any(map(_goes_by_epochs, stage.stages_before))


def _refuse_clocked(target: Stage | Pipeline) -> None:
    stages = (target,) if isinstance(target, Stage) else target.stages
    if all(map(_goes_by_epochs, stages)):
        raise PipelineError(
            f"Of {target.uid if isinstance(target, Stage) else target.name} nothing can be compared: its windows go by"
            " processing time, so by when epochs are begun, or its facts wait for no version (wait=False).",
            next="Test it with epochs of your own: testing.run(...).epoch(rows, now=...).",
        )


def _slicing(chance: random.Random, trial: int) -> _Slicing:
    if trial == 0:  # batches of one row: where most functions that look around in their batch give themselves away
        return _Slicing((), 1, 1, chance.randrange(1 << 30))
    if trial == 1:
        return _Slicing((0.5,), 1 << 30, 2, chance.randrange(1 << 30))
    cuts = sorted(chance.random() for _ in range(chance.randint(0, 6)))
    if cuts and chance.random() < 0.5:
        cuts = sorted([*cuts, chance.choice(cuts)])  # an empty epoch
    batch = chance.choice([1, 2, 3, chance.randint(4, 50), 1 << 30])
    return _Slicing(tuple(cuts), batch, chance.randint(1, 4), chance.randrange(1 << 30))


def _described(slicing: _Slicing) -> str:
    shares = [f"{100 * cut:.1f} %" for cut in slicing.cuts]
    epochs = f"epochs that end after {', '.join(shares)} and 100 % of the rows" if shares else "one epoch"
    batches = "whole" if slicing.batch_rows == 1 << 30 else f"in batches of at most {slicing.batch_rows}"
    return f"{epochs}, {batches}, {slicing.parallelism} subtask{'s' if slicing.parallelism > 1 else ''}"


def _player(
    target: Stage | Pipeline, rows: Any, state: Mapping[Any, State], schema: Any, lookups: Mapping[str, Rows]
) -> Any:
    """Return a function that plays the target with one slicing."""
    stages = (target,) if isinstance(target, Stage) else target.stages
    readers: dict[str, list[Stage]] = {}
    read: dict[str, Source] = {}
    for stage in stages:
        for source in sources_of(stage) if len(stages) == 1 else (input.origin for input in stage.inputs):
            if isinstance(source, Source):
                readers.setdefault(source.name, []).append(stage)
                read[source.name] = source
    by_source = rows if isinstance(rows, Mapping) else {next(iter(readers)): rows}
    given_columns = {name: columns_of(source, schema) for name, source in read.items()}
    tables = {
        name: table for name, given in by_source.items() if (table := table_of(given, given_columns[name])) is not None
    }
    fixed: Any = schema
    if len(read) > 1:  # in an early epoch some of them may have no rows that tell their columns
        fixed = {name: given_columns[name] or table.schema for name, table in tables.items()}

    def play(slicing: _Slicing) -> _Result:
        chance = random.Random(slicing.seed)
        cut = {name: _cut(table, read[name], readers[name], slicing, chance) for name, table in tables.items()}
        epochs = Epochs(target, slicing.parallelism, MAX_PARALLELISM, slicing.batch_rows, fixed, state)
        epochs.put(lookups)
        runs = [StageRun(epochs, stage, state) for stage in stages]
        outputs = {
            name: (run, output)
            for run in runs
            if not _goes_by_epochs(run.stage)
            for name, output in _outputs(target, run.stage).items()
        }
        parts: dict[str, list[pl.DataFrame]] = {name: [] for name in outputs}
        for slices in [*zip(*cut.values(), strict=True), ()]:
            epochs.run(dict(zip(cut, slices, strict=False)), FIRST_NOW, drain=not slices)
            for name, (run, output) in outputs.items():
                parts[name].append(run.late if output == LATE else run.rows(output))
        frames = {name: stacked(frames) for name, frames in parts.items()}
        for name, (run, output) in outputs.items():
            if output != LATE and frames[name].width:
                frames[name] = _final(run, frames[name])
        kept = [run for run in runs if not _goes_by_epochs(run.stage)]
        compared = [run for run in kept if not (run.stage.closes or run.stage.operator.is_arrival_in_state)]
        states = {run.stage.uid: dict(run.state) for run in compared}
        sketches = {run.stage.uid: _sketches(run.stage, DISTINCT, QUANTILE) for run in compared}
        epochs.close()
        return _Result(frames, states, sketches)

    return play


def _final(run: StageRun, rows: pl.DataFrame) -> pl.DataFrame:
    """Return the part of a stage's rows that every slicing must give alike.

    Of rows that a stage revises, these are the rows that it has not taken back in the end. Running aggregates come once
    an epoch, and of a key that has no more rows the last ones say nothing.
    """
    stage = run.stage
    rows = rows.drop(_sketches(stage, QUANTILE), strict=False)
    if CHANGE_TYPE in rows.columns:
        sign = pl.when(pl.col(CHANGE_TYPE).is_in(TAKEN_BACK)).then(-1).otherwise(1)
        columns = [name for name in rows.columns if name not in (CHANGE_TYPE, *stage.operator.clocked_output(stage))]
        # With how often each row is left: never less than once where the changes are right.
        return rows.group_by(columns).agg(sign.sum().alias(CHANGE_TYPE)).filter(pl.col(CHANGE_TYPE) != 0)
    newest_by = stage.operator.newest_by
    if newest_by is None:
        return rows
    newest = rows.sort(newest_by).unique(list(stage.key), keep="last", maintain_order=True).drop(newest_by)
    keys = {key if isinstance(key, tuple) else (key,) for key in run.state}
    return newest.filter(pl.Series([row in keys for row in newest.select(stage.key).iter_rows()], dtype=pl.Boolean))


def _sketches(stage: Stage, *kinds: str) -> tuple[str, ...]:
    """Return the aggregates of a stage that keep a sketch of such a kind.

    The bytes of a sketch depend on the order in which values came.
    """
    return tuple(name for name, agg in stage.operator.aggregates if agg.kind in kinds)


def _outputs(target: Stage | Pipeline, stage: Stage) -> dict[str, str]:
    """Return the outputs of a stage that are compared, by the name that people know them by."""
    if isinstance(target, Stage):
        return {"output": MAIN, "late": LATE, **{f"output {name}": name for name, _ in stage.outputs}}
    aside = {output for output, _, _ in stage.tables_aside}
    return {sink.name: output for output, sink in stage.sinks_by_output if output not in aside}


def _cut(
    table: pa.Table, source: Source, readers: Sequence[Stage], slicing: _Slicing, chance: random.Random
) -> list[pa.Table]:
    order_by = next((stage.order_by for stage in readers if stage.order_by), ())
    event_time = source.event_time
    if not order_by and event_time is None:
        event_time = readers[0].on
    columns = list(order_by) or ([event_time] if event_time and event_time in table.column_names else [])
    table = table.take(_shuffled(table.num_rows, chance))
    if columns:
        table = table.take(ordered(table, columns))
    parts, start = [], 0
    for size in slicing.sizes(table.num_rows):
        parts.append(table.slice(start, size).take(_shuffled(size, chance)))
        start += size
    return parts


def _shuffled(number: int, chance: random.Random) -> np.ndarray:
    order = list(range(number))
    chance.shuffle(order)
    return np.array(order, np.int64)


def _difference(plain: _Result, other: _Result) -> str | None:
    for name, table in plain.tables.items():
        difference = _rows_differ(table, other.tables[name])
        if difference:
            return f"{name}: {difference}"
    for uid, states in plain.states.items():
        for key in [*states, *(other.states[uid].keys() - states.keys())]:
            expected, actual = states.get(key), other.states[uid].get(key)
            if expected is None or actual is None:
                return f"state of {key!r} in {uid}: {actual}, expected {expected}"
            for field, value in expected.as_dict().items():
                if field not in plain.sketches[uid] and not _same(value, actual.as_dict()[field]):
                    return f"state of {key!r} in {uid}: {field} is {actual.as_dict()[field]!r}, expected {value!r}"
    return None


def _rows_differ(expected: pl.DataFrame, actual: pl.DataFrame) -> str | None:
    columns = expected.columns or actual.columns
    rows, other_rows = sorted(expected.rows(), key=_sortable), sorted(actual.rows(), key=_sortable)
    if len(rows) == len(other_rows) and all(all(map(_same, a, b)) for a, b in zip(rows, other_rows, strict=True)):
        return None
    here, there = Counter(map(_sortable, rows)), Counter(map(_sortable, other_rows))
    missing = next((row for row in rows if here[_sortable(row)] > there[_sortable(row)]), None)
    extra = next((row for row in other_rows if there[_sortable(row)] > here[_sortable(row)]), None)
    parts = []
    if missing is not None:
        parts.append(f"the row {dict(zip(columns, missing, strict=True))} is missing")
    if extra is not None:
        parts.append(
            f"the row {dict(zip(columns, extra, strict=True))} is there instead"
            if parts
            else f"the row {dict(zip(columns, extra, strict=True))} is too many"
        )
    return "; ".join(parts) + f" ({counted(len(other_rows), 'row')}, expected {len(rows)})"


def _sortable(row: tuple[Any, ...]) -> tuple[str, str]:
    exact = [None if isinstance(value, float) else value for value in row]
    return repr(exact), repr([f"{value:.8g}" for value in row if isinstance(value, float)])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=_CLOSE, abs_tol=_CLOSE) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, State) and type(a) is type(b):
        return _same(a.as_dict(), b.as_dict())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    return type(a) is type(b) and a == b
