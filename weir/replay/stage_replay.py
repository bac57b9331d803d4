"""One stage's part of one epoch, seen again: rows in, state before and after, rows out, beside the recorded ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.arrow.types import type_named
from state_ops.counts import counted
from state_ops.errors import ConfigurationError, WeirError
from state_ops.facts import HIDDEN, Facts, Named, fact
from state_ops.records.acks import Ack
from state_ops.records.checkpoint import stats_of
from state_ops.records.snapshot_files import OUTPUT, StagedFile, StateFile
from state_ops.schema.key_groups import key_groups, subtask_of
from state_ops.snapshots.stage_upload import read_by_next
from state_ops.value_text import text_of
from weir.definition import LATE, MAIN, Pipeline, Stage
from weir.execution.executor import staged_table
from weir.inspection.comparison.rows import STATE, Difference, difference
from weir.inspection.view import parsed
from weir.replay.recording import of_input
from weir.replay.replay import EpochReplay, Playing
from weir.replay.states import states
from weir.replay.stopping import Debugger, of_key, stopping

Key = Sequence[Any]
SHOWN = 3
"""How many keys a sentence names."""


@dataclass(frozen=True, slots=True)
class Code(Facts):
    """The code of a stage then and now.

    Attributes:
        then: A fingerprint; None: the checkpoint does not say.
        changed: None: that is not recorded.
    """

    then: str | None
    now: str
    changed: bool | None


@dataclass(frozen=True)
class Played(Facts):
    """An epoch of one stage, played again.

    Attributes:
        epoch: Its id.
        parent: The checkpoint that it was begun on; None: it was the first.
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
        keyed_by: The stage's key columns.
        code_then, code_now: Fingerprints of the stage's code; None: the checkpoint does not say.
        seconds: By phase, what took how long.
        fetched: Bytes of state that were fetched for it.
        notes: What is to be known of this, in words.
    """

    pipeline: str
    stage: str
    epoch: int
    parent: int | None
    key: dict[str, Any] | None
    subtasks: tuple[int, ...]
    slices: dict[str, Any]
    inputs: Annotated[dict[str, pl.DataFrame], HIDDEN]
    before: pl.DataFrame
    after: pl.DataFrame
    recorded: pl.DataFrame
    outputs: dict[str, pl.DataFrame]
    published: dict[str, pl.DataFrame]
    differences: tuple[Difference, ...]
    code_then: Annotated[str | None, HIDDEN]
    code_now: Annotated[str, HIDDEN]
    seconds: dict[str, float]
    fetched: Annotated[int, Named("bytes_fetched")]
    keyed_by: Annotated[tuple[str, ...], HIDDEN] = ()
    notes: tuple[str, ...] = ()

    @property
    @fact
    def rows(self) -> pl.DataFrame:
        """The rows of all inputs."""
        return stacked([frame for frame in self.inputs.values() if frame.width])

    @property
    def out(self) -> pl.DataFrame:
        """The rows of the main output."""
        return self.outputs.get(MAIN, pl.DataFrame())

    @property
    def is_same(self) -> bool:
        """True if it is what was recorded."""
        return not self.differences

    @property
    def code_changed(self) -> bool | None:
        """True if the stage's code differs from the code that the epoch ran; None: that is not recorded."""
        return None if self.code_then is None else self.code_then != self.code_now

    @property
    @fact
    def code(self) -> Code:
        """The code of the stage then and now."""
        return Code(self.code_then, self.code_now, self.code_changed)

    @property
    @fact
    def verdict(self) -> str:
        """One sentence that says whether the replay made the same."""
        of = f"Epoch {self.epoch} of {self.pipeline}, stage {self.stage}"
        if self.key is not None:
            of += f", key {in_words(self.key)}"
        elif len(self.subtasks) == 1:
            of += f", subtask {self.subtasks[0]}"
        compared = [*(["state"] if self.keyed_by else []), *(f"rows of {name}" for name in self.published)]
        if self.is_same:
            return f"{of}, plays again to the same {' and '.join(compared) or 'rows'}."
        return f"{of}, does not play again to what it made: {'; '.join(map(self._differs, self.differences))}."

    def _differs(self, difference: Difference) -> str:
        if difference.of != STATE:
            then, now = len(difference.recorded), len(difference.replayed)
            return f"of the rows of {difference.of}, {then:,} then and {now:,} now are otherwise"
        rows = (*difference.recorded, *difference.replayed)
        keys = list(dict.fromkeys(in_words({name: row[name] for name in self.keyed_by}) for row in rows))
        more = f" and {len(keys) - SHOWN:,} more" if len(keys) > SHOWN else ""
        return f"the state of {counted(len(keys), 'key')} differs, {'; '.join(keys[:SHOWN])}{more}"


def in_words(key: Mapping[str, Any]) -> str:
    """Return a key for people: id=k3."""
    return ", ".join(f"{name}={value}" for name, value in key.items())


def debug(
    playing: Playing,
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
    chosen = _chosen(playing.pipeline, stage, key)
    with playing.replaying(epoch) as replay:
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
    """Return a key as arrays of one value, in the types that the checkpoint records. Raises ConfigurationError."""
    recorded = stats_of(replay.checkpoint, stage.uid).keys
    if not stage.key or not recorded:
        raise ConfigurationError(
            f"{stage.uid} has no key" + (" yet: nothing has come for it." if stage.key else ", so its rows have none."),
            next="Say --subtask, or neither.",
        )
    keys = pa.schema([(name, type_named(kind)) for name, kind in recorded])
    return parsed(keys, key, stage.uid)


def subtasks_of(replay: EpochReplay, key: Sequence[pa.Array] | None, subtask: int | None) -> tuple[int, ...]:
    """Return the subtasks that have a key, or the one that is named, or all."""
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
    with replay.phases.timed("compare"):
        looking = _Looking(replay, stage, key, subtasks)
        inputs = looking.inputs()
        outputs, replayed, published = looking.outputs(acks)
        seen = states(replay, stage, subtasks, inputs, key)
    compared = [difference(name, rows, replayed[name]) for name, rows in published.items()]
    compared.append(seen.difference)
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
        before=seen.before,
        after=seen.after,
        recorded=seen.recorded,
        outputs=outputs,
        published=published,
        differences=tuple(entry for entry in compared if entry is not None),
        code_then=stats_of(checkpoint, stage.uid).code,
        code_now=replay.context.code_of(stage),
        seconds={phase: round(took, 3) for phase, took in replay.phases.seconds.items()},
        fetched=replay.fetched,
        keyed_by=stage.key if stage.has_state else (),
        notes=(*looking.notes, *seen.notes),
    )


@dataclass
class _Looking:
    """Looks at what the subtasks of a stage did."""

    replay: EpochReplay
    stage: Stage
    key: Sequence[pa.Array] | None
    subtasks: tuple[int, ...]
    notes: list[str] = field(default_factory=list)

    def inputs(self) -> dict[str, pl.DataFrame]:
        """Return the rows that the subtasks got, by input."""
        return rows_by_input(self.stage, [self.replay.rows(self.stage, subtask) for subtask in self.subtasks], self.key)

    def outputs(
        self, acks: Mapping[int, Ack]
    ) -> tuple[dict[str, pl.DataFrame], dict[str, pl.DataFrame], dict[str, pl.DataFrame]]:
        """Return the rows that the subtasks handed out, by output; and for sinks, what is staged now, and was then."""
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
            then = [_fitting(table, schemas[name]) for table in tables]  # by other code perhaps, in other types
            published[name] = self._of_key(then or [schemas[name].empty_table()], name)
            replayed[name] = outputs[name]
        return outputs, replayed, published

    def _staged(self, file: StagedFile | StateFile) -> pa.Table:
        storage = self.replay.storage
        return frames.canonical(staged_table(storage, file))

    def _of_key(self, tables: Sequence[pa.Table], output: str) -> pl.DataFrame:
        table = pa.concat_tables(tables, promote_options="permissive")
        if self.key is not None:
            try:
                table = of_key(table, self.stage.key, self.key)
            except (KeyError, pa.ArrowInvalid, pa.ArrowNotImplementedError):
                note = (
                    f"Rows of {output} do not have the key's columns, or in other types, so those of the whole subtask"
                    " are shown."
                )
                self.notes += [note] if table.num_rows and note not in self.notes else []
        return frames.from_arrow(table)


def stacked(rows: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Return the rows of several inputs, one below the other, with all columns; as texts where types have nothing in
    common."""
    if not rows:
        return pl.DataFrame()
    try:
        return pl.concat(rows, how="diagonal_relaxed")
    except pl.exceptions.SchemaError:
        kinds: dict[str, set[pl.DataType]] = {}
        for frame in rows:
            for name, kind in frame.schema.items():
                kinds.setdefault(name, set()).add(kind)
        return pl.concat(
            [_with_texts(frame, [name for name in frame.columns if len(kinds[name]) > 1]) for frame in rows],
            how="diagonal_relaxed",
        )


def _with_texts(frame: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    texts = {name: [None if value is None else text_of(value) for value in frame[name].to_list()] for name in names}
    return frame.with_columns(pl.Series(name, values, pl.String) for name, values in texts.items())


def rows_by_input(
    stage: Stage, tables: Sequence[pa.Table | None], key: Sequence[pa.Array] | None
) -> dict[str, pl.DataFrame]:
    """Return the recorded rows of a stage by input, of one key if there is one."""
    there = [table if key is None else of_key(table, stage.key, key) for table in tables if table is not None]
    inputs = {}
    for side, input in enumerate(stage.inputs):
        rows = [of_input(stage, side, table) for table in there]
        name = input.name if input.name not in inputs else f"{input.name} ({side})"
        inputs[name] = (
            frames.from_arrow(pa.concat_tables(rows, promote_options="permissive")) if rows else pl.DataFrame()
        )
    return inputs


def _fitting(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Fit staged rows to today's columns. Rows that were staged with other columns are left as they are."""
    if set(table.column_names) == set(schema.names):
        return table.select(schema.names)
    return table
