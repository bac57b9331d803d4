"""The registry: Delta tables that record completed checkpoints and every file they name. The ONLY commit point.

    registry/checkpoints/    one row per completed checkpoint. A row here = the checkpoint exists
    registry/state_files/    partitioned by checkpoint, a full listing each time. Written first, meaningless without the
                             row
    registry/publications/   which Delta version made which checkpoint's output visible in which sink
    registry/pins/           savepoints and branches: checkpoints that retention leaves alone, by name

`checkpoints` is read first and decides. Rows of `state_files` count only if their `commit_id` is the one in the
checkpoint's row, which also carries their number: a mismatch is damage and stops every deletion. All four tables are
claimed by a coordinator in that order and committed through `FencedTable` alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import DeltaError

from state_ops.counts import agrees, counted
from state_ops.delta.fenced_table import FencedTable, fenced, probe_conditional_put, remove_probes
from state_ops.delta.log_entries import DataFile, TableVersion
from state_ops.errors import ConfigurationError, DamageError, FencedError, PrunedError, WeirError
from state_ops.extras import version
from state_ops.ids import CheckpointId, Generation
from state_ops.moments import to_micros
from state_ops.records.checkpoint import NEWEST_FORMAT, Checkpoint
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.pins import Pin
from state_ops.records.publications import Publication
from state_ops.records.recorded import Recorded
from state_ops.records.sink_link import SinkLink
from state_ops.records.snapshot_files import StateFile
from state_ops.storage.paths import is_registry_data
from state_ops.storage.storage import Storage
from state_ops.storage.transfers import at_once, together

_TIME = pa.timestamp("us", tz="UTC")
JSON_COLUMNS = ("offsets", "slice", "watermarks", "operators", "sinks", "inputs", "ms", "totals", "lineage")

CHECKPOINTS = pa.schema(
    [
        ("id", pa.int64()),
        ("parent_id", pa.int64()),
        ("kind", pa.string()),
        ("generation", pa.int64()),
        ("commit_id", pa.string()),
        ("triggered_at", _TIME),
        ("completed_at", _TIME),
        ("epoch_now", _TIME),
        ("trigger", pa.string()),
        ("reason", pa.string()),
        *[(name, pa.string()) for name in JSON_COLUMNS],
        ("files", pa.int64()),
        ("bytes_total", pa.int64()),
        ("bytes_new", pa.int64()),
        ("run_id", pa.string()),
        ("format_version", pa.int64()),
        ("digest", pa.string()),
        ("weir_version", pa.string()),
    ]
)
STATE_FILES = pa.schema(
    [
        ("checkpoint_id", pa.int64()),
        ("commit_id", pa.string()),
        ("operator", pa.string()),
        ("subtask", pa.int64()),
        ("kind", pa.string()),
        ("name", pa.string()),
        ("path", pa.string()),
        ("bytes", pa.int64()),
        ("digest", pa.string()),
        ("new", pa.bool_()),
        ("attempt", pa.string()),
        ("snapshot", pa.string()),
        ("sink", pa.string()),
        ("rows", pa.int64()),
    ]
)
PUBLICATIONS = pa.schema(
    [
        ("checkpoint_id", pa.int64()),
        ("sink", pa.string()),
        ("delta_version", pa.int64()),
        ("files", pa.int64()),
        ("rows", pa.int64()),
        ("published_at", _TIME),
        ("ms", pa.float64()),
        ("digest", pa.string()),
    ]
)
PINS = pa.schema(
    [
        ("kind", pa.string()),
        ("name", pa.string()),
        ("checkpoint_id", pa.int64()),
        ("commit_id", pa.string()),
        ("created_at", _TIME),
        ("reason", pa.string()),
        ("digest", pa.string()),
    ]
)

# What a row's digest is of: no other columns and in this order, for ever, since other releases compute it too. A column
# that comes later needs a digest column of its own if anything is decided by it; `weir_version` informs people alone.
# The digest finds rows that somebody or something altered. Who alters on purpose can make a new one, as with the
# digests of objects: storage has to be guarded, nothing here authenticates.
_DIGESTED = {
    "checkpoints": (
        *(
            "id",
            "parent_id",
            "kind",
            "generation",
            "commit_id",
            "triggered_at",
            "completed_at",
            "epoch_now",
            "trigger",
            "reason",
        ),
        *("offsets", "slice", "watermarks", "operators", "sinks", "inputs", "ms", "totals", "lineage"),
        *("files", "bytes_total", "bytes_new", "run_id", "format_version"),
    ),
    "publications": ("checkpoint_id", "sink", "delta_version", "files", "rows", "published_at", "ms"),
    "pins": ("kind", "name", "checkpoint_id", "commit_id", "created_at", "reason"),
}
_NAMED_BY = {"checkpoints": ("id",), "publications": ("checkpoint_id", "sink"), "pins": ("kind", "name")}

_ID_DIGITS = 20  # in the names of listings and rows, so that they sort by checkpoint


@dataclasses.dataclass(frozen=True, slots=True)
class OrphanListing:
    """A listing without its checkpoint.

    Attributes:
        path: The path of the listing's file in its table.
    """

    path: str
    checkpoint_id: CheckpointId
    commit_id: str
    files: tuple[StateFile, ...]


Row = TypeVar("Row")


class _Rows(Generic[Row]):
    """The rows of a whole table as values. Files never change, so each is read, checked against its digest and parsed
    once.
    """

    def __init__(self, table: FencedTable, parse: Callable[[dict[str, Any]], Row]) -> None:
        self._table, self._parse, self._name = table, parse, table.path.rpartition("/")[2]
        self._read: dict[str, tuple[Row, ...]] = {}
        self._written: dict[str, pa.Table] = {}

    def all(self, as_owner: bool) -> list[Row]:
        read = self._table.read(self._of, as_owner=as_owner)
        newest = max(read, default="")  # files are numbered: those after it are still to be committed
        self._read, self._written = read, {path: rows for path, rows in list(self._written.items()) if path > newest}
        return [row for rows in read.values() for row in rows]

    def write(self, rows: Sequence[dict[str, Any]], path: str, bounds: Sequence[tuple[str, int]]) -> DataFile:
        """Write rows as one file of the table. It counts once it is committed, and need not be read back."""
        table = pa.Table.from_pylist(list(rows), schema=self._table.file_schema)
        digests = [self._digest(row) for row in table.to_pylist()]  # the values as a reader would get them
        at = table.schema.get_field_index("digest")
        table = table.set_column(at, table.schema.field(at), pa.array(digests, pa.string()))
        file = self._table.write_table(table, path, bounds=bounds)
        self._written[file.path] = table
        return file

    def of(self, file: DataFile) -> tuple[Row, ...]:
        """Return the rows of one of the table's files."""
        parsed = self._read.get(file.path)
        if parsed is not None:
            return parsed
        written = self._written.get(file.path)
        rows = self._table.read_rows([file]) if written is None else written.to_pylist()
        for row in rows:
            self._check(row, file)
        return tuple(map(self._parse, rows))

    def _digest(self, row: Mapping[str, Any]) -> str:
        content = json.dumps([row.get(column) for column in _DIGESTED[self._name]], default=to_micros)
        return hashlib.sha256(content.encode()).hexdigest()

    def _check(self, row: Mapping[str, Any], file: DataFile) -> None:
        if row["digest"] is None or row["digest"] == self._digest(row):  # rows of older releases have no digest
            return
        named = ", ".join(f"{column} {row[column]}" for column in _NAMED_BY[self._name])
        raise DamageError(
            f"A row of the registry is not what was committed, its digest is another one: {self._name}, {named}.",
            where=self._table.storage.full(f"{self._table.path}/{file.path}"),
            next="Nothing was used or deleted. Find out who altered it, and bring the table back from a backup of the "
            "bucket.",
        )

    def _of(self, files: list[DataFile]) -> dict[str, tuple[Row, ...]]:
        storage = self._table.storage
        if storage.is_local:
            rows = [self.of(file) for file in files]
        else:  # a file for each retained checkpoint, and each waits for storage
            rows = together(lambda file, _: self.of(file), files, at_once=storage.transfers)
        return {file.path: parsed for file, parsed in zip(files, rows, strict=True)}


class Registry:
    """One pipeline's registry. It alone writes four tables, in the order of the protocol.

    Attributes:
        storage: Rooted at the pipeline's directory.
        app_id: The same for ever for a pipeline and branch.
    """

    def __init__(self, storage: Storage, app_id: str) -> None:
        def table(name: str, schema: pa.Schema, row: type, partition: Sequence[str] = ()) -> FencedTable:
            return FencedTable(storage, f"registry/{name}", schema, app_id, partition, _optional(row))

        self._checkpoints = table("checkpoints", CHECKPOINTS, Checkpoint)
        self._files = table("state_files", STATE_FILES, StateFile, ["checkpoint_id"])
        self._publications = table("publications", PUBLICATIONS, Publication)
        self._pins = table("pins", PINS, Pin)
        self._completed = _Rows(self._checkpoints, self._parse_checkpoint)
        self._published = _Rows(self._publications, lambda row: Publication(**_written(row, Publication)))
        self._named = _Rows(self._pins, lambda row: Pin(**_written(row, Pin)))
        self._listings: dict[str, tuple[StateFile, ...]] = {}

    @property
    def _tables(self) -> tuple[FencedTable, ...]:
        """The tables, in the order in which they are claimed."""
        return self._checkpoints, self._files, self._publications, self._pins

    # -- reading: no right needed, no JVM
    # With as_owner=True storage is not asked: the answer is what this object has seen or committed last. That is for
    # the owner of the generation: nobody else has written as long as nobody took over, and what the owner decides from
    # the answer takes effect only by its next commit or after `prove`.

    def generation(self) -> Generation:
        return self._checkpoints.generation()

    def checkpoints(self, *, as_owner: bool = False) -> list[Checkpoint]:
        """Return all retained checkpoints, oldest first."""
        return sorted(self._completed.all(as_owner), key=lambda row: row.id)

    def head(self) -> Checkpoint | None:
        """Return the newest completed checkpoint, on which the next epoch builds."""
        completed = self.checkpoints()
        return completed[-1] if completed else None

    def files(self, checkpoint: Checkpoint) -> tuple[StateFile, ...]:
        """Return the full listing of one checkpoint.

        Raises:
            DamageError: It is not exactly the listing that was committed with the checkpoint.
        """
        if checkpoint.commit_id in self._listings:
            return self._listings[checkpoint.commit_id]
        if checkpoint.files == 0:
            return ()
        rows = self._files.read(
            lambda files: self._files.read_table([file for file in files if _is_listing(file, checkpoint)])
        )
        rows = rows.filter(pc.equal(rows["commit_id"], checkpoint.commit_id))
        if len(rows) != checkpoint.files:
            if not self.holds(checkpoint):
                raise PrunedError(f"Checkpoint {checkpoint.id} was pruned while it was being read.", next="Look again.")
            raise self._damaged(
                checkpoint,
                f"it has {counted(checkpoint.files, 'file')}, but {len(rows)} {agrees(len(rows), 'is', 'are')} listed",
            )
        listing = _to_files(rows)
        self._listings[checkpoint.commit_id] = listing
        return listing

    def publications(self, *, as_owner: bool = False) -> list[Publication]:
        return sorted(self._published.all(as_owner), key=lambda row: (row.checkpoint_id, row.sink))

    def pins(self, *, as_owner: bool = False) -> list[Pin]:
        """Savepoints and branches, oldest first."""
        pins = sorted(self._named.all(as_owner), key=lambda pin: (pin.created_at, pin.name))
        counts = Counter((pin.kind, pin.name) for pin in pins)
        if len(counts) < len(pins):  # checkpoints are being rewritten, or that was cut off
            retained = {row.commit_id for row in self.checkpoints(as_owner=as_owner)}
            pins = [pin for pin in pins if pin.commit_id in retained or counts[pin.kind, pin.name] == 1]
        return pins

    def pinned(self, kind: str, name: str) -> Pin | None:
        """Return the pin of that name; None if there is none."""
        return next((pin for pin in self.pins() if (pin.kind, pin.name) == (kind, name)), None)

    def orphan_listings(self, *, as_owner: bool = False) -> list[OrphanListing]:
        """Return the listings whose checkpoint has no row.

        A prune or a commit was cut off, or a running restore still reads them.
        """
        named = {_listing_path(row) for row in self.checkpoints(as_owner=as_owner)}

        def read(files: list[DataFile]) -> list[OrphanListing]:
            return [self._orphan_listing(file) for file in files if file.path not in named]

        return self._files.read(read, as_owner=as_owner)

    def _orphan_listing(self, file: DataFile) -> OrphanListing:
        commit_id = file.path.rpartition("/")[2][_ID_DIGITS + 1 :].removesuffix(".parquet")
        files = self._listings.get(commit_id)
        if files is None:
            files = _to_files(self._files.read_table([file]))
        return OrphanListing(file.path, CheckpointId(int(dict(file.partition)["checkpoint_id"] or 0)), commit_id, files)

    # -- writing: the owner of the generation alone

    def prove(self, generation: Generation) -> None:
        """Check that `generation` still owns the registry, right before something is deleted.

        Raises:
            FencedError: Another generation owns it.
        """
        owner = self.generation()
        if owner != generation:
            raise fenced(self._checkpoints.path, generation, owner)

    def take_over(self, after: Generation | None = None) -> Generation:
        """Claim the next generation, before anything else is read, cleaned or published.

        Args:
            after: The generation that must own the registry now. A coordinator that only renews its own claim gives it,
                so that it does not take the pipeline away from somebody who took over meanwhile.

        Raises:
            FencedError: Another generation than `after` owns the registry.
        """
        self._probe()
        for table in self._tables:
            table.ensure()
        generation = self._checkpoints.claim(after=after)
        for table in self._tables[1:]:
            table.claim(generation)
        for table in self._tables:
            table.upgrade(generation)
        return generation

    def _probe(self) -> None:
        before = self.generation()
        try:
            probe_conditional_put(self._checkpoints.storage, before)
        except (ConfigurationError, DeltaError, OSError) as error:
            if (now := self.generation()) == before:
                raise
            # Whoever took over meanwhile removes our probe as a leftover, so its failure tells nothing of the storage.
            raise FencedError(
                f"Another coordinator took the pipeline over at the same moment, with generation {now}.",
                where=self._checkpoints.storage.full(self._checkpoints.path),
                next="Nothing was changed. That one has the pipeline: ask again once it has ended.",
            ) from error

    def commit(
        self,
        checkpoint: Checkpoint,
        files: Sequence[StateFile],
        *,
        newest: CheckpointId | None = None,
        rewritten: Sequence[tuple[Checkpoint, Sequence[StateFile]]] = (),
    ) -> None:
        """Make the checkpoint exist: its listing first, then its row, which is the commit point.

        The row goes in only while the table's head is the checkpoint's parent and we own the generation.

        Args:
            newest: For a rewind, the head that it leaves behind.
            rewritten: Rows that take the place of retained ones with the same ids, in the same commit, each with its
                listing and a commit id of its own. Savepoints go over to them. The listings of the rows that they
                replace are then what the listings of pruned checkpoints are.
        """
        head = checkpoint.parent_id if newest is None else newest
        rows = [(checkpoint, files), *rewritten]
        # Write all files at once, since they count for nothing yet; then the entries that name them, one by one.
        writes = [partial(self._write_row, row) for row, _ in rows]
        writes += [partial(self._write_listing, row, listing) for row, listing in rows if listing]
        written = at_once(writes)
        data, listings = written[: len(rows)], written[len(rows) :]
        if listings:
            self._files.commit(checkpoint.generation, listings)
        removes = self._carried_names(checkpoint.generation, [row for row, _ in rewritten]) if rewritten else []
        with suppress(_Landed):  # an earlier try of this very commit is there, although it was reported as a conflict
            self._checkpoints.commit(checkpoint.generation, data, removes, _head_is(head, data[0].path, removes))
        self._listings |= {row.commit_id: tuple(listing) for row, listing in rows}
        if rewritten:
            self._checkpoints.storage.delete_files([f"{self._checkpoints.path}/{file.path}" for file in removes])
            self.drop_lost_names(checkpoint.generation)

    def _carried_names(self, generation: Generation, rewritten: Sequence[Checkpoint]) -> list[DataFile]:
        """Give the names of checkpoints to the rows that are about to replace theirs; returns the files of the latter.

        From here until `drop_lost_names` there are two of each name. One of them names no row, and `pins` passes it
        over: so a name is never without its checkpoint, wherever this is cut off.
        """
        commit_ids = {row.id: row.commit_id for row in rewritten}
        carried = [
            self._write_pin(dataclasses.replace(pin, commit_id=commit_ids[pin.checkpoint_id]))
            for pin in self.pins(as_owner=True)
            if pin.checkpoint_id in commit_ids
        ]
        if carried:
            self._pins.commit(generation, carried)
        return self._checkpoints.read(
            lambda files: [file for file in files if _bound(file, "id") in commit_ids], as_owner=True
        )

    def drop_lost_names(self, generation: Generation) -> None:
        """Remove those of two equal names that name no row: see `_carried_names`."""
        names = {(pin.kind, pin.name, pin.commit_id) for pin in self.pins(as_owner=True)}

        def is_lost(file: DataFile) -> bool:
            return all((pin.kind, pin.name, pin.commit_id) not in names for pin in self._named.of(file))

        self._pins.storage.delete_files(_removed(self._pins, generation, is_lost))

    def _write_listing(self, checkpoint: Checkpoint, files: Sequence[StateFile]) -> DataFile:
        rows = _to_table(files, self._files.file_schema, checkpoint.commit_id)
        return self._files.write_table(rows, _listing_path(checkpoint), (("checkpoint_id", str(checkpoint.id)),))

    def _write_row(self, checkpoint: Checkpoint) -> DataFile:
        row = {name: getattr(checkpoint, name) for name in CHECKPOINTS.names}
        row["weir_version"] = version()  # of the code that writes the row, whatever row it has been made of
        row |= {name: json.dumps(row[name], default=Recorded.to_json) for name in JSON_COLUMNS}
        return self._completed.write([row], f"data/{_numbered(checkpoint)}", [("id", checkpoint.id)])

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Return whether this very attempt of the checkpoint is in the registry.

        That decides after a commit that reported an error.
        """
        return any(row.commit_id == checkpoint.commit_id for row in self.checkpoints())

    def record_publications(self, generation: Generation, publications: Sequence[Publication]) -> None:
        """Record publications in one commit, with a file for each checkpoint, which is removed together with the
        checkpoint.
        """
        rows: dict[CheckpointId, list[dict[str, Any]]] = {}
        for row in publications:
            rows.setdefault(row.checkpoint_id, []).append(dataclasses.asdict(row))
        data = [
            self._published.write(published, f"data/{id:020d}-{uuid.uuid4().hex}.parquet", [("checkpoint_id", id)])
            for id, published in sorted(rows.items())
        ]
        if data:
            self._publications.commit(generation, data)

    def pin(self, generation: Generation, pin: Pin) -> None:
        """Give a checkpoint a name.

        Raises:
            WeirError: The name is taken.
            PrunedError: The checkpoint is gone.
        """
        taken = self.pinned(pin.kind, pin.name)
        if taken is not None and taken.commit_id == pin.commit_id:
            return  # an earlier try of this very request has pinned it
        if taken is not None:
            raise WeirError(
                f"There is a {pin.kind} {pin.name!r} already, of checkpoint {taken.checkpoint_id}.",
                where=self._pins.storage.full(self._pins.path),
                next=f"Choose another name, or drop that {pin.kind} first.",
            )
        if all(row.commit_id != pin.commit_id for row in self.checkpoints()):
            raise PrunedError(
                f"Checkpoint {pin.checkpoint_id} is not retained.", next="`weir checkpoints` lists what is."
            )
        self._pins.commit(generation, [self._write_pin(pin)])

    def _write_pin(self, pin: Pin) -> DataFile:
        path = f"data/{pin.checkpoint_id:020d}-{uuid.uuid4().hex}.parquet"
        return self._named.write([dataclasses.asdict(pin)], path, [("checkpoint_id", pin.checkpoint_id)])

    def unpin(self, generation: Generation, kind: str, name: str) -> bool:
        """Take a name away; False if there is none. From then on the checkpoint is retained like any other."""
        named = self.pinned(kind, name)

        def chosen(file: DataFile) -> bool:
            return any((pin.kind, pin.name) == (kind, name) for pin in self._named.of(file))

        if named is not None:
            self._pins.storage.delete_files(_removed(self._pins, generation, chosen))
        return named is not None

    def drop_rows(self, generation: Generation, ids: Iterable[CheckpointId]) -> list[str]:
        """Remove checkpoints' rows: from then on they do not exist. Their listings and objects are still there.

        Returns:
            The files that the table names no more, for the caller to delete.
        """
        gone = set(ids)
        return _removed(self._checkpoints, generation, lambda file: _bound(file, "id") in gone) if gone else []

    def drop_listings(self, generation: Generation, orphan_listings: Iterable[OrphanListing]) -> list[str]:
        """Remove listings that no row names, and publications of checkpoints that have no row. No object is deleted.

        Returns:
            The files that the tables name no more. The caller deletes them together with the objects that the listings
            named, after it has proved that the generation still owns the registry.
        """
        gone = {orphan.path for orphan in orphan_listings}
        # Read before `kept`: the next checkpoint may be committed and published meanwhile, and its publications stay.
        published = {file.path for file in self._publications.read(list, as_owner=True)}
        kept = {row.id: row.commit_id for row in self.checkpoints(as_owner=True)}

        def is_gone(file: DataFile) -> bool:
            return file.path in published and _bound(file, "checkpoint_id") not in kept

        steps: list[Callable[[], list[str] | None]] = [
            lambda: _removed(self._files, generation, lambda file: file.path in gone),
            lambda: _removed(self._publications, generation, is_gone),
            lambda: self.prove(generation),
        ]
        unnamed = at_once(steps)
        # One that is committed meanwhile is read anew, at worst.
        for commit_id in self._listings.keys() - kept.values():
            self._listings.pop(commit_id, None)
        return [path for paths in unnamed for path in paths or ()]

    @property
    def cleanup_due(self) -> bool:
        """True if the log of a table is to be shortened, because this object has made enough commits."""
        return any(table.cleanup_due for table in self._tables)

    def keep_up(self, generation: Generation) -> None:
        """Shorten the tables' logs where that is due. The owner calls it now and then, beside its commits."""
        at_once([partial(table.keep_up, generation) for table in self._tables if table.cleanup_due])

    def remove_unnamed(self, generation: Generation) -> None:
        """Delete files in the registry's directories that no table names: a crash during a commit, or a probe, has left
        them.

        For the owner of the generation, while it commits nothing. Older generations are fenced and cannot name the
        files any more.
        """
        for table in self._tables:
            written = [file.path for file in table.storage.list(table.path, unfinished=True)]
            named = {f"{table.path}/{file.path}" for file in table.read(list)}
            unnamed = [path for path in written if is_registry_data(path) and path not in named]
            if unnamed:
                # We listed first and still own the registry: so no file is a successor's that is about to be named.
                table.commit(generation)
            table.storage.delete_files(unnamed)
        remove_probes(self._checkpoints.storage, generation)

    # -- rows

    def _parse_checkpoint(self, row: dict[str, Any]) -> Checkpoint:
        if row["format_version"] > NEWEST_FORMAT:
            raise DamageError(
                f"Checkpoint {row['id']} has format {row['format_version']}; this Weir reads up to {NEWEST_FORMAT}.",
                where=self._checkpoints.storage.full(self._checkpoints.path),
                next="Upgrade Weir to the release that wrote it.",
            )
        row |= {name: json.loads(row[name]) for name in JSON_COLUMNS if row[name] is not None}
        row["operators"] = {uid: OperatorStats.from_json(raw) for uid, raw in row["operators"].items()}
        row["sinks"] = {sink: SinkLink.from_json(raw) for sink, raw in row["sinks"].items()}
        return Checkpoint(**_written(row, Checkpoint))

    def _damaged(self, checkpoint: Checkpoint, how: str) -> DamageError:
        return DamageError(
            f"The listing of checkpoint {checkpoint.id} is damaged: {how}.",
            where=self._files.storage.full(f"{self._files.path}/checkpoint_id={checkpoint.id}"),
            next="Nothing was deleted. `weir checkpoints` shows which older checkpoints are retained.",
        )


def _removed(table: FencedTable, generation: Generation, chosen: Callable[[DataFile], bool]) -> list[str]:
    """Commit that the table names these files no more.

    Returns:
        Their paths.
    """
    removes = table.read(lambda files: [file for file in files if chosen(file)], as_owner=True)
    if removes:
        table.commit(generation, removes=removes)
    return [f"{table.path}/{file.path}" for file in removes]


def _optional(row: type) -> frozenset[str]:
    """Columns that were added to a row after the first release. They have a default, for rows without them."""
    defaults = {field.name for field in dataclasses.fields(row) if field.default is not dataclasses.MISSING}
    defaults |= {field.name for field in dataclasses.fields(row) if field.default_factory is not dataclasses.MISSING}
    return frozenset(defaults - {"format_version"})


def _written(row: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return the row without those optional columns that were not written, so that their defaults apply."""
    return {name: value for name, value in row.items() if value is not None or name not in _optional(kind)}


def _to_table(files: Sequence[StateFile], schema: pa.Schema, commit_id: str) -> pa.Table:
    """Return a listing as columns: a hundred thousand files would be slow as dicts."""
    columns = [
        pa.repeat(pa.scalar(commit_id), len(files))
        if field.name == "commit_id"
        else pa.array(list(map(attrgetter(field.name), files)), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _to_files(table: pa.Table) -> tuple[StateFile, ...]:
    columns = [table.column(field.name).to_pylist() for field in dataclasses.fields(StateFile)]
    return tuple(map(StateFile, *columns))


def _numbered(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.id:0{_ID_DIGITS}d}-{checkpoint.commit_id}.parquet"


def _listing_path(checkpoint: Checkpoint) -> str:
    return f"checkpoint_id={checkpoint.id}/{_numbered(checkpoint)}"


def _is_listing(file: DataFile, checkpoint: Checkpoint) -> bool:
    return dict(file.partition).get("checkpoint_id") == str(checkpoint.id)


def _bound(file: DataFile, column: str) -> int | None:
    return dict(file.bounds).get(column)


class _Landed(Exception):
    """Raised when the row that is to be committed is in the table already."""


def _head_is(
    parent: CheckpointId | None, row: str, replaced: Collection[DataFile] = ()
) -> Callable[[TableVersion], None]:
    def check(version: TableVersion) -> None:
        if row in version.files:
            raise _Landed
        if any(file.path not in version.files for file in replaced):
            raise FencedError(
                "A checkpoint that was to be rewritten was pruned meanwhile.",
                next="Nothing was changed: look again, and repeat the command.",
            )
        ids = [_bound(file, "id") for file in version.files.values()]
        head = max((number for number in ids if number is not None), default=None)
        if head != parent:
            raise FencedError(
                f"The newest checkpoint is {head}, not {parent} on which this epoch was built.",
                next="Nothing to do: another coordinator committed; this epoch is discarded.",
            )

    return check
