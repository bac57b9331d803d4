"""The types that the fields of a file of JSON lines have by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.runtime.connectors.formats import texts
from pipelines.runtime.connectors.formats.json_lines import UnfitError, lines_of, loaded, parsed
from pipelines.runtime.connectors.formats.stream import Block, Bytes, last_line
from state_ops.arrow import frames
from state_ops.arrow.types import mapped

_DEEPEST = 64
_STEPS = np.zeros(256, np.int8)  # brackets inside texts count too: then Python looks at the lines
_STEPS[[ord("{"), ord("[")]] = 1
_STEPS[[ord("}"), ord("]")]] = -1
_TEXTS = (pa.date32(), pa.timestamp("us", tz="UTC"))


def inferred(file: Bytes, block_bytes: int) -> pa.Schema:
    """The fields of all lines in the order in which they come, with the type of the first value of each: whole numbers
    become numbers with a point where one has one, texts are dates or times where all of them are."""
    merged: pa.DataType = pa.struct([])
    moments = dict[str, set[pa.DataType]]()
    for block in file.blocks(block_bytes, last_line):
        for table in _tables(block):
            merged = _merged(merged, pa.struct(list(table.schema)))
            for path, leaf in _text_leaves(table):
                if leaf.null_count < len(leaf):
                    before = moments.get(path, set(_TEXTS))
                    moments[path] = {type for type in before if texts.fits(leaf, type)}
    return pa.schema([(field.name, _named(field.type, field.name, moments)) for field in merged])


def _tables(block: Block) -> Iterator[pa.Table]:
    """The lines with texts as texts, as far as they are JSON objects."""
    try:
        if _is_deep(block.data):
            raise UnfitError("too deep")
        schema = parsed(block.data, None).schema
        yield parsed(block.data, pa.schema([field.with_type(_as_text(field.type)) for field in schema]), "ignore")
        return
    except UnfitError:
        pass
    for _, text in lines_of(block):
        try:
            raw = loaded(text)
            yield pa.Table.from_pylist([raw], pa.schema(list(_type_of(raw))))
        except (UnfitError, pa.ArrowInvalid):
            continue


def _as_text(type: pa.DataType) -> pa.DataType:
    if pa.types.is_nested(type):
        return mapped(type, _as_text)
    return pa.string() if pa.types.is_temporal(type) else type


def _is_deep(data: bytes) -> bool:
    """Whether values may be nested deeper than a type should be, for which Arrow has no end."""
    array = np.frombuffer(data, np.uint8)
    steps = _STEPS[array]
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0)) > _DEEPEST


def _type_of(raw: Any, depth: int = 0) -> pa.DataType:
    """The type of a value as `loaded` gives it. Raises UnfitError if it is nested too deep."""
    if depth > _DEEPEST:
        raise UnfitError("it is nested too deep")
    if isinstance(raw, dict):
        return pa.struct([(name, _type_of(value, depth + 1)) for name, value in raw.items()])
    if isinstance(raw, list):
        type = pa.null()
        for value in raw:
            type = _merged(type, _type_of(value, depth + 1))
        return pa.list_(type)
    kinds = ((bool, pa.bool_()), (int, pa.int64()), (str, pa.string()), ((float, Decimal), pa.float64()))
    return next((type for kind, type in kinds if isinstance(raw, kind)), pa.null())


def _merged(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    if pa.types.is_null(first) or (first == pa.int64() and second == pa.float64()):
        return second
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        types = {field.name: field.type for field in first}
        for field in second:
            types[field.name] = _merged(types.get(field.name, pa.null()), field.type)
        return pa.struct(list(types.items()))
    if pa.types.is_list(first) and pa.types.is_list(second):
        return pa.list_(_merged(first.value_type, second.value_type))
    return first


def _text_leaves(table: pa.Table) -> Iterator[tuple[str, pa.Array]]:
    for name in table.column_names:
        for chunk in table.column(name).chunks:
            yield from _leaves(name, chunk)


def _leaves(path: str, array: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    if pa.types.is_struct(array.type):
        for field, values in zip(array.type, array.flatten(), strict=True):
            yield from _leaves(f"{path}.{field.name}", values)
    elif pa.types.is_list(array.type):
        yield from _leaves(f"{path}[]", array.flatten())
    elif pa.types.is_string(array.type):
        yield path, array


def _named(type: pa.DataType, path: str, moments: dict[str, set[pa.DataType]]) -> pa.DataType:
    if pa.types.is_struct(type):
        return pa.struct([(field.name, _named(field.type, f"{path}.{field.name}", moments)) for field in type])
    if pa.types.is_list(type):
        return pa.list_(_named(type.value_type, f"{path}[]", moments))
    if pa.types.is_null(type):
        return pa.string()
    fitting = moments.get(path, set()) if pa.types.is_string(type) else set()
    return next((moment for moment in _TEXTS if moment in fitting), frames.canonical_type(type))
