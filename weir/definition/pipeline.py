"""A pipeline: stages in topological order, checked as a whole."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from state_ops.days import Days
from state_ops.errors import PipelineError
from state_ops.storage.branches import BRANCHES, Branch
from state_ops.storage.paths import data_directory
from state_ops.value_text import literal
from weir.definition.delta_sink import DeltaSink
from weir.definition.gates import ROWS, Expected
from weir.definition.input import is_clocked, sources_of
from weir.definition.names import HOLD, MAX_PARALLELISM, QUARANTINE, WARN, check_name, refuse_doubles
from weir.definition.sink import Capabilities, Sink
from weir.definition.source import ADD, FIX, Source
from weir.definition.stage import Stage, sinks_shown

if TYPE_CHECKING:
    import pyarrow as pa

EXACTLY_ONCE, AT_LEAST_ONCE, AT_MOST_ONCE = "exactly_once", "at_least_once", "at_most_once"


_DECLINED = {  # what would be amiss if a gate declined an epoch
    AT_LEAST_ONCE: "that is delivered before",
    AT_MOST_ONCE: "whose rows are then lost, since none is read again",
}


@dataclass(frozen=True)
class Pipeline:
    """Stages that share checkpoints.

    Attributes:
        name: The pipeline's name.
        stages: Its stages. The instance has them in topological order.
        max_parallelism: The number of key groups, fixed for the pipeline's life.
        retired: Uids of stages, names of sources, and fields of states (stage.field) that were removed for good: their
            state, positions and values are dropped.
        added: Names of sources that are new, and whose whole input is meant for stages that have state already.
        same_rows: Uids of stages whose transform, or function without a key, was rewritten and gives the same rows as
            before. Changes then go on taking back the rows that it gave.
        on_restore: Expectations on a sample of the state, and on the newest rows of tables (`on_state`, `on_table`).
            They must hold before a restored checkpoint is used.
        branch: The branch that this is; None: the pipeline itself. Weir sets it, not the author.
        days_by: Names of the sources whose event times decide the days of a backfill; by default all sources with an
            event time, except those whose rows are only versions of an `as_of`. Say it if the rows of another source
            may have later times, such as a table of dimensions that is loaded first.
        delivery: How often sinks get the rows of an epoch that fails: "exactly_once", "at_least_once" or
            "at_most_once". State has each row exactly once in the first two, and at most once in the third.

    Raises:
        PipelineError: Two stages, sources or sinks have one name, or sources, sinks and gates do not allow `delivery`.

    Example:
        >>> from weir import Pipeline, agg, aggregate, delta, files, select
        >>> orders = select("orders", files("{landing}/*.parquet"), where="price > 0")
        >>> totals = aggregate("totals", orders, key="customer", spent=agg.sum("price"), sink=delta.append("totals"))
        >>> pipeline = Pipeline("shop", (totals, orders))
        >>> [stage.uid for stage in pipeline.stages]
        ['orders', 'totals']
        >>> [sink.name for sink in pipeline.sinks]
        ['totals']
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
    days_by: tuple[str, ...] = ()
    same_rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name, "pipeline")
        from state_ops.schema.key_groups import check_parallelism

        check_parallelism(1, self.max_parallelism)
        for field in ("owners", "retired", "added", "days_by", "same_rows"):
            # in a text every part of a name would be one of them
            names = getattr(self, field)
            object.__setattr__(self, field, (names,) if isinstance(names, str) else tuple(names))
        for field, kind in (("stages", Stage), ("on_restore", Expected)):
            object.__setattr__(self, field, _parts(self.name, field, getattr(self, field), kind))
        object.__setattr__(self, "stages", _topological(self.name, self.stages))
        refuse_doubles("stage", [stage.uid for stage in self.stages], self.name)
        refuse_doubles("sink", [sink.name for stage in self.stages for sink in stage.sinks], self.name)
        by_name: dict[str, Source] = {}
        for source in self.sources:
            source.check()
            if by_name.setdefault(source.name, source) != source:
                raise PipelineError(
                    f"Two different sources of {self.name} are named {source.name!r}.", next="Give one another name=..."
                )
        for stage in self.stages:
            for sink in stage.sinks:
                check_name(sink.name, "sink")
        self._check_delivery()
        self._check_days()
        tables = [sink.name for sink in self.sinks if sink.capabilities.has_versions]
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
                    f"on_restore says itself what it looks at, and {expected.gate.title} says"
                    f" of={literal(expected.gate.of)}.",
                    where=f"on_restore, {expected.of} {expected.name!r}",
                    next="Leave of= out.",
                )
            if expected.name not in names_by_kind[expected.of]:
                raise PipelineError(
                    f"on_restore expects something of the {expected.of} {expected.name!r}, which {self.name} has not.",
                    next=f"It has: {', '.join(names_by_kind[expected.of]) or 'none'}.",
                )

    def _check_days(self) -> None:
        """Raise PipelineError unless each source of `days_by` is a source of the pipeline with an event time."""
        timed = [source.name for source in self.sources if source.event_time is not None]
        strange = [name for name in self.days_by if name not in timed]
        if strange:
            raise PipelineError(
                f"Days cannot go by {literal(strange[0])}, which is no source of {self.name} with an event time.",
                where=f"pipeline {self.name}, days_by",
                next=f"Sources with an event time: {', '.join(timed) or 'none; say event_time= of one'}.",
            )

    def _check_delivery(self) -> None:
        """Raise PipelineError unless sources, sinks and gates allow the pipeline's delivery."""
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
            changes = any(input.brings_changes and input.transform is None for input in stage.inputs)
            if stage.operator.takes_back and changes and lost is not None:
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
        """True if sinks get rows before their epoch is committed."""
        return self.delivery == AT_LEAST_ONCE

    @property
    def at_most_once(self) -> bool:
        """True if an epoch's positions are committed before it begins, so that sinks get its rows once or never.

        A branch can repeat everything: it reads again, and all its sinks are tables, where each row comes once.
        """
        return self.delivery == AT_MOST_ONCE and self.branch is None

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(
            dict.fromkeys(
                input.origin for stage in self.stages for input in stage.inputs if isinstance(input.origin, Source)
            )
        )

    @property
    def days(self) -> Days:
        """The event times by which its checkpoints belong to days."""
        inner = {before.uid for stage in self.stages for before in stage.stages_before}
        ends = [stage for stage in self.stages if stage.sinks or stage.uid not in inner]
        read = {name for stage in ends for name in _read_for_rows(stage)}
        timed = [source.name for source in self.sources if source.event_time is not None]
        found = [name for name in timed if name in read] or timed
        names = frozenset(self.days_by or found)
        stages = [stage for stage in self.stages if all(source.name in names for source in sources_of(stage))]
        lateness = max((stage.lateness for stage in stages), default=0)
        return Days(names, frozenset(stage.uid for stage in stages), lateness)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        return tuple(sink for stage in self.stages for sink in stage.sinks)

    def sinks_shown(self, known: Container[str | None]) -> tuple[Sink, ...]:
        """Return the sinks that people are shown, as `sinks_shown` of each stage says."""
        return tuple(sink for stage in self.stages for sink in sinks_shown(stage, known))

    @property
    def app_id(self) -> str:
        """Transaction app id of the registry; sinks append their name. Stable for ever."""
        return f"weir/{self.name}/{self.branch.id if self.branch else 'main'}"

    @property
    def title(self) -> str:
        """The name for commands and people: flights, or flights@fix for a branch."""
        return f"{self.name}@{self.branch.name}" if self.branch else self.name

    @property
    def directory(self) -> str:
        """The directory of its storage, below the root of all."""
        return f"{self.name}/{BRANCHES}/{self.branch.id}" if self.branch else self.name

    def event_time_of(self, table: str, schema: pa.Schema) -> str | None:
        """Return the column by which a table's rows belong to a day or an hour; None if it has none.

        Args:
            schema: Of the table.
        """
        import pyarrow as pa

        timed = [field.name for field in schema if pa.types.is_timestamp(field.type) or pa.types.is_date(field.type)]
        for stage in self.stages:
            for output, sink in stage.sinks_by_output:
                if sink.name == table:
                    wanted = [sink.capabilities.event_time, *([] if is_clocked(stage) else stage.times_in(output))]
                    return next((name for name in wanted if name in timed), None)
        return None

    @property
    def lateness(self) -> int:
        """The longest of its stages' lateness, in microseconds: so far watermarks may be behind what has been read."""
        return max(stage.lateness for stage in self.stages)

    def target(self, sink: Sink) -> Sink:
        """Return the sink that gets the rows for a sink: itself.

        A branch writes nothing outside of itself, and keeps what its epochs hand out. Instead of a sink without
        versions, or with keys, it has a table to which rows are appended.
        """
        can = sink.capabilities
        if self.branch is None or (can.has_versions and can.takes_files):
            return sink
        return DeltaSink(
            name=sink.name,
            event_time=can.event_time,
            partition_by=can.partition_by,
            evolve=ADD if can.evolves else FIX,
            descriptions=can.descriptions,
        )

    def capabilities(self, sink: Sink) -> Capabilities:
        """Return what can be done with the sink that gets the rows for a sink."""
        return self.target(sink).capabilities

    @property
    def tables(self) -> tuple[Sink, ...]:
        """The sinks that are tables with versions where the pipeline writes to them."""
        return tuple(sink for sink in self.sinks if self.capabilities(sink).has_versions)

    def staging(self, sink: Sink) -> str:
        """Return the directory in which tasks stage a sink's rows: of its table, where publishing them is a commit of
        its log alone."""
        if not self.capabilities(sink).takes_files:
            return f"outputs/{sink.name}"
        return data_directory(sink.name, self.app_id, sink.name in self.elsewhere)

    @property
    def elsewhere(self) -> dict[str, str]:
        """The places of tables that are not in the pipeline's storage, by name. A branch has none."""
        places = {sink.name: sink.capabilities.at for sink in self.sinks if self.branch is None}
        return {name: at for name, at in places.items() if at is not None}

    def sink(self, name: str) -> Sink | None:
        """Return the sink of that name; None: the code has none, or no more."""
        return next((sink for sink in self.sinks if sink.name == name), None)

    def outputs_read(self, stage: Stage) -> frozenset[str]:
        """Return the names of a stage's outputs that others read."""
        return frozenset(name for other in self.stages for before, name in other.outputs_before if before == stage)

    def must_finish(self, stage: Stage) -> bool:
        """Return whether a stage applies all rows of an epoch in that epoch, however long it takes.

        A stage that reads a source does, since a source's slices are not kept for later. A stage with several inputs
        does, since their rows of an epoch belong together. So does every stage before one with several inputs.
        """
        return stage.reads_source or self.is_beside_others(stage)

    def is_beside_others(self, stage: Stage) -> bool:
        """Return whether the stage's rows come beside those of others: it has several inputs, or a stage that reads it
        has, directly or by way of other stages."""
        return stage.is_of_several or any(
            self.is_beside_others(other) for other in self.stages if stage in other.stages_before
        )

    def stage(self, uid: str) -> Stage:
        for stage in self.stages:
            if stage.uid == uid:
                return stage
        raise PipelineError(
            f"The pipeline {self.name} has no stage {uid!r}.",
            next=f"Its stages are: {', '.join(stage.uid for stage in self.stages)}.",
        )


def _parts(pipeline: str, field: str, given: Any, kind: type[Any]) -> tuple[Any, ...]:
    """Return one part of a pipeline, or several, as a tuple."""
    parts = (given,) if isinstance(given, kind) or not isinstance(given, Iterable) else tuple(given)
    for part in parts:
        if not isinstance(part, kind):
            raise PipelineError(
                f"{part!r} is nothing that {pipeline} can have in {field}=.",
                next='A stage is what an operator or the decorator @stage(...) makes; on_restore has on_state("stage",'
                ' expect(...)) and on_table("table", expect(...)).',
            )
    return parts


def _read_for_rows(origin: Source | Stage) -> set[str]:
    """Return the names of the sources whose rows an input hands out: behind an `as_of`, those of the facts alone."""
    if isinstance(origin, Source):
        return {origin.name}
    inputs = origin.inputs[: origin.operator.inputs_handed_out]
    return {name for input in inputs for name in _read_for_rows(input.origin)}


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
