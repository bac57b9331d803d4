"""Other code in front of a stage that has counted changes: what takes a row back must be made as the row was."""

from __future__ import annotations

import polars as pl
import pytest

from state_ops.errors import PipelineError
from tests.weir.bed import Bed, at
from weir import Epoch, KeyedState, Pipeline, State, agg, aggregate, delta, files, select, stage, union

A, B = (files(f"{{landing}}/{name}/*.parquet", name=name, event_time="at", idle_after="0s") for name in "ab")


class Seen(State):
    rows: int = 0


def clicks(uid: str = "c", **more):
    return aggregate(uid, A, key="k", n=agg.count(), changes=True, **more)


def as_it_is(rows: pl.DataFrame, epoch: Epoch) -> pl.DataFrame:
    return rows


def doubled(rows: pl.DataFrame, epoch: Epoch) -> pl.DataFrame:
    return rows.with_columns(pl.col("n") * 2)


def users(*, source=None, before=(), where=None, columns=(), uid="d", same_rows=()) -> Pipeline:
    c = clicks()
    source = source if source is not None else c
    d = aggregate(
        uid,
        source,
        key="n",
        where=where,
        select=columns,
        users=agg.count(),
        changes=True,
        sink=delta.upsert(uid, key="n"),
    )
    stages = {stage.uid: stage for stage in (c, *before, d)}
    return Pipeline("p", tuple(stages.values()), max_parallelism=4, same_rows=same_rows)


def via(uid="via", of=None, **more) -> dict:
    """Through a select."""
    between = select(uid, of if of is not None else clicks(), *more.pop("columns", "*"), **more)
    return {"source": between, "before": (between,)}


def through(function) -> dict:
    between = stage("via", source=clicks(), key=None, accepts_changes=True)(function)
    return {"source": between, "before": (between,)}


def of_two(*wheres: str | None) -> dict:
    parts = tuple(select(f"part{number}", clicks(), "*", where=where) for number, where in enumerate(wheres))
    both = union("both", *parts)
    return {"source": both, "before": (*parts, both)}


TWICE = ["n", "n * 2 AS m", "_change_type"]


def with_plain(where=None, **more) -> dict:
    plain = select("plain", B, "n", "'insert' AS _change_type", where=where)
    changed = select("changed", clicks(), "n", "_change_type")
    both = union("both", changed, plain)
    return {"source": both, "before": (plain, changed, both)}


OTHERWISE, GONE = "is chosen or made otherwise than it was", "no more"
REFUSED = {
    "a where": (users(where="n > 0"), users(where="n > 1"), OTHERWISE),
    "a where that comes": (users(), users(where="n > 1"), OTHERWISE),
    "a where that goes": (users(where="n > 1"), users(), OTHERWISE),
    "a select": (users(columns=["n", "_change_type"]), users(columns=["n + 1 AS n", "_change_type"]), OTHERWISE),
    "a where in a select between": (users(**via(where="n > 1")), users(**via(where="n > 0")), OTHERWISE),
    "a column of a select between": (
        users(**via(columns=["n", "_change_type"])), users(**via(columns=["n * 2 AS n", "_change_type"])), OTHERWISE
    ),
    "a select between that comes": (users(), users(**via(where="n > 1")), OTHERWISE),
    "a select between that goes": (users(**via(where="n > 1")), users(), OTHERWISE),
    "the where of one of two": (users(**of_two("n < 2", "n >= 2")), users(**of_two("n < 2", "n >= 3")), OTHERWISE),
    "one of two goes": (users(**of_two("n < 2", "n >= 2")), users(**via(where="n < 2")), GONE),
    "code between": (users(**through(as_it_is)), users(**through(doubled)), "the code of via"),
    "code between that comes": (users(), users(**through(doubled)), "the code of via"),
}  # fmt: skip
FINE = {
    "nothing": (users(where="n > 0"), users(where="n > 0"), "used as it is"),
    "blanks": (users(where="n > 0"), users(where="n>0"), "its where was"),
    "a where that moves": (users(where="n > 0"), users(**via(where="n > 0")), "its where was 'n > 0', is none"),
    "a select of all": (users(), users(**via()), "it read the stage c, and reads the stage via"),
    "another uid between": (users(**via(where="n > 0")), users(**via("other", where="n > 0")), "reads the stage other"),
    "a column that nobody looks at": (users(columns=["n", "_change_type"]), users(columns=TWICE), "has 'n * 2 AS m'"),
    "columns in another order": (users(columns=["n", "_change_type"]), users(columns=["_change_type", "n"]), "used as it is"),
    "code that is said to be the same": (
        users(**through(as_it_is)), users(**through(doubled), same_rows="via"), "used as it is"
    ),
    "a where of rows none of which is taken back": (
        users(**with_plain()), users(**with_plain("n > 5")), "its where was none, is 'n > 5'"
    ),
}  # fmt: skip


def begun(bed: Bed, pipeline: Pipeline) -> None:
    bed.land("a", [{"k": key, "at": at(0)} for key in "xxy"])
    if any(source.name == "b" for source in pipeline.sources):
        bed.land("b", [{"n": 1, "at": at(0)}])
    bed.run(pipeline)


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_would_not_take_back_what_was_counted_is_refused_before_the_first_row(name, tmp_path):
    before, after, why = REFUSED[name]
    bed = Bed(tmp_path)
    begun(bed, before)
    assert bed.stops(before) == []
    stops = bed.stops(after)
    assert len(stops) == 1 and why in stops[0] and "the state of d has rows of its changes" in stops[0]
    bed.land("a", [{"k": "x", "at": at(1)}])
    with pytest.raises(PipelineError, match="the state of d has rows of its changes") as refused:
        bed.run(after)
    assert "give d a new uid" in refused.value.next
    bed.run(before)


@pytest.mark.parametrize("name", list(FINE))
def test_what_takes_the_same_back_goes_on(name, tmp_path):
    before, after, said = FINE[name]
    bed = Bed(tmp_path)
    begun(bed, before)
    assert bed.stops(after) == [] and said in bed.said(after)
    bed.land("a", [{"k": "z", "at": at(1)}])
    bed.run(after)


def test_a_new_uid_for_both_begins_anew(tmp_path):
    bed = Bed(tmp_path)
    begun(bed, users(where="n > 1"))
    counted = clicks("c2")
    anew = aggregate("d2", counted, key="n", where="n > 0", users=agg.count(), sink=delta.upsert("d2", key="n"))
    after = Pipeline("p", (counted, anew), max_parallelism=4, retired=("c", "d"))
    assert bed.stops(after) == []
    bed.land("a", [{"k": "x", "at": at(1)}])
    bed.run(after)
    assert bed.table(after, "d2").select("n", "users").rows() == [(1, 1)]


def test_changes_that_have_begun_are_not_let_in_by_a_select_that_was_there(tmp_path):
    none = clicks("none", where="k = 'nobody'")
    before, after = (users(**{**more, "before": (none, *more["before"])}) for more in (via(of=none), via(of=clicks())))
    bed = Bed(tmp_path)
    begun(bed, before)
    assert any("the changes of the stage c from the middle" in what for what in bed.stops(after))


@pytest.mark.parametrize("keyed", ["table", "function"])
def test_tables_with_keys_and_functions_with_state_are_asked_too(keyed, tmp_path):
    def made(where: str) -> Pipeline:
        if keyed == "table":
            last = select("d", clicks(), "*", where=where, sink=delta.upsert("t", key="k", order_by="n"))
            return Pipeline("p", (clicks(), last), max_parallelism=4)

        @stage("d", source=clicks(), key="n", state=Seen, where=where, accepts_changes=True)
        def count(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
            return rows.select("n")

        return Pipeline("p", (clicks(), count), max_parallelism=4)

    bed = Bed(tmp_path)
    begun(bed, made("n > 1"))
    assert bed.stops(made("n > 1")) == []
    (what,) = bed.stops(made("n > 2"))
    assert OTHERWISE in what and ("the table t has" if keyed == "table" else "the state of d has") in what


def test_other_code_counts_only_if_its_python_is_the_same(tmp_path, monkeypatch):
    from weir.code_changes import sql as changes

    before, after = users(**through(as_it_is)), users(**through(doubled))
    bed = Bed(tmp_path)
    begun(bed, before)
    assert bed.stops(after)
    marked = changes.code_of
    monkeypatch.setattr(changes, "code_of", lambda *of: (code := marked(*of)) and f"9.9:{code}")
    assert bed.stops(after) == []
