"""Changes that a stage has counted, and that later ones take back: whether today's code makes of a change what earlier
code made of it.

    counted ─ where, select ─ where, select, function ─ by_number
    origin    a step          a step                    the stage that remembers

A row that was counted by an old condition is taken back by the new one. If the two differ, it is never taken back, or
what never came is. So each path from an origin to a stage that remembers is compared step by step, as far as it makes
the columns that the stage looks at. The stages in between may come, go and be renamed as long as the rows are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from state_ops.records.checkpoint import Checkpoint, stats_of
from state_ops.records.operator_stats import OperatorStats
from weir.definition import Finding, Pipeline, Source, Stage, Verdict, column_lineage
from weir.definition.change_feed import CHANGE_TYPE
from weir.definition.fingerprint import fingerprint_of
from weir.operators import sides

_INSERT = ("'insert'",)


@dataclass(frozen=True, slots=True)
class StageSql:
    """The way in which one stage makes its rows of those of an input.

    Attributes:
        uid: The stage.
        where: Its condition, in tokens.
        columns: Its select.
        code: What its transform and its function are, as `code_of` says it. None: it has neither. "": not recorded.
    """

    uid: str
    where: tuple[str, ...]
    columns: tuple[str, ...]
    code: str | None

    @property
    def explicit(self) -> set[str]:
        """The columns that its select names."""
        return {name for sql in self.columns if (name := column_lineage.name_of(sql)) is not None}


@dataclass(frozen=True, slots=True)
class Path:
    """The way on which changes come to a stage.

    Attributes:
        origin: The source, or the output of a stage with state, in the words of `sides.inputs_of`.
        steps: From the stage back to the origin.
        changes: Its rows are changes, as far as the definition tells.
    """

    origin: str
    steps: tuple[StageSql, ...]
    changes: bool = False

    @property
    def only_inserts(self) -> bool:
        """True if it makes an insert of each row, so that nothing is taken back."""
        return any(column_lineage.value_of(step.columns, CHANGE_TYPE) == _INSERT for step in self.steps)

    def has(self, name: str) -> bool:
        """Return whether what comes of it has a column, if the origin has one."""
        made = next((step.columns for step in self.steps if step.columns), ())
        return column_lineage.has(made, name)

    def begun(self, head: Checkpoint) -> bool:
        """Return whether changes of the origin have come by a checkpoint."""
        if self.origin.startswith("the source "):
            return bool(head.offsets.get(self.origin.removeprefix("the source ")))
        return stats_of(head, _uid_in(self.origin)).has_state

    def made(self, names: set[str], all_names: set[str]) -> list[tuple[Any, ...]]:
        """Return what it does for some columns, in terms that are equal if what it does is.

        Args:
            names: Those that the stage at its end looks at.
            all_names: Those that code may look at.
        """
        done: list[tuple[Any, ...]] = []
        for step in self.steps:
            values = {name: column_lineage.value_of(step.columns, name) for name in names}
            computed = tuple(sorted((name, value) for name, value in values.items() if value != (name,)))
            if step.where or computed:
                done.append((step.where, computed))
            read = {column_lineage.bare(token) for value in (*values.values(), step.where) for token in value}
            names = read if step.code is None else all_names
        return done

    @property
    def codes(self) -> list[tuple[str, str]]:
        """The uid and the mark of the code of each stage with code of its own."""
        return [(step.uid, step.code) for step in self.steps if step.code is not None]


def code_of(*functions: Callable[..., Any] | None) -> str | None:
    """Return a mark of the code of functions, with the version of Python whose bytecode it is of. None: there are
    none."""
    given = tuple(function for function in functions if function is not None)
    if not given:
        return None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        return f"{version}:{_marked(given)}"
    except TypeError:  # one without a hash
        return f"{version}:{fingerprint_of(given)}"


@lru_cache(maxsize=256)
def _marked(functions: tuple[Callable[..., Any], ...]) -> str:
    return fingerprint_of(functions)


def recorded_sql(stage: Stage) -> list[dict[str, Any]]:
    """Return by input the SQL that makes a stage's rows of it, as its checkpoint records it."""
    function = None if stage.key else stage.function
    return [{**sides.sql_of(input), "code": code_of(input.transform, function)} for input in stage.inputs]


def taken_back(pipeline: Pipeline, head: Checkpoint) -> Iterator[Finding]:
    """Yield whether changes take back what was counted of them before, for each stage that remembers some, and whether
    it reads none from the middle."""
    for stage in pipeline.stages:
        recorded = head.operators.get(stage.uid)
        if recorded is not None and recorded.inputs is None:  # of an earlier release
            continue
        now = [path for side in range(len(stage.inputs)) for path in _today(stage, side)]
        was = [] if recorded is None else list(_recorded(head, stage.uid))
        if stage.operator.takes_back:
            yield from _begun_before(stage, head, {path.origin for path in was}, now)
        looked_at = None if recorded is None or recorded.sql is None else _looked_at(stage, recorded, head)
        if looked_at is not None:
            yield from _compared(pipeline, stage, *looked_at, was, now)


def _begun_before(stage: Stage, head: Checkpoint, before: set[str], now: Sequence[Path]) -> Iterator[Finding]:
    """Return the findings about changes that began before a stage reads them.

    It would take back rows that never came.
    """
    begun = next((path.origin for path in now if path.changes and path.origin not in before and path.begun(head)), None)
    if begun is not None:
        what = f"it would read the changes of {begun} from the middle, and take back rows that never came to it"
        next_ = (
            "Let it read changes that begin with it: of a stage with a new uid, which then starts with empty state,"
            " or of a source with another name, which is read from its beginning."
        )
        yield Finding("stage", stage.uid, "changes", Verdict.REFUSED, what, next_)


def _looked_at(stage: Stage, recorded: OperatorStats, head: Checkpoint) -> tuple[set[str] | None, str] | None:
    """Return the columns of changes that a stage remembers, and where; None in place of the columns: all of them. None:
    it remembers none."""
    changes = any(input.brings_changes for input in stage.inputs)
    if stage.key:
        remembered = stage.operator.remembered(stage, recorded, changes)
        if remembered is None or not recorded.has_state:
            return None
        return (None if "*" in remembered else {*remembered}), f"the state of {stage.uid}"
    keyed = [sink.name for sink in stage.sinks if getattr(sink, "key", ()) and sink.name in head.sinks]
    return (None, f"the table {keyed[0]}") if keyed and changes else None


def _compared(
    pipeline: Pipeline, stage: Stage, looked_at: set[str] | None, where: str, was: Sequence[Path], now: Sequence[Path]
) -> Iterator[Finding]:
    left, coming = list(was), list(now)
    for is_same in (True, False):
        for path in tuple(coming):
            alike = [other for other in left if other.origin == path.origin]
            other = next((other for other in alike if not is_same or not _differ(looked_at, other, path)), None)
            if other is None:
                continue
            left.remove(other)
            coming.remove(path)
            if not is_same and not (path.only_inserts and other.only_inserts):
                yield _refused(
                    stage, where, f"what comes of {path.origin} is chosen or made otherwise than it was", path
                )
            elif (uid := _other_code(pipeline, other, path)) is not None:
                what = f"the code of {uid}, which makes rows of {path.origin}, is not what it was"
                next_ = (
                    f"If it makes the same of each row as before, say so: Pipeline(..., same_rows=({uid!r},)), which"
                    " can go after an epoch. Else: "
                )
                yield _refused(stage, where, what, path, Verdict.FLAG, next_)
    for path in left:
        if not path.only_inserts and _may_change(pipeline, path):
            yield _refused(stage, where, f"it reads {path.origin} no more", path)


def _differ(looked_at: set[str] | None, was: Path, now: Path) -> bool:
    """Return whether two paths make other rows of the same, as far as SQL tells. looked_at: None: all that both
    have."""
    explicit = {name for path in (was, now) for step in path.steps for name in step.explicit} | {CHANGE_TYPE}
    names = looked_at or {name for name in explicit if was.has(name) and now.has(name)}
    return was.made(names, explicit) != now.made(names, explicit)


def _other_code(pipeline: Pipeline, was: Path, now: Path) -> str | None:
    """Return the uid of the stage whose transform or function is another one, if that can be told."""
    for (_, before), (uid, after) in zip(was.codes, now.codes, strict=False):
        comparable = before and after and before.partition(":")[0] == after.partition(":")[0]
        if comparable and before != after and uid not in pipeline.same_rows:
            return uid
    unknown = any(not code for _, code in was.codes)
    if len(was.codes) != len(now.codes) and not unknown:
        uids = [uid for uid, _ in (now.codes or was.codes)]
        return next((uid for uid in uids if uid not in pipeline.same_rows), None)
    return None


def _may_change(pipeline: Pipeline, path: Path) -> bool:
    """Return whether rows of an origin may still be taken back, as far as today's code tells."""
    name = path.origin
    for stage in pipeline.stages:
        if name in (of := f"the stage {stage.uid}", *(f"{of}, output {output}" for output in stage.readable)):
            made = " ".join(sql for step in path.steps for sql in step.columns)
            return stage.hands_out_changes or CHANGE_TYPE in made
    for source in pipeline.sources:
        if name == f"the source {source.name}":
            return source.hands_out_changes or any(step.columns for step in path.steps)
    return True


def _refused(
    stage: Stage, where: str, what: str, path: Path, verdict: Verdict = Verdict.REFUSED, first: str = ""
) -> Finding:
    what += f", while {where} has rows of its changes: later ones would not take these back, or what never came"
    origin, of_stage = path.origin.partition(",")[0], path.origin.startswith("the stage ")
    next_ = (
        f"{first}Put the definition back. Or start from empty state: give {stage.uid} a new uid, its tables new names,"
        f" and {origin} a new {'uid' if of_stage else 'name'}, whose changes then begin again; to count what there was,"
        " read it again from the beginning, as a pipeline of another name."
    )
    return Finding("stage", stage.uid, "changes", verdict, what, next_)


def _uid_in(origin: str) -> str:
    return origin.removeprefix("the stage ").partition(",")[0]


def _today(stage: Stage, side: int) -> Iterator[Path]:
    input = stage.inputs[side]
    origin, code = input.origin, code_of(input.transform, None if stage.key else stage.function)
    step = StageSql(stage.uid, column_lineage.tokens(input.where or ""), input.columns, code)
    changes = input.brings_changes and input.transform is None
    if isinstance(origin, Source) or origin.has_state:
        yield Path(sides.inputs_of(stage)[side], (step,), changes)
        return
    for before in range(len(origin.inputs)):
        for path in _today(origin, before):
            yield Path(path.origin, (step, *path.steps), changes and path.changes)


def _recorded(head: Checkpoint, uid: str) -> Iterator[Path]:
    """Yield the same as a checkpoint recorded it. Of an earlier release less is known."""
    recorded = stats_of(head, uid)
    unknown: list[dict[str, Any]] = [{"where": None, "columns": []}] * len(recorded.inputs or ())
    for input, sql in zip(recorded.inputs or (), recorded.sql or unknown, strict=True):
        step = StageSql(uid, column_lineage.tokens(sql["where"] or ""), tuple(sql["columns"]), sql.get("code", ""))
        before = head.operators.get(_uid_in(input)) if input.startswith("the stage ") else None
        if before is None or before.has_state or before.inputs is None:
            yield Path(input, (step,))
            continue
        for path in _recorded(head, _uid_in(input)):
            yield Path(path.origin, (step, *path.steps))
