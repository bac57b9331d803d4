"""Stages that differ from others."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from weir.definition import Input, Readable, Stage, origin_of

_OF_STAGE, _OF_INPUT = ({field.name for field in fields(of)} for of in (Stage, Input))


def altered(stage: Stage, **parts: Any) -> Stage:
    """Return a stage with other parts, among them those of its operator, as `function`, and of its input."""
    of_input = {name: parts.pop(name) for name in list(parts) if name in _OF_INPUT}
    if "input" in parts or of_input:
        stage = with_input(stage, parts.pop("input", None), **of_input)
    operator = {name: parts.pop(name) for name in list(parts) if name not in _OF_STAGE}
    return replace(stage, operator=replace(stage.operator, **operator), **parts)


def with_input(stage: Stage, given: Readable | None = None, **parts: Any) -> Stage:
    """Return a stage of one input that reads another source, stage or output, or has other parts of its input."""
    (input,) = stage.inputs
    if given is not None:
        parts["origin"], parts["output"] = origin_of(given)
    return replace(stage, inputs=(replace(input, **parts),))
