"""Delta tables as sinks: definitions alone. The room `sinks` commits to their logs."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.runtime.connectors.sink import Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSink(Sink):
    """A Delta table to which rows are appended, and that only Weir writes.

    Attributes:
        name: The table's name, and its directory below the pipeline's `tables/`.
        event_time: The timestamp or date column by which its rows belong to a day. None: the window's start, or the
            source's event time.
    """

    event_time: str | None = None

    @property
    def stays(self) -> None:
        return None
