"""Whether what a soak measured stays within bounds: storage, the registry's logs, local disk, memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tests.soak.checks import Sample

# What may be there at all times: the states are small, so these are bounds on numbers of files and on what is left
# over. A soak's second half may have this much more than its first, whose maximum it compares with its own.
_GROWTH = 1.3
_SLACK = {
    "state_bytes": 100_000,
    "state_objects": 40,
    "channel_bytes": 300_000,  # two epochs' rows for each retained checkpoint, and lives retain between 1 and 5
    "channel_objects": 100,
    "registry_bytes": 100_000,
    "registry_objects": 40,
    "registry_log": 40,
    "work_bytes": 500_000,
    "work_objects": 200,
}
_SETTLED = 100  # epochs of a coordinator until its caches and arenas are full
RSS_GROWTH = 0.10


def growing(samples: Sequence[Sample]) -> list[str]:
    """The measures whose maximum in the second half of the epochs is beyond that of the first half, in words."""
    middle = max(sample.epoch for sample in samples) / 2
    problems = []
    for name, slack in _SLACK.items():
        first = max((getattr(sample, name) for sample in samples if sample.epoch <= middle), default=0)
        second = max((getattr(sample, name) for sample in samples if sample.epoch > middle), default=0)
        if second > first * _GROWTH + slack:
            problems.append(f"{name} grows: at most {first} in the first half, {second} in the second")
    return problems


def swelling(rss: Sequence[int]) -> str | None:
    """What is wrong with the memory of one coordinator, by its epochs; None if nothing is, or too few were seen."""
    if len(rss) < 3 * _SETTLED:
        return None
    first, last = settled(rss)
    if last <= first * (1 + RSS_GROWTH):
        return None
    return f"resident memory grows: {first >> 20} MiB after {_SETTLED} epochs, {last >> 20} MiB after {len(rss)}"


def settled(rss: Sequence[int]) -> tuple[int, int]:
    """The median after a coordinator's first hundred epochs, and over its last."""
    return int(statistics.median(rss[_SETTLED : 2 * _SETTLED])), int(statistics.median(rss[-_SETTLED:]))
