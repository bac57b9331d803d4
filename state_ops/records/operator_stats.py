"""A checkpoint's record of an operator: how its state is stored, what the state means, and what the epoch did."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from state_ops.records.recorded import Recorded


@dataclass(frozen=True, slots=True)
class OperatorStats(Recorded):
    """A checkpoint's record of one operator, stored under the uid of its stage.

    Attributes:
        schema: Of the state; None: the operator has no state.
        schemas: All schemas that rows may still have, oldest first; earlier releases recorded `schema` alone.
        keys: By key column, its name and type.
        backend: The backend that wrote the state.
        collections: By name, the kind, key and schemas of each list and map.
        sketched: By aggregate that is a sketch, the type of the values that it counts.
        swept: By subtask, the key in hex where the sweep of expired state goes on.
        clock: The processing time of a stage that goes by processing time, in microseconds; else None.
        due: By subtask, the processing time in microseconds at which windows or timers are due next, rows or none.
        window: What windows, aggregates or duplicates mean.
        ttl: The time to live, as `Ttl` has it; None: the operator has none.
        forgotten: The state that a TTL has let expire, as `Forgotten` has it; None: the operator never had a TTL.
        on_timer: Whether the stage has a function for timers.
        lateness: Of a window, in microseconds.
        forgets: After how many microseconds a deduplication, or ranks, forget a key, or a join its rows; None: never.
        inputs: What the stage read, in words, a join's left input first; None: an earlier release, which recorded those
            of joins alone.
        sql: By input, the stage's `where`, and the columns of its `select`; None: an earlier release.
        upserted: By table whose rows it replaces, their key; None: an earlier release.
        suffix: Of a join, what follows the names of right columns that are taken; None: it is none, or of an earlier
            release.
        entries: Of its state, roughly; None: nobody has looked.
        timers: Whether some are set; None: nobody has looked.
        waiting: The rows that it has not applied, as `InFlightData` has them, in their order.
        ms: By phase, the milliseconds of the slowest subtask.
        cache: As `CacheFigures` has it; None without a cache. `cache_totals`: of all epochs so far.
        exchange: How its rows reached its subtasks: "direct", "files", "cut" or "rows"
            (docs/adr/0071-blocks-of-columns.md), "files-staged" or "cut-staged" (docs/adr/0088-blocks-on-storage.md);
            None: without Spark, or there were none.
        delivery: How often the pipeline's sinks got rows then, as its definition says; None: an earlier release.
        sides: Of a stage with several inputs, where event time stands in each, as `SidesTime` has it.
        lookup: The version of the table that the plan of the epoch has, and where rows of an earlier epoch were joined
            with another one, or that one was gone, under "joined" what it was. None: no lookup.
        gates: The verdicts of its gates on this epoch, as `Verdict` has them.
        outputs: By output beside the main one, how many rows the epoch handed out.
        code: A fingerprint of the stage's definition and functions; None: an earlier release.
    """

    parallelism: int = 0
    max_parallelism: int = 0
    schema: str | None = None
    schemas: list[dict[str, Any]] = field(default_factory=list)
    keys: list[list[str]] = field(default_factory=list)
    backend: str = "rocksdb"  # the only one that there was when none was recorded
    collections: dict[str, dict[str, Any]] = field(default_factory=dict)
    sketched: dict[str, str] = field(default_factory=dict)
    swept: dict[str, str] = field(default_factory=dict)
    window: dict[str, Any] | None = None
    ttl: dict[str, Any] | None = None
    forgotten: dict[str, Any] | None = None
    on_timer: bool = False
    lateness: int | None = None
    forgets: int | None = None
    files_total: int = 0
    files_new: int = 0
    bytes_total: int = 0
    bytes_new: int = 0
    rows_in: int = 0
    rows_out: int = 0
    rows_late: int = 0
    rows_duplicate: int = 0
    rows_null_key: int = 0
    rows_dropped: int = 0
    entries: int | None = None
    timers: bool | None = None
    rows_quarantined: int = 0
    rows_waiting: int = 0
    waiting: list[dict[str, Any]] = field(default_factory=list)
    ms: dict[str, float] = field(default_factory=dict)
    cache: dict[str, int] | None = None
    cache_totals: dict[str, int] | None = None
    gates: list[dict[str, Any]] = field(default_factory=list)
    exchange: str | None = None
    delivery: str | None = None
    sides: dict[str, Any] | None = None
    clock: int | None = None
    inputs: list[str] | None = None
    sql: list[dict[str, Any]] | None = None
    upserted: dict[str, list[str]] | None = None
    suffix: str | None = None
    due: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    lookup: dict[str, Any] | None = None
    code: str | None = None
    names: tuple[str, ...] = field(default_factory=lambda: _NAMES, kw_only=True)

    @property
    def has_state(self) -> bool:
        """True if the operator has state, or will have some with its first row."""
        return bool(self.schema)

    @property
    def moments(self) -> list[int]:
        """Processing times in microseconds at which the operator has something to do without rows."""
        idle = (self.sides or {}).get("due")
        return [*self.due.values(), *([idle] if idle is not None else [])]

    @property
    def schema_history(self) -> list[dict[str, Any]]:
        """All schemas that rows of its state may still have, oldest first, for `evolution.from_record`."""
        return self.schemas or [{"schema": self.schema}]


_NAMES: tuple[str, ...] = tuple(field.name for field in fields(OperatorStats) if field.name not in ("names", "unknown"))

NOTHING = OperatorStats.from_json({})
"""The record of an operator that a checkpoint does not have."""
