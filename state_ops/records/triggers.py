"""The reason why an epoch's barrier was cut."""

from __future__ import annotations

from enum import StrEnum


class Trigger(StrEnum):
    """The reason why an epoch's barrier was cut.

    CATCH_UP: a run from the shell did so by itself, because input had waited. MANUAL: a person asked for it.
    """

    INTERVAL = "interval"
    SENSOR = "sensor"
    CATCH_UP = "catch_up"
    MANUAL = "manual"
    SAVEPOINT = "savepoint"
    SLICE_LIMIT = "slice_limit"
    DRAIN = "drain"
