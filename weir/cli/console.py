"""The parts that commands share: two consoles, common arguments, the course of plan, question and answer, tables, JSON."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from state_ops import logs
from state_ops.errors import ConfigurationError
from state_ops.facts import in_json_types
from state_ops.printable import on_one_line, printable
from state_ops.value_text import as_json
from weir.cli.shell import completion

C = TypeVar("C", bound=Callable[..., Any])


class ErrorStream(logs.Stderr):
    """Standard error, for people. With JSON log lines, each thing that is said there is one too."""

    @property
    def encoding(self) -> str:
        return sys.stderr.encoding

    def write(self, text: str) -> int:
        stream = _heard[-1] if _heard else sys.stderr
        if not logs.is_json():
            return stream.write(text)
        plain = _ANSI.sub("", text).strip()
        if plain:
            stream.write(logs.line("info", "weir", plain) + "\n")
            stream.flush()
        return len(text)

    def isatty(self) -> bool:
        return sys.stderr.isatty()


class _Prints(ErrorStream):
    """Takes what authors' code prints, for stderr, while stdout is for data alone.

    Attributes:
        stdout: Where the data go.
    """

    def __init__(self, stdout: TextIO) -> None:
        self.stdout = stdout

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)  # a file's other methods, which authors' code may call


@contextmanager
def data_alone() -> Iterator[None]:
    """Keep stdout for data: what authors' code prints while the `with` block lasts goes to stderr."""
    with redirect_stdout(cast(TextIO, _Prints(_stdout()))):
        yield


@contextmanager
def handing_out() -> Iterator[None]:
    """Write data to stdout while the `with` block lasts, also within `data_alone`."""
    with redirect_stdout(_stdout()):
        yield


@contextmanager
def hushed() -> Iterator[None]:
    """Drop all that this process and those that it starts write to stdout and stderr while the `with` block lasts: log
    lines, prints of authors' code, the JVM's own lines. Only what commands say by `err` reaches stderr."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    copy = os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors="backslashreplace", buffering=1)
    with copy, Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        _heard.append(copy if _is_process_stderr() else sys.stderr)
        try:
            for number in kept:
                os.dup2(nowhere.fileno(), number)
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield
        finally:
            _heard.pop()
            for number, descriptor in kept.items():
                os.dup2(descriptor, number)
                os.close(descriptor)


def _is_process_stderr() -> bool:
    """Return whether sys.stderr writes to the descriptor of the process: a test runner may have put another stream
    there."""
    try:
        return sys.stderr.fileno() == 2
    except (AttributeError, OSError, ValueError):
        return False


def _stdout() -> TextIO:
    return sys.stdout.stdout if isinstance(sys.stdout, _Prints) else sys.stdout


def is_for_programs(context: typer.Context, value: Any) -> Any:
    """Keep stdout for data until the command ends, if an option (`--json`, or a `--format` but table) asks for them."""
    if value not in (False, "table") and not context.resilient_parsing:
        context.find_root().with_resource(data_alone())  # which is left also where another argument is refused
    return value


class _Screen(Console):
    """A console on which texts from elsewhere (values, names of files, messages of libraries) only show. Escape
    sequences are those of the console's own styles."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        shown = (each if each.control else Segment(printable(each.text), each.style) for each in buffer)
        return super()._render_buffer(shown)


def _open_streams() -> None:
    """Let what is said go nowhere where the caller has closed a stream (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115


_open_streams()
out = _Screen(highlight=False, emoji=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
_heard: list[TextIO] = []  # where `err` writes while all else is hushed
err = _Screen(file=cast(TextIO, ErrorStream()), highlight=False, emoji=False, soft_wrap=True)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LIVE_SECONDS, _LOOK_SECONDS = 0.5, 0.2
_FIRST_LINE_SECONDS, _NEXT_LINE_SECONDS = 2.0, 30.0
Name = Annotated[
    str,
    typer.Argument(
        help="The pipeline's name in the configuration.", metavar="PIPELINE", autocompletion=completion.pipelines
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Go on despite the obstacles that are shown. A new obstacle ends the command, with nothing changed.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do it without asking.")]
AtCheckpoint = Annotated[
    int | None,
    typer.Option(
        "--checkpoint",
        "--at",
        metavar="N",
        help="At this checkpoint; by default the newest.",
        autocompletion=completion.checkpoints,
    ),
]
AtSavepoint = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="At the checkpoint of this savepoint.", autocompletion=completion.savepoints),
]
Json = Annotated[
    bool, typer.Option("--json", callback=is_for_programs, help="Print one JSON document and nothing else.")
]


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr what the command waits for, and for how long: on a terminal as it goes, elsewhere a line after two
    seconds and one every half minute. A command that is quick shows nothing.

    Yields:
        What says from now on something else, by which one sees that it goes on.
    """
    doing, done = [what], threading.Event()
    show = _live if err.is_terminal and not logs.is_json() else _lines
    shown = threading.Thread(target=show, args=(doing, done), daemon=True)
    shown.start()
    try:
        yield lambda text: doing.__setitem__(0, text)
    finally:
        done.set()
        shown.join()


def _live(doing: Sequence[str], done: threading.Event) -> None:
    """Show one line, and erase it at the end. doing: Returns the text of the line, which may change."""
    if done.wait(_LIVE_SECONDS):
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task(escape(doing[0]), total=None)
        while not done.wait(_LOOK_SECONDS):
            progress.update(task, description=escape(doing[0]))


def _lines(doing: Sequence[str], done: threading.Event) -> None:
    """Show the same text in lines without control characters, as logs need them."""
    began, pause = time.monotonic(), _FIRST_LINE_SECONDS
    while not done.wait(pause):
        err.print(f"{escape(doing[0])}: {time.monotonic() - began:.0f} s")
        pause = _NEXT_LINE_SECONDS


def proceeds(
    show: Callable[[], None],
    facts: Any,
    *,
    dry_run: bool,
    json: bool,
    check: Callable[[], None] | None = None,
    ask: str | None = None,
    yes: bool = False,
) -> bool:
    """Show a command's plan, check it, ask, and return whether the command goes on. A dry run ends here.

    Args:
        show: Prints the plan for people.
        facts: The plan as --json prints it where nothing is done.
        dry_run: The command's option, like `json` and `yes`.
        check: Raises an error for obstacles that nobody has accepted.
        ask: The verb of the question. With None nobody is asked.
    """
    if not json:
        show()
    elif dry_run:
        print_json(facts)
    if dry_run:
        return False
    if check is not None:
        check()
    if ask is not None:
        confirm(ask, yes=yes, json=json)
    return True


def answer(json: bool, facts: Any, *sentences: str) -> None:
    """Print what a command saw or did: its facts as one JSON document, or sentences for people."""
    if json:
        print_json(facts)
    else:
        for sentence in sentences:
            out.print(sentence)


def print_table(rows: Iterable[Sequence[str]], titles: Sequence[str] = (), right: Collection[str] = ()) -> None:
    """Print rows in columns.

    Args:
        rows: Their cells, which may have rich's markup. Each is shown on one line.
        titles: What stands above the columns; without titles there is no such line.
        right: The titles of the columns that are aligned to the right.
    """
    table = Table(box=None, show_header=bool(titles), padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(on_one_line(title), justify="right" if title in right else "left")
    for row in rows:
        table.add_row(*map(on_one_line, row))
    out.print(table)


def print_obstacles(obstacles: Iterable[str]) -> None:
    for obstacle in obstacles:
        out.print(f"[yellow]obstacle[/]  {escape(obstacle)}")


def confirm(what: str, *, yes: bool, json: bool) -> None:
    """Ask on a terminal whether to go on. The answer no ends the command with exit code 1.

    Args:
        what: The verb of the question.
        yes, json: The command's options.

    Raises:
        ConfigurationError: Nobody can be asked, and --yes is missing.
    """
    if yes:
        return
    if json or not sys.stdin.isatty():
        raise ConfigurationError("Nobody can be asked here.", next=f"Give --yes to {what} without a question.")
    if not typer.confirm(f"{what.capitalize()}?", err=True):
        err.print("Nothing was changed.")
        raise typer.Exit(1)


def print_json(value: Any) -> None:
    with handing_out():
        sys.stdout.write(as_json(in_json_types(value), indent=2) + "\n")


def prints(*kinds: Any) -> Callable[[C], C]:
    """Say of which type the result is that a command prints with `--json`: `weir schema` describes it.

    Args:
        *kinds: One of these. A text is "module:Class" of a module that the command itself imports only when it runs.
    """

    def marked(command: C) -> C:
        command.prints = kinds  # type: ignore[attr-defined]
        return command

    return marked


def short(path: str) -> str:
    """Return a local path, relative to the working directory if it lies below it."""
    here = f"{Path.cwd()}/"
    return path.removeprefix(here)


def no_directory(*directories: str) -> str:
    """Say that directories do not exist, in words that nobody takes for empty directories."""
    return f"nothing: {' and '.join(map(short, directories))} does not exist"
