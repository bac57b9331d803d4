"""The registry: Delta tables that record completed checkpoints and every file they name. The ONLY commit point.

    registry/checkpoints/    one row per completed checkpoint. A row here = the checkpoint exists
    registry/state_files/    partitioned by checkpoint, a full listing each time. Written first, meaningless without the row
    registry/publications/   which Delta version made which checkpoint's output visible in which sink
    registry/pins/           savepoints and branches: checkpoints that retention leaves alone, by name

`checkpoints` is read first and decides. Rows of `state_files` count only if their `commit_id` is the one in the
checkpoint's row, which also carries their number: a mismatch is damage and stops every deletion. All four tables are
claimed by a coordinator in that order and committed through `FencedTable` alone.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from state_ops.checkpoint import FORMAT_VERSION, Checkpoint, StateFile
from state_ops.delta_log import DataFile, FencedTable, active_files, probe_conditional_put, remove_probes
from state_ops.errors import DamageError, FencedError, PrunedError, WeirError
from state_ops.ids import CheckpointId, Generation
from state_ops.storage import Storage

_TIME = pa.timestamp("us", tz="UTC")
_JSON_COLUMNS = ("offsets", "slice", "watermarks", "operators", "sinks", "inputs", "ms", "totals")

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
        *[(name, pa.string()) for name in _JSON_COLUMNS],
        ("files", pa.int64()),
        ("bytes_total", pa.int64()),
        ("bytes_new", pa.int64()),
        ("run_id", pa.string()),
        ("format_version", pa.int64()),
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
    ]
)

SAVEPOINT, BRANCH = "savepoint", "branch"
_ID_DIGITS = 20  # in the names of listings and rows, so that they sort by checkpoint


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """A checkpoint has a name, so retention never touches it. kind: savepoint, or branch, which reads from it."""

    kind: str
    name: str
    checkpoint_id: CheckpointId
    commit_id: str
    created_at: datetime
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Stray:
    """A listing without its checkpoint. path: of the listing's file in its table."""

    path: str
    checkpoint_id: CheckpointId
    commit_id: str
    files: tuple[StateFile, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Publication:
    """One checkpoint's output became visible in one sink as this Delta version. ms: how long that took."""

    checkpoint_id: CheckpointId
    sink: str
    delta_version: int
    files: int
    rows: int
    published_at: datetime
    ms: float


class Registry:
    """One pipeline's registry. storage: rooted at the pipeline; app_id: constant for pipeline and branch."""

    def __init__(self, storage: Storage, app_id: str) -> None:
        self._checkpoints = FencedTable(storage, "registry/checkpoints", CHECKPOINTS, app_id)
        self._files = FencedTable(storage, "registry/state_files", STATE_FILES, app_id, ["checkpoint_id"])
        self._publications = FencedTable(storage, "registry/publications", PUBLICATIONS, app_id)
        self._pins = FencedTable(storage, "registry/pins", PINS, app_id)
        self._listings: dict[str, tuple[StateFile, ...]] = {}
        self._rows: dict[str, Checkpoint] = {}

    @property
    def _tables(self) -> tuple[FencedTable, ...]:
        """In the order in which they are claimed."""
        return self._checkpoints, self._files, self._publications, self._pins

    # -- reading: no right needed, no JVM

    def generation(self) -> Generation:
        return self._checkpoints.generation()

    def checkpoints(self) -> list[Checkpoint]:
        """All retained checkpoints, oldest first."""
        rows = self._settled(self._checkpoints, self._read_checkpoints)
        self._rows = rows
        return sorted(rows.values(), key=lambda row: row.id)

    def head(self) -> Checkpoint | None:
        """The newest completed checkpoint, on which the next epoch builds."""
        completed = self.checkpoints()
        return completed[-1] if completed else None

    def files(self, checkpoint: Checkpoint) -> tuple[StateFile, ...]:
        """The full listing of one checkpoint; DamageError unless it is exactly the one that was committed with it."""
        if checkpoint.commit_id in self._listings:
            return self._listings[checkpoint.commit_id]
        if checkpoint.files == 0:
            return ()
        rows = self._settled(
            self._files,
            lambda files: self._files.read_rows([file for file in files if _is_listing(file, checkpoint)]),
        )
        rows = [row for row in rows if row.pop("commit_id") == checkpoint.commit_id]
        if len(rows) != checkpoint.files:
            if not self.holds(checkpoint):
                raise PrunedError(f"Checkpoint {checkpoint.id} was pruned while it was being read.", next="Look again.")
            raise self._damaged(checkpoint, f"it has {checkpoint.files} files, but {len(rows)} are listed")
        listing = tuple(StateFile(**row) for row in rows)
        self._listings[checkpoint.commit_id] = listing
        return listing

    def publications(self) -> list[Publication]:
        rows = self._settled(self._publications, self._publications.read_rows)
        return sorted((Publication(**row) for row in rows), key=lambda row: (row.checkpoint_id, row.sink))

    def pins(self) -> list[Pin]:
        """Savepoints and branches, oldest first."""
        rows = self._settled(self._pins, self._pins.read_rows)
        return sorted((Pin(**row) for row in rows), key=lambda pin: (pin.created_at, pin.name))

    def strays(self) -> list[Stray]:
        """Listings whose checkpoint has no row: a prune or a commit was cut off, or a running restore still reads them."""
        named = {_listing_path(row) for row in self.checkpoints()}

        def read(files: list[DataFile]) -> list[Stray]:
            return [self._stray(file) for file in files if file.path not in named]

        return self._settled(self._files, read)

    def _stray(self, file: DataFile) -> Stray:
        commit_id = file.path.rpartition("/")[2][_ID_DIGITS + 1 :].removesuffix(".parquet")
        files = self._listings.get(commit_id)
        if files is None:
            rows = self._files.read_rows([file])
            files = tuple(StateFile(**{name: row[name] for name in row if name != "commit_id"}) for row in rows)
        return Stray(file.path, CheckpointId(int(dict(file.partition)["checkpoint_id"])), commit_id, files)

    # -- writing: the owner of the generation alone

    def take_over(self, after: Generation | None = None) -> Generation:
        """Claim the next generation, before anything else is read, cleaned or published.

        after: the generation that must own the registry now. A coordinator that only wants to renew its own claim gives
        it, and gets FencedError where somebody took over meanwhile, instead of taking the pipeline away from who lives.
        """
        probe_conditional_put(self._checkpoints.storage)
        for table in self._tables:
            table.ensure()
        generation = self._checkpoints.claim(after=after)
        for table in self._tables[1:]:
            table.claim(generation)
        return generation

    def commit(self, checkpoint: Checkpoint, files: Sequence[StateFile]) -> None:
        """Make the checkpoint exist: its listing first, then its row, which is the commit point.

        The row goes in only while the table's head is the checkpoint's parent and we own the generation.
        """
        if files:
            rows = [dataclasses.asdict(file) | {"commit_id": checkpoint.commit_id} for file in files]
            partition = (("checkpoint_id", str(checkpoint.id)),)
            listing = self._files.write_rows(rows, _listing_path(checkpoint), partition)
            self._files.commit(checkpoint.generation, [listing])
        row = dataclasses.asdict(checkpoint)
        row |= {name: json.dumps(row[name]) for name in _JSON_COLUMNS}
        data = self._checkpoints.write_rows([row], f"data/{_numbered(checkpoint)}", bounds=[("id", checkpoint.id)])
        with suppress(_Landed):  # an earlier try of this very commit is there, although it was reported as a conflict
            self._checkpoints.commit(checkpoint.generation, [data], check=_head_is(checkpoint.parent_id, data.path))
        self._listings[checkpoint.commit_id] = tuple(files)

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether this very try of the checkpoint is in the registry: what decides after a commit that reported an error."""
        return any(row.commit_id == checkpoint.commit_id for row in self.checkpoints())

    def record_publications(self, generation: Generation, publications: Sequence[Publication]) -> None:
        if publications:
            newest = max(row.checkpoint_id for row in publications)
            data = self._publications.write_rows(
                [dataclasses.asdict(row) for row in publications],
                f"data/{newest:020d}-{uuid.uuid4().hex}.parquet",
                bounds=[("checkpoint_id", newest)],
            )
            self._publications.commit(generation, [data])

    def pin(self, generation: Generation, pin: Pin) -> None:
        """Give a checkpoint a name. Raises WeirError when the name is taken, PrunedError when the checkpoint is gone."""
        taken = next((one for one in self.pins() if (one.kind, one.name) == (pin.kind, pin.name)), None)
        if taken is not None and taken.commit_id == pin.commit_id:
            return  # an earlier try of this very request
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
        data = self._pins.write_rows(
            [dataclasses.asdict(pin)],
            f"data/{pin.checkpoint_id:020d}-{uuid.uuid4().hex}.parquet",
            bounds=[("checkpoint_id", pin.checkpoint_id)],
        )
        self._pins.commit(generation, [data])

    def unpin(self, generation: Generation, kind: str, name: str) -> bool:
        """Take a name away; False if there is none. The checkpoint is from then on retained like any other."""
        named = [pin.commit_id for pin in self.pins() if (pin.kind, pin.name) == (kind, name)]

        def chosen(file: DataFile) -> bool:
            return any((row["kind"], row["name"]) == (kind, name) for row in self._pins.read_rows([file]))

        if named:
            self._drop_files(self._pins, generation, chosen)
        return bool(named)

    def drop_rows(self, generation: Generation, ids: Iterable[CheckpointId]) -> None:
        """Remove checkpoints' rows: from then on they do not exist. Their listings and objects are still there."""
        gone = set(ids)
        if gone:
            self._drop_files(self._checkpoints, generation, lambda file: _bound(file, "id") in gone)

    def drop_listings(self, generation: Generation, strays: Iterable[Stray]) -> None:
        """Remove listings that no row names, and publications of checkpoints that have no row. No object is deleted."""
        gone = {stray.path for stray in strays}
        self._drop_files(self._files, generation, lambda file: file.path in gone)
        kept = {row.id: row.commit_id for row in self.checkpoints()}
        self._drop_files(self._publications, generation, lambda file: _bound(file, "checkpoint_id") not in kept)
        self._listings = {key: value for key, value in self._listings.items() if key in kept.values()}

    def remove_unnamed(self) -> None:
        """Delete files in the registry's directories that no table names: left by a crash beside a commit, or by a probe.

        For the owner of the generation, before its first commit: older generations are fenced and cannot name them any more.
        """
        for table in self._tables:
            handle = table.refreshed()
            named = {f"{table.path}/{file.path}" for file in active_files(handle)} if handle else set()
            for file in table.storage.list(table.path):
                if file.path.endswith(".parquet") and "/_delta_log/" not in file.path and file.path not in named:
                    table.storage.delete(file.path)
        remove_probes(self._checkpoints.storage)

    @staticmethod
    def _drop_files(table: FencedTable, generation: Generation, chosen: Callable[[DataFile], bool]) -> None:
        handle = table.refreshed()
        removes = [file for file in active_files(handle) if chosen(file)] if handle else []
        if removes:
            table.commit(generation, removes=removes)
            for file in removes:
                table.storage.delete(f"{table.path}/{file.path}")

    # -- rows

    @staticmethod
    def _settled(table: FencedTable, read: Callable[[list[DataFile]], Any]) -> Any:
        """`read` the table's files. Pruning deletes files at once, so a reader that loses that race looks again."""
        while True:
            handle = table.refreshed()
            if handle is None:
                return read([])
            version = handle.version()
            try:
                return read(active_files(handle))
            except FileNotFoundError as error:
                handle.update_incremental()
                if handle.version() == version:
                    raise DamageError(
                        "A file of the registry is missing from storage.",
                        where=str(error),
                        next="Nothing was deleted. Bring the file back from a backup of the bucket.",
                    ) from error

    def _read_checkpoints(self, files: list[DataFile]) -> dict[str, Checkpoint]:
        return {file.path: self._rows.get(file.path) or self._read_checkpoint(file) for file in files}

    def _read_checkpoint(self, file: DataFile) -> Checkpoint:
        row: dict[str, Any] = self._checkpoints.read_rows([file])[0]
        if row["format_version"] > FORMAT_VERSION:
            raise DamageError(
                f"Checkpoint {row['id']} has format {row['format_version']}; this Weir reads up to {FORMAT_VERSION}.",
                where=self._checkpoints.storage.full(self._checkpoints.path),
                next="Upgrade Weir to the release that wrote it.",
            )
        row |= {name: json.loads(row[name]) for name in _JSON_COLUMNS}
        return Checkpoint(**row)

    def _damaged(self, checkpoint: Checkpoint, how: str) -> DamageError:
        return DamageError(
            f"The listing of checkpoint {checkpoint.id} is damaged: {how}.",
            where=self._files.storage.full(f"{self._files.path}/checkpoint_id={checkpoint.id}"),
            next="Nothing was deleted. `weir checkpoints` shows which older checkpoints are retained.",
        )


def _numbered(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.id:0{_ID_DIGITS}d}-{checkpoint.commit_id}.parquet"


def _listing_path(checkpoint: Checkpoint) -> str:
    return f"checkpoint_id={checkpoint.id}/{_numbered(checkpoint)}"


def _is_listing(file: DataFile, checkpoint: Checkpoint) -> bool:
    return dict(file.partition).get("checkpoint_id") == str(checkpoint.id)


def _bound(file: DataFile, column: str) -> int | None:
    return dict(file.bounds).get(column)


class _Landed(Exception):
    """The row that is to be committed is in the table."""


def _head_is(parent: CheckpointId | None, row: str) -> Callable[[DeltaTable], None]:
    def check(handle: DeltaTable) -> None:
        files = active_files(handle)
        if any(file.path == row for file in files):
            raise _Landed
        ids = [_bound(file, "id") for file in files]
        head = max((number for number in ids if number is not None), default=None)
        if head != parent:
            raise FencedError(
                f"The newest checkpoint is {head}, not {parent} on which this epoch was built.",
                next="Nothing to do: another coordinator committed; this epoch is discarded.",
            )

    return check
