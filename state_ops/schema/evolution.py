"""State whose class has changed: which changes are possible, and rows of an older schema as rows of a newer one.

A checkpoint records the schema that its state was last written with, and the ones before it that rows may still have.
Nothing
is rewritten when a schema changes: a row is read as if every change since it was written had been applied to it, one
after the other, and is stored with the newest schema when its key is next updated. That it is one after the other makes
the result the
same whichever rows were updated in between: a field that was dropped and later added again is a new field. Except where
the
very same schema comes back, to the default: then rows of both times are read as they are (docs/adr/0012).

    add a field            older rows read its default, or null: `without_default` says which have none of their
                           author's
    drop a field           its values are no longer read, and gone when the row is next updated: `gone` says which
    widen a type           integers, floats and decimals to one that holds all values exactly; string, binary and list
                           to large
    make nullable          from `int` to `int | None`
    rename                 where the field declares its old name: `renamed_from`, and only one old field can be meant
    reorder, new default   always

The same holds for the fields of structs, in list elements and map values. Anything else is refused before the first
row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from state_ops.arrow.columns import contiguous, is_list, nulls_of
from state_ops.arrow.nested import elements, elements_type, list_of, struct_of
from state_ops.arrow.types import parts, type_name, value_from_json, value_to_json, zero_of
from state_ops.errors import DamageError
from state_ops.schema.state_schema import TOUCHED, Field, Part, StateSchema

_MANTISSA = {16: 11, 32: 24, 64: 53}  # bits of an integer that a float of so many bits holds exactly


# What is possible


def obstacles(old: StateSchema, new: StateSchema) -> list[str]:
    """Why rows of `old` cannot be read as rows of `new`, one sentence a field; empty if they can."""
    return [one for said in obstacles_by_field(old, new).values() for one in said]


def obstacles_by_field(old: StateSchema, new: StateSchema) -> dict[str, list[str]]:
    """The same, by the field of `new`; without those that have none."""
    found: dict[str, list[str]] = {}
    before = {f.name: f for f in old.fields}
    for f in new.fields:
        sources, said = _sources(f.name, f.renamed, before, {other.name for other in new.fields}), list[str]()
        if not sources:
            continue
        was = before[sources[0]]
        a, b = pa.field(sources[0], was.type, was.nullable), pa.field(f.name, f.type, f.nullable)
        _compare(f.name, a, b, f, (), said)
        said += _ambiguous(f.name, sources) if not said else []
        if said:
            found[f.name] = said
    return found


def _compare(path: str, a: pa.Field, b: pa.Field, of: Field, at: tuple[str, ...], said: list[str]) -> None:
    if a.nullable and not b.nullable:
        said.append(f"field {path} was nullable and no longer is")
    if _kind(a.type) != _kind(b.type) or (not _kind(b.type) and not _widens(a.type, b.type)):
        said.append(f"field {path} changed its type from {type_name(a.type)} to {type_name(b.type)}")
        return
    for part, sources in _matched(a.type, b.type, of, at):
        if sources:
            said += _ambiguous(f"{path}.{part.name}", [source.name for source in sources])
            _compare(f"{path}.{part.name}", sources[0], part, of, (*at, part.name), said)


def _ambiguous(path: str, sources: Sequence[str]) -> list[str]:
    """What is said of a field that may be several of the old ones; nothing where it is one. path: of the field;
    sources: their names."""
    if len(sources) == 1:
        return []
    kept, others = sources[0], ", ".join(repr(name) for name in sources[1:])
    return [
        f"field {path} is ambiguous, since the state has {' and '.join(sources)}, and each of them may be meant: leave out "
        f"renamed_from({others}) to go on with the values of {kept}, or give the field a name that the state does not have"
    ]


def _kind(type: pa.DataType) -> str:
    """What a type must stay if it has parts; "" if it has none."""
    if pa.types.is_fixed_size_list(type):
        return f"fixed size {type.list_size}"
    if pa.types.is_map(type):
        return "map"
    if pa.types.is_struct(type):
        return "struct"
    return "list" if is_list(type) else ""


def _widens(a: pa.DataType, b: pa.DataType) -> bool:
    """Whether every value of `a` is a value of `b`, and stays what it is."""
    if a == b:
        return True
    if pa.types.is_decimal(a) and pa.types.is_decimal(b):
        return bool(a.scale == b.scale and a.precision <= b.precision)
    if pa.types.is_floating(a) and pa.types.is_floating(b):
        return bool(a.bit_width < b.bit_width)
    if pa.types.is_integer(a):
        signed = pa.types.is_signed_integer(a)
        if pa.types.is_floating(b):
            return bool(a.bit_width <= _MANTISSA[b.bit_width])
        if pa.types.is_integer(b) and (pa.types.is_signed_integer(b) or not signed):
            return bool(a.bit_width < b.bit_width)
    return (a, b) in ((pa.string(), pa.large_string()), (pa.binary(), pa.large_binary()))


def _matched(
    a: pa.DataType, b: pa.DataType, of: Field, at: tuple[str, ...]
) -> Iterable[tuple[pa.Field, list[pa.Field]]]:
    """Every part of the new type, with the parts of the old one that it may have been; none where it is new."""
    if not pa.types.is_struct(b):
        return [(part, [source]) for part, source in zip(parts(b), parts(a), strict=True)]
    old, renamed = {part.name: part for part in a}, {part.path: part.renamed for part in of.parts}
    names = set(b.names)
    sources = [_sources(part.name, renamed.get((*at, part.name), ()), old, names) for part in b]
    return [(part, [old[source] for source in some]) for part, some in zip(b, sources, strict=True)]


def _sources(name: str, renamed: Iterable[str], before: Mapping[str, Any], taken: set[str]) -> list[str]:
    """The old names of a field, its own first: none if it is new, and one, or nobody can tell which (`obstacles`).

    An old name that now is another field's is that other field's.
    """
    return [old for old in dict.fromkeys((name, *renamed)) if old in before and (old == name or old not in taken)]


# What would be lost, and what would be made up


@dataclass(frozen=True, slots=True)
class Gone:
    """A field, or a part of a field, whose values nothing of the newer schema reads: they are gone when its row is next
    updated.

    Attributes:
        path: From the field down, as obstacles name it: "address.street".
        type: Its type's name.
        successor: A new field beside it which looks like the same one under another name; None if there is none.
    """

    path: str
    type: str
    successor: str | None


def gone(old: StateSchema, new: StateSchema) -> list[Gone]:
    """The fields of `old`, and the parts of its fields, that `new` has no more, in their order."""
    lost = []
    for level in _levels(old, new):
        read = {source for _, sources, _, _ in level.now for source in sources}
        dropped = [field for field in level.before if field.name not in read]
        successors = _successors(dropped, level)
        for field in dropped:
            lost.append(Gone(level.path + field.name, type_name(field.type) or "", successors.get(field.name)))
    return lost


def without_default(old: StateSchema, new: StateSchema) -> list[tuple[str, str]]:
    """Path and type of the fields, and parts of fields, that `new` has beside those of `old` and for which its author
    gives no
    default: what older rows read as, the zero of the type, is nothing that anybody has said."""
    return [
        (level.path + field.name, type_name(field.type) or "")
        for level in _levels(old, new)
        for field, sources, required, _ in level.now
        if not sources and required
    ]


@dataclass(frozen=True, slots=True)
class _Level:
    """The fields of a row, or of one struct in it. path: what their names begin with; now: each field of the newer
    schema, the names that it may have had before (none: it is new), whether its default is nobody's, and where its
    parts are known."""

    path: str
    before: tuple[pa.Field, ...]
    now: tuple[tuple[pa.Field, list[str], bool, tuple[Field, tuple[str, ...]]], ...]


def _levels(old: StateSchema, new: StateSchema) -> Iterator[_Level]:
    before = {f.name: f for f in old.fields if f.name != TOUCHED}
    fields = [f for f in new.fields if f.name != TOUCHED]
    found = [_sources(f.name, f.renamed, before, {other.name for other in fields}) for f in fields]
    yield _Level(
        "",
        tuple(pa.field(f.name, f.type, f.nullable) for f in before.values()),
        tuple(
            (pa.field(f.name, f.type, f.nullable), sources, f.required, (f, ()))
            for f, sources in zip(fields, found, strict=True)
        ),
    )
    for f, sources in zip(fields, found, strict=True):
        for source in sources[:1]:
            yield from _levels_below(f.name, before[source].type, f.type, f, ())


def _levels_below(path: str, a: pa.DataType, b: pa.DataType, of: Field, at: tuple[str, ...]) -> Iterator[_Level]:
    if not _kind(b) or _kind(a) != _kind(b):
        return
    matched = list(_matched(a, b, of, at))
    if pa.types.is_struct(b):
        required = {part.path for part in of.parts if part.required}
        yield _Level(
            f"{path}.",
            tuple(a),
            tuple(
                (part, [one.name for one in sources], (*at, part.name) in required, (of, (*at, part.name)))
                for part, sources in matched
            ),
        )
    for part, sources in matched:
        for source in sources[:1]:
            yield from _levels_below(f"{path}.{part.name}", source.type, part.type, of, (*at, part.name))


def _successors(dropped: Sequence[pa.Field], level: _Level) -> dict[str, str]:
    """For fields that are dropped the new ones that could hold their values, each once: those of the same type and most
    alike in name."""
    alike = []
    for was in dropped:
        for field, sources, _, (of, at) in level.now:
            obstacles = list[str]()
            if not sources:
                _compare("", was, field, of, at, obstacles)
                if not obstacles:
                    likeness = SequenceMatcher(None, was.name, field.name).ratio()
                    alike.append(((was.type == field.type, likeness), was.name, field.name))
    chosen = dict[str, str]()
    for _, was_name, name in sorted(alike, key=lambda pair: pair[0], reverse=True):
        if was_name not in chosen and name not in chosen.values():
            chosen[was_name] = name
    return chosen


# Rows


def migrated(table: pa.Table, old: StateSchema, new: StateSchema) -> pa.Table:
    """The rows of `old` as rows of `new`, which have no obstacles."""
    if old == new:
        return table
    before = {f.name: f for f in old.fields}
    columns = []
    for f in new.fields:
        sources = _sources(f.name, f.renamed, before, {other.name for other in new.fields})
        if not sources:
            columns.append(_repeated(f.default, f.type, table.num_rows))
        else:
            columns.append(_converted(contiguous(table.column(sources[0])), f.type, f, ()))
    return pa.Table.from_arrays(columns, schema=new.arrow)


def _converted(array: pa.Array, type: pa.DataType, of: Field, at: tuple[str, ...]) -> pa.Array:
    if not _kind(type):
        return array if array.type == type else array.cast(type)
    fields, nulls = parts(type), nulls_of(array)
    missing = np.zeros(len(array), bool) if nulls is None else nulls
    if pa.types.is_struct(type):
        children = dict(zip(array.type.names, array.flatten(), strict=True))
        made = [
            _converted(children[sources[0].name], part.type, of, (*at, part.name))
            if sources
            else _added(part, of, (*at, part.name), len(array))
            for part, sources in _matched(array.type, type, of, at)
        ]
        return struct_of(type, missing, made)
    inner, counts = elements(array)
    if pa.types.is_map(type):
        made = [
            _converted(child, part.type, of, (*at, part.name))
            for child, part in zip(inner.flatten(), fields, strict=True)
        ]
        pairs = struct_of(elements_type(type).type, np.zeros(len(inner), bool), made)
        return list_of(type, missing, counts, pairs)
    return list_of(type, missing, counts, _converted(inner, fields[0].type, of, (*at, fields[0].name)))


def _added(part: pa.Field, of: Field, at: tuple[str, ...], rows: int) -> pa.Array:
    known = {one.path: one.default for one in of.parts}
    default = known[at] if at in known else None if part.nullable else zero_of(part.type)
    return _repeated(default, part.type, rows)


def _repeated(value: Any, type: pa.DataType, rows: int) -> pa.Array:
    return pa.array([value], type).take(pa.array(np.zeros(rows, np.int64)))


# On record


def recorded(schema: StateSchema) -> list[dict[str, Any]]:
    """As JSON, every schema that rows in state may have, oldest first and `schema` last, and what reading them
    takes."""
    return [
        {
            "schema": one.to_json(),
            "renamed": {f.name: list(f.renamed) for f in one.fields if f.renamed},
            "parts": {f.name: [_part_to_json(f, part) for part in f.parts] for f in one.fields if f.parts},
        }
        for one in (*schema.older, schema)
    ]


def from_record(figures: Mapping[str, Any]) -> StateSchema:
    """The schema of a checkpoint's state, from its operator's figures. Raises DamageError if they cannot be read.

    Records that know of no older schemas have the newest alone.
    """
    chain = [_one(entry) for entry in figures.get("schemas") or [{"schema": figures["schema"]}]]
    return chain[-1].reading(chain[:-1])


def successor(figures: Mapping[str, Any], new: StateSchema) -> StateSchema:
    """`new`, reading also the rows of the state that was recorded in `figures`."""
    was = from_record(figures)
    return new.reading(was.older if was == new else (*was.older, was))


def upgraded(tables: Iterable[pa.Table], chain: Iterable[StateSchema]) -> pa.Table:
    """Rows of each schema of a chain, all as rows of its last: those of the first first."""
    ordered, rows = list(chain), iter(tables)
    whole = next(rows)
    for (old, new), table in zip(pairwise(ordered), rows, strict=True):
        whole = pa.concat_tables([migrated(whole, old, new), table])
    return whole


def _part_to_json(f: Field, part: Part) -> dict[str, Any]:
    default = value_to_json(_type_at(f.type, part.path), part.default)
    return {"path": list(part.path), "default": default, "renamed": list(part.renamed)}


def _one(entry: Mapping[str, Any]) -> StateSchema:
    schema = StateSchema.from_json(entry["schema"])
    try:
        fields = []
        for f in schema.fields:
            known = []
            for raw in entry.get("parts", {}).get(f.name, []):
                path = tuple(raw["path"])
                default = value_from_json(_type_at(f.type, path), raw["default"])
                known.append(Part(path, default, tuple(raw["renamed"])))
            renamed = tuple(entry.get("renamed", {}).get(f.name, ()))
            fields.append(Field(f.name, f.type, f.nullable, f.default, renamed, tuple(known)))
        return StateSchema(tuple(fields))
    except (KeyError, TypeError, ValueError, AttributeError, pa.ArrowException) as error:
        raise DamageError(
            f"What a checkpoint says of its state's schema cannot be read: {error!r}",
            where=str(dict(entry))[:200],
            next="Restore the registry, or read it with the Weir version that wrote it.",
        ) from error


def _type_at(type: pa.DataType, path: tuple[str, ...]) -> pa.DataType:
    for name in path:
        (type,) = [part.type for part in parts(type) if part.name == name]
    return type
