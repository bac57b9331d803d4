"""The time that each phase of an epoch took, and the phase that bounded it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass


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
    """Return what an epoch kept busy longest, hence what bounds how many there can be: a stage by its uid, "gates",
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


def shares(ms: Mapping[str, float]) -> dict[str, float]:
    """Return what an epoch's time went to, for people: milliseconds by stage, and by what is done beside the stages'
    jobs.

    Args:
        ms: An epoch's milliseconds by phase, of what followed its commit too.
    """
    parts: dict[str, float] = {}
    for phase, took in ms.items():
        kind, _, uid = phase.partition(":")
        if phase == "seal:gates" or kind == "to_commit" or kind.endswith("_before"):
            continue
        part = uid if kind in ("stage", "quarantine") else _TOGETHER.get(kind, kind)
        parts[part] = parts.get(part, 0.0) + took
    return parts


_TOGETHER = {"gate": "gates", "deliver": "deliveries", "upload": "uploads"}


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of one step of an epoch, as the coordinator saw it.

    Attributes:
        step: Its name, as `Step` has it.
        stage: The uid of the stage whose step it is.
        begun, ended: On time.monotonic().
        error: What it failed with.
    """

    step: str
    stage: str | None
    begun: float
    ended: float
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class SubtaskTime:
    """The time that a subtask took, which began soon after its stage's job.

    Attributes:
        ms: Milliseconds by phase, in their order.
    """

    stage: str
    subtask: int
    rows_in: int
    rows_out: int
    ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EpochTimes:
    """The times of all steps of one epoch, at its end.

    Attributes:
        id: Of the epoch, and of its checkpoint.
        facts: What is said of it as a whole, by name: numbers, texts and booleans.
        begun, ended: On time.monotonic().
        now: time.monotonic() and the moment in nanoseconds since 1970 to which it belongs.
        ms: Recorded milliseconds by phase.
        error: What it failed with, or why it fell with another one; None: it has completed.
    """

    id: int
    facts: Mapping[str, int | float | str | bool]
    begun: float
    ended: float
    now: tuple[float, int]
    steps: tuple[StepTime, ...]
    subtasks: tuple[SubtaskTime, ...]
    ms: Mapping[str, float]
    error: BaseException | None = None
