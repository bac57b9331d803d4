"""The one place where a pipeline's sinks are reached, whatever they are: Delta tables below its `tables/`, or systems.

A table is asked for its log. Any other sink is opened as a `Publisher` when it is first needed, and closed with the
process' use of the pipeline. On a branch every sink is a table (`Pipeline.capabilities`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import RLock
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from state_ops.checkpoints.checkpoint import Checkpoint
from state_ops.checkpoints.sink_link import SinkLink
from state_ops.errors import DamageError, FencedError, PipelineError
from state_ops.ids import CheckpointId
from state_ops.records.snapshot_files import TABLES
from state_ops.storage.storage import Storage
from weir.connectors.delta_sink import (
    CHANGE_TYPE,
    described,
    refuse_replaced,
)
from weir.connectors.sink import Expiring, InParts, Judging, Publisher, Sink, SinkOpening, ValueRules
from weir.connectors.source import LOOKING, RUNNING
from weir.definition import EXACTLY_ONCE, Pipeline
from weir.settings.configuration import Settings
from weir.sinks import delta
from weir.sinks.changes import check_columns, columns_of
from weir.sinks.delta import PublishedTable
from weir.sinks.predicates import check_condition

_PARTITION_TYPES = (pa.types.is_string, pa.types.is_integer, pa.types.is_boolean, pa.types.is_date)


_FOOTERS = 4096
_OTHER_DELIVERY = (
    "Is it ahead, and was its delivery changed from at least once? It has rows of an epoch that failed: let it deliver "
    "at least once until it has got rows of a later one. Is it behind, and was its delivery changed from at most once? "
    "It lacks rows that were lost: let it deliver at most once until it has got rows of a later epoch. "
)


class Sinks:
    """A pipeline's sinks, as one process reaches them. Used as a context manager, it closes what it has opened.

    Args:
        prove: Raises FencedError unless this process owns the pipeline. None: it does not, and only looks.
    """

    def __init__(
        self, pipeline: Pipeline, settings: Settings, storage: Storage, prove: Callable[[], None] | None = None
    ) -> None:
        self._pipeline, self._settings, self._storage = pipeline, settings, storage
        self._prove, self._patience = prove or _not_owned, RUNNING if prove is not None else LOOKING
        self._publishers: dict[str, Publisher] = {}
        self._lock = RLock()
        self.footers: dict[str, pq.FileMetaData] = {}  # of staged files, until they are published
        self.tables: dict[str, PublishedTable] = {}  # as this process has left them at its last publish

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back connections."""
        with self._lock:
            while self._publishers:
                self._publishers.popitem()[1].close()

    def publisher(self, name: str) -> Publisher:
        """Return the publisher of a sink that is no table, opened once.

        Raises:
            PipelineError: The code has no such sink any more.
        """
        sink = self._pipeline.sink(name)
        if sink is None or self._versions(sink):
            raise PipelineError(
                f"Checkpoints of {self._pipeline.title} have rows for the sink {name}, which its code has no more.",
                next="Put the sink back until they are published, or rewind to a checkpoint before them.",
            )
        with self._lock:
            if name not in self._publishers:
                self._publishers[name] = sink.open(self._opening(sink))
            return self._publishers[name]

    def _opening(self, sink: Sink) -> SinkOpening:
        return SinkOpening(
            app_id=f"{self._pipeline.app_id}/{sink.name}",
            resolve=partial(self._settings.filled, self._pipeline.name),
            options=self._settings.connection(sink.connection),
            prove=self._prove,
            patience=self._patience,
            exact=self._pipeline.delivery == EXACTLY_ONCE,
            lossy=self._pipeline.at_most_once,
        )

    def keep(self, footers: Mapping[str, pq.FileMetaData]) -> None:
        """Keep the footers of staged files until these are published, which tell what a table's log is to say of
        them. Those that are lost are read again."""
        with self._lock:
            if len(self.footers) > _FOOTERS:  # of epochs that were declined
                self.footers.clear()
            self.footers.update({path: footer for path, footer in footers.items() if path.startswith(TABLES)})

    # -- what holds for every sink

    def fits(self, sink: Sink, schema: pa.Schema) -> bool:
        """Return whether a sink takes rows of these columns for certain, without a look at the sink."""
        left = self.tables.get(sink.name)
        return left is not None and delta.fits(left, schema, evolves=sink.capabilities.evolves)

    def check(self, sink: Sink, schema: pa.Schema) -> None:
        """Raise PipelineError unless a sink takes rows of these columns."""
        if CHANGE_TYPE in schema.names:
            refuse_replaced(sink, f"table {sink.name}")
        if self._pipeline.capabilities(sink).newest_of:
            check_columns(sink, schema)
        elif sink.capabilities.replaces_where is not None:
            check_condition(sink.name, sink.capabilities.replaces_where, schema)
        if self._versions(sink):
            self._as_table(sink, schema, delta.check_table)
        else:
            self.publisher(sink.name).check(schema)

    def rules(self, sink: Sink, schema: pa.Schema) -> ValueRules | None:
        """Return a sink's rules for the values of rows of these columns, or None if a table would ask no less."""
        if self._versions(sink):
            return None
        publisher = self.publisher(sink.name)
        return publisher.rules(schema) if isinstance(publisher, Judging) else None

    def prepare(self, sink: Sink, schema: pa.Schema) -> None:
        """Create what is not there, or check what is. Only right before a commit: a declined epoch leaves nothing."""
        if not len(schema):
            raise PipelineError(
                f"The rows for the sink {sink.name} have no columns.",
                where=f"sink {sink.name}",
                next="Let the stage's function return rows; or take out its sink, if its state is all that is wanted.",
            )
        if self._versions(sink):
            self._as_table(sink, schema, delta.ensure)
        else:
            publisher = self.publisher(sink.name)
            publisher.check(schema)
            publisher.prepare(schema)

    def check_chain(self, name: str, head: Checkpoint | None, lacking: Sequence[CheckpointId | None] = ()) -> None:
        """Raise DamageError if a sink is ahead of the newest checkpoint or behind it.

        Ahead: its rows come from checkpoints that the registry does not have, so replaying their input would double
        them.

        Args:
            lacking: Of a pipeline that is taken back, the checkpoint that the sink has for certain, and then those that
                were committed since: it may be at any of them.
        """
        problem = self.diverged(name, head, lacking)
        if problem is None:
            return
        if self._at_table(name, head):
            raise delta.damaged(self._storage, name, problem, _OTHER_DELIVERY)
        raise DamageError(
            f"The sink {name} is not where the registry says: {problem}.",
            where=f"sink {name}",
            next=f"Nothing was published. {self._restored(name, head)}Was its marker removed, or another system put in "
            "its place? Put it back first. Were its checkpoints deleted by `weir cancel --delete`? Go on under another "
            "pipeline name. "
            f"{_OTHER_DELIVERY}docs/playbooks/sink-altered.md",
        )

    def _restored(self, name: str, head: Checkpoint | None) -> str:
        """Return what a person does who has restored the system of a sink that is no table; empty where that cannot
        be the reason."""
        published, sink = head.published(name) if head is not None else None, self._pipeline.sink(name)
        if published is None or sink is None or self._kind(sink) != kind_in(head, name):
            return ""
        marker = self.marker(name, head, published) or 0
        if marker >= published:
            return ""
        before = f"checkpoint {marker}" if marker else "before its first rows"
        return (
            f"Was its system restored to {before}, and are later rows gone? Go back there with it: weir rewind "
            f"{self._pipeline.title} --to {marker} --force. "
        )

    def check_rows(self, name: str, head: Checkpoint | None) -> None:
        """Check that a table still has the rows that were published in it. Raises DamageError when others have restored
        it to a version before them."""
        if self._at_table(name, head):
            delta.check_rows(self._storage, self._pipeline.app_id, name)

    def check_delivered(self, head: Checkpoint | None, early_id: int) -> None:
        """Raise DamageError if sinks may have rows of an epoch that failed while delivery was at least once.

        Delivery is at most once now.

        Args:
            early_id: The highest id of an epoch that was begun at least once; 0: none.

        Raises:
            DamageError: They may. Once positions are committed before rows, none of those are read again.
        """
        if self._pipeline.at_most_once and self._pipeline.sinks and early_id > (head.id if head is not None else 0):
            raise DamageError(
                f"Sinks may have rows of epoch {early_id}, which failed while the pipeline delivered at least once. At "
                "most once would read them again, and deliver them a second time.",
                where=f"pipeline {self._pipeline.title}",
                next="Nothing was published. Let it deliver at least once until the sinks have got rows of a later "
                "epoch and the run has come to its end, then change: docs/how-to/delivery.md",
            )

    def diverged(self, name: str, head: Checkpoint | None, lacking: Sequence[CheckpointId | None] = ()) -> str | None:
        """Return in words how a sink differs from the newest checkpoint, or None if it does not, or has no marker.

        Args:
            lacking: As for `check_chain`.
        """
        sink = self._pipeline.sink(name)
        was, now = kind_in(head, name), self._kind(sink) if sink is not None else kind_in(head, name)
        if was != now and head is not None and head.published(name) is not None:
            return f"it is {now or 'a table'} now, and checkpoint {head.published(name)} knows it as {was or 'a table'}"
        published = head.published(name) if head is not None else None
        if lacking and self.marker(name, head, lacking[0]) in lacking:
            return None
        marker = self.marker(name, head, published) if self._pipeline.early else None
        if marker is not None and marker > (published or 0):
            return None  # it has rows of an epoch that failed after they were delivered
        lacks = self._pipeline.at_most_once  # rows that it was to get may be lost
        if self._at_table(name, head):
            return delta.diverged(self._storage, self._pipeline.app_id, name, head, lacks=lacks)
        if sink is None or not sink.exactly_once:
            return None
        marker = self.marker(name, head, published)
        if marker == published or (lacks and (marker or 0) < (published or 0)):
            return None
        return f"its last published checkpoint is {marker}, but the registry's newest is {published}"

    def marker(self, name: str, head: Checkpoint | None, published: int | None) -> int | None:
        """Return the newest checkpoint that a sink has; None: none, or the code has the sink no more.

        Args:
            published: The one that the registry says was published last.
        """
        if self._at_table(name, head):
            return delta.marker(self._storage, self._pipeline.app_id, name)
        if self._pipeline.sink(name) is None:
            return None
        return marker_of(self.publisher(name), published)

    def begun(self, name: str) -> int | None:
        """Return the checkpoint of whose rows a sink has a part, where it publishes in several transactions; None:
        none."""
        sink = self._pipeline.sink(name)
        if sink is None or self._versions(sink):
            return None
        publisher = self.publisher(name)
        return publisher.begun() if isinstance(publisher, InParts) else None

    def newest(self, names: Iterable[str], head: Checkpoint | None) -> CheckpointId:
        """Return the highest id that some sinks have; 0: none. At least once, they may have rows of an epoch of which
        neither registry nor lease knows any more: they would take other rows under its id for the same."""
        asked = names if self._pipeline.early else ()
        markers = [self.marker(name, head, head.published(name) if head is not None else None) for name in asked]
        return CheckpointId(max((marker or 0 for marker in markers), default=0))

    def renew(self, name: str, head: Checkpoint | None) -> None:
        """Write a marker again that its system may forget. Only in the process that owns the pipeline."""
        published, sink = head.published(name) if head is not None else None, self._pipeline.sink(name)
        if published is None or sink is None or self._versions(sink):
            return
        publisher = self.publisher(name)
        if isinstance(publisher, Expiring):
            publisher.renew(published)

    def link(
        self, name: str, id: CheckpointId, before: CheckpointId | None, parent: SinkLink | None = None
    ) -> SinkLink:
        """Return the record of a checkpoint about a sink that it has output for.

        Args:
            before: The checkpoint that was published in it last.
            parent: What the checkpoint that this one follows records of it.
        """
        sink, link = self._pipeline.sink(name), SinkLink(id, before)
        kind = self._kind(sink) if sink is not None else None
        return (link if kind is None else link.updated(kind=kind)).following(parent)

    def _as_table(self, sink: Sink, schema: pa.Schema, check: Callable[..., None]) -> None:
        """Check or create a table for what a sink makes of rows of these columns."""
        upserts = bool(self._pipeline.capabilities(sink).newest_of)
        check(
            self._storage,
            sink.name,
            described(sink, columns_of(schema) if upserts else schema),
            keyed=upserts or sink.capabilities.replaces,
            partition_by=() if upserts else self._partitions(sink, schema),
            evolves=sink.capabilities.evolves,
        )

    def _partitions(self, sink: Sink, schema: pa.Schema) -> tuple[str, ...]:
        """Return the partition columns of a table, by which its rows can be told apart."""
        for name in sink.capabilities.partition_by:
            type = schema.field(name).type if name in schema.names else None
            if type is None or not any(test(type) for test in _PARTITION_TYPES):
                what = f"is {type}" if type is not None else "is no column of its rows"
                raise PipelineError(
                    f"The table {sink.name} cannot be partitioned by {name}, which {what}.",
                    where=f"table {sink.name}",
                    next="Partition by texts, integers, booleans or dates; of a time make its date.",
                )
        return sink.capabilities.partition_by

    def _versions(self, sink: Sink) -> bool:
        return self._pipeline.capabilities(sink).has_versions

    def _kind(self, sink: Sink) -> str | None:
        return None if self._versions(sink) else sink.kind

    def _at_table(self, name: str, head: Checkpoint | None) -> bool:
        sink = self._pipeline.sink(name)
        return self._versions(sink) if sink is not None else kind_in(head, name) is None


def marker_of(publisher: Publisher, published: int | None) -> int | None:
    """Return the newest checkpoint that a sink has which is no table.

    Args:
        published: What the registry says was published last.
    """
    if published is not None and isinstance(publisher, Expiring):
        return publisher.recalled(published)
    return publisher.marker()


def kind_in(checkpoint: Checkpoint | None, name: str) -> str | None:
    """Return the kind of sink by a checkpoint, or None for a table or a sink that the checkpoint does not know."""
    link = checkpoint.sinks.get(name) if checkpoint is not None else None
    return link.kind if link is not None else None


def _not_owned() -> None:
    raise FencedError("This process does not own the pipeline.", next="Nothing to do: it only looks.")
