"""Decide whether today's definition of a stage fits the state that a checkpoint recorded. Each difference is a finding.

`code_changes.structure` compares the rest of a pipeline. A run calls both before its first row and is refused by them
(`epoch.stage_job`, `run.check_fits`). `weir plan` calls the same functions beforehand (`operations.plan_state`), so the
two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from state_ops.arrow.types import type_name
from state_ops.durations import shown
from state_ops.records.operator_stats import OperatorStats
from state_ops.rows.changes.retractions import ROWS
from state_ops.schema import evolution
from state_ops.schema.descriptors import Collection
from state_ops.schema.state_schema import TOUCHED, StateSchema
from weir.definition import Finding, Pipeline, Shapes, Stage, Verdict
from weir.definition.findings import refused
from weir.operators import kinds, sides
from weir.operators.functions.timer_use import uses_timers


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of comparing a stage with its record in a checkpoint.

    Attributes:
        shapes: With schemas that also read what is stored; for use if nothing is refused.
        findings: What is to be said.
    """

    shapes: Shapes
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> list[str]:
        return [finding.what for finding in self.findings if finding.verdict.stops]

    @property
    def remedies(self) -> str:
        """The advice about the problems."""
        return advice(finding for finding in self.findings if finding.verdict.stops)

    @property
    def migrations(self) -> list[str]:
        return [finding.what for finding in self.findings if finding.verdict is Verdict.MIGRATES]

    @property
    def losses(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict is Verdict.LOSES]


def advice(findings: Iterable[Finding]) -> str:
    """Return the advice of findings as one text, without repetition."""
    return " ".join(dict.fromkeys(finding.next for finding in findings if finding.next is not None))


# -- one stage


def fit(stage: Stage, fixed: Shapes, recorded: OperatorStats, pipeline: Pipeline) -> Fit:
    """Return a stage of a pipeline as it is now against what a checkpoint recorded of its state.

    Args:
        recorded: Of a stage that has state.
    """
    was_state, retired = evolution.from_record(recorded.schema_history), pipeline.retired
    if TOUCHED in was_state.arrow.names:  # also without a TTL now: what the old one has let expire is told by its stamp
        fixed = fixed.with_stamps
    uid, rules = stage.uid, stage.operator.rules
    collections, of_collections = _collections_fitted(uid, recorded, fixed, retired)
    groups = recorded.max_parallelism, pipeline.max_parallelism
    findings = (
        *_schema_findings(uid, "state", None, was_state, fixed.state, retired),
        *_changed(uid, "key", recorded.keys, stored_keys(fixed), _key_shown, "the key was {}, is {}"),
        *_changed(uid, rules, recorded.window, meaning(stage), kinds.shown, f"its {rules} were {{}}, are {{}}"),
        *of_collections,
        *_sketch_findings(uid, recorded.sketched, dict(fixed.sketched)),
        *_changed(uid, "input", ROWS in was_state.arrow.names, ROWS in fixed.state.arrow.names, _rows_shown, _WAS_OF),
        *_changed(uid, "max_parallelism", *groups, str, "max_parallelism was {}, is {}"),
        *_timer_findings(stage, recorded),
        *_ttl_findings(stage, recorded, TOUCHED in was_state.arrow.names),
        *stage.operator.changed(stage, recorded, fixed),
        *_lateness_findings(stage, recorded),
    )
    return Fit(replace(fixed, state=evolution.successor(was_state, fixed.state), collections=collections), findings)


_WAS_OF = "its input was {}, is {}"


def _rows_shown(retracts: bool) -> str:
    return "changes" if retracts else "rows none of which takes others back"


def lookup_findings(stage: Stage, recorded: OperatorStats) -> Iterator[Finding]:
    """Yield a finding if a lookup has changed. Any change of it is compatible, since a lookup has no state."""
    was, now = recorded.window, meaning(stage)
    if recorded.lookup is not None and was != now:
        what = f"it looked up {kinds.shown(was)}, and looks up {kinds.shown(now)} from the next epoch on"
        yield Finding("stage", stage.uid, "lookup", Verdict.COMPATIBLE, what)


def _changed(uid: str, aspect: str, was: Any, now: Any, shown: Callable[[Any], str], what: str) -> Iterator[Finding]:
    """Yield a finding that refuses a change. `what` is its text, with places for both values."""
    if was != now:
        yield refused(uid, aspect, what.format(shown(was), shown(now)))


def _sketch_findings(uid: str, was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Finding]:
    """Return the finding that a sketch has values of another type.

    A number and its text are two values to a sketch, and its bytes do not tell which of them it has.
    """
    for name in was:
        if name in now:
            what = f"the values that {name} counts were {{}}, are {{}}"
            yield from _changed(uid, "values", was[name], now[name], str, what)


def _timer_findings(stage: Stage, recorded: OperatorStats) -> Iterator[Finding]:
    """Yield a finding if timers that are set, or will be, have no function to call when they fire."""
    if stage.on_timer is None and recorded.timers:
        yield timers_left(stage.uid)
    elif stage.on_timer is None and recorded.on_timer and stage.function and uses_timers(stage.function):
        what = "on_timer is gone, while the function uses timers: nothing would be called when one fires"
        next = "Put on_timer back, or take state.timers out of the function."
        yield Finding("stage", stage.uid, "timers", Verdict.REFUSED, what, next)


def timers_left(uid: str) -> Finding:
    """Return the finding that a stage's on_timer is gone while its state has timers."""
    return Finding(
        "stage",
        uid,
        "timers",
        Verdict.REFUSED,
        "on_timer is gone, and timers are set in the state, for which nothing would be called any more",
        "Put on_timer back, if need be as a function that does nothing, until no timer is set any more: a"
        " drain (`weir run --drain`) fires those of event time. Or give the stage a new uid: it then starts with "
        "empty state.",
    )


def _schema_findings(
    uid: str, aspect: str, collection: str | None, was: StateSchema, now: StateSchema, retired: Sequence[str]
) -> Iterator[Finding]:
    """Field by field. Of a field that cannot be read any more only that is said. collection: whose elements these are,
    if of one."""
    prefix, place = (f"{collection}: ", f"{uid}.{collection}") if collection else ("", uid)
    obstacles = evolution.obstacles_by_field(was, now)
    for problems in obstacles.values():
        yield from (refused(uid, aspect, prefix + problem) for problem in problems)
    mentioned = [f"field {name} " for name in (TOUCHED, *obstacles)]  # a time to live is told as such
    for lost in evolution.gone(was, now):
        yield _lost(uid, aspect, prefix, f"{place}.{lost.path}", lost, retired)
        mentioned.append(f"field {lost.path} ({lost.type}) was removed")
    for path, type in evolution.without_default(was, now):
        what = (
            f"{prefix}field {path} ({type}) was added without a default, so nothing says what it is for the keys that"
            " there are"
        )
        next = f"Give {path} the default that holds for them in the state class, or `| None`."
        yield Finding("stage", uid, aspect, Verdict.REFUSED, what, next)
        mentioned.append(f"field {path} ({type}, ")
    for change in was.differences(now):
        if not change.startswith(tuple(mentioned)):
            yield Finding("stage", uid, aspect, Verdict.MIGRATES, prefix + change)


def _lost(uid: str, aspect: str, prefix: str, name: str, lost: evolution.Gone, retired: Sequence[str]) -> Finding:
    """Return a field whose values nothing reads any more. name: under which it is retired."""
    what = f"{prefix}field {lost.path} ({lost.type}) was removed"
    if name in retired:
        goes = f"{what}, and is retired: each key's value goes when it is next updated"
        return Finding("stage", uid, aspect, Verdict.MIGRATES, goes)
    old = lost.path.rpartition(".")[2]
    if lost.successor is not None:
        what += f", and looks renamed to {lost.successor}"
        keep = f'To keep its values, declare {lost.successor}: Annotated[..., renamed_from("{old}")].'
    else:
        keep = (
            f'To keep its values, put it back, or declare what it is called now: Annotated[..., renamed_from("{old}")].'
        )
    next = f"{keep} If they are to go for good: Pipeline(..., retired=({name!r},))."
    return Finding("stage", uid, aspect, Verdict.FLAG, f"{what}; its values would go for good", next)


def _collections_fitted(
    uid: str, recorded: OperatorStats, fixed: Shapes, retired: Sequence[str]
) -> tuple[tuple[Collection, ...], list[Finding]]:
    """Return the lists and maps with schemas that also read what is stored, and what is to be said of them."""
    findings, fitted = list[Finding](), []
    stored = {name: Collection.from_json(name, raw) for name, raw in recorded.collections.items()}
    now = {collection.name: collection for collection in fixed.collections}
    for name, was in stored.items():
        if name not in now:
            findings.append(
                refused(uid, was.kind, f"the {was.kind} {name} is gone, and what it holds would stay behind")
            )
        elif str(was) != str(now[name]):
            findings.append(refused(uid, was.kind, f"{name} was a {was}, is a {now[name]}"))
    for collection in fixed.collections:
        if collection.name not in stored:
            what = f"the {collection.kind} {collection.name} was added, empty for each key"
            findings.append(Finding("stage", uid, collection.kind, Verdict.COMPATIBLE, what))
            fitted.append(collection)
            continue
        schema = stored[collection.name].schema
        findings += _schema_findings(uid, collection.kind, collection.name, schema, collection.schema, retired)
        fitted.append(replace(collection, schema=evolution.successor(schema, collection.schema)))
    return tuple(fitted), findings


def _ttl_findings(stage: Stage, recorded: OperatorStats, stamped: bool) -> Iterator[Finding]:
    """Return the findings about a time to live that has come, gone or changed.

    Rows without a stamp count as touched when they are first seen. A shorter time to live deletes older rows at once,
    and so does one that comes back. stamped: True if rows tell when they were touched.
    """
    was, now = recorded.ttl, asdict(stage.lifetime) if stage.lifetime else None
    if "ttl" in recorded.names and was != now:
        what = f"the time to live was {_lifetime(was)}, is {_lifetime(now)}"
        if now is not None and (now["micros"] < was["micros"] if was is not None else stamped):
            what += (
                ": what was not touched for that long is deleted for good, from the first epoch on, and a longer one"
                " does not bring it back"
            )
            next = (
                "If that is not meant, put the old one back before a run. A savepoint keeps the state as it is: weir"
                " savepoint."
            )
            yield Finding("stage", stage.uid, "ttl", Verdict.LOSES, what, next)
            return
        verdict = Verdict.MIGRATES if was is None else Verdict.COMPATIBLE
        yield Finding("stage", stage.uid, "ttl", verdict, what)


def _lifetime(ttl: Mapping[str, Any] | None) -> str:
    if ttl is None:
        return "none"
    return f"{shown(ttl['micros'])} after a {'read or write' if ttl['on_read'] else 'write'}"


def _lateness_findings(stage: Stage, recorded: OperatorStats) -> Iterator[Finding]:
    """Return the findings about another lateness.

    The watermark stays behind the newest row by a window's lateness, and never goes back.
    """
    was, now = recorded.lateness, _lateness(stage)
    if was is None or now is None or was == now:
        return
    if now < was:
        nearer = f"with the next rows the watermark comes {shown(was - now)} nearer to the newest one"
        means = f"{nearer}: {stage.operator.sooner}"
    else:
        means = (
            f"the watermark stays where it is until event time is {shown(now - was)} further: {stage.operator.longer}"
        )
    what = f"the lateness was {shown(was)}, is {shown(now)}; {means}"
    yield Finding("stage", stage.uid, "lateness", Verdict.COMPATIBLE, what)


def stored_keys(fixed: Shapes | None) -> list[list[str]]:
    """Return a stage's key columns as its checkpoint records them: of each, its name and type."""
    return [[key.name, str(type_name(key.type))] for key in (fixed.keys if fixed else ())]


def stored_collections(fixed: Shapes | None) -> dict[str, Any]:
    """Return a stage's lists and maps as its checkpoint records them, by name."""
    return {collection.name: collection.to_json() for collection in (fixed.collections if fixed else ())}


def meaning(stage: Stage) -> dict[str, Any] | None:
    """Return the meaning of a stage's stored state, as its checkpoints record it."""
    return stage.operator.meaning()


def changeable(stage: Stage) -> dict[str, Any]:
    """Return the parts of a stage's definition that may change while its state keeps its meaning.

    The checkpoint records them.

    lateness: microseconds that the watermark stays behind.
    forgets: microseconds after which a deduplication or ranks forget a key, or a join its rows.
    on_timer: whether the stage has such a function.
    inputs: the names of its inputs, in order.
    sql: for each input, its where and its columns.
    upserted: for each table that it upserts, the key.
    suffix: of a join, the end of a right column's name that the left side has too.
    """
    return {
        "on_timer": stage.on_timer is not None,
        "lateness": _lateness(stage),
        "forgets": stage.operator.forgets,
        "suffix": stage.operator.suffix,
        "inputs": sides.inputs_of(stage),
        "sql": [*map(sides.sql_of, stage.inputs)],
        "upserted": {sink.name: list(key) for sink in stage.sinks if (key := sink.capabilities.newest_of)},
    }


def _lateness(stage: Stage) -> int | None:
    """Return the microseconds that the stage's watermark stays behind, or None if it goes by none."""
    return stage.lateness if stage.operator.goes_by_watermark else None


def _key_shown(keys: Iterable[Sequence[str]]) -> str:
    return ", ".join(f"{name} ({type})" for name, type in keys)
