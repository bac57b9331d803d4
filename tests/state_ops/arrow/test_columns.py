"""Byte strings are gathered and put side by side as slices of Python's bytes are."""

from __future__ import annotations

import numpy as np
import pytest

from state_ops.arrow.columns import beside, copy_ranges, gathered, join, split

DATA = bytes(range(1, 101))
SHAPES = {
    "one behind the other": ([0, 3, 3, 10], [3, 0, 7, 5]),
    "not from the beginning": ([7, 9, 12, 12], [2, 3, 0, 4]),
    "with bytes between": ([2, 9, 20, 31], [5, 0, 11, 1]),
    "the same bytes again": ([0, 0, 0, 0], [4, 4, 2, 4]),
    "descending": ([90, 40, 20, 1], [10, 7, 7, 3]),
    "empty": ([5, 1, 9, 0], [0, 0, 0, 0]),
}


def _part(shape: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    starts, lengths = SHAPES[shape]
    return np.frombuffer(DATA, np.uint8), np.array(starts, np.int64), np.array(lengths, np.int64)


def _slices(shape: str) -> list[bytes]:
    return [DATA[start : start + length] for start, length in zip(*SHAPES[shape], strict=True)]


@pytest.mark.parametrize("shape", SHAPES)
def test_gathered_bytes_are_the_slices_one_after_the_other(shape: str) -> None:
    data, starts, lengths = _part(shape)

    assert gathered(data, starts, lengths).tobytes() == b"".join(_slices(shape))

    target = np.zeros(int(lengths.sum()), np.uint8)
    copy_ranges(data, starts, target, np.cumsum(lengths) - lengths, lengths)
    assert target.tobytes() == b"".join(_slices(shape))


@pytest.mark.parametrize("first", SHAPES)
@pytest.mark.parametrize("second", SHAPES)
def test_rows_have_the_bytes_of_each_part_in_turn(first: str, second: str) -> None:
    rows = beside([_part(first), _part(second)])

    assert rows == [head + tail for head, tail in zip(_slices(first), _slices(second), strict=True)]


def test_bytes_that_are_joined_are_split_again() -> None:
    values = [b"", b"a", b"\0\xff", b"", b"longer than the others"]
    joined, starts, lengths = join(values)

    assert split(joined, starts + lengths) == values
    assert split(np.zeros(0, np.uint8), np.zeros(0, np.int64)) == []
