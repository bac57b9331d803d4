"""What is in storage, by files alone, against the replay and against itself. Of Weir nothing is imported here.

Each check returns what is wrong, in words; nothing where all is well.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from tests.replay.flights import removed

_APP = "weir/meters/main"
_CHECKPOINTS, _LISTINGS, _PUBLICATIONS = "registry/checkpoints", "registry/state_files", "registry/publications"
_SHOWN = 4
_LOG = re.compile(r"\d{20}\.json|\d{20}\.checkpoint\.parquet|_last_checkpoint")


def rows(tables: Iterable[pa.Table]) -> Counter:
    """Rows as a multiset."""
    return Counter(tuple(row.values()) for table in tables for row in table.to_pylist())


class Stored:
    """One pipeline's storage on a local disk, as it is now. Each Delta log is read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._handles: dict[str, DeltaTable] = {}
        self._rows: dict[str, list[dict]] = {}

    def handle(self, table: str) -> DeltaTable:
        """The Delta table in this directory."""
        if table not in self._handles:
            self._handles[table] = DeltaTable(str(self.root / table))
        return self._handles[table]

    def is_table(self, table: str) -> bool:
        return any((self.root / table / "_delta_log").glob("*.json"))

    def data_files(self, table: str) -> list[Path]:
        """What the table consists of, by its log."""
        return sorted(Path(uri.removeprefix("file://")) for uri in self.handle(table).file_uris())

    def rows(self, table: str) -> list[dict]:
        """All rows of a table of the registry; none if there is no such table."""
        if table not in self._rows:
            files = self.data_files(table) if self.is_table(table) else []
            self._rows[table] = [row for path in files for row in _read(path).to_pylist()]
        return self._rows[table]


def tables(stored: Stored, expected: dict[str, Counter]) -> list[str]:
    """Each sink's table holds exactly the rows that it must."""
    problems = []
    for name, wanted in expected.items():
        actual = rows(_read(path) for path in stored.data_files(f"tables/{name}"))
        problems += differences(actual, wanted, f"table {name}")
    return problems


def differences(actual: Counter, wanted: Counter, what: str) -> list[str]:
    problems = []
    for title, rows in (("missing", wanted - actual), ("too many", actual - wanted)):
        if rows:
            problems.append(f"{what}: {rows.total()} rows {title}, e.g. {list(rows)[:_SHOWN]}")
    return problems


def registry(stored: Stored, retained: int) -> list[str]:
    """Every checkpoint's listing is complete, what it names is there, byte for byte, and its output is published."""
    checkpoints, listed = stored.rows(_CHECKPOINTS), stored.rows(_LISTINGS)
    published = {(row["checkpoint_id"], row["sink"]) for row in stored.rows(_PUBLICATIONS)}
    problems = []
    if len(checkpoints) > retained:
        problems.append(f"{len(checkpoints)} checkpoints are retained, not {retained}")
    if len({row["id"] for row in checkpoints}) < len(checkpoints):
        problems.append("an id is in the registry twice")
    for row in checkpoints:
        files = [file for file in listed if file["commit_id"] == row["commit_id"]]
        if len(files) != row["files"]:
            problems.append(f"checkpoint {row['id']} has {row['files']} files, {len(files)} are listed")
        problems += [problem for file in files if (problem := _object(stored.root, file))]
        for sink, ids in json.loads(row["sinks"]).items():
            if ids["id"] == row["id"] and (row["id"], sink) not in published:
                problems.append(f"checkpoint {row['id']} is not recorded as published in {sink}")
    owners = {name: stored.handle(name).transaction_version(_APP) for name in (_CHECKPOINTS, _LISTINGS, _PUBLICATIONS)}
    if len(set(owners.values())) > 1:
        problems.append(f"the registry's tables have different owners: {owners}")
    return problems


def sinks(stored: Stored) -> list[str]:
    """Each table was published in the order of ids, each id once, and stands where the newest checkpoint says."""
    problems = []
    newest = max(stored.rows(_CHECKPOINTS), key=lambda row: row["id"], default=None)
    chain = json.loads(newest["sinks"]) if newest else {}
    for path in sorted((stored.root / "tables").glob("*")):
        handle = stored.handle(f"tables/{path.name}")
        ids = [int(entry["weir.checkpoint"]) for entry in reversed(handle.history()) if "weir.checkpoint" in entry]
        if ids != sorted(set(ids)):
            problems.append(f"{path.name} was published out of order or twice: {ids}")
        version = handle.transaction_version(f"{_APP}/{path.name}")
        if version != chain.get(path.name, {}).get("id"):
            problems.append(f"{path.name} stands at {version}, the registry says {chain.get(path.name)}")
    return problems


def _object(storage: Path, file: dict) -> str | None:
    path = storage / file["path"]
    if not path.is_file():
        return f"{file['path']} is named and gone"
    data = path.read_bytes()
    if len(data) != file["bytes"] or hashlib.sha256(data).hexdigest() != file["digest"]:
        return f"{file['path']} is not what was recorded"
    return None


def unnamed(stored: Stored) -> list[str]:
    """Files and listings that nothing names. The lease and a person's halt are none of them."""
    commits = {row["commit_id"] for row in stored.rows(_CHECKPOINTS)}
    listed = stored.rows(_LISTINGS)
    named = {file["path"] for file in listed if file["commit_id"] in commits and _stays(file)}
    named |= {"coordinator/lease.json", "coordinator/halt.json"}
    for table in [path for top in ("registry", "tables") for path in (stored.root / top).glob("*")]:
        name = table.relative_to(stored.root).as_posix()
        if stored.is_table(name):
            named |= {file.relative_to(stored.root).as_posix() for file in stored.data_files(name)}
        if name.startswith("tables/"):
            named |= {f"{name}/{path}" for path in removed(table)}  # by a rewind; Delta's vacuum deletes them
    branches = {row["reason"].split(" ")[0] for row in stored.rows("registry/pins") if row["kind"] == "branch"}
    kept = [stored.root / "branches" / id for id in branches]
    files = [
        file
        for file in sorted(stored.root.rglob("*"))
        if file.is_file() and not any(branch in file.parents for branch in kept)
    ]
    logs = {file for file in files if file.parent.name == "_delta_log" and _LOG.fullmatch(file.name)}
    files_left = [file.relative_to(stored.root).as_posix() for file in files if file not in logs]
    orphan_listings = [
        f"{file['path']} of a checkpoint that is not there" for file in listed if file["commit_id"] not in commits
    ]
    return [name for name in files_left if name not in named] + orphan_listings


def _stays(file: dict) -> bool:
    """Whether a listed file lies where it was staged: files in a table's directory are the table's."""
    return file["kind"] != "output" or not file["path"].startswith("tables/")


def is_true_orphan(name: str) -> bool:
    """Half a commit, which every reader of a Delta log ignores. No take-over looks for it: it is for fsck to find."""
    return re.search(r"/_delta_log/(\d{20}\.json#\d+|\.tmp-[0-9a-f]{32}-\d{20}\.json)$", name) is not None


def is_cut_off_commit(name: str) -> bool:
    """Half a commit to a published table, as delta-rs or Weir leaves it."""
    return name.startswith("tables/") and is_true_orphan(name)


def ids_begun(stored: Stored) -> int:
    """The highest checkpoint id that any trace in storage says was begun."""
    ids = [row["id"] for row in stored.rows(_CHECKPOINTS)]
    lease = stored.root / "coordinator" / "lease.json"
    if lease.is_file():
        ids.append(json.loads(lease.read_text())["last_id"])
    ids += [int(part[1]) for path in stored.root.rglob("g*-e*") if (part := re.fullmatch(r"g\d+-e(\d+)", path.name))]
    return max(ids, default=0)


def _read(path: Path) -> pa.Table:
    return pq.ParquetFile(path).read(use_threads=False)
