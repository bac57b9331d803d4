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
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from state_ops.durations import micros
from state_ops.errors import ConfigurationError, PipelineError

if TYPE_CHECKING:
    import pyarrow as pa

Json = Mapping[str, Any]
Position = Mapping[str, Any]
"""How far a source has been read, as JSON. Its connector alone knows what is in it; it must not grow without bound."""

PARQUET = "parquet"
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
    was, files = None if position is None else kind_of(position), source.capabilities.files
    kind = (files or source).kind
    if was is None or was == kind:
        return None
    what = f"The source {source.name!r} was a {was} source when it was read, and is a {kind} source now."
    next = (
        f"Give it another name, with {source.name!r} in retired= and the new one in added= of the pipeline, and it is "
        "read from its start."
    )
    if files is None:
        next += f" Or say where it goes on: weir seek PIPELINE {source.name} --to ..."
    return what, next


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one slice.

    Attributes:
        parts: The largest number of parts, at least 1.
        rows: The largest number of rows. A connector that does not know it counts what comes nearest, such as a range
            of offsets.
        bytes: The largest number of bytes, as the source counts them.

    Example:
        >>> from weir import Limits, Opening, generator
        >>> connector = generator(end=10).open(Opening("docs", str, {}))
        >>> planned = connector.plan({"next": 0}, Limits(parts=2, rows=4, bytes=1 << 20))
        >>> [part.rows for part in planned.parts], planned.limited
        ([4], True)
    """

    parts: int
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A bounded piece of one partition of a source, which can be read again.

    Attributes:
        name: The name of these rows, which no other rows of the source ever get. It has no slash.
        partition: The partition that the rows are of. The event time of a source is the least over its partitions.
        place: Further facts that `read` needs, as JSON, without secrets.
        rows: The largest number of rows that the part may have, if it is known.
        bytes: The number of bytes, as the source counts them, if it is known.

    Example:
        >>> from weir import Limits, Opening, generator
        >>> connector = generator(end=10).open(Opening("docs", str, {}))
        >>> (part,) = connector.plan({"next": 0}, Limits(parts=1, rows=4, bytes=1 << 20)).parts
        >>> first, again = list(connector.read(part)), list(connector.read(part))
        >>> first == again
        True
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
        what: One sentence about the loss, with numbers.

    Example:
        >>> from weir import Lost, Planned
        >>> planned = Planned((), {"offset": 20}, lost=(Lost("partition 0", "Offsets 10 to 19 have expired."),))
        >>> [lost.where for lost in planned.lost]
        ['partition 0']
    """

    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Planned:
    """The next parts of a source.

    Attributes:
        parts: The parts, in the order in which they are read.
        position: The position behind them.
        limited: True if a limit ended the plan, so that more waits.
        ends: By partition, whether this plan reaches the partition's end: no row that is there now stays unread, and
            none is about to become readable. Every partition of the source is named.
        lost: Data that was left out.
        passes: True if the position must be recorded even without a part. The data that it has passed may soon be gone,
            and then nobody can tell that there were no rows in it.

    Example:
        >>> from weir import Limits, Opening, generator
        >>> connector = generator(end=10).open(Opening("docs", str, {}))
        >>> planned = connector.plan({"next": 8}, Limits(parts=1, rows=4, bytes=1 << 20))
        >>> planned.position, planned.limited
        ({'next': 10}, False)
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
        number: The row's place in its part: the line of a file from 1, the offset in a partition.
        reason: The reason, on one line, without the row itself.
        raw: The row as far as it is text; at most some kilobytes.

    Example:
        >>> import pyarrow as pa
        >>> from weir import Batch, Rejected
        >>> bad = Rejected(2, "price is no number", raw='{"id": 2, "price": "x"}')
        >>> batch = Batch(pa.table({"id": [1, 3]}), rejected=(bad,), numbers=lambda: [1, 3])
        >>> [(rejected.number, rejected.reason) for rejected in batch.rejected]
        [(2, 'price is no number')]
    """

    number: int
    reason: str
    raw: str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of a part, in the part's order.

    Attributes:
        rows: The rows that could be decoded.
        rejected: The rows among them that could not.
        numbers: A function that returns the place of each of `rows` in the part, like `Rejected.number`. None: the rows
            of the part are counted, rejected ones among them.

    Example:
        >>> from weir import Limits, Opening, generator
        >>> connector = generator(end=10).open(Opening("docs", str, {}))
        >>> (part,) = connector.plan({"next": 0}, Limits(parts=1, rows=4, bytes=1 << 20)).parts
        >>> [batch.rows.column("seq").to_pylist() for batch in connector.read(part)]
        [[0, 1, 2, 3]]
    """

    rows: pa.Table
    rejected: tuple[Rejected, ...] = ()
    numbers: Callable[[], Sequence[int]] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Lag:
    """The amount that waits behind a position. A figure that is not known is None.

    Attributes:
        rows: The number of rows, or what comes nearest.
        bytes: The number of bytes, as the source counts them.
        newest: The event time, or the time of arrival, of the newest row, in microseconds since 1970 UTC.
        is_estimate: True if the numbers are estimates.

    Example:
        >>> from weir import Opening, generator
        >>> connector = generator(end=10).open(Opening("docs", str, {}))
        >>> connector.lag({"next": 4}).rows
        6
    """

    rows: int | None = None
    bytes: int | None = None
    newest: int | None = None
    is_estimate: bool = False


class Connector(Protocol):
    """One source, opened by a process.

    Every call may be the first one after a restart, so a method knows only its arguments. docs/how-to/connectors.md
    shows how to write one.

    Each method may raise:

    - ConfigurationError: A wrong address, or a refused password, which never stands in the message.
    - InputError: The source is not what it was, or data cannot be read.
    - LostError: Data that were there are gone.
    - TransientError: The server is away. Try again later.

    Example:
        >>> from weir import Limits, Opening, Position, generator
        >>> connector = generator(end=10).open(Opening("docs", str, {}))
        >>> limits = Limits(parts=1, rows=4, bytes=1 << 20)
        >>> position: Position = connector.begin("earliest")
        >>> while parts := (planned := connector.plan(position, limits)).parts:
        ...     print([batch.rows.num_rows for part in parts for batch in connector.read(part)])
        ...     position = planned.position
        [4]
        [4]
        [2]
        >>> connector.close()
    """

    def begin(self, start: str | datetime | Position) -> Position:
        """Return the position from which to read.

        Args:
            start: "earliest", "latest", a time from which on rows are wanted, or a position as in `Planned`. A person
                may have written the position: raise ConfigurationError if it is none.
        """
        ...

    def plan(
        self, position: Position, limits: Limits, upto: Position | None = None, hold: Collection[str] = ()
    ) -> Planned:
        """Return the next parts behind a position; none if nothing has come.

        Args:
            position: A position of `begin` or of an earlier plan.
            limits: The limits of the plan. A part that cannot be cut may exceed them.
            upto: A position that must not be passed: a branch reads no further than its pipeline.
            hold: Partitions that must not be read now, since their event time is too far ahead.
        """
        ...

    def read(self, part: Part) -> Iterator[Batch]:
        """Return all rows of a part, the same each time. Batches have bounded size, and the same columns."""
        ...

    def verify(self, parts: Sequence[Part]) -> None:
        """Raise an error unless these parts are still there, unchanged since they were read.

        It is called before an epoch is committed.
        """
        ...

    def lag(self, position: Position) -> Lag:
        """Return the amount that waits behind a position."""
        ...

    def where(self, part: Part) -> str:
        """Return the part's place for error messages, such as a topic, partition and offsets."""
        ...

    def committed(self, position: Position) -> None:
        """Take note that a checkpoint with this position is committed.

        It is for tools that show how far a source has been read. Nothing is read back. It must not raise an error if
        a server is away.
        """
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
        resolve: A function that fills {placeholders} from the configuration.
        options: The options under `connections.<name>` of the configuration, for the definition's connection, secrets
            resolved. They are handed to the client as they are, and are never recorded or shown.
        patience: Seconds after which a server that does not answer is away; few for a caller that only looks.
        connect: A function that returns the options of a connection by its name, for a definition that opens others.
        s3: The settings of S3, as `weir.settings.configuration.S3Settings`.

    Example:
        >>> from weir import Opening
        >>> params = {"landing": "/data"}
        >>> opening = Opening("orders", lambda text: text.format(**params), {"password": "secret"})
        >>> opening.resolve("{landing}/orders"), opening.patience
        ('/data/orders', 30.0)
    """

    pipeline: str
    resolve: Callable[[str], str]
    options: Mapping[str, str]
    s3: Any = None
    patience: float = RUNNING
    connect: Callable[[str | None], Mapping[str, str]] = _without_options


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCapabilities:
    """The properties of a source by which the engine acts. It never asks which source it has.

    Attributes:
        files: The `files(...)` that have the source's rows. Weir reads them where they lie, and opens no connector.
            Their names, event time and policies are those of the source. The newest row that was read is the event time
            then; of a connector's rows it is the least over the partitions.
        place: A directory, URI or pattern at which people find the data, with {placeholders}. None: a server has them.

    Example:
        >>> from weir import delta, files
        >>> files("{landing}/*.csv", format="csv").capabilities.files.pattern
        '{landing}/*.csv'
        >>> delta.table("{lake}/orders").capabilities
        SourceCapabilities(files=None, place='{lake}/orders')
    """

    files: FileSource | None = None
    place: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The properties of every source. The values are frozen, and sources are compared by all of them.

    Attributes:
        name: The name under which checkpoints record how far the source has been read.
        event_time: The timestamp column that drives the watermark.
        start: Where a pipeline begins that has not read the source yet.
        on_bad: A row that cannot be decoded fails the epoch ("fail") or goes to the stage's quarantine table
            ("quarantine").
        on_lost: Data that are gone before they were read fail the run ("fail") or are left out and recorded ("skip").
        idle_after: The time ("5m") after which a partition that is read to its end and stays quiet no longer holds
            event time back. None: it always does.
        max_ahead: How much event time ("1h") a partition may be read ahead of the slowest one. None: any.
        max_future: How far ("1d") an event time may lie ahead of processing time; a row with a later one is bad. None:
            any.
        connection: The name below `connections` of the configuration.
        archive: Rows that were read are kept in the pipeline's storage as long as a checkpoint needs them.
        evolve: New columns are read from where they first appear ("add"), or counted and reported ("fix").

    Example:
        >>> from weir import generator
        >>> source = generator(name="clicks", max_ahead="1h")
        >>> source.kind, source.length("max_ahead"), source.replayable
        ('generator', 3600000000, True)
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
    def capabilities(self) -> SourceCapabilities:
        """The source's capabilities for the engine. Here: its connector hands over rows."""
        return SourceCapabilities()

    @property
    def decodes(self) -> bool:
        """True if single rows may turn out to be bad."""
        files = self.capabilities.files
        return files is None or files.decodes

    @property
    def declared_columns(self) -> pa.Schema | None:
        """The columns that the definition gives all its rows, in canonical types; None: what is read says them."""
        files = self.capabilities.files
        return None if files is None else files.declared_columns

    @property
    def replayable(self) -> bool:
        """True if a part can be read again after a crash, so that exactly once can hold."""
        return True

    def length(self, name: str) -> int | None:
        """Return one of the source's durations, in microseconds.

        Args:
            name: "idle_after", "max_ahead" or "max_future".

        Raises:
            PipelineError: The value is no duration.
        """
        value = getattr(self, name)
        return None if value is None else micros(value, f"source {self.name}", name)

    def check(self) -> None:
        """Raise PipelineError unless the properties make sense together, in any source."""
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


@dataclass(frozen=True, slots=True)
class FileSource(Source):
    """Files that arrive in a directory, taken in name order.

    Attributes:
        pattern: Directory and file name pattern, with {placeholders} from the configuration.
        format: What the files are: "parquet" or what is decoded: "csv", "json", "avro".
        options: How such files are written, as `connectors.formats` names it.
        schema: Their columns. None: those of the first file.
        partitions: By column that stands in the files' directories its type: "string", "int" or "date"; of others the
            first file's value says it.
        below_floor: What to do about new names that sort below the oldest remembered one: "fail" or "warn".
        on_bad: As of every source; a file that cannot be read is set aside as a whole.
    """

    pattern: str
    name: str = field(default="files", kw_only=True)
    below_floor: str = field(default=FAIL, kw_only=True)
    format: str = field(default=PARQUET, kw_only=True)
    options: tuple[tuple[str, Any], ...] = field(default=(), kw_only=True)
    schema: pa.Schema | None = field(default=None, kw_only=True)
    partitions: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)

    @property
    def capabilities(self) -> SourceCapabilities:
        return SourceCapabilities(files=self, place=self.pattern)

    @property
    def decodes(self) -> bool:
        return self.format != PARQUET

    @property
    def declared_columns(self) -> pa.Schema | None:
        if self.schema is None:
            return None
        from state_ops.arrow.frames import canonical_schema

        return canonical_schema(self.schema)
