"""Weir's loggers. They are structlog's, which is imported when the first event is logged and not before: with what it
imports itself it takes an eighth of `weir status`, which logs nothing."""

from __future__ import annotations

from typing import Any


class Logger:
    """A logger by name, with the methods of structlog's."""

    def __init__(self, name: str) -> None:
        self._name = name

    def debug(self, event: str, **values: Any) -> None:
        self._logger.debug(event, **values)

    def info(self, event: str, **values: Any) -> None:
        self._logger.info(event, **values)

    def warning(self, event: str, **values: Any) -> None:
        self._logger.warning(event, **values)

    def exception(self, event: str, **values: Any) -> None:
        """Log an error with the trace of the exception that is being handled."""
        self._logger.exception(event, **values)

    @property
    def _logger(self) -> Any:
        import structlog

        return structlog.get_logger(self._name)
