"""Tables whose rows are replaced by another key than they were."""

from __future__ import annotations

from dataclasses import replace

import pytest

from state_ops.errors import PipelineError
from tests.weir.operators.test_stateless import SHOP, land, rows, site_of, table
from weir import Pipeline, delta, select
from weir.execution.in_process import InMemoryExecutor
from weir.operations.plan import plan
from weir.run.run import RunOptions, run


@pytest.mark.parametrize(("was", "key", "stops"), [(["key", "text"], "key", True), ("key", ["key", "text"], False)])
def test_another_key_of_a_table_is_refused_where_rows_that_are_there_may_share_it(tmp_path, was, key, stops):
    """Rows of the old key stayed beside each other, and of those that were touched all went but one."""

    def keyed(by) -> Pipeline:
        sink = delta.upsert("kept", key=by, order_by="at")
        return Pipeline("keyed", (select("kept", SHOP, "*", where="text IS NOT NULL", sink=sink),))

    site, given = site_of(tmp_path, keyed(was)), rows(1, 60)
    asked = RunOptions(until_caught_up=True)
    land(site, "shop", [given])
    list(run(site.pipeline, site.settings, asked, InMemoryExecutor()))
    assert not [of for of in plan(site.pipeline, site.settings).findings if of.aspect == "sink"]
    other = replace(site, pipeline=keyed(key))
    land(site, "shop", [rows(2, 9)], first=1)
    (finding,) = [of for of in plan(other.pipeline, other.settings).findings if of.aspect == "sink"]
    assert finding.verdict.stops is stops and "the key of the table kept was" in finding.what
    before = table(site, "kept")
    if stops:
        with pytest.raises(PipelineError, match="which several rows that are there may have in common"):
            list(run(other.pipeline, other.settings, asked, InMemoryExecutor()))
        assert table(site, "kept").equals(before)
    else:
        list(run(other.pipeline, other.settings, asked, InMemoryExecutor()))
        assert not table(site, "kept").select("key", "text").is_duplicated().any()
