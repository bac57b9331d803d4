"""The origin of a row of a table: epoch, slice, input rows, state and code, and how much of that is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import pyarrow as pa

from state_ops.arrow.types import type_named
from state_ops.checkpoints.registry import Registry
from state_ops.counts import counted
from state_ops.errors import ConfigurationError, WeirError
from state_ops.facts import FLAT, Facts
from state_ops.moments import from_micros
from state_ops.records.checkpoint import EPOCH, Checkpoint, stats_of
from state_ops.storage.read_only import ReadOnlyStorage
from state_ops.storage.temp_dirs import scratch
from weir.definition import LATE, ROW, Pipeline, Stage
from weir.inspection.comparison.rows import alike
from weir.inspection.state_reader import chain
from weir.inspection.view import parsed
from weir.ownership.pipeline_storage import open_storage
from weir.replay.phases import Saying, silent
from weir.replay.recording import INPUT
from weir.replay.replay import DIRECTORY, Playing
from weir.replay.stage_replay import Played, debug
from weir.replay.table_row import Origin, TableRow, origin, row_of, writer_of
from weir.replay.tracing import Bounds, Same, Trace, trace
from weir.settings.configuration import Settings

_START, _END = "window_start", "window_end"
_EPOCHS_LISTED = 12
_ON_BAD = "on_bad"  # what has set a row aside that could not be decoded


class Certainty(StrEnum):
    """The certainty of a statement.

    `known`: a record says it, or the replay has made the very row. `inferred`: it follows from names or values.
    `unknown`: it cannot be told any more.
    """

    KNOWN = "known"
    INFERRED = "inferred"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Statement(Facts):
    """One thing about a row, in words."""

    certainty: Certainty
    what: str


@dataclass(frozen=True, slots=True)
class Explained(Facts):
    """The origin of a row.

    Attributes:
        row: The row, and the table's file that has it.
        stage, output: What handed it out.
        origin: The epoch, and what says so.
        statements: All that is known, inferred and unknown, in words.
        played: The epoch at the row's key, played again; None: it cannot be.
        trace: The input rows of the epochs that made the key's state; None: they cannot be told.
    """

    pipeline: str
    table: str
    row: Annotated[TableRow, FLAT]
    stage: str
    output: str
    origin: Annotated[Origin, FLAT]
    statements: tuple[Statement, ...]
    played: Played | None
    trace: Trace | None


def explain(
    pipeline: Pipeline,
    settings: Settings,
    table: str,
    condition: str,
    *,
    spark: bool = False,
    say: Saying = silent,
) -> Explained:
    """Explain the first row of a table that satisfies a condition.

    Args:
        condition: As a stage's `where`, of columns of the table.
        spark: Whether Spark may evaluate what Python does not: a transform, and some conditions.
        say: Is told what is done now.

    Raises:
        ConfigurationError: There is no such table or row.
    """
    stage, output, sink = writer_of(pipeline, table)
    if not pipeline.capabilities(sink).has_versions:
        raise ConfigurationError(
            f"{table} is no table, so its rows cannot be looked for.",
            next="Say which epoch, and the key: weir debug PIPELINE --epoch N --key K.",
        )
    plain, _ = open_storage(pipeline, settings)
    storage = ReadOnlyStorage.of(plain)
    registry = Registry(storage, pipeline.app_id)
    with scratch(settings.work_dir / DIRECTORY, "explain-") as directory:
        row = row_of(storage, table, condition, directory)
    head = registry.head()
    line = chain(registry, head) if head is not None else []
    whence = origin(storage, registry, line, stage, sink, row)
    playing = Playing(pipeline, settings, spark, say, "weir explain")
    facts = _Facts(playing, registry, line, stage, output, row, whence)
    facts.of_row(table)
    seen, traced = facts.played()
    return Explained(pipeline.title, table, row, stage.uid, output, whence, tuple(facts.statements), seen, traced)


class _Facts:
    """Gathers what is to be said of a row."""

    def __init__(
        self,
        playing: Playing,
        registry: Registry,
        line: list[Checkpoint],
        stage: Stage,
        output: str,
        row: TableRow,
        whence: Origin,
    ) -> None:
        self._playing, self._registry = playing, registry
        self._stage, self._output, self._row, self._whence = stage, output, row, whence
        self._checkpoint = next((row for row in line if row.id == whence.epoch), None)
        parent = self._checkpoint.parent_id if self._checkpoint is not None else None
        self._before = next((row for row in line if row.id == parent), None)
        self.statements: list[Statement] = []

    def _say(self, certainty: Certainty, what: str) -> None:
        self.statements.append(Statement(certainty, what))

    def of_row(self, table: str) -> None:
        """Explain a row by what records say."""
        row, whence = self._row, self._whence
        self._say(
            Certainty.KNOWN,
            f"the row is number {row.number} of {row.file}, in version {row.table_version} of {table}"
            + (f"; {counted(row.matches, 'row')} fit, this is the first" if row.matches > 1 else ""),
        )
        if whence.epoch is None:
            self._say(Certainty.UNKNOWN, f"which epoch handed it out: {whence.how}")
            return
        self._say(
            Certainty.KNOWN if whence.recorded else Certainty.INFERRED,
            f"epoch {whence.epoch} handed it out, subtask {whence.subtask} of {self._stage.uid}: {whence.how}",
        )
        versions = [
            publication.delta_version
            for publication in self._registry.publications()
            if publication.checkpoint_id == whence.epoch and publication.sink == table
        ]
        if versions:
            self._say(Certainty.KNOWN, f"version {versions[-1]} of the table published rows of epoch {whence.epoch}")
        if self._checkpoint is not None:
            at = self._checkpoint
            run = f", by the run {at.run_id}" if at.run_id else ""
            self._say(Certainty.KNOWN, f"epoch {at.id} was completed at {at.completed_at:%Y-%m-%d %H:%M:%S} UTC{run}")
            code = stats_of(at, self._stage.uid).code
            if code is not None:
                self._say(Certainty.KNOWN, f"the stage's code was {code} then")

    def played(self) -> tuple[Played | None, Trace | None]:
        """Play the epoch at the row's key, and trace the rows that made the key's state, or a late row itself."""
        at, stage = self._checkpoint, self._stage
        if self._output in [output for output, _, _ in stage.tables_aside]:
            self._of_row_aside()
            return None, None
        if self._output == LATE:
            self._of_late_row()
        if at is None:
            if self._whence.epoch is not None:
                self._say(Certainty.UNKNOWN, f"what epoch {self._whence.epoch} read and did: it is not retained")
            return None, None
        if at.kind != EPOCH:
            whose = "; weir explain PIPELINE@BRANCH asks the branch" if at.kind == "promotion" else ""
            self._say(Certainty.UNKNOWN, f"what made it: checkpoint {at.id} is no epoch but a {at.kind}{whose}")
            return None, None
        key = self._key()
        try:
            subtask = self._whence.subtask if key is None else None
            seen = debug(self._playing, int(at.id), stage=stage.uid, key=key, subtask=subtask)
        except WeirError as error:
            self._say(Certainty.UNKNOWN, f"what epoch {at.id} did: {error.what}")
            seen = None
        if seen is not None:
            self._of_replay(seen)
        if key is None:
            return seen, None
        rows = Same(self._as_it_came()) if self._output == LATE else self._bounds()
        try:
            traced = trace(self._playing, stage, key, int(at.id), rows, seen)
        except WeirError as error:  # storage that may only be read takes no hold, say
            self._say(Certainty.UNKNOWN, f"which rows made the key's state: {error.what}")
            return seen, None
        self._of_trace(traced)
        return seen, traced

    def _of_row_aside(self) -> None:
        """Why nothing was made of a row."""
        values = self._row.values
        gate, place, why = values["_weir_gate"], f"{values[ROW]} of {values['_weir_file']}", values["_weir_reason"]
        if gate == _ON_BAD:
            what = f"no stage has seen it: line or offset {place} could not be decoded: {why}"
        else:
            what = f"{gate} has set it aside, row {place}: {why}; the epoch was played without it"
        self._say(Certainty.KNOWN, what)

    def _of_late_row(self) -> None:
        """Why it was late: all rows of an epoch are judged by the watermark before it."""
        watermark = self._before.watermarks.get(self._stage.uid) if self._before is not None else None
        if watermark is not None:
            self._say(
                Certainty.KNOWN,
                f"it came late: {self._stage.uid} had the watermark {from_micros(watermark)} before epoch"
                f" {self._whence.epoch}",
            )

    def _as_it_came(self) -> dict[str, Any]:
        """Return a late row in the columns of the input that it came from, of which a join has two."""
        values, stage = self._row.values, self._stage
        came = stage.operator.as_it_came(stage, values)
        if came is None:
            return values
        side, row = came
        return {**row, INPUT: stage.inputs[side].name}

    def _key(self) -> list[Any] | None:
        """Return the row's key, by its columns."""
        stage, values = self._stage, self._row.values
        if not stage.key:
            return None
        if not set(stage.key) <= values.keys():
            missing = ", ".join(name for name in stage.key if name not in values)
            self._say(Certainty.UNKNOWN, f"the row's key: it has no column {missing}, so all of its subtask is shown")
            return None
        key = [values[name] for name in stage.key]
        if (why := self._no_key(key)) is not None:
            self._say(Certainty.UNKNOWN, f"the row's key: {why}, so all of its subtask is shown")
            return None
        self._say(
            Certainty.KNOWN if stage.function is None else Certainty.INFERRED,
            f"the key is {', '.join(f'{name}={values[name]}' for name in stage.key)}, by the columns of the row",
        )
        return key

    def _no_key(self, key: Sequence[Any]) -> str | None:
        """Why values of a row, which a function may have made, are no key of its stage; None: they may be one."""
        recorded = stats_of(self._checkpoint, self._stage.uid).keys
        if None in key:
            return "a null is no key"
        try:
            parsed(pa.schema([(name, type_named(kind)) for name, kind in recorded]), key, self._stage.uid)
        except ConfigurationError as error:
            return error.what
        return None

    def _bounds(self) -> Bounds | None:
        """Return the bounds in event time of the input rows that made the row, if it tells them."""
        span = self._stage.operator.span(self._row.values)
        return None if span is None else Bounds(*span)

    def _of_replay(self, seen: Played) -> None:
        if seen.code_changed:
            self._say(Certainty.KNOWN, f"the code is {seen.code_now} now: what follows was played by other code")
        is_among = self._among(seen)
        if is_among:
            self._say(Certainty.KNOWN, f"played again, epoch {seen.epoch} hands out this row")
        elif is_among is None:
            self._say(Certainty.UNKNOWN, "whether the epoch hands it out again: the table has other columns")
        else:
            self._say(
                Certainty.KNOWN, f"played again, epoch {seen.epoch} does not hand out this row: see what differs, below"
            )

    def _among(self, seen: Played) -> bool | None:
        """Return whether a row is among those that the replay hands out; None: it cannot be told."""
        rows = seen.outputs.get(self._output)
        same = None if rows is None else alike(rows, self._row.values)
        return None if same is None else bool(same.height)

    def _of_trace(self, traced: Trace) -> None:
        rows = sum(contribution.rows.height for contribution in traced.contributions)
        numbers = [str(contribution.epoch) for contribution in traced.contributions]
        listed = f"the epochs {', '.join(numbers)}"
        if len(numbers) > _EPOCHS_LISTED:
            listed = f"{len(numbers):,} epochs from {numbers[0]} to {numbers[-1]}"
        epochs = f"epoch {numbers[0]}" if len(numbers) == 1 else listed
        came = f"came in {epochs}" if numbers else "came in epochs that can be played again"
        within = " within the window" if self._bounds() is not None else ""
        within = " and all its values" if self._output == LATE else within
        of = "of both sides " if len(self._stage.inputs) == 2 else ""
        whole = "these are all" if traced.is_whole else "there may be more"
        is_known = traced.is_whole and self._stage.function is None
        self._say(
            Certainty.KNOWN if is_known else Certainty.INFERRED,
            f"{counted(rows, 'input row')} {of}with the key{within} {came}: {whole}",
        )
        for what in traced.unknown:
            self._say(Certainty.UNKNOWN, what)
