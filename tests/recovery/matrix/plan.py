"""Which trials there are: all of them, or a spread sample in which every operation dies before and after once."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.recovery.matrix.points import COMMITS, TORN, Disturbance, Point
from tests.recovery.matrix.trials import Trial

_GOLDEN = 0.618033988749895
_DOUBLES, _DOUBLE_FAULTS = 60, 20
_SAMPLED_FAULTS = 20
_EARLY = 260  # calls of a recovery before its first epoch, roughly: there the second blow falls


def faults(point: Point) -> list[str]:
    """What else than dying can happen at a call."""
    faults = ["EIO", "hang", "zombie before", "zombie after"]
    if point.is_delta:
        faults.append("DeltaError")
    if not point.reads:
        faults += ["ENOSPC", "full", "lie"]
    if point.operation.split(".")[1] in TORN:
        faults += ["torn, killed", "torn, EIO"]
    if point.operation in COMMITS:
        faults.append("lie of a conflict")
    return faults


def everything(points: Sequence[Point]) -> list[Trial]:
    """A kill before and after each call; at each commit every fault, elsewhere one after the other in turn; double
    blows.

    Between two calls the disk looks the same after the one and before the other: so one of the two loses its host's
    files. After some, fsck repairs before the next run can.
    """
    trials = []
    for index, point in enumerate(points):
        trials.append(Trial(Disturbance("kill before", point), repair=index % 5 == 0))
        trials.append(Trial(Disturbance("kill after", point), lost=True))
    turn = 0
    for point in points:
        choice = faults(point)
        if point.operation in COMMITS:
            chosen = choice
        else:
            chosen = [choice[turn % len(choice)]]
            turn += 1
        trials += [Trial(Disturbance(fault, point)) for fault in chosen]
    return trials + _doubles(points)


def _doubles(points: Sequence[Point]) -> list[Trial]:
    """A second blow that hits the recovery from the first."""
    chance = random.Random(6)
    trials = []
    for number in range(_DOUBLES + _DOUBLE_FAULTS):
        first = Disturbance(chance.choice(["kill before", "kill after"]), chance.choice(points))
        fault = chance.choice(["kill before", "kill after"] if number < _DOUBLES else ["EIO", "lie", "full"])
        trials.append(Trial(first, Disturbance(fault, chance.randint(1, _EARLY)), lost=number % 2 == 0))
    return trials


def sample(points: Sequence[Point]) -> list[Trial]:
    """Every operation dies before one of its calls and after another one; faults of every kind; always the same
    trials."""
    by_operation: dict[str, list[Point]] = {}
    for point in points:
        by_operation.setdefault(point.operation, []).append(point)
    trials, spread = [], 0.0
    for calls in by_operation.values():
        for fault in ("kill before", "kill after"):
            spread = (spread + _GOLDEN) % 1
            trials.append(Trial(Disturbance(fault, calls[int(spread * len(calls))]), repair=spread < 0.2))
    kinds = sorted({fault for point in points for fault in faults(point)})
    for number in range(_SAMPLED_FAULTS):
        fault = kinds[number % len(kinds)]
        fitting = [point for point in points if fault in faults(point)]
        spread = (spread + _GOLDEN) % 1
        trials.append(Trial(Disturbance(fault, fitting[int(spread * len(fitting))])))
    return trials
