"""Whether today's definition of a pipeline fits the state that a checkpoint recorded, one finding for each thing that is to be said.

Values only. A run asks this before its first row and is refused by it (`stage_job`, `run.check_fits`); `weir plan` asks the same
beforehand (`state_plan`). So the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from pipelines.runtime.definition import Pipeline, SessionWindow, Stage
from pipelines.runtime.operators import Shapes
from state_ops import evolution
from state_ops.aggregates import Agg
from state_ops.checkpoint import Checkpoint
from state_ops.kinds import Collection
from state_ops.schema import TOUCHED, StateSchema
from state_ops.value_types import type_name


class Verdict(StrEnum):
    """What becomes of a change. MIGRATES: by itself, when rows are read. FLAG: once the operator says that it is meant."""

    COMPATIBLE = "compatible"
    MIGRATES = "migrates"
    FLAG = "needs a flag"
    REFUSED = "refused"

    @property
    def stops(self) -> bool:
        """Whether a run would be refused."""
        return self in (Verdict.FLAG, Verdict.REFUSED)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about the pipeline. kind: stage, source or table, with its name; aspect: what of it; next: what to do."""

    kind: str
    name: str
    aspect: str
    verdict: Verdict
    what: str
    next: str | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """How a stage fits what was recorded of it. shapes: with schemas that also read what is stored; for use if nothing is refused."""

    shapes: Shapes
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> list[str]:
        return [one.what for one in self.findings if one.verdict.stops]

    @property
    def migrations(self) -> list[str]:
        return [one.what for one in self.findings if one.verdict is Verdict.MIGRATES]


ANOTHER_UID = "Put the definition back, or give the stage a new uid: it then starts with empty state."


# -- one stage


def fit(stage: Stage, fixed: Shapes, recorded: Mapping[str, Any], max_parallelism: int) -> Fit:
    """A stage as it is now against what a checkpoint recorded of its state. recorded: its operator's figures, with a schema."""
    was = evolution.from_record(recorded)
    if TOUCHED in was.arrow.names:  # also without a TTL now: what the old one has let expire is told by its stamp
        fixed = fixed.with_stamps
    found = [*_schema_findings(stage.uid, "state", "", was, fixed.state)]
    refused: list[tuple[str, str]] = []
    keys = [[field.name, type_name(field.type)] for field in fixed.keys]
    if recorded["keys"] != keys:
        refused.append(("key", f"the key was {recorded['keys']}, is {keys}"))
    if (meant := recorded.get("window")) != (means := meaning(stage)):
        refused.append((_kind(stage), f"its {_kind(stage)} were {meant}, are {means}"))
    found += [_refused(stage.uid, aspect, what) for aspect, what in refused]
    collections, of_collections = _collections_fitted(stage.uid, recorded.get("collections") or {}, fixed)
    found += of_collections
    if recorded["max_parallelism"] != max_parallelism:
        what = f"max_parallelism was {recorded['max_parallelism']}, is {max_parallelism}"
        found.append(_refused(stage.uid, "max_parallelism", what))
    found += _ttl_findings(stage, recorded)
    return Fit(replace(fixed, state=evolution.successor(recorded, fixed.state), collections=collections), tuple(found))


def _refused(uid: str, aspect: str, what: str) -> Finding:
    return Finding("stage", uid, aspect, Verdict.REFUSED, what, ANOTHER_UID)


def _schema_findings(uid: str, aspect: str, prefix: str, was: StateSchema, now: StateSchema) -> Iterator[Finding]:
    """Field by field. Of a field that cannot be read any more only that is said."""
    obstacles = evolution.obstacles_by_field(was, now)
    for said in obstacles.values():
        yield from (_refused(uid, aspect, prefix + one) for one in said)
    of_refused = tuple(f"field {name} " for name in obstacles)
    for change in was.differences(now):
        if change.startswith(f"field {TOUCHED} "):
            continue  # that of a time to live, which is told as such
        if not change.startswith(of_refused):
            yield Finding("stage", uid, aspect, Verdict.MIGRATES, prefix + change)


def _collections_fitted(
    uid: str, recorded: Mapping[str, Any], fixed: Shapes
) -> tuple[tuple[Collection, ...], list[Finding]]:
    """The lists and maps with schemas that also read what is stored, and what is to be said of them."""
    found, fitted = list[Finding](), []
    now = stored_collections(fixed)
    for name, was in recorded.items():
        if name not in now:
            found.append(
                _refused(uid, was["kind"], f"the {was['kind']} {name} is gone, and what it holds would stay behind")
            )
        elif (was["kind"], was["key"]) != (now[name]["kind"], now[name]["key"]):
            found.append(_refused(uid, was["kind"], f"{name} was a {_shape(was)}, is a {_shape(now[name])}"))
    for one in fixed.collections:
        if one.name not in recorded:
            what = f"the {one.kind} {one.name} was added, empty for each key"
            found.append(Finding("stage", uid, one.kind, Verdict.COMPATIBLE, what))
            fitted.append(one)
            continue
        was = evolution.from_record(recorded[one.name])
        found += _schema_findings(uid, one.kind, f"{one.name}: ", was, one.schema)
        fitted.append(replace(one, schema=evolution.successor(recorded[one.name], one.schema)))
    return tuple(fitted), found


def _ttl_findings(stage: Stage, recorded: Mapping[str, Any]) -> Iterator[Finding]:
    """A time to live may come, go and change: rows without a stamp count as touched when they are first seen."""
    was, now = recorded.get("ttl"), asdict(stage.ttl) if stage.ttl else None
    if "ttl" in recorded and was != now:
        verdict = Verdict.MIGRATES if was is None else Verdict.COMPATIBLE
        yield Finding("stage", stage.uid, "ttl", verdict, f"the time to live was {_lifetime(was)}, is {_lifetime(now)}")


def _lifetime(ttl: Mapping[str, Any] | None) -> str:
    if ttl is None:
        return "none"
    return f"{ttl['micros'] / 1_000_000:g} s after a {'read or write' if ttl['on_read'] else 'write'}"


def stored_collections(fixed: Shapes | None) -> dict[str, Any]:
    """A stage's lists and maps as its checkpoint records them, by name: kind, a map's key, the schemas of elements."""
    return {
        one.name: {
            "kind": one.kind,
            "key": None if one.key is None else type_name(one.key),
            "schema": one.schema.to_json(),
            "schemas": evolution.recorded(one.schema),
        }
        for one in (fixed.collections if fixed else ())
    }


def _shape(recorded: dict[str, Any]) -> str:
    return f"map by {recorded['key']}" if recorded["key"] else recorded["kind"]


def meaning(stage: Stage) -> dict[str, Any] | None:
    """What an operator's stored state means: another window size or aggregate must not be merged into it."""
    if stage.aggregation is not None:
        return {"aggregates": _listed(stage.aggregation.aggregates)}
    if stage.deduplication is not None:
        return {"on": stage.deduplication.on}  # each key's state says when it ends: another ttl holds for new ones
    if stage.window is None:
        return None
    said = {"on": stage.window.on, "aggregates": _listed(stage.window.aggregates)}
    if isinstance(stage.window, SessionWindow):
        return {**said, "gap": stage.window.gap}
    shape = {"every": stage.window.every, "offset": stage.window.offset}
    usual = {"every": stage.window.size, "offset": 0}
    return {**said, "size": stage.window.size, **(shape if shape != usual else {})}


def is_deduplication(figures: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's figures of a stage are those of a deduplication, whose `meaning` is that alone."""
    return set(figures.get("window") or ()) == {"on"}


def _kind(stage: Stage) -> str:
    return "windows" if stage.window else "aggregates" if stage.aggregation else "rules of what is a duplicate"


def _listed(aggregates: Sequence[tuple[str, Agg]]) -> list[list[Any]]:
    return [[name, agg.kind, agg.column, *([list(agg.order_by)] if agg.order_by else [])] for name, agg in aggregates]


# -- all stages and sources


def structure(pipeline: Pipeline, head: Checkpoint) -> list[Finding]:
    """Stages and sources that came and went since a checkpoint, and rows that wait for a stage which would not find them."""
    return [*_waiting(pipeline, head), *_stages(pipeline, head), *_sources(pipeline, head)]


def _waiting(pipeline: Pipeline, head: Checkpoint) -> Iterator[Finding]:
    inputs = {one.uid: one.input.uid if isinstance(one.input, Stage) else None for one in pipeline.stages}
    for uid, figures in head.operators.items():
        waiting = list(figures.get("waiting") or ())
        if any(inputs.get(uid) != one["upstream"] for one in waiting):
            yield Finding(
                "stage",
                uid,
                "input",
                Verdict.REFUSED,
                f"{figures['rows_waiting']} rows of {waiting[0]['upstream']} wait for the stage {uid}, which has not applied them; in"
                " the pipeline as it is now they would be lost.",
                f"Put the definition back, and end its run with `weir stop {pipeline.title} --savepoint NAME`, which lets stages"
                " apply all rows first; then change it.",
            )


def _stages(pipeline: Pipeline, head: Checkpoint) -> Iterator[Finding]:
    now = {stage.uid for stage in pipeline.stages}
    had = {uid for uid, figures in head.operators.items() if figures["schema"]}
    for uid in sorted(had - now):
        yield _gone(pipeline, "stage", uid, "the state")
    for stage in pipeline.stages:
        if stage.uid not in head.operators:
            where = ", and reads its input from where the pipeline stands" if head.offsets else ""
            what = f"it is new: it starts with empty state{where}"
            yield Finding("stage", stage.uid, "stage", Verdict.COMPATIBLE, what)


def _sources(pipeline: Pipeline, head: Checkpoint) -> Iterator[Finding]:
    now = {source.name for source in pipeline.sources}
    for name in sorted(set(head.offsets) - now):
        yield _gone(pipeline, "source", name, "the position")
    for name in sorted(now - set(head.offsets)):
        yield Finding("source", name, "source", Verdict.COMPATIBLE, "it is new: it is read from its first file")


def _gone(pipeline: Pipeline, kind: str, name: str, what: str) -> Finding:
    if name in pipeline.retired:
        said = f"it is retired: {what} goes with the last checkpoint that has it"
        return Finding(kind, name, kind, Verdict.COMPATIBLE, said)
    return Finding(
        kind,
        name,
        kind,
        Verdict.FLAG,
        f"The newest checkpoint has a {kind} {name!r}, which the pipeline {pipeline.title} has no more.",
        f"Give the {kind} its name back, or say that it is gone for good: Pipeline(..., retired=({name!r},)).",
    )
