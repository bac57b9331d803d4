"""How many there are of a thing, as messages say it; and that messages ask for it."""

from __future__ import annotations

import re
from pathlib import Path

from state_ops.counts import agrees, counted
from weir.settings.configuration import PROJECT

_COUNT = r"\{[^{}\"]+\}"  # what a message puts in
_PLURALS = r"(?:files|rows|checkpoints|objects|keys|epochs|tables|branches|stages|commits) (?:are|have|were|go|come)\b"
_AS_COUNTED = re.compile(rf'f"(?:[^"]* )?{_COUNT} {_PLURALS}')


def test_one_is_one_and_has_its_verb():
    assert [counted(number, "file") for number in (0, 1, 1200)] == ["0 files", "1 file", "1,200 files"]
    assert [counted(2, what) for what in ("entry", "key", "branch", "epoch")] == [
        "2 entries",
        "2 keys",
        "2 branches",
        "2 epochs",
    ]
    assert [counted(number, "row", "is", "are") for number in (1, 2)] == ["1 row is", "2 rows are"]
    assert (agrees(1, "goes", "go"), agrees(0, "goes", "go")) == ("goes", "go")


def test_no_message_says_1_files():
    """A number before a plural with its verb is counted, in all messages."""
    wrong = [
        f"{path.relative_to(PROJECT)}: {line.strip()}"
        for folder in ("assets", "pipelines", "weir", "state_ops")
        for path in sorted(Path(PROJECT, folder).rglob("*.py"))
        for line in path.read_text().splitlines()
        if _AS_COUNTED.search(line)
    ]
    assert wrong == []
