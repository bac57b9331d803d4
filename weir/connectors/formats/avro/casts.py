"""Values of Avro in the types that a source declares: each stays itself, or is found not to fit."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_ops.arrow import frames
from state_ops.arrow.nested import elements, elements_type
from weir.connectors.formats.avro.avro_schema import are_alike
from weir.connectors.formats.avro.values import offsets_of, whole
from weir.connectors.formats.texts import NOWHERE, converted

_ALL_WHOLE = pa.decimal128(19, 0)  # holds each int64


def cast(array: pa.Array, type: pa.DataType) -> tuple[pa.Array, np.ndarray]:
    """Values in a canonical type, and at which of them there is none, ascending: null stands there."""
    try:
        canonical = whole(frames.canonical(pa.table({"": array})).column(0))
        return _as(canonical, type).cast(type), NOWHERE
    except pa.ArrowNotImplementedError:  # no value of the one type is any of the other
        return pa.nulls(len(array), type), np.flatnonzero(array.is_valid())
    except pa.ArrowInvalid:
        if len(array) > 1:
            middle = len(array) // 2
            # Taken, since a slice would have the elements of all lists that it was cut from converted.
            first, bad = cast(array.take(np.arange(middle)), type)
            second, more = cast(array.take(np.arange(middle, len(array))), type)
            return pa.concat_arrays([first, second]), np.concatenate([bad, middle + more])
        return pa.nulls(1, type), np.zeros(1, np.int64)


def _as(array: pa.Array, type: pa.DataType) -> pa.Array:
    """Return the values in another canonical type. Fields of records are taken by name.

    Raises:
        pa.ArrowInvalid: A value is none of that type.
        pa.ArrowNotImplementedError: No value can be.
    """
    if array.type == type or pa.types.is_null(array.type):
        return array if array.type == type else pa.nulls(len(array), type)
    mask = array.is_null() if array.null_count else None
    if pa.types.is_struct(array.type) and pa.types.is_struct(type):
        stored = dict(zip(array.type.names, array.flatten(), strict=True))
        parts = [_as(stored.get(field.name, pa.nulls(len(array))), field.type) for field in type]
        return pa.StructArray.from_arrays(parts, names=type.names, mask=mask)
    if pa.types.is_nested(array.type) and are_alike(array.type, type):
        values, counts = elements(array)
        offsets, values = offsets_of(counts), _as(values, elements_type(type).type)
        if pa.types.is_map(type):
            return pa.MapArray.from_arrays(offsets, *values.flatten(), mask=mask)
        return pa.ListArray.from_arrays(offsets, values, mask=mask)
    if pa.types.is_nested(array.type) or pa.types.is_nested(type):
        raise pa.ArrowNotImplementedError(f"{array.type} is no {type}")
    return _leaf_as(array, type)


def _leaf_as(array: pa.Array, type: pa.DataType) -> pa.Array:
    """Convert values without parts, as `_as` does.

    Arrow is not used: it rounds floats to decimals, makes infinity of large ones and another number of a decimal. It
    takes no whole number as a narrower decimal, and reads texts by rules of its own.
    """
    if pa.types.is_integer(array.type) and pa.types.is_decimal(type):
        return array.cast(_ALL_WHOLE).cast(type)
    if pa.types.is_decimal(array.type) and pa.types.is_floating(type):
        return array.cast(pa.string()).cast(type)
    if pa.types.is_string(array.type) and not (pa.types.is_time(type) or pa.types.is_duration(type)):
        values, lost = converted(array, type)
        is_kept = not len(lost) and values.null_count == array.null_count
    else:
        values, is_kept = array.cast(type), True
    if pa.types.is_floating(array.type) and pa.types.is_decimal(type):
        is_kept = pc.all(pc.equal(values.cast(array.type), array)).as_py() is not False
    elif pa.types.is_floating(array.type) and pa.types.is_floating(type):
        is_kept = pc.all(pc.equal(pc.is_inf(values), pc.is_inf(array))).as_py() is not False
    if not is_kept:
        raise pa.ArrowInvalid(f"a value is no {type}")
    return values
