"""What one stage did in one epoch, seen again: rows in, state before and after, rows out, beside what was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import pyarrow as pa

from configs.settings import Settings
from pipelines.runtime.debugging.comparison import STATE, Difference, difference, differing_groups
from pipelines.runtime.debugging.recording import of_input
from pipelines.runtime.debugging.replay import EpochReplay, replaying
from pipelines.runtime.debugging.stopping import Debugger, of_key, stopping
from pipelines.runtime.definition import LATE, MAIN, Pipeline, Stage
from pipelines.runtime.execution.executor import staged_table
from pipelines.runtime.inspection.view import View, parsed
from state_ops.arrow import frames
from state_ops.arrow.types import type_named
from state_ops.backends.base import Backend
from state_ops.checkpoints.checkpoint import OUTPUT, Ack, StagedFile, StateFile, stats_of
from state_ops.counts import counted
from state_ops.errors import ConfigurationError, WeirError
from state_ops.schema.key_groups import key_groups, subtask_of
from state_ops.snapshots.stage_upload import read_by_next

Key = Sequence[Any]
SHOWN_KEYS, SHOWN_GROUPS = 1_000, 16
"""Of how many keys state is read where none is named."""


@dataclass(frozen=True)
class Played:
    """An epoch of one stage, played again.

    Attributes:
        epoch: Its id; `parent`: of the checkpoint that it was begun on.
        key: By key column, the value that was asked for; None: no key was.
        subtasks: Those that were played.
        slices: By source, what the epoch read, as its checkpoint records it.
        inputs: By input of the stage, the rows that it got, with the columns `_input`, `_file` and `_row` (where a
            source can say them).
        before, after: State before and after, as `weir state get` shows it.
        recorded: State after the epoch as its checkpoint has it.
        outputs: By output, the rows that the stage handed out.
        published: By output, the rows that the epoch staged for its sink then.
        differences: What is otherwise than it was; none: it is the same.
        code_then, code_now: Fingerprints of the stage's code; None: the checkpoint does not say.
        seconds: By phase, what took how long; `fetched`: bytes of state that were fetched for it.
        notes: What is to be known of this, in words.
    """

    pipeline: str
    stage: str
    epoch: int
    parent: int | None
    key: dict[str, Any] | None
    subtasks: tuple[int, ...]
    slices: dict[str, Any]
    inputs: dict[str, pl.DataFrame]
    before: pl.DataFrame
    after: pl.DataFrame
    recorded: pl.DataFrame
    outputs: dict[str, pl.DataFrame]
    published: dict[str, pl.DataFrame]
    differences: tuple[Difference, ...]
    code_then: str | None
    code_now: str
    seconds: dict[str, float]
    fetched: int
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> pl.DataFrame:
        """The rows of all inputs."""
        return stacked([frame for frame in self.inputs.values() if frame.width])

    @property
    def out(self) -> pl.DataFrame:
        """The rows of the main output."""
        return self.outputs.get(MAIN, pl.DataFrame())

    @property
    def is_same(self) -> bool:
        """Whether it is what was recorded."""
        return not self.differences

    @property
    def code_changed(self) -> bool | None:
        """Whether the stage's code is another one than the epoch ran; None: that is not recorded."""
        return None if self.code_then is None else self.code_then != self.code_now

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready but for values of rows, which are Python's."""
        return {
            "pipeline": self.pipeline,
            "stage": self.stage,
            "epoch": self.epoch,
            "parent": self.parent,
            "key": self.key,
            "subtasks": list(self.subtasks),
            "slices": self.slices,
            "rows": self.rows.to_dicts(),
            "before": self.before.to_dicts(),
            "after": self.after.to_dicts(),
            "recorded": self.recorded.to_dicts(),
            "outputs": {name: frame.to_dicts() for name, frame in self.outputs.items()},
            "published": {name: frame.to_dicts() for name, frame in self.published.items()},
            "differences": [difference.to_dict() for difference in self.differences],
            "code": {"then": self.code_then, "now": self.code_now, "changed": self.code_changed},
            "seconds": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
            "bytes_fetched": self.fetched,
            "notes": list(self.notes),
        }


def debug(
    pipeline: Pipeline,
    settings: Settings,
    epoch: int,
    *,
    stage: str | None = None,
    key: Key | None = None,
    subtask: int | None = None,
    stop: Debugger | None = None,
) -> Played:
    """Play one stage's part of an epoch again, and compare it with what the epoch made.

    Args:
        stage: Its uid; by default the pipeline's only stage, or the only one with a key of so many columns.
        key: A value for each key column, as text or as what it is; its subtask is played.
        subtask: The subtask instead. With neither all are played.
        stop: Makes a debugger, which stops in the stage's function where this gets the key.

    Raises:
        WeirError: The epoch or its input is not there any more, or the stage fails over it as it did.
    """
    if key is not None and subtask is not None:
        raise ConfigurationError("A key and a subtask are given.", next="Give one of them: a key has its subtask.")
    chosen = _chosen(pipeline, stage, key)
    with replaying(pipeline, settings, epoch, "weir debug") as replay:
        columns = None if key is None else key_of(replay, chosen, key)
        subtasks = subtasks_of(replay, columns, subtask)
        if stop is not None:
            replay.executor.wrap = {chosen.uid: stopping(chosen, columns, stop)}
        return played(replay, chosen, columns, subtasks)


def _chosen(pipeline: Pipeline, uid: str | None, key: Key | None) -> Stage:
    if uid is not None:
        return pipeline.stage(uid)
    fitting = [stage for stage in pipeline.stages if key is None or len(stage.key) == len(key)]
    if len(fitting) == 1:
        return fitting[0]
    raise ConfigurationError(
        f"{pipeline.title} has {counted(len(pipeline.stages), 'stage')}, of which {len(fitting)} may be meant.",
        next=f"Name one with --stage: {', '.join(stage.uid for stage in fitting or pipeline.stages)}.",
    )


def key_of(replay: EpochReplay, stage: Stage, key: Key) -> list[pa.Array]:
    """A key as arrays of one value, in the types that the checkpoint records. Raises ConfigurationError."""
    recorded = stats_of(replay.checkpoint, stage.uid).keys
    if not stage.key or not recorded:
        raise ConfigurationError(
            f"{stage.uid} has no key" + (" yet: nothing has come for it." if stage.key else ", so its rows have none."),
            next="Say --subtask, or neither.",
        )
    keys = pa.schema([(name, type_named(kind)) for name, kind in recorded])
    return parsed(keys, key, stage.uid)


def subtasks_of(replay: EpochReplay, key: Sequence[pa.Array] | None, subtask: int | None) -> tuple[int, ...]:
    """The subtasks that have a key, or the one that is named, or all."""
    if key is not None:
        group = int(key_groups(key, replay.pipeline.max_parallelism)[0])
        return (int(subtask_of(group, replay.parallelism, replay.pipeline.max_parallelism)),)
    if subtask is not None and not 0 <= subtask < replay.parallelism:
        raise ConfigurationError(
            f"There is no subtask {subtask}: the epoch had {counted(replay.parallelism, 'subtask')}.",
            next="They are numbered from 0.",
        )
    return tuple(range(replay.parallelism)) if subtask is None else (subtask,)


def played(replay: EpochReplay, stage: Stage, key: Sequence[pa.Array] | None, subtasks: tuple[int, ...]) -> Played:
    """Play some subtasks of a stage, and look at what they did."""
    acks = replay.play(stage, subtasks)
    with replay.timed("compare"):
        looking = _Looking(replay, stage, key, subtasks)
        inputs = looking.inputs()
        outputs, replayed, published = looking.outputs(acks)
        states = looking.states(inputs)
    compared = [difference(name, rows, replayed[name]) for name, rows in published.items()]
    compared.append(states.difference)
    checkpoint = replay.checkpoint
    return Played(
        pipeline=replay.pipeline.title,
        stage=stage.uid,
        epoch=int(checkpoint.id),
        parent=None if checkpoint.parent_id is None else int(checkpoint.parent_id),
        key=None if key is None else {name: of[0].as_py() for name, of in zip(stage.key, key, strict=True)},
        subtasks=subtasks,
        slices=checkpoint.slice,
        inputs=inputs,
        before=states.before,
        after=states.after,
        recorded=states.recorded,
        outputs=outputs,
        published=published,
        differences=tuple(entry for entry in compared if entry is not None),
        code_then=stats_of(checkpoint, stage.uid).code,
        code_now=replay.context.code_of(stage),
        seconds=dict(replay.seconds),
        fetched=replay.fetched,
        notes=tuple(looking.notes),
    )


@dataclass
class _States:
    """State at some keys."""

    before: pl.DataFrame = field(default_factory=pl.DataFrame)
    after: pl.DataFrame = field(default_factory=pl.DataFrame)
    recorded: pl.DataFrame = field(default_factory=pl.DataFrame)
    difference: Difference | None = None


@dataclass
class _Looking:
    """Looks at what the subtasks of a stage did."""

    replay: EpochReplay
    stage: Stage
    key: Sequence[pa.Array] | None
    subtasks: tuple[int, ...]
    notes: list[str] = field(default_factory=list)

    def inputs(self) -> dict[str, pl.DataFrame]:
        """By input, the rows that they got."""
        return rows_by_input(self.stage, [self.replay.rows(self.stage, subtask) for subtask in self.subtasks], self.key)

    def outputs(
        self, acks: Mapping[int, Ack]
    ) -> tuple[dict[str, pl.DataFrame], dict[str, pl.DataFrame], dict[str, pl.DataFrame]]:
        """By output, the rows that they handed out; and for sinks, what is staged now, and was then."""
        fixed = self.replay.context.shapes.get(self.stage.uid)
        schemas = dict(fixed.outputs) if fixed is not None else {}
        outputs: dict[str, pl.DataFrame] = {}
        for name in (*self.stage.returned, LATE):
            tables = [self._staged(file) for ack in acks.values() for file in read_by_next(ack, name)]
            if name in schemas:
                outputs[name] = self._of_key([schemas[name].empty_table(), *tables], name)
        if outputs.get(LATE) is not None and not outputs[LATE].height and self.stage.late is None:
            del outputs[LATE]
        replayed, published = dict[str, pl.DataFrame](), dict[str, pl.DataFrame]()
        files = [
            file
            for file in self.replay.files(self.replay.checkpoint)
            if file.kind == OUTPUT and file.operator == self.stage.uid and file.subtask in self.subtasks and file.new
        ]
        for name, sink in self.stage.sinks_by_output:
            if name not in outputs:
                continue
            try:
                tables = [self._staged(file) for file in files if file.sink == sink.name]
            except WeirError as error:
                self.notes.append(f"What the epoch published to {sink.name} is not there any more: {error.what}")
                continue
            empty = schemas[name].empty_table()
            published[name] = self._of_key([empty, *(_fitting(table, empty.schema) for table in tables)], name)
            replayed[name] = outputs[name]
        return outputs, replayed, published

    def _staged(self, file: StagedFile | StateFile) -> pa.Table:
        storage = self.replay.storage
        return frames.canonical(staged_table(storage, file))

    def _of_key(self, tables: Sequence[pa.Table], output: str) -> pl.DataFrame:
        table = pa.concat_tables(tables, promote_options="permissive")
        if self.key is not None:
            if set(self.stage.key) <= set(table.column_names):
                table = of_key(table, self.stage.key, self.key)
            elif table.num_rows:
                note = f"Rows of {output} do not have the key's columns, so those of the whole subtask are shown."
                self.notes += [note] if note not in self.notes else []
        return frames.from_arrow(table)

    # -- state

    def states(self, inputs: Mapping[str, pl.DataFrame]) -> _States:
        """State before and after, and as it was recorded."""
        replay, stage = self.replay, self.stage
        views = replay.view_before(stage), replay.view_after(stage), replay.view_recorded(stage)
        if not stage.has_state:
            return _States()
        parts: list[list[pa.Table]] = [[], [], []]
        touched = _keys(stage, inputs)
        differing = 0
        for subtask in self.subtasks:
            with (
                replay.before(stage, subtask) as before,
                replay.after(stage, subtask) as after,
                replay.recorded(stage, subtask) as recorded,
            ):
                backends = before, after, recorded
                groups, among = self._groups(touched, subtask), touched
                if self.key is None:
                    other = differing_groups(after, recorded, replay.groups(subtask))
                    differing += len(other)
                    groups, among = (other, None) if other else (groups, touched)
                for of, view, backend in zip(parts, views, backends, strict=True):
                    of += self._rows(view, backend, groups[:SHOWN_GROUPS], among)
        was, now, then = (_frame(of, view) for of, view in zip(parts, views, strict=True))
        state = _States(was, now, then, difference(STATE, then, now))
        if self.key is None:
            self._said(state, differing, touched)
        return state

    def _said(self, state: _States, differing: int, touched: pl.DataFrame | None) -> None:
        if differing and state.difference is not None:
            state.before, state.after, state.recorded = (
                _only(frame, state.difference, self.stage.key) for frame in (state.before, state.after, state.recorded)
            )
        if differing > SHOWN_GROUPS:
            self.notes.append(f"State differs in {differing} key groups, of which {SHOWN_GROUPS} were looked into.")
        elif not differing and touched is not None and touched.height > SHOWN_KEYS:
            self.notes.append(f"State is shown of some of {touched.height:,} keys; name one to see it.")

    def _groups(self, touched: pl.DataFrame | None, subtask: int) -> list[int]:
        """The key groups to look into."""
        most = self.replay.pipeline.max_parallelism
        if self.key is not None:
            return [int(key_groups(self.key, most)[0])]
        if touched is None or not touched.height:
            return []
        columns = frames.arrow(touched.head(SHOWN_KEYS)).columns
        groups = {int(group) for group in key_groups(columns, most)}
        return sorted(groups & set(self.replay.groups(subtask)))

    def _rows(
        self, view: View | None, backend: Backend | None, groups: Sequence[int], touched: pl.DataFrame | None
    ) -> list[pa.Table]:
        if view is None or backend is None:
            return []
        tables = [table for group in groups for table in view.rows(backend, range(group, group + 1))]
        if self.key is not None:
            return [of_key(table, view.keys.names, self.key) for table in tables]
        if touched is None:
            return tables
        names = view.keys.names
        among = touched.head(SHOWN_KEYS).rename(dict(zip(touched.columns, names, strict=True)))
        return [frames.arrow(frames.from_arrow(table).join(among, on=names, how="semi")) for table in tables]


def stacked(rows: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Rows of several inputs, one below the other, with all their columns."""
    return pl.concat(rows, how="diagonal_relaxed") if rows else pl.DataFrame()


def rows_by_input(
    stage: Stage, tables: Sequence[pa.Table | None], key: Sequence[pa.Array] | None
) -> dict[str, pl.DataFrame]:
    """By input, recorded rows of a stage, of one key if there is one."""
    there = [table if key is None else of_key(table, stage.key, key) for table in tables if table is not None]
    inputs = {}
    for side, lane in enumerate(stage.lanes):
        name = lane.input.uid if isinstance(lane.input, Stage) else lane.input.name
        rows = [of_input(stage, side, table) for table in there]
        name = name if name not in inputs else f"{name} ({side})"
        inputs[name] = (
            frames.from_arrow(pa.concat_tables(rows, promote_options="permissive")) if rows else pl.DataFrame()
        )
    return inputs


def _keys(stage: Stage, inputs: Mapping[str, pl.DataFrame]) -> pl.DataFrame | None:
    """The keys of rows; None: there are no rows."""
    keys = [
        frame.select(lane.key).rename(dict(zip(lane.key, stage.key, strict=True)))
        for lane, frame in zip(stage.lanes, inputs.values(), strict=True)
        if frame.height
    ]
    return pl.concat(keys).unique(maintain_order=True) if keys else None


def _frame(tables: Sequence[pa.Table], view: View | None) -> pl.DataFrame:
    given = [table for table in tables if table.num_rows] or ([] if view is None else [view.schema.empty_table()])
    return frames.from_arrow(pa.concat_tables(given, promote_options="permissive")) if given else pl.DataFrame()


def _only(frame: pl.DataFrame, differing: Difference, keys: Sequence[str]) -> pl.DataFrame:
    """The rows of keys whose state differs."""
    wanted = {tuple(row[name] for name in keys) for row in (*differing.recorded, *differing.replayed)}
    if not frame.height:
        return frame
    return frame.filter(pl.Series([row in wanted for row in frame.select(keys).iter_rows()], dtype=pl.Boolean))


def _fitting(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Rows that were staged with other columns than today's are left as they are."""
    if set(table.column_names) == set(schema.names):
        return table.select(schema.names)
    return table
