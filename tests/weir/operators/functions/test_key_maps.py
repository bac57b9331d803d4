"""Maps of functions that are called once per key, however their entries are read, against dicts of Python's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from state_ops.keyed import map_state
from state_ops.keyed.per_key import key_collections
from tests.tools.sampling import sampled
from weir import Epoch, KeyState, MapOf, Stage, State, delta, files, stage, testing

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
TTL = timedelta(minutes=3)


class Kept(State):
    """Of one key."""

    entries: MapOf[int, str]


def done(entries: Any, op: str, at: int, value: str) -> str:
    """Do one thing to a map, and say what was seen."""
    match op:
        case "get":
            return str(entries.get(at, "none"))
        case "in":
            return str(at in entries)
        case "items":
            return str(sorted(entries.items()))
        case "set":
            entries[at] = value
        case "del":
            if at in entries:
                del entries[at]
        case "clear":
            entries.clear()
    return ""


def stage_of(**options: Any) -> Stage:
    @stage(
        "kept",
        source=files("x/*.parquet"),
        key="k",
        state=Kept,
        order_by=["n"],
        per_key=True,
        output={"n": pa.int64(), "seen": pa.string()},
        sink=delta.append("seen"),
        **options,
    )
    def kept(key: str, rows: list[dict[str, Any]], state: KeyState, epoch: Epoch) -> list[dict[str, Any]]:
        return [
            {"n": row["n"], "seen": done(state.entries, row["op"], row["at"], row["value"])}
            for row in rows
            if row["op"] != "nothing"
        ]

    return kept


class Model:
    """The maps of all keys, with the time at which each entry was touched."""

    def __init__(self, ttl: timedelta | None, on_read: bool) -> None:
        self.ttl, self.on_read, self.now = ttl, on_read, BEGIN
        self.maps: dict[str, dict[int, tuple[str, datetime]]] = {}

    def of(self, key: str) -> dict[int, str]:
        """The living entries of a key."""
        return {
            at: value
            for at, (value, touched) in self.maps.get(key, {}).items()
            if self.ttl is None or touched > self.now - self.ttl
        }

    def do(self, key: str, op: str, at: int, value: str) -> str:
        living = self.of(key)
        seen = done(living, op, at, value)
        entries = self.maps.setdefault(key, {})
        for gone in entries.keys() - living.keys():
            del entries[gone]
        if op == "set":
            entries[at] = value, self.now
        if self.on_read:
            read = {"items": list(entries), "get": [at], "in": [at]}.get(op, [])
            entries |= {name: (entries[name][0], self.now) for name in read if name in entries}
        return seen


@pytest.mark.parametrize("ttl", sampled([{"ttl": "3m", "ttl_on": "read_and_write"}, {"ttl": "3m"}, {}]), ids=str)
@pytest.mark.parametrize(
    "bounds",
    sampled(
        [
            pytest.param((3, 1, 2), id="mixed"),
            pytest.param((256, 32, 8), id="whole"),
            pytest.param((1, 0, 8), id="alone"),
        ]
    ),
)
def test_a_map_is_what_a_dict_is(bounds: tuple[int, int, int], ttl: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    for module, name, bound in zip(
        (map_state, map_state, key_collections), ("_FEW", "_MORE", "_AHEAD"), bounds, strict=True
    ):
        monkeypatch.setattr(module, name, bound)
    chance = Random(str(bounds) + str(ttl))
    run, model = testing.run(stage_of(**ttl)), Model(TTL if ttl else None, "ttl_on" in ttl)
    ops = ["get", "in", "items", "set", "del", "clear", "nothing"]
    for epoch in range(8):
        model.now = BEGIN + timedelta(minutes=epoch)
        rows = [
            {
                "n": n,
                "k": f"k{chance.randrange(40)}",
                "op": chance.choices(ops, [20, 5, 5, 20, 5, 1, 5])[0],
                "at": chance.randrange(8),
                "value": f"{epoch}-{n}",
            }
            for n in range(300)
        ]
        handed_out = run.epoch(pl.DataFrame(rows), now=model.now)
        expected = {
            row["n"]: model.do(row["k"], row["op"], row["at"], row["value"]) for row in rows if row["op"] != "nothing"
        }
        assert dict(handed_out.select("n", "seen").iter_rows()) == expected


def test_maps_of_many_keys_and_a_large_one_are_read_in_few_requests(monkeypatch: pytest.MonkeyPatch):
    """A thousand small ones a few hundred at a time; of the large one only what is asked for."""
    run = testing.run(stage_of())
    sets = [{"n": n, "k": f"k{n % 1000}", "op": "set", "at": n // 1000, "value": "v"} for n in range(3000)]
    sets += [{"n": 3000 + n, "k": "large", "op": "set", "at": n, "value": "v" * 2000} for n in range(5000)]
    run.epoch(pl.DataFrame(sets))
    wholes: list[tuple[int, bool]] = []
    singles: list[int] = []
    whole, entry = map_state.MapState.whole, map_state.MapState.entry

    def counted_whole(self: Any, codes: range) -> Any:
        result = whole(self, codes)
        wholes.append((len(codes), result is not None))
        return result

    def counted_entry(self: Any, code: int, key: pa.Array) -> Any:
        singles.append(code)
        return entry(self, code, key)

    monkeypatch.setattr(map_state.MapState, "whole", counted_whole)
    monkeypatch.setattr(map_state.MapState, "entry", counted_entry)
    gets = [{"n": n, "k": f"k{n % 1000}", "op": "get", "at": n // 1000, "value": ""} for n in range(3000)]
    gets += [{"n": 3000 + n, "k": "large", "op": "get", "at": n % 10, "value": ""} for n in range(50)]
    seen = run.epoch(pl.DataFrame(gets))
    assert seen["seen"].to_list() == ["v"] * 3000 + ["v" * 2000] * 50
    assert len(wholes) < 25 and sum(number for number, ok in wholes if ok) == 1000
    assert len(singles) == 10, "each entry of the large one once"


def test_of_a_key_without_entries_the_map_is_read_once(monkeypatch: pytest.MonkeyPatch):
    """With those of other keys: a read of its own takes far longer than all of them together."""
    monkeypatch.delattr(map_state.MapState, "all")
    run = testing.run(stage_of())
    seen = run.epoch(pl.DataFrame([{"n": n, "k": f"k{n}", "op": "items", "at": 0, "value": ""} for n in range(100)]))
    assert seen["seen"].to_list() == ["[]"] * 100
