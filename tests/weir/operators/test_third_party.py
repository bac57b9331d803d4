"""An operator that another package brings by an entry point: planned, changed, tested and explained like Weir's."""

from __future__ import annotations

import ast
import pickle
from datetime import UTC, datetime, timedelta

import pytest

from tests.weir.operators import outside
from tests.weir.operators.outside import installed as installed
from weir import Pipeline, PipelineError, Stage, delta, files, operator, testing
from weir.definition.fingerprint import fingerprint_of_stage
from weir.operators import kinds
from weir.testing import assert_slicing_does_not_matter

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SOURCE = files("{landing}/*.parquet", event_time="at")


def alerts(limit: int = 90, **more) -> Stage:
    return operator("threshold", "alerts", SOURCE, key="sensor", order_by="at", column="value", limit=limit, **more)


def rows(*values: tuple[str, int]) -> list[dict]:
    return [{"sensor": s, "value": v, "at": NOON + timedelta(minutes=n)} for n, (s, v) in enumerate(values)]


def test_it_imports_what_authors_import_alone():
    tree = ast.parse(outside.MODULE.read_text())
    ours = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "weir" in str(node.module)}
    assert ours == {"weir"}


def test_it_hands_out_the_first_row_of_a_key_that_reaches_the_limit_and_remembers_it():
    run = testing.run(alerts(), parallelism=2)
    assert run.epoch(rows(("a", 5), ("b", 95), ("a", 90), ("a", 99))).sort("sensor")["value"].to_list() == [90, 95]
    assert run.epoch(rows(("a", 100), ("b", 100), ("c", 91)))["sensor"].to_list() == ["c"]
    assert {key: state.reached for key, state in run.state.items()} == {"a": True, "b": True, "c": True}


def test_its_rows_do_not_depend_on_how_the_input_is_cut():
    assert_slicing_does_not_matter(alerts(), rows(*[(f"s{n % 7}", n * 13 % 100) for n in range(200)]))


def test_it_is_a_value_that_processes_exchange():
    stage = alerts(sink=delta.append("alerts"))
    assert pickle.loads(pickle.dumps(stage)) == stage
    assert fingerprint_of_stage(stage) == fingerprint_of_stage(alerts(sink=delta.append("alerts")))
    assert fingerprint_of_stage(stage) != fingerprint_of_stage(alerts(91))


def test_its_recorded_meaning_is_known_by_its_entry_point():
    meaning = alerts().operator.meaning()
    assert meaning == {"operator": "threshold", "column": "value", "limit": 90}
    assert kinds.kind_of(meaning) is type(alerts().operator)
    assert kinds.shown(meaning) == "column value, limit 90"


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(PipelineError, match="has no column 'value'"):
        testing.run(alerts()).epoch([{"sensor": "a", "at": NOON}])
    with pytest.raises(PipelineError, match="does not take these arguments"):
        operator("threshold", "alerts", SOURCE, key="sensor", colum="value", limit=1)


def test_it_stands_in_a_pipeline():
    assert Pipeline("plant", (alerts(sink=delta.append("alerts")),)).stages[0].has_state
