"""Frozen values that define a pipeline. `weir.api` builds them.

They are checked when they are built, before anything runs. The protocols that they are built on are here too: of
operators, sources and sinks.

Imports nothing of the runtime.
"""

from state_ops.outputs import LATE, MAIN
from weir.definition.findings import Finding, Verdict
from weir.definition.gates import FIGURES, ROWS, STATE, Expected, Gate
from weir.definition.input import Input, Readable, is_clocked, sources_of
from weir.definition.names import HOLD, MAX_PARALLELISM, POSITIONS, QUARANTINE, ROW
from weir.definition.operator import Epoch, Operator, OperatorKind, Progress, Shapes, Subtask, TableBeside
from weir.definition.pipeline import AT_LEAST_ONCE, AT_MOST_ONCE, EXACTLY_ONCE, Pipeline
from weir.definition.source import FileSource, Source
from weir.definition.stage import Stage, check_changes, is_timed, origin_of, sinks_shown

__all__ = [
    "AT_LEAST_ONCE",
    "AT_MOST_ONCE",
    "EXACTLY_ONCE",
    "FIGURES",
    "HOLD",
    "LATE",
    "MAIN",
    "MAX_PARALLELISM",
    "POSITIONS",
    "QUARANTINE",
    "ROW",
    "ROWS",
    "STATE",
    "Epoch",
    "Expected",
    "FileSource",
    "Finding",
    "Gate",
    "Input",
    "Operator",
    "OperatorKind",
    "Pipeline",
    "Progress",
    "Readable",
    "Shapes",
    "Source",
    "Stage",
    "Subtask",
    "TableBeside",
    "Verdict",
    "check_changes",
    "is_clocked",
    "is_timed",
    "origin_of",
    "sinks_shown",
    "sources_of",
]
