"""Names and numbers that all parts of a definition share, and what may be a name."""

from __future__ import annotations

import re

from state_ops.errors import PipelineError
from state_ops.outputs import LATE, MAIN, REST

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")


HOLD, WARN, QUARANTINE = "hold", "warn", "quarantine"


POSITIONS = "positions"  # output: of each row that a tracked stage hands out, where it comes from


TAKEN = (MAIN, LATE, QUARANTINE, REST, POSITIONS)  # names that no output of an author's may have


MAX_PARALLELISM = 128  # key groups, unless a pipeline says how many


ROW = "_weir_row"  # where a row of a source comes from: its file's number in the slice << 40 | its number in the file


START, END = "window_start", "window_end"  # the columns with the bounds of a window


def check_name(name: str, kind: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PipelineError(
            f"{name!r} cannot name a {kind}.",
            next="Use small letters, digits and underscores, a letter first, at most 63: it becomes part of paths.",
        )


def refuse_doubles(kind: str, names: list[str], pipeline: str) -> None:
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise PipelineError(
            f"The pipeline {pipeline} has two {kind}s named {doubles[0]!r}.", next="Rename one of them."
        )
