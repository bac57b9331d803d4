"""Find what would become of a pipeline's state if it were run with today's code and settings: `weir plan`. Only reads.

A run makes the same comparisons before its first row, by the same functions: `operators.compatibility` for stages,
`code_changes.structure` for sources and outputs, the backends' formats, the sinks' tables. Migrations are tried out:
one subtask's snapshot is opened, and rows are read with today's schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import pyarrow as pa

from state_ops.arrow.frames import schema_from_json
from state_ops.backends import loader as backends
from state_ops.checkpoints.registry import Registry
from state_ops.coordination import lease, publishing_refused
from state_ops.counts import agrees, counted
from state_ops.errors import PipelineError, WeirError
from state_ops.facts import HIDDEN, Facts, Named, fact
from state_ops.records.checkpoint import Checkpoint, stats_of
from state_ops.records.operator_stats import OperatorStats
from state_ops.schema.key_groups import check_parallelism
from state_ops.storage.storage import Storage
from weir.code_changes.structure import structure
from weir.connectors.formats import looks
from weir.connectors.lookups.lookup_table import NEWEST, Version
from weir.definition import FileSource, Finding, Input, Pipeline, Shapes, Source, Stage, Verdict
from weir.definition.fingerprint import fingerprint_of_stage
from weir.epoch.stage_job import cache_sizes
from weir.epoch.stage_shapes import shapes_of, sinks_of, source_schema
from weir.execution import direct_read
from weir.execution.executor import Executor
from weir.execution.spark import spark_plan
from weir.execution.spark.spark_executor import SparkExecutor
from weir.gates import evaluation
from weir.inspection.state_reader import At, held
from weir.operations.plan_state import Findings, Sample, StateCheck
from weir.operators import sides
from weir.operators.compatibility import lookup_findings
from weir.ownership.lookups import Lookups
from weir.ownership.ownership import early_id_of
from weir.ownership.pipeline_storage import open_storage, readers
from weir.ownership.publish import lacking_by_sink, unpublished
from weir.settings.configuration import Settings
from weir.sinks.open_sinks import Sinks, kind_in
from weir.sinks.places import check_places
from weir.sources.directory_watch import DELIVERED_AGAIN, named

_PUBLISHED_FIRST = (
    "The next run publishes this before all else. If the sink refuses it again, docs/playbooks/rows-refused.md says "
    "how to go on without losing a row."
)
_KINDS = ("pipeline", "source", "stage", "table", "sink")


@dataclass(frozen=True, slots=True)
class Evaluated(Facts):
    """The evaluator of a stage's `where`.

    Attributes:
        by: python or spark.
        why: Why Spark alone can; None: Python does.
    """

    by: str
    why: str | None


@dataclass(frozen=True, slots=True)
class StatePlan(Facts):
    """The result of comparing a pipeline with a checkpoint.

    Attributes:
        checkpoint: The checkpoint; None if there is none yet, so that everything starts empty.
        spark: The uids of stages whose columns only Spark could tell, because they have a transform.
        where: Of stages with a where, by uid, why Spark alone can evaluate it, so that their rows go through it; None:
            Python does. Those whose columns are not known are not there.
        other_code: The uids of stages whose functions, or definition, are others than when the checkpoint was made.
    """

    pipeline: str
    checkpoint: Checkpoint | None
    findings: tuple[Finding, ...]
    samples: tuple[Sample, ...]
    spark: tuple[str, ...]
    where: Annotated[Mapping[str, str | None], HIDDEN]
    other_code: tuple[str, ...] = ()

    @property
    def stops(self) -> bool:
        """True if a run would be refused."""
        return any(finding.verdict.stops for finding in self.findings)

    @property
    @fact
    def runs(self) -> bool:
        """True if a run would begin."""
        return not self.stops

    @property
    @fact
    def evaluated(self) -> Annotated[dict[str, Evaluated], Named("where")]:
        """The evaluators of the `where` of stages, by uid."""
        return {uid: Evaluated("python" if why is None else "spark", why) for uid, why in self.where.items()}


def plan(pipeline: Pipeline, settings: Settings, at: At = None, executor: Executor | None = None) -> StatePlan:
    """Compare a pipeline as it is now with a checkpoint.

    Args:
        at: The checkpoint's id or a savepoint's name; by default the newest checkpoint.
        executor: What tells the columns of stages with a transform; by default Spark, which is started only for such
            stages.

    Raises:
        WeirError: There is no such checkpoint.
        ConfigurationError: The settings name an unknown backend, or what evaluates the pipeline's gates is not
            installed.
    """
    evaluation.check_installed(pipeline)
    runs = executor or SparkExecutor(settings, app=f"weir plan {pipeline.name}")
    with _compared_with(pipeline, settings, at) as (storage, registry, head):
        return compared(pipeline, settings, storage, registry, head, runs)


def compared(
    pipeline: Pipeline,
    settings: Settings,
    storage: Storage,
    registry: Registry,
    head: Checkpoint | None,
    executor: Executor,
    *,
    only_code: bool = False,
) -> StatePlan:
    """Compare a pipeline as it is now with a checkpoint, as `plan` does, without a hold.

    Args:
        only_code: Whether the code alone is judged: sinks that are no tables are not asked whether they take the rows,
            which connects to them.

    Raises:
        TransientError: Of `only_code`: a source, or storage, does not answer. Otherwise that is a finding too.
    """
    builder = PlanBuilder(pipeline, settings, storage, registry, head, executor, only_code=only_code)
    builder.all()
    code = {} if head is None else {stage.uid: stats_of(head, stage.uid).code for stage in pipeline.stages}
    other = tuple(s.uid for s in pipeline.stages if code.get(s.uid) and code[s.uid] != fingerprint_of_stage(s))
    return StatePlan(
        pipeline.name, head, builder.ordered(), builder.samples, tuple(builder.spark), builder.where, other
    )


@contextmanager
def _compared_with(
    pipeline: Pipeline, settings: Settings, at: At
) -> Iterator[tuple[Storage, Registry, Checkpoint | None]]:
    storage, registry = open_storage(pipeline, settings)
    if at is None and registry.head() is None:
        yield storage, registry, None
        return
    with held(pipeline, settings, at, "weir plan") as chosen:
        yield chosen


def today(
    pipeline: Pipeline,
    settings: Settings,
    storage: Storage,
    registry: Registry,
    head: Checkpoint | None,
    executor: Executor,
    uid: str,
) -> tuple[Shapes, dict[str, pa.Schema]]:
    """Return a stage's schemas as its next epoch would fix them, and the sources' columns by name.

    Raises:
        PipelineError: The stage's definition does not fit its input, or nothing has arrived that would show the input's
            columns.
    """
    builder = PlanBuilder(pipeline, settings, storage, registry, head, executor)
    builder.all()
    if uid not in builder.shapes:
        finding = next(
            (finding for finding in builder.ordered() if finding.kind == "stage" and finding.name == uid), None
        )
        raise PipelineError(
            f"What the state of {uid} looks like cannot be told: "
            f"{finding.what.rstrip('.') if finding else 'a stage before it does not fit'}.",
            where=f"stage {uid}",
            next=(finding.next if finding else None)
            or "Let the first file land, which need not be read, and try again.",
        )
    return builder.shapes[uid], {name: columns for name, columns in builder.sources.items() if columns is not None}


class PlanBuilder:
    """Looks at a pipeline stage after stage, as the first epoch of a run does."""

    def __init__(
        self,
        pipeline: Pipeline,
        settings: Settings,
        storage: Storage,
        registry: Registry,
        head: Checkpoint | None,
        executor: Executor,
        *,
        only_code: bool = False,
    ) -> None:
        self._pipeline, self._settings, self._storage, self._registry = pipeline, settings, storage, registry
        self._head, self._executor, self._only_code = head, executor, only_code
        self._sinks, self._lookups = Sinks(pipeline, settings, storage), Lookups(pipeline, settings)
        self.sources: dict[str, pa.Schema | None] = {}
        self._inputs: dict[str, pa.Schema] = {}
        self.shapes: dict[str, Shapes] = {}
        self.findings = Findings(raises_transient=only_code)
        self._state = None if head is None else StateCheck(pipeline, settings, storage, registry, head, self.findings)
        self.spark: list[str] = []
        self.where: dict[str, str | None] = {}

    def all(self) -> None:
        backends.named(self._settings.state.backend)
        try:
            check_parallelism(self._settings.spark.parallelism, self._pipeline.max_parallelism)
        except WeirError as error:
            self.findings.refuse("pipeline", self._pipeline.name, "parallelism", error)
        try:
            check_places(self._pipeline, self._storage)
        except WeirError as error:
            self.findings.refuse("pipeline", self._pipeline.name, "tables", error)
        if self._head is not None:
            self.findings += structure(self._pipeline, self._head)
            self._look_at_delivery(self._head)
            self._look_at_unpublished(self._head)
        self._look_at_sources()
        with self._sinks:
            for stage in self._pipeline.stages:
                self._look_at(stage)
        self._look_at_lost_tables()

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The rows of state that were read with today's schema."""
        return () if self._state is None else tuple(self._state.samples)

    def ordered(self) -> tuple[Finding, ...]:
        """Return the findings by source, stage and table; those about what is gone come first."""
        names = [stage.uid for stage in self._pipeline.stages]
        place = {name: number for number, name in enumerate(names, 1)}
        return tuple(
            sorted(self.findings, key=lambda finding: (_KINDS.index(finding.kind), place.get(finding.name, 0)))
        )

    def _look_at_delivery(self, head: Checkpoint) -> None:
        """Report sinks that are not where another delivery needs them.

        Only a published newest checkpoint is looked at, and only while no run is at work, which might change that.
        """
        changed = any(finding.aspect == "delivery" for finding in self.findings)
        holder, newest = lease.read(self._storage), self._registry.head()
        is_at_rest = not self._only_code and lease.alive(holder) is False and not unpublished(self._registry)
        if not changed or not is_at_rest or newest is None or newest.id != head.id:
            return
        with self._sinks:
            for sink in self._pipeline.sinks:
                try:
                    self._sinks.check_chain(sink.name, head)
                except WeirError as error:
                    of = "table" if self._pipeline.capabilities(sink).has_versions else "sink"
                    self.findings.refuse(of, sink.name, "delivery", error)
            try:
                self._sinks.check_delivered(head, early_id_of(holder, head))
            except WeirError as error:
                self.findings.refuse("pipeline", self._pipeline.name, "delivery", error)

    def _look_at_unpublished(self, head: Checkpoint) -> None:
        """Report committed checkpoints whose rows a sink lacks, while no run is at work, which would publish them."""
        if self._only_code or lease.alive(lease.read(self._storage)):
            return
        lacking = lacking_by_sink(self._registry)
        refused = publishing_refused.read(self._storage) if lacking else {}
        tables = {
            sink.name: self._pipeline.capabilities(sink).has_versions for sink in self._pipeline.sinks_shown(head.sinks)
        }
        for name, ids in lacking.items():
            noted = refused.get(name)
            why = f": {noted.why}" if noted is not None and noted.checkpoint in ids else ""
            which = f"{agrees(len(ids), 'checkpoint', 'checkpoints')} {', '.join(map(str, ids))}"
            what = f"{which} {agrees(len(ids), 'is', 'are')} committed and not published{why}"
            self.findings.allow("table" if tables.get(name, True) else "sink", name, "rows", what, _PUBLISHED_FIRST)

    # -- columns

    def _look_at_sources(self) -> None:
        head = self._head
        misdeclared = {
            finding.name
            for finding in self.findings
            if (finding.kind, finding.aspect) == ("source", "columns") and finding.verdict.stops
        }
        for name, reader in readers(self._pipeline, self._settings).items():
            position, files = head.offsets.get(name) if head else None, reader.source.capabilities.files
            expected = schema_from_json(head.inputs[name]) if head and name in head.inputs else None
            if name in misdeclared:  # each file that waits would be said not to fit
                self.sources[name] = expected
                continue
            try:
                if again := reader.look(position).again:
                    self.findings.allow(
                        "source",
                        name,
                        "files",
                        f"{named(again)}: delivered again after being read, and not read again",
                        DELIVERED_AGAIN,
                    )
                planned = reader.preview(position, self._settings.epoch, expected)
                self.sources[name] = planned.schema
                _look_at_new_columns(self.findings, name, expected, planned.schema)
                if planned.unread:
                    self.findings.allow(
                        "source",
                        name,
                        "columns",
                        "files that wait have columns that the first files did not have, and that are not read: "
                        f"{', '.join(planned.unread)}",
                    )
                for aside in planned.set_aside:
                    self.findings.allow("source", name, "files", f"{aside.file.name} is set aside: {aside.reason}")
                if not reader.exists():
                    what = f"its directory does not exist: {reader.location}"
                    advice = "Correct the source's pattern, or make the directory; a run waits for it."
                    self.findings.allow("source", name, "files", what, advice)
                elif not planned.files and files is not None:
                    _look_at_pattern(self.findings, name, files)
            except WeirError as error:
                self.sources[name] = expected
                self.findings.refuse("source", name, "files" if files is not None else "input", error)

    def _columns(self, stage: Stage) -> pa.Schema | None:
        """Return the columns that the stage's function sees; None if nothing has ever arrived."""
        seen = [self._seen(stage, input) for input in stage.inputs]
        known = [columns for columns in seen if columns is not None]
        return sides.wide(stage, known) if len(known) == len(seen) else None

    def _seen(self, stage: Stage, input: Input) -> pa.Schema | None:
        """Return the columns that the stage's function sees of one input."""
        if isinstance(input.origin, Source):
            files = self.sources[input.name]
            raw = None if files is None else source_schema(stage, input, files)
        else:
            shapes = self.shapes.get(input.name)
            raw = shapes.outputs[input.output] if shapes else None
        if raw is None:
            return None
        alone = None
        if input.where is not None or input.columns:
            direct_read.check_where(stage, input, raw, self._settings.spark.conf)
            alone = direct_read.spark_alone(input, raw, self._settings.spark.conf)
            self.where[stage.uid] = self.where.get(stage.uid) or alone  # of one input after the other
        if input.transform is None and (not input.columns or alone is None):
            columns = direct_read.seen(input, raw.empty_table()).schema if input.columns else raw
            return spark_plan.as_spark_has(columns, f"the input of {stage.uid}")
        self.spark.append(stage.uid)
        return self._executor.columns(stage, input, raw, "what was read before")

    def _files(self, input: Input) -> pa.Schema | None:
        """Return the columns of the source that is read."""
        return self.sources[input.name] if isinstance(input.origin, Source) else None

    # -- stages

    def _look_at(self, stage: Stage) -> None:
        recorded, before = stats_of(self._head, stage.uid), len(self.findings)
        try:
            columns = self._columns(stage)
            fixed = None if columns is None else self._shapes(stage, columns)
        except WeirError as error:
            self.findings.refuse("stage", stage.uid, "definition", error)
            return
        if columns is None or fixed is None:
            refused = self._refused_before(stage)
            if refused is None:
                self.findings.allow(
                    "stage", stage.uid, "input", "nothing has arrived for it yet, so its columns are not known"
                )
            else:
                what = f"what it reads is not known before {refused} fits; it is compared then"
                self.findings.report("stage", stage.uid, "input", Verdict.UNKNOWN, what)
            return
        self._inputs[stage.uid], self.shapes[stage.uid] = columns, fixed
        try:
            cache_sizes(self._settings, stage)
        except WeirError as error:
            self.findings.refuse("stage", stage.uid, "cache", error)
        if stage.operator.beside is not None:
            self.findings += lookup_findings(stage, recorded)
        if recorded.has_state and self._state is not None:
            self._state.look_at(stage, fixed, recorded)
        self._look_at_waiting(stage)
        self._look_at_tables(stage, fixed)
        if recorded.has_state and all(finding.kind != "stage" for finding in self.findings[before:]):
            self.findings.allow("stage", stage.uid, "stage", "its state is used as it is")

    def _shapes(self, stage: Stage, columns: pa.Schema) -> Shapes:
        with_table = stage if stage.operator.beside is None else stage.pinned(self._lookups.newest(stage, self._head))
        return shapes_of(with_table, columns, *(self._files(input) or columns for input in stage.inputs))

    def _refused_before(self, stage: Stage) -> str | None:
        """Return a stage or source upstream that is refused, so that the columns of this stage's input are not known;
        None if there is none."""
        refused = {(finding.kind, finding.name) for finding in self.findings if finding.verdict.stops}
        for input in stage.inputs:
            if isinstance(input.origin, Source):
                if ("source", input.name) in refused:
                    return f"the source {input.name}"
            elif ("stage", input.name) in refused:
                return input.name
            elif (before := self._refused_before(input.origin)) is not None:
                return before
        return None

    def _look_at_waiting(self, stage: Stage) -> None:
        """Compare the columns of rows that a checkpoint has left in front of the stage, as `stage_job` does."""
        recorded = stats_of(self._head, stage.uid)
        self._look_at_lost_versions(stage, recorded)
        first = next(iter(recorded.waiting), None)
        if first is None or first["schema"] is None or stage.is_of_several or stage.reads_source:
            return
        then, (input,) = schema_from_json(first["schema"]), stage.inputs
        now = self._inputs[stage.uid] if first["begun"] else self.shapes[input.name].outputs[input.output]
        if not then.equals(now):
            what = f"{counted(recorded.rows_waiting, 'row', 'waits', 'wait')} for it with other columns than it has now"
            advice = (
                f"Put the definition back and let the run catch up, or end it with `weir stop {self._pipeline.title} "
                "--savepoint NAME`,"
                " which lets the stages apply all rows first; then change it."
            )
            self.findings.report("stage", stage.uid, "input", Verdict.REFUSED, what, advice)

    def _look_at_lost_versions(self, stage: Stage, recorded: OperatorStats) -> None:
        """Report rows that wait to be joined with a version of a table that is gone."""
        beside = stage.operator.beside
        if beside is None:
            return
        waited_for = [raw["lookups"][stage.uid] for raw in recorded.waiting if stage.uid in raw.get("lookups", {})]
        for version in {version.same: version for version in map(Version.from_json, waited_for)}.values():
            gone = self._lookups.gone({stage.uid: version})
            if gone is None:
                continue
            what = f"rows wait to be joined, and {gone}"
            if beside.on_lost == NEWEST:
                self.findings.allow("stage", stage.uid, "lookup", f"{what}: they are joined with the newest")
            else:
                self.findings.report(
                    "stage", stage.uid, "lookup", Verdict.REFUSED, what, 'Bring it back, or say on_lost="newest".'
                )

    # -- tables

    def _look_at_tables(self, stage: Stage, fixed: Shapes) -> None:
        for sink, schema in sinks_of(stage, fixed):
            of = "table" if self._pipeline.capabilities(sink).has_versions else "sink"
            if of == "sink" and self._only_code:
                what = "it was not asked whether it takes the rows, since it lies outside of the storage that is read"
                self.findings.report(of, sink.name, "columns", Verdict.UNKNOWN, what)
                continue
            try:
                self._sinks.check(sink, schema)
            except WeirError as error:
                self.findings.refuse(of, sink.name, "columns", error)
                continue
            if self._head is not None and sink.name not in self._head.sinks:
                self.findings.allow(
                    of, sink.name, of, f"nothing is in it yet: it gets {stage.uid}'s rows from the next epoch on"
                )

    def _look_at_lost_tables(self) -> None:
        written = {sink.name for sink in self._pipeline.sinks}
        for name in sorted(set(self._head.sinks if self._head else ()) - written):
            of = "table" if kind_in(self._head, name) is None else "sink"
            self.findings.allow(of, name, of, "nothing writes to it any more: it stays as it is")


def _look_at_pattern(findings: Findings, name: str, files: FileSource) -> None:
    """Report a pattern whose files are of another format by their names. Those that wait have been looked at."""
    told = looks.by_name(files.pattern)
    if told not in (None, files.format):
        what = f'{files.pattern} names files of {looks.FORMATS[told]}, and they are read as format="{files.format}"'
        findings.allow("source", name, "files", what, f'Say format="{told}" in files(...) if that is so.')


def _look_at_new_columns(findings: Findings, name: str, expected: pa.Schema | None, planned: pa.Schema | None) -> None:
    """Report the changes that `evolve="add"` makes to the columns of the input that waits."""
    if expected is None or planned is None:
        return
    new = [f"{field.name} ({field.type}) is new" for field in planned if field.name not in expected.names]
    wider = [
        f"{field.name} was {field.type}, is {planned.field(field.name).type}"
        for field in expected
        if field.type != planned.field(field.name).type and not pa.types.is_null(field.type)
    ]
    if new or wider:
        findings.report("source", name, "columns", Verdict.MIGRATES, "; ".join([*new, *wider]))
