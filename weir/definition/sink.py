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
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from state_ops.errors import DamageError
from weir.definition.source import RUNNING, default_name

if TYPE_CHECKING:
    import pyarrow as pa

    from state_ops.arrow.unfit_values import UnfitValue
    from state_ops.storage.storage import Storage


class Rows(Protocol):
    """The committed rows of a checkpoint for one sink. They are the same each time.

    Without rows, the marker alone moves.

    Example:
        >>> from weir import no_rows
        >>> rows = no_rows()
        >>> rows.count, list(rows.batches())
        (0, [])
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
        """The beginning of their epoch, before which no process has published any of them. None: it is not known."""
        ...

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Return the rows in bounded batches, each time in the same order.

        Rows of one key come in the order in which the stage handed them out.
        """
        ...


@dataclass(frozen=True, slots=True)
class Published:
    """The result of one publish.

    Attributes:
        rows: The number of rows that were added or changed.
        version: The sink's own number of the publish, if it has one.
        files: The number of files that came and went. None: as many as were staged.

    Example:
        >>> from weir import Published, SinkOpening, foreach, no_rows
        >>> publisher = foreach(print, name="out").open(SinkOpening("weir/orders/main/out", str, {}, lambda: None))
        >>> publisher.publish(None, 1, no_rows()) == Published(0)
        True
    """

    rows: int
    version: int | None = None
    files: int | None = field(default=None, repr=False)


class Publisher(Protocol):
    """One sink, opened by the process that owns the pipeline.

    docs/how-to/connectors.md shows how to write one. The example keeps rows in memory.

    Each method may raise:

    - ConfigurationError: A wrong address, or a refused password, which never stands in the message.
    - PipelineError: The sink does not take such rows.
    - DamageError: The sink is not where the registry says.
    - TransientError: Try again: either nothing has been done, or all of it.

    Example:
        >>> from weir import Published, no_rows
        >>> class Shelf:
        ...     def __init__(self):
        ...         self.rows, self.newest = [], None
        ...     def check(self, schema): ...
        ...     def prepare(self, schema): ...
        ...     def marker(self):
        ...         return self.newest
        ...     def publish(self, previous, checkpoint, rows):
        ...         if self.newest is not None and self.newest >= checkpoint:
        ...             return Published(0)
        ...         self.rows += [row for batch in rows.batches() for row in batch.to_pylist()]
        ...         self.newest = checkpoint
        ...         return Published(rows.count)
        ...     def close(self): ...
        >>> shelf = Shelf()
        >>> shelf.publish(None, 1, no_rows())
        Published(rows=0, version=None)
        >>> shelf.marker()
        1
    """

    def check(self, schema: pa.Schema) -> None:
        """Raise PipelineError unless the sink takes rows of these columns. Nothing is created.

        It is called before the first row, and before each commit.
        """
        ...

    def prepare(self, schema: pa.Schema) -> None:
        """Create the table or topic if it is not there.

        It is called right before a commit, so that a declined epoch leaves nothing.
        """
        ...

    def marker(self) -> int | None:
        """Return the newest checkpoint that the sink has; None if it has never had one.

        It only reads: `weir fsck` asks too, beside a coordinator that lives.
        """
        ...

    def publish(self, previous: int | None, checkpoint: int, rows: Rows) -> Published:
        """Bring rows in and move the marker from `previous` to `checkpoint`: both, or neither.

        Args:
            previous: The checkpoint that the registry says was published last; None: there was none.
            checkpoint: The checkpoint that is published. If the marker is at or above it, nothing is done.
            rows: The checkpoint's rows, possibly none.

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
        """Yield the values that the sink would refuse.

        Rows that are good must cost little.

        Args:
            rows: Rows in canonical types, whose values are fit for a table (`state_ops.arrow.unfit_values`).
        """
        ...


@runtime_checkable
class Judging(Protocol):
    """Implement this too if your sink refuses rows because of their values.

    After the commit, a row that the sink refuses would block all later ones. So rows are judged before, while they are
    staged. A refused row declines its epoch, or is set aside if its source says `on_bad="quarantine"`.
    """

    def rules(self, schema: pa.Schema) -> ValueRules:
        """Return the rules for rows of these columns, as the sink is now.

        It is called in each epoch that has rows, after `check`.
        """
        ...


@runtime_checkable
class TakingBack(Protocol):
    """Implement this too if rows can be taken back from your sink. The definition's `stays` is then None.

    Example:
        >>> from weir import Published, TakingBack
        >>> class Shelf:
        ...     def __init__(self):
        ...         self.rows_by_checkpoint, self.newest = {1: ["a"], 2: ["b"]}, 2
        ...     def take_back(self, previous, checkpoint, to, rows):
        ...         kept = {id: rows for id, rows in self.rows_by_checkpoint.items() if to is not None and id <= to}
        ...         self.rows_by_checkpoint, self.newest = kept, checkpoint
        ...         return Published(0)
        >>> shelf = Shelf()
        >>> isinstance(shelf, TakingBack)
        True
        >>> shelf.take_back(2, 3, to=1, rows=None)
        Published(rows=0, version=None)
        >>> shelf.rows_by_checkpoint
        {1: ['a']}
    """

    def take_back(self, previous: int | None, checkpoint: int, to: int | None, rows: Rows) -> Published:
        """Remove the rows of all checkpoints after `to`, bring others in, and move the marker from `previous` to
        `checkpoint`: all of it, or nothing.

        Args:
            previous: The marker that is expected.
            checkpoint: The checkpoint of the rewind or the promotion. If the marker is at or above it, nothing is done.
            to: The newest checkpoint whose rows stay; None: no rows stay.
            rows: The rows of a branch that is promoted, as rows of `checkpoint`; none for a rewind.

        Returns:
            The number of rows that were brought in.

        Raises:
            DamageError: The marker is neither `previous` nor at or above `checkpoint`.
        """
        ...


@runtime_checkable
class Expiring(Protocol):
    """Implement this too if your system may forget the marker, and the rows tell what it was.

    Example:
        >>> from weir import Expiring
        >>> class Topic:
        ...     marker, newest_row = None, 7
        ...     def recalled(self, published):
        ...         return self.newest_row if self.marker is None else self.marker
        ...     def renew(self, published):
        ...         self.marker = self.recalled(published)
        >>> topic = Topic()
        >>> topic.renew(7)
        >>> isinstance(topic, Expiring), topic.marker
        (True, 7)
    """

    def recalled(self, published: int) -> int | None:
        """Return the marker or, if it was forgotten, the marker that the rows prove. It only reads.

        Args:
            published: The checkpoint that the registry says was published last. Rows of older checkpoints prove no
                other marker.
        """
        ...

    def renew(self, published: int) -> None:
        """Write the marker again, as `recalled` says it.

        Each run begins with this, once all checkpoints are published.
        """
        ...


@runtime_checkable
class InParts(Protocol):
    """Implement this too if your publisher brings a checkpoint's rows in by several transactions."""

    def begun(self) -> int | None:
        """Return the checkpoint whose rows are there in part; None: there is none. It only reads."""
        ...


@runtime_checkable
class Versioned(Protocol):
    """A further part of a publisher whose definition says `has_versions`.

    Its rows are `StagedRows`: they also say their files and their checkpoint.
    """

    def fits(self, schema: pa.Schema) -> bool:
        """Return whether the sink takes rows of these columns for certain, without a look at it."""
        ...

    def diverged(self, published: int | None, *, lacks: bool) -> str | None:
        """Return in words how the sink differs from what the registry says; None: it does not, or is not there yet.

        Args:
            published: The checkpoint that the registry says was published last.
            lacks: Whether the sink may have less.
        """
        ...

    def check_rows(self) -> None:
        """Raise DamageError if others have gone back to a version before the newest publish."""
        ...

    def damaged(self, how: str, also: str = "") -> DamageError:
        """Return the error for a sink that is not where the registry says.

        Args:
            how: What is wrong, in words.
            also: One more cause, with what to do about it.
        """
        ...

    def replace_range(self, rows: Rows) -> Published:
        """Bring rows in instead of those of a range of event time, which the checkpoint's record of the sink says."""
        ...


@dataclass(frozen=True, slots=True)
class SinkOpening:
    """The context in which a sink's definition is opened.

    Attributes:
        app_id: The owner of the marker, `weir/<pipeline>/<branch>/<sink>`. It never changes.
        resolve: A function that fills {placeholders} from the configuration.
        options: The options under `connections.<name>` of the configuration, secrets resolved. They are never recorded
            or shown.
        prove: A function that raises FencedError unless this process still owns the pipeline. Call it before a
            transaction that could fence the owner's, and again when your own was fenced. It always raises in a process
            that only looks, such as `weir plan` and `weir fsck`, which call `check` and `marker`.
        patience: Seconds after which a server that does not answer is away; few for a caller that only looks.
        exact: True if the pipeline delivers exactly once. Otherwise the sink may have parts of epochs that failed, or
            lack rows that were lost, and neither is damage.
        lossy: True if the pipeline delivers at most once. A sink without any trace of a checkpoint is then no damage,
            since all rows for it may be lost. A sink whose place is gone is damage still.
        storage: The pipeline's storage, for a sink that `has_versions`.
        scratch: A directory on a local disk, for such a sink.
        table: A function that opens a table of the pipeline's own, for `DeltaSink`.

    Example:
        >>> from weir import SinkOpening, foreach
        >>> opening = SinkOpening("weir/orders/main/out", str, {}, prove=lambda: None, exact=False)
        >>> publisher = foreach(print, name="out").open(opening)
        >>> publisher.marker() is None
        True
    """

    app_id: str
    resolve: Callable[[str], str]
    options: Mapping[str, str]
    prove: Callable[[], None]
    patience: float = RUNNING
    exact: bool = True
    lossy: bool = False
    storage: Storage | None = None
    scratch: Path | None = None
    table: Callable[[Sink, SinkOpening], Publisher] | None = None


def default_sink_name(place: str) -> str:
    """Return the default name of a sink by its place: that of a source, in letters that may become part of paths."""
    return re.sub(r"[^a-z0-9_]+", "_", default_name(place).lower()).lstrip("_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The properties of a sink by which the engine acts. It never asks which sink it has.

    Attributes:
        takes_files: Tasks stage rows in the sink's own directory, and publishing makes these files a part of the sink.
        has_versions: The sink is a Delta table, in the pipeline's `tables/` or at `at`. Its versions are read, compared
            and gone back to.
        newest_of: Key columns, of which the sink itself keeps the newest row each. They are null in no row. Empty: rows
            stay side by side, or come in order.
        newest_by: Columns by which the newest row of a key is found within an epoch.
        replaces: An epoch's rows take the place of others, which the sink then has no more.
        replaces_where: The condition that all these rows satisfy. None: partitions are replaced.
        partition_by: Columns of which each staged file has one value.
        evolves: The sink gets the columns of its rows that it lacks.
        event_time: The column by which the author says that a row belongs to a day.
        at: The directory or URI of a table outside of the pipeline's storage, with {placeholders}.
        descriptions: By column, what it is, for people.

    Example:
        >>> from weir import delta
        >>> delta.append("orders").capabilities.takes_files, delta.upsert("newest", key="id").capabilities.newest_of
        (True, ('id',))
    """

    takes_files: bool = False
    has_versions: bool = False
    newest_of: tuple[str, ...] = ()
    newest_by: tuple[str, ...] = ()
    replaces: bool = False
    replaces_where: str | None = None
    partition_by: tuple[str, ...] = ()
    evolves: bool = False
    event_time: str | None = None
    at: str | None = None
    descriptions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """The properties of every sink. The values are frozen, and sinks are compared by all of them.

    Attributes:
        name: The name under which checkpoints know the sink; unique in a pipeline.
        connection: The name below `connections` of the configuration.

    Example:
        >>> from weir import delta, foreach, postgres
        >>> sinks = delta.append("orders"), postgres.sink("shop.orders"), foreach(print)
        >>> [(sink.name, sink.kind, sink.exactly_once) for sink in sinks]
        [('orders', 'delta', True), ('shop_orders', 'postgres', True), ('print', 'foreach', False)]
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
        """The reason why a rewind cannot take rows back, as a clause; None if the publisher has `take_back`."""
        return f"what {self.kind} has been given cannot be taken back"

    @property
    def capabilities(self) -> Capabilities:
        """The sink's capabilities for the engine. Here: it takes rows in batches, and no more."""
        return Capabilities()

    def publishes_by(self, resolve: Callable[[str], str]) -> Mapping[str, Any]:  # noqa: ARG002
        """Return the properties that decide how rows come into the sink, in values of JSON.

        A checkpoint records them. If the code has others when the checkpoint's rows are to be published, the rows are
        refused. By default they are all properties of the definition.

        Args:
            resolve: A function that fills {placeholders} from the configuration.
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
    """Return the rows of a checkpoint that has none for a sink.

    Example:
        >>> from weir import no_rows
        >>> no_rows().count
        0
    """
    return _NoRows()


@dataclass(frozen=True, slots=True)
class _NoRows:
    schema: Any = None
    count: int = 0
    since: Any = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        return iter(())
