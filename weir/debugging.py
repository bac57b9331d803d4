"""Play a past epoch again in this process, for notebooks and debuggers.

    from weir import debugging
    seen = debugging.debug("flights", epoch=17, key="N14228", stage="aircraft_rotation")
    seen.rows, seen.before, seen.after, seen.out       # Polars frames
    seen.differences                                   # how the replay differs from the epoch; empty: not at all

`weir debug` and `weir explain` show the same. A `breakpoint()` in the stage's function stops there, and so does
`stop=pdb.Pdb`. Nothing is written to the pipeline's storage but the holds that keep the checkpoints meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weir.definition import Pipeline
from weir.inspection.comparison.rows import Difference
from weir.loading import named
from weir.replay import explain as explaining
from weir.replay import stage_replay
from weir.replay.explain import Certainty, Explained, Statement
from weir.replay.replay import Playing
from weir.replay.stage_replay import Played
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
    """Play one stage's part of an epoch again, and compare it with the rows and state of the epoch.

    Args:
        pipeline: The pipeline, or its name in the configuration.
        epoch: The epoch, which is its checkpoint's id.
        stage: The stage's uid; by default the only stage, or the only one with such a key.
        key: A value, or one for each key column. The key's subtask is played, and the result has this key alone.
        subtask: The number of the subtask, instead of a key. With neither, all subtasks are played.
        stop: A function that makes a debugger, such as `pdb.Pdb`. It stops in the stage's function when this gets the
            key.
        spark: True if Spark may evaluate what Python cannot: a transform, and some conditions.
        settings: The configuration; by default that of WEIR_ENV.

    Returns:
        The rows, the state before and after, the outputs, and the differences.

    Raises:
        WeirError: The epoch or its input is not there any more, or the stage fails as it did.

    Example:
        The pipeline `shop` sums the prices of each customer's orders.

        >>> from weir import debugging
        >>> played = debugging.debug("shop", epoch=2, key="ann")
        >>> played.before.to_dicts(), played.after.to_dicts()
        ([{'customer': 'ann', 'spent': 20}], [{'customer': 'ann', 'spent': 25}])
        >>> played.differences
        ()
    """
    settings = settings or load()
    pipeline = named(pipeline, settings) if isinstance(pipeline, str) else pipeline
    values = None if key is None else list(key) if _is_several(key) else [key]
    playing = Playing(pipeline, settings, spark)
    return stage_replay.debug(playing, epoch, stage=stage, key=values, subtask=subtask, stop=stop)


def explain(
    pipeline: str | Pipeline, table: str, row: str, *, spark: bool = False, settings: Settings | None = None
) -> Explained:
    """Return the origin of the first row of a table that satisfies a condition.

    Args:
        pipeline: The pipeline, or its name in the configuration.
        table: The sink's name.
        row: The condition, as a stage's `where`, on columns of the table.
        spark: True if Spark may evaluate what Python cannot: a transform, and some conditions.
        settings: The configuration; by default that of WEIR_ENV.

    Raises:
        WeirError: There is no such table or row.

    Example:
        The pipeline `shop` sums the prices of each customer's orders in the table `totals`.

        >>> from weir import debugging
        >>> told = debugging.explain("shop", "totals", "customer = 'ann' AND spent = 25")
        >>> told.stage, told.origin.epoch
        ('totals', 2)
        >>> [part.rows["price"].to_list() for part in told.trace.contributions]
        [[20], [5]]
    """
    settings = settings or load()
    pipeline = named(pipeline, settings) if isinstance(pipeline, str) else pipeline
    return explaining.explain(pipeline, settings, table, row, spark=spark)


def _is_several(key: Any) -> bool:
    return isinstance(key, Sequence) and not isinstance(key, str | bytes)
