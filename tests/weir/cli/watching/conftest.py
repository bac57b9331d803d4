"""The command as the tests of this folder ask it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from weir.cli import main


@pytest.fixture
def weir(bank, monkeypatch, capsys) -> Callable[[str], tuple[int, str, str]]:
    """Runs a line of the command in this process on the test's `bank`: its exit code, stdout and stderr."""
    for name, value in bank.site.env.items():
        monkeypatch.setenv(name, value)

    def run(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weir", *line.split()])
        code = main._guarded(main.app, debug=False)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
