"""Entries of two states are compared byte by byte, wherever they lie."""

from __future__ import annotations

from contextlib import ExitStack

from state_ops.schema import descriptors
from tests.recovery.small import Bank
from weir.inspection import state_reader
from weir.inspection.comparison.entries import differs, paired, paired_views


def bank_of(root, parallelism: int, *numbers: int) -> Bank:
    bank = Bank.at(root, WEIR_SPARK__PARALLELISM=str(parallelism))
    bank.epochs(*numbers)
    return bank


def test_the_same_entries_lie_in_other_subtasks(tmp_path):
    two, three = bank_of(tmp_path / "two", 2, 1, 2), bank_of(tmp_path / "three", 3, 1, 2)
    other = bank_of(tmp_path / "other", 3, 1, 3)
    with ExitStack() as stack:
        views = [
            stack.enter_context(state_reader.viewed(bank.site.pipeline, bank.site.settings, "accounts", None, "test"))
            for bank in (two, three, other)
        ]
        pairs = list(paired_views(views[0], views[1], equal=True))
        assert len(pairs) == 12 and not any(map(differs, pairs))
        assert not list(paired_views(views[0], views[1]))
        differing = list(paired_views(views[0], views[2]))
    alone = [(first is None, second is None) for _, first, second in differing]
    assert (alone.count((True, False)), alone.count((False, True)), alone.count((False, False))) == (2, 2, 8)


def test_a_side_without_state_has_no_entries():
    assert list(paired(None, None, range(8))) == []


def test_what_a_timer_holds_is_no_difference():
    """It says in whose barrier it did not fire, which is over."""
    timer, value = (b"\0\1" + bytes([kind]) + b"key" for kind in (descriptors.EVENT_TIMERS, 0))
    assert not differs((timer, b"1", b"2"))
    assert differs((timer, b"1", None)) and differs((timer, None, b"1"))
    assert differs((value, b"1", b"2")) and not differs((value, b"1", b"1"))
