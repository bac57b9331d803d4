"""The rule by which two floats count as equal: their first nine digits are.

Sums depend on the order in which rows arrive, so their last digits do too. A float is rounded to thirteen digits first:
sums that differ in their last digits, on both sides of a half, become one. Zero and NaN have no sign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from weir.inspection.database import quoted


def nine_digits(column: str) -> str:
    """Return SQL for the first nine digits of a number, as a text."""
    value = f"CAST({column} AS DOUBLE)"
    digits = f"format('{{:.8e}}', CAST(format('{{:.12e}}', {value}) AS DOUBLE) + 0.0)"
    return f"CASE WHEN isnan({value}) THEN 'nan' ELSE {digits} END"


def rounded_column(column: str, type: pa.DataType, depth: int = 0) -> str:
    """Return SQL for a column with the first nine digits of its floats, also of those in lists and structs."""
    if pa.types.is_floating(type):
        return nine_digits(column)
    if pa.types.is_struct(type):
        fields = [(quoted(of.name), f"{column}.{quoted(of.name)}", of.type) for of in type]
        compared = [(name, rounded_column(field, of, depth)) for name, field, of in fields]
        if [part for _, part in compared] == [field for _, field, _ in fields]:
            return column
        parts = ", ".join(f"{name} := {part}" for name, part in compared)
        return f"CASE WHEN {column} IS NULL THEN NULL ELSE struct_pack({parts}) END"
    if pa.types.is_list(type) or pa.types.is_large_list(type):
        item = f"__weir_item_{depth}"
        part = rounded_column(item, type.value_type, depth + 1)
        return column if part == item else f"[{part} FOR {item} IN {column}]"
    return column


def are_compared_as_floats(types: Sequence[pa.DataType]) -> bool:
    """Return whether two sides of a column, of other types perhaps, are numbers of which one is a float."""
    return any(map(pa.types.is_floating, types)) and all(map(is_number, types))


def is_number(type: pa.DataType) -> bool:
    """Return whether values of a type are numbers."""
    return bool(pa.types.is_integer(type) or pa.types.is_floating(type) or pa.types.is_decimal(type))


def rounded(value: Any) -> Any:
    """Return a value with the first nine digits of its floats, as texts; in lists and dicts too."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else f"{float(f'{value:.12e}') + 0.0:.8e}"
    if isinstance(value, dict):
        return {str(name): rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value
