"""Lookup: the definition. `running` has what works on rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pyarrow as pa

from weir.connectors.lookups.lookup_table import Pinned
from weir.definition import MAIN, Operator, OperatorKind, Shapes, Stage, Subtask, TableBeside


@dataclass(frozen=True, slots=True)
class Lookup(OperatorKind):
    """Each row with the rows of a table that have its key, as of a version that the plan of its epoch has.

    Attributes:
        table: A Delta table's directory or URI, or one of a file that ends with .parquet, with {placeholders} from the
            configuration.
        on: The key columns: of each the row's name and the table's.
        how: `LEFT` or `INNER`.
        columns: The columns of the table that are handed out. None: all that it has when it is first looked at.
        suffix: Of the table's columns whose names the rows have too.
        on_lost: What to do about a version that is gone: "fail", or "newest".
        pinned: The table as of the version of the epoch at hand; None outside of epochs.
    """

    kind: ClassVar[str] = "lookup"
    slot: ClassVar[str] = "lookup"

    table: str
    on: tuple[tuple[str, str], ...]
    how: str
    columns: tuple[str, ...] | None
    suffix: str = field()
    on_lost: str
    pinned: Pinned | None = field(default=None, compare=False)

    @property
    def keys(self) -> tuple[str, ...]:
        """The key columns of rows."""
        return tuple(name for name, _ in self.on)

    @property
    def table_keys(self) -> tuple[str, ...]:
        """The key columns of the table."""
        return tuple(name for _, name in self.on)

    def shapes(self, stage: Stage, rows: pa.Schema, keys: pa.Schema) -> Shapes:
        from weir.operators.lookups.running import lookup_shapes

        return lookup_shapes(stage, self, rows, keys)

    def build(self, subtask: Subtask) -> Operator:
        from weir.operators.lookups.running import LookupOperator

        return LookupOperator(self, subtask)

    def given_to_polars(self, stage: Stage, rows: pa.Schema) -> Sequence[str]:
        return tuple(rows.names)

    def selected_by_polars(self, stage: Stage, rows: pa.Schema) -> Sequence[str]:
        return ()

    @property
    def needs_key(self) -> bool:
        return False

    @property
    def has_state(self) -> bool:
        return False

    def meaning(self) -> dict[str, Any]:
        columns = self.columns and list(self.columns)
        return {"table": self.table, "on": [list(pair) for pair in self.on], "how": self.how, "columns": columns}

    @classmethod
    def recognizes(cls, meaning: Mapping[str, Any]) -> bool:
        return "table" in meaning

    @classmethod
    def shown(cls, meaning: Mapping[str, Any]) -> str:
        on = " and ".join(name if name == theirs else f"{name} = {theirs}" for name, theirs in meaning["on"])
        columns = "" if meaning["columns"] is None else f" {', '.join(meaning['columns'])}"
        return f"({meaning['how']}){columns} in {meaning['table']} by {on}"

    @property
    def keeps_null_keys(self) -> bool:
        return True  # it finds nothing for them

    @property
    def beside(self) -> TableBeside:
        return TableBeside(self.table, self.table_keys, self.columns, self.on_lost)

    def with_table(self, pinned: Pinned) -> Lookup:
        return replace(self, pinned=pinned)

    def lineage(
        self, stage: Stage, columns: Sequence[str], inputs: Sequence[Sequence[str]], output: str
    ) -> dict[str, list[tuple[int, str]]]:
        if output != MAIN:
            return OperatorKind.lineage(self, stage, columns, inputs, output)
        taken = {name + self.suffix: name for name in inputs[0]}
        return {name: [(0, name) if name in inputs[0] else (1, taken.get(name, name))] for name in columns}
