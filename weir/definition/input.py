"""An input of a stage: the rows of a source or of another stage's output, as the stage's operator sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from state_ops.outputs import MAIN
from weir.definition.change_feed import CHANGE_TYPE
from weir.definition.column_lineage import has, keeps
from weir.definition.names import QUARANTINE
from weir.definition.source import Source

if TYPE_CHECKING:
    from weir.definition.stage import Stage


@dataclass(frozen=True)
class Input:
    """Rows that a stage reads. `side` makes one of several inputs, and `Stage.output` that of one of its outputs.

    Attributes:
        origin: The source or the stage that the rows are of.
        output: The name of that stage's output.
        key: The key columns of the rows, by their names in this input.
        where: The condition in Spark's SQL that rows have to meet.
        columns: The columns that the operator sees, made in Spark's SQL; none: all as they are.
        transform: Makes a Spark DataFrame of the rows before the two.
        time: The column with the event time, if the author names one; otherwise it is the source's.

    Example:
        >>> from weir import files, select
        >>> readings = files("{landing}/*.parquet", event_time="at")
        >>> kept = select("kept", readings, "device", "value * 2 AS twice", where="value > 0")
        >>> kept.inputs[0].where, kept.inputs[0].columns
        ('value > 0', ('device', 'value * 2 AS twice'))
    """

    origin: Source | Stage
    output: str = MAIN
    key: tuple[str, ...] = ()
    where: str | None = None
    columns: tuple[str, ...] = ()
    transform: Callable[[Any], Any] | None = None
    time: str | None = None

    @property
    def name(self) -> str:
        """The uid of the stage that is read, or the name of the source."""
        return self.origin.name if isinstance(self.origin, Source) else self.origin.uid

    @property
    def event_time(self) -> str | None:
        """The column of the source's event time. None: it has none, or a stage is read."""
        return self.origin.event_time if isinstance(self.origin, Source) else None

    @property
    def keeps_event_time(self) -> bool:
        """True if the operator sees the event time of the source, if a source is read."""
        return not isinstance(self.origin, Source) or keeps(self.columns, str(self.origin.event_time))

    @property
    def may_make_time(self) -> bool:
        """True if its SQL or its transform may put another time in place of the source's event time."""
        return self.transform is not None or not self.keeps_event_time

    @property
    def reads_changes(self) -> bool:
        """True if the rows that are read are changes, as far as the definition tells."""
        origin = self.origin
        if isinstance(origin, Source):
            return origin.hands_out_changes
        return origin.operator.hands_out_changes(origin, self.output)

    @property
    def keeps_changes(self) -> bool:
        """True if its columns keep the column that says what became of a row, if the rows have it."""
        return has(self.columns, CHANGE_TYPE)

    @property
    def brings_changes(self) -> bool:
        """True if the rows that the operator sees are changes, as far as the definition tells."""
        return self.reads_changes and self.keeps_changes

    @property
    def reads_files(self) -> bool:
        """True if a source is read whose rows lie in files: the newest that was read is the event time."""
        return isinstance(self.origin, Source) and self.origin.capabilities.files is not None

    @property
    def takes_bad_rows(self) -> bool:
        """True if rows of the source that cannot be decoded or stored are set aside."""
        return isinstance(self.origin, Source) and self.origin.on_bad == QUARANTINE

    @property
    def sql_named(self) -> str:
        """The words by which people know its `where` and its columns."""
        return "SQL" if self.columns else "where"

    @property
    def sql_written(self) -> str:
        """Its columns and its `where`, for people."""
        return ", ".join(sql for sql in (*map(repr, self.columns), self.where and f"where={self.where!r}") if sql)


Readable: TypeAlias = "Source | Stage | Input"
"""What a stage may be given to read."""


def sources_of(given: Readable) -> tuple[Source, ...]:
    """Return the sources at the far end of an input, each once."""
    if isinstance(given, Source):
        return (given,)
    if isinstance(given, Input):
        return sources_of(given.origin)
    return tuple(dict.fromkeys(source for input in given.inputs for source in sources_of(input)))


def is_clocked(given: Readable) -> bool:
    """Return whether the time of an input's rows is processing time, from windows by processing time.

    The input may be these windows, or come from them.
    """
    if isinstance(given, Input):
        return is_clocked(given.origin)
    return not isinstance(given, Source) and (given.by_clock or any(map(is_clocked, given.inputs)))
