"""What must hold whenever no coordinator is at work, checked bit by bit: what was right once is not read again."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from state_ops.checkpoints.registry import Registry
from state_ops.ids import parse_epoch_dir
from state_ops.records.checkpoint import Checkpoint
from state_ops.storage.storage import Storage
from tests.recovery.harness import Site
from tests.soak.accounts import accounts, pipeline, turnover
from tests.soak.children import Violation
from tests.soak.replay import Output, Replay, Row, files_of
from tests.tools.reading import state_at
from weir.ownership.backlog import unapplied

TABLES = ("ledger", "turnover", "turnover_late")
_TEN_MINUTES = timedelta(minutes=10)


@dataclass(frozen=True)
class Sample:
    """How much there is at one moment, without the tables' rows, which grow by right. epoch: the newest."""

    epoch: int
    state_bytes: int
    state_objects: int
    channel_bytes: int
    channel_objects: int
    registry_bytes: int
    registry_objects: int
    registry_log: int
    work_bytes: int
    work_objects: int
    sink_log: int


def sample(site: Site, epoch: int) -> Sample:
    state, channels = _extent(site.storage / "state"), _extent(site.storage / "channels")
    registry = _extent(site.storage / "registry")
    work = _extent(*site.root.glob("work*"))
    log = sum(1 for _ in (site.storage / "registry").glob("*/_delta_log/*.json"))
    sink_log = sum(1 for _ in (site.storage / "tables").glob("*/_delta_log/*.json"))
    return Sample(epoch, *state, *channels, *registry, log, *work, sink_log)


def _extent(*directories: Path) -> tuple[int, int]:
    total = number = 0
    for directory in directories:
        for root, below, names in os.walk(directory):
            if "locks" in below:  # of a host's cache of objects: 4,096 empty files at most
                below.remove("locks")
            for name in names:
                try:
                    total += (Path(root) / name).stat().st_size
                except FileNotFoundError:  # deleted meanwhile
                    continue
                number += 1
    return total, number


@dataclass
class Verifier:
    """Compares what is stored with the replay, as far as it has come.

    unaligned: stages that read others may leave rows to a later epoch, so of what they write only the sum over epochs
    is known, and what it is once nothing waits. chain: of every checkpoint ever heard of, its parent and its
    generation, None while unknown. drains: the epochs that closed every window; only the registry tells which, so a
    drain must be looked at before the next epoch.
    """

    site: Site
    replay: Replay
    unaligned: bool = False
    chain: dict[int, tuple[int | None, int | None]] = field(default_factory=dict)
    drains: set[int] = field(default_factory=set)
    rows: int = 0
    states: int = 0
    windows: int = 0
    waited: int = 0
    _seen: dict[str, set[str]] = field(default_factory=lambda: {table: set() for table in TABLES})
    _rows: dict[str, dict[int, list[Row]]] = field(default_factory=lambda: {table: {} for table in TABLES})
    _wanted: dict[str, dict[int, list[Row]]] = field(default_factory=lambda: {table: {} for table in TABLES})
    _owed: dict[str, Counter] = field(default_factory=lambda: {table: Counter() for table in TABLES})
    _replayed: int = 0
    _owners: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._storage = Storage(str(self.site.storage))
        self._registry = Registry(self._storage, pipeline.app_id)

    def heard(self, epoch: dict[str, Any]) -> None:
        """A coordinator said that it completed this epoch."""
        self._link(epoch["epoch"], epoch["parent"], epoch["generation"])
        self.waited += bool(epoch["waiting"])
        if epoch["trigger"] == "drain":
            self.drains.add(epoch["epoch"])

    def check(self) -> Checkpoint | None:
        """Everything, while nobody writes. Returns the newest checkpoint."""
        completed = self._registry.checkpoints()
        if not completed:
            return None
        for row in completed:
            self._link(row.id, row.parent_id, row.generation)
            self._check_objects(row)
        head = completed[-1]
        if head.trigger == "drain":
            self.drains.add(head.id)
        published = {table: self._read_table(table) for table in TABLES}
        for table in TABLES:
            link = head.sinks.get(table)
            if published[table] not in ((link.id, link.before) if link is not None else (None,)):
                raise Violation(f"{table} was published up to {published[table]}, the chain says {link}")
        ledger = head.published("ledger")
        # Tables are published beside each other: of an epoch that the ledger does not show yet, the next check judges
        # the others.
        newest = head.id if published["ledger"] == ledger else published["ledger"] or 0
        self._catch_up(newest)
        waits = bool(unapplied(head))
        if waits and not self.unaligned:
            raise Violation(f"rows wait in checkpoint {head.id}: {unapplied(head)}")
        for table in TABLES:
            self._check_published(table, published[table] or 0)
            if self.unaligned and table != "ledger":
                whole = not waits and newest == head.id and published[table] == head.published(table)
                self._compare_sum(table, newest, whole=whole)
            else:
                self._compare(table, min(published[table] or 0, newest))
        self._check_chain()
        if published["ledger"] == ledger:
            self._check_state(head)
        return head

    # -- tables

    def _read_table(self, table: str) -> int | None:
        """Take in the rows of new data files by the epoch that staged them; returns the checkpoint published last."""
        directory = self.site.storage / "tables" / table
        if not (directory / "_delta_log").exists():
            return None
        handle = DeltaTable(str(directory))
        named = set(pa.table(handle.get_add_actions())["path"].to_pylist())
        if gone := self._seen[table] - named:
            raise Violation(f"{table} has lost files: {sorted(gone)[:5]}")
        for name in sorted(named - self._seen[table]):
            parsed = parse_epoch_dir(name.split("/")[1])
            if parsed is None:
                raise Violation(f"{table} has a file of no epoch: {name}")
            generation, epoch = parsed
            self._link(epoch, None, generation)
            if self._owners.setdefault(epoch, generation) != generation:
                raise Violation(f"epoch {epoch} was written by the generations {self._owners[epoch]} and {generation}")
            rows = pq.ParquetFile(directory / name).read().to_pylist()
            self._rows[table].setdefault(epoch, []).extend(rows)
        self._seen[table] = named
        return handle.transaction_version(f"{pipeline.app_id}/{table}")

    def _catch_up(self, upto: int) -> None:
        """Replay the epochs that the ledger has. Which files an epoch read, its rows tell; that these are all, the
        replay."""
        epochs = {epoch for epoch in self._rows["ledger"] if epoch > self._replayed}
        epochs |= {epoch for epoch in self.drains if self._replayed < epoch <= upto}
        for epoch in sorted(epochs):
            files = files_of(self._rows["ledger"].get(epoch, []))
            output = self.replay.epoch(epoch, max(files, default=-1) + 1, drain=epoch in self.drains)
            self._want(epoch, output)
            self._replayed = epoch

    def _want(self, epoch: int, output: Output) -> None:
        for table, rows in (("ledger", output.ledger), ("turnover", output.turnover)):
            self._wanted[table][epoch] = rows
        self._wanted["turnover_late"][epoch] = output.turnover_late

    def _check_published(self, table: str, published: int) -> None:
        for epoch, rows in sorted(self._rows[table].items()):
            if rows and epoch > published:
                raise Violation(f"{table} has rows of epoch {epoch}, but {published} was published last")

    def _compare(self, table: str, upto: int) -> None:
        """Of each epoch up to this one, the rows that are wanted and no others."""
        actual, wanted = self._rows[table], self._wanted[table]
        for epoch in sorted(epoch for epoch in {*actual, *wanted} if epoch <= upto):
            mine, theirs = _counted(actual.pop(epoch, [])), _counted(wanted.pop(epoch, []))
            _check_same(f"epoch {epoch} of {table}", mine - theirs, theirs - mine)
            self.rows += mine.total()

    def _compare_sum(self, table: str, newest: int, whole: bool) -> None:
        """No row that is not wanted by now; if all has been applied and published, every one that is."""
        owed, sums = self._owed[table], Counter()
        for rows in self._wanted[table].values():
            owed.update(_counted(rows))
        for epoch in [epoch for epoch in self._rows[table] if epoch <= newest]:
            sums.update(_counted(self._rows[table].pop(epoch)))
        self._wanted[table].clear()
        extra = sums - owed
        owed.subtract(sums)
        _check_same(table, extra, +owed if whole else Counter())
        self._owed[table] = +owed
        self.rows += sums.total()

    # -- state

    def _check_state(self, head: Checkpoint) -> None:
        position = head.offsets.get("landing", {"files": 0})["files"]
        skipped = self.replay.read(position)
        if skipped:
            raise Violation(
                f"checkpoint {head.id} has read {position} files, but {len(skipped)} rows of them are nowhere"
            )
        if self.replay.files != position:
            raise Violation(f"checkpoint {head.id} has read {position} files, the ledger shows {self.replay.files}")
        if not head.operators["accounts"].schema:
            return
        stored = {key[0]: row for key, row in state_at(self._storage, self._registry, head, accounts).items()}
        if stored != self.replay.accounts:
            raise Violation(f"the accounts of checkpoint {head.id} differ: {_difference(stored, self.replay.accounts)}")
        self.states += 1
        if unapplied(head):
            return
        windows = state_at(self._storage, self._registry, head, turnover)
        wanted = {(branch, end - _TEN_MINUTES): row for (branch, end), row in self.replay.windows.items()}
        if windows != wanted:
            raise Violation(f"the open windows of checkpoint {head.id} differ: {_difference(windows, wanted)}")
        self.windows += 1

    # -- registry and objects

    def _check_objects(self, row: Checkpoint) -> None:
        for file in self._registry.files(row):
            size = self._storage.size(file.path)
            if size != file.bytes:
                raise Violation(f"{file.path} of checkpoint {row.id} has {size} bytes instead of {file.bytes}")

    def _link(self, id: int, parent: int | None, generation: int) -> None:
        was_parent, was_generation = self.chain.get(id, (None, None))
        if was_generation not in (None, generation) or (None not in (was_parent, parent) and was_parent != parent):
            raise Violation(f"checkpoint {id} is two: {was_parent, was_generation} and {parent, generation}")
        self.chain[id] = (parent if parent is not None else was_parent, generation)
        if parent is not None:
            self.chain.setdefault(parent, (None, None))

    def _check_chain(self) -> None:
        before, highest = None, 0
        for id in sorted(self.chain):
            parent, generation = self.chain[id]
            if parent is not None and parent != before:
                raise Violation(f"checkpoint {id} continues {parent}, but there is {before}")
            if generation is not None:
                if generation < highest:
                    raise Violation(f"checkpoint {id} is of generation {generation}, after one of {highest}")
                highest = generation
            before = id


def log_in_order(table: Path, app_id: str) -> list[int]:
    """The checkpoints that were published to a sink, by its log's files; Violation unless each is higher than the
    last."""
    versions = []
    for file in sorted((table / "_delta_log").glob("[0-9]*.json")):  # what a kill left half-written begins with a dot
        for line in file.read_text().splitlines():
            action = json.loads(line).get("txn")
            if action and action["appId"] == app_id:
                versions.append(int(action["version"]))
    if versions != sorted(set(versions)):
        raise Violation(f"{table.name} was published out of order: {versions}")
    return versions


def _check_same(what: str, extra: Counter, missing: Counter) -> None:
    if extra or missing:
        shown = f"not wanted: {list(extra.items())[:3]}\nmissing: {list(missing.items())[:3]}"
        raise Violation(f"{what} is not what the replay says:\n{shown}")


def _counted(rows: list[Row]) -> Counter:
    return Counter(tuple(sorted(row.items())) for row in rows)


def _difference(actual: dict, wanted: dict) -> str:
    wrong = [key for key in {*actual, *wanted} if actual.get(key) != wanted.get(key)]
    return "; ".join(f"{key}: is {actual.get(key)}, must be {wanted.get(key)}" for key in wrong[:3])
