"""Frozen values that define a pipeline. `pipelines.api` builds them.

They are checked when they are built, before anything runs.

Imports connectors, and nothing else of the runtime.
"""

from pipelines.runtime.connectors.source import Source
from pipelines.runtime.definition.calendars import Calendar
from pipelines.runtime.definition.files import FileSource
from pipelines.runtime.definition.gates import FIGURES, ROWS, STATE, Expected, Gate
from pipelines.runtime.definition.names import HOLD, MAX_PARALLELISM, POSITIONS, QUARANTINE, ROW
from pipelines.runtime.definition.operators import (
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
from pipelines.runtime.definition.pipeline import AT_LEAST_ONCE, AT_MOST_ONCE, EXACTLY_ONCE, Pipeline
from pipelines.runtime.definition.stage import (
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
from state_ops.outputs import LATE, MAIN

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
