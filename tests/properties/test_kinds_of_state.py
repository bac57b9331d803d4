"""Values, lists and maps against Python's own lists and dicts, with and without a TTL, across batches and epochs."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state_ops.backends.base import BackendOptions
from state_ops.backends.memory import MemoryBackend
from state_ops.backends.rocksdb import ROCKSDB
from state_ops.keyed import list_state, ttl
from state_ops.keyed.keyed_state import GROUP, KeyedState, scan_values, sorts
from state_ops.keyed.list_state import scan_list
from state_ops.keyed.map_state import scan_map
from state_ops.keyed.ttl import Forgotten, Ttl
from state_ops.schema.descriptors import collections_of
from state_ops.schema.key_groups import key_groups
from state_ops.schema.state_schema import TOUCHED, StateSchema
from tests.tools.sampling import rounds
from weir import ListOf, MapOf, State, agg

GROUPS, LIFE = 4, 10
KEYS = pa.schema([("k", pa.string())])
NAMES = ("a", "ab", "é", "")  # one is the beginning of another, one is empty


class Ride(State):
    city: str | None = None
    fare: int = 7


class Rider(State):
    rides: int = 0
    recent: ListOf[Ride]
    spent: MapOf[str, int]
    seen: MapOf[bytes, Ride]


def _keyed(keys: list[str], **columns: list) -> pl.DataFrame:
    types = {"v": pl.Int64, "m": pl.String, "b": pl.Binary}
    data = {name: pl.Series(name, values, dtype=types[name]) for name, values in columns.items()}
    return pl.DataFrame({"k": pl.Series(keys, dtype=pl.String), **data})


class Kept:
    """State over a backend, a new handle for each epoch as an attempt has it. The TTL may be another one in each
    epoch."""

    def __init__(self, backend: Any, life: Ttl | None) -> None:
        self.backend, self.life, self.position = backend, life, b""
        self.schema, self.collections = StateSchema.of(Rider), collections_of(Rider)
        self.forgotten: Forgotten | None = None

    def epoch(self, now: int) -> KeyedState:
        if self.life is not None and TOUCHED not in self.schema.arrow.names:
            self.collections = tuple(
                replace(collection, schema=ttl.stamped(collection.schema).reading([collection.schema]))
                for collection in self.collections
            )
            self.schema = ttl.stamped(self.schema).reading([self.schema])
        self.expiry = ttl.expiry_of(self.schema, self.life, now, self.forgotten)
        self.forgotten = ttl.forgotten_after(self.forgotten, self.life, now)
        self.state = KeyedState(
            self.backend, self.schema, KEYS, "stage tried", expiry=self.expiry, collections=self.collections
        )
        return self.state

    def begin(self) -> None:
        keys = pl.DataFrame({"k": NAMES})
        groups = key_groups([pa.array(NAMES)], GROUPS).astype(np.int32)
        self.state.begin(keys.with_columns(pl.Series(GROUP, groups)))

    def sweep(self, most: int) -> None:
        self.state.barrier()
        if self.expiry is not None:
            declared = sorts(self.schema, self.collections)
            after = ttl.sweep(self.backend, declared, range(GROUPS), self.expiry, self.position, most)
            self.position = after or b""

    def stored(self) -> dict[str, dict]:
        """What a reader finds, by kind and key."""
        contents: dict[str, dict] = {"value": {}, "recent": {}, "spent": {}, "seen": {}}
        every = range(GROUPS)
        for table in scan_values(self.backend, self.schema, KEYS, every, self.expiry):
            contents["value"] |= {row["k"]: row["rides"] for row in table.to_pylist()}
        for collection in self.collections:
            scan = scan_list if collection.name == "recent" else scan_map
            for owners, elements in scan(self.backend, collection, KEYS, every, self.expiry):
                for row in (
                    owner | entry for owner, entry in zip(owners.to_pylist(), elements.to_pylist(), strict=True)
                ):
                    if collection.name == "recent":
                        contents["recent"].setdefault(row["k"], []).append((row["city"], row["fare"]))
                    else:
                        value = row["spent"] if collection.name == "spent" else (row["city"], row["fare"])
                        contents[collection.name].setdefault(row["k"], {})[row[f"{collection.name}_key"]] = value
        return contents


class Model:
    """The same with Python's own: each thing with the moment at which it was touched."""

    def __init__(self, life: Ttl | None) -> None:
        self.life, self.now, self.had_life = life, 0, False
        self.value: dict[str, list] = {}
        self.recent: dict[str, list[list]] = {}
        self.maps: dict[str, dict[str, dict[Any, list]]] = {"spent": {}, "seen": {}}

    def at(self, now: int) -> None:
        """Forget what has expired by now. What is older than the first TTL counts as touched when that came."""
        self.now = now
        if self.life is None:
            return
        if not self.had_life:
            self.had_life = True
            for thing in self.things():
                thing[1] = now
        oldest = now - self.life.micros
        self.value = {key: thing for key, thing in self.value.items() if thing[1] > oldest}
        self.recent = {key: [thing for thing in kept if thing[1] > oldest] for key, kept in self.recent.items()}
        for name, maps in self.maps.items():
            self.maps[name] = {
                key: {entry: thing for entry, thing in kept.items() if thing[1] > oldest} for key, kept in maps.items()
            }

    def things(self) -> list[list]:
        maps = [thing for maps in self.maps.values() for kept in maps.values() for thing in kept.values()]
        return [*self.value.values(), *maps, *(thing for kept in self.recent.values() for thing in kept)]

    def read(self, things: list[list]) -> list:
        for thing in things:
            if self.life is not None and self.life.on_read:
                thing[1] = self.now
        return [thing[0] for thing in things]

    def stored(self) -> dict[str, dict]:
        return {
            "value": {key: thing[0] for key, thing in self.value.items()},
            "recent": {key: [thing[0] for thing in kept] for key, kept in self.recent.items() if kept},
            **{
                name: {key: {entry: thing[0] for entry, thing in kept.items()} for key, kept in maps.items() if kept}
                for name, maps in self.maps.items()
            },
        }

    def entries(self) -> int:
        """How many entries all of it is in a backend."""
        maps = sum(len(kept) for maps in self.maps.values() for kept in maps.values())
        lists = [kept for kept in self.recent.values() if kept]
        return len(self.value) + maps + sum(len(kept) + 1 for kept in lists)


def apply(state: KeyedState, model: Model, do: str, rows: list[tuple[str, str, int]]) -> None:
    """One operation on both; what is read must be the same."""
    keys = [key for key, _, _ in rows]
    distinct = list(dict.fromkeys(keys))
    frame = _keyed(keys, m=[entry for _, entry, _ in rows], v=[value for _, _, value in rows])
    frame = frame.with_columns(b=pl.col("m").cast(pl.Binary))
    unique = list({(key, entry): (key, entry, value) for key, entry, value in rows}.values())
    several = _keyed([key for key, _, _ in unique], m=[m for _, m, _ in unique], v=[v for _, _, v in unique])
    several = several.with_columns(b=pl.col("m").cast(pl.Binary))
    most = rows[0][2] % 3
    if do == "value":
        state.fold(frame, rides=agg.sum("v"))
        for key, _, value in rows:
            model.value[key] = [model.value.get(key, [0])[0] + value, model.now]
    elif do == "read value":
        expected = [model.read([model.value[key]])[0] if key in model.value else 0 for key in keys]
        assert state.join(frame, "rides")["rides"].to_list() == expected
        assert state.get(frame)["rides"].to_list() == expected
    elif do == "delete value":
        state.delete(frame)
        for key in keys:
            model.value.pop(key, None)
    elif do == "append":
        state.recent.append(frame, city="m", fare="v")
        for key, entry, value in rows:
            model.recent.setdefault(key, []).append([(entry, value), model.now])
    elif do == "append in part":
        state.recent.append(frame, city="m")
        for key, entry, _ in rows:
            model.recent.setdefault(key, []).append([(entry, 7), model.now])
    elif do == "list":
        expected = [(key, *element) for key in distinct for element in model.read(model.recent.get(key, []))]
        assert state.recent.get(frame).rows() == expected
    elif do == "last":
        expected = [
            (key, *element) for key in distinct for element in model.read(model.recent.get(key, [])[-most - 1 :])
        ]
        assert state.recent.last(frame, most + 1).rows() == expected
    elif do == "trim":
        state.recent.trim(frame, most)
        for key in distinct:
            kept = model.recent.get(key, [])
            model.recent[key] = kept[len(kept) - most :] if most < len(kept) else kept
    elif do == "put":
        state.spent.put(several, spent_key="m", spent="v")
        state.seen.put(several, seen_key="b", fare="v")
        for key, entry, value in unique:
            model.maps["spent"].setdefault(key, {})[entry] = [value, model.now]
            mine = model.maps["seen"].setdefault(key, {})
            old = mine.get(entry.encode(), [(None, 7)])[0]
            mine[entry.encode()] = [(old[0], value), model.now]
    elif do == "fold map":
        folded = state.spent.fold(frame, spent_key="m", spent=agg.sum("v"))
        for key, entry, value in rows:
            mine = model.maps["spent"].setdefault(key, {})
            mine[entry] = [mine.get(entry, [0])[0] + value, model.now]
        assert sorted(folded.rows()) == sorted(
            {(key, entry, model.maps["spent"][key][entry][0]) for key, entry, _ in rows}
        )
    elif do == "get":
        mine = [model.maps["spent"].get(key, {}).get(entry) for key, entry, _ in rows]
        there = state.spent.contains(frame, spent_key="m").to_list()
        assert there == [value is not None for value in mine]
        folded = state.spent.get(frame, spent_key="m")["spent"].to_list()
        assert folded == [0 if value is None else model.read([value])[0] for value in mine]
    elif do == "all":
        expected = [
            (key, entry, *model.read([value])[0])
            for key in distinct
            for entry, value in sorted(model.maps["seen"].get(key, {}).items())
        ]
        assert state.seen.all(frame).rows() == expected
    elif do == "delete":
        state.spent.delete(frame, spent_key="m")
        for key, entry, _ in rows:
            model.maps["spent"].get(key, {}).pop(entry, None)
    elif do == "clear":
        state.recent.clear(frame)
        state.spent.clear(frame)
        state.seen.clear(frame)
        for key in distinct:
            model.recent.pop(key, None)
            model.maps["spent"].pop(key, None)
            model.maps["seen"].pop(key, None)


DOINGS = [
    "value",
    "read value",
    "delete value",
    "append",
    "append",
    "append in part",
    "list",
    "last",
    "trim",
    "put",
    "fold map",
    "get",
    "all",
    "delete",
    "clear",
]
OPERATIONS = st.tuples(
    st.sampled_from(DOINGS),
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from(["x", "x\0", "", "y"]), st.integers(-9, 9)),
        min_size=1,
        max_size=5,
    ),
)
BATCHES = st.lists(st.lists(OPERATIONS, max_size=5), max_size=2)
EPOCHS = st.lists(st.tuples(BATCHES, st.integers(0, 6)), min_size=1, max_size=6)
LIVES = st.sampled_from([None, Ttl(LIFE), Ttl(LIFE, on_read=True)])
ALWAYS_ONE = LIVES.map(lambda life: [life] * 6)
EACH_ANOTHER = st.lists(st.sampled_from([None, Ttl(LIFE), Ttl(2), Ttl(2 * LIFE, on_read=True)]), min_size=6, max_size=6)


@rounds(3)
@given(EPOCHS, ALWAYS_ONE | EACH_ANOTHER, st.integers(1, 40), st.sampled_from([0, list_state._MANY]))
@settings(max_examples=40)
def test_any_sequence_gives_what_lists_and_dicts_give(round_, epochs, lives, most, many):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(list_state, "_MANY", many)
        _compared(MemoryBackend(), epochs, lives, most)


@given(EPOCHS, ALWAYS_ONE | EACH_ANOTHER, st.integers(1, 40))
@settings(max_examples=8)
def test_any_sequence_gives_what_lists_and_dicts_give_on_rocksdb(epochs, lives, most):
    with _rocksdb() as backend:
        _compared(backend, epochs, lives, most)


def _compared(backend: Any, epochs: list, lives: list[Ttl | None], most: int) -> None:
    """lives: the TTL of each epoch."""
    kept, model, now = Kept(backend, None), Model(None), 1_000
    for (batches, later), life in zip(epochs, lives, strict=False):
        kept.life = model.life = life
        now += later
        kept.epoch(now)
        model.at(now)
        for operations in batches:
            kept.begin()
            for do, rows in operations:
                apply(kept.state, model, do, rows)
            kept.state.flush()
        kept.sweep(most)
        assert kept.stored() == model.stored()
    if not model.had_life:
        assert _entries(backend) == model.entries()
    if life is None:
        return
    # Left alone, all that has expired is deleted after as many sweeps as it takes to come round twice.
    kept.epoch(now)
    for _ in range(2 * (_entries(backend) // most + 2)):
        kept.sweep(most)
    assert kept.stored() == model.stored()
    # A list that was trimmed lately may keep its ends longer than its elements, at most for another life.
    assert 0 <= _entries(backend) - model.entries() <= len(NAMES), "the sweep has left what nobody will ever see"
    kept.epoch(now + life.micros)
    assert kept.stored() == {"value": {}, "recent": {}, "spent": {}, "seen": {}}
    for _ in range(2 * (_entries(backend) // most + 2)):
        kept.sweep(most)
    assert _entries(backend) == 0


def _entries(backend: Any) -> int:
    return sum(1 for _ in backend.scan(b"\0", b"\xff"))


@contextmanager
def _rocksdb():
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "db").mkdir()
        backend = ROCKSDB.open(Path(directory) / "db", BackendOptions(memory_mb=16))
        yield backend
        backend.close()


@pytest.mark.parametrize("before", [None, Ttl(LIFE)])
def test_a_ttl_that_comes_or_goes_loses_nothing(before):
    """Rows without a stamp count as touched when the TTL came; stamps of one that is gone do no harm."""
    after = None if before else Ttl(LIFE)
    kept, model = Kept(MemoryBackend(), before), Model(None)
    rows = [("a", "x", 1), ("ab", "y", 2), ("a", "y", 3)]
    kept.epoch(1_000)
    kept.begin()
    for do in ("value", "append", "put"):
        apply(kept.state, model, do, rows)
    kept.state.flush()
    kept.state.barrier()
    kept.life = after
    kept.epoch(5_000)
    assert kept.stored() == model.stored()
    kept.sweep(3)
    kept.begin()
    for do in ("append", "list", "get", "read value"):
        apply(kept.state, model, do, rows)
    kept.state.flush()
    kept.state.barrier()
    for _ in range(20):
        kept.sweep(3)
    assert kept.stored() == model.stored()
    kept.epoch(5_000 + LIFE - 1)
    assert kept.stored() == model.stored()
    kept.epoch(5_000 + LIFE)
    assert kept.stored() == (model.stored() if after is None else {name: {} for name in model.stored()})


class Asked(MemoryBackend):
    """Knows how many entries it was asked for and told to delete."""

    asked = deleted = 0

    def multi_get(self, keys):
        self.asked += len(keys)
        return super().multi_get(keys)

    def write(self, puts, deletes=()):
        self.deleted += len(deletes)
        super().write(puts, deletes)


@pytest.mark.parametrize("method", ["get", "last", "trim", "clear"])
def test_a_list_asks_for_no_more_than_what_the_sweep_has_left(method):
    backend = Asked()
    kept = Kept(backend, Ttl(LIFE))
    added = _keyed(["a"] * 50, v=list(range(50)))
    for now in range(1_000, 1_000 + 30 * LIFE, LIFE):
        kept.epoch(now)
        kept.begin()
        kept.state.recent.append(added, fare="v")
        assert len(kept.state.recent.last(_keyed(["a"]), 5)) == 5
        kept.state.flush()
        kept.sweep(10_000)
    kept.epoch(now + 1)
    kept.begin()
    backend.asked = backend.deleted = 0
    arguments = {"last": [1_000], "trim": [10]}.get(method, [])
    elements = getattr(kept.state.recent, method)(_keyed(["a"]), *arguments)
    if method in ("get", "last"):
        assert elements["fare"].to_list() == list(range(50))
    kept.state.flush()
    assert backend.asked + backend.deleted <= 50 + len(NAMES) + 1
    assert len(kept.state.recent.get(_keyed(["a"]))) == {"trim": 10, "clear": 0}.get(method, 50)


@pytest.mark.parametrize("stamps_stay", [True, False])
def test_elements_that_a_ttl_has_swept_are_no_damage_once_it_is_off(stamps_stay):
    """Storage of earlier releases has lost its stamps with the TTL: that there was one, older schemas tell."""
    kept = Kept(MemoryBackend(), Ttl(LIFE))
    for now, fare in ((100, 1), (100 + LIFE - 1, 2)):
        kept.epoch(now)
        kept.begin()
        kept.state.recent.append(_keyed(["a"]).with_columns(fare=pl.lit(fare)))
        kept.state.flush()
    kept.epoch(100 + LIFE)
    kept.sweep(100)
    kept.life = None
    if not stamps_stay:
        plain = Kept(kept.backend, None)
        kept.schema = plain.schema.reading([kept.schema])
        kept.collections = tuple(
            replace(collection, schema=collection.schema.reading([was.schema]))
            for collection, was in zip(plain.collections, kept.collections, strict=True)
        )
    kept.epoch(100 + LIFE)
    assert (kept.expiry is None) == (not stamps_stay)
    kept.begin()
    assert kept.state.recent.get(_keyed(["a"]))["fare"].to_list() == [2]
