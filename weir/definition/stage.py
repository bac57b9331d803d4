"""A stage: what it reads, what it does, what it hands out; checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from state_ops.errors import PipelineError
from state_ops.outputs import LATE, MAIN, PARTS
from weir.definition.change_feed import CHANGE_TYPE, refuse_replaced
from weir.definition.delta_sink import DeltaSink
from weir.definition.gates import STATE, Gate
from weir.definition.input import Input, Readable, sources_of
from weir.definition.names import QUARANTINE, START, TAKEN, check_name
from weir.definition.operator import OperatorKind
from weir.definition.sink import Sink
from weir.definition.source import Source

if TYPE_CHECKING:
    from state_ops.keyed.ttl import Ttl
    from state_ops.schema.state_class import State


@dataclass(frozen=True)
class Stage:
    """An operator with its inputs and sinks.

    Attributes:
        uid: The stable name by which its state is found.
        inputs: What it reads, with the SQL that makes its rows of each. One for most, several for a join or a union.
        operator: What it does with its rows.
        outputs: The names of what its function hands out beside its main output, each with its sink, if it has one.

    Example:
        >>> from weir import agg, delta, files, window
        >>> readings = files("{landing}/*.parquet", event_time="at")
        >>> late = delta.append("late")
        >>> hourly = window("hourly", readings, key="device", on="at", every="1h", mean=agg.mean("value"), late=late)
        >>> hourly.key, hourly.readable
        (('device',), ('main', 'late'))
    """

    uid: str
    inputs: tuple[Input, ...]
    operator: OperatorKind
    order_by: tuple[str, ...] = ()
    null_keys: str = "fail"
    sink: Sink | None = None
    outputs: tuple[tuple[str, Sink | None], ...] = ()
    gates: tuple[Gate, ...] = ()
    description: str = ""

    def __post_init__(self) -> None:
        check_name(self.uid, "stage")
        for input in self.inputs:
            _check_input(self, input)
        if self.outputs:
            _check_outputs(self)
        if not self.key:
            _check_stateless(self)
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
        for input in self.inputs:
            # Of a transform's rows, their columns tell.
            if input.reads_changes and input.transform is None:
                check_changes(self, input)

    def pinned(self, pinned: Any) -> Stage:
        """Return this stage with the table beside its rows as of a version, as `OperatorKind.with_table`."""
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
    def key(self) -> tuple[str, ...]:
        """The key columns, as the first input names them. None: it is stateless, and rows stay where they are read."""
        return self.inputs[0].key

    @property
    def is_of_several(self) -> bool:
        """True if it reads several inputs, whose rows reach its operator in one table (`operators.sides`)."""
        return len(self.inputs) > 1

    def reading(self, stages: Mapping[str, Stage]) -> Stage:
        """Return this stage with the stages that it reads replaced by others of the same uid."""
        inputs = (
            replace(input, origin=stages[input.name]) if isinstance(input.origin, Stage) else input
            for input in self.inputs
        )
        return replace(self, inputs=tuple(inputs))

    @property
    def reads_source(self) -> bool:
        """True if one of its inputs is a source."""
        return any(isinstance(input.origin, Source) for input in self.inputs)

    @property
    def outputs_before(self) -> tuple[tuple[Stage, str], ...]:
        """The outputs of stages among its inputs, each once."""
        outputs: list[tuple[Stage, str]] = []
        for input in self.inputs:
            if isinstance(input.origin, Stage) and (input.origin, input.output) not in outputs:
                outputs.append((input.origin, input.output))
        return tuple(outputs)

    @property
    def stages_before(self) -> tuple[Stage, ...]:
        """The stages among its inputs, each once."""
        stages: list[Stage] = []
        for stage, _ in self.outputs_before:
            if stage not in stages:  # gates of a stage may have no hash
                stages.append(stage)
        return tuple(stages)

    @property
    def hands_out_changes(self) -> bool:
        """True if the stage's rows say by `_change_type` what became of a row, as far as the definition tells. It does
        not tell this of a function's rows: their columns do."""
        return self.operator.hands_out_changes(self, MAIN)

    @property
    def has_state(self) -> bool:
        """True if the stage keeps anything from row to row."""
        return bool(self.key) and self.operator.has_state

    @property
    def sql_written(self) -> str:
        """Its where and its columns, for people."""
        return ", ".join(filter(None, (input.sql_written for input in self.inputs)))

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

    def output(self, name: str) -> Input:
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
            >>> again.inputs[0].output
            'late'
        """
        if name not in self.readable:
            advice = "; say where late rows go, late=..., and they can be read too" if name == LATE else ""
            raise PipelineError(
                f"The stage {self.uid} has no output {name!r}.",
                where=f"stage {self.uid}",
                next=f"Its outputs are: {', '.join(self.readable)}{advice}.",
            )
        return Input(self, name)

    @property
    def quarantines(self) -> bool:
        """True if a gate may set rows of the stage's source aside."""
        return any(gate.on_failure == QUARANTINE for gate in self.gates)

    @property
    def tables_aside(self) -> tuple[tuple[str, Input, DeltaSink], ...]:
        """The outputs that are rows of its sources which a gate has set aside or that could not be decoded, with the
        input and the table. Of several inputs, each source has a table of its own."""
        if not self.is_of_several:
            (input,) = self.inputs
            is_there = self.quarantines or input.takes_bad_rows
            return ((QUARANTINE, input, DeltaSink(name=f"{self.uid}_{QUARANTINE}")),) if is_there else ()
        inputs = {input.name: input for input in self.inputs if input.takes_bad_rows}
        return tuple(
            (f"{QUARANTINE}_{name}", input, DeltaSink(name=f"{self.uid}_{name}_{QUARANTINE}"))
            for name, input in inputs.items()
        )

    @property
    def late(self) -> Sink | None:
        """The sink of the rows that come too late."""
        return self.operator.late

    @property
    def reads(self) -> frozenset[str] | None:
        """The columns that it looks at of its source's rows. None: all, as its function or one of its sinks may."""
        if self.is_of_several or not self.reads_source:
            return None
        columns, event_time = self.operator.reads(self), self.inputs[0].event_time
        return None if columns is None else columns.union({CHANGE_TYPE}, {event_time} if event_time else ())

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


def origin_of(given: Readable) -> tuple[Source | Stage, str]:
    """Return the source or the stage that a stage is given to read, and the name of its output.

    Raises:
        PipelineError: It is neither, nor an output of a stage.
    """
    if isinstance(given, Source | Stage):
        return given, MAIN
    if isinstance(given, Input) and given == Input(given.origin, given.output):
        return given.origin, given.output
    raise PipelineError(
        f"{given!r} is nothing that a stage can read.",
        next='Say a source, as files("{landing}/*.parquet"), a stage, or an output of one: other.output("alerts").',
    )


def is_timed(given: Readable) -> bool:
    """Return whether rows of an input come with a watermark.

    They do if all of its sources have an event time, or if windows by processing time lie between.
    """
    if isinstance(given, Input):
        return is_timed(given.origin)
    origin, _ = origin_of(given)
    if isinstance(origin, Source):
        return origin.event_time is not None
    return origin.by_clock or all(map(is_timed, origin.inputs))


def check_changes(stage: Stage, input: Input) -> None:
    """Raise PipelineError if the stage cannot work on rows of an input that are changes."""
    if not input.keeps_changes:
        is_seen = CHANGE_TYPE in " ".join([*input.columns, input.where or ""])
        why = None if is_seen else "its columns leave that one out"
    else:
        why = stage.operator.no_changes(stage, input)
    if why is None:
        return
    out = f"{CHANGE_TYPE} out, with the rows that are no more: by where= and select=, or in transform="
    if not input.keeps_changes:
        meant = f"\"{CHANGE_TYPE} IN ('insert', 'update_postimage')\""
        remedy = f"Keep {CHANGE_TYPE} among them, or say by where= which rows are meant, as {meant} does"
    elif stage.function is not None:
        remedy = f"accepts_changes=True says that it does. Or leave {out}"
    else:
        remedy = f"Leave {out}"
    raise PipelineError(
        f"{stage.uid} cannot read {input.name}, whose rows are changes: "
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


def _check_input(stage: Stage, input: Input) -> None:
    """Raise PipelineError unless it is clear what a stage reads, and which columns it makes of that."""
    where, origin = f"stage {stage.uid}", input.origin
    if input.output != MAIN and (isinstance(origin, Source) or input.output not in origin.readable):
        raise PipelineError(
            f"{stage.uid} reads the output {input.output!r} of {input.name}, which has none of that name.",
            where=where,
            next=f"Give it {input.name}, or one of its outputs: {input.name}.output(...).",
        )
    if len(set(input.key)) < len(input.key):
        raise PipelineError(
            f"The key of {stage.uid} names a column twice: {', '.join(input.key)}.", where=where, next="Name each once."
        )
    if input.columns and input.transform is not None:
        raise PipelineError(
            f"{stage.uid} has a transform, which makes columns of its own, and select={input.columns!r}.",
            where=where,
            next="Say one of the two.",
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
    if stage.is_of_several:
        why = "hands out rows of several inputs"
    elif stage.inputs[0].columns:
        why = "hands out columns of its own, among which none says from which row they come"
    elif not stage.reads_source:
        why = "reads another stage, whose rows are made already"
    else:
        why = stage.operator.mixes_rows()
    if why is not None:
        raise PipelineError(
            f"A gate of {stage.uid} is to quarantine rows of the source, but the stage {why}.",
            where=f"stage {stage.uid}",
            next="Put the gate on the stage that reads the source, or let it hold or warn.",
        )
