"""A function as a sink: it is called with the rows of each checkpoint, in order, at least once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from state_ops.errors import PipelineError, StageError, WeirError, plainly
from weir.definition.sink import Published, Publisher, Rows, Sink, SinkOpening

Function = Callable[[pa.Table, int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeachSink(Sink):
    """A function of the author's.

    Attributes:
        function: Gets the rows and the checkpoint's id. It may be called again with the same, after a crash: what it
            does must be the same then, or depend on the id.
    """

    function: Function

    @property
    def exactly_once(self) -> bool:
        return False

    @property
    def stays(self) -> str:
        return f"what {self.name} has done with them cannot be taken back"

    def publishes_by(self, resolve: Callable[[str], str]) -> dict[str, Any]:  # noqa: ARG002
        return {}  # a function that failed is corrected, and gets the same rows

    def open(self, opening: SinkOpening) -> Publisher:  # noqa: ARG002 - it needs nothing
        if not callable(self.function):
            raise PipelineError(f"{self.function!r} is no function.", where=f"sink {self.name}")
        return _Caller(self)


class _Caller:
    """It has no marker: who publishes does not know whether the function was called already."""

    def __init__(self, sink: ForeachSink) -> None:
        self._sink = sink

    def check(self, schema: pa.Schema) -> None: ...

    def prepare(self, schema: pa.Schema) -> None: ...

    def marker(self) -> int | None:
        return None

    def publish(self, previous: int | None, checkpoint: int, rows: Rows) -> Published:  # noqa: ARG002
        if rows.schema is None or not rows.count:
            return Published(0)
        table = pa.Table.from_batches(rows.batches(), rows.schema)
        try:
            self._sink.function(table, checkpoint)
        except WeirError:
            raise
        except Exception as error:
            raise StageError(
                f"The function of the sink {self._sink.name} failed: {plainly(error)}",
                where=f"checkpoint {checkpoint}",
                next="Correct it and run again: it gets the same rows again, unless rows come at most once.",
            ) from error
        return Published(rows.count)

    def close(self) -> None: ...
