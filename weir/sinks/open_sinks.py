"""The one place where a pipeline's sinks are opened.

A sink is opened as a `Publisher` when it is first needed, and closed with the process' use of the pipeline. On a branch
a table is opened instead (`Pipeline.target`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import RLock
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from state_ops.errors import DamageError, FencedError, PipelineError
from state_ops.ids import CheckpointId
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.sink_link import SinkLink
from state_ops.records.snapshot_files import TABLES
from state_ops.storage.storage import Storage
from weir.connectors.delta.publishers import AppendPublisher
from weir.definition import EXACTLY_ONCE, Pipeline
from weir.definition.change_feed import CHANGE_TYPE, refuse_replaced
from weir.definition.delta_sink import DeltaSink
from weir.definition.sink import Expiring, InParts, Judging, Publisher, Sink, SinkOpening, ValueRules, Versioned
from weir.definition.source import LOOKING, RUNNING
from weir.settings.configuration import Settings
from weir.sinks.recorded_sink import check_system, table_sink

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
        self._publishers: dict[str, list[tuple[Sink, Publisher]]] = {}
        self._lock = RLock()
        self.footers: dict[str, pq.FileMetaData] = {}  # of staged files, until they are published

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
                for _, publisher in self._publishers.popitem()[1]:
                    publisher.close()

    def publisher(self, name: str) -> Publisher:
        """Return the publisher of a sink as the code has it, opened once.

        Raises:
            PipelineError: The code has no such sink any more.
        """
        sink = self._pipeline.sink(name)
        if sink is None:
            raise PipelineError(
                f"Checkpoints of {self._pipeline.title} have rows for the sink {name}, which its code has no more.",
                next="Put the sink back until they are published, or rewind to a checkpoint before them.",
            )
        return self._opened(self._pipeline.target(sink))

    def publisher_of(self, name: str, checkpoint: Checkpoint) -> Publisher:
        """Return the publisher of a sink as a checkpoint has recorded it.

        Raises:
            PipelineError: The code has to have the sink as it was then, and has it no more.
        """
        link, resolve = checkpoint.sinks[name], partial(self._settings.filled, self._pipeline.name)
        if link.kind is not None:
            check_system(self._pipeline, name, checkpoint, resolve)
            return self.publisher(name)
        return self._opened(self._pipeline.target(table_sink(self._pipeline, name, link, checkpoint.id, resolve)))

    def _reached(self, name: str, head: Checkpoint | None) -> Publisher | None:
        """Return the publisher of a sink that the code has, or of a table that it has no more; None: of another system
        that it has no more."""
        if self._pipeline.sink(name) is not None:
            return self.publisher(name)
        return self._opened(DeltaSink(name=name)) if kind_in(head, name) is None else None

    def _versioned(self, name: str, head: Checkpoint | None) -> Versioned | None:
        """Return the publisher of a sink with versions; None of another one, which is not opened."""
        sink = self._pipeline.sink(name)
        if sink is not None and not self._pipeline.capabilities(sink).has_versions:
            return None
        publisher = self._reached(name, head)
        return publisher if isinstance(publisher, Versioned) else None

    def _opened(self, sink: Sink) -> Publisher:
        with self._lock:
            opened = self._publishers.setdefault(sink.name, [])
            known = next((publisher for definition, publisher in opened if definition == sink), None)
            if known is None:
                known = sink.open(self._opening(sink))
                opened.append((sink, known))
            return known

    def _opening(self, sink: Sink) -> SinkOpening:
        return SinkOpening(
            app_id=f"{self._pipeline.app_id}/{sink.name}",
            resolve=partial(self._settings.filled, self._pipeline.name),
            options=self._settings.connection(sink.connection),
            prove=self._prove,
            patience=self._patience,
            exact=self._pipeline.delivery == EXACTLY_ONCE,
            lossy=self._pipeline.at_most_once,
            storage=self._storage,
            scratch=self._settings.work_dir,
            table=AppendPublisher.of,
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
        publisher = self._versioned(sink.name, None)
        return publisher is not None and publisher.fits(schema)

    def check(self, sink: Sink, schema: pa.Schema) -> None:
        """Raise PipelineError unless a sink takes rows of these columns."""
        if CHANGE_TYPE in schema.names:
            refuse_replaced(sink, f"table {sink.name}")
        self.publisher(sink.name).check(schema)

    def rules(self, sink: Sink, schema: pa.Schema) -> ValueRules | None:
        """Return a sink's rules for the values of rows of these columns, or None if a table would ask no less."""
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
        publisher = self.publisher(sink.name)
        if not isinstance(publisher, Versioned):  # whose `prepare` compares the columns with the table's anyway
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
        publisher = self._versioned(name, head)
        if publisher is not None:
            raise publisher.damaged(problem, _OTHER_DELIVERY)
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
        publisher = self._versioned(name, head)
        if publisher is not None:
            publisher.check_rows()

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
        publisher = self._versioned(name, head)
        if publisher is not None:
            return publisher.diverged(published, lacks=lacks)
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
        publisher = self._reached(name, head)
        return marker_of(publisher, published) if publisher is not None else None

    def begun(self, name: str) -> int | None:
        """Return the checkpoint of whose rows a sink has a part, where it publishes in several transactions; None:
        none."""
        if self._pipeline.sink(name) is None:
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
        published = head.published(name) if head is not None else None
        if published is None or self._pipeline.sink(name) is None:
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

    def _kind(self, sink: Sink) -> str | None:
        return None if self._pipeline.capabilities(sink).has_versions else sink.kind


def marker_of(publisher: Publisher, published: int | None) -> int | None:
    """Return the newest checkpoint that a sink has.

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
