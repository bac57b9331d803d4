"""Lists, maps and structs inside a state row: how their columns are laid down as bytes and read back.

A struct in a row is no value of its own: it is one more null bit, and its fields are slots of the row, right after it.
A list, map or fixed-size list is, after its uint32 count in the fixed part of the row (a fixed-size list needs none),
one block of its elements. A block of k values is, column by column:

    nulls     1 bit per value, least significant bit first, padded to whole bytes; 1 is null
    and then, by the type of the values,
    fixed     k values, zero where null
    string, binary   k uint32 lengths, 0 where null; then all the bytes
    struct    per field a block of k values, null where the struct is
    list, map k uint32 counts, 0 where null; then one block of all their elements; a map's are structs of key and value
    fixed-size list  one block of the elements of those that are not null
    null      nothing

So a block has the layout of Arrow's own buffers, cut at the row. Writing it is one copy of ranges per buffer, reading
it one gather per buffer, however many elements the lists have and however deep they are nested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_ops.arrow.columns import (
    array_of_fixed,
    array_of_variable,
    buffer_of,
    copy_ranges,
    fixed_values,
    gathered,
    is_list,
    is_variable,
    nulls_of,
    numpy_type,
    offsets_of,
    plain,
    validity,
    variable_values,
)

Segment = tuple[np.ndarray, np.ndarray, np.ndarray]
"""A range of bytes for every row: uint8 data, each row's int64 start in them and its length."""

Refusal = Callable[[str, np.ndarray], None]
"""A function that raises for the nulls, bool per value, of the field at a path."""

MAX_COUNT = 2**32 - 1  # the reach of the counts and lengths of the format


def elements_type(type: pa.DataType) -> pa.Field:
    """Return the field of a list's or map's elements; a map's is a struct of key and value, which cannot be null."""
    if pa.types.is_map(type):
        return pa.field("item", pa.struct([type.key_field, type.item_field]), False)
    return type.value_field


def elements(array: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Return all elements of a list, map or fixed-size list array, one list after the other, and each list's int64
    count; 0 where null."""
    if pa.types.is_map(array.type):
        type = pa.list_(elements_type(array.type))
        array = pa.Array.from_buffers(
            type, len(array), array.buffers()[:2], offset=array.offset, children=[array.values]
        )
    counts = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return array.flatten(), counts


def check_nulls(array: pa.Array, nullable: bool, inside: np.ndarray | None, path: str, refuse: Refusal) -> None:
    """Call `refuse` if the array has a null anywhere but in a struct that is null itself (`inside`)."""
    nulls = None if nullable else nulls_of(array)
    if nulls is None:
        return
    bare = nulls if inside is None else nulls & ~inside
    if bare.any():
        refuse(path, bare)


# Writing


def segments(
    array: pa.Array, counts: np.ndarray, field: pa.Field, path: str, refuse: Refusal, inside: np.ndarray | None = None
) -> Iterator[Segment]:
    """Yield the block of each row's elements, as segments one behind the other.

    Args:
        array: All rows' elements.
        counts: Int64 per row.
        field: The elements' declared type and nullability. `refuse` is called for nulls where none may be.
    """
    array = plain(array)
    check_nulls(array, field.nullable, inside, path, refuse)
    nulls = nulls_of(array)
    yield _bitmap(nulls, counts)
    if pa.types.is_struct(field.type):
        for part, child in zip(field.type, array.flatten(), strict=True):
            yield from segments(child, counts, part, f"{path}.{part.name}", refuse, nulls)
    elif is_list(field.type) or pa.types.is_fixed_size_list(field.type):
        inner, inner_counts = elements(array)
        if is_list(field.type):
            yield _values(_uint32(inner_counts), counts)
        yield from segments(inner, _sums(inner_counts, counts), elements_type(field.type), f"{path}[]", refuse)
    elif is_variable(field.type):
        data, starts, lengths = variable_values(array)
        yield _values(_uint32(lengths), counts)
        if nulls is not None and len(starts) and int(starts[-1] + lengths[-1] - starts[0]) != int(lengths.sum()):
            data, starts = _packed(data, starts, lengths)  # bytes behind a null stand in between
        sizes = _sums(lengths, counts)
        yield data, int(starts[0] if len(starts) else 0) + np.cumsum(sizes) - sizes, sizes
    elif not pa.types.is_null(field.type):
        values = fixed_values(array)
        if nulls is not None:
            values = values.copy()
            values[nulls] = np.zeros(1, values.dtype)  # Arrow allows any bytes behind a null
        yield _values(values, counts)


def _bitmap(nulls: np.ndarray | None, counts: np.ndarray) -> Segment:
    sizes = (counts + 7) // 8
    if nulls is None:
        return np.zeros(int(sizes.max(initial=0)), np.uint8), np.zeros(len(counts), np.int64), sizes
    starts = np.cumsum(sizes) - sizes
    bits = np.zeros(int(sizes.sum()) * 8, bool)
    bits[_bit_positions(starts, counts)] = nulls
    return np.packbits(bits, bitorder="little"), starts, sizes


def _bit_positions(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the position of each element's own bit, where each row's bits begin at the byte starts[row]."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts * 8 - before, counts) + np.arange(int(counts.sum()))


def _values(values: np.ndarray, counts: np.ndarray) -> Segment:
    width = values.dtype.itemsize
    sizes = counts * width
    return np.ascontiguousarray(values).view(np.uint8), np.cumsum(sizes) - sizes, sizes


def _uint32(lengths: np.ndarray) -> np.ndarray:
    if len(lengths) and int(lengths.max()) > MAX_COUNT:
        raise ValueError("a value is longer than 4 GiB or 2**32 elements")
    return lengths.astype("<u4")


def _sums(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the sum of each row's values, int64."""
    total = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    ends = np.cumsum(counts)
    return np.asarray(total[ends] - total[ends - counts])


def _packed(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    to = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), np.uint8)
    copy_ranges(data, starts, out, to, lengths)
    return out, to


# Reading


@dataclass(slots=True)
class Cursor:
    """A position in each of the joined values: how far it has been read.

    Attributes:
        unsound_unless: Called with a bool per row, and what is wrong with the rows where it is false; raises if any is.
        broken: Called with what is wrong with one of them; raises.
    """

    joined: np.ndarray
    at: np.ndarray
    ends: np.ndarray
    unsound_unless: Callable[[np.ndarray, str], None]
    broken: Callable[[str], NoReturn]

    def take(self, sizes: np.ndarray, path: str) -> np.ndarray:
        """Return the next `sizes[row]` bytes of every row, all rows' one after the other."""
        self.unsound_unless(sizes <= self.ends - self.at, f"is cut short in {path!r}")
        taken = gathered(self.joined, self.at, sizes)
        self.at = self.at + sizes
        return taken

    def checked(self, array: pa.Array, path: str) -> pa.Array:
        """Return the array, whose bytes are values of its type: text is UTF-8, a decimal has no more digits than it
        may."""
        type = array.type
        if pa.types.is_string(type) or pa.types.is_large_string(type) or pa.types.is_decimal(type):
            try:
                array.validate(full=True)
            except pa.ArrowInvalid as error:
                self.broken(f"holds what is no {type} in {path!r}: {error}")
        return array


def block(cursor: Cursor, counts: np.ndarray, field: pa.Field, path: str, inside: np.ndarray | None = None) -> pa.Array:
    """Return the inverse of `segments`: the array of all rows' elements.

    Args:
        counts: Int64 per row.
        inside: Where a struct is null.
    """

    def sound(ok: np.ndarray, problem: str) -> None:
        if not ok.all():
            whole = np.ones(len(counts), bool)
            whole[np.repeat(np.arange(len(counts)), counts)[~ok]] = False
            cursor.unsound_unless(whole, problem)

    nulls = _nulls(cursor, counts, path)
    if inside is not None:
        sound(nulls | ~inside, f"holds a value behind the null around {path!r}")
    if not field.nullable:
        sound(~nulls if inside is None else ~nulls | inside, f"holds a null in {path!r}, which is not nullable")
    type = field.type
    if pa.types.is_struct(type):
        return struct_of(type, nulls, [block(cursor, counts, part, f"{path}.{part.name}", nulls) for part in type])
    width = fixed_width(type)
    fixed = None if width is None else cursor.take(counts * width.itemsize, path).view(width)
    return array_of(cursor, type, nulls, fixed, path, sound, counts)


def fixed_width(type: pa.DataType) -> np.dtype | None:
    """Return the fixed width of a value itself, beside bytes and elements that are elsewhere; None if it has no bytes
    here.
    """
    if pa.types.is_struct(type) or pa.types.is_fixed_size_list(type) or pa.types.is_null(type):
        return None
    return np.dtype("<u4") if is_variable(type) or is_list(type) else numpy_type(type)


def array_of(
    cursor: Cursor,
    type: pa.DataType,
    nulls: np.ndarray,
    fixed: np.ndarray | None,
    path: str,
    sound: Callable[[np.ndarray, str], None],
    counts: np.ndarray | None = None,
) -> pa.Array:
    """Return an array of any type but a struct, from what stands for its values.

    Args:
        cursor: Where the bytes and the elements follow.
        type: The array's type.
        nulls: bool per value.
        fixed: The values themselves, or uint32, how many bytes or elements each has; None if the type has nothing
            there (`fixed_width`).
        path: Its name for people.
        sound: Called with a bool per value, and what is wrong with those for which it is false.
        counts: How many of the values each row has; None: one.
    """
    if pa.types.is_null(type):
        sound(nulls, f"holds a value in {path!r}, which can only be null")
        return pa.nulls(len(nulls))
    if fixed is None:
        lengths = np.where(nulls, 0, type.list_size)
    else:
        if nulls.any():
            filled = np.ascontiguousarray(fixed).view(np.uint8).reshape(len(fixed), -1).any(axis=1)
            sound(~(nulls & filled), f"holds bytes behind the null in {path!r}")
        if pa.types.is_boolean(type):
            sound(fixed <= 1, f"holds neither true nor false in {path!r}")
        if not is_variable(type) and not is_list(type):
            return cursor.checked(array_of_fixed(type, fixed, nulls), path)
        lengths = fixed.astype(np.int64)
    sizes = lengths if counts is None else _sums(lengths, counts)
    if is_variable(type):
        return cursor.checked(array_of_variable(type, cursor.take(sizes, path), lengths, nulls), path)
    return list_of(type, nulls, lengths, block(cursor, sizes, elements_type(type), f"{path}[]"))


def _nulls(cursor: Cursor, counts: np.ndarray, path: str) -> np.ndarray:
    sizes = (counts + 7) // 8
    raw = cursor.take(sizes, path)
    if not raw.any():
        return np.zeros(int(counts.sum()), bool)
    bits = np.unpackbits(raw, bitorder="little").view(bool)
    starts = np.cumsum(sizes) - sizes
    positions = _bit_positions(starts, counts)
    nulls: np.ndarray = bits[positions]
    bits[positions] = False
    if bits.any():  # what is left are bits of no element
        rows = np.repeat(np.arange(len(counts)), sizes * 8)
        whole = np.ones(len(counts), bool)
        whole[rows[bits]] = False
        cursor.unsound_unless(whole, f"has a damaged null bitmap in {path!r}")
    return nulls


def struct_of(type: pa.DataType, nulls: np.ndarray, children: list[pa.Array]) -> pa.Array:
    """Return a struct array of its fields' arrays."""
    return pa.Array.from_buffers(type, len(nulls), [validity(nulls)], children=children)


def list_of(type: pa.DataType, nulls: np.ndarray, counts: np.ndarray, inner: pa.Array) -> pa.Array:
    """Return a list, map or fixed-size list array of all its elements and the lists' counts, 0 where null."""
    if not pa.types.is_fixed_size_list(type):
        buffers = [validity(nulls), buffer_of(offsets_of(type, counts))]
        return pa.Array.from_buffers(type, len(counts), buffers, children=[inner])
    if nulls.any():  # Arrow has elements behind a null, too
        places = np.repeat(~nulls, type.list_size)
        inner = inner.take(pa.array(np.where(places, np.cumsum(places) - 1, 0), mask=~places))
    return pa.Array.from_buffers(type, len(counts), [validity(nulls)], children=[inner])
