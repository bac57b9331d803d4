"""An epoch that was, played again in this process, for notebooks and debuggers; `weir debug` and `weir explain` show
the same.

    from weir import debugging
    seen = debugging.debug("flights", epoch=17, key="N14228", stage="aircraft_rotation")
    seen.rows, seen.before, seen.after, seen.out       # Polars frames
    seen.differences                                   # what is otherwise than the epoch made it; none: nothing

A `breakpoint()` in the stage's function stops there, and so does `stop=pdb.Pdb`. Nothing is written to the pipeline's
storage but the holds by which a coordinator leaves the checkpoints alone meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weir.definition import Pipeline
from weir.loading import named
from weir.replay import explain as explaining
from weir.replay import played
from weir.replay.comparison import Difference
from weir.replay.explain import Certainty, Explained, Statement
from weir.replay.played import Played
from weir.replay.stopping import Debugger
from weir.replay.tracing import Contribution, Trace
from weir.settings.configuration import Settings, load

__all__ = ["Certainty", "Contribution", "Difference", "Explained", "Played", "Statement", "Trace", "debug", "explain"]


def debug(
    pipeline: str | Pipeline,
    epoch: int,
    *,
    stage: str | None = None,
    key: Any = None,
    subtask: int | None = None,
    stop: Debugger | None = None,
    spark: bool = False,
    settings: Settings | None = None,
) -> Played:
    """Play one stage's part of an epoch again, and compare it with what the epoch made.

    Args:
        pipeline: Itself, or its name in the configuration.
        stage: The stage's uid; by default the pipeline's only one, or the only one with a key like that.
        key: A value, or one for each key column. Its subtask is played, and what is shown is of the key alone.
        subtask: The subtask instead. With neither all are played.
        stop: Makes a debugger, such as `pdb.Pdb`, which stops in the stage's function where this gets the key.
        spark: Whether Spark may evaluate what Python does not: a transform, and some conditions.
        settings: By default those of WEIR_ENV.

    Raises:
        WeirError: The epoch or its input is not there any more, or the stage fails over it as it did.
    """
    settings = settings or load()
    pipeline = named(pipeline, settings) if isinstance(pipeline, str) else pipeline
    values = None if key is None else list(key) if _is_several(key) else [key]
    return played.debug(pipeline, settings, epoch, stage=stage, key=values, subtask=subtask, stop=stop, spark=spark)


def explain(
    pipeline: str | Pipeline, table: str, row: str, *, spark: bool = False, settings: Settings | None = None
) -> Explained:
    """Say where the first row of a table came from that satisfies a condition.

    Args:
        pipeline: Itself, or its name in the configuration.
        table: The sink's name.
        row: The condition, as a stage's `where`, of columns of the table.
        spark: Whether Spark may evaluate what Python does not: a transform, and some conditions.
        settings: By default those of WEIR_ENV.

    Raises:
        WeirError: There is no such table or row.
    """
    settings = settings or load()
    pipeline = named(pipeline, settings) if isinstance(pipeline, str) else pipeline
    return explaining.explain(pipeline, settings, table, row, spark=spark)


def _is_several(key: Any) -> bool:
    return isinstance(key, Sequence) and not isinstance(key, str | bytes)
