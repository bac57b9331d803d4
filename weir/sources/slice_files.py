"""The files of one slice as they are gathered: their common columns, how many rows they have, how far event time is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from state_ops.errors import InputError
from weir.definition.source import Source
from weir.sources.file_check import FileCheck
from weir.sources.slices import BadRow, SourceFile


@dataclass
class Gathered:
    """The files that were taken so far.

    Attributes:
        source: Whose files they are.
        schema: The columns that all have; at first those of earlier slices.
        latest: The latest event time that a file may have in microseconds; None: any.
        size: The bytes of the files as they were listed.
        opened: The files.
        newest: By partition, the newest event time in microseconds.
        unread: By column that nobody reads, a file that has it.
    """

    source: Source
    schema: pa.Schema | None
    latest: int | None = None
    opened: list[FileCheck] = field(default_factory=list)
    rows: int = 0
    size: int = 0
    newest: dict[str, int] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    bad_rows: list[BadRow] = field(default_factory=list)

    @property
    def files(self) -> list[SourceFile]:
        """The files as they are read by all columns that there are in the end."""
        return [opened.planned(self.schema) for opened in self.opened if self.schema is not None]

    def add(self, opened: FileCheck, size: int, bad_rows: tuple[BadRow, ...] = ()) -> None:
        """Take a file. Raises InputError, and takes nothing then, if it does not fit the others."""
        without = [row.row for row in bad_rows] if opened.file.landed is None else []
        schema, last = opened.schema(self.schema), opened.newest(np.array(without, np.int64))
        if last is not None and self.latest is not None and last > self.latest:
            raise InputError(
                f"An event time of {opened.file.name} lies further ahead than max_future allows: "
                f"{_shown(last)} in {self.source.event_time}.",
                where=opened.where,
                next='Repair it, or set such input aside with on_bad="quarantine"; nothing of this epoch was applied.',
            )
        self.schema = schema
        name, partition = opened.file.name, opened.file.part.partition if opened.file.part is not None else ""
        read = set(schema.names)
        self.unread = {column: name for column in opened.columns.names if column not in read} | self.unread
        self.opened.append(opened)
        self.rows, self.size = self.rows + opened.rows, self.size + size
        self.bad_rows += bad_rows
        if last is not None:
            self.newest[partition] = max(last, self.newest.get(partition, last))


def _shown(moment: int) -> Any:
    return pa.scalar(moment, pa.timestamp("us", "UTC")).cast(pa.string()).as_py()
