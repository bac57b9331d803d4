"""Weir's loggers, and the form of their lines: for people, or one JSON object a line (`logging.format: json`).

Loggers are structlog's, which is imported when the first event is logged and not before: with what it imports itself it
takes an eighth of `weir status`, which logs nothing. Likewise nobody asks for the form before there is a line to write.

A JSON line has `timestamp`, `level`, `logger` and `event`, then the event's own fields; of an error also `error` and
`exception`, its trace. Texts are redacted, whoever logged them. Letters beyond ASCII are escaped: then a line can be
written whatever the encoding of the stream, and is JSON all the same.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from types import TracebackType
from typing import Any

from state_ops.errors import ConfigurationError
from state_ops.printable import in_json, printable, unforged
from state_ops.redaction import redacted

FORMAT = "WEIR_LOGGING__FORMAT"
"""The variable that overrides `logging.format`, and tells it to processes that read no settings, as Spark's workers."""
JSON = "json"
_GONE = "***"  # as `redacted` has it in texts
_SETTINGS_OF_STRUCTLOG = frozenset({"event", "exc_info", "stack_info", "stack"})
_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_adopted: list[str] = []
_followed: list[Callable[[], str]] = []  # at most one
_before: dict[str, Callable[..., object]] = {}


class Logger:
    """A logger by name, with the methods of structlog's."""

    def __init__(self, name: str) -> None:
        self._name = name

    def debug(self, event: str, **values: Any) -> None:
        self._write("debug", event, values)

    def info(self, event: str, **values: Any) -> None:
        self._write("info", event, values)

    def warning(self, event: str, **values: Any) -> None:
        self._write("warning", event, values)

    def error(self, event: str, **values: Any) -> None:
        self._write("error", event, values)

    def exception(self, event: str, **values: Any) -> None:
        """Log an error with the trace of the exception that is being handled."""
        self._write("exception", event, values)

    def _write(self, level: str, event: str, values: dict[str, Any]) -> None:
        if not is_json():  # whose texts are escaped
            event, values = unforged(event), {name: _only_shown(value) for name, value in values.items()}
        getattr(self._logger, level)(event, **values)

    @property
    def _logger(self) -> Any:
        import structlog

        if not structlog.is_configured() and is_json():
            write_json(structlog)
        return structlog.get_logger(self._name)


def _only_shown(value: Any) -> Any:
    """Return a field of a line for people, of which no character does something."""
    return printable(value) if isinstance(value, str) else value


def is_json() -> bool:
    """Return whether log lines are JSON in this process, by the variable, by what the process has adopted, else by the
    settings that it follows."""
    chosen = os.environ.get(FORMAT)
    if chosen is None:
        chosen = _adopted[0] if _adopted else _configured(os.environ.get("WEIR_CONFIG"), os.environ.get("WEIR_ENV"))
    return chosen == JSON


def follow(configured: Callable[[], str]) -> None:
    """Ask a function for `logging.format` where neither the variable nor `adopt` says it.

    Args:
        configured: Returns "json" or "console". A ConfigurationError of its counts as "console".
    """
    _followed[:] = [configured]
    _configured.cache_clear()


@lru_cache
def _configured(*_: str | None) -> str:
    """Return `logging.format` of the settings that these two variables choose."""
    try:
        return _followed[0]() if _followed else "console"
    except ConfigurationError:  # whatever needs the settings says what is wrong with them
        return "console"


def adopt(format: str | None = None) -> None:
    """Give all that this process logs the form of its settings: Weir's lines, those of other loggers, warnings, and
    errors that nobody has caught. For processes that Weir does not begin itself; those for people stay as they are.

    Args:
        format: `logging.format`; None: what the variable says.
    """
    if os.environ.get(FORMAT, format) != JSON:
        return
    import structlog

    if FORMAT not in os.environ:
        _adopted[:] = [JSON]
    catch_all()
    if not structlog.is_configured():
        write_json(structlog)
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler(Stderr())
        handler.setFormatter(Lines())
        logging.getLogger().addHandler(handler)


def catch_all() -> None:
    """Let warnings and errors that nobody has caught be JSON lines, in a process whose lines are; others are shown as
    ever."""
    hooks = (
        (warnings, "showwarning", _warned),
        (sys, "excepthook", _uncaught),
        (threading, "excepthook", _thread_failed),
    )
    for module, name, ours in hooks:
        if getattr(module, name) is not ours:
            _before[ours.__name__] = getattr(module, name)
            setattr(module, name, ours)


def _warned(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    if file is not None or not is_json():
        _before["_warned"](message, category, filename, lineno, file, line)
    else:
        where = f"{filename}:{lineno}"
        write("warning", "py.warnings", str(message), category=category.__name__, where=where)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if is_json():
        write("critical", "python", "an error that nobody has caught", **facts_of(error))
    else:
        _before["_uncaught"](kind, error, trace)


def _thread_failed(args: threading.ExceptHookArgs) -> None:
    if is_json() and args.exc_value is not None:
        name = args.thread.name if args.thread is not None else None
        write("critical", "python", "a thread has failed", thread=name, **facts_of(args.exc_value))
    else:
        _before["_thread_failed"](args)


def write_json(structlog: Any, level: int = logging.INFO) -> None:
    """Let structlog write JSON lines to stderr from a level on."""
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, _rendered],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_Lines,
        cache_logger_on_first_use=False,
    )


def write(level: str, logger: str, event: str, **fields: Any) -> None:
    """Write one JSON line to stderr, whatever the form of others is."""
    _write(line(level, logger, event, **fields))


def line(level: str, logger: str, event: str, **fields: Any) -> str:
    """Return what `write` writes."""
    return _line(datetime.now(UTC), level, logger, event, fields)


def as_json(fields: Mapping[str, Any]) -> str:
    """Return an object on one line, redacted. What JSON has no type for is text, and a number that is none is null."""
    return in_json(json.dumps(_plain(fields), allow_nan=False))


def facts_of(error: BaseException) -> dict[str, str]:
    """Return what a line says of an error."""
    return {"error": type(error).__name__, "exception": "".join(traceback.format_exception(error)).rstrip()}


class Stderr:
    """A stream that writes to whatever sys.stderr is at that moment: test runners and Dagster replace it."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class Lines(logging.Formatter):
    """The form of lines of Python's own loggers."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one JSON object, or its message alone for people."""
        if not is_json():
            return printable(super().format(record))
        more = {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD}
        if record.exc_info is not None and record.exc_info[1] is not None:
            more |= facts_of(record.exc_info[1])
        moment = datetime.fromtimestamp(record.created, UTC)
        return _line(moment, record.levelname.lower(), record.name, record.getMessage(), more)


class _Lines:
    """The writer of structlog for the lines of one logger."""

    def __init__(self, name: str = "python") -> None:
        self.name = name

    def __getattr__(self, method: str) -> Callable[[str], None]:
        """Return the method of a level: all levels behave alike here."""
        if method.startswith("_"):
            raise AttributeError(method)
        return _write


def _rendered(logger: Any, method: str, event: Mapping[str, Any]) -> str:
    """Return a structlog event as a line."""
    more = {name: value for name, value in event.items() if name not in _SETTINGS_OF_STRUCTLOG}
    error = event.get("exc_info")
    if isinstance(error, tuple):
        error = error[1]
    elif error and not isinstance(error, BaseException):
        error = sys.exc_info()[1]
    more |= facts_of(error) if error else {}
    return _line(datetime.now(UTC), method, getattr(logger, "name", "python"), event.get("event", ""), more)


def _line(moment: datetime, level: str, logger: str, event: Any, more: Mapping[str, Any]) -> str:
    """Return a line. What an event calls like a field of every line gets an underscore behind its name."""
    fields = {"timestamp": _iso(moment), "level": level, "logger": logger, "event": event}
    return as_json(fields | {f"{name}_" if name in fields else name: value for name, value in more.items()})


def _write(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # at once: lines of several threads do not mix
    sys.stderr.flush()


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _is_secret(name: Any, value: Any) -> bool:
    """Return whether a field holds what is left out of texts for the name that stands before it."""
    return isinstance(value, str | bytes) and _names_secret(str(name))


@lru_cache(1024)
def _names_secret(name: str) -> bool:
    value = "a-value-0123"
    return value not in redacted(f'{name}="{value}"')


def _plain(value: Any) -> Any:
    """Return a value as JSON may have it."""
    if isinstance(value, str):
        return redacted(str(value))
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _GONE if _is_secret(name, item) else _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return redacted(str(value))
