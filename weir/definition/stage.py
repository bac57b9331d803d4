"""A stage: what it reads, what it does, what it hands out; checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from state_ops.errors import PipelineError
from state_ops.outputs import LATE, PARTS
from state_ops.outputs import MAIN as MAIN
from weir.connectors.delta.change_feed import CHANGE_TYPE, refuse_replaced
from weir.connectors.delta.sink import DeltaSink
from weir.connectors.sink import Sink
from weir.connectors.source import Source as Source
from weir.definition.column_lineage import has, keeps
from weir.definition.gates import STATE, Gate
from weir.definition.names import QUARANTINE, START, TAKEN, check_name
from weir.definition.operator import OF_INPUT, OperatorKind

if TYPE_CHECKING:
    from state_ops.keyed.ttl import Ttl
    from state_ops.schema.state_class import State
    from weir.connectors.lookups.lookup_table import Pinned


@dataclass(frozen=True)
class Stage:
    """An operator with its inputs and sinks.

    Attributes:
        uid: The stable name by which its state is found.
        key: The key columns; none: it is stateless, and rows stay where they are read.
        columns: The columns that its rows have, made of its input's in Spark's SQL; none: all as they are.
        input: What it reads; of a stage with several inputs, the first of them.
        sides: Of a stage with several inputs: each of them as a stage that reads it alone, with the stage's uid, the
            input's own key columns, where, columns and transform. None for a stage with one.
        operator: What it does with its rows.
        outputs: The names of what its function hands out beside its main output, each with its sink, if it has one.
        from_output: Which output of the stage before is its input; the main one of most.

    Example:
        >>> from weir import agg, delta, files, window
        >>> readings = files("{landing}/*.parquet", event_time="at")
        >>> late = delta.append("late")
        >>> hourly = window("hourly", readings, key="device", on="at", every="1h", mean=agg.mean("value"), late=late)
        >>> hourly.key, hourly.readable
        (('device',), ('main', 'late'))
    """

    uid: str
    input: Source | Stage
    key: tuple[str, ...]
    operator: OperatorKind = OF_INPUT
    sides: tuple[Stage, ...] = ()
    order_by: tuple[str, ...] = ()
    where: str | None = None
    transform: Callable[[Any], Any] | None = None
    columns: tuple[str, ...] = ()
    null_keys: str = "fail"
    sink: Sink | None = None
    outputs: tuple[tuple[str, Sink | None], ...] = ()
    gates: tuple[Gate, ...] = ()
    description: str = ""
    from_output: str = MAIN

    def __post_init__(self) -> None:
        check_name(self.uid, "stage")
        for name, value in reading(self.input).items() if isinstance(self.input, Output) else ():
            object.__setattr__(self, name, value)
        if self.from_output != MAIN:
            _check_from_output(self)
        if self.outputs:
            _check_outputs(self)
        if not self.key:
            _check_stateless(self)
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
            _check_newest(self, sink)
        if self.sink is not None and self.hands_out_changes:
            refuse_replaced(self.sink, f"stage {self.uid}")
        if self.null_keys not in ("fail", "drop"):
            raise PipelineError(
                f"null_keys={self.null_keys!r} is no policy.", where=f"stage {self.uid}", next='Say "fail" or "drop".'
            )
        if self.state is not None:
            from state_ops.schema.state_schema import StateSchema

            StateSchema.of(self.state)
        if self.quarantines:
            _check_quarantine(self)
        _check_columns(self)
        for lane in self.lanes:
            # Of a transform's rows, their columns tell.
            if lane.reads_changes and lane.transform is None:
                check_changes(self, lane.input)

    def pinned(self, pinned: Pinned) -> Stage:
        """Return this stage with the table beside its rows as of a version."""
        return replace(self, operator=self.operator.with_table(pinned))

    @property
    def function(self) -> Callable[..., Any] | None:
        return self.operator.function

    @property
    def on_timer(self) -> Callable[..., Any] | None:
        return self.operator.on_timer

    @property
    def state(self) -> type[State] | None:
        return self.operator.state

    @property
    def lifetime(self) -> Ttl | None:
        return self.operator.lifetime

    @property
    def lanes(self) -> tuple[Stage, ...]:
        """The stage as one that reads a single input, once for each input."""
        return self.sides or (self,)

    @property
    def inputs(self) -> tuple[Source | Stage, ...]:
        """The sources and stages that the stage reads."""
        return tuple(lane.input for lane in self.lanes)

    def reading(self, stages: Mapping[str, Stage]) -> Stage:
        """Return this stage with the stages that it reads replaced by others of the same uid."""

        def read(lane: Stage) -> Stage:
            return replace(lane, input=stages[lane.input.uid]) if isinstance(lane.input, Stage) else lane

        whole = read(self)
        return replace(whole, sides=tuple(map(read, self.sides))) if self.sides else whole

    @property
    def reads_source(self) -> bool:
        """True if one of its inputs is a source."""
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
        """True if the stage's rows say by `_change_type` what became of a row, as far as the definition tells. It does
        not tell this of a function's rows: their columns do."""
        return self.operator.hands_out_changes(self, MAIN)

    @property
    def reads_changes(self) -> bool:
        """True if the rows of the stage's input are changes, as far as the definition tells."""
        if isinstance(self.input, Stage) and self.from_output != MAIN:
            return self.input.operator.hands_out_changes(self.input, self.from_output)
        return self.input.hands_out_changes

    @property
    def has_state(self) -> bool:
        """True if the stage keeps anything from row to row."""
        return bool(self.key) and self.operator.has_state

    @property
    def sql_named(self) -> str:
        """The words by which people know the stage's `where` and columns."""
        return "SQL" if self.columns else "where"

    @property
    def sql_written(self) -> str:
        """Its where and its columns, for people."""
        written = [(*map(repr, lane.columns), lane.where and f"where={lane.where!r}") for lane in self.lanes]
        return ", ".join(sql for of_input in written for sql in of_input if sql)

    @property
    def lateness(self) -> int:
        """The microseconds that the stage's watermark stays behind the newest event time."""
        return self.operator.lateness

    @property
    def closes(self) -> bool:
        """True if the stage keeps windows or ranks, each of which closes at a moment of event time."""
        return self.operator.closes

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
        """Return the sink of an output, or None if the output goes to other stages alone or nowhere."""
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
        """Return one of the stage's outputs, for another stage to read instead of the main one.

        Args:
            name: A name in `outputs=` of the stage; "late" for late rows, if `late=` says where they go; "main".

        Raises:
            PipelineError: It has no such output.

        Example:
            >>> from weir import agg, delta, files, select, window
            >>> readings = files("{landing}/*.parquet", event_time="at")
            >>> late, mean = delta.append("late"), agg.mean("value")
            >>> hourly = window("hourly", readings, key="device", on="at", every="1h", mean=mean, late=late)
            >>> again = select("again", hourly.output("late"), "device", "value")
            >>> again.from_output
            'late'
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
        """True if a gate may set rows of the stage's source aside."""
        return any(gate.on_failure == QUARANTINE for gate in self.gates)

    @property
    def takes_bad_rows(self) -> bool:
        """True if rows of the stage's source that cannot be decoded or stored are set aside."""
        return isinstance(self.input, Source) and self.input.on_bad == QUARANTINE

    @property
    def quarantine(self) -> DeltaSink | None:
        """The table of the source's rows that a gate has set aside or that could not be decoded."""
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
        """The sink of the rows that come too late."""
        return self.operator.late

    @property
    def reads(self) -> frozenset[str] | None:
        """The columns that it looks at of its source's rows. None: all, as its function or one of its sinks may."""
        columns = self.operator.reads(self) if isinstance(self.input, Source) else None
        if columns is None or not isinstance(self.input, Source):
            return None
        return columns | {column for column in (CHANGE_TYPE, self.input.event_time) if column is not None}

    @property
    def by_clock(self) -> bool:
        """True if the stage's windows go by processing time, which all texts about its event time then mean."""
        return self.operator.by_clock

    def times_in(self, output: str) -> tuple[str | None, ...]:
        """Columns of an output that may have its rows' event times, the best first."""
        declared = self.operator.times_in(output)
        return (START, self.on, *(source.event_time for source in sources_of(self))) if declared is None else declared

    @property
    def on(self) -> str | None:
        """The column whose event time its operator goes by."""
        return self.operator.time_column

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that the stage was made from."""
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
    """The part of an input that a stage reads."""

    input: Source | Stage
    from_output: str


def reading(given: Input) -> Reading:
    """Return an input as a stage keeps it, for `Stage(..., **reading(source))`."""
    _check_input(given)
    if isinstance(given, Output):
        return {"input": given.stage, "from_output": given.name}
    return {"input": given, "from_output": MAIN}


def _check_input(given: object) -> None:
    if not isinstance(given, Source | Stage | Output):
        raise PipelineError(
            f"{given!r} is nothing that a stage can read.",
            next='Say a source, as files("{landing}/*.parquet"), a stage, or an output of one: other.output("alerts").',
        )


def input_name(stage: Stage) -> str:
    """Return the uid of the stage that a stage reads, or the name of its source."""
    return stage.input.uid if isinstance(stage.input, Stage) else stage.input.name


def keeps_event_time(stage: Stage) -> bool:
    """Return whether the rows that a stage sees still have the event time of its source, if it reads a source."""
    return not isinstance(stage.input, Source) or keeps(stage.columns, str(stage.input.event_time))


def sources_of(input: Input) -> tuple[Source, ...]:
    """Return the sources at the far end of an input, each once."""
    if isinstance(input, Source):
        return (input,)
    if isinstance(input, Output):
        return sources_of(input.stage)
    return tuple(dict.fromkeys(source for before in input.inputs for source in sources_of(before)))


def is_timed(input: Input) -> bool:
    """Return whether rows of an input come with a watermark.

    They do if all of its sources have an event time, or if windows by processing time lie between.
    """
    _check_input(input)
    if isinstance(input, Source):
        return input.event_time is not None
    stage = input.stage if isinstance(input, Output) else input
    return stage.by_clock or all(map(is_timed, stage.inputs))


def is_clocked(input: Input) -> bool:
    """Return whether the time of an input's rows is processing time, from windows by processing time.

    The input may be these windows, or come from them.
    """
    if isinstance(input, Source):
        return False
    stage = input.stage if isinstance(input, Output) else input
    return stage.by_clock or any(map(is_clocked, stage.inputs))


def keeps_changes(stage: Stage) -> bool:
    """Return whether a stage's columns keep the column that says what became of a row, if its input has that column."""
    return has(stage.columns, CHANGE_TYPE)


def check_changes(stage: Stage, input: Source | Stage) -> None:
    """Raise PipelineError if the stage cannot work on rows that are changes.

    Args:
        input: Where they come from.
    """
    are_kept = keeps_changes(stage)
    if not are_kept:
        is_seen = CHANGE_TYPE in " ".join([*stage.columns, stage.where or ""])
        why = None if is_seen else "its columns leave that one out"
    else:
        why = stage.operator.no_changes(stage, input)
    if why is None:
        return
    out = f"{CHANGE_TYPE} out, with the rows that are no more: by where= and select=, or in transform="
    if not are_kept:
        meant = f"\"{CHANGE_TYPE} IN ('insert', 'update_postimage')\""
        remedy = f"Keep {CHANGE_TYPE} among them, or say by where= which rows are meant, as {meant} does"
    elif stage.function is not None:
        remedy = f"accepts_changes=True says that it does. Or leave {out}"
    else:
        remedy = f"Leave {out}"
    raise PipelineError(
        f"{stage.uid} cannot read {input.name if isinstance(input, Source) else input.uid}, whose rows are changes: "
        f"{CHANGE_TYPE} says which of them take others back, and {why}.",
        where=f"stage {stage.uid}",
        next=f"{remedy}. The reference of operators lists what takes changes.",
    )


def _check_outputs(stage: Stage) -> None:
    """Raise PipelineError unless the stage may have its further outputs and their names are free."""
    where = f"stage {stage.uid}"
    if stage.function is None:
        raise PipelineError(
            f"{stage.uid} has no function that could hand out {stage.outputs[0][0]!r}.",
            where=where,
            next="Only a stage with a function has several outputs.",
        )
    for name, _ in stage.outputs:
        check_name(name, "output")
        if name in TAKEN or name.endswith(PARTS):
            raise PipelineError(
                f"An output of {stage.uid} cannot be named {name!r}, which has a meaning of its own.",
                where=where,
                next='Rename it; of its main output, "main", say the sink by sink=.',
            )


def _check_from_output(stage: Stage) -> None:
    """Raise PipelineError unless the stage before has the output that this one reads."""
    if not isinstance(stage.input, Stage) or stage.from_output not in stage.input.readable:
        before = input_name(stage)
        raise PipelineError(
            f"{stage.uid} reads the output {stage.from_output!r} of {before}, which has none of that name.",
            where=f"stage {stage.uid}",
            next=f"Give it {before}, or one of its outputs: input={before}.output(...).",
        )


def _check_stateless(stage: Stage) -> None:
    """Raise PipelineError if a stage without a key is given an option that needs a key."""
    keyed = {
        "an operator with state": stage.operator.needs_key,
        "state=": stage.state,
        "order_by=": stage.order_by,
        "on_timer=": stage.on_timer,
        "ttl=": stage.lifetime,
        "per_key=True": stage.operator.per_key,
        "a gate on its state": [gate for gate in stage.gates if gate.of == STATE],
    }
    asked = next((what for what, given in keyed.items() if given), None)
    if asked is not None:
        raise PipelineError(
            f"The stage {stage.uid} has no key, so it is stateless, and {asked} needs one.",
            where=f"stage {stage.uid}",
            next='Say key="column" or key=["a", "b"], or leave that out.',
        )


def _check_newest(stage: Stage, sink: Sink) -> None:
    """Raise PipelineError if an epoch's rows of one key have no order, so that none is known to be the newest.

    A table with keys needs that order. So does any sink with a key that is given changes.
    """
    key: tuple[str, ...] = getattr(sink, "key", ())
    keeps_newest = bool(sink.capabilities.newest_of)
    by_key = keeps_newest or (key and sink is stage.sink and stage.hands_out_changes)
    if not by_key or (stage.key and set(stage.key) <= set(key)) or getattr(sink, "order_by", ()):
        return
    of_stage = f"does not contain that of {stage.uid} ({', '.join(stage.key)})"
    raise PipelineError(
        f"The key of the {'table' if keeps_newest else 'sink'} {sink.name} ({', '.join(key)}) "
        f"{of_stage if stage.key else f'says nothing of {stage.uid}, which has none'}, so rows of one key come"
        " from several subtasks, in no order.",
        where=f"stage {stage.uid}",
        next='Say by what the newest is found: delta.upsert(..., order_by="column").'
        if keeps_newest
        else "Let a stage by that key hand the changes out, or leave the key out if the sink takes them without.",
    )


def _check_columns(stage: Stage) -> None:
    """Raise PipelineError unless it is clear what makes the columns that the stage's options name."""
    if stage.columns and stage.transform is not None:
        raise PipelineError(
            f"{stage.uid} has a transform, which makes columns of its own, and select={stage.columns!r}.",
            where=f"stage {stage.uid}",
            next="Say one of the two.",
        )


def sinks_shown(stage: Stage, known: Container[str | None]) -> tuple[Sink, ...]:
    """Return a stage's sinks without those tables of rows set aside that have never had a row.

    Args:
        known: The names of the sinks that have had rows, such as those that a checkpoint knows.
    """
    aside = {output for output, _, _ in stage.tables_aside}
    return tuple(sink for name, sink in stage.sinks_by_output if name not in aside or sink.name in known)


def _check_quarantine(stage: Stage) -> None:
    """Raise PipelineError unless the rows that the stage hands out can be traced to rows of its source."""
    why = None
    if stage.sides:
        why = "hands out rows of several inputs"
    elif stage.columns:
        why = "hands out columns of its own, among which none says from which row they come"
    elif isinstance(stage.input, Stage):
        why = "reads another stage, whose rows are made already"
    else:
        why = stage.operator.mixes_rows()
    if why is not None:
        raise PipelineError(
            f"A gate of {stage.uid} is to quarantine rows of the source, but the stage {why}.",
            where=f"stage {stage.uid}",
            next="Put the gate on the stage that reads the source, or let it hold or warn.",
        )
