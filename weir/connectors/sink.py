"""The Protocol of a sink: a definition that authors write, and the publisher that it opens.

A checkpoint's rows are staged as Parquet files in the pipeline's storage and named by the commit, so they outlive any
crash. After the commit the publisher brings them into the sink: **one compare-and-set within one transaction of the
sink**, its marker going from the checkpoint that the registry says was published last to this one. Whoever comes after
a crash publishes again what the sink lacks, oldest first; a marker at or above a checkpoint makes that nothing. A
rewind moves the marker too, so that no abandoned checkpoint can be published by a process that has not heard of it
(docs/adr/0061-a-marker-in-every-sink.md). Third parties write both classes with what `weir.api` exports, and test
them with `weir.testing.SinkContract`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from state_ops.arrow.unfit_values import UnfitValue
from weir.connectors.source import RUNNING, default_name


class Rows(Protocol):
    """The committed rows of a checkpoint for one sink. They are the same each time.

    Without rows, the marker alone moves.
    """

    @property
    def schema(self) -> pa.Schema | None:
        """Their columns in canonical types; None where there are no rows."""
        ...

    @property
    def count(self) -> int:
        """The number of rows."""
        ...

    @property
    def since(self) -> datetime | None:
        """When their epoch began: no process has published any of them before. None: that is not known."""
        ...

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Return the rows in bounded batches, each time in the same order. Rows of one key come in the order in which
        its stage handed them out."""
        ...


@dataclass(frozen=True, slots=True)
class Published:
    """The result of one publish.

    Attributes:
        version: The sink's own number of it, if it has any.
        rows: That it changed.
    """

    rows: int
    version: int | None = None


class Publisher(Protocol):
    """One sink, opened by the process that owns the pipeline.

    Each method may raise ConfigurationError (wrong address, refused password: which never stands in the message),
    PipelineError (the sink does not take such rows), DamageError (it is not where the registry says) and TransientError
    (try again: nothing, or the whole, has been done).
    """

    def check(self, schema: pa.Schema) -> None:
        """Raise PipelineError unless the sink takes rows of these columns. Nothing is created.

        It is called before the first row, and before each commit.
        """
        ...

    def prepare(self, schema: pa.Schema) -> None:
        """Create what is not there (table, topic). Right before a commit, so that a declined epoch leaves nothing."""
        ...

    def marker(self) -> int | None:
        """Return the newest checkpoint that the sink has; None if it has never had one. It only reads: `weir fsck` asks
        too, beside a coordinator that lives."""
        ...

    def publish(self, previous: int | None, checkpoint: int, rows: Rows) -> Published:
        """Bring rows in and move the marker from `previous` to `checkpoint`, both or neither.

        Args:
            previous: The checkpoint that the registry says was published last; None: there was none.
            checkpoint: The one that is published. A marker at or above it makes this a no-op.
            rows: Possibly none.

        Raises:
            DamageError: The marker is neither `previous` nor at or above `checkpoint`.
        """
        ...

    def close(self) -> None:
        """Give back connections."""
        ...


class ValueRules(Protocol):
    """A sink's rules for values beyond their types.

    They are small and picklable: each task judges the rows that it stages by them.
    """

    def refused(self, rows: pa.Table) -> Iterator[UnfitValue]:
        """Yield what the sink would not take of rows in canonical types, whose values are fit for a table already
        (`state_ops.arrow.unfit_values`). Rows that are good must cost little."""
        ...


@runtime_checkable
class Judging(Protocol):
    """A further part of a publisher whose sink refuses rows because of their values.

    After the commit a row that the sink refuses would block all later ones. So rows are judged before, while they are
    staged: a refused one declines its epoch, or is set aside if its source says `on_bad="quarantine"`.
    """

    def rules(self, schema: pa.Schema) -> ValueRules:
        """Return the rules for rows of these columns, which `check` has passed, as the sink is now. Asked in each epoch
        that has rows."""
        ...


@runtime_checkable
class TakingBack(Protocol):
    """A further part of a publisher whose definition's `stays` is None: rows can be taken back from its sink."""

    def take_back(self, previous: int | None, checkpoint: int, to: int | None, rows: Rows) -> Published:
        """Remove the rows of all checkpoints after `to`, bring others in, and move the marker from `previous` to
        `checkpoint`: all of it, or nothing.

        Args:
            previous: The marker that is expected.
            checkpoint: The rewind's or the promotion's. A marker at or above it makes this a no-op.
            to: The newest checkpoint whose rows stay; None: none do.
            rows: Those of a branch that is promoted, as rows of `checkpoint`; of a rewind none.

        Returns:
            How many rows were brought in.

        Raises:
            DamageError: The marker is neither `previous` nor at or above `checkpoint`.
        """
        ...


@runtime_checkable
class Expiring(Protocol):
    """A further part of a publisher whose system may forget the marker, and can make it again from the rows."""

    def recalled(self, published: int) -> int | None:
        """Return the marker; where it was forgotten, what the rows say it was. It only reads.

        Args:
            published: The checkpoint that the registry says was published last: rows of older ones prove no other.
        """
        ...

    def renew(self, published: int) -> None:
        """Write the marker again, as `recalled` says it. Each run begins with this, once all is published."""
        ...


@runtime_checkable
class InParts(Protocol):
    """A further part of a publisher that brings a checkpoint's rows in by several transactions."""

    def begun(self) -> int | None:
        """Return the checkpoint of whose rows a part is there; None: none is. It only reads."""
        ...


@dataclass(frozen=True, slots=True)
class SinkOpening:
    """The context in which a sink's definition is opened.

    Attributes:
        app_id: `weir/<pipeline>/<branch>/<sink>`, stable for ever: whose marker it is.
        resolve: Fills {placeholders} from the configuration.
        options: What the configuration says under `connections.<name>`, secrets resolved; never recorded or shown.
        prove: Raises FencedError unless this process still owns the pipeline; always in one that only looks, as
            `weir plan` and `weir fsck` do, which ask for `check` and `marker`. Call it before a transaction that could
            fence the owner's, and again when one's own was fenced.
        patience: Seconds after which a server that does not answer is away: few for a caller that only looks.
        exact: Whether the pipeline delivers exactly once. Otherwise the sink may have parts of epochs that failed, or
            lack what was lost to it, and neither is damage.
        lossy: Whether it delivers at most once. That nothing tells of a checkpoint is then no damage, since all that
            the sink was to get may be lost; a place that is gone is damage still.
    """

    app_id: str
    resolve: Callable[[str], str]
    options: Mapping[str, str]
    prove: Callable[[], None]
    patience: float = RUNNING
    exact: bool = True
    lossy: bool = False


def default_sink_name(place: str) -> str:
    """Return the default name of a sink by its place: as for a source, in letters that may become part of paths."""
    return re.sub(r"[^a-z0-9_]+", "_", default_name(place).lower()).lstrip("_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """The properties of every sink. The values are frozen, and sinks are compared by all of them.

    Attributes:
        name: By which checkpoints know it; unique in a pipeline.
        connection: The name below `connections` of the configuration.
    """

    name: str
    connection: str | None = None

    @property
    def kind(self) -> str:
        """The name in Dagster and messages: "kafka", "postgres"."""
        return type(self).__name__.removesuffix("Sink").lower()

    @property
    def exactly_once(self) -> bool:
        """True if the sink's publish is a compare-and-set. Otherwise rows may come twice after a crash."""
        return True

    @property
    def stays(self) -> str | None:
        """Why rows cannot be taken back by a rewind, as a clause; None where its publisher has `take_back`."""
        return f"what {self.kind} has been given cannot be taken back"

    def publishes_by(self, resolve: Callable[[str], str]) -> Mapping[str, Any]:  # noqa: ARG002
        """Return what decides how rows come into the sink, in values of JSON. A checkpoint records it, and its rows are
        refused if the code says anything else before they are published. Here: all that the definition says.

        Args:
            resolve: Fills {placeholders} from the configuration.
        """
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.compare}
        return {name: value for name, value in values.items() if name not in _PLACES and _is_plain(value)}

    def open(self, opening: SinkOpening) -> Publisher:
        """Return the publisher of this sink."""
        raise NotImplementedError(f"{type(self).__name__}.open")


_PLACES = ("name", "connection")


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def no_rows() -> Rows:
    """Return the rows of a checkpoint that has none for a sink."""
    return _NoRows()


@dataclass(frozen=True, slots=True)
class _NoRows:
    schema: Any = None
    count: int = 0
    since: Any = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        return iter(())
