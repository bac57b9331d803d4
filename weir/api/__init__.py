"""All names that a pipeline's author imports, each with the module that has it.

from weir import Pipeline, State, Timestamp, agg, aggregate, deduplicate, delta, expect, files, stage, window

A name is imported at its first use, so that a command which needs one does not wait for the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from state_ops.arrow.unfit_values import UnfitValue
    from state_ops.errors import (
        ConfigurationError,
        DamageError,
        FencedError,
        InputError,
        LostError,
        PipelineError,
        TransientError,
        WeirError,
    )
    from state_ops.keyed.keyed_state import KeyedState, ValueState
    from state_ops.keyed.per_key.key_state import KeyState
    from state_ops.rows import aggregates as agg
    from state_ops.schema.annotations import renamed_from
    from state_ops.schema.descriptors import ListOf, MapOf
    from state_ops.schema.state_class import State, Timestamp
    from weir.api.arguments import side
    from weir.api.connectors import chain, sink, source
    from weir.api.delta_tables import delta
    from weir.api.expectations import expect, on_state, on_table
    from weir.api.facts import as_of
    from weir.api.file_sources import files
    from weir.api.kafka_topics import kafka
    from weir.api.lookups import lookup
    from weir.api.operators import aggregate, deduplicate, join, operator, window
    from weir.api.ranking import desc, top_n
    from weir.api.stages import stage
    from weir.api.stateless import select, union
    from weir.api.systems import foreach, generator, postgres
    from weir.definition.input import Input
    from weir.definition.operator import Epoch, Operator, OperatorKind, Shapes, Subtask
    from weir.definition.pipeline import Pipeline
    from weir.definition.sink import (
        Capabilities,
        Expiring,
        Published,
        Publisher,
        Rows,
        Sink,
        SinkOpening,
        TakingBack,
        no_rows,
    )
    from weir.definition.source import (
        Batch,
        Connector,
        Lag,
        Limits,
        Lost,
        Opening,
        Part,
        Planned,
        Position,
        Rejected,
        Source,
        SourceCapabilities,
    )
    from weir.definition.stage import Stage
    from weir.operators.functions.per_key import Fired

__all__ = [
    "Batch",
    "Capabilities",
    "ConfigurationError",
    "Connector",
    "DamageError",
    "Epoch",
    "Expiring",
    "FencedError",
    "Fired",
    "Input",
    "InputError",
    "KeyState",
    "KeyedState",
    "Lag",
    "Limits",
    "ListOf",
    "Lost",
    "LostError",
    "MapOf",
    "Opening",
    "Operator",
    "OperatorKind",
    "Part",
    "Pipeline",
    "PipelineError",
    "Planned",
    "Position",
    "Published",
    "Publisher",
    "Rejected",
    "Rows",
    "Shapes",
    "Sink",
    "SinkOpening",
    "Source",
    "SourceCapabilities",
    "Stage",
    "State",
    "Subtask",
    "TakingBack",
    "Timestamp",
    "TransientError",
    "UnfitValue",
    "ValueState",
    "WeirError",
    "agg",
    "aggregate",
    "as_of",
    "chain",
    "deduplicate",
    "delta",
    "desc",
    "expect",
    "files",
    "foreach",
    "generator",
    "join",
    "kafka",
    "lookup",
    "no_rows",
    "on_state",
    "on_table",
    "operator",
    "postgres",
    "renamed_from",
    "select",
    "side",
    "sink",
    "source",
    "stage",
    "top_n",
    "union",
    "window",
]

_NAMES = {
    **dict.fromkeys(("UnfitValue",), "state_ops.arrow.unfit_values"),
    **dict.fromkeys(
        (
            "ConfigurationError",
            "DamageError",
            "FencedError",
            "InputError",
            "LostError",
            "PipelineError",
            "TransientError",
            "WeirError",
        ),
        "state_ops.errors",
    ),
    **dict.fromkeys(("KeyedState", "ValueState"), "state_ops.keyed.keyed_state"),
    **dict.fromkeys(("KeyState",), "state_ops.keyed.per_key.key_state"),
    **dict.fromkeys(("renamed_from",), "state_ops.schema.annotations"),
    **dict.fromkeys(("ListOf", "MapOf"), "state_ops.schema.descriptors"),
    **dict.fromkeys(("State", "Timestamp"), "state_ops.schema.state_class"),
    **dict.fromkeys(("side",), "weir.api.arguments"),
    **dict.fromkeys(("as_of",), "weir.api.facts"),
    **dict.fromkeys(("chain", "sink", "source"), "weir.api.connectors"),
    **dict.fromkeys(("delta",), "weir.api.delta_tables"),
    **dict.fromkeys(("expect", "on_state", "on_table"), "weir.api.expectations"),
    **dict.fromkeys(("files",), "weir.api.file_sources"),
    **dict.fromkeys(("kafka",), "weir.api.kafka_topics"),
    **dict.fromkeys(("lookup",), "weir.api.lookups"),
    **dict.fromkeys(
        (
            "aggregate",
            "deduplicate",
            "join",
            "operator",
            "window",
        ),
        "weir.api.operators",
    ),
    **dict.fromkeys(("stage",), "weir.api.stages"),
    **dict.fromkeys(("select", "union"), "weir.api.stateless"),
    **dict.fromkeys(("foreach", "generator", "postgres"), "weir.api.systems"),
    **dict.fromkeys(("desc", "top_n"), "weir.api.ranking"),
    **dict.fromkeys(
        (
            "Epoch",
            "Operator",
            "OperatorKind",
            "Shapes",
            "Subtask",
        ),
        "weir.definition.operator",
    ),
    **dict.fromkeys(("Input",), "weir.definition.input"),
    **dict.fromkeys(("Pipeline",), "weir.definition.pipeline"),
    **dict.fromkeys(
        (
            "Capabilities",
            "Expiring",
            "Published",
            "Publisher",
            "Rows",
            "Sink",
            "SinkOpening",
            "TakingBack",
            "no_rows",
        ),
        "weir.definition.sink",
    ),
    **dict.fromkeys(
        (
            "Batch",
            "Connector",
            "Lag",
            "Limits",
            "Lost",
            "Opening",
            "Part",
            "Planned",
            "Position",
            "Rejected",
            "Source",
            "SourceCapabilities",
        ),
        "weir.definition.source",
    ),
    **dict.fromkeys(("Stage",), "weir.definition.stage"),
    **dict.fromkeys(("Fired",), "weir.operators.functions.per_key"),
}
"""By name, the module that has it; `agg` is a module itself."""


def __getattr__(name: str) -> Any:
    if name == "agg":
        value: Any = import_module("state_ops.rows.aggregates")
    elif name in _NAMES:
        value = getattr(import_module(_NAMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
