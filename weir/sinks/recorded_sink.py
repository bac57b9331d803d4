"""The record in a checkpoint of how its rows are to be published.

A deploy between the commit and the publish therefore changes nothing of it
(docs/adr/0121-rows-are-published-as-their-checkpoint-says.md).

    {"v": 1, "as": "upsert", "key": ["id"], "order_by": ["at"]}             of a Delta table, without what is default
    {"v": 1, "as": "kafka", "facts": {"topic": "clicks", "key": ["id"]}}    of another system

A table's rows are published as that, whatever the code says by now. Another system is reached by today's code, so rows
for it are refused where a fact differs. A checkpoint of an earlier release has no such record: its rows go by the code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from state_ops.errors import ConfigurationError, PipelineError
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.sink_link import SinkLink
from weir.connectors.delta.sink import recorded_table
from weir.definition import Pipeline
from weir.definition.delta_sink import DeltaSink
from weir.definition.sink import Sink

VERSION = 1
MIXED = "mixed"  # of a branch: epochs before were handed out for another kind of sink
_LONGEST = 200  # characters of a fact; of a longer one its digest is recorded


def recorded(
    pipeline: Pipeline, link: SinkLink, name: str, parent: SinkLink | None, resolve: Callable[[str], str]
) -> SinkLink:
    """Return a link that also says how its rows are to be published.

    Args:
        parent: What the checkpoint before records of the sink.
        resolve: Fills {placeholders}.
    """
    sink = pipeline.sink(name)
    if sink is None:
        return link
    how = _how(pipeline, sink, resolve)
    before = parent.how if parent is not None else None
    if pipeline.branch is not None and before is not None and (MIXED in before or before != how):
        how = {**how, MIXED: True}
    return link.updated(how=how)


def _how(pipeline: Pipeline, sink: Sink, resolve: Callable[[str], str]) -> dict[str, Any]:
    instead = sink if sink.capabilities.has_versions else pipeline.target(sink)
    if instead.capabilities.has_versions:
        return {"v": VERSION, **instead.publishes_by(resolve)}
    return _of_system(sink, resolve)


def _of_system(sink: Sink, resolve: Callable[[str], str]) -> dict[str, Any]:
    facts = {name: _short(value) for name, value in sink.publishes_by(resolve).items()}
    return {"v": VERSION, "as": sink.kind, "facts": facts}


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _LONGEST:
        return f"sha256:{hashlib.sha256(value.encode()).hexdigest()[:16]}"
    return list(value) if isinstance(value, tuple) else value


def table_sink(
    pipeline: Pipeline, name: str, link: SinkLink | None, checkpoint: int, resolve: Callable[[str], str]
) -> Sink:
    """Return the sink of a table as a checkpoint has recorded it; where that records nothing, as the code has it.

    Args:
        checkpoint: Whose rows they are, for errors.
        resolve: Fills {placeholders}.

    Raises:
        PipelineError: The table lies elsewhere by now, or a newer release has recorded it.
    """
    today = pipeline.sink(name)
    is_table = today is not None and today.capabilities.has_versions
    if link is None or link.how is None:
        return today if today is not None and is_table else DeltaSink(name=name)
    how = link.how
    _check_version(name, how, checkpoint)
    at = how.get("at")
    lies = today.capabilities.at if today is not None else None
    if at != lies and pipeline.branch is None:
        raise put_back(
            name,
            checkpoint,
            f"lies at {at or 'its place in the storage'}",
            lies or "in the storage, or the code has it no more",
        )
    if today is not None and is_table and how == _how(pipeline, today, resolve):
        return today
    return recorded_table(name, how)


def places_before(pipeline: Pipeline, head: Checkpoint | None) -> dict[str, str]:
    """Return where tables lie, by name, that the newest checkpoint knows outside of the pipeline's storage and the
    code has there no more: their sinks were removed, renamed or moved. Placeholders are not filled."""
    now = pipeline.elsewhere
    links = head.sinks if head is not None and pipeline.branch is None else {}
    then = {name: (link.how or {}).get("at") for name, link in links.items() if link.kind is None}
    return {name: at for name, at in then.items() if at is not None and at != now.get(name)}


def check_system(pipeline: Pipeline, name: str, checkpoint: Checkpoint, resolve: Callable[[str], str]) -> None:
    """Raise PipelineError unless today's code publishes a checkpoint's rows to a system as the commit meant it.

    Raises:
        PipelineError: It does not, and says which sink to put back.
    """
    link, today = checkpoint.sinks[name], pipeline.sink(name)
    now = "no sink" if today is None else "a table" if pipeline.capabilities(today).has_versions else today.kind
    if today is None or now != link.kind:
        raise put_back(name, checkpoint.id, f"is {link.kind}", now)
    if link.how is None or link.takes_back:
        return
    _check_version(name, link.how, checkpoint.id)
    try:
        facts: Mapping[str, Any] = _of_system(today, resolve)["facts"]
    except ConfigurationError as error:
        raise put_back(name, checkpoint.id, "was complete", error.what) from error
    then = link.how.get("facts", {})
    for fact in sorted(then.keys() | facts.keys()):
        if then.get(fact) != facts.get(fact):
            raise put_back(name, checkpoint.id, f"has {fact} {then.get(fact)!r}", f"{facts.get(fact)!r}")


def put_back(name: str, checkpoint: int, then: str, now: str) -> PipelineError:
    """Return the error for rows of a sink that the code has changed since their commit.

    Args:
        then, now: Clauses, of the sink as the checkpoint has it and of the code's.
    """
    return PipelineError(
        f"Checkpoint {checkpoint} is committed with rows for the sink {name}, which {then} there; now: {now}.",
        where=f"sink {name}",
        next=f"Put the sink {name} back as it was until they are published, and change it afterwards.",
    )


def _check_version(name: str, how: Mapping[str, Any], checkpoint: int) -> None:
    if how.get("v") != VERSION:
        raise PipelineError(
            f"A newer Weir has recorded how the rows of checkpoint {checkpoint} come into the sink {name}.",
            where=f"sink {name}",
            next="Publish them with that Weir: run the pipeline with it once.",
        )
