"""The Protocol of a source: a definition that authors write, and the connector that it opens.

    definition (`Source`) -> open -> connector: plan -> parts -> read, as often as asked -> verify

A connector plans bounded parts after a position, and reads each part again with the same rows in the same order, from
any thread. It knows nothing of epochs: Weir lands what it reads as Parquet before an epoch begins, so that gates, event
time, replays and branches treat every source alike (docs/adr/0060-what-is-not-parquet-lands-as-parquet.md). Third
parties write both classes with what `weir.api` exports, and test them with `weir.testing.SourceContract`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from state_ops.durations import micros
from state_ops.errors import ConfigurationError, PipelineError

Json = Mapping[str, Any]
Position = Mapping[str, Any]
"""How far a source has been read, as JSON. Its connector alone knows what is in it; it must not grow without bound."""

FAIL, QUARANTINE, SKIP = "fail", "quarantine", "skip"
FIX, ADD = "fix", "add"
EARLIEST, LATEST = "earliest", "latest"
RUNNING, LOOKING = 30.0, 5.0  # `patience` of a process that runs the pipeline, and of one that only looks


def default_name(place: str) -> str:
    """Return the default name of a source or sink by its place.

    It is the last part of a path, and a {placeholder} by its name.
    """
    return place.rstrip("/").rpartition("/")[2].replace("{", "").replace("}", "")


class StartPosition(dict[str, Any]):
    """A position at which a definition begins. It has a hash, since definitions are compared and are keys."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


def start_of(start: str | datetime | Position) -> str | datetime | Position:
    """Return the start of a source, as its definition keeps the author's choice."""
    return StartPosition(start) if isinstance(start, Mapping) else start


def no_position(position: object, like: str, where: str) -> ConfigurationError:
    """Return the error for a position that does not belong to this source.

    Args:
        like: One that is, as JSON.
    """
    return ConfigurationError(
        f"This is no position of the source: {str(position)[:200]}",
        where=where,
        next=f"Say it as `weir checkpoints` shows it, e.g. {like}",
    )


def kind_of(position: Mapping[str, Any]) -> str | None:
    """Return the kind of the source whose position a checkpoint records; None: it does not say."""
    kind: str | None = position.get("kind", "file" if "seen" in position else None)
    return kind


def changed_kind(source: Source, position: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """Return the problem with a position that a source of another kind recorded under the same name, and what to do.

    None: there is no problem.
    """
    was = None if position is None else kind_of(position)
    if was is None or was == source.kind:
        return None
    what = f"The source {source.name!r} was a {was} source when it was read, and is a {source.kind} source now."
    next = (
        f"Give it another name, with {source.name!r} in retired= and the new one in added= of the pipeline, and it is "
        "read from its start."
    )
    if source.kind != "file":
        next += f" Or say where it goes on: weir seek PIPELINE {source.name} --to ..."
    return what, next


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one slice.

    Attributes:
        parts: Parts, at least one.
        rows: Rows; a connector that does not know them counts what comes nearest (a range of offsets).
        bytes: Bytes as the source counts them.
    """

    parts: int
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A bounded piece of one partition of a source, which can be read again.

    Attributes:
        name: Of these rows alone: no other rows of the source ever have it. It has no slash.
        partition: Whose part it is. Event time of a source is the least over its partitions.
        place: What `read` has to know beside the name, as JSON; without secrets.
        rows: How many it has at most, if that is known.
        bytes: As the source counts them, if that is known.
    """

    name: str
    partition: str
    place: Json = field(default_factory=dict)
    rows: int | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """Data that cannot be read any more and is left out, since the source says `on_lost="skip"`.

    Attributes:
        where: The partition, file or version.
        what: What is lost, with numbers, in one sentence.
    """

    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Planned:
    """The next parts of a source.

    Attributes:
        parts: In the order in which they are read.
        position: Behind them.
        limited: A limit ended it, so there is more.
        ends: By partition, whether this plan reaches its end: nothing that is there now stays unread, and nothing is
            about to become readable. Every partition that the source has is named.
        lost: What was left out.
        passes: Without a part the position is to be recorded too: what it has passed may soon be gone, so that nobody
            could tell any more that nothing was in it.
    """

    parts: tuple[Part, ...]
    position: Position
    limited: bool = False
    ends: Mapping[str, bool] = field(default_factory=dict)
    lost: tuple[Lost, ...] = ()
    passes: bool = False


MOST_REJECTED = 10_000
"""Bad rows of one part, of which more are refused as a whole. A batch may leave out those behind one more."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that cannot be decoded.

    Attributes:
        number: Where it is in its part: the line of a file from 1, the offset in a partition.
        reason: Why, on one line; without the row itself.
        raw: What stands there, as far as it is text; at most some kilobytes.
    """

    number: int
    reason: str
    raw: str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of a part, in its order.

    Attributes:
        rows: Decoded.
        rejected: Those among them that cannot be.
        numbers: Asked for where each of `rows` is in its part, as `Rejected.number` says it. None: rows of the part are
            counted, rejected ones among them.
    """

    rows: pa.Table
    rejected: tuple[Rejected, ...] = ()
    numbers: Callable[[], Sequence[int]] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Lag:
    """The amount that waits behind a position. None where nobody knows.

    Attributes:
        rows: Rows, or what comes nearest.
        bytes: As the source counts them.
        newest: Event time or time of arrival of the newest of them, in microseconds since 1970 UTC.
        is_estimate: The numbers are no counts.
    """

    rows: int | None = None
    bytes: int | None = None
    newest: int | None = None
    is_estimate: bool = False


class Connector(Protocol):
    """One source, opened by a process. Every call may be the first one after a restart: what it must know is in its
    arguments.

    Each method may raise ConfigurationError (wrong address, refused password: which never stands in the message),
    InputError (the source is not what it was, data cannot be read), LostError (data that were there are gone) and
    TransientError (try again later).
    """

    def begin(self, start: str | datetime | Position) -> Position:
        """Return the position from which to read.

        Args:
            start: "earliest", "latest", a time from which on rows are wanted, or a position as of `Planned`. A person
                may have written that one: ConfigurationError for what is none.
        """
        ...

    def plan(
        self, position: Position, limits: Limits, upto: Position | None = None, hold: Collection[str] = ()
    ) -> Planned:
        """Return the next parts behind a position; none if nothing has come.

        Args:
            position: As `begin` or an earlier plan says.
            limits: How much may come at most; one part may exceed them where it cannot be cut.
            upto: A position that must not be passed: a branch reads no further than its pipeline.
            hold: Partitions of which nothing is to be read now: their event time is too far ahead.
        """
        ...

    def read(self, part: Part) -> Iterator[Batch]:
        """Return all rows of a part, the same each time. Batches have bounded size, and the same columns."""
        ...

    def verify(self, parts: Sequence[Part]) -> None:
        """Before an epoch is committed: these parts are still there, and still what was read."""
        ...

    def lag(self, position: Position) -> Lag:
        """Return the amount that waits behind a position."""
        ...

    def where(self, part: Part) -> str:
        """Return the part's place as people know it, for errors."""
        ...

    def committed(self, position: Position) -> None:
        """Take note that a checkpoint with this position is committed, for tools that may be told. Nothing is read
        back. It must not raise for a server that is away."""
        ...

    def close(self) -> None:
        """Give back connections."""
        ...


@runtime_checkable
class Placing(Protocol):
    """An optional part of a connector, for people who look for a row.

    Without it, a row is named by its part and its number in the part.
    """

    def places(self, part: Part, rows: int) -> Sequence[str | None]:
        """Return the place of each row of a part, as people look it up at the source, or None where that is lost.

        Args:
            rows: How many rows the part has given.
        """
        ...


@runtime_checkable
class Titling(Protocol):
    """An optional part of a connector whose parts have names that say nothing to people.

    Without it, the part's name stands in errors and in quarantine tables.
    """

    def title(self, part: Part) -> str:
        """Return what people know the part by: a file of a table, a range of a query's rows."""
        ...


@runtime_checkable
class Peeking(Protocol):
    """An optional part of a connector whose parts may turn out to have no rows. A sensor then asks for no run."""

    def is_empty(self, part: Part) -> bool:
        """Return whether a part is known to have no row. It looks at a few rows at most. False: it is not known."""
        ...


def _without_options(_: str | None) -> Mapping[str, str]:
    """Return the options of `Opening.connect` if nothing is configured.

    A function with a name can be pickled.
    """
    return {}


@dataclass(frozen=True, slots=True)
class Opening:
    """The context in which a source's definition is opened.

    Attributes:
        pipeline: The pipeline's title.
        resolve: Fills {placeholders} from the configuration.
        options: What the configuration says under `connections.<name>` for the definition's connection, secrets
            resolved. They are handed to the client as they are, and are never recorded or shown.
        patience: Seconds after which a server that does not answer is away: few for a caller that only looks.
        connect: The same by the name of a connection, for a definition that opens others.
        s3: Settings of S3, as `weir.settings.configuration.S3Settings`.
    """

    pipeline: str
    resolve: Callable[[str], str]
    options: Mapping[str, str]
    s3: Any = None
    patience: float = RUNNING
    connect: Callable[[str | None], Mapping[str, str]] = _without_options


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The properties of every source. The values are frozen, and sources are compared by all of them.

    Attributes:
        name: By which checkpoints record how far it has been read.
        event_time: The timestamp column that drives the watermark.
        start: Where a pipeline begins that has not read the source yet.
        on_bad: A row that cannot be decoded fails the epoch ("fail") or goes to the stage's quarantine table
            ("quarantine").
        on_lost: Data that are gone before they were read fail the run ("fail") or are left out and recorded ("skip").
        idle_after: For how long ("5m") a partition whose end is reached has been quiet before it holds event time back
            no more. None: never.
        max_ahead: How much event time ("1h") a partition may be read before the slowest one. None: any.
        max_future: How far ("1d") an event time may lie ahead of processing time; a later one is a bad row. None: any.
        connection: The name below `connections` of the configuration.
        archive: What is read is kept in the pipeline's storage as long as a checkpoint needs it.
        evolve: New columns are read from where they first appear ("add"), or counted and reported ("fix").
    """

    name: str
    event_time: str | None = None
    start: str | datetime | tuple[tuple[str, Any], ...] | Position = EARLIEST
    on_bad: str = FAIL
    on_lost: str = FAIL
    idle_after: str | timedelta | None = "5m"
    max_ahead: str | timedelta | None = None
    max_future: str | timedelta | None = None
    connection: str | None = None
    archive: bool = False
    evolve: str = FIX

    @property
    def hands_out_changes(self) -> bool:
        """True if the source's rows say by `_change_type` what became of a row."""
        return False

    @property
    def kind(self) -> str:
        """The name in Dagster and messages: "kafka", "postgres"."""
        return type(self).__name__.removesuffix("Source").lower()

    @property
    def decodes(self) -> bool:
        """True if single rows may turn out to be bad."""
        return True

    @property
    def declared_columns(self) -> pa.Schema | None:
        """The columns that the definition gives all its rows, in canonical types; None: what is read says them."""
        return None

    @property
    def replayable(self) -> bool:
        """True if a part can be read again after a crash, so that exactly once can hold."""
        return True

    def length(self, name: str) -> int | None:
        """Return one of its durations in microseconds. Raises PipelineError for what is none."""
        value = getattr(self, name)
        return None if value is None else micros(value, f"source {self.name}", name)

    def check(self) -> None:
        """Raises PipelineError for what makes no sense in any source."""
        policies = {"on_bad": (FAIL, QUARANTINE), "on_lost": (FAIL, SKIP), "evolve": (FIX, ADD)}
        for name, choices in policies.items():
            if getattr(self, name) not in choices:
                raise PipelineError(
                    f"{name}={getattr(self, name)!r} is no policy.",
                    where=f"source {self.name}",
                    next=f"Say {' or '.join(map(repr, choices))}.".replace("'", '"'),
                )
        for name in ("idle_after", "max_ahead", "max_future"):
            self.length(name)
            if getattr(self, name) is not None and self.event_time is None and name != "idle_after":
                raise PipelineError(
                    f"{name} goes by event time, and the source {self.name} has none.",
                    where=f"source {self.name}",
                    next="Name its column: event_time=...",
                )

    def open(self, opening: Opening) -> Connector:
        """Return the connector of this source."""
        raise NotImplementedError(f"{type(self).__name__}.open")
