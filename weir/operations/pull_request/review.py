"""`weir ci`: the code of a pull request, tried on the state and the newest epochs of production, which is only read.

    plan      what a run with this code would make of the newest checkpoint
    take      a copy of the state before some epochs and after them, and of the rows that they handed out
    replay    the same epochs once more with this code, in a directory of its own
    compare   rows and state with those of production, and what gates say

Nothing is written to production's storage, not even a hold: it is opened as `ReadOnlyStorage`, which refuses. What is
pruned while it is read is noticed, and newer epochs are taken.
"""

from __future__ import annotations

import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, TypeVar

import pyarrow as pa

from state_ops import extras
from state_ops.arrow import frames
from state_ops.checkpoints.registry import Registry
from state_ops.errors import ConfigurationError, PrunedError, WeirError
from state_ops.facts import FLAT, By, Facts, Named, fact
from state_ops.moments import from_micros
from state_ops.records.checkpoint import stats_of
from state_ops.redaction import redacted
from state_ops.storage.read_only import ReadOnlyStorage
from state_ops.storage.temp_dirs import scratch as scratch_dir
from weir.definition import HOLD, Pipeline
from weir.execution.executor import Executor, staged_table
from weir.execution.spark.spark_executor import SparkExecutor
from weir.gates import evaluation, restore_gates
from weir.gates.evaluation import GateVerdict
from weir.inspection.comparison.states import SHOWN, StateDiff
from weir.inspection.comparison.tables import TableDiff
from weir.operations.forks import branched
from weir.operations.plan import StatePlan, compared
from weir.operations.pull_request.differing import rows_differ, state_diffs
from weir.operations.pull_request.replaying import (
    EpochPlayed,
    Failed,
    Replayed,
    new_sources,
    replay,
    settings_for,
)
from weir.operations.pull_request.taking import Chosen, Taken, choose, take
from weir.ownership.pipeline_storage import nothing_kept, open_storage
from weir.replay.phases import Phases
from weir.replay.replayer import branch_of, spark_here, working_in
from weir.settings.configuration import Settings

MAIN: Final = "main"
BRANCH: Final = "ci"
PLAN, CODE, INPUT, GATES, ROWS, STATE = "plan", "code", "input", "gates", "rows", "state"
KINDS = (PLAN, CODE, INPUT, GATES, ROWS, STATE)  # of what may be otherwise, the worst first
DEFAULT_FAILURES = (PLAN, CODE, GATES)
_LOOKS = 3

Done = TypeVar("Done")


@dataclass(frozen=True, slots=True)
class GateOutcome(Facts):
    """The verdicts of one gate on the branch, over all epochs.

    Attributes:
        of: A stage, or "table NAME", "state NAME" of what is expected of a restored checkpoint.
        gate: Its title.
        on_failure: Its policy.
        failed: The ids of the epochs in which it failed; of what is expected of a restore that of the last one.
        asked: In how many epochs it was asked.
        before: In how many of the same epochs it failed in production; None: it is not asked there. What is expected of
            a table after a restore is asked of production's rows of these epochs too.
        example: What it said at last where it failed.
    """

    of: str
    gate: str
    on_failure: str
    failed: tuple[int, ...]
    asked: int
    before: Annotated[int | None, Named("failed_before")]
    example: str = ""

    @property
    def holds(self) -> bool:
        """True if the gate would have held an epoch, or a restore by the fault of the code."""
        return bool(self.failed) and self.on_failure == HOLD and not (self._is_of_restore and self.before)

    @property
    def _is_of_restore(self) -> bool:
        return self.of.startswith(("table ", "state "))

    @property
    def does(self) -> str:
        """The action of the gate, for people."""
        if not self.failed:
            return "passes"
        ids = ", ".join(map(str, self.failed[:5])) + (", ..." if len(self.failed) > 5 else "")
        if self._is_of_restore and self.before:
            return "fails where these epochs have so few rows, as in production"
        if self._is_of_restore:
            return "would refuse a restore" if self.holds else "would warn at a restore"
        verb = {HOLD: "would hold", "quarantine": "sets rows aside in"}.get(self.on_failure, "warns in")
        return f"{verb} epoch{'s' if len(self.failed) > 1 else ''} {ids}"


@dataclass(frozen=True, slots=True)
class Review(Facts):
    """The result.

    Attributes:
        pipeline: Its name.
        origin: The branch whose epochs were replayed; "main" is the pipeline itself.
        plan: Against production's newest checkpoint; None: the code cannot even be imported.
        chosen: The epochs that were to be replayed; None where nothing was tried.
        played: The epochs that came to their end.
        failed: What ended the replay before its end.
        tables: How rows differ, by sink.
        states: How state differs, by stage, if the replay came to its end.
        gates: What gates said.
        not_compared: What of the rows could not be compared, in sentences.
        notes: What else is to be said, in sentences.
        bytes_copied: Of production.
        seconds: By phase.
        parallelism: Of the replay.
    """

    pipeline: str
    origin: Annotated[str, Named("from")]
    plan: StatePlan | None
    chosen: Annotated[Chosen | None, FLAT] = None
    played: Annotated[tuple[EpochPlayed, ...], Named("epochs")] = ()
    failed: Failed | None = None
    tables: Annotated[tuple[TableDiff, ...], By("table")] = ()
    states: Annotated[tuple[StateDiff, ...], By("stage", "state")] = ()
    gates: tuple[GateOutcome, ...] = ()
    not_compared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    bytes_copied: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    parallelism: int = 0

    @property
    def rows_differing(self) -> int:
        """The number of rows of tables that differ, a changed one once."""
        return sum(sum(table.counts.values()) for table in self.tables)

    @property
    def keys_differing(self) -> int:
        """The number of keys that differ in state."""
        return sum(sum(state.counts.values()) for state in self.states if state.counts is not None)

    @property
    @fact
    def found(self) -> tuple[str, ...]:
        """The members of `KINDS` that were found."""
        is_so = {
            PLAN: self.plan is not None and self.plan.stops,
            CODE: self._failed_by(CODE),
            INPUT: self._failed_by(INPUT),
            GATES: self._failed_by(GATES) or any(outcome.holds for outcome in self.gates),
            ROWS: any(not table.same or table.columns for table in self.tables),
            STATE: any(not state.same for state in self.states),
        }
        return tuple(kind for kind in KINDS if is_so[kind])

    def _failed_by(self, cause: str) -> bool:
        return self.failed is not None and self.failed.cause == cause

    def fails(self, on: Collection[str]) -> bool:
        """Return whether a kind is found that is named in `on`."""
        return not set(on).isdisjoint(self.found)

    def without_values(self) -> Review:
        """Return the review without what gates and errors say of rows, which may have their values."""
        failed = self.failed and replace(self.failed, error=self.failed.in_words(values=False))
        return replace(self, failed=failed, gates=tuple(replace(outcome, example="") for outcome in self.gates))


def _without_values(plan: StatePlan) -> StatePlan:
    """Return a plan without what errors about entries of state say, which may have their values."""
    left_out = "State cannot be read; what the error says is left out, like all values."
    findings = (replace(each, what=left_out) if each.aspect == "sample" else each for each in plan.findings)
    samples = (each if each.problem is None else replace(each, problem=left_out) for each in plan.samples)
    return replace(plan, findings=tuple(findings), samples=tuple(samples))


def not_imported(pipeline: str, origin: str, error: WeirError) -> Review:
    """Return the review of code that cannot be imported."""
    return Review(pipeline, origin, None, failed=Failed(None, CODE, str(error)))


def review(
    pipeline: Pipeline,
    settings: Settings,
    *,
    origin: str = MAIN,
    epochs: int = 2,
    scratch: Path | None = None,
    sample: int = SHOWN,
    executor: Executor | None = None,
    on_epoch: Callable[[EpochPlayed], None] = lambda _: None,
) -> Review:
    """Try the code of a pull request on production's newest epochs, on this machine, Spark too.

    Args:
        pipeline: With the code of the pull request.
        settings: Whose storage is production's.
        origin: "main", or the name of a branch whose epochs are replayed instead.
        epochs: How many at most.
        scratch: A directory for all that is written; by default below `local.work_dir`. It is left empty.
        sample: How many rows and keys that differ are shown of each table and stage.
        executor: What runs the stages; by default Spark.
        on_epoch: Is told of each epoch that was replayed.

    Raises:
        ConfigurationError: What is asked for is no pipeline but a branch, or the directory is production's.
        TransientError: Production prunes faster than it can be read; or storage, a source or Spark is away.
        WeirError: Production has no checkpoint yet, or there is no such branch.
    """
    if pipeline.branch is not None:
        raise ConfigurationError(
            f"{pipeline.title} is a branch.",
            next=f"Name the pipeline, and the branch with --from {pipeline.branch.name}.",
        )
    evaluation.check_installed(pipeline)
    extras.check("duckdb", "weir ci")
    settings = spark_here(settings)
    production = pipeline if origin == MAIN else branched(pipeline, settings, origin)
    home = scratch if scratch is not None else settings.work_dir / "ci"
    _check_apart(home, pipeline, settings)
    clock = time.perf_counter()
    with scratch_dir(home, "weir-ci-") as directory, ExitStack() as ends:
        trial = _Trial(pipeline, production, settings, origin, epochs, directory, ends, sample, executor, on_epoch)
        done = trial.run()
    seconds = {**done.seconds, "all": time.perf_counter() - clock}
    return replace(done, seconds={phase: round(took, 3) for phase, took in seconds.items()})


def _check_apart(home: Path, pipeline: Pipeline, settings: Settings) -> None:
    """Raise ConfigurationError if a directory lies where production writes, or where a source looks for files."""
    if re.match(r"[\w+-]+:/", str(home)):
        raise ConfigurationError(f"--scratch {home} is no directory of this machine.", next="Name one of a local disk.")
    read = [place for source in pipeline.sources if (place := source.capabilities.place) is not None]
    resolved = [settings.resolve(pipeline.name, place) for place in (*pipeline.elsewhere.values(), *read)]
    for place in (settings.storage_uri(pipeline.name).removesuffix(f"/{pipeline.name}"), *resolved):
        fixed = re.split(r"/[^/]*[*?\[]", place.removeprefix("file://"), maxsplit=1)[0]
        if "://" not in fixed and home.resolve().is_relative_to(Path(fixed).resolve()):
            raise ConfigurationError(
                f"Everything would be written below {home}, which lies in {fixed}: that is production's.",
                next="Name a directory of its own with --scratch.",
            )


@dataclass
class _Trial:
    """One pull request, from its plan to its review."""

    pipeline: Pipeline
    production: Pipeline
    settings: Settings
    origin: str
    epochs: int
    directory: Path
    ends: ExitStack
    sample: int
    executor: Executor | None
    on_epoch: Callable[[EpochPlayed], None]
    phases: Phases = field(default_factory=Phases)

    def run(self) -> Review:
        storage = ReadOnlyStorage.of(open_storage(self.production, self.settings)[0])
        registry = Registry(storage, self.production.app_id)
        # Its storage is production's still: sources look there for what is archived. Files are written elsewhere.
        looking = working_in(self.settings, self.directory / "work")
        runs = self.executor or SparkExecutor(looking, app=f"weir ci {self.pipeline.name}")
        with self.phases.timed("plan"):
            plan = _retried(lambda: self._plan(storage, registry, looking, runs))
        blank = Review(self.pipeline.name, self.origin, plan, parallelism=self.settings.spark.parallelism)
        if plan.stops:
            chosen = choose(self.production, registry, storage.uri, self.epochs)
            return replace(blank, chosen=chosen, seconds=self.phases.seconds)
        return _retried(lambda: self._tried(blank, storage, registry, runs))

    def _plan(self, storage: ReadOnlyStorage, registry: Registry, looking: Settings, runs: Executor) -> StatePlan:
        head, stops = registry.head(), True
        try:
            plan = compared(self._as_production(), looking, storage, registry, head, runs, only_code=True)
            stops = plan.stops
            return plan if self.sample > 0 else _without_values(plan)
        finally:
            if stops and head is not None and not registry.holds(head):  # what cannot be read is no fault of the code
                raise PrunedError(f"Checkpoint {head.id} was pruned while it was being read.", next="Ask again.")

    def _as_production(self) -> Pipeline:
        return replace(self.pipeline, branch=self.production.branch)

    def _tried(self, blank: Review, storage: ReadOnlyStorage, registry: Registry, runs: Executor) -> Review:
        """Take, replay and compare; of epochs whose input is gone, only those after them."""
        upto: int | None = None
        notes: list[str] = []
        while True:
            place = self.directory / uuid.uuid4().hex
            chosen = choose(self.production, registry, storage.uri, self.epochs, upto)
            notes += [note for note in chosen.notes if note not in notes]
            if not chosen.epochs:
                return replace(blank, chosen=chosen, notes=tuple(notes), seconds=self.phases.seconds)
            with self.phases.timed("take"):
                taken = take(registry, storage, chosen, place / "production")
            here, there = branch_of(self.pipeline, BRANCH), settings_for(self.settings, place, len(chosen.epochs))
            self.ends.enter_context(nothing_kept(open_storage(here, there)[0]))
            with self.phases.timed("replay"):
                replayed = self._replayed(here, there, registry, taken, runs)
            failed = replayed.failed
            if (
                failed is not None
                and failed.cause == INPUT
                and failed.epoch is not None
                and failed.epoch < chosen.epochs[-1].id
            ):
                upto = failed.epoch
                why = next(iter(failed.in_words(values=self.sample > 0).splitlines()), "")
                notes.append(f"Epoch {upto} cannot be replayed, so only later ones are: {why}")
                shutil.rmtree(place, ignore_errors=True)
                continue
            with self.phases.timed("compare"):
                done = self._reviewed(blank, here, there, taken, replayed, notes)
            return replace(done, seconds=self.phases.seconds)

    def _replayed(self, here: Pipeline, there: Settings, registry: Registry, taken: Taken, runs: Executor) -> Replayed:
        replayed = replay(here, there, self.settings, taken, runs, self.on_epoch)
        base = taken.chosen.base
        if replayed.failed is not None and base is not None and not registry.holds(base):
            archived = any(source.archive for source in here.sources)
            if archived:  # what it was to read again may have gone with the checkpoint
                raise PrunedError(
                    f"Checkpoint {base.id} was pruned while its archived input was being read.",
                    next="Ask again, for fewer epochs (--epochs).",
                )
        return replayed

    def _reviewed(
        self, blank: Review, here: Pipeline, there: Settings, taken: Taken, replayed: Replayed, notes: Iterable[str]
    ) -> Review:
        played, states = replayed.played, tuple[StateDiff, ...]()
        storage, _ = open_storage(here, there)
        compared_rows = list(rows_differ(here, taken, storage, played, there.work_dir, self.sample)) if played else []
        restores: list[GateOutcome] = []
        about = list(_about_code(here, taken))
        if replayed.failed is None:
            states = tuple(state_diffs(here, there, taken, storage, played[-1], self.sample))
            restores = list(_restore_outcomes(here, there, taken, played))
            about += _about_watermarks(here, played[-1])
        return replace(
            blank,
            chosen=taken.chosen,
            played=played,
            failed=replayed.failed,
            tables=tuple(table for table in compared_rows if isinstance(table, TableDiff)),
            states=states,
            gates=(*_outcomes(here, played), *restores),
            not_compared=tuple(note for note in compared_rows if isinstance(note, str)),
            notes=(*notes, *about),
            bytes_copied=taken.bytes,
        )


def _retried(call: Callable[[], Done]) -> Done:
    """Again, with what is the newest by then, if something was pruned while it was read."""
    for look in range(_LOOKS):
        try:
            return call()
        except PrunedError:
            if look == _LOOKS - 1:
                raise
    raise AssertionError("the last look returns or raises")


def _about_code(pipeline: Pipeline, taken: Taken) -> Iterator[str]:
    """Yield the changes of the code that the replay cannot show."""
    for name in new_sources(pipeline, taken.chosen.epochs[-1]):
        yield f"The source {name} is new, so the epochs have read nothing of it."
    for name in restore_gates.not_asked(pipeline):
        yield (
            f"What is expected of the table {name} after a restore was not asked: of these epochs there is what became"
            " of its keys, and not the table."
        )


def _about_watermarks(pipeline: Pipeline, last: EpochPlayed) -> Iterator[str]:
    """Yield the stages whose event time differs from production.

    Other rows come too late there from then on.
    """
    for stage in pipeline.stages:
        was, now = (row.watermarks.get(stage.uid) for row in (last.recorded, last.now))
        if was is not None and now != was:
            is_at = "none" if now is None else from_micros(now)
            yield (
                f"After these epochs the watermark of {stage.uid} is {is_at}, in production {from_micros(was)}: from"
                " there on other rows come too late."
            )


# -- gates


def _outcomes(pipeline: Pipeline, played: Iterable[EpochPlayed]) -> list[GateOutcome]:
    """Return the outcomes of the gates on epochs."""
    by_gate: dict[tuple[str, str, str, str], list[tuple[EpochPlayed, GateVerdict]]] = {}
    for epoch in played:
        for verdict in epoch.verdicts:
            by_gate.setdefault((verdict.stage, verdict.of, verdict.gate, verdict.on_failure), []).append(
                (epoch, verdict)
            )
    outcomes = []
    for (uid, of, title, policy), said in by_gate.items():
        asked = [gate for gate in pipeline.stage(uid).gates if gate.title == title]
        before = [
            recorded["passed"]
            for epoch, _ in said
            for recorded in stats_of(epoch.recorded, uid).gates
            if recorded["of"] == of and any(gate.is_titled(recorded["title"]) for gate in asked)
        ]
        failed = [(epoch, verdict) for epoch, verdict in said if not verdict.passed]
        outcomes.append(
            GateOutcome(
                uid, title, policy,
                tuple(int(epoch.recorded.id) for epoch, _ in failed),
                len(said),
                before.count(False) if before else None,
                redacted(str(failed[-1][1])) if failed else "",
            )
        )  # fmt: skip
    return outcomes


def _restore_outcomes(
    here: Pipeline, there: Settings, taken: Taken, played: Sequence[EpochPlayed]
) -> Iterator[GateOutcome]:
    """Yield the outcomes of the gates on restore, asked of the branch's last checkpoint and of these epochs' rows."""
    if not here.on_restore:
        return
    storage, _ = open_storage(here, there)
    last = played[-1]
    for of, name, verdicts in restore_gates.judged(here, there, storage, last.now, newest=True):
        is_to_compare = of == "table" and not all(verdict.passed for verdict in verdicts)
        failed_then = _failed_then(here, name, taken, played) if is_to_compare else None
        for verdict in verdicts:
            failed = () if verdict.passed else (int(last.recorded.id),)
            example = "" if verdict.passed else redacted(str(verdict))
            before = None if failed_then is None else int(verdict.gate in failed_then)
            yield GateOutcome(f"{of} {name}", verdict.gate, verdict.on_failure, failed, 1, before, example)


def _failed_then(here: Pipeline, table: str, taken: Taken, played: Sequence[EpochPlayed]) -> set[str] | None:
    """Return the gates on restore of a table that production's rows of these epochs do not satisfy either.

    The rows may be too few. None: it cannot be told.
    """
    files = [file for files in taken.handed_out(table, [epoch.recorded for epoch in played]) for file in files]
    if not files or any(file.path in taken.gone for file in files):
        return None
    rows = pa.concat_tables((staged_table(taken.copy, file) for file in reversed(files)), promote_options="permissive")
    asked = [expected.gate for expected in here.on_restore if (expected.of, expected.name) == ("table", table)]
    newest = restore_gates.sample(iter([frames.canonical(rows)]))
    verdicts = evaluation.evaluated(f"table {table}", table, asked, newest) if newest is not None else []
    return {verdict.gate for verdict in verdicts if not verdict.passed}
