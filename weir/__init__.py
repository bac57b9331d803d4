"""Keyed state for Dagster and PySpark pipelines: what an author of a pipeline imports.

    from weir import Pipeline, State, Timestamp, agg, delta, files, stage, window

Each name is imported at its first use. `weir.testing` runs a stage in a test, `weir.dagster` has the definitions for a
Dagster project, and the command `weir` operates what runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weir.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        globals()[name] = getattr(import_module("weir.api"), name)
    except AttributeError as error:
        raise AttributeError(str(error).replace("weir.api", __name__)) from None
    return globals()[name]


def __dir__() -> list[str]:
    return [*globals(), *import_module("weir.api").__all__]
