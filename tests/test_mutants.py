"""The mutants fit the tree: each changes one place of a function that exists, and names a test that exists."""

from __future__ import annotations

from functools import cache

import pytest

from tests.tools.mutants import MUTANTS, ROOT, Mutant, definitions


@cache
def _text(file: str) -> str:
    path = ROOT / file
    return path.read_text() if path.is_file() else ""


def _fault(mutant: Mutant) -> str | None:
    try:
        return "changes nothing" if mutant.apply(_text(mutant.file)) == _text(mutant.file) else None
    except LookupError as error:
        return str(error)


def test_each_mutant_changes_exactly_one_place():
    assert {mutant.name: fault for mutant in MUTANTS if (fault := _fault(mutant))} == {}
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS), "two mutants have one name"


def test_each_mutant_names_a_test_that_there_is():
    missing = []
    for mutant in MUTANTS:
        file, *within = mutant.test.split("[")[0].split("::")
        if not _text(file) or (within and ".".join(within) not in definitions(_text(file))):
            missing.append(mutant.test)
    assert missing == []


_SOURCE = """\
LIMIT = 3


class Table:
    @property
    def rows(self):
        if self.open:
            self.check()
            return 1
        return 2

    def check(self):
        return 1
"""


def test_a_mutant_is_found_in_its_function_alone():
    broken = Mutant("", "a.b:Table.check", "return 1", "return 3", "").apply(_SOURCE)
    assert broken == _SOURCE.removesuffix("return 1\n") + "return 3\n"
    assert "LIMIT = 4\n" in Mutant("", "a.b:LIMIT", "3", "4", "").apply(_SOURCE)


def test_lines_that_a_mutant_removes_leave_no_blank_line():
    broken = Mutant("", "a.b:Table.rows", "self.check()", "", "").apply(_SOURCE)
    assert broken == _SOURCE.replace("            self.check()\n", "")


@pytest.mark.parametrize(
    ("function", "pattern", "reason"),
    [
        ("a.b:Table.gone", "return 1", "there is no a.b:Table.gone"),
        ("a.b:Table.rows", "return 3", "stands 0 times"),
        ("a.b:Table", "return 1", "stands 2 times"),
    ],
)
def test_a_mutant_that_does_not_fit_says_why(function: str, pattern: str, reason: str):
    with pytest.raises(LookupError, match=reason):
        Mutant("", function, pattern, "", "").apply(_SOURCE)
