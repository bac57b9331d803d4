"""Values as people read them: as JSON and as text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from state_ops.printable import in_json


def as_json(value: Any, **options: Any) -> str:
    """JSON that every parser takes, and a terminal: what it has no type for as `jsonable` says, the numbers that it has
    not as the texts nan, inf, -inf, and characters that do something escaped."""
    try:
        return in_json(json.dumps(value, default=jsonable, allow_nan=False, **options))
    except ValueError:
        return in_json(json.dumps(_finite(value), default=jsonable, allow_nan=False, **options))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {_finite(name): _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def jsonable(value: Any) -> Any:
    """Return what JSON has no type for, as one that it has: bytes in hex, moments in ISO 8601, everything else as
    text."""
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def text_of(value: Any) -> str:
    """Return a value as all tables of ours show it, also inside of lists and structs: a moment as 2024-05-01
    12:00:00+00:00, bytes in hex."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_inner(part)}' for name, part in value.items())}}}"
    if isinstance(value, list) and value and all(isinstance(entry, tuple) for entry in value):  # a map
        return f"{{{', '.join(f'{_inner(key)}: {_inner(part)}' for key, part in value)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inner, value))}]"
    if isinstance(value, bytes):
        return value.hex()
    return "" if value is None else str(value)


def literal(value: Any) -> str:
    """Return a value within a sentence, as JSON writes it: texts and moments in quotation marks, null, true, a list in
    brackets."""
    return json.dumps(plain(value), ensure_ascii=False)


def plain(value: Any) -> Any:
    """Return a value in JSON's types; what it has no type for, as `text_of` says. A set is a list whose order is the
    same in every process."""
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays
        value = value.tolist()
    if value is None or type(value).__name__ == "NAType":  # pandas' null
        return None
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {_inner(key): plain(part) for key, part in value.items()}
    if isinstance(value, Set):
        parts = [plain(part) for part in value]
        return sorted(parts) if all(isinstance(part, int | float) for part in parts) else sorted(parts, key=literal)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain(part) for part in value]
    return text_of(value)


def _inner(value: Any) -> str:
    return "null" if value is None else text_of(value)
