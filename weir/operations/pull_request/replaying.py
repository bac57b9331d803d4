"""The epochs of production, played again with the code of a branch, in storage of its own below a directory.

The slices are those that production has read, under the ids and at the processing times of then. Rows that gates of
production have set aside are read again: the branch's gates decide anew. A gate that would hold an epoch is only asked
here, so that the epochs after it can be compared too; who writes the comment says what it would have done.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from state_ops.errors import (
    GateError,
    InputError,
    LostError,
    StageError,
    TransientError,
    VanishedError,
    WeirError,
)
from state_ops.facts import HIDDEN, Facts, Named, fact
from state_ops.ids import CheckpointId
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.snapshot_files import StateFile
from weir.definition import HOLD, Gate, Pipeline, Stage
from weir.definition.names import WARN
from weir.execution.executor import Executor
from weir.gates.evaluation import GateVerdict
from weir.operations.pull_request.taking import Taken
from weir.ownership.pipeline_storage import readers
from weir.replay.replayer import replaying, settings_below
from weir.settings.configuration import Settings
from weir.sources.slices import Slice

# How errors of an author's code begin, up to the text of what the code has raised.
_WITHOUT_VALUES = re.compile(
    r"The (?:function|transform) of the stage \w+ raised [\w.]+|The stage \w+ failed: [\w.]+"
    r"|The stage \w+ returned (?:columns|values)\b[\w ]*"
)
_PLACE = re.compile(r'^  File "(?P<file>[^"\n]+)", line \d+, in [\w<>]+$', re.MULTILINE)
_OF_NO_VALUE = ("VanishedError", "LostError", "PrunedError")  # they name files and positions alone
_SECONDS = 24 * 3600.0  # of an epoch: this machine is another one than production's, and whoever waits has a limit


def to_commit_seconds(checkpoint: Checkpoint) -> float | None:
    """Return the seconds from an epoch's barrier to its commit, or None if they are not recorded."""
    took = checkpoint.ms.get("to_commit")
    return None if took is None else round(took / 1000, 3)


@dataclass(frozen=True, slots=True)
class EpochPlayed(Facts):
    """An epoch that was replayed.

    Attributes:
        recorded: What production made of it.
        now: What the branch makes of it.
        files: What that lists.
        verdicts: Of the branch's gates, each with the policy that the code gives it.
        seconds: From its begin to the end of its publishing.
    """

    recorded: Annotated[Checkpoint, Named("id")]
    now: Annotated[Checkpoint, HIDDEN]
    files: Annotated[tuple[StateFile, ...], HIDDEN]
    verdicts: Annotated[tuple[GateVerdict, ...], HIDDEN]
    seconds: Annotated[float, HIDDEN]

    @property
    @fact
    def rows(self) -> int:
        """The number of rows that it read."""
        return self.recorded.rows_read

    @property
    @fact
    def seconds_production(self) -> float | None:
        """The seconds from its barrier to its commit in production."""
        return to_commit_seconds(self.recorded)

    @property
    @fact
    def seconds_branch(self) -> float | None:
        """The seconds from its barrier to its commit in the replay."""
        return to_commit_seconds(self.now)

    @property
    @fact
    def bytes_production(self) -> int:
        """The bytes of new state in production."""
        return self.recorded.bytes_new

    @property
    @fact
    def bytes_branch(self) -> int:
        """The bytes of new state in the replay."""
        return self.now.bytes_new


@dataclass(frozen=True, slots=True)
class Failed(Facts):
    """Why the replay ended before its end.

    Attributes:
        epoch: The epoch that could not be replayed, as production numbers it; None: none had begun.
        cause: "input": what the epoch has read cannot be read again; "gates": one would hold it. Else the code is to
            blame.
        error: In words, without secrets.
        traceback: Of the author's code; "" if it is not that which raised.
        kind: The class of the error; "" for code that cannot be imported, which has seen no rows.
    """

    epoch: int | None
    cause: str
    error: str
    traceback: Annotated[str, HIDDEN] = ""
    kind: Annotated[str, HIDDEN] = ""

    def in_words(self, *, values: bool) -> str:
        """Return the error. Without values: of a gate what the error stands for; of all else what failed, the classes
        of the errors, and the lines of code. The text of an error may have the value that caused it."""
        if values:
            return self.error
        if self.cause == "gates":
            return "More rows than a gate may set aside; what it has seen of them is left out, like all values."
        if self.kind in ("", *_OF_NO_VALUE):
            return next(iter(self.error.splitlines()), "")
        said = _WITHOUT_VALUES.match(self.error)
        what = said[0] if said is not None else f"{self.kind}: its text is left out, like all values"
        places = [place[0] for place in _PLACE.finditer(self.traceback) if Path(place["file"]).is_file()]
        return "\n".join([f"{what}.", *places])


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of the branch's replay of production's epochs.

    Attributes:
        played: Those that it came to the end of, oldest first.
        failed: What ended it; None: it came to the end.
    """

    played: tuple[EpochPlayed, ...]
    failed: Failed | None = None

    @property
    def head(self) -> Checkpoint | None:
        """The branch's newest checkpoint."""
        return self.played[-1].now if self.played else None


def settings_for(settings: Settings, directory: Path, epochs: int) -> Settings:
    """Return these settings with storage and local files below a directory, for epochs that are all retained."""
    return settings_below(
        settings,
        directory,
        max_concurrent=1,
        min_pause_seconds=0.0,
        num_retained=epochs + 1,
        timeout_seconds=max(settings.checkpoints.timeout_seconds, _SECONDS),
    )


def replay(
    here: Pipeline,
    there: Settings,
    production: Settings,
    taken: Taken,
    executor: Executor | None,
    on_epoch: Callable[[EpochPlayed], None],
) -> Replayed:
    """Replay epochs of production.

    Args:
        here: The pipeline as a branch that only this replay knows, with the code of the pull request.
        there: As `settings_for` has them.
        production: Whose storage has what sources have archived.
        on_epoch: Is told of each epoch that came to its end.

    Raises:
        TransientError: Storage, a source or Spark is away, or archived input was pruned meanwhile: the code is not to
            blame.
    """
    asked = _only_asked(here)
    played: list[EpochPlayed] = []
    at: Checkpoint | None = None
    planned = False
    try:
        with replaying(asked, there, production, executor, "a pull request", anew=True) as replayer:
            before = taken.chosen.base
            if before is not None:
                replayer.begin(before, taken.copy, taken.base_files)
            empty = _empty_slices(here, there, taken.chosen.epochs[-1])
            for at in taken.chosen.epochs:
                planned = False
                plan = replayer.plan(at, before, empty)
                planned = True
                clock = time.perf_counter()
                report = replayer.play(plan, _first_id(at, before))
                assert report is not None, "it is played until gates set nothing more aside"
                files = replayer.owner.context.registry.files(report.checkpoint)
                verdicts = tuple(_as_meant(here, verdict) for verdict in report.verdicts)
                played.append(EpochPlayed(at, report.checkpoint, files, verdicts, time.perf_counter() - clock))
                on_epoch(played[-1])
                before = at
    except TransientError:
        raise
    except WeirError as error:
        is_of_plan = at is not None and not planned
        traceback = error.traceback if isinstance(error, StageError) else ""
        cause = _cause(error, is_of_plan=is_of_plan)
        failed = Failed(int(at.id) if at is not None else None, cause, str(error), traceback, type(error).__name__)
        return Replayed(tuple(played), failed)
    return Replayed(tuple(played))


def _cause(error: WeirError, *, is_of_plan: bool) -> str:
    """Return the cause to blame for an error. is_of_plan: the epoch was still being planned."""
    if isinstance(error, GateError):
        return "gates"
    is_input = isinstance(error, VanishedError | LostError) or (is_of_plan and isinstance(error, InputError))
    return "input" if is_input else "code"


def new_sources(pipeline: Pipeline, last: Checkpoint) -> list[str]:
    """Return the names of the sources that production has not read by its last epoch."""
    names = (source.name for source in pipeline.sources)
    return [name for name in names if name not in last.slice and name not in last.offsets]


def _empty_slices(here: Pipeline, there: Settings, last: Checkpoint) -> dict[str, Slice]:
    """Return by new source an empty slice with the columns of the rows that wait there.

    A stage that reads other sources too needs them.
    """
    new = new_sources(here, last)
    looking = readers(replace(here, branch=None), there) if new else {}
    try:
        return {name: Slice((), False, None, looking[name].preview(None, there.epoch, None).schema) for name in new}
    finally:
        for reader in looking.values():
            reader.close()


def _first_id(recorded: Checkpoint, before: Checkpoint | None) -> CheckpointId:
    """Return the id with which an epoch begins. Where gates have set rows aside, it came to its end under a later
    one."""
    set_aside = any(part.get("excluded") or part.get("unfit") for part in recorded.slice.values())
    return CheckpointId(before.id + 1) if set_aside and before is not None else recorded.id


# -- gates


def _only_asked(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with gates that warn instead of holding an epoch."""
    stages: dict[str, Stage] = {}
    for stage in pipeline.stages:  # each after those that it reads
        gates = tuple(replace(gate, on_failure=WARN) if gate.on_failure == HOLD else gate for gate in stage.gates)
        stages[stage.uid] = replace(stage.reading(stages), gates=gates)
    return replace(pipeline, stages=tuple(stages.values()))


def _as_meant(pipeline: Pipeline, verdict: GateVerdict) -> GateVerdict:
    """Return a verdict with the policy of its gate in the code."""
    gates = pipeline.stage(verdict.stage).gates
    policies = [gate.on_failure for gate in gates if _is_of(verdict, gate)]
    return replace(verdict, on_failure=HOLD) if HOLD in policies and verdict.on_failure == WARN else verdict


def _is_of(verdict: GateVerdict, gate: Gate) -> bool:
    return gate.of == verdict.of and gate.is_titled(verdict.gate)
