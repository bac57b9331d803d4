"""Stages that differ from others."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from weir.definition import Stage

_OF_STAGE = {field.name for field in fields(Stage)}


def altered(stage: Stage, **parts: Any) -> Stage:
    """Return a stage with other parts, among them those of its operator, as `function`."""
    operator = {name: parts.pop(name) for name in list(parts) if name not in _OF_STAGE}
    return replace(stage, operator=replace(stage.operator, **operator), **parts)
