"""The mutants fit the tree: each changes one place that there is, and names a test that there is."""

from __future__ import annotations

from functools import cache

from tests.tools.mutants import MUTANTS, ROOT


@cache
def _text(file: str) -> str:
    path = ROOT / file
    return path.read_text() if path.is_file() else ""


def test_each_mutant_changes_exactly_one_place():
    assert not [mutant.name for mutant in MUTANTS if mutant.old == mutant.new]
    counts = {(mutant.name, mutant.file): _text(mutant.file).count(mutant.old) for mutant in MUTANTS}
    assert {place: count for place, count in counts.items() if count != 1} == {}
    assert len(counts) == len(MUTANTS), "two mutants of a file have one name"


def test_each_mutant_names_a_test_that_there_is():
    missing = []
    for mutant in MUTANTS:
        file, *within = mutant.test.split("[")[0].split("::")
        if not _text(file) or any(
            f"def {name}(" not in _text(file) and f"class {name}" not in _text(file) for name in within
        ):
            missing.append(mutant.test)
    assert missing == []
