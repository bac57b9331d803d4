"""A pipeline by the name that the configuration gives it."""

from __future__ import annotations

import importlib
import sys

from configs.settings import PROJECT, Settings, load
from pipelines.runtime.definition import Pipeline
from state_ops.errors import ConfigurationError, PipelineError


def find(name: str) -> tuple[Pipeline, Settings]:
    """The pipeline that the configuration calls `name`, and the settings."""
    settings = load()
    return load_pipeline(name, settings), settings


def load_pipeline(name: str, settings: Settings) -> Pipeline:
    """Import one pipeline of the configuration."""
    if name not in settings.pipelines:
        known = ", ".join(sorted(settings.pipelines)) or "none"
        raise ConfigurationError(
            f"There is no pipeline {name!r} in the configuration.", next=f"Configured pipelines: {known}."
        )
    where = settings.pipelines[name].object
    module, _, attribute = where.partition(":")
    if str(PROJECT) not in sys.path:  # the command's own script does not start in the project's folder
        sys.path.insert(0, str(PROJECT))
    try:
        found = getattr(importlib.import_module(module), attribute or "pipeline")
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"The pipeline {name!r} cannot be imported: {error}",
            where=f"pipelines.{name}.object = {where}",
            next="Write it as module:attribute, importable from the project's folder.",
        ) from error
    if not isinstance(found, Pipeline):
        raise PipelineError(f"{where} is a {type(found).__name__}, not a Pipeline.", where=f"pipelines.{name}.object")
    if found.name != name:
        raise PipelineError(
            f"The pipeline at {where} is named {found.name!r}, the configuration calls it {name!r}.",
            next="Use one name: storage is found by it.",
        )
    return found
