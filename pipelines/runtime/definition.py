"""What a pipeline is: frozen values that `pipelines.api` builds, checked when they are built, before anything runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, TypedDict

import pyarrow as pa

from pipelines.runtime.connectors.delta_sink import CHANGE_TYPE, DeltaSink, UpsertSink, refuse_replaced
from pipelines.runtime.connectors.lookups.lookup_table import Pinned
from pipelines.runtime.connectors.sink import Sink
from pipelines.runtime.connectors.source import FAIL
from pipelines.runtime.connectors.source import Source as Source
from state_ops.arrow.frames import canonical_schema
from state_ops.errors import PipelineError
from state_ops.ids import CheckpointId
from state_ops.keyed.ttl import Ttl
from state_ops.rows.aggregates import Agg
from state_ops.schema.key_groups import check_parallelism
from state_ops.schema.state_class import State
from state_ops.schema.state_schema import StateSchema
from state_ops.snapshots.stage_upload import MAIN as MAIN
from state_ops.snapshots.stage_upload import PARTS, REST
from state_ops.storage.branches import BRANCHES, Branch
from state_ops.storage.paths import data_directory

PARQUET = "parquet"
_NAME = re.compile(r"^[a-z][a-z0-9_]{0,62}$")


@dataclass(frozen=True, slots=True)
class FileSource(Source):
    """Files that arrive in a directory, taken in name order.

    Attributes:
        pattern: Directory and file name pattern, with {placeholders} from the configuration.
        format: What the files are: "parquet" or what is decoded: "csv", "json", "avro".
        options: How such files are written, as `connectors.formats` names it.
        schema: Their columns. None: those of the first file.
        partitions: By column that stands in the files' directories its type: "string", "int" or "date"; of others the
            first file's value says it.
        below_floor: What to do about new names that sort below the oldest remembered one: "fail" or "warn".
        on_bad: As of every source; of Parquet, a file that cannot be read is set aside as a whole.
    """

    pattern: str
    name: str = field(default="files", kw_only=True)
    below_floor: str = field(default=FAIL, kw_only=True)
    format: str = field(default=PARQUET, kw_only=True)
    options: tuple[tuple[str, Any], ...] = field(default=(), kw_only=True)
    schema: pa.Schema | None = field(default=None, kw_only=True)
    partitions: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)

    @property
    def decodes(self) -> bool:
        return self.format != PARQUET

    @property
    def declared_columns(self) -> pa.Schema | None:
        return None if self.schema is None else canonical_schema(self.schema)


HOLD, WARN, QUARANTINE = "hold", "warn", "quarantine"
LATE = "late"  # the output that rows are which came too late
POSITIONS = "positions"  # output: of each row that a tracked stage hands out, where it comes from
_TAKEN = (MAIN, LATE, QUARANTINE, REST, POSITIONS)  # names that no output of an author's may have
ROWS, STATE, FIGURES = "rows", "state", "figures"
EXACTLY_ONCE, AT_LEAST_ONCE, AT_MOST_ONCE = "exactly_once", "at_least_once", "at_most_once"
_DECLINED = {  # what would be amiss if a gate declined an epoch
    AT_LEAST_ONCE: "that is delivered before",
    AT_MOST_ONCE: "whose rows are then lost, since none is read again",
}
MAX_PARALLELISM = 128  # key groups, unless a pipeline says how many
ROW = "_weir_row"  # where a row of a source comes from: its file's number in the slice << 40 | its number in the file
_POLICIES, _LOOKED_AT = (HOLD, WARN, QUARANTINE), (ROWS, STATE, FIGURES)
_SHARE = 0.1
_WITH_CHANGES = re.compile(rf"\s*(\*(?!.*{CHANGE_TYPE}).*|(.*\s)?`?{CHANGE_TYPE}`?\s*)", re.IGNORECASE | re.DOTALL)
"""Which of a select's columns keep what became of a row: "*", "* EXCEPT (...)", the column, or one of its name."""
_EXPECTATION = re.compile(r"Expect[A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Gate:
    """One Great Expectations expectation on what one epoch makes of a stage.

    Attributes:
        expectation: The name of its class.
        arguments: Its arguments by name.
        on_failure: "hold": the epoch is declined. "warn": it goes on, and says so. "quarantine": it is replayed without
            the rows of the source that fail.
        of: "rows": those that the stage hands out. "state": a sample of what would be committed. "figures": one row
            with the numbers that the checkpoint records of the stage.
        quarantine_at_most: The share of the source's rows that may be set aside.
    """

    expectation: str
    arguments: tuple[tuple[str, Any], ...]
    on_failure: str = HOLD
    of: str = ROWS
    quarantine_at_most: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.expectation, str) or not _EXPECTATION.fullmatch(self.expectation):
            raise PipelineError(
                f"{self.expectation!r} is no expectation of Great Expectations.",
                next='Give a class name such as "ExpectColumnValuesToNotBeNull".',
            )
        for name, value, choices in (("on_failure", self.on_failure, _POLICIES), ("of", self.of, _LOOKED_AT)):
            if value not in choices:
                raise PipelineError(
                    f"{name}={value!r} is nothing that a gate can do.",
                    where=f"gate {self.title}",
                    next=f"Say one of: {', '.join(choices)}.",
                )
        where, most = f"gate {self.title}", self.quarantine_at_most
        if self.on_failure == QUARANTINE and self.of != ROWS:
            raise PipelineError(
                f"Only rows can be set aside, not {self.of}.", where=where, next=f'Say on_failure="{HOLD}" or "{WARN}".'
            )
        if most is not None and (self.on_failure != QUARANTINE or not 0 < most <= 1):
            raise PipelineError(
                f"quarantine_at_most={most!r} is no share of the rows that a gate may set aside.",
                where=where,
                next=f'Say a number above 0 and up to 1, with on_failure="{QUARANTINE}".',
            )

    @property
    def share(self) -> float:
        """Of a slice's rows, how many a quarantining gate may set aside at most."""
        return _SHARE if self.quarantine_at_most is None else self.quarantine_at_most

    @property
    def title(self) -> str:
        return f"{self.expectation}({', '.join(f'{key}={value!r}' for key, value in self.arguments)})"


@dataclass(frozen=True, slots=True)
class Expected:
    """What must hold when a checkpoint is restored.

    Attributes:
        of: Of a stage's state, or of a table.
        name: The stage's uid, or the table's name.
        gate: What holds.
    """

    of: Literal["state", "table"]
    name: str
    gate: Gate


@dataclass(frozen=True, slots=True)
class Epoch:
    """What a stage's function may know about the epoch it works for. It is the same again when the epoch is replayed.

    Attributes:
        id: The checkpoint's id.
        now: Processing time, fixed by the coordinator. It never decreases.
        watermark: Event time before this epoch, by which lateness is judged; None before the first. One beyond Python's
            years is `datetime.min` or `datetime.max`, in UTC.
        subtask: Which of the stage's subtasks calls the function.
        parallelism: How many there are.
    """

    id: CheckpointId
    now: datetime
    watermark: datetime | None
    subtask: int
    parallelism: int


@dataclass(frozen=True, slots=True)
class Window:
    """Windows of one size, which tumble if `every` is their size, and hop if it is less.

    Attributes:
        on: The timestamp column. None: all rows of an epoch are of its processing time.
        size: In microseconds, like all times here.
        every: Between the starts of two windows.
        offset: By which the starts are shifted from 1970-01-01 UTC.
        lateness: How far behind the newest event time rows may come.
        aggregates: By output column.
        late: The sink that gets late rows.
    """

    on: str | None
    size: int
    every: int
    offset: int
    lateness: int
    aggregates: tuple[tuple[str, Agg], ...]
    late: Sink | None


@dataclass(frozen=True, slots=True)
class SessionWindow:
    """Sessions: rows of a key that are closer than `gap`, in microseconds. All else is like in `Window`."""

    on: str | None
    gap: int
    lateness: int
    aggregates: tuple[tuple[str, Agg], ...]
    late: Sink | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "aggregates", tuple((name, agg.mergeable) for name, agg in self.aggregates))


@dataclass(frozen=True, slots=True)
class Deduplication:
    """The first row of each key.

    Attributes:
        ttl: Microseconds after which a key is forgotten. None: never.
        on: The column whose event time the ttl goes by. None: by processing time.
        late: The table that gets rows that are too old to tell.
    """

    ttl: int | None
    on: str | None
    late: Sink | None


@dataclass(frozen=True, slots=True)
class Aggregation:
    """Running aggregates per key, by output column; first and last by their `order_by`.

    Attributes:
        changes: What is handed out says by `_change_type` what became of a key's row.
    """

    aggregates: tuple[tuple[str, Agg], ...]
    changes: bool = False


INNER, LEFT, RIGHT, FULL, SEMI, ANTI = "inner", "left", "right", "full", "semi", "anti"
JOINS = (INNER, LEFT, RIGHT, FULL, SEMI, ANTI)
LATE_TIME = "event_time"  # of a late row of either side


@dataclass(frozen=True, slots=True)
class Join:
    """Rows of two inputs with one key, whose event times lie near each other where `lower` and `upper` are given.

    Attributes:
        how: One of `JOINS`.
        lower: How much later than the left row's time the right row's is at least, in microseconds; negative: earlier.
            None: times do not matter.
        upper: How much later at most.
        ttl: Without them, after how many microseconds of processing time a row is forgotten. None: never.
        times: The column of the event time on either side; None where times do not matter.
        lateness: How far behind the newest event time rows may come, in microseconds.
        suffix: Of the right side's columns whose names the left side has too.
        late: The sink that gets late rows of either side.
    """

    how: str
    lower: int | None
    upper: int | None
    ttl: int | None
    times: tuple[str, str] | None
    lateness: int
    suffix: str
    late: Sink | None = None

    @property
    def behind(self) -> int:
        """How far behind the watermark a row may be that is handed out, in microseconds."""
        return 0 if self.lower is None or self.upper is None else max(self.upper, -self.lower, 0)

    def times_in(self, output: str) -> tuple[str, ...]:
        """The columns of an output in which each row has an event time, the best first; none: there is no such column.

        A row that found no partner has nulls for the other side.
        """
        if output == LATE:
            return (LATE_TIME,)
        if self.times is None or self.how == FULL:
            return ()
        left, right = self.times
        return (right + self.suffix, right) if self.how == RIGHT else (left,)


@dataclass(frozen=True, slots=True)
class AsOf(Join):
    """Each row of the left side with the newest one of the right side that is not later than it.

    Attributes:
        tolerance: How much older it may be, in microseconds. None: as old as it is.
        wait: A row waits until the watermark says that no other one can come for it.
    """

    tolerance: int | None = None
    wait: bool = True


@dataclass(frozen=True, slots=True)
class TopN:
    """The first rows of each key, by some columns.

    Attributes:
        by: The columns, and whether the largest value comes first.
        n: How many rows.
        ties: Rows that are equal to the n-th in `by` are among them.
        rank: The column that is handed out with each row's rank, from 1. None: ranks are not handed out.
        until: The column with the event time at which the ranks of a key are final. None: they never are.
        ttl: Without it, microseconds of processing time after which a key of which no row has come is forgotten. None:
            never.
        lateness: How far behind the newest event time rows may come, in microseconds.
        late: The table that gets rows whose ranks are final already.
    """

    by: tuple[tuple[str, bool], ...]
    n: int
    ties: bool
    rank: str | None
    until: str | None
    ttl: int | None
    lateness: int
    late: Sink | None

    @property
    def on(self) -> str | None:
        return self.until


@dataclass(frozen=True, slots=True)
class Lookup:
    """Each row with the rows of a table that have its key, as of a version that the plan of its epoch has.

    Attributes:
        table: A Delta table's directory or URI, or one of a file that ends with .parquet, with {placeholders} from the
            configuration.
        on: The key columns: of each the row's name and the table's.
        how: `LEFT` or `INNER`.
        columns: The columns of the table that are handed out. None: all that it has when it is first looked at.
        suffix: Of the table's columns whose names the rows have too.
        on_lost: What to do about a version that is gone: "fail", or "newest".
        pinned: The table as of the version of the epoch at hand; None outside of epochs.
    """

    table: str
    on: tuple[tuple[str, str], ...]
    how: str
    columns: tuple[str, ...] | None
    suffix: str
    on_lost: str
    pinned: Pinned | None = field(default=None, compare=False)

    @property
    def keys(self) -> tuple[str, ...]:
        """The key columns of rows."""
        return tuple(name for name, _ in self.on)

    @property
    def table_keys(self) -> tuple[str, ...]:
        """The key columns of the table."""
        return tuple(name for _, name in self.on)


@dataclass(frozen=True)
class Stage:
    """One operator of a pipeline.

    Exactly one of `function` (with `state`), `window`, `aggregation`, `deduplication`, `join`, `top_n` and `lookup`
    says what it does. A stage without a key is stateless: it has a `function` or a `lookup`, or it hands on what its
    where and columns leave of its input, or of several.

    Attributes:
        uid: The stable name by which its state is found.
        key: The key columns; none: it is stateless, and rows stay where they are read.
        columns: Of a stateless stage, the columns that it makes of its input's, in Spark's SQL; none: all as they are.
        input: What it reads; of a stage with several inputs, the first of them.
        sides: Of a stage with several inputs: each of them as a stage that reads it alone, with the stage's uid, the
            input's own key columns, where and transform. None for a stage with one.
        on_timer: Called when a timer of a function's state fires.
        ttl: When a function's state is forgotten.
        per_key: Both functions are called once per key.
        accepts_changes: The function looks at the column `_change_type` of its rows.
        declared: By output, the columns that functions per key hand out, if they are declared.
        outputs: The names of what its function hands out beside its main output, each with its sink, if it has one.
        from_output: Which output of the stage before is its input; the main one of most.
    """

    uid: str
    input: Source | Stage
    key: tuple[str, ...]
    function: Callable[..., Any] | None = None
    state: type[State] | None = None
    window: Window | SessionWindow | None = None
    aggregation: Aggregation | None = None
    deduplication: Deduplication | None = None
    join: Join | None = None
    top_n: TopN | None = None
    lookup: Lookup | None = None
    sides: tuple[Stage, ...] = ()
    order_by: tuple[str, ...] = ()
    where: str | None = None
    transform: Callable[[Any], Any] | None = None
    columns: tuple[str, ...] = ()
    null_keys: str = "fail"
    per_key: bool = False
    declared: tuple[tuple[str, pa.Schema], ...] = ()
    sink: Sink | None = None
    outputs: tuple[tuple[str, Sink | None], ...] = ()
    gates: tuple[Gate, ...] = ()
    description: str = ""
    on_timer: Callable[..., Any] | None = None
    ttl: Ttl | None = None
    accepts_changes: bool = False
    from_output: str = MAIN

    def __post_init__(self) -> None:
        _check_name(self.uid, "stage")
        for name, value in reading(self.input).items() if isinstance(self.input, Output) else ():
            object.__setattr__(self, name, value)
        if self.from_output != MAIN:
            self._check_from_output()
        if self.outputs:
            self._check_outputs()
        if not self.key:
            self._check_stateless()
        if len(set(self.key)) < len(self.key):
            raise PipelineError(
                f"The key of {self.uid} names a column twice: {', '.join(self.key)}.",
                where=f"stage {self.uid}",
                next="Name each once.",
            )
        for sink in self.sinks:
            if not isinstance(sink, Sink):
                raise PipelineError(
                    f"{sink!r} is no sink that {self.uid} could write to.",
                    where=f"stage {self.uid}",
                    next='Say e.g. sink=delta.append("table"); an aggregate cannot be named like an argument.',
                )
            self._check_newest(sink)
        if self.sink is not None and self.hands_out_changes:
            refuse_replaced(self.sink, f"stage {self.uid}")
        if self.null_keys not in ("fail", "drop"):
            raise PipelineError(
                f"null_keys={self.null_keys!r} is no policy.", where=f"stage {self.uid}", next='Say "fail" or "drop".'
            )
        if self.state is not None:
            StateSchema.of(self.state)
        if self.quarantines:
            self._check_quarantine()
        for lane in self.lanes:
            # Of a transform's rows, their columns tell.
            if lane.reads_changes and lane.transform is None:
                self.check_changes(lane.input)

    def check_changes(self, input: Source | Stage) -> None:
        """Whether it can work on rows that are changes. PipelineError if it cannot.

        Args:
            input: Where they come from.
        """
        why: str | None = "what it made of a row cannot be taken back"
        if self.function is not None:
            why = None if self.accepts_changes else "its function may not look at that column"
        elif self.aggregation is not None:
            why = next((why for name, agg in self.aggregation.aggregates if (why := agg.irrevocable(name))), None)
        elif not self.key and self.lookup is None:  # it hands them on
            said = self.hands_out_changes or CHANGE_TYPE in " ".join([*self.columns, self.where or ""])
            why = None if said else "its columns leave that one out"
        if why is None:
            return
        remedy = "accepts_changes=True says that it does. Or leave" if self.function is not None else "Leave"
        raise PipelineError(
            f"{self.uid} cannot read {input.name if isinstance(input, Source) else input.uid}, whose rows are changes: "
            f"{CHANGE_TYPE} says which of them take others back, and {why}.",
            where=f"stage {self.uid}",
            next=f"{remedy} {CHANGE_TYPE} out in transform=, with the rows that are no more. The reference of operators"
            " lists what takes changes.",
        )

    def _check_outputs(self) -> None:
        """Whether what it hands out beside its main output has names that nothing else has."""
        where = f"stage {self.uid}"
        if self.function is None:
            raise PipelineError(
                f"{self.uid} has no function that could hand out {self.outputs[0][0]!r}.",
                where=where,
                next="Only a stage with a function has several outputs.",
            )
        for name, _ in self.outputs:
            _check_name(name, "output")
            if name in _TAKEN or name.endswith(PARTS):
                raise PipelineError(
                    f"An output of {self.uid} cannot be named {name!r}, which has a meaning of its own.",
                    where=where,
                    next='Rename it; of its main output, "main", say the sink by sink=.',
                )

    def _check_from_output(self) -> None:
        """Whether the stage before has the output that this one reads."""
        if not isinstance(self.input, Stage) or self.from_output not in self.input.readable:
            before = self.input.uid if isinstance(self.input, Stage) else self.input.name
            raise PipelineError(
                f"{self.uid} reads the output {self.from_output!r} of {before}, which has none of that name.",
                where=f"stage {self.uid}",
                next=f"Give it {before}, or one of its outputs: input={before}.output(...).",
            )

    def _check_stateless(self) -> None:
        """Whether nothing is asked of a stage without a key that only one with a key has."""
        keyed = {
            "an operator with state": self.window or self.aggregation or self.deduplication or self.join or self.top_n,
            "state=": self.state,
            "order_by=": self.order_by,
            "on_timer=": self.on_timer,
            "ttl=": self.ttl,
            "per_key=True": self.per_key,
            "a gate on its state": [gate for gate in self.gates if gate.of == STATE],
        }
        asked = next((what for what, given in keyed.items() if given), None)
        if asked is not None:
            raise PipelineError(
                f"The stage {self.uid} has no key, so it is stateless, and {asked} needs one.",
                where=f"stage {self.uid}",
                next='Say key="column" or key=["a", "b"], or leave that out.',
            )

    def _check_newest(self, sink: Sink) -> None:
        """Whether it can be told which of an epoch's rows of a key is the newest, of a table with keys, and of changes
        for any sink with a key."""
        key: tuple[str, ...] = getattr(sink, "key", ())
        by_key = isinstance(sink, UpsertSink) or (key and sink is self.sink and self.hands_out_changes)
        if not by_key or (self.key and set(self.key) <= set(key)) or getattr(sink, "order_by", ()):
            return
        of_stage = f"does not contain that of {self.uid} ({', '.join(self.key)})"
        raise PipelineError(
            f"The key of the {'table' if isinstance(sink, UpsertSink) else 'sink'} {sink.name} ({', '.join(key)}) "
            f"{of_stage if self.key else f'says nothing of {self.uid}, which has none'}, so rows of one key come"
            " from several subtasks, in no order.",
            where=f"stage {self.uid}",
            next='Say by what the newest is found: delta.upsert(..., order_by="column").'
            if isinstance(sink, UpsertSink)
            else "Let a stage by that key hand the changes out, or leave the key out if the sink takes them without.",
        )

    def _check_quarantine(self) -> None:
        """Whether the rows that the stage hands out can be traced to rows of its source."""
        why = None
        if self.sides:
            why = "hands out rows of several inputs"
        elif self.columns:
            why = "hands out columns of its own, among which none says from which row they come"
        elif isinstance(self.input, Stage):
            why = "reads another stage, whose rows are made already"
        elif self.window is not None or self.aggregation is not None:
            why = "hands out aggregates, which come from many rows"
        elif self.top_n is not None:
            why = "hands out rows of earlier epochs too"
        elif self.on_timer is not None:
            why = "hands out rows of its timers too, which come from none"
        if why is not None:
            raise PipelineError(
                f"A gate of {self.uid} is to quarantine rows of the source, but the stage {why}.",
                where=f"stage {self.uid}",
                next="Put the gate on the stage that reads the source, or let it hold or warn.",
            )

    def pinned(self, pinned: Pinned) -> Stage:
        """The same stage, with its lookup's table as of a version."""
        assert self.lookup is not None, "the stage has a table"
        return replace(self, lookup=replace(self.lookup, pinned=pinned))

    @property
    def lanes(self) -> tuple[Stage, ...]:
        """The stage as one that reads a single input, once for each input."""
        return self.sides or (self,)

    @property
    def inputs(self) -> tuple[Source | Stage, ...]:
        """What it reads."""
        return tuple(lane.input for lane in self.lanes)

    def reading(self, stages: Mapping[str, Stage]) -> Stage:
        """The same stage with other stages, by uid, in the places of those that it reads."""

        def read(lane: Stage) -> Stage:
            return replace(lane, input=stages[lane.input.uid]) if isinstance(lane.input, Stage) else lane

        whole = read(self)
        return replace(whole, sides=tuple(map(read, self.sides))) if self.sides else whole

    @property
    def reads_source(self) -> bool:
        """Whether a source is among its inputs."""
        return any(isinstance(input, Source) for input in self.inputs)

    @property
    def outputs_before(self) -> tuple[tuple[Stage, str], ...]:
        """The outputs of stages among its inputs, each once."""
        outputs: list[tuple[Stage, str]] = []
        for lane in self.lanes:
            if isinstance(lane.input, Stage) and (lane.input, lane.from_output) not in outputs:
                outputs.append((lane.input, lane.from_output))
        return tuple(outputs)

    @property
    def stages_before(self) -> tuple[Stage, ...]:
        """The stages among its inputs, each once."""
        stages: list[Stage] = []
        for input in self.inputs:
            if isinstance(input, Stage) and input not in stages:  # gates of a stage may have no hash
                stages.append(input)
        return tuple(stages)

    @property
    def hands_out_changes(self) -> bool:
        """Whether its rows say by `_change_type` what became of a row, as far as the definition tells. Of the rows of a
        function, their columns tell."""
        if self.aggregation is not None:
            return self.aggregation.changes
        if self.top_n is not None:
            return self.top_n.until is None
        if self.function is None and not self.key:
            is_kept = not self.columns or any(map(_WITH_CHANGES.fullmatch, self.columns))
            return is_kept and any(lane.reads_changes for lane in self.lanes)
        return self._declares_changes(MAIN)

    @property
    def reads_changes(self) -> bool:
        """Whether the rows of its input, if that is one, are changes, as far as the definition tells."""
        if isinstance(self.input, Stage) and self.from_output != MAIN:
            return self.input._declares_changes(self.from_output)
        return self.input.hands_out_changes

    def _declares_changes(self, output: str) -> bool:
        return any(name == output and CHANGE_TYPE in columns.names for name, columns in self.declared)

    @property
    def has_state(self) -> bool:
        """Whether it remembers anything from row to row."""
        return bool(self.key) and self.lookup is None

    @property
    def sql_named(self) -> str:
        """What its where and its columns are called, for people."""
        return "SQL" if self.columns else "where"

    @property
    def sql_written(self) -> str:
        """Its where and its columns, for people."""
        return ", ".join(
            [*(f"{column!r}" for column in self.columns), *([f"where={self.where!r}"] if self.where else [])]
        )

    @property
    def lateness(self) -> int:
        """How far its watermark stays behind the newest event time, in microseconds."""
        operator = self.window or self.join or self.top_n
        return operator.lateness if operator is not None else 0

    @property
    def closes(self) -> bool:
        """Whether its state is of windows, or of ranks, that close: by the moment at which each does."""
        return self.window is not None or (self.top_n is not None and self.top_n.until is not None)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        return tuple(sink for _, sink in self.sinks_by_output)

    @property
    def sinks_by_output(self) -> tuple[tuple[str, Sink], ...]:
        """The outputs that go to a sink, each with its own."""
        aside = ((output, sink) for output, _, sink in self.tables_aside)
        named = ((MAIN, self.sink), *self.outputs, (LATE, self.late), *aside)
        return tuple((name, sink) for name, sink in named if sink is not None)

    def sink_of(self, output: str) -> Sink | None:
        """Where an output goes; None: nowhere but to the stages that read it."""
        return dict(self.sinks_by_output).get(output)

    @property
    def returned(self) -> tuple[str, ...]:
        """The names of what its function may hand out."""
        return (MAIN, *(name for name, _ in self.outputs))

    @property
    def readable(self) -> tuple[str, ...]:
        """The names of the outputs that other stages may read."""
        return self.returned if self.late is None else (*self.returned, LATE)

    def output(self, name: str) -> Output:
        """One of its outputs, to be read by another stage instead of its main one.

        Args:
            name: As `outputs=` of the stage names it; "late" for its late rows, if `late=` says where they go; "main".

        Raises:
            PipelineError: It has no such output.
        """
        if name not in self.readable:
            advice = "; say where late rows go, late=..., and they can be read too" if name == LATE else ""
            raise PipelineError(
                f"The stage {self.uid} has no output {name!r}.",
                where=f"stage {self.uid}",
                next=f"Its outputs are: {', '.join(self.readable)}{advice}.",
            )
        return Output(self, name)

    @property
    def quarantines(self) -> bool:
        """Whether a gate may set rows of its source aside."""
        return any(gate.on_failure == QUARANTINE for gate in self.gates)

    @property
    def takes_bad_rows(self) -> bool:
        """Whether rows of its source that cannot be decoded are set aside."""
        return isinstance(self.input, Source) and self.input.on_bad == QUARANTINE and self.input.decodes

    @property
    def quarantine(self) -> DeltaSink | None:
        """Where rows of its source go that a gate has set aside, or that could not be decoded."""
        takes = self.takes_bad_rows and not self.sides
        return DeltaSink(name=f"{self.uid}_{QUARANTINE}") if self.quarantines or takes else None

    @property
    def tables_aside(self) -> tuple[tuple[str, Stage, DeltaSink], ...]:
        """The outputs that are rows of its sources which are set aside, with the stage as one that reads that source
        alone, and the table. Of several inputs, each source has a table of its own."""
        if not self.sides:
            return () if self.quarantine is None else ((QUARANTINE, self, self.quarantine),)
        lanes = {lane.input.name: lane for lane in self.sides if isinstance(lane.input, Source) and lane.takes_bad_rows}
        return tuple(
            (f"{QUARANTINE}_{name}", lane, DeltaSink(name=f"{self.uid}_{name}_{QUARANTINE}"))
            for name, lane in lanes.items()
        )

    @property
    def late(self) -> Sink | None:
        """Where rows go that came too late."""
        operator = self.window or self.deduplication or self.top_n or self.join
        return operator.late if operator else None

    @property
    def reads(self) -> frozenset[str] | None:
        """The columns that it looks at of its source's rows. None: all, as its function or one of its sinks may."""
        operator = self.aggregation or self.window
        if operator is None or self.late is not None or not isinstance(self.input, Source):
            return None
        columns = {
            *self.key,
            *self.order_by,
            *(name for _, agg in operator.aggregates for name in agg.names),
            CHANGE_TYPE,
        }
        return frozenset(columns | {column for column in (self.on, self.input.event_time) if column is not None})

    @property
    def by_clock(self) -> bool:
        """Whether its windows go by processing time, which is its time in all that says event time elsewhere."""
        return self.window is not None and self.window.on is None

    def times_in(self, output: str) -> tuple[str | None, ...]:
        """Columns of an output that may have its rows' event times, the best first."""
        if self.join is not None and self.join.times is not None:
            return self.join.times_in(output)
        return ("window_start", self.on, *(source.event_time for source in sources_of(self)))

    @property
    def on(self) -> str | None:
        """The column whose event time an operator goes by."""
        operator = self.window or self.deduplication or self.top_n
        return operator.on if operator else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A stage that was made from a function still is that function for who calls it."""
        assert self.function is not None, f"the stage {self.uid} is not a function"
        return self.function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Output:
    """One of several outputs of a stage, as another stage's input; `Stage.output` makes it."""

    stage: Stage
    name: str


Input = Source | Stage | Output
"""What a stage may be given to read."""


class Reading(TypedDict):
    """What a stage keeps of an input that it is given."""

    input: Source | Stage
    from_output: str


def reading(given: Input) -> Reading:
    """An input as a stage keeps it, for `Stage(..., **reading(source))`."""
    if isinstance(given, Output):
        return {"input": given.stage, "from_output": given.name}
    return {"input": given, "from_output": MAIN}


@dataclass(frozen=True)
class Pipeline:
    """Stages in topological order.

    Attributes:
        max_parallelism: The number of key groups, fixed for the pipeline's life.
        retired: Uids of stages, names of sources, and fields of states (stage.field) that were removed for good: their
            state, positions and values are dropped.
        added: Names of sources that are new, and whose whole input is meant for stages that have state already.
        on_restore: What must hold of a sample of the state, and of the newest rows of tables, before a restored
            checkpoint is used.
        branch: Which branch of it this is. None: the pipeline itself. Set by who runs a branch, not by its author.
        delivery: How often sinks get the rows of an epoch that fails: "exactly_once", "at_least_once" or
            "at_most_once". State has each row exactly once in the first two, and at most once in the third.
    """

    name: str
    stages: tuple[Stage, ...]
    max_parallelism: int = MAX_PARALLELISM
    description: str = ""
    owners: tuple[str, ...] = ()
    retired: tuple[str, ...] = ()
    on_restore: tuple[Expected, ...] = ()
    branch: Branch | None = None
    added: tuple[str, ...] = ()
    delivery: str = EXACTLY_ONCE

    def __post_init__(self) -> None:
        _check_name(self.name, "pipeline")
        check_parallelism(1, self.max_parallelism)
        object.__setattr__(self, "stages", _topological(self.name, tuple(self.stages)))
        _refuse_doubles("stage", [stage.uid for stage in self.stages], self.name)
        _refuse_doubles("sink", [sink.name for stage in self.stages for sink in stage.sinks], self.name)
        names: dict[str, Source] = {}
        for source in self.sources:
            source.check()
            if names.setdefault(source.name, source) != source:
                raise PipelineError(
                    f"Two different sources of {self.name} are named {source.name!r}.", next="Give one another name=..."
                )
        for stage in self.stages:
            for sink in stage.sinks:
                _check_name(sink.name, "sink")
        self._check_delivery()
        tables = [sink.name for sink in self.sinks if isinstance(sink, DeltaSink)]
        names_by_kind = {"state": [stage.uid for stage in self.stages], "table": tables}
        for expected in self.on_restore:
            if expected.gate.on_failure == QUARANTINE:
                raise PipelineError(
                    f"What is restored stays whole: {expected.gate.title} cannot set rows aside.",
                    where=f"on_restore, {expected.of} {expected.name!r}",
                    next=f'Say on_failure="{HOLD}" or "{WARN}".',
                )
            if expected.gate.of != ROWS:
                raise PipelineError(
                    f"on_restore says itself what it looks at, and {expected.gate.title} says of={expected.gate.of!r}.",
                    where=f"on_restore, {expected.of} {expected.name!r}",
                    next="Leave of= out.",
                )
            if expected.name not in names_by_kind[expected.of]:
                raise PipelineError(
                    f"on_restore expects something of the {expected.of} {expected.name!r}, which {self.name} has not.",
                    next=f"It has: {', '.join(names_by_kind[expected.of]) or 'none'}.",
                )

    def _check_delivery(self) -> None:
        """Whether sources, sinks and gates allow for what is to be delivered."""
        where = f"pipeline {self.name}"
        if self.delivery == EXACTLY_ONCE:
            why = [
                f"the source {source.name} ({source.kind}) cannot be read again after a crash"
                for source in self.sources
                if not source.replayable
            ]
            why += [
                f"the sink {sink.name} ({sink.kind}) has no transactions, so rows come twice after a crash"
                for sink in self.sinks
                if not sink.exactly_once
            ]
            if why:
                raise PipelineError(
                    f"{self.name} cannot deliver exactly once: {'; '.join(why)}.",
                    where=where,
                    next=f'Say Pipeline(..., delivery="{AT_LEAST_ONCE}" or "{AT_MOST_ONCE}"), or take another source or'
                    " sink.",
                )
            return
        if self.delivery not in _DECLINED:
            raise PipelineError(
                f"delivery={self.delivery!r} is nothing that {self.name} can promise.",
                where=where,
                next=f"Say one of: {', '.join((EXACTLY_ONCE, *_DECLINED))}.",
            )
        for stage in self.stages if self.delivery == AT_MOST_ONCE else ():
            lost = next((source.name for source in sources_of(stage) if source.hands_out_changes), None)
            changes = stage.input.hands_out_changes and stage.transform is None
            if stage.aggregation is not None and changes and lost is not None:
                raise PipelineError(
                    f"{stage.uid} takes rows of {lost} back, and of an epoch that is lost it would have none to take "
                    "back.",
                    where=where,
                    next=f'Say delivery="{EXACTLY_ONCE}" or "{AT_LEAST_ONCE}".',
                )
        for stage in self.stages:
            for gate in stage.gates:
                if gate.on_failure != WARN:
                    raise PipelineError(
                        f"A gate of {stage.uid} may decline an epoch {_DECLINED[self.delivery]}: {gate.title}.",
                        where=where,
                        next=f'Let it warn, on_failure="{WARN}", or deliver exactly once.',
                    )

    @property
    def early(self) -> bool:
        """Whether sinks get rows before their epoch is committed."""
        return self.delivery == AT_LEAST_ONCE

    @property
    def at_most_once(self) -> bool:
        """Whether an epoch's positions are committed before it begins, and sinks get its rows once or never. A
        branch can repeat everything, since it reads again and all its sinks are tables: there each row comes once."""
        return self.delivery == AT_MOST_ONCE and self.branch is None

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(
            dict.fromkeys(input for stage in self.stages for input in stage.inputs if isinstance(input, Source))
        )

    @property
    def timed(self) -> frozenset[str]:
        """The names of the sources that have an event time."""
        return frozenset(source.name for source in self.sources if source.event_time is not None)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        return tuple(sink for stage in self.stages for sink in stage.sinks)

    @property
    def app_id(self) -> str:
        """Transaction app id of the registry; sinks append their name. Stable for ever."""
        return f"weir/{self.name}/{self.branch.id if self.branch else 'main'}"

    @property
    def title(self) -> str:
        """As commands and people name it: flights, or flights@fix for a branch."""
        return f"{self.name}@{self.branch.name}" if self.branch else self.name

    @property
    def directory(self) -> str:
        """Of its storage, below the root of all."""
        return f"{self.name}/{BRANCHES}/{self.branch.id}" if self.branch else self.name

    def event_time_of(self, table: str, schema: pa.Schema) -> str | None:
        """The column by which a table's rows belong to a day or an hour; None if it has none.

        Args:
            schema: Of the table.
        """
        timed = [field.name for field in schema if pa.types.is_timestamp(field.type) or pa.types.is_date(field.type)]
        for stage in self.stages:
            for output, sink in stage.sinks_by_output:
                if sink.name == table:
                    declared = sink.event_time if isinstance(sink, DeltaSink) else None
                    wanted = [declared, *([] if is_clocked(stage) else stage.times_in(output))]
                    return next((name for name in wanted if name in timed), None)
        return None

    @property
    def lateness(self) -> int:
        """The longest of its stages' lateness, in microseconds: so far watermarks may be behind what has been read."""
        return max(stage.lateness for stage in self.stages)

    def is_table(self, sink: Sink) -> bool:
        """Whether a sink is a Delta table below the pipeline's `tables/`. On a branch each is one, of what it would be
        given: nothing outside of the branch is written."""
        return self.branch is not None or isinstance(sink, DeltaSink)

    def staging(self, sink: Sink) -> str:
        """The directory in which tasks stage a sink's rows: of its table, where publishing them is a commit of its log
        alone."""
        if not self.appends(sink):
            return f"outputs/{sink.name}"
        return data_directory(sink.name, self.app_id, sink.name in self.elsewhere)

    @property
    def elsewhere(self) -> dict[str, str]:
        """By name, where tables lie that are not in the pipeline's storage. A branch has none."""
        tables = [sink for sink in self.sinks if isinstance(sink, DeltaSink)]
        return {table.name: table.at for table in tables if table.at is not None and self.branch is None}

    def appends(self, sink: Sink) -> bool:
        """Whether a sink is a table of the rows as they are handed out. On a branch each is one, but that a table whose
        partitions are replaced is one there too."""
        return self.is_table(sink) and (self.branch is not None or not isinstance(sink, UpsertSink))

    def sink(self, name: str) -> Sink | None:
        """The sink of that name; None: the code has none, or no more."""
        return next((sink for sink in self.sinks if sink.name == name), None)

    def outputs_read(self, stage: Stage) -> frozenset[str]:
        """The names of a stage's outputs that others read."""
        return frozenset(name for other in self.stages for before, name in other.outputs_before if before == stage)

    def must_finish(self, stage: Stage) -> bool:
        """Whether a stage applies all rows of an epoch in that epoch, however long it takes: one that reads a source,
        whose slices are not kept for later, or several inputs, whose rows of an epoch belong together; and all before
        the latter."""
        return stage.reads_source or bool(stage.sides) or self.is_before_several(stage)

    def is_before_several(self, stage: Stage) -> bool:
        """Whether its rows reach a stage with several inputs, by way of other stages or none."""
        return any(bool(other.sides) or self.is_before_several(other) for other in self.stages if stage in other.inputs)

    def stage(self, uid: str) -> Stage:
        for stage in self.stages:
            if stage.uid == uid:
                return stage
        raise PipelineError(
            f"The pipeline {self.name} has no stage {uid!r}.",
            next=f"Its stages are: {', '.join(stage.uid for stage in self.stages)}.",
        )


def sources_of(input: Input) -> tuple[Source, ...]:
    """The sources at the far end of an input, each once."""
    if isinstance(input, Source):
        return (input,)
    if isinstance(input, Output):
        return sources_of(input.stage)
    return tuple(dict.fromkeys(source for before in input.inputs for source in sources_of(before)))


def is_timed(input: Input) -> bool:
    """Whether rows of an input come with a watermark: all of its sources have an event time, or windows by processing
    time lie between."""
    if isinstance(input, Source):
        return input.event_time is not None
    stage = input.stage if isinstance(input, Output) else input
    return stage.by_clock or all(map(is_timed, stage.inputs))


def is_clocked(input: Input) -> bool:
    """Whether the time of an input's rows is processing time: windows by it lie before, or are it."""
    if isinstance(input, Source):
        return False
    stage = input.stage if isinstance(input, Output) else input
    return stage.by_clock or any(map(is_clocked, stage.inputs))


def _topological(pipeline: str, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    if not stages:
        raise PipelineError(f"The pipeline {pipeline} has no stages.", next="List at least one.")
    placed: list[Stage] = []
    waiting = list(stages)
    while waiting:
        ready = [stage for stage in waiting if all(before in placed for before in stage.stages_before)]
        if not ready:
            lost = waiting[0]
            missing = next(before.uid for before in lost.stages_before if before not in placed)
            raise PipelineError(
                f"The stage {lost.uid} reads from {missing}, which is not in the pipeline {pipeline}.",
                next=f"List {missing} among its stages.",
            )
        placed += ready
        waiting = [stage for stage in waiting if stage not in ready]
    return tuple(placed)


def _check_name(name: str, kind: str) -> None:
    if not isinstance(name, str) or not _NAME.match(name):
        raise PipelineError(
            f"{name!r} cannot name a {kind}.",
            next="Use small letters, digits and underscores, a letter first, at most 63: it becomes part of paths.",
        )


def _refuse_doubles(kind: str, names: list[str], pipeline: str) -> None:
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise PipelineError(
            f"The pipeline {pipeline} has two {kind}s named {doubles[0]!r}.", next="Rename one of them."
        )
