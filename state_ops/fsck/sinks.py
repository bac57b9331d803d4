"""The sinks against the chain of checkpoints, and published tables against the files that they name.

A table's transaction version is the last checkpoint that was published in it. It is read before the registry and after
it: a checkpoint is committed before it is published, so only the earlier reading can show that a table is ahead, and
only the later one that it is behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.exceptions import TableNotFoundError

from state_ops.coordination import publishing_refused
from state_ops.delta.fenced_table import open_table
from state_ops.delta.log_entries import active_files
from state_ops.delta.set_back import SetBack, set_back
from state_ops.errors import WeirError, first_line
from state_ops.fsck.findings import Finding, Kind
from state_ops.fsck.survey import UNREADABLE, Survey, torn_entry
from state_ops.ids import CheckpointId
from state_ops.records.checkpoint import TAKES_BACK, Checkpoint, abandoned
from state_ops.storage.storage import Storage

TOP, OUTPUTS = "tables", "outputs"

Marker = Callable[[], int | None]
"""Asks a sink that is no table for the newest checkpoint that it has."""


@dataclass(slots=True)
class SinkTable:
    """A sink as it is now.

    Attributes:
        version: The last published checkpoint, None for none.
        files: Path from the root -> size in bytes, of the newest version.
        problem: Why it cannot be read.
        set_back: The RESTORE by which others have taken published rows out of it.
        exists: Whether there is a Delta table.
        elsewhere: It is no table but a sink that is asked for its marker.
    """

    name: str
    exists: bool = False
    version: int | None = None
    files: dict[str, int] = field(default_factory=dict)
    problem: str | None = None
    elsewhere: bool = False
    set_back: SetBack | None = None

    @property
    def path(self) -> str:
        return f"{OUTPUTS if self.elsewhere else TOP}/{self.name}"

    @property
    def title(self) -> str:
        return f"the {'sink' if self.elsewhere else 'table'} {self.name}"


def versions(storage: Storage, app_id: str) -> dict[str, int | None]:
    """Return the last published checkpoint of every table there is."""
    return {name: look(storage, app_id, name, files=False).version for name in storage.list_dirs(TOP)}


def look(storage: Storage, app_id: str, name: str, *, files: bool = True) -> SinkTable:
    """Read a table's newest version, from its log alone."""
    table = SinkTable(name)
    try:
        handle = open_table(storage, table.path)
        table.exists, table.version = True, handle.transaction_version(f"{app_id}/{name}")
        table.set_back = set_back(storage, table.path, handle, f"{app_id}/{name}") if files else None
        for file in active_files(handle) if files else ():
            path = unquote(file.path)
            if "://" not in path and not path.startswith("/"):  # a shallow clone's files are elsewhere
                table.files[f"{table.path}/{path}"] = file.bytes
    except TableNotFoundError:
        pass
    except UNREADABLE as error:
        table.exists, table.problem = True, first_line(error)
    return table


def ask(name: str, marker: Marker) -> SinkTable:
    """Ask a sink that is no table."""
    try:
        return SinkTable(name, exists=True, version=marker(), elsewhere=True)
    except UNREADABLE as error:
        problem = error.what if isinstance(error, WeirError) else first_line(error)
        return SinkTable(name, exists=True, problem=problem, elsewhere=True)


def expected(rows: list[Checkpoint], sink: str) -> int | None:
    """Return the id that the chain says was published last."""
    return rows[-1].published(sink) if rows else None


def chain_problems(
    storage: Storage, seen: Survey, table: SinkTable, early: int | None, *, behind: bool = False
) -> Iterator[Finding]:
    """Yield the contradictions between one table and the checkpoints.

    Args:
        early: Its version before the registry was read.
        behind: It may lack rows that were recorded as published.
    """
    name, newest = table.name, expected(seen.checkpoints, table.name)
    if table.problem is not None and table.elsewhere:
        yield Finding.of(Kind.UNREACHABLE_SINK, table.problem, table.path)
        return
    if table.problem is not None:
        what = f"The table's log cannot be read: {table.problem}"
        yield Finding.of(Kind.UNREADABLE_TABLE, what, torn_entry(storage, table.path) or table.path)
        return
    if early is not None and (newest is None or early > newest):
        what = f"Its last published checkpoint is {early}; the registry's newest is {newest}."
        yield Finding.of(Kind.SINK_AHEAD, what, table.path)
        return
    if newest is None:
        return
    if not table.exists:
        what = f"Checkpoints up to {newest} have rows for the table {name}, which is gone."
        yield Finding.of(Kind.MISSING_TABLE, what, table.path)
        return
    if table.set_back is not None:
        yield Finding.of(Kind.SINK_SET_BACK, f"The table's {table.set_back}.", table.path)
    left = abandoned(seen.checkpoints)  # nobody publishes these any more
    with_rows = [row for row in seen.checkpoints if row.published(name) == row.id and row.id not in left]
    recorded = {row.checkpoint_id for row in seen.publications if row.sink == name}
    lacking = [row for row in with_rows if row.id > (table.version or 0)]
    if behind:
        lacking = [row for row in lacking if row.id not in recorded]
    elif (table.version or 0) < newest:
        published = [row.id for row in lacking if row.id in recorded]
        if published or not lacking or table.version not in _may_follow(seen, lacking[0], name):
            what = (
                f"Its last published checkpoint is {table.version}; the registry says {max(published, default=newest)}."
            )
            yield Finding.of(Kind.SINK_BEHIND, what, table.path)
            return
    if seen.alive:
        return  # who coordinates publishes what it committed, and records it
    refused = publishing_refused.read(storage) if lacking else {}
    for row in with_rows:
        if row in lacking:
            why = f": {refused[name].why}" if name in refused else "."
            what = f"Checkpoint {row.id} is complete, and its rows are not in {table.title} yet{why}"
            yield Finding.of(Kind.UNPUBLISHED_ROWS, what, table.path, (row.id,))
        elif row.id not in recorded:
            what = f"Checkpoint {row.id} is published in {table.title}, and the registry does not say so."
            yield Finding.of(Kind.UNRECORDED_PUBLICATION, what, table.path, (row.id,))


def _may_follow(seen: Survey, row: Checkpoint, sink: str) -> set[CheckpointId | None]:
    """Return the checkpoints at which a sink may stand before this one is published in it.

    A rewind follows any of the checkpoints that it abandons.
    """
    links = [row.sinks[sink]]
    if row.kind in TAKES_BACK:
        links += [other.sinks[sink] for other in seen.checkpoints if other.id < row.id and sink in other.sinks]
        return {id for link in links for id in (link.id, link.before)}
    return {links[0].before}


def mentioned(storage: Storage, table: str, paths: Collection[str]) -> set[str]:
    """Return the files among `paths` that the table's log adds or removes in any entry or checkpoint that still exists.

    Raises what reading a damaged entry raises: nothing may be concluded from half a log.

    Args:
        table, paths: From the root. A file that the log has ever mentioned belongs to the table and its vacuum.
    """
    wanted = {path.removeprefix(f"{table}/"): path for path in paths}
    in_log: set[str] = set()
    for file in storage.list(f"{table}/_delta_log"):
        if file.path.endswith(".json"):
            names = _in_entry(storage.read_bytes(file.path) or b"")
        elif file.path.endswith(".parquet"):
            names = _in_checkpoint(storage.read_bytes(file.path) or b"")
        else:
            continue
        in_log.update(wanted[name] for name in names if name in wanted)
    return in_log


def _in_entry(data: bytes) -> Iterator[str]:
    for line in data.splitlines():
        if b'"add"' in line or b'"remove"' in line:
            actions = json.loads(line)
            for action in ("add", "remove"):
                if action in actions:
                    yield unquote(actions[action]["path"])


def _in_checkpoint(data: bytes) -> Iterator[str]:
    if not data:
        return  # cleaned up since it was listed
    file = pq.ParquetFile(pa.BufferReader(data))
    columns = [name for name in ("add", "remove") if name in file.schema_arrow.names]
    table = file.read(columns=[f"{name}.path" for name in columns], use_threads=False)
    for name in columns:
        yield from (unquote(row["path"]) for row in table.column(name).to_pylist() if row and row["path"])
