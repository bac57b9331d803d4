"""What a command shows of itself while somebody waits for it, on stderr: stdout is for what it answers."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from pipelines.cli import console


@pytest.fixture
def written(monkeypatch) -> io.StringIO:
    return io.StringIO()


def test_off_a_terminal_a_command_that_takes_long_says_what_it_does(written, monkeypatch):
    monkeypatch.setattr(console, "err", Console(file=written, force_terminal=False))
    monkeypatch.setattr(console, "_FIRST_LINE_SECONDS", 0.01)
    monkeypatch.setattr(console, "_NEXT_LINE_SECONDS", 0.01)
    with console.waiting("comparing"):
        end = time.monotonic() + 30
        while written.getvalue().count("comparing: 0 s\n") < 2:
            assert time.monotonic() < end, written.getvalue()
            time.sleep(0.01)
    lines = written.getvalue()
    time.sleep(0.05)
    assert written.getvalue() == lines


def test_one_that_is_quick_says_nothing_there(written, monkeypatch):
    monkeypatch.setattr(console, "err", Console(file=written, force_terminal=False))
    with console.waiting("comparing"):
        pass
    assert written.getvalue() == ""


def test_on_a_terminal_the_time_is_shown_and_leaves_nothing_behind(written, monkeypatch):
    monkeypatch.setattr(console, "err", Console(file=written, force_terminal=True, width=80))
    with console.waiting("comparing"):
        pass
    assert "comparing" in written.getvalue() and "0:00:0" in written.getvalue()
    assert written.getvalue().endswith("\x1b[2K")  # the line is erased


def test_an_error_comes_out_and_ends_it(written, monkeypatch):
    monkeypatch.setattr(console, "err", Console(file=written, force_terminal=False))
    with pytest.raises(ValueError, match="broken"), console.waiting("comparing"):
        raise ValueError("broken")
