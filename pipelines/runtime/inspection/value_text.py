"""Values of state as JSON and as text."""

from __future__ import annotations

import json
import math
from typing import Any


def as_json(value: Any, **options: Any) -> str:
    """JSON that every parser takes: what it has no type for as `jsonable` says, and the numbers that it has not as the
    texts nan, inf, -inf."""
    try:
        return json.dumps(value, default=jsonable, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), default=jsonable, allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {_finite(name): _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def jsonable(value: Any) -> Any:
    """What JSON has no type for, as one that it has: bytes in hex, moments in ISO 8601, everything else as text."""
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def text_of(value: Any) -> str:
    """A value as all tables of ours show it, also inside of lists and structs: a moment as 2024-05-01 12:00:00+00:00,
    bytes in hex."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_inner(part)}' for name, part in value.items())}}}"
    if isinstance(value, list) and value and all(isinstance(entry, tuple) for entry in value):  # a map
        return f"{{{', '.join(f'{_inner(key)}: {_inner(part)}' for key, part in value)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inner, value))}]"
    if isinstance(value, bytes):
        return value.hex()
    return "" if value is None else str(value)


def _inner(value: Any) -> str:
    return "null" if value is None else text_of(value)
