"""Find the stages, sources, outputs and deliveries of a pipeline that came, went or changed since a checkpoint.

`operators.compatibility` compares the state of its stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from state_ops.arrow.frames import common_type, schema_from_json, wider_type
from state_ops.counts import agrees, counted
from state_ops.keyed import ttl
from state_ops.moments import from_micros
from state_ops.records.checkpoint import POSITIONS, Checkpoint, stats_of
from state_ops.records.operator_stats import OperatorStats
from state_ops.schema import evolution
from state_ops.schema.descriptors import collections_of
from state_ops.schema.state_schema import StateSchema
from weir.code_changes.sql import taken_back
from weir.connectors.formats.hive import partitions_of
from weir.definition import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    EXACTLY_ONCE,
    MAIN,
    Finding,
    Pipeline,
    Source,
    Stage,
    Verdict,
    sources_of,
)
from weir.definition.source import ADD, changed_kind
from weir.operators import sides
from weir.operators.compatibility import changeable, meaning

_DELIVERS = {
    EXACTLY_ONCE: "sinks get each row once from now on",
    AT_LEAST_ONCE: "sinks get rows before their epoch is committed, and once more if it fails",
    AT_MOST_ONCE: "an epoch that fails is lost from now on, in state and sinks",
}
"""By what a pipeline delivers, what follows from a change to it."""
_DELIVERED = {
    AT_LEAST_ONCE: ("; what came twice stays", "A run is refused while a sink has rows of an epoch that failed: "),
    AT_MOST_ONCE: ("; what was lost stays lost", "A run is refused while a sink lacks rows that were lost: "),
}
"""By what it delivered before, what stays of that, and when the change is refused."""


def structure(pipeline: Pipeline, head: Checkpoint) -> list[Finding]:
    """Stages and sources that came and went since a checkpoint, rows that wait for a stage which would not find them,
    and another delivery."""
    about = (_delivery, _waiting, _stages, _outputs, _upserts, _inputs, taken_back, _sources)
    return [finding for of in about for finding in of(pipeline, head)]


def _waiting(pipeline: Pipeline, head: Checkpoint) -> Iterator[Finding]:
    upstream = {
        stage.uid: (stage.inputs[0].name, stage.inputs[0].output)
        for stage in pipeline.stages
        if not stage.is_of_several and not stage.reads_source
    }
    for uid, recorded in head.operators.items():
        if any(upstream.get(uid) != (entry["upstream"], entry.get("output", MAIN)) for entry in recorded.waiting):
            yield Finding(
                "stage",
                uid,
                "input",
                Verdict.REFUSED,
                f"{counted(recorded.rows_waiting, 'row')} of {recorded.waiting[0]['upstream']} "
                f"{agrees(recorded.rows_waiting, 'waits', 'wait')} for the stage {uid}, which has"
                " not applied them; in the pipeline as it is now they would be lost.",
                f"Put the definition back, and end its run with `weir stop {pipeline.title} --savepoint NAME`, which"
                " lets stages apply all rows first; then change it.",
            )


def _outputs(pipeline: Pipeline, head: Checkpoint) -> Iterator[Finding]:
    """Return the findings about outputs of stages that came and went.

    Rows in sinks of such an output stay. A reader of it is treated like a reader of any stage.
    """
    for stage in pipeline.stages:
        if stage.uid not in head.operators:
            continue
        recorded, now = head.operators[stage.uid].outputs, dict(stage.outputs)
        gone, new = [name for name in recorded if name not in now], [name for name in now if name not in recorded]
        for name in gone:
            what = f"its output {name} is gone: nothing is handed out as {name} from the next epoch on"
            if len(gone) == len(new) == 1:
                what += f"; it looks renamed to {new[0]}"
            yield Finding("stage", stage.uid, "outputs", Verdict.COMPATIBLE, what)
        for name in new:
            what = f"its output {name} is new: it has rows from the next epoch on, and none of earlier ones"
            yield Finding("stage", stage.uid, "outputs", Verdict.COMPATIBLE, what)


def _upserts(pipeline: Pipeline, head: Checkpoint) -> Iterator[Finding]:
    """Tables whose rows are replaced by another key than they were: several of those that are there may have it."""
    before = {table: key for stats in head.operators.values() for table, key in (stats.upserted or {}).items()}
    for stage in pipeline.stages:
        for table, key in changeable(stage)["upserted"].items():
            was = before.get(table, key)
            if set(was) == set(key):
                continue
            what = f"the key of the table {table} was {', '.join(was)}, is {', '.join(key)}"
            if set(was) < set(key):
                what += ": rows that are there are replaced from now on only by such that have all of it"
                yield Finding("stage", stage.uid, "sink", Verdict.COMPATIBLE, what)
            else:
                what += ", which several rows that are there may have in common"
                next = "Put the key back, or write to a table of another name, which has rows from the next epoch on."
                yield Finding("stage", stage.uid, "sink", Verdict.REFUSED, what, next)


def _inputs(pipeline: Pipeline, head: Checkpoint) -> Iterator[Finding]:
    """Yield what stages read, and the SQL that makes their rows of it, where either is another than it was. A join
    whose sides have changed places is told by its state."""
    for stage in pipeline.stages:
        recorded, now = stats_of(head, stage.uid), changeable(stage)
        if recorded.inputs is None:
            continue
        places = sides.places_before(stage, recorded)
        if sorted(recorded.inputs) != sorted(now["inputs"]):
            was, reads = (" and ".join(inputs) for inputs in (recorded.inputs, now["inputs"]))
            what = f"it read {was}, and reads {reads} from the next epoch on{_EARLIER_STAY}"
            new = [input for input, place in zip(now["inputs"], places, strict=True) if place is None]
            what += _of_watermark(stage, head, recorded, new)
            yield Finding("stage", stage.uid, "input", Verdict.COMPATIBLE, what)
        elif not stage.operator.tells_inputs_apart and places != [*range(len(places))]:
            what = "its inputs are in another order, which changes nothing: how far each has come is known by its name"
            yield Finding("stage", stage.uid, "input", Verdict.COMPATIBLE, what)
        one = len(recorded.inputs) == len(now["inputs"]) == 1
        for input, sql, place in zip(now["inputs"], now["sql"], places, strict=True):
            before = 0 if one else place
            if recorded.sql is not None and before is not None:
                yield from _sql_findings(stage.uid, "" if one else f"of {input} ", recorded.sql[before], sql)


def _of_watermark(stage: Stage, head: Checkpoint, recorded: OperatorStats, new: Sequence[str]) -> str:
    """Say what other inputs do to the watermark of a stage.

    Args:
        new: Its inputs that it has not read before.
    """
    watermark = head.watermarks.get(stage.uid)
    if watermark is None or not (stage.is_of_several or recorded.sides):
        return ""
    if not new:
        return "; its watermark goes on by the inputs that are left"
    since = f"{from_micros(watermark):%Y-%m-%d %H:%M:%S} UTC"
    waits = f"; its watermark stays until rows of {' and '.join(new)} have come, or are waited for no more"
    return f"{waits}, and rows of it from before {since} are late for what goes by that"


_EARLIER_STAY = "; what was made of earlier rows stays as it is"


def _sql_findings(uid: str, of: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Finding]:
    """Return the findings about rows that SQL now chooses or makes differently.

    The columns of state and tables do not show such a change.

    Args:
        of: Which input, for people.
    """
    if was["where"] != now["where"]:
        before, after = ("none" if where is None else repr(where) for where in (was["where"], now["where"]))
        what = f"{of}its where was {before}, is {after} from the next epoch on{_EARLIER_STAY}"
        yield Finding("stage", uid, "where", Verdict.COMPATIBLE, what)
    if sorted(was["columns"]) != sorted(now["columns"]):
        gone, new = (
            ", ".join(repr(column) for column in columns if column not in others)
            for columns, others in ((was["columns"], now["columns"]), (now["columns"], was["columns"]))
        )
        had, has = "all columns" if not was["columns"] else gone, "all columns" if not now["columns"] else new
        change = f"had {had}, has {has}" if had and has else f"has {has} besides" if has else f"has {had} no more"
        what = f"{of}its select {change} from the next epoch on{_EARLIER_STAY}"
        yield Finding("stage", uid, "select", Verdict.COMPATIBLE, what)


def _stages(pipeline: Pipeline, head: Checkpoint) -> Iterator[Finding]:
    now = {stage.uid for stage in pipeline.stages}
    for uid in sorted(set(head.stages_with_state) - now):
        lost = _gone(pipeline, "stage", uid, "the state")
        new = [stage for stage in pipeline.stages if stage.uid not in head.operators]
        alike = next((stage.uid for stage in new if _is_alike(head.operators[uid], stage)), None)
        if lost.verdict is Verdict.FLAG and alike is not None:
            what = f"{lost.what.removesuffix('.')}; it looks renamed to {alike}: state is found by uid."
            next_ = f"Give {alike} its old uid, {uid!r}; or, to drop the state, Pipeline(..., retired=({uid!r},))."
            lost = replace(lost, aspect="renamed", what=what, next=next_)
        yield lost
    for stage in pipeline.stages:
        if stage.uid not in head.operators:
            state = ["starts with empty state"] if stage.has_state else []
            input = ["reads its input from where the pipeline stands"] if head.offsets else []
            what = "it is new" + (f": it {', and '.join(state + input)}" if state or input else "")
            yield Finding("stage", stage.uid, "stage", Verdict.COMPATIBLE, what)


def _is_alike(recorded: OperatorStats, stage: Stage) -> bool:
    """Return whether a stage that is new keeps what one that is gone kept, as far as the definition tells."""
    if [name for name, _ in recorded.keys] != list(stage.key) or recorded.window != meaning(stage):
        return False
    if stage.state is None:
        return True
    fields, collections = (
        StateSchema.of(stage.state).fields,
        {collection.name for collection in collections_of(stage.state)},
    )
    was = ttl.visible(evolution.from_record(recorded.schema_history))
    return was == fields and set(recorded.collections) == collections


def _sources(pipeline: Pipeline, head: Checkpoint) -> Iterator[Finding]:
    now = {source.name for source in pipeline.sources}
    lost = sorted(set(head.offsets) - now)
    for name in lost:
        yield _gone(pipeline, "source", name, "the position")
    for source in pipeline.sources:
        changed = changed_kind(source, head.offsets.get(source.name))
        if changed is not None:
            yield Finding("source", source.name, "kind", Verdict.FLAG, *changed)
        yield from _declared(source, head)
    for name in sorted(now - set(head.offsets)):
        keeping = [
            stage.uid
            for stage in pipeline.stages
            if any(before.name == name for before in sources_of(stage)) and stats_of(head, stage.uid).has_state
        ]
        # State that was imported before its source was first read has that source's columns on record, and no position.
        if not keeping or name in pipeline.added or name in head.inputs:
            yield Finding("source", name, "source", Verdict.COMPATIBLE, "it is new: it is read from its first file")
            continue
        yield Finding(
            "source",
            name,
            "source",
            Verdict.FLAG,
            f"The source {name!r} is new, and all of its input would be read into the state that "
            f"{', '.join(keeping)} already"
            f" {'has' if len(keeping) == 1 else 'have'}.",
            (
                f"If it is {lost[0]!r} under another name, give it that name back: the position goes by it. "
                if lost
                else ""
            )
            + f"If its files hold nothing that this state has seen: Pipeline(..., added=({name!r},)). Else give the "
            "stages new uids: they then start with empty state.",
        )


def _delivery(pipeline: Pipeline, head: Checkpoint) -> Iterator[Finding]:
    was = next((stats.delivery for stats in head.operators.values() if stats.delivery is not None), None)
    if was is None and head.kind == POSITIONS:  # of an earlier release
        was = AT_MOST_ONCE
    elif was is None and any(link.delivered for link in head.sinks.values()):
        was = AT_LEAST_ONCE
    if was is None or was == pipeline.delivery:
        return
    stays, refused = _DELIVERED.get(was, ("", ""))
    what = f"delivery was {was.replace('_', ' ')}, is {pipeline.delivery.replace('_', ' ')}: "
    what += _DELIVERS[pipeline.delivery] + stays
    yield Finding("pipeline", pipeline.name, "delivery", Verdict.COMPATIBLE, what, f"{refused}docs/how-to/delivery.md")


def _declared(source: Source, head: Checkpoint) -> Iterator[Finding]:
    """Yield the columns that a source declares beside those that it has read before: nothing that is read would fit
    these, and where bad files are set aside, each good one would be."""
    declared, recorded = source.declared_columns, head.inputs.get(source.name)
    if declared is None or recorded is None:
        return
    files, adds = (head.offsets.get(source.name) or {}).get("seen", ()), source.evolve == ADD
    of_directories = {column for name in files for column, _ in partitions_of(name)}
    before = [field for field in schema_from_json(recorded) if field.name not in of_directories]
    gone = [field for field in before if field.name not in declared.names]
    misfits = [] if adds else [
        f"declares no column {field.name!r} any more, which it has read before as {field.type}" for field in gone
    ]  # fmt: skip
    for field in before:
        now = declared.field(field.name).type if field.name in declared.names else field.type
        if common_type(field.type, now) is None and not (adds and wider_type(field.type, now)):
            misfits.append(f"declares {field.name!r} as {now}; what it has read before has {field.type}")
    if misfits:
        what = " ".join(f"The source {source.name!r} {misfit}." for misfit in misfits)
        next_ = "Declare the columns as before, or read on by a source of another name, with this one in retired=."
        yield Finding("source", source.name, "columns", Verdict.REFUSED, what, next_)
    elif gone:
        names = ", ".join(repr(field.name) for field in gone)
        what = f"{names} {'is' if len(gone) == 1 else 'are'} declared no more: "
        what += f"{'it is' if len(gone) == 1 else 'they are'} null from here on"
        yield Finding("source", source.name, "columns", Verdict.COMPATIBLE, what)


def _gone(pipeline: Pipeline, kind: str, name: str, what: str) -> Finding:
    if name in pipeline.retired:
        goes = f"it is retired: {what} goes with the last checkpoint that has it"
        return Finding(kind, name, kind, Verdict.COMPATIBLE, goes)
    return Finding(
        kind,
        name,
        kind,
        Verdict.FLAG,
        f"The newest checkpoint has a {kind} {name!r}, which the pipeline {pipeline.title} has no more.",
        f"Give the {kind} its name back, or say that it is gone for good: Pipeline(..., retired=({name!r},)).",
    )
