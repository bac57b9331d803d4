"""Nothing outside of `weir/replay` plays a recorded epoch again, and nothing outside of one room compares states."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

WEIR = Path(__file__).parents[1] / "weir"
# Where epochs begin: those of a run, of a replay, and of a test that has no storage.
BEGINNERS = ("epoch/", "run/", "replay/", "testing/epochs.py")
BEGIN = {"EpochScheduler", "InFlightEpoch", "EpochPlan", "PendingCheckpoint", "applied_alone"}
COMPARERS = ("inspection/comparison/", "testing/slicing.py")  # a test of slicing compares instances in memory
COMPARE = {"isclose"}


def calls(source: str) -> set[str]:
    """The names of all that a module calls."""
    found = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {getattr(called, "attr", getattr(called, "id", "")) for called in found}


def calling(names: set[str], besides: tuple[str, ...]) -> dict[str, set[str]]:
    """The modules of `weir` that call one of these, but for those whose path begins so."""
    paths = {path.relative_to(WEIR).as_posix(): path for path in WEIR.rglob("*.py")}
    assert len(paths) > 300
    found = {name: calls(path.read_text("utf-8")) & names for name, path in paths.items()}
    return {name: which for name, which in found.items() if which and not name.startswith(besides)}


def test_no_other_module_plays_an_epoch_again():
    assert calling({"plan_again"}, ("replay/",)) == {}
    assert calling(BEGIN, BEGINNERS) == {}


def test_drills_and_pull_requests_have_their_epochs_from_the_replayer():
    """Their rooms would be the first to have one of their own again."""
    for module in ("operations/drill.py", "operations/pull_request/replaying.py"):
        assert calls((WEIR / module).read_text("utf-8")) >= {"replaying", "begin", "plan", "play"}


def test_no_other_module_has_a_rule_of_equality():
    assert calling(COMPARE, COMPARERS) == {}
    written = [path for path in WEIR.rglob("*.py") if "EXCEPT ALL" in path.read_text("utf-8")]
    assert [path.relative_to(WEIR).as_posix() for path in written] == ["inspection/comparison/tables.py"]


@pytest.mark.parametrize("source", ["reader.plan_again(part)", "scheduler.EpochScheduler(context)", "isclose(a, b)"])
def test_a_call_is_found(source):
    assert calls(source) & {"plan_again", *BEGIN, *COMPARE}
