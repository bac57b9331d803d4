"""State classes that change between runs: old rows are read as if every change had been applied to them at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import PipelineError
from state_ops.schema import evolution
from state_ops.schema.state_schema import StateSchema
from tests.recovery.harness import Site
from weir import Epoch, Pipeline, State, ValueState, files, renamed_from, stage
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.run.run import RunOptions, open_storage, run

KEYS = [f"k{number}" for number in range(6)]
Row = dict[str, Any]


class First(State):
    rows: Annotated[int, pa.int32()] = 0
    legs: Annotated[int, pa.int32()] = 0
    note: str = "new"
    tags: list[str]


class Either(State):
    rows: Annotated[int, pa.int32(), renamed_from("legs")] = 0


class Address(State):
    street: str = "?"
    number: Annotated[int, pa.int16()] = 1


class Second(State):
    """Another order, a field less, a wider one, a renamed one, and new ones with and without a default."""

    flights: Annotated[int, pa.int32(), renamed_from("legs")] = 0
    rows: int | None = None
    city: str = "EWR"
    last: float | None = None
    home: Address


class Moved(State):
    road: Annotated[str, renamed_from("street")] = "?"
    number: int = 1
    floor: str = "ground"


class Third(State):
    """The old name is somebody else's now, a dropped field is there again, and the same inside of a struct."""

    flights: float = 0.0
    rows: int | None = None
    city: str = "LGA"
    legs: int = 7
    note: str | None = None
    home: Moved


def _staged(state: type[State], change: Callable[[pl.DataFrame], pl.DataFrame], key: str = "id") -> Pipeline:
    @stage("legs", source=files("{landing}/*.parquet", name="landing"), key=key, state=state)
    def legs(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> None:
        """Changes the state of the keys that it is given."""
        keys = rows.select(key)
        state.put(pl.concat([keys, change(pl.DataFrame(state.get(keys)))], how="horizontal"))

    return Pipeline("evolving", (legs,), max_parallelism=8, retired=("legs.note", "legs.tags", "legs.last"))


def _first(old: pl.DataFrame) -> pl.DataFrame:
    return old.with_columns(
        pl.col("rows") + 1, pl.col("legs") + 10, pl.col("tags").list.concat(pl.lit(["x"])).alias("tags")
    )


def _second(old: pl.DataFrame) -> pl.DataFrame:
    home = pl.struct(pl.lit("Elm").alias("street"), pl.col("home").struct.field("number") + pl.lit(1, pl.Int16))
    return old.with_columns(pl.col("rows") + 1, pl.col("flights") + 10, pl.lit(0.5).alias("last"), home.alias("home"))


def _third(old: pl.DataFrame) -> pl.DataFrame:
    return old.with_columns(pl.col("rows") + 1, pl.col("flights") + 0.25, pl.col("legs") + 1)


# The replay: the same changes on dicts, and a change of class applied to all keys at once.


def _replayed(first: list[str], second: list[str], third: list[str]) -> dict[str, Row]:
    state: dict[str, Row] = {}
    for key in first:
        row = state.setdefault(key, {"rows": 0, "legs": 0, "note": "new", "tags": []})
        row |= {"rows": row["rows"] + 1, "legs": row["legs"] + 10, "tags": [*row["tags"], "x"]}
    state = {
        key: {
            "flights": row["legs"],
            "rows": row["rows"],
            "city": "EWR",
            "last": None,
            "home": {"street": "?", "number": 1},
        }
        for key, row in state.items()
    }
    for key in second:
        empty = {"flights": 0, "rows": None, "city": "EWR", "last": None, "home": {"street": "?", "number": 1}}
        row = state.setdefault(key, empty)
        rows = None if row["rows"] is None else row["rows"] + 1
        home = {"street": "Elm", "number": row["home"]["number"] + 1}
        row |= {"rows": rows, "flights": row["flights"] + 10, "last": 0.5, "home": home}
    if not third:
        return state
    state = {
        key: {
            "flights": float(row["flights"]),
            "rows": row["rows"],
            "city": row["city"],
            "legs": 7,
            "note": None,
            "home": {"road": row["home"]["street"], "number": row["home"]["number"], "floor": "ground"},
        }
        for key, row in state.items()
    }
    for key in third:
        home = {"road": "?", "number": 1, "floor": "ground"}
        row = state.setdefault(
            key, {"flights": 0.0, "rows": None, "city": "LGA", "legs": 7, "note": None, "home": home}
        )
        rows = None if row["rows"] is None else row["rows"] + 1
        row |= {"rows": rows, "flights": row["flights"] + 0.25, "legs": row["legs"] + 1}
    return state


def _site(root: Path, pipeline: Pipeline) -> Site:
    return Site(root, {"WEIR_EPOCH__MAX_FILES": "1"}, pipeline, __name__)


def _epoch(site: Site, name: str, *keys: str, amount: int = 1) -> None:
    site.landing.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": list(keys), "amount": [amount] * len(keys)}), site.landing / f"{name}.parquet")
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))


def _state(site: Site, uid: str = "legs") -> dict[str, Row]:
    rows = [row for table in state_reader.scan(site.pipeline, site.settings, uid) for row in table.to_pylist()]
    return {row.pop("id"): row for row in rows}


def _head(site: Site) -> Any:
    return open_storage(site.pipeline, site.settings)[1].head()


def test_add_drop_widen_rename_and_reorder_over_three_classes(tmp_path):
    site = _site(tmp_path, _staged(First, _first))
    _epoch(site, "1", *KEYS[:4])
    _epoch(site, "2", KEYS[0])
    site = _site(tmp_path, _staged(Second, _second))
    _epoch(site, "3", KEYS[1], KEYS[4])
    assert _state(site) == _replayed([*KEYS[:4], KEYS[0]], [KEYS[1], KEYS[4]], [])
    assert _state(site)[KEYS[0]]["flights"] == 20
    rows = state_reader.get(site.pipeline, site.settings, "legs", [KEYS[2]])
    assert rows == [{"id": KEYS[2], **_replayed(KEYS[:4], [], [])[KEYS[2]]}], "a row nobody has rewritten"

    site = _site(tmp_path, _staged(Third, _third))
    _epoch(site, "4", KEYS[1], KEYS[2], KEYS[5])
    assert _state(site) == _replayed([*KEYS[:4], KEYS[0]], [KEYS[1], KEYS[4]], [KEYS[1], KEYS[2], KEYS[5]]), (
        "rows of all three classes, each read through all changes since it was written"
    )
    recorded = _head(site).operators["legs"]
    assert [StateSchema.from_json(entry["schema"]) for entry in recorded.schemas] == [
        StateSchema.of(state) for state in (First, Second, Third)
    ]
    assert recorded.schema == StateSchema.of(Third).to_json()

    # Once more: the chain comes from the checkpoint now, not from the classes.
    _epoch(site, "5", KEYS[3])
    assert _state(site)[KEYS[3]] == _replayed(KEYS[:4], [], [KEYS[3]])[KEYS[3]]
    assert len(_head(site).operators["legs"].schemas) == 3


def test_a_class_that_comes_back_reads_its_rows_of_both_times(tmp_path):
    class Back(State):
        rows: Annotated[int, pa.int32()] = 0
        legs: Annotated[int, renamed_from("flights")] = 0

    class Once(State):
        rows: Annotated[int, pa.int32()] = 0
        legs: int = 0

    class Between(State):
        rows: Annotated[int, pa.int32()] = 0
        flights: Annotated[int, renamed_from("legs")] = 0

    one_row = pl.lit(1, pl.Int32)
    for number, (state, name) in enumerate([(Once, "legs"), (Between, "flights"), (Back, "legs")]):
        change = lambda old, name=name: old.with_columns(pl.col("rows") + one_row, pl.col(name) + 10)  # noqa: E731
        _epoch(_site(tmp_path, _staged(state, change)), str(number), KEYS[number], KEYS[3])
    site = _site(tmp_path, _staged(Back, _first))
    single = {"rows": 1, "legs": 10}
    assert _state(site) == {**dict.fromkeys(KEYS[:3], single), KEYS[3]: {"rows": 3, "legs": 30}}


def test_a_checkpoint_that_knows_of_no_older_schemas_is_read(tmp_path, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(evolution, "recorded", lambda _: [])
        site = _site(tmp_path, _staged(First, _first))
        _epoch(site, "1", *KEYS[:2])
    assert _state(site)[KEYS[0]] == {"rows": 1, "legs": 10, "note": "new", "tags": ["x"]}
    site = _site(tmp_path, _staged(Second, _second))
    _epoch(site, "2", KEYS[1])
    assert _state(site) == _replayed(KEYS[:2], [KEYS[1]], [])


class Narrow(State):
    rows: Annotated[int, pa.int16()] = 0
    legs: int = 0


class Texts(State):
    rows: str = ""


class Bare(State):
    last: float = 0.0


class Inner(State):
    home: Annotated[dict, pa.struct([("street", pa.string()), ("number", pa.int8())])] | None = None


class Elements(State):
    tags: list[bytes]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (First, Narrow, "field rows changed its type from int32 to int16"),
        (First, Texts, "field rows changed its type from int32 to string"),
        (First, Elements, r"field tags.item changed its type from string to binary"),
        (Second, Bare, "field last was nullable and no longer is"),
        (Second, Inner, "field home.number changed its type from int16 to int8"),
        (First, Either, "field rows is ambiguous, since the state has rows and legs"),
    ],
)
def test_other_changes_are_refused_before_the_first_row(tmp_path, old, new, message):
    site = _site(tmp_path, _staged(old, _first if old is First else _second))
    _epoch(site, "1", *KEYS)
    objects = site.objects()

    def never(rows: pl.DataFrame) -> pl.DataFrame:
        assert not len(rows), "no row is read"
        return rows

    changed = _site(tmp_path, _staged(new, never))
    with pytest.raises(PipelineError, match=message) as refused:
        _epoch(changed, "2", *KEYS)
    refusal = str(refused.value)
    assert "stage legs" in refusal and "checkpoint 1" in refusal and "give the stage a new uid" in refusal
    assert {name for name in site.objects() if "state/" in name} == {name for name in objects if "state/" in name}
    _epoch(site, "3", KEYS[0])  # and the old code goes on


def test_another_key_type_is_refused(tmp_path):
    site = _site(tmp_path, _staged(First, _first))
    _epoch(site, "1", *KEYS)
    changed = _site(tmp_path, _staged(First, _first, key="amount"))
    with pytest.raises(PipelineError, match=r"stage legs(.|\n)*the key was id \(string\), is amount \(int64\)"):
        _epoch(changed, "2", *KEYS)
