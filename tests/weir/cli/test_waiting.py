"""What a command shows of itself while somebody waits for it, on stderr: stdout is for what it answers."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from weir.cli import console


@pytest.fixture
def written(monkeypatch) -> io.StringIO:
    return io.StringIO()


def until(written: io.StringIO, text: str, times: int = 1) -> None:
    end = time.monotonic() + 30
    while written.getvalue().count(text) < times:
        assert time.monotonic() < end, written.getvalue()
        time.sleep(0.01)


def test_off_a_terminal_a_command_that_takes_long_says_what_it_does(written, monkeypatch):
    monkeypatch.setattr(console, "err", Console(file=written, force_terminal=False))
    monkeypatch.setattr(console, "_FIRST_LINE_SECONDS", 0.01)
    monkeypatch.setattr(console, "_NEXT_LINE_SECONDS", 0.01)
    with console.waiting("comparing") as say:
        until(written, "comparing: 0 s\n", 2)
        say("comparing, 3 of 4 [files]")
        until(written, "comparing, 3 of 4 [files]: 0 s\n")
    lines = written.getvalue()
    time.sleep(0.05)
    assert written.getvalue() == lines
    assert lines.isascii() and lines.replace("\n", "").isprintable(), "logs take no control characters"


@pytest.mark.parametrize("terminal", [False, True])
def test_one_that_is_quick_says_nothing(written, monkeypatch, terminal):
    monkeypatch.setattr(console, "err", Console(file=written, force_terminal=terminal))
    with console.waiting("comparing"):
        pass
    assert written.getvalue() == ""


def test_on_a_terminal_the_time_is_shown_and_leaves_nothing_behind(written, monkeypatch):
    monkeypatch.setattr(console, "err", Console(file=written, force_terminal=True, width=80))
    monkeypatch.setattr(console, "_LIVE_SECONDS", 0.0)
    monkeypatch.setattr(console, "_LOOK_SECONDS", 0.01)
    with console.waiting("comparing") as say:
        until(written, "comparing")
        say("reading, 3 of 4 [files]")
        until(written, "reading, 3 of 4 [files]")
    assert "0:00:0" in written.getvalue()
    assert written.getvalue().endswith("\x1b[2K")  # the line is erased


def test_an_error_comes_out_and_ends_it(written, monkeypatch):
    monkeypatch.setattr(console, "err", Console(file=written, force_terminal=False))
    with pytest.raises(ValueError, match="broken"), console.waiting("comparing"):
        raise ValueError("broken")
