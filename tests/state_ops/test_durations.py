"""Durations as authors write them."""

import pytest

from state_ops.durations import micros
from state_ops.errors import PipelineError


def test_microseconds_are_durations_and_nothing_is_shorter():
    assert [micros(text, "here", "gap") for text in ("1us", "500ms", "0us", "2h")] == [1, 500_000, 0, 7_200_000_000]
    for text in ("1ns", "0.5ms", "-1us", "us"):
        with pytest.raises(PipelineError, match="no duration"):
            micros(text, "here", "gap")
