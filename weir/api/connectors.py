"""The functions with which a pipeline takes a source or a sink by name, and reads one source after another.

docs/how-to/connectors.md shows how to write both, and `weir.testing` has the suites that they must pass.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from state_ops.errors import ConfigurationError, PipelineError
from weir.definition.sink import Sink
from weir.definition.source import Source, start_of


def chain(
    history: Source, live: Source, *, name: str | None = None, event_time: str | None = None, **more: Any
) -> Source:
    """Read a bounded history to its end, then a live source with the same columns.

    Args:
        history: The source that is read first: a table, a query, a topic; not `files(...)`.
        live: The source that is read from then on, likewise. Its start is found when the history begins.
        name: The name under which checkpoints know the chain; by default that of the live source.
        event_time: The column of both that drives the watermark; by default that of the live source.
        **more: Arguments of every source: on_bad, on_lost, idle_after, max_ahead, max_future, archive, evolve.

    Raises:
        PipelineError: One of the two reads files where they lie.

    Example:
        >>> import pyarrow as pa
        >>> from weir import chain, delta, kafka
        >>> history = delta.table("{warehouse}/clicks", event_time="at")
        >>> live = kafka("clicks", servers="localhost:9092", schema={"at": pa.timestamp("us", "UTC")}, event_time="at")
        >>> clicks = chain(history, live)
        >>> clicks.name, clicks.event_time
        ('clicks', 'at')
    """
    from weir.connectors.chained import ChainedSource

    for chained in (history, live):
        if (read := chained.capabilities.files) is not None:
            raise PipelineError(
                f"A chain cannot have the files of {read.pattern} in it.",
                where=f"source {chained.name}",
                next="Let a pipeline append their rows to a table (delta.append), and chain that (delta.table).",
            )
    return ChainedSource(
        name=name or live.name, event_time=event_time or live.event_time, history=history, live=live, **more
    )


Definition = TypeVar("Definition")


def source(kind: str, **arguments: Any) -> Source:
    """Return a source that an installed package brings.

    Args:
        kind: The name of the source's entry point in the group `weir.sources`.
        **arguments: The source's own arguments, and those of every source: name, event_time, start, on_bad, on_lost,
            connection, ...

    Raises:
        ConfigurationError: No installed package brings it, or it cannot be imported.
        PipelineError: It does not take these arguments.

    Example:
        >>> from weir import ConfigurationError, source
        >>> try:
        ...     source("rabbit", name="orders", queue="orders")
        ... except ConfigurationError as error:
        ...     print(error.what)
        No installed package brings 'rabbit'.
    """
    if "start" in arguments:
        arguments["start"] = start_of(arguments["start"])
    common = frozenset(field.name for field in dataclasses.fields(Source))
    return definition_of("weir.sources", kind, arguments, Source, common)


def sink(kind: str, **arguments: Any) -> Sink:
    """Return a sink that an installed package brings.

    Args:
        kind: The name of the sink's entry point in the group `weir.sinks`.
        **arguments: The sink's own arguments, and those of every sink: name, connection.

    Raises:
        ConfigurationError: No installed package brings it, or it cannot be imported.
        PipelineError: It does not take these arguments.

    Example:
        >>> from weir import ConfigurationError, sink
        >>> try:
        ...     sink("shelf", name="orders")
        ... except ConfigurationError as error:
        ...     print(error.what)
        No installed package brings 'shelf'.
    """
    return definition_of("weir.sinks", kind, arguments, Sink)


def definition_of(
    group: str,
    name: str,
    arguments: Mapping[str, Any],
    expected: type[Definition],
    common: Collection[str] = (),
) -> Definition:
    """Return the definition that the entry point makes of the arguments.

    The entry point leads to the definition's class, or to a function.

    Args:
        common: Arguments that every definition has, also where the function does not take them.

    Raises:
        ConfigurationError: No installed package brings it, or it cannot be imported.
        PipelineError: It does not take these arguments, or makes something else.
    """
    installed = entry_points(group=group)
    if name not in installed.names:
        raise ConfigurationError(
            f"No installed package brings {name!r}.",
            where=f"entry points {group}",
            next=f"Install the package that has it; there are: {', '.join(sorted(installed.names)) or 'none'}.",
        )
    where = f"{group}: {name} = {installed[name].value}"
    try:
        make = installed[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"{name!r} cannot be imported: {error}", where=where, next="Install its package anew."
        ) from error
    rest = {key: value for key, value in arguments.items() if key in common and not _takes(make, key)}
    try:
        definition = make(**{key: value for key, value in arguments.items() if key not in rest})
    except TypeError as error:
        raise PipelineError(f"{name!r} does not take these arguments: {error}", where=where) from error
    if not isinstance(definition, expected):
        raise PipelineError(
            f"{name!r} makes a {type(definition).__name__}, which is no {expected.__name__}.", where=where
        )
    return dataclasses.replace(definition, **rest) if rest else definition  # type: ignore[type-var]


def _takes(make: Callable[..., object], argument: str) -> bool:
    """Return whether a class or a function has an argument of this name, or takes any."""
    parameters = inspect.signature(make).parameters
    return argument in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
