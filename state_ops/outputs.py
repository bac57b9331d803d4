"""Names of the outputs of a stage."""

from __future__ import annotations

MAIN = "main"  # the only output of a stage, or the one beside which there are others
LATE = "late"  # rows that came too late
REST = "rest"  # rows of its input that a stage has not applied yet
PARTS = "_parts"  # follows the name of an output whose rows lie in files by partition
