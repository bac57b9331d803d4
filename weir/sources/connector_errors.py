"""A connector whose errors all name its source, whatever it raises: third parties write connectors too."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from state_ops.errors import PipelineError, TransientError, WeirError, plainly
from weir.definition.source import (
    Batch,
    Connector,
    Lag,
    Limits,
    Part,
    Peeking,
    Placing,
    Planned,
    Position,
    Titling,
)


@dataclass(frozen=True, slots=True)
class GuardedConnector:
    """A connector, asked like any other.

    Attributes:
        inner: The connector.
        source: Its source, as errors say where.
    """

    inner: Connector
    source: str

    def begin(self, start: str | datetime | Position) -> Position:
        with asking(self.source):
            return self.inner.begin(start)

    def plan(
        self, position: Position, limits: Limits, upto: Position | None = None, hold: Collection[str] = ()
    ) -> Planned:
        with asking(self.source):
            return self.inner.plan(position, limits, upto, hold)

    def read(self, part: Part) -> Iterator[Batch]:
        with asking(self.source):
            yield from self.inner.read(part)

    def verify(self, parts: Sequence[Part]) -> None:
        with asking(self.source):
            self.inner.verify(parts)

    def lag(self, position: Position) -> Lag:
        with asking(self.source):
            return self.inner.lag(position)

    def where(self, part: Part) -> str:
        with asking(self.source):
            return self.inner.where(part)

    def places(self, part: Part, rows: int) -> Sequence[str | None]:
        with asking(self.source):
            return self.inner.places(part, rows) if isinstance(self.inner, Placing) else ()

    def title(self, part: Part) -> str:
        with asking(self.source):
            return self.inner.title(part) if isinstance(self.inner, Titling) else part.name

    def is_empty(self, part: Part) -> bool:
        with asking(self.source):
            return isinstance(self.inner, Peeking) and self.inner.is_empty(part)

    def committed(self, position: Position) -> None:
        with asking(self.source):
            self.inner.committed(position)

    def close(self) -> None:
        with asking(self.source):
            self.inner.close()


@contextmanager
def asking(where: str) -> Iterator[None]:
    """Turn other errors than Weir's into one that names the source.

    An error of the network or of a disk may pass; any other one is a fault of the connector.
    """
    try:
        yield
    except WeirError:
        raise
    except OSError as error:
        raise TransientError(f"The source could not be asked: {plainly(error)}.", where=where) from error
    except Exception as error:
        raise PipelineError(
            f"The source's connector has failed: {plainly(error)}.",
            where=where,
            next="Correct the connector, or what the source says; its own errors are those of `weir.api`.",
        ) from error
