"""The sketches of `approx_distinct` and `approx_quantile`, by Apache DataSketches; state has them serialized.

`approx_distinct` is a HyperLogLog of 4096 registers, `approx_quantile` a t-digest of compression 200. Of the same
values in the same epochs a sketch has the same bytes: values are sorted before they go in, and neither draws random
numbers.
DataSketches is imported when the first sketch is made, since most pipelines have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from state_ops.lazily import Lazily

if TYPE_CHECKING:
    import numpy as np
    import polars as pl
else:
    np, pl = Lazily("numpy"), Lazily("polars")

_LG_REGISTERS, _COMPRESSION = 12, 200
DISTINCT, QUANTILE = "approx_distinct", "approx_quantile"


def sketched(kind: str, values: pl.Series) -> pl.Series:
    """Return the sketch of each row's list of values.

    Args:
        kind: DISTINCT or QUANTILE.
        values: Lists, of floats for QUANTILE.
    """
    lengths = values.list.len().to_numpy().astype(np.int64)
    flat = values.list.explode(empty_as_null=False)
    make: Callable[[np.ndarray], bytes]
    if kind == DISTINCT:
        from state_ops.arrow import frames
        from state_ops.schema.key_groups import xxhash64

        numbers, make = xxhash64(frames.arrow(flat.to_frame("v")).columns).view(np.int64), _distinct
    else:
        numbers, make = flat.to_numpy(), _quantiles
    ends = np.cumsum(lengths)
    sketches = [make(numbers[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
    return pl.Series(values.name, sketches, pl.Binary)


def united(kind: str) -> Callable[[Sequence[pl.Series]], pl.Series]:
    """Row by row, one sketch of two; a null or no bytes stand for an empty one."""
    unite = _union if kind == DISTINCT else _merged

    def of(sketches: Sequence[pl.Series]) -> pl.Series:
        first, second = (part.to_list() for part in sketches)
        rows = [unite([a, b]) if a and b else a or b or b"" for a, b in zip(first, second, strict=True)]
        return pl.Series(sketches[0].name, rows, pl.Binary)

    return of


def gathered(kind: str) -> Callable[[Sequence[pl.Series]], pl.Series]:
    """Return one sketch of all rows."""
    unite = _union if kind == DISTINCT else _merged

    def of(sketches: Sequence[pl.Series]) -> pl.Series:
        parts = [part for part in sketches[0].to_list() if part]
        return pl.Series([unite(parts) if len(parts) > 1 else b"".join(parts)], dtype=pl.Binary)

    return of


def estimates(kind: str, share: float | None) -> Callable[[pl.Series], pl.Series]:
    """Return a function that reads sketches: the number of values, or the value below which this share of them is."""

    def of(sketches: pl.Series) -> pl.Series:
        parts = sketches.to_list()
        if kind == DISTINCT:
            return pl.Series(sketches.name, [_number(part) if part else 0 for part in parts], pl.Int64)
        return pl.Series(sketches.name, [_quantile(part, share) if part else None for part in parts], pl.Float64)

    return of


def _library() -> Any:
    import datasketches

    return datasketches


def _distinct(hashes: np.ndarray) -> bytes:
    if not len(hashes):
        return b""
    library = _library()
    sketch = library.hll_sketch(_LG_REGISTERS, library.HLL_4)
    for number in np.sort(hashes).tolist():
        sketch.update(number)
    return bytes(sketch.serialize_compact())


def _union(sketches: Sequence[bytes]) -> bytes:
    library = _library()
    union = library.hll_union(_LG_REGISTERS)
    for sketch in sketches:
        union.update(library.hll_sketch.deserialize(sketch))
    return bytes(union.get_result(library.HLL_4).serialize_compact())


def _number(sketch: bytes) -> int:
    library = _library()
    union, part = library.hll_union(_LG_REGISTERS), library.hll_sketch.deserialize(sketch)
    union.update(part)
    union.update(part)  # what has been united is estimated by its registers, whatever the order in which values came
    return round(float(union.get_estimate()))


def _quantiles(values: np.ndarray) -> bytes:
    if not len(values):
        return b""
    sketch = _library().tdigest_double(_COMPRESSION)
    sketch.update(np.sort(values))
    return bytes(sketch.serialize())


def _merged(sketches: Sequence[bytes]) -> bytes:
    first, *others = map(_library().tdigest_double.deserialize, sketches)
    for other in others:
        first.merge(other)
    return bytes(first.serialize())


def _quantile(sketch: bytes, share: float | None) -> float:
    return float(_library().tdigest_double.deserialize(sketch).get_quantile(share))
