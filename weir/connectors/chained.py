"""A bounded history first, then what is live: two sources with the same columns that follow each other as one.

    history to its end  ->  live from its `start`

A position is that of the one that is being read. Where the live source begins is found when the history begins, so with
`start="latest"` it has what came while the history was loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import pyarrow as pa

from weir.definition.source import (
    EARLIEST,
    Batch,
    Connector,
    Lag,
    Limits,
    Opening,
    Part,
    Peeking,
    Placing,
    Planned,
    Position,
    Source,
    Titling,
    no_position,
)

_HISTORY, _LIVE = "history", "live"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainedSource(Source):
    """One source after another.

    Attributes:
        history: What is read first, to the end that it has then.
        live: What is read from then on.
    """

    history: Source
    live: Source

    @property
    def kind(self) -> str:
        return self.live.kind

    @property
    def declared_columns(self) -> pa.Schema | None:
        return self.live.declared_columns

    @property
    def replayable(self) -> bool:
        return self.history.replayable and self.live.replayable

    def check(self) -> None:
        self.history.check()
        self.live.check()
        Source.check(self)

    def open(self, opening: Opening) -> Connector:
        inner = [replace(opening, options=opening.connect(of.connection)) for of in (self.history, self.live)]
        return _Chained(self, self.history.open(inner[0]), self.live.open(inner[1]))


class _Chained:
    def __init__(self, source: ChainedSource, history: Connector, live: Connector) -> None:
        self._source, self._by_name = source, {_HISTORY: history, _LIVE: live}

    def begin(self, start: str | datetime | Position) -> Position:
        if isinstance(start, Mapping) and "of" in start:
            return self._checked(start)
        if start != EARLIEST:  # somebody seeks: in what is live
            return {"of": _LIVE, "at": self._by_name[_LIVE].begin(start)}
        history, live = self._source.history.start, self._source.live.start
        return {
            "of": _HISTORY,
            "at": self._by_name[_HISTORY].begin(_start(history)),
            "live": self._by_name[_LIVE].begin(_start(live)),
        }

    def _checked(self, position: Position) -> Position:
        """Return a position that a person has written. Raises ConfigurationError."""
        of = position["of"]
        inner = {"at": of, **({"live": _LIVE} if of == _HISTORY else {})}
        if of not in (_HISTORY, _LIVE) or set(position) - {"live"} != {"of", "at"} or not inner.keys() <= set(position):
            raise no_position(position, '{"of": "live", "at": ...}', f"source {self._source.name}")
        for name, connector in inner.items():
            if not isinstance(position[name], Mapping):
                raise no_position(position, '{"of": "live", "at": ...}', f"source {self._source.name}")
            self._by_name[connector].begin(position[name])
        return position

    def plan(
        self, position: Position, limits: Limits, upto: Position | None = None, hold: Collection[str] = ()
    ) -> Planned:
        position, upto = _of_chain(position), _of_chain(upto) if upto is not None else None
        of = position["of"]
        bound = upto["at"] if upto is not None and upto["of"] == of else None
        held = [name.partition(":")[2] for name in hold if name.startswith(f"{of}:")]
        planned = self._by_name[of].plan(position["at"], limits, bound, held)
        at_end = not planned.parts and not planned.limited and all(planned.ends.values())
        if of == _HISTORY and at_end and not held and (upto is None or upto["of"] == _LIVE):
            return self.plan({"of": _LIVE, "at": position["live"]}, limits, upto, hold)
        parts = tuple(
            replace(part, name=f"{of}-{part.name}", partition=f"{of}:{part.partition}") for part in planned.parts
        )
        ends = {f"{of}:{name}": is_end for name, is_end in planned.ends.items()}
        return replace(planned, parts=parts, position={**position, "at": planned.position}, ends=ends)

    def _inner(self, part: Part) -> tuple[Connector, Part]:
        of, _, partition = part.partition.partition(":")
        return self._by_name[of], replace(part, name=part.name.removeprefix(f"{of}-"), partition=partition)

    def read(self, part: Part) -> Iterator[Batch]:
        connector, inner = self._inner(part)
        return connector.read(inner)

    def places(self, part: Part, rows: int) -> Sequence[str | None]:
        connector, inner = self._inner(part)
        return connector.places(inner, rows) if isinstance(connector, Placing) else ()

    def is_empty(self, part: Part) -> bool:
        connector, inner = self._inner(part)
        return isinstance(connector, Peeking) and connector.is_empty(inner)

    def verify(self, parts: Sequence[Part]) -> None:
        for part in parts:
            connector, inner = self._inner(part)
            connector.verify([inner])

    def lag(self, position: Position) -> Lag:
        position = _of_chain(position)
        return self._by_name[position["of"]].lag(position["at"])

    def title(self, part: Part) -> str:
        connector, inner = self._inner(part)
        return connector.title(inner) if isinstance(connector, Titling) else part.name

    def where(self, part: Part) -> str:
        connector, inner = self._inner(part)
        return connector.where(inner)

    def committed(self, position: Position) -> None:
        position = _of_chain(position)
        self._by_name[position["of"]].committed(position["at"])

    def close(self) -> None:
        for connector in self._by_name.values():
            connector.close()


def _of_chain(position: Position) -> Position:
    """Return a position of the live source alone, which had no history before it, is one in what is live."""
    return position if "of" in position else {"of": _LIVE, "at": position}


def _start(start: str | datetime | tuple[tuple[str, object], ...] | Position) -> str | datetime | Position:
    return dict(start) if isinstance(start, tuple) else start
