"""The input rows that a key's state, or a row of it, is made of: epoch by epoch, back through the stages before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from typing import Annotated, Any

import polars as pl
import pyarrow as pa

from state_ops.errors import WeirError
from state_ops.facts import HIDDEN, Facts
from weir.definition import Input, Stage
from weir.definition.column_lineage import before, seen_as
from weir.inspection import state_reader
from weir.inspection.comparison.rows import alike
from weir.inspection.state_reader import StateChange
from weir.replay.recording import came_from
from weir.replay.replay import Playing, inputs_from
from weir.replay.stage_replay import Played, key_of, rows_by_input, stacked, subtasks_of

_KEYS = 5
"""Of how many keys of a stage before it the rows are traced."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of the event time of the rows that are meant.

    Attributes:
        column: The column of the event time.
        start: The first moment that counts; `end`: the first that does not.
    """

    column: str
    start: datetime
    end: datetime

    def of(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the rows within."""
        if self.column not in rows.columns:
            return rows
        return rows.filter((pl.col(self.column) >= self.start) & (pl.col(self.column) < self.end))


@dataclass(frozen=True, slots=True)
class Same:
    """Rows that are the one that is asked about, as an output that hands rows on unchanged has it."""

    values: dict[str, Any]

    def of(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the rows with these values, of the columns that both have."""
        same = alike(rows, self.values)
        return rows if same is None else same


@dataclass(frozen=True, slots=True)
class Contribution(Facts):
    """The rows that one epoch gave to a key.

    Attributes:
        rows: Input rows of the stage, with `_input`, `_file` and `_row`.
        slices: By source, what the epoch read.
    """

    epoch: int
    rows: pl.DataFrame
    slices: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trace(Facts):
    """The rows of one key of a stage, of the epochs that changed its state.

    Attributes:
        key: By column.
        contributions: Oldest first.
        unknown: What may have contributed besides, and where the rows came from, as far as that is not known, in words.
        before: By stage before it, the traces of the keys that its rows came from.
        is_whole: No other row contributed, though it may not be known where these came from.
    """

    stage: str
    key: dict[str, Any]
    contributions: tuple[Contribution, ...]
    unknown: tuple[str, ...]
    before: tuple[Trace, ...] = ()
    is_whole: Annotated[bool, HIDDEN] = True


def trace(
    playing: Playing,
    stage: Stage,
    key: Sequence[Any],
    epoch: int,
    bounds: Bounds | Same | None = None,
    seen: Played | None = None,
) -> Trace:
    """Return the rows of a key up to an epoch.

    Args:
        key: A value for each key column.
        bounds: Of which rows, where only some made what is asked about. A row that is the same came in this very epoch.
        seen: The epoch itself at the key, if it was played already.
    """
    epochs, unknown = [epoch], list[str]()
    if not isinstance(bounds, Same):
        epochs, unknown = _epochs(playing, stage, key, epoch)
    contributions: list[Contribution] = []
    for number in epochs:
        if seen is not None and number == seen.epoch:
            rows = seen.rows if bounds is None else bounds.of(seen.rows)
            contributions += [Contribution(number, rows, seen.slices)] if rows.height else []
            continue
        try:
            contribution = _contribution(playing, stage, key, number, bounds)
        except WeirError as error:
            unknown.append(f"rows of epoch {number}: {error.what}")
            continue
        if contribution.rows.height:
            contributions.append(contribution)
    before, untraced = _before(playing, stage, contributions, key)
    named = dict(zip(stage.key, key, strict=True))
    return Trace(stage.uid, named, tuple(contributions), (*unknown, *untraced), before, is_whole=not unknown)


def _epochs(playing: Playing, stage: Stage, key: Sequence[Any], epoch: int) -> tuple[list[int], list[str]]:
    """Return the epochs that changed a key's state since it came, up to one, oldest first; and which others may
    have."""
    if not stage.has_state:
        return [epoch], []
    since, unknown = list[StateChange](), list[str]()
    for change in state_reader.history(playing.pipeline, playing.settings, stage.uid, key, epoch):
        if change.checkpoint.id == epoch:
            break
        since = [*since, change] if change.rows else []
    for change in since:
        if change.since is None:
            unknown.append(f"rows of any epoch up to {change.checkpoint.id}: those before it are not retained")
        elif change.since != change.checkpoint.id:
            unknown.append(
                f"rows of the epochs {change.since} to {change.checkpoint.id}, of which only the last is retained"
            )
    return [*(int(change.checkpoint.id) for change in since), epoch], unknown


def _contribution(
    playing: Playing, stage: Stage, key: Sequence[Any], epoch: int, bounds: Bounds | Same | None
) -> Contribution:
    with playing.replaying(epoch) as replay:
        columns = key_of(replay, stage, key)
        tables: list[pa.Table | None] = list(replay.read(stage, subtasks_of(replay, columns, None)).values())
        inputs = rows_by_input(stage, tables, columns)
        given = [frame if bounds is None else bounds.of(frame) for frame in inputs.values() if frame.height]
        return Contribution(epoch, stacked(given), replay.checkpoint.slice)


def _before(
    playing: Playing,
    stage: Stage,
    contributions: Sequence[Contribution],
    values: Sequence[Any],
) -> tuple[tuple[Trace, ...], list[str]]:
    """Traces of the keys of stages before one whose rows it had; and what is not traced.

    Args:
        values: Of the key that is asked about, by which rows are found behind a stage without one.
    """
    traces, untraced = list[Trace](), list[str]()
    for upstream in stage.stages_before:
        given = {
            contribution.epoch: rows
            for contribution in contributions
            if (rows := came_from(contribution.rows, upstream.uid)).height
        }
        read = inputs_from(stage, upstream)
        if given and not upstream.key and stage.key:
            for input in {(input.key, input.columns, input.transform): input for input in read}.values():
                earlier = _earlier(input, dict(zip(input.key, values, strict=True)))
                if len(earlier) < len(input.key):
                    untraced.append(_computed(stage, input, input.key))
                else:
                    traces.append(_through(playing, upstream, earlier, list(given)))
            continue
        if given and upstream.key and (changing := next((input for input in read if input.transform), None)):
            untraced.append(_computed(stage, changing, upstream.key))
            continue
        newest: dict[tuple[Any, ...], int] = {}
        for columns, (epoch, rows) in product(dict.fromkeys(input.columns for input in read), given.items()):
            seen = [name for column in upstream.key if (name := seen_as(columns, column)) is not None]
            if not upstream.key or len(seen) < len(upstream.key) or not set(seen) <= set(rows.columns):
                untraced.append(f"rows of {upstream.uid} in epoch {epoch} do not have its key's columns")
                continue
            newest |= dict.fromkeys(rows.select(seen).unique(maintain_order=True).rows(), epoch)
        keys = list(newest)[:_KEYS]
        traces += [trace(playing, upstream, key, newest[key]) for key in keys]
        if len(newest) > len(keys):
            untraced.append(f"{len(newest) - len(keys)} more keys of {upstream.uid} are not traced")
    return tuple(traces), untraced


def _through(playing: Playing, stage: Stage, values: dict[str, Any], epochs: Sequence[int]) -> Trace:
    """Return the rows with these values that a stage without a key had, as far as its input has the columns."""
    contributions, untraced = list[Contribution](), list[str]()
    for epoch in epochs:
        with playing.replaying(epoch) as replay:
            tables: list[pa.Table | None] = list(replay.read(stage, range(replay.parallelism)).values())
            slices = replay.checkpoint.slice
        given = []
        for name, rows in rows_by_input(stage, tables, None).items():
            if not rows.height:
                continue
            if missing := [column for column in values if column not in rows.columns]:
                untraced.append(f"rows of {name} in epoch {epoch}: it has no {', '.join(missing)}")
                continue
            try:
                given.append(rows.filter([pl.col(column) == value for column, value in values.items()]))
            except pl.exceptions.PolarsError:  # what a stage has made a text of is a number there
                untraced.append(f"rows of {name} in epoch {epoch}: its {', '.join(values)} is of another type there")
        together = stacked(given)
        contributions += [Contribution(epoch, together, slices)] if together.height else []
    traces = list[Trace]()
    for upstream in stage.stages_before:
        of_stage = [
            contribution.epoch for contribution in contributions if came_from(contribution.rows, upstream.uid).height
        ]
        if of_stage and not upstream.key:
            read = inputs_from(stage, upstream)
            for input in {(input.columns, input.transform): input for input in read}.values():
                earlier = _earlier(input, values)
                if len(earlier) < len(values):
                    untraced.append(_computed(stage, input, values))
                else:
                    traces.append(_through(playing, upstream, earlier, of_stage))
        elif of_stage:
            untraced.append(f"rows of {upstream.uid}: weir explain asks its table")
    return Trace(stage.uid, values, tuple(contributions), tuple(untraced), tuple(traces))


def _earlier(input: Input, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by the columns of a stage's input that they stand in, without those that its SQL computes; none
    where a transform may have computed them."""
    if input.transform is not None:
        return {}
    return {earlier: value for name, value in values.items() if (earlier := before(input.columns, name)) is not None}


def _computed(stage: Stage, input: Input, names: Iterable[str]) -> str:
    makes = "makes" if input.transform is None else "has a transform, which may make"
    return f"rows of {input.name}: {stage.uid} {makes} {', '.join(names)} of other columns"
