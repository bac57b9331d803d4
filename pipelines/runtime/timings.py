"""How long each phase of an epoch took, and which one bounded it."""

from __future__ import annotations

import time
from collections.abc import Mapping


def record_ms(ms: dict[str, float], phase: str, since: float) -> float:
    now = time.perf_counter()
    ms[phase] = round((now - since) * 1000, 3)
    return now


_SLOTS = {
    "gate": "gates",
    "deliver": "deliveries",
    "upload": "uploads",
    "seal": "commits",
    "commits_before": "commits",
    "publishing_before": "publishing",
    "pruning_before": "pruning",
}  # by phase, but for stages' own


def bottleneck(ms: Mapping[str, float]) -> str | None:
    """What an epoch kept busy longest, hence what bounds how many there can be: a stage by its uid, "gates",
    "deliveries", "uploads", "commits", "publishing" or "pruning".

    Args:
        ms: A checkpoint's milliseconds by phase. Those of publishing and pruning, and of commits beside sealing, are of
            the epochs before: each is done one after the other.
    """
    slots: dict[str, float] = {}
    for phase, took in ms.items():
        if phase == "seal:gates":  # a part of "seal"
            continue
        kind, _, uid = phase.partition(":")
        slot = _SLOTS.get(kind, uid if kind in ("stage", "quarantine") else None)
        if slot is not None:
            slots[slot] = slots.get(slot, 0.0) + took
    return max(slots, key=lambda slot: slots[slot], default=None)
