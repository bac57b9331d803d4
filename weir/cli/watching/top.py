"""The command `weir top`: a page of a terminal that shows pipelines as they are now, read from their storage alone."""

from __future__ import annotations

import io
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from typing import Annotated, TypedDict

import typer
from rich.console import Console

from state_ops.errors import ConfigurationError
from weir.cli.console import Json, err, print_json, prints
from weir.cli.shell import completion
from weir.cli.watching import screen
from weir.cli.watching.monitor import Monitor, WatchedFacts
from weir.cli.watching.screen import ScreenChoice
from weir.settings.configuration import Settings, load

_PATIENCE = 10.0  # seconds: a look that takes longer is a problem of its pipeline's
_TICK = 1.0  # seconds between drawings: ages go on
_NO_TERMINAL_WIDTH = 200


class Top(TypedDict):
    """Pipelines as they are now."""

    at: str
    pipelines: list[WatchedFacts]


@prints(Top)
def top(
    pipelines: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names in the configuration, or PIPELINE@BRANCH; default: all.",
            metavar="[PIPELINE]...",
            autocompletion=completion.pipelines,
        ),
    ] = None,
    every: Annotated[float, typer.Option(help="Seconds between looks at storage.", min=0.5, max=3600)] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="Print the page once and end.")] = False,
    json: Json = False,
) -> None:
    """Show pipelines as they are now, on a page that renews itself: who runs, epochs, lag, phases, state, what is wrong and what to do.

    Everything is read from storage, and nothing is written: it needs no coordinator, no Dagster and no JVM. Keys: arrows and enter
    for one pipeline, esc back, s sort, space pause, q quit. docs/how-to/watching.md says what the columns mean.
    """
    settings = load()
    names = list(pipelines or ())
    _check(names, settings)
    if once or json or not _is_terminal():
        if not (once or json):
            err.print("This is no terminal, so the page is printed once. `weir top --once` does so without this line.")
        monitor = Monitor(names, settings)
        monitor.closely(names[0] if len(names) == 1 else None)
        _print(monitor, json)
        return
    _show(Monitor(names, settings), every)


def _check(names: Sequence[str], settings: Settings) -> None:
    unknown = [name for name in names if name.partition("@")[0] not in settings.pipelines]
    if unknown:
        configured = ", ".join(sorted(settings.pipelines)) or "none"
        raise ConfigurationError(
            f"There is no pipeline {unknown[0]!r} in the configuration.", next=f"Configured pipelines: {configured}."
        )


def _is_terminal() -> bool:
    """Return whether a page can be shown and keys can be read."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not Console().is_dumb_terminal


def _print(monitor: Monitor, json: bool) -> None:
    monitor.begin()
    monitor.wait(_PATIENCE)
    monitor.collect(0.0)
    rows = screen.in_order(monitor.rows, "name")
    if json:
        shown: Top = {"at": datetime.now(UTC).isoformat(), "pipelines": [row.facts() for row in rows]}
        print_json(shown)
        return
    console = screen.console(width=None if sys.stdout.isatty() else _NO_TERMINAL_WIDTH)
    console.print(screen.plain(rows, console.width))


def _show(monitor: Monitor, every: float) -> None:
    """Show the page until somebody ends it."""
    from rich.live import Live

    from weir.cli.watching.keys import Keys

    console = screen.console(file=sys.stdout)
    page, due = ScreenChoice(), 0.0
    with ExitStack() as stack:
        ended = stack.enter_context(_ended_by_signals())
        # What an author's module prints, and what is logged, would stand in the middle of the page.
        stack.enter_context(redirect_stderr(io.StringIO()))
        stack.enter_context(redirect_stdout(io.StringIO()))
        try:
            keys = stack.enter_context(Keys())
            live = stack.enter_context(
                Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            )
            while not page.ended and not ended:
                if not page.paused and time.monotonic() >= due:
                    monitor.closely(page.selected if page.detail else None)
                    monitor.begin()
                    due = time.monotonic() + every
                monitor.collect(_PATIENCE)
                rows = screen.in_order(monitor.rows, page.by)
                shown = screen.shown(rows, page, console.width, console.height, every, monitor.trouble)
                live.update(shown, refresh=True)
                for key in keys.pressed(_TICK if monitor.at_rest else min(_TICK, 0.2)):
                    was = page
                    page = page.pressed(key, rows)
                    due = 0.0 if page.detail and page != was else due  # its listing is read at once
        except EOFError:
            pass


@contextmanager
def _ended_by_signals() -> Iterator[list[int]]:
    """Yield a list that is empty until the process is asked to end, so that the terminal is restored first.

    Ctrl-C too: a KeyboardInterrupt would come in the middle of anything, and is lost where Python cannot raise it.
    """
    caught: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # it would leave the terminal as it is now
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
