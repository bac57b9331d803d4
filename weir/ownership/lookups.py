"""The tables that rows are looked up in, as a run reaches them: which version an epoch's plan has, and whether it is
still there.

The coordinator alone decides. An epoch gets the newest version when it is planned, stages that look up in the same
table the same one; its rows are joined with that version whenever they are applied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

from state_ops.errors import InputError, LostError
from state_ops.logs import Logger
from state_ops.records.checkpoint import Checkpoint, stats_of
from weir.connectors.lookups.lookup_table import NEWEST, LookupTable, Pinned, Version
from weir.definition import Pipeline, Stage, TableBeside
from weir.settings.configuration import Settings

log = Logger("weir.lookup")


class Lookups:
    """The tables of a pipeline's stages."""

    def __init__(self, pipeline: Pipeline, settings: Settings) -> None:
        self._most_bytes = settings.state.lookup_mb << 20
        self._stages = {stage.uid: beside for stage in pipeline.stages if (beside := stage.operator.beside) is not None}
        self._resolve = partial(settings.resolve, pipeline.name)
        self._places: dict[str, str] = {}
        self._s3 = settings.storage.s3
        self._tables: dict[str, LookupTable] = {}
        self._chosen: dict[str, Version] = {}

    def plan(self, head: Checkpoint | None, uids: Collection[str] | None = None) -> dict[str, Version]:
        """Return by stage the version that is the newest now.

        Args:
            head: What the pipeline has joined by then, whose columns it goes on with.
            uids: Of the stages; None: of all.

        Raises:
            InputError: A table is not there, or cannot be read.
        """
        newest: dict[str, Version] = {}
        planned = self._stages if uids is None else {uid: self._stages[uid] for uid in uids}
        for uid, beside in planned.items():
            table = self._table(uid)
            version = newest[table.uri] if table.uri in newest else table.newest()
            newest[table.uri] = version
            self._chosen[uid] = table.chosen(version, beside.keys, beside.columns, self._before(uid, beside, head))
        return {uid: self._chosen[uid] for uid in planned}

    def _before(self, uid: str, beside: TableBeside, head: Checkpoint | None) -> Version | None:
        """Return the version of the same table that a stage joined before, or None."""
        return self._chosen[uid] if uid in self._chosen else _planned(uid, beside, head)

    def again(self, epoch: Checkpoint, head: Checkpoint | None) -> dict[str, Version]:
        """Return by stage the version that an epoch was planned with; the newest where the lookup or its table is new
        since.

        Args:
            head: As in `plan`.

        Raises:
            InputError: A version of then is gone, or a table of now cannot be read.
        """
        then = {uid: _planned(uid, beside, epoch) for uid, beside in self._stages.items()}
        versions = {uid: version for uid, version in then.items() if version is not None}
        if (gone := self.gone(versions)) is not None:
            raise InputError(
                f"{gone}.", where=f"epoch {epoch.id}", next="Keep a table's versions for as long as epochs."
            )
        new = [uid for uid in then if uid not in versions]
        return {**versions, **(self.plan(head, new) if new else {})}

    def newest(self, stage: Stage, head: Checkpoint | None) -> Pinned:
        """Return the table of a stage as its next epoch would be planned with it; raises as `plan`."""
        return Pinned(self._table(stage.uid), self.plan(head, [stage.uid])[stage.uid], True, self._most_bytes)

    def joined(self, stage: Stage, planned: Version, waiting: Version | None) -> Pinned:
        """Return the table as of the version that a stage's rows are joined with.

        Args:
            planned: The version that the plan of the running epoch has.
            waiting: That of the epoch that its rows are of, if it is another one.

        Raises:
            LostError: It is gone, and the stage does not say on_lost="newest".
        """
        table = self._table(stage.uid)
        if waiting is None or waiting.same == planned.same:
            return Pinned(table, waiting or planned, True, self._most_bytes)
        gone = table.missing(waiting)
        if gone is None:
            return Pinned(table, waiting, False, self._most_bytes)
        if self._stages[stage.uid].on_lost != NEWEST:
            raise LostError(
                f"Rows of {stage.uid} wait to be joined with {waiting}, which is gone: {gone}.",
                where=f"lookup {stage.uid}, {table.uri}",
                next='Bring it back, or say on_lost="newest", which joins them with the newest version and records it.',
            )
        log.warning("a version is gone, the newest is joined", stage=stage.uid, version=str(waiting), reason=gone)
        return Pinned(table, planned, True, self._most_bytes)

    def gone(self, versions: Mapping[str, Version]) -> str | None:
        """Why a version cannot be read any more, in words; None: all can. versions: by stage."""
        for uid, version in versions.items():
            if uid in self._stages and (why := self._table(uid).missing(version)) is not None:
                return f"{version} of the table of {uid} is gone: {why}"
        return None

    def place(self, uid: str, uri: str) -> None:
        """Take another table for a stage's than its definition says."""
        self._places[uid] = uri

    def _table(self, uid: str) -> LookupTable:
        uri = self._places.get(uid) or self._resolve(self._stages[uid].place)
        if uri not in self._tables:
            self._tables[uri] = LookupTable(uri, f"lookup {uid}", self._s3)
        return self._tables[uri]


def recorded(head: Checkpoint) -> dict[str, Version]:
    """Return by stage the version that the plan of a checkpoint's epoch had."""
    lookups = {uid: stats.lookup for uid, stats in head.operators.items()}
    return {uid: Version.from_json(raw) for uid, raw in lookups.items() if raw is not None}


def _planned(uid: str, beside: TableBeside, checkpoint: Checkpoint | None) -> Version | None:
    """Return the version that a stage's rows were joined with; None: it had no lookup, or one in another table."""
    recorded = stats_of(checkpoint, uid)
    is_same = recorded.lookup is not None and (recorded.window or {}).get("table") == beside.place
    return Version.from_json(recorded.lookup) if is_same and recorded.lookup else None
