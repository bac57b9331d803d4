"""The contract of every operator, as tests: `OperatorContract`, for the operators of this project and of third parties.

    class TestThreshold(OperatorContract):
        @pytest.fixture
        def system(self):
            return ThresholdSystem()

`system` is an `OperatorSystem`: a stage with the operator under test, of one input or of several, and rows for it.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from state_ops.backends.memory import MemoryBackend
from state_ops.ids import CheckpointId
from state_ops.moments import from_micros
from state_ops.rows.resident_table import Residence
from weir.definition import MAIN, Epoch, Operator, Pipeline, Progress, Shapes, Stage, Subtask
from weir.definition.fingerprint import fingerprint_of_stage
from weir.execution import direct_read
from weir.execution.in_process import routed
from weir.operators import sides
from weir.operators.shapes import shapes
from weir.testing.rows import Rows, table_of
from weir.testing.slicing import assert_slicing_does_not_matter

_SUBTASKS, _GROUPS = 2, 8


class OperatorSystem:
    """The operator under test.

    Example:
        >>> from weir import deduplicate, files
        >>> from weir.testing import OperatorSystem
        >>> class Firsts(OperatorSystem):
        ...     stage = deduplicate("firsts", files("{landing}/*.parquet"), key="id", order_by="n")
        ...     rows = [{"id": n % 3, "n": n} for n in range(9)]
        >>> Firsts().stage.operator.kind
        'deduplicate'
    """

    @property
    def stage(self) -> Stage:
        """A stage with the operator that reads sources, and orders rows if the operator depends on an order."""
        raise NotImplementedError

    @property
    def rows(self) -> Rows | Mapping[str, Rows]:
        """Rows for the stage, of several keys, of which the operator hands out some; of several sources by their
        names."""
        raise NotImplementedError


class OperatorContract:
    """The tests. A subclass has a fixture `system` that returns an `OperatorSystem`.

    Example:
        >>> from weir.testing import OperatorContract
        >>> [name for name in dir(OperatorContract) if "meaning" in name]
        ['test_its_meaning_is_recorded_recognized_and_told']
    """

    def test_its_rows_do_not_depend_on_how_the_input_is_cut(self, system: OperatorSystem) -> None:
        stage = system.stage
        assert_slicing_does_not_matter(Pipeline("contract", (stage,)) if stage.is_of_several else stage, system.rows)

    def test_it_is_a_value_that_processes_exchange(self, system: OperatorSystem) -> None:
        stage = system.stage
        copy = pickle.loads(pickle.dumps(stage.operator))
        assert copy == stage.operator, "a copy of the definition is another definition"
        assert hash(copy) == hash(stage.operator)
        assert fingerprint_of_stage(pickle.loads(pickle.dumps(stage))) == fingerprint_of_stage(stage)

    def test_its_rows_have_the_columns_that_it_declares(self, system: OperatorSystem) -> None:
        handed_out = 0
        with TemporaryDirectory() as home:
            for fixed, operator, tables in _built(system, Path(home)):
                produced = [one for rows in tables for one in operator.process(rows)] + list(operator.barrier())
                for output, rows in produced:
                    assert rows.schema.equals(fixed.outputs[output]), f"rows of {output!r} have {rows.schema}"
                    handed_out += rows.num_rows
        assert handed_out, "none of the rows makes it hand out one"

    def test_it_does_nothing_at_a_second_barrier(self, system: OperatorSystem) -> None:
        with TemporaryDirectory() as home:
            for _, operator, tables in _built(system, Path(home)):
                for rows in tables:
                    list(operator.process(rows))
                list(operator.barrier())
                assert not [rows for _, rows in operator.barrier() if rows.num_rows]

    def test_its_meaning_is_recorded_recognized_and_told(self, system: OperatorSystem) -> None:
        operator = system.stage.operator
        meaning = operator.meaning()
        if meaning is None:
            return
        recorded: Mapping[str, Any] = json.loads(json.dumps(meaning))
        assert recorded == meaning, "a checkpoint would give another meaning back"
        assert operator.recognizes(recorded), "it does not recognize its own meaning"
        assert operator.shown(recorded).strip(), "it has no words for its meaning"
        then = operator.of_meaning(recorded)
        assert then is None or then.meaning() is not None

    def test_what_people_see_of_its_columns_is_about_columns_that_are_there(self, system: OperatorSystem) -> None:
        stage, fixed, seen = system.stage, _shapes(system), [table.schema.names for table in _tables(system)]
        names = fixed.outputs[MAIN].names
        operator = stage.operator
        lineage = operator.lineage(stage, names, seen, MAIN)
        assert all(column in seen[side] for origins in lineage.values() for side, column in origins)
        assert {*operator.texts()} <= {*names}, "it explains columns that its rows do not have"
        assert {*operator.clocked_output(stage)} <= {*names}
        fields = {*fixed.state.arrow.names, *(kept.name for kept in fixed.collections)}
        assert {name.partition(".")[0] for name in operator.clocked_state(stage)} <= fields | {*operator.identity}


def _tables(system: OperatorSystem) -> list[pa.Table]:
    """Return the rows of each input, behind its SQL."""
    tables = []
    for input in system.stage.inputs:
        rows = system.rows
        table = table_of(rows[input.name] if isinstance(rows, Mapping) else rows, None)
        assert table is not None and table.num_rows, f"the system has no rows of {input.name}"
        tables.append(direct_read.seen(input, table))
    return tables


def _table(system: OperatorSystem) -> pa.Table:
    """Return the rows as the operator sees them."""
    stage, tables = system.stage, _tables(system)
    columns = sides.wide(stage, [table.schema for table in tables])
    return pa.concat_tables(sides.widened(stage, side, table, columns) for side, table in enumerate(tables))


def _shapes(system: OperatorSystem) -> Shapes:
    return shapes(system.stage, _table(system).schema)


def _built(system: OperatorSystem, home: Path) -> list[tuple[Shapes, Operator, list[pa.Table]]]:
    """Return for each subtask the schemas, the operator of a first epoch, and the rows that reach it."""
    stage, fixed = system.stage, _shapes(system)
    parts = routed(stage, _table(system), _SUBTASKS, _GROUPS, 10)
    built = []
    for subtask, batches in enumerate(parts):
        groups = range(subtask * _GROUPS // _SUBTASKS, (subtask + 1) * _GROUPS // _SUBTASKS)
        epoch = Epoch(CheckpointId(1), from_micros(0), None, subtask, _SUBTASKS)
        given = Subtask(
            stage,
            fixed.handed_out,
            epoch,
            Progress(None, None, drain=True),
            groups,
            _GROUPS,
            MemoryBackend() if stage.key else None,
            resident=Residence(None, home / str(subtask), 0, groups) if stage.key else None,
            checkpoint=epoch.id,
        )
        tables = [pa.Table.from_batches([batch]) for batch in batches]
        built.append((fixed, stage.operator.build(given), tables))
    return built
