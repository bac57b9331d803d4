"""The first rows of each key: the definition. `running` has what works on rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa

from state_ops.backends.base import Backend
from state_ops.records.operator_stats import OperatorStats
from state_ops.schema.state_schema import StateSchema
from weir.definition import MAIN, Finding, Operator, OperatorKind, Shapes, Stage, Subtask
from weir.definition.sink import Sink
from weir.operators.forgotten import EXPIRES, keys_forgotten_otherwise

ROWS = "rows"


@dataclass(frozen=True, slots=True)
class TopN(OperatorKind):
    """The first rows of each key, by some columns.

    Attributes:
        by: The columns, and whether the largest value comes first.
        n: How many rows.
        ties: Rows that are equal to the n-th in `by` are among them.
        rank: The column that is handed out with each row's rank, from 1. None: ranks are not handed out.
        until: The column with the event time at which the ranks of a key are final. None: they never are.
        ttl: Without it, microseconds of processing time after which a key of which no row has come is forgotten. None:
            never.
        lateness: How far behind the newest event time rows may come.
        late: The table that gets rows whose ranks are final already.
    """

    kind: ClassVar[str] = "top_n"
    rules: ClassVar[str] = "rules of what comes first"
    slot: ClassVar[str] = "top_n"

    by: tuple[tuple[str, bool], ...]
    n: int
    ties: bool
    rank: str | None
    until: str | None
    ttl: int | None
    lateness: int = field()
    late: Sink | None = field()

    def shapes(self, stage: Stage, rows: pa.Schema, keys: pa.Schema) -> Shapes:
        from weir.operators.top_n.running import top_n_shapes

        return top_n_shapes(stage, self, rows, keys)

    def build(self, subtask: Subtask) -> Operator:
        from weir.operators.top_n.running import TopNOperator

        return TopNOperator(self, subtask)

    def given_to_polars(self, stage: Stage, rows: pa.Schema) -> Sequence[str]:
        return tuple(rows.names)

    def selected_by_polars(self, stage: Stage, rows: pa.Schema) -> Sequence[str]:
        return tuple(rows.names)

    @property
    def time_column(self) -> str | None:
        return self.until

    @property
    def closes(self) -> bool:
        return self.until is not None

    @property
    def forgets(self) -> int | None:
        return self.ttl

    @property
    def indexes_keys(self) -> bool:
        return self.until is None

    def meaning(self) -> dict[str, Any]:
        return {"until": self.until, "by": [list(pair) for pair in self.by], "n": self.n, "ties": self.ties}

    @classmethod
    def recognizes(cls, meaning: Mapping[str, Any]) -> bool:
        return "ties" in meaning

    @classmethod
    def of_meaning(cls, meaning: Mapping[str, Any]) -> TopN:
        return cls((), meaning["n"], meaning["ties"], None, meaning["until"], None, 0, None)

    @classmethod
    def shown(cls, meaning: Mapping[str, Any]) -> str:
        by = ", ".join(f"{name} descending" if largest else name for name, largest in meaning["by"])
        final = f", final at {meaning['until']}" if meaning["until"] else ""
        return f"the first {meaning['n']} by {by}{' with ties' if meaning['ties'] else ''}{final}"

    def changed(self, stage: Stage, recorded: OperatorStats, shapes: Shapes) -> Iterator[Finding]:
        yield from keys_forgotten_otherwise(stage, recorded, ", until another row of theirs comes")

    def opened(
        self, stage: Stage, keys: pa.Schema, state: StateSchema, backend: Backend, groups: range
    ) -> Iterator[pa.Table]:
        from weir.operators.top_n.running import open_ranks

        return open_ranks(self, keys, state, backend, groups)

    def opened_schema(self, stage: Stage, keys: pa.Schema, state: StateSchema) -> pa.Schema:
        from weir.operators.top_n.running import open_ranks_schema

        return open_ranks_schema(self, keys, state)

    @property
    def identity(self) -> tuple[str, ...]:
        return (str(self.until),)

    def hands_out_changes(self, stage: Stage, output: str) -> bool:
        return output == MAIN and self.until is None

    def mixes_rows(self) -> str:
        return "hands out rows of earlier epochs too"

    def clocked_state(self, stage: Stage) -> tuple[str, ...]:
        return () if self.ttl is None else (EXPIRES,)

    def lineage(
        self, stage: Stage, columns: Sequence[str], inputs: Sequence[Sequence[str]], output: str
    ) -> dict[str, list[tuple[int, str]]]:
        origins = OperatorKind.lineage(self, stage, columns, inputs, output)
        if output == MAIN and self.rank is not None:
            origins[self.rank] = [(0, name) for name, _ in self.by]
        return origins
