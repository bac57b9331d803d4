"""A pipeline by the name that the configuration gives it."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal

from state_ops.errors import ConfigurationError, PipelineError, WeirError, first_line
from weir.definition import Expected, Gate, Pipeline, Stage
from weir.settings.configuration import PROJECT, PipelineSettings, Settings, load

# What a project's code imported while it had a copy of Weir in it, and what it imports since.
_MOVED = {
    "pipelines.api": "weir",
    **{f"pipelines.{name}": f"weir.{name}" for name in ("debugging", "state_reader", "state_writer", "testing")},
    "pipelines.runtime": "weir",
    "configs.settings": "weir.settings.configuration",
    "assets.factory": "weir.dagster.factory",
}


def find(name: str) -> tuple[Pipeline, Settings]:
    """Return the pipeline that the configuration calls `name`, or PIPELINE@BRANCH, and the settings that hold for
    it."""
    settings = load()
    return named(name, settings), settings.of(name.partition("@")[0])


def named(name: str, settings: Settings) -> Pipeline:
    """Return a pipeline by its name in the configuration, or a branch of it: PIPELINE@BRANCH."""
    name, at, branch = name.partition("@")
    pipeline = load_pipeline(name, settings)
    if not at:
        return pipeline
    from weir.operations.forks import branched

    return branched(pipeline, settings, branch)


def load_pipeline(name: str, settings: Settings) -> Pipeline:
    """Import one pipeline of the configuration, which may add gates to those in its code."""
    pipeline = _imported(name, settings)
    _check_caches(pipeline, settings)
    return _with_configured(pipeline, settings.pipelines[name])


def _imported(name: str, settings: Settings) -> Pipeline:
    if name not in settings.pipelines:
        configured = ", ".join(sorted(settings.pipelines)) or "none"
        raise ConfigurationError(
            f"There is no pipeline {name!r} in the configuration.", next=f"Configured pipelines: {configured}."
        )
    where = settings.pipelines[name].object
    module, _, attribute = where.partition(":")
    if str(PROJECT) not in sys.path:  # the command's own script does not start in the project's folder
        sys.path.insert(0, str(PROJECT))
    try:
        pipeline = getattr(_run_module(name, module), attribute or "pipeline")
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"The pipeline {name!r} cannot be imported: {error}",
            where=f"pipelines.{name}.object = {where}",
            next="Write it as module:attribute, importable from the project's folder.",
        ) from error
    if not isinstance(pipeline, Pipeline):
        raise PipelineError(
            f"{where} is a {type(pipeline).__name__}, not a Pipeline.",
            where=f"pipelines.{name}.object",
            next="Name the attribute that has the Pipeline, as module:attribute.",
        )
    if pipeline.name != name:
        raise PipelineError(
            f"The pipeline at {where} is named {pipeline.name!r}, the configuration calls it {name!r}.",
            next="Use one name: storage is found by it.",
        )
    return pipeline


def _run_module(pipeline: str, module: str) -> ModuleType:
    """Return the module, imported. Raises ImportError where there is none, and PipelineError, with the line, where its
    code raises."""
    try:
        return importlib.import_module(module)
    except WeirError:
        raise
    except (Exception, SystemExit) as error:  # who looks at several pipelines is not to end with one of them
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            raise
        if isinstance(error, SyntaxError):
            place = f"{error.filename}:{error.lineno}"
        else:  # the innermost statement of a module that was being run
            lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
            place = f"{lines[-1].filename}:{lines[-1].lineno}" if lines else module
        raise PipelineError(
            f"The code of the pipeline {pipeline!r} cannot be imported: {type(error).__name__}: {first_line(error)}",
            where=place,
            next=_moved(error) or "Correct the code there; with --debug the command shows the trace.",
        ) from error


def _moved(error: BaseException) -> str:
    """Return the new name to write if code imports a module of Weir by its old name, else an empty text.

    Example:
        >>> from weir.loading import _moved
        >>> _moved(ModuleNotFoundError("No module named 'pipelines.api'", name="pipelines.api"))
        'Weir is a package: write weir for pipelines.api (docs/how-to/project.md).'
    """
    if not isinstance(error, ImportError) or not error.name:
        return ""
    wanted = re.match(r"cannot import name '(\w+)'", str(error))
    old = f"{error.name}.{wanted[1]}" if wanted else error.name
    for before, now in _MOVED.items():
        if f"{old}.".startswith(f"{before}."):
            return f"Weir is a package: write {now}{old[len(before) :]} for {old} (docs/how-to/project.md)."
    return ""


def _check_caches(pipeline: Pipeline, settings: Settings) -> None:
    """Refuse a state cache for a stage that no pipeline of the configuration has. They share that section, so others
    are only imported for what this one does not know; one that cannot be leaves open whose it is."""
    uids = {pipeline.name: [stage.uid for stage in pipeline.stages]}
    unknown = settings.state.caches.keys() - set(uids[pipeline.name])
    for name in settings.pipelines if unknown else ():
        try:
            uids[name] = [stage.uid for stage in _imported(name, settings).stages]
        except Exception:
            return
    unknown -= {uid for stages in uids.values() for uid in stages}
    if unknown:
        raise ConfigurationError(
            f"A state cache is configured for the stage {min(unknown)!r}, which no pipeline has.",
            where=f"state.caches.{min(unknown)}",
            next="Correct the uid, or remove it. Stages are: "
            + "; ".join(f"{', '.join(stages)} ({name})" for name, stages in uids.items())
            + ".",
        )


def _with_configured(pipeline: Pipeline, configured: PipelineSettings) -> Pipeline:
    """Return the pipeline with the gates and expectations of the configuration behind its own. Raises
    ConfigurationError that names the key."""
    where = f"pipelines.{pipeline.name}"
    unknown = sorted(configured.gates.keys() - {stage.uid for stage in pipeline.stages})
    if unknown:
        raise ConfigurationError(
            f"The pipeline {pipeline.name} has no stage {unknown[0]!r}.",
            where=f"{where}.gates.{unknown[0]}",
            next=f"Its stages are: {', '.join(stage.uid for stage in pipeline.stages)}.",
        )
    expected = [
        (f"{where}.on_restore.{number}", expectation) for number, expectation in enumerate(configured.on_restore)
    ]
    if not (configured.gates or expected):
        return pipeline
    stages: dict[str, Stage] = {}
    for stage in pipeline.stages:  # each after the one that it reads
        more = [
            _gate(
                f"{where}.gates.{stage.uid}.{number}",
                gate.expect,
                gate.on_failure,
                gate.of,
                gate.arguments,
                gate.quarantine_at_most,
            )
            for number, gate in enumerate(configured.gates.get(stage.uid, ()))
        ]
        with _named(f"{where}.gates.{stage.uid}"):
            stages[stage.uid] = replace(stage.reading(stages), gates=(*stage.gates, *more))
    asked = list(pipeline.on_restore)
    for key, expectation in expected:
        of: Literal["state", "table"] = "table" if expectation.state is None else "state"
        gate = _gate(key, expectation.expect, expectation.on_failure, "rows", expectation.arguments)
        asked.append(Expected(of, str(expectation.state or expectation.table), gate))
    with _named(f"{where}.on_restore"):
        return replace(pipeline, stages=tuple(stages.values()), on_restore=tuple(asked))


def _gate(
    where: str,
    expectation: str,
    on_failure: str,
    of: str,
    arguments: Mapping[str, Any],
    at_most: float | None = None,
) -> Gate:
    with _named(where):
        return Gate(expectation, tuple(sorted(arguments.items())), on_failure, of, at_most)


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Raise an error of a definition as one of the configuration, with its key."""
    try:
        yield
    except PipelineError as error:
        raise ConfigurationError(error.what, where=key, next=error.next) from error
