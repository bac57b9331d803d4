"""Sources that wait for slower ones: of a stage with several inputs none is read more than its `max_ahead` of event
time before the slowest.

What is compared is how far each source has been planned, so the decision is that of an epoch's plan, and what it
records of slices repeats it. A source that is idle holds nobody back, nor does one whose files say no event times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weir.definition import Pipeline, Source, sources_of


@dataclass(frozen=True, slots=True)
class WaitingSources:
    """Sources of which nothing is read now.

    Attributes:
        sources: Their names.
        still: Those of them that wait for sources of which it is known since when they are quiet, or for others that
            wait so: rows or time alone let these go on, and no epoch does.
    """

    sources: frozenset[str] = frozenset()
    still: frozenset[str] = frozenset()


def waiting_sources(
    pipeline: Pipeline, offsets: Mapping[str, Any], quiet: Mapping[str, int], now: int
) -> WaitingSources:
    """Return which sources wait.

    Args:
        offsets: By source, how far it has been planned.
        quiet: By source whose end is reached, since when it has been quiet, as `SidesTime` has it.
        now: The processing time.
    """
    waits: dict[str, set[str]] = {}
    for source, others in _beside_each_other(pipeline):
        ahead, time = source.length("max_ahead"), _newest(offsets, source)
        if ahead is None or time is None:
            continue
        for other in others:
            reached = _newest(offsets, other)
            at_end = pipeline.branch is not None and other.name in quiet  # a branch reads what has been read, no more
            if at_end or _is_idle(other, quiet, now) or (reached is None and _has_read(offsets, other)):
                continue
            if reached is None or time > reached + ahead:
                waits.setdefault(source.name, set()).add(other.name)
    still = set(waits)
    while restless := {name for name in still if not waits[name] <= quiet.keys() | still}:
        still -= restless
    return WaitingSources(frozenset(waits), frozenset(still))


def _beside_each_other(pipeline: Pipeline) -> Iterator[tuple[Source, list[Source]]]:
    """Return each source of a stage with several inputs, and those of its other inputs."""
    for stage in pipeline.stages:
        inputs = [sources_of(input) for input in stage.inputs]
        for place, sources in enumerate(inputs):
            others = [other for at, of in enumerate(inputs) if at != place for other in of if other.event_time]
            for source in sources:
                yield source, [other for other in others if other.name != source.name]


def _newest(offsets: Mapping[str, Any], source: Source) -> int | None:
    newest: int | None = (offsets.get(source.name) or {}).get("newest")
    return newest


def _has_read(offsets: Mapping[str, Any], source: Source) -> bool:
    position = offsets.get(source.name) or {}
    return bool(position.get("rows") or position.get("files"))


def _is_idle(source: Source, quiet: Mapping[str, int], now: int) -> bool:
    after, since = source.length("idle_after"), quiet.get(source.name)
    return after is not None and since is not None and now - since >= after
