"""How a value stands in a sentence: as JSON writes it, whatever it is to Python."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import PurePosixPath

import numpy as np
import pandas as pd
import pytest

from state_ops.value_text import literal


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (pd.NA, "null"),
        (True, "true"),
        (float("nan"), '"nan"'),
        ("it's é", '"it\'s é"'),
        (b"\x01", '"01"'),
        (Decimal("1.50"), '"1.50"'),
        (timedelta(minutes=5), '"0:05:00"'),
        (datetime(2026, 1, 2, tzinfo=UTC), '"2026-01-02 00:00:00+00:00"'),
        (PurePosixPath("/a/b"), '"/a/b"'),
        ((1, None, date(2026, 1, 2)), '[1, null, "2026-01-02"]'),
        (frozenset(["b", "a", None]), '["a", "b", null]'),
        ({10, 9}, "[9, 10]"),
        ({"a": {1}, None: np.int8(2), date(2026, 1, 2): np.array([1.5])}, '{"a": [1], "null": 2, "2026-01-02": [1.5]}'),
    ],
)
def test_a_value_in_a_sentence(value, text):
    assert literal(value) == text
