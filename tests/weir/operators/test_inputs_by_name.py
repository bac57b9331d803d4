"""How far event time is in each input of a stage is known by the input's name, whatever its place in the code is."""

from __future__ import annotations

import polars as pl
import pytest

from state_ops.errors import PipelineError
from tests.weir.bed import Bed, at
from weir import Epoch, Pipeline, agg, as_of, delta, files, join, select, side, stage, union, window
from weir.epoch import steps
from weir.operators.watermarks import SidesTime

A, B, C = (files(f"{{landing}}/{name}/*.parquet", name=name, event_time="at", idle_after="30d") for name in "abc")


def rows(*minutes: int) -> list[dict]:
    return [{"k": "x", "m": minute, "at": at(minute), "earlier": at(minute - 60)} for minute in minutes]


def counted(source, *before, **more) -> Pipeline:
    every = window(
        "w", source, key="k", on="at", every="1m", n=agg.count(), sink=delta.append("w"), late=delta.append("late")
    )
    return Pipeline("p", (*before, every), max_parallelism=4, **more)


def united(*inputs, **more) -> Pipeline:
    both = union("u", *inputs)
    return counted(both, both, **more)


def of_unions(*inputs, **more) -> Pipeline:
    inner = union("inner", *inputs)
    both = union("u", inner, B)
    return counted(both, inner, both, **more)


def joined(left, right, **more) -> Pipeline:
    pairs = join("j", left, right, on="k", within=("-1m", "1m"), sink=delta.append("w"), late=delta.append("late"))
    return Pipeline("p", (pairs,), max_parallelism=4, **more)


def facts(left, right, **more) -> Pipeline:
    known = as_of("o", left, right, on="k", sink=delta.append("w"), late=delta.append("late"))
    return Pipeline("p", (known,), max_parallelism=4, **more)


FIRST = (("a", 100), ("b", 50))
NEW_C = {"added": ("c",), "retired": ("a",)}
THEN = (("c", 51), ("b", 90), ("c", 52))
CHANGES = {
    "a third input": (united(A, B), united(A, B, C, added=("c",)), FIRST, (("c", 70),), "stays until rows of the source c"),
    "a third in front": (united(A, B), united(C, A, B, added=("c",)), FIRST, (("c", 70), ("b", 60)), "stays until"),
    "one less": (united(A, B, C), united(A, B, retired=("c",)), (*FIRST, ("c", 70)), (("a", 120),), "inputs that are left"),
    "the slowest less": (united(A, B), united(A, C, added="c", retired="b"), FIRST, (("c", 99), ("a", 101)), "stays until"),
    "another order": (united(A, B), united(B, A), FIRST, (("b", 60), ("a", 110), ("b", 62)), "in another order"),
    "one for another": (united(A, B), united(C, B, **NEW_C), FIRST, THEN, "reads the source c and the source b"),
    "one for another in a union of unions": (
        of_unions(A, C), of_unions(C, A), (*FIRST, ("c", 40)), (("c", 45), ("a", 110), ("c", 46)), "in another order",
    ),
    "one for another, joined": (joined(A, B), joined(C, B, **NEW_C), FIRST, THEN, "reads the source c and the source b"),
    "one for another, as of": (facts(A, B), facts(C, B, **NEW_C), FIRST, THEN, "reads the source c and the source b"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CHANGES))
def test_other_inputs_make_no_row_late_that_is_not_and_the_plan_says_what_they_do(name, tmp_path):
    before, after, first, then, said = CHANGES[name]
    bed = Bed(tmp_path)
    for source, *minutes in first:
        bed.land(source, rows(*minutes))
    bed.run(before)

    assert not bed.stops(after) and said in bed.said(after)
    for source, *minutes in then:
        bed.land(source, rows(*minutes))
        bed.run(after)
    assert len(bed.table(after, "late")) == 0


def test_rows_of_a_new_input_from_before_the_watermark_are_late_as_the_plan_says(tmp_path):
    bed = Bed(tmp_path)
    for source, *minutes in FIRST:
        bed.land(source, rows(*minutes))
    bed.run(united(A, B))
    after = united(A, B, C, added=("c",))
    assert "rows of it from before 2026-01-01 00:50:00 UTC are late" in bed.said(after)
    bed.land("c", rows(20))
    bed.run(after)
    assert bed.table(after, "late")["m"].to_list() == [20]


def of_one(first: str, second: str, **more) -> Pipeline:
    """Two sides of one source with times of their own, the second of which lies an hour behind."""
    shifted = {"early": "at", "behind": "earlier AS at"}
    sides = [side(A, select=["k", "m", shifted[name]], where=f"'{name}' = '{name}'") for name in (first, second)]
    return united(*sides, **more)


def test_two_sides_of_one_input_are_told_apart_by_their_sql(tmp_path):
    bed = Bed(tmp_path)
    bed.land("a", rows(100))
    bed.run(of_one("early", "behind"))
    swapped = of_one("behind", "early")
    said = bed.said(swapped)
    assert "in another order" in said and "its where was" not in said and "its select" not in said
    bed.land("a", rows(101))
    bed.run(swapped)
    assert len(bed.table(swapped, "late")) == 0


def test_sides_of_a_join_of_one_input_do_not_change_places(tmp_path):
    bed = Bed(tmp_path)
    few, many = side(A, where="m < 50"), side(A, where="m >= 0")
    bed.land("a", rows(1, 2))
    bed.run(joined(few, many))
    assert not bed.stops(joined(few, many)) and not bed.stops(joined(side(A, where="m < 60"), many))
    stops = bed.stops(joined(many, few))
    assert len(stops) == 2
    assert "the source a (where='m >= 0') was the right side, and is the left one" in stops[0]
    bed.land("a", rows(3))
    with pytest.raises(PipelineError, match="was the right side"):
        bed.run(joined(many, few))


def test_an_output_of_a_stage_is_another_input_than_the_stage_itself(tmp_path):
    @stage("s", source=A, key=None, outputs={"more": None})
    def s(rows: pl.DataFrame, epoch: Epoch) -> dict:
        return {"main": rows, "more": rows}

    def reading(*inputs) -> Pipeline:
        both = union("u", *inputs)
        return counted(both, s, both)

    bed = Bed(tmp_path)
    for source, *minutes in FIRST:
        bed.land(source, rows(*minutes))
    bed.run(reading(s, B))
    after = reading(B, s.output("more"))
    assert "reads the source b and the stage s, output more from the next epoch on" in bed.said(after)
    bed.land("b", rows(60))
    bed.run(after)
    bed.land("b", rows(62))
    bed.run(after)
    assert len(bed.table(after, "late")) == 0


@pytest.mark.parametrize("inputs", [(A, B), (A, B, C)])
def test_what_an_earlier_release_kept_without_names_is_read_by_places_if_these_can_be_the_same(
    inputs, tmp_path, monkeypatch
):
    stats = steps.figures_of
    bed = Bed(tmp_path)
    for source, *minutes in FIRST:
        bed.land(source, rows(*minutes))
    with monkeypatch.context() as earlier:
        earlier.setattr(steps, "figures_of", lambda *of: stats(*of).updated(inputs=None, sql=None))
        bed.run(united(A, B))
    after = united(*inputs, added=("c",))
    assert not bed.stops(after)
    if C in inputs:
        bed.land("c", rows(70))
    bed.land("b", rows(60))
    bed.run(after)
    bed.land("b", rows(62))
    bed.run(after)
    assert len(bed.table(after, "late")) == 0
    assert bed.run(after, drain=True)[-1].checkpoint.watermarks["u"] >= 0


def test_a_source_that_comes_back_is_waited_for_anew(tmp_path):
    bed = Bed(tmp_path)
    for source, *minutes in (*FIRST, ("c", 70)):
        bed.land(source, rows(*minutes))
    bed.run(united(A, B, C))
    bed.land("b", rows(80))
    bed.run(united(A, B, retired=("c",)))
    after = united(C, A, B, added=("c",))
    bed.land("b", rows(90))
    bed.run(after)
    bed.land("c", rows(81))
    bed.run(after)
    assert len(bed.table(after, "late")) == 0


def test_select_is_no_input_of_its_own(tmp_path):
    """A stage without state between source and union hands the watermark on, under its own name."""
    passed = select("passed", C, "*")
    both = union("u", A, passed)
    bed = Bed(tmp_path)
    for source, *minutes in FIRST:
        bed.land(source, rows(*minutes))
    bed.run(united(A, B))
    after = counted(both, passed, both, added=("c",), retired=("b",))
    assert "reads the source a and the stage passed" in bed.said(after)
    bed.land("c", rows(55))
    bed.run(after)
    assert len(bed.table(after, "late")) == 0


def test_since_when_a_source_that_is_read_no_more_has_been_quiet_is_forgotten():
    known = SidesTime((7, 8), {"a": 1, "c": 2})
    assert known.of(union("u", B, A), [None, 0]) == SidesTime((None, 7), {"a": 1})
