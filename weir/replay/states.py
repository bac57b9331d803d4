"""A stage's state before an epoch that was played again, after it, and as recorded, at the keys in question."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import cast

import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.keyed.owners import GROUP_BYTES, OfKeys, owner_of, owners_of
from state_ops.records.snapshot_files import snapshots_of
from state_ops.schema.key_codec import decode_keys
from weir.definition import Stage
from weir.inspection.comparison.entries import HIDDEN, kind_of, paired
from weir.inspection.comparison.rows import STATE, Difference, difference
from weir.inspection.view import View
from weir.replay.replay import EpochReplay

SHOWN_KEYS, MOST_ENTRIES = 1_000, 10_000
"""Of how many keys state is shown where none is named; how many entries that differ are looked into."""
DIFFERS = "_differs"
"""The column that says what differs of a key, where no row of its state shows it."""


@dataclass(frozen=True)
class States:
    """State at some keys.

    Attributes:
        before, after, recorded: Rows as `weir state get` shows them.
        difference: In what `after` is otherwise than `recorded`; None: in nothing.
        notes: What is to be known of this, in words.
    """

    before: pl.DataFrame = field(default_factory=pl.DataFrame)
    after: pl.DataFrame = field(default_factory=pl.DataFrame)
    recorded: pl.DataFrame = field(default_factory=pl.DataFrame)
    difference: Difference | None = None
    notes: tuple[str, ...] = ()


def states(
    replay: EpochReplay,
    stage: Stage,
    subtasks: Sequence[int],
    inputs: Mapping[str, pl.DataFrame],
    key: Sequence[pa.Array] | None,
) -> States:
    """Return the state of one key; else of those whose state is otherwise than recorded; else of those whose rows
    came."""
    views = replay.view_before(stage), replay.view_after(stage), replay.view_recorded(stage)
    keys = next((view.keys for view in views if view is not None), None)
    if not stage.has_state or keys is None:
        return States()
    looking = _Looking(replay, stage, keys)
    asked = None if key is None else looking.owners(key)
    touched = _touched(stage, inputs) if key is None else None
    differing = looking.differing(subtasks, asked)
    owners = asked or set(differing)
    if not owners and touched is not None:
        owners = looking.owners(frames.arrow(touched.head(SHOWN_KEYS)).columns)
        if touched.height > SHOWN_KEYS:
            looking.notes.append(f"State is shown of some of {touched.height:,} keys; name one to see it.")
    was, now, then = looking.rows(subtasks, views, owners)
    otherwise = looking.with_hidden(difference(STATE, then, now), differing)
    if key is None and otherwise is not None:  # floats may differ in their last digits alone
        was, now, then = (_only(frame, otherwise, keys.names) for frame in (was, now, then))
    return States(was, now, then, otherwise, tuple(looking.notes))


@dataclass
class _Looking:
    """Looks into the state of a stage's subtasks. keys: the key columns, as the state has them."""

    replay: EpochReplay
    stage: Stage
    keys: pa.Schema
    notes: list[str] = field(default_factory=list)

    def owners(self, columns: Sequence[pa.Array]) -> set[bytes]:
        """Keys as entries of the state have them."""
        typed = [column.cast(field.type) for column, field in zip(columns, self.keys, strict=True)]
        arrays = [column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column for column in typed]
        return set(owners_of(arrays, self.replay.pipeline.max_parallelism))

    def differing(self, subtasks: Sequence[int], asked: Collection[bytes] | None) -> dict[bytes, set[str]]:
        """Return, by key whose state is otherwise than recorded, the differences that no row shows.

        Args:
            asked: The keys that are looked at; None: all.
        """
        hidden_by_key = dict[bytes, set[str]]()
        entries = 0
        for subtask in subtasks:
            groups = self.replay.groups(subtask)
            if asked is None:
                self._read_ahead(subtask)
            with self.replay.after(self.stage, subtask) as after, self.replay.recorded(self.stage, subtask) as recorded:
                now, then = (self._only_of(backend, asked) for backend in (after, recorded))
                for group in self._groups(groups, asked):
                    for key, *_ in islice(paired(now, then, group), MOST_ENTRIES + 1 - entries):
                        entries += 1
                        hidden = hidden_by_key.setdefault(owner_of(key, self.keys.types), set())
                        if kind_of(key) in HIDDEN:
                            hidden.add(HIDDEN[kind_of(key)])
        if entries > MOST_ENTRIES:
            self.notes.append(f"More than {MOST_ENTRIES:,} entries of state differ; so many were looked into.")
        return hidden_by_key

    def _read_ahead(self, subtask: int) -> None:
        """Have the system read what lies on a disk of this host of a subtask's state, all of which is looked at next:
        RocksDB asks for it in small pieces."""
        taken = snapshots_of(self.replay.files(self.replay.checkpoint), self.stage.uid).get(subtask)
        for file in taken.files if taken is not None and hasattr(os, "posix_fadvise") else ():
            there = self.replay.storage.on_disk(file.path)
            if there is not None:
                with suppress(OSError), there.open("rb") as opened:  # who looks at it says what is wrong with it
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def _only_of(self, backend: Backend | None, asked: Collection[bytes] | None) -> Backend | None:
        if backend is None or asked is None:
            return backend
        return cast("Backend", OfKeys(backend, asked, self.keys.types))  # which has what is read here

    def _groups(self, groups: range, asked: Collection[bytes] | None) -> list[range]:
        """Return the ranges of a subtask's key groups to look into."""
        if asked is None:
            return [groups]
        return [range(group, group + 1) for group in _groups_of(asked) if group in groups]

    def rows(
        self, subtasks: Sequence[int], views: tuple[View | None, ...], owners: Collection[bytes]
    ) -> list[pl.DataFrame]:
        """Return the rows of some keys, before, after, and as recorded."""
        parts: list[list[pa.Table]] = [[] for _ in views]
        for subtask in subtasks:
            groups = self._groups(self.replay.groups(subtask), owners)
            if not groups:
                continue
            with (
                self.replay.before(self.stage, subtask) as before,
                self.replay.after(self.stage, subtask) as after,
                self.replay.recorded(self.stage, subtask) as recorded,
            ):
                for part, view, backend in zip(parts, views, (before, after, recorded), strict=True):
                    only = self._only_of(backend, owners)
                    if view is not None and only is not None:
                        part += [table for group in groups for table in view.rows(only, group)]
        return [_frame(part, view) for part, view in zip(parts, views, strict=True)]

    def with_hidden(self, otherwise: Difference | None, differing: Mapping[bytes, set[str]]) -> Difference | None:
        """Return the difference, and what no row shows of keys that are not in it."""
        shown = set[tuple[object, ...]]()
        if otherwise is not None:
            shown = {tuple(row[name] for name in self.keys.names) for row in (*otherwise.recorded, *otherwise.replayed)}
        rows = []
        for owner, what in differing.items():
            _, columns = decode_keys([owner[:GROUP_BYTES] + b"\0" + owner[GROUP_BYTES:]], self.keys.types)
            key = {name: column[0].as_py() for name, column in zip(self.keys.names, columns, strict=True)}
            if what and tuple(key.values()) not in shown:
                rows.append({**key, DIFFERS: ", ".join(sorted(what))})
        if not rows:
            return otherwise
        otherwise = otherwise or Difference(STATE, (), ())
        return replace(otherwise, replayed=(*otherwise.replayed, *rows))


def _groups_of(owners: Collection[bytes]) -> list[int]:
    return sorted({int.from_bytes(owner[:GROUP_BYTES], "big") for owner in owners})


def _touched(stage: Stage, inputs: Mapping[str, pl.DataFrame]) -> pl.DataFrame | None:
    """Return the keys of rows; None: there are no rows."""
    keys = [
        frame.select(input.key).rename(dict(zip(input.key, stage.key, strict=True)))
        for input, frame in zip(stage.inputs, inputs.values(), strict=True)
        if frame.height
    ]
    return pl.concat(keys).drop_nulls().unique(maintain_order=True) if keys else None


def _frame(tables: Sequence[pa.Table], view: View | None) -> pl.DataFrame:
    given = [table for table in tables if table.num_rows] or ([] if view is None else [view.schema.empty_table()])
    return frames.from_arrow(pa.concat_tables(given, promote_options="permissive")) if given else pl.DataFrame()


def _only(frame: pl.DataFrame, differing: Difference, keys: Sequence[str]) -> pl.DataFrame:
    """Return the rows of keys whose state differs."""
    wanted = {tuple(row[name] for name in keys) for row in (*differing.recorded, *differing.replayed)}
    if not frame.height:
        return frame
    return frame.filter(pl.Series([row in wanted for row in frame.select(keys).iter_rows()], dtype=pl.Boolean))
