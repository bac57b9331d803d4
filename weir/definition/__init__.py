"""Frozen values that define a pipeline. `weir.api` builds them.

They are checked when they are built, before anything runs.

Imports connectors, and nothing else of the runtime.
"""

from state_ops.outputs import LATE, MAIN
from weir.connectors.source import Source
from weir.definition.calendars import Calendar
from weir.definition.files import FileSource
from weir.definition.gates import FIGURES, ROWS, STATE, Expected, Gate
from weir.definition.names import HOLD, MAX_PARALLELISM, POSITIONS, QUARANTINE, ROW
from weir.definition.operators import (
    ANTI,
    FULL,
    INNER,
    JOINS,
    LATE_TIME,
    LEFT,
    RIGHT,
    SEMI,
    Aggregation,
    AsOf,
    CalendarWindow,
    Deduplication,
    Epoch,
    Join,
    Lookup,
    SessionWindow,
    TopN,
    Window,
)
from weir.definition.pipeline import AT_LEAST_ONCE, AT_MOST_ONCE, EXACTLY_ONCE, Pipeline
from weir.definition.stage import (
    Input,
    Stage,
    check_changes,
    input_name,
    is_clocked,
    is_timed,
    keeps_changes,
    keeps_event_time,
    reading,
    sinks_shown,
    sources_of,
)

__all__ = [
    "ANTI",
    "AT_LEAST_ONCE",
    "AT_MOST_ONCE",
    "EXACTLY_ONCE",
    "FIGURES",
    "FULL",
    "HOLD",
    "INNER",
    "JOINS",
    "LATE",
    "LATE_TIME",
    "LEFT",
    "MAIN",
    "MAX_PARALLELISM",
    "POSITIONS",
    "QUARANTINE",
    "RIGHT",
    "ROW",
    "ROWS",
    "SEMI",
    "STATE",
    "Aggregation",
    "AsOf",
    "Calendar",
    "CalendarWindow",
    "Deduplication",
    "Epoch",
    "Expected",
    "FileSource",
    "Gate",
    "Input",
    "Join",
    "Lookup",
    "Pipeline",
    "SessionWindow",
    "Source",
    "Stage",
    "TopN",
    "Window",
    "check_changes",
    "input_name",
    "is_clocked",
    "is_timed",
    "keeps_changes",
    "keeps_event_time",
    "reading",
    "sinks_shown",
    "sources_of",
]
