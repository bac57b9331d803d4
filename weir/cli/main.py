"""The `weir` command. Exit codes: 0 done, 1 failed or found damage, 2 wrong usage or configuration."""

from __future__ import annotations

import ast
import atexit
import gc
import importlib.abc
import importlib.util
import logging
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn, TextIO, cast

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from state_ops import logs
from state_ops.errors import DISK_FULL, ConfigurationError, StageError, WeirError, look_there, plainly
from state_ops.extras import version
from state_ops.printable import printable
from state_ops.redaction import redacted
from state_ops.storage import disks
from weir.cli.console import err
from weir.cli.shell.completion import whole_words

_OPERATIONS = Path(__file__).parents[1] / "operations" / "declared"  # of which commands are made
_DECLARED = "declared"
_MODULES = {
    "run": "running",
    **dict.fromkeys(("stop", "resume"), _DECLARED),
    **dict.fromkeys(("status", "checkpoints"), "status"),
    "savepoint": _DECLARED,
    "savepoints": "status",
    **dict.fromkeys(("restore", "rewind", "seek"), _DECLARED),
    "fork": _DECLARED,
    **dict.fromkeys(("forks", "diff"), "branches"),
    "promote": _DECLARED,
    "backfill": "branches",
    **dict.fromkeys(("drill", "plan", "report"), "verify"),
    "debug": "debugging.debug",
    "explain": "debugging.explain",
    "ci": "pull_requests.ci",
    **dict.fromkeys(("prune", "cancel"), _DECLARED),
    "fsck": "fsck",
    "top": "watching.top",
    "metrics": "metrics",
    "state": "state",
    "schema": "schemas.schema",
    "new": "new",
    **dict.fromkeys((module.name for module in pkgutil.iter_modules([str(_OPERATIONS)])), _DECLARED),
}  # by command, in the order of the help

_GROUPS = {"state", "new"}  # that have commands of their own

# Commands that look and run nothing of what an author has written but his module.
_READING = {"status", "checkpoints", "savepoints", "forks", "prune", "fsck", "state", "top"}


@cache
def _command(name: str) -> Any:
    """Import a command's module, and return the command or the group of commands."""
    if name in _READING:  # NumPy's threads for linear algebra, of which nothing is asked here, spin when they begin
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if name not in _MODULES and name not in _others():
        raise KeyError(name)
    with _uncollected():
        if _MODULES.get(name, _DECLARED) == _DECLARED:
            from weir.cli.operations import command_of
            from weir.operations import declared

            command = _alone(command_of(declared.declared(name)))
        else:
            module = importlib.import_module(f"weir.cli.{_MODULES[name]}")
            command = typer.main.get_command(module.app) if name in _GROUPS else _alone(getattr(module, name))
    if name in _READING:
        _without_pandas()
    return command


def _alone(function: Callable[..., None]) -> Any:
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return typer.main.get_command(app)


def _others() -> dict[str, Any]:
    """Return the operations of other packages, by command. `weir.operations` is not imported for Weir's own commands."""
    from weir.operations import declared

    return declared.others()


def _names() -> list[str]:
    """Return the names of all commands, those of other packages last."""
    return [*_MODULES, *_others()]


def commands() -> dict[str, Any]:
    """Return all commands by name, those of groups too."""
    by_name: dict[str, Any] = {}
    for name in _names():
        command = _command(name)
        by_name |= {f"{name} {part}": of for part, of in getattr(command, "commands", {}).items()} or {name: command}
    return by_name


@contextmanager
def _uncollected() -> Iterator[None]:
    """Import without garbage collection: imported objects stay, so the collector need not look through them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _without_pandas() -> None:
    """Keep pyarrow from importing pandas, which it does at the first value of Python's that it converts.

    That takes longer than all else of a command that reads. pyarrow asks once in a process: here, where pandas cannot
    be imported. Who imports it later has it as ever, and pyarrow takes and makes its frames.
    """
    import pyarrow as pa

    class Absent(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> None:
            if name == "pandas":
                raise ModuleNotFoundError(name, name=name)

    absent = Absent()
    sys.meta_path.insert(0, absent)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(absent)


class _Commands(Mapping[str, Any]):
    """The commands by name.

    A command's module is imported when the command is asked for, because importing all of them takes twice as long as
    `weir status` takes to run.
    """

    def __getitem__(self, name: str) -> Any:
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_names())

    def __len__(self) -> int:
        return len(_names())


def _summary(name: str) -> str | None:
    """Return a command's help as its module's text has it, without importing that."""
    if name not in _MODULES:
        from weir.operations import declared

        return declared.declared(name).about
    file = _OPERATIONS / f"{name}.py"
    if _MODULES[name] != _DECLARED:
        spec = importlib.util.find_spec(f"weir.cli.{_MODULES[name]}")
        assert spec is not None and spec.origin is not None
        file = Path(spec.origin)
    for node in ast.parse(file.read_text("utf-8")).body:
        match node:
            case ast.FunctionDef(name=function) if function == name:
                return ast.get_docstring(node)
            case ast.Assign(targets=[ast.Name(id="app")], value=ast.Call(keywords=options)) if name in _GROUPS:
                return next(str(ast.literal_eval(option.value)) for option in options if option.arg == "help")
    return None


def _listed() -> dict[str, Any]:
    """Return the commands, with their help alone."""
    return {name: TyperCommand(name, help=_summary(name)) for name in _names()}


class _Group(TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "commands": _Commands()})

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """List the commands, which takes none of their modules."""
        self.commands = _listed()
        super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete a command's name, which takes none of their modules either."""
        self.commands = _listed()
        return super().shell_complete(ctx, incomplete)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is asked for, with logs as people want to see them."""
        _quiet_logs(bool(ctx.obj))
        return super().resolve_command(ctx, args)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"weir {version()}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool, typer.Option("--version", help="Print Weir's version and end.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Take the options that stand before a command."""


app = typer.Typer(
    cls=_Group,
    callback=_root,
    help="Keyed state for PySpark pipelines: exactly-once epochs, incremental snapshots, restores you can trust.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_INTERRUPTED = 130
_BYTES = re.compile(r"[\ud800-\udfff]")  # bytes of a word that its locale cannot decode
_SAID_WHEN_INTERRUPTED = "interrupted; the epoch in flight was discarded, everything committed stays"


def main() -> None:
    """Entry point: run the command, turn errors into messages and exit codes."""
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    with whole_words(os.environ):
        code = _guarded(_typed, debug)
    sys.exit(code)


def _typed(**options: Any) -> Any:
    """Run the command that was typed, and hand out all that it says. Raises WeirError where the standard output does
    not take that."""
    try:
        code = _called(**options)
        sys.stdout.flush()
        return code
    except (OSError, WeirError) as error:
        refused = next((cause for cause in disks.causes(error) if cause is _refused_output()), None)
        if not isinstance(refused, OSError):
            raise
        where = _name_of_output()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what waits would be refused again at the end
        if isinstance(refused, BrokenPipeError):  # its reader has seen enough, as `head` has
            return 0
        raise WeirError(
            f"The standard output does not take what the command says: {refused.strerror}.",
            where=f"standard output, {where}",
            next="Make room there, or send the output elsewhere. What the command has changed stays changed: look "
            "before you run it again.",
        ) from error


class _Output(FileIO):
    """The standard output of the process.

    Attributes:
        refused: The error with which it has refused what was written.
    """

    refused: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.refused = error
            raise


def _refused_output() -> OSError | None:
    output = getattr(sys.stdout, "buffer", None)
    raw = getattr(output, "raw", output)
    return raw.refused if isinstance(raw, _Output) else None


def _name_of_output() -> str:
    try:
        return str(Path(f"/proc/self/fd/{sys.stdout.fileno()}").readlink())
    except OSError:  # a system without /proc
        return "a file"


def _called(**options: Any) -> Any:
    """Call the command that was typed, whose words are texts also in a locale that knows ASCII alone."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ConfigurationError(
            "The folder in which this command was typed has been deleted.", next="Change to the project's folder."
        ) from error
    try:
        sys.argv[1:] = [os.fsencode(word).decode("utf-8") if _BYTES.search(word) else word for word in sys.argv[1:]]
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"A word of the command is not UTF-8: {printable(os.fsdecode(error.object))}.",
            next="Type it in UTF-8. A key that is not cannot be typed: `weir state sql` finds its row.",
        ) from error
    return app(**options)


def process() -> NoReturn:
    """Run `main` as a process of its own, and end it without tearing down native libraries.

    Arrow's threads may abort during that (apache/arrow#34314), and a command that succeeded would exit with 134.
    """
    code = 0
    if sys.stdout is sys.__stdout__:
        shown = cast(TextIOWrapper, sys.stdout)
        raw, at_once = _Output(shown.fileno(), "w", closefd=False), shown.write_through  # PYTHONUNBUFFERED
        output = cast(BufferedWriter, raw) if at_once else BufferedWriter(raw)
        sys.stdout = TextIOWrapper(
            output, shown.encoding, shown.errors, line_buffering=shown.line_buffering, write_through=at_once
        )
    for stream in (sys.stdout, sys.stderr):  # a character that a stream's encoding lacks is shown by its number
        if stream.encoding.lower() not in ("utf-8", "utf8"):
            cast(TextIOWrapper, stream).reconfigure(errors="backslashreplace")
    try:
        main()
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _guarded(command: Callable[..., Any], debug: bool) -> int:
    try:
        return int(command(standalone_mode=False, obj=debug) or 0)
    except WeirError as error:
        if _is_logged(error):
            return error.exit_code
        if debug:
            err.print(escape(_trace(error)))
        if isinstance(error, StageError) and error.traceback:
            err.print(escape(error.traceback.rstrip()))
        err.print(f"[bold red]error:[/] {escape(str(error))}")
        return error.exit_code
    except typer.Exit as done:
        if done.exit_code == _INTERRUPTED:  # what typer makes of a KeyboardInterrupt
            err.print(_SAID_WHEN_INTERRUPTED)
        return int(done.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        err.print(_SAID_WHEN_INTERRUPTED)
        return _INTERRUPTED
    except Exception as error:
        from deltalake.exceptions import DeltaError

        if hasattr(error, "format_message"):  # click's usage errors: typer carries its own copy of their classes
            if not error.format_message():  # a group of commands without a command: its help was printed
                return 2
            if _is_logged(error):
                return 2
            err.print(f"[bold red]usage:[/] {escape(error.format_message())}\n  next:  {escape(_help_of(error))}")
            return 2
        if _is_logged(error):
            return 1
        if debug:
            err.print(escape(_trace(error)))
            return 1
        if isinstance(error, OSError | DeltaError):
            disk = _full_disk(error)
            where = f"  where: {escape(disk)}\n" if disk is not None else ""
            step = look_there(error) if disk is None else f"Make room on that disk ({DISK_FULL})"
            err.print(f"[bold red]error:[/] {escape(plainly(error))}\n{where}  next:  {step}.")
            return 1
        err.print(
            f"[bold red]error:[/] {escape(plainly(error))}\n"
            "  next:  this was not foreseen; run the command again with --debug for the trace."
        )
        return 1


def _help_of(error: Exception) -> str:
    """Return the next step after a usage error: the help of the command that was typed."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "weir"
    lists = "lists the commands" if context is None or hasattr(context.command, "commands") else "has its arguments"
    return f"`{command} --help` {lists}."


def _is_logged(error: Exception) -> bool:
    """Return whether log lines are JSON: then the error that ended the command is JSON, too."""
    if not logs.is_json():
        return False
    facts = logs.facts_of(error)
    if isinstance(error, WeirError):
        facts |= {name: text for name in ("where", "next") if (text := getattr(error, name))}
        facts |= {"stage_exception": error.traceback} if isinstance(error, StageError) and error.traceback else {}
        logs.write("error", "weir", error.what, **facts)
    else:
        usage = getattr(error, "format_message", None)
        facts |= {"next": _help_of(error)} if usage is not None else {}
        logs.write("error", "weir", usage() if usage is not None else plainly(error), **facts)
    return True


def _trace(error: BaseException) -> str:
    """Return the whole trace, redacted: errors of libraries repeat what a server has answered."""
    return redacted("".join(traceback.format_exception(error))).rstrip()


def _full_disk(error: Exception) -> str | None:
    """Name the full disk that caused an error; None if no disk is full."""
    from weir.settings.configuration import load

    try:
        settings = load()
    except Exception:  # the settings cannot be read either: report the error at hand
        return disks.full(error, {})
    return disks.full(error, {"storage.root": settings.storage.root, "local.work_dir": settings.work_dir})


def _quiet_logs(debug: bool) -> None:
    handler = logging.StreamHandler(cast(TextIO, logs.Stderr()))
    handler.setFormatter(logs.Lines())
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, handlers=[handler])
    logs.catch_all()
    if not debug:
        # py4j shows a trace for Ctrl-C, and for errors that Weir reports itself.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        logging.getLogger("great_expectations").setLevel(logging.ERROR)
        # PySpark shows the JVM's trace for each plan that it refuses; Weir says which stage's, and why.
        for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if "structlog" in sys.modules:
        _to_stderr(sys.modules["structlog"], debug)
    else:
        sys.meta_path.insert(0, _ConfiguredStructlog(debug))


class _ConfiguredStructlog(importlib.abc.MetaPathFinder):
    """Configures structlog when something imports it, Weir or the author's module. Most commands that read never do."""

    def __init__(self, debug: bool) -> None:
        self._debug = debug

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != "structlog":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_configure(module: ModuleType) -> None:
                execute(module)
                _to_stderr(module, self._debug)

            spec.loader.exec_module = execute_and_configure  # type: ignore[method-assign]
        return spec


def _to_stderr(structlog: Any, debug: bool) -> None:
    level = logging.DEBUG if debug else logging.INFO
    if logs.is_json():
        logs.write_json(structlog, level)
        return
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=cast(TextIO, logs.Stderr())),
    )


if __name__ == "__main__":
    process()
