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

_Parts = Mapping[tuple[str, ...], Part]  # by their paths from the row down

_MANTISSA = {16: 11, 32: 24, 64: 53}  # bits of an integer that a float of so many bits holds exactly


# What is possible


def obstacles(old: StateSchema, new: StateSchema) -> list[str]:
    """Return the reasons why rows of `old` cannot be read as rows of `new`, one sentence a field; empty if they can."""
    return [problem for problems in obstacles_by_field(old, new).values() for problem in problems]


def obstacles_by_field(old: StateSchema, new: StateSchema) -> dict[str, list[str]]:
    """Return the obstacles by the field of `new`; a field without obstacles is left out."""
    by_field: dict[str, list[str]] = {}
    declared = _declared_parts(new)
    for field, sources in _matched(_row(old), _row(new), declared, ()):
        if sources:
            problems = _compared(sources[0], field, declared, (field.name,))
            problems = problems or _ambiguous(field.name, [source.name for source in sources])
            by_field |= {field.name: problems} if problems else {}
    return by_field


def _row(schema: StateSchema, *, hidden: bool = True) -> pa.DataType:
    """Return a row as one struct of its fields. hidden: with the hidden one."""
    return pa.struct([field for field in schema.arrow if hidden or field.name != TOUCHED])


def _declared_parts(schema: StateSchema) -> _Parts:
    return {part.path: part for part in schema.parts}


def _compared(a: pa.Field, b: pa.Field, declared: _Parts, at: tuple[str, ...]) -> list[str]:
    """Return the reasons why values of one field cannot be read as values of another. at: the path of the newer one."""
    path = ".".join(at)
    problems = [f"field {path} was nullable and no longer is"] if a.nullable and not b.nullable else []
    if _kind(a.type) != _kind(b.type) or (not _kind(b.type) and not _widens(a.type, b.type)):
        return [*problems, f"field {path} changed its type from {type_name(a.type)} to {type_name(b.type)}"]
    for part, sources in _matched(a.type, b.type, declared, at):
        if sources:
            problems += _ambiguous(f"{path}.{part.name}", [source.name for source in sources])
            problems += _compared(sources[0], part, declared, (*at, part.name))
    return problems


def _ambiguous(path: str, sources: Sequence[str]) -> list[str]:
    """Return a message about a field that may be any of several old fields; nothing if there is one.

    path: The path of the field. sources: The names of the old fields.
    """
    if len(sources) == 1:
        return []
    kept, others = sources[0], ", ".join(repr(name) for name in sources[1:])
    return [
        f"field {path} is ambiguous, since the state has {' and '.join(sources)}, and each of them may be meant: "
        "leave out "
        f"renamed_from({others}) to go on with the values of {kept}, or give the field a name that the state does not "
        "have"
    ]


def _kind(type: pa.DataType) -> str:
    """Return the kind that a type with parts must keep; "" if it has no parts."""
    if pa.types.is_fixed_size_list(type):
        return f"fixed size {type.list_size}"
    if pa.types.is_map(type):
        return "map"
    if pa.types.is_struct(type):
        return "struct"
    return "list" if is_list(type) else ""


def _widens(a: pa.DataType, b: pa.DataType) -> bool:
    """Return whether every value of `a` is a value of `b`, and stays the same."""
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
    a: pa.DataType, b: pa.DataType, declared: _Parts, at: tuple[str, ...]
) -> Iterable[tuple[pa.Field, list[pa.Field]]]:
    """Yield every part of the new type, with the parts of the old one that it may have been; none if it is new."""
    if not pa.types.is_struct(b):
        return [(part, [source]) for part, source in zip(parts(b), parts(a), strict=True)]
    old, names = {part.name: part for part in a}, set(b.names)
    renamed = {part.name: declared[path].renamed if (path := (*at, part.name)) in declared else () for part in b}
    return [(part, [old[name] for name in _sources(part.name, renamed[part.name], old, names)]) for part in b]


def _sources(name: str, renamed: Iterable[str], before: Mapping[str, Any], taken: set[str]) -> list[str]:
    """Return the old names of a field, its own first: none if it is new, and one, or nobody can tell which
    (`obstacles`).

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
    """Return the fields of `old`, and the parts of its fields, that `new` has no more, in their order."""
    lost = []
    for level in _levels(_row(old, hidden=False), _row(new, hidden=False), _declared_parts(new)):
        read = {source for _, sources, _ in level.now for source in sources}
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
        for level in _levels(_row(old, hidden=False), _row(new, hidden=False), _declared_parts(new))
        for field, sources, required in level.now
        if not sources and required
    ]


@dataclass(frozen=True, slots=True)
class _Level:
    """The fields of a row, or of one struct in it.

    Attributes:
        before: The fields of the older schema.
        now: Of each field of the newer one: the names that it may have had before (none: it is new), and whether its
            default is nobody's.
        declared: What is known of the newer schema's parts.
        at: Where these fields are in the row.
    """

    before: tuple[pa.Field, ...]
    now: tuple[tuple[pa.Field, list[str], bool], ...]
    declared: _Parts
    at: tuple[str, ...]

    @property
    def path(self) -> str:
        """The prefix of the fields' names, for people."""
        return "".join(f"{name}." for name in self.at)


def _levels(a: pa.DataType, b: pa.DataType, declared: _Parts, at: tuple[str, ...] = ()) -> Iterator[_Level]:
    if not _kind(b) or _kind(a) != _kind(b):
        return
    matched = list(_matched(a, b, declared, at))
    if pa.types.is_struct(b):
        required = {path for path, part in declared.items() if part.required}
        now = [(part, [source.name for source in old], (*at, part.name) in required) for part, old in matched]
        yield _Level(tuple(a), tuple(now), declared, at)
    for part, sources in matched:
        for source in sources[:1]:
            yield from _levels(source.type, part.type, declared, (*at, part.name))


def _successors(dropped: Sequence[pa.Field], level: _Level) -> dict[str, str]:
    """Return for each dropped field the new field that could hold its values, each once.

    Fields of the same type come first, then the ones most alike in name.
    """
    alike = []
    for was in dropped:
        for field, sources, _ in level.now:
            if not sources and not _compared(was, field, level.declared, (*level.at, field.name)):
                likeness = SequenceMatcher(None, was.name, field.name).ratio()
                alike.append(((was.type == field.type, likeness), was.name, field.name))
    chosen = dict[str, str]()
    for _, was_name, name in sorted(alike, key=lambda pair: pair[0], reverse=True):
        if was_name not in chosen and name not in chosen.values():
            chosen[was_name] = name
    return chosen


# Rows


def migrated(table: pa.Table, old: StateSchema, new: StateSchema) -> pa.Table:
    """Return the rows of `old` as rows of `new`, which have no obstacles."""
    if old == new:
        return table
    columns = [contiguous(column) for column in table.select(old.arrow.names).columns]
    rows = struct_of(_row(old), np.zeros(table.num_rows, bool), columns)
    return pa.Table.from_arrays(_converted(rows, _row(new), _declared_parts(new), ()).flatten(), schema=new.arrow)


def _converted(array: pa.Array, type: pa.DataType, declared: _Parts, at: tuple[str, ...]) -> pa.Array:
    if not _kind(type):
        return array if array.type == type else array.cast(type)
    fields, nulls = parts(type), nulls_of(array)
    missing = np.zeros(len(array), bool) if nulls is None else nulls
    if pa.types.is_struct(type):
        children = dict(zip(array.type.names, array.flatten(), strict=True))
        converted = [
            _converted(children[sources[0].name], part.type, declared, (*at, part.name))
            if sources
            else _added(part, declared.get((*at, part.name)), len(array))
            for part, sources in _matched(array.type, type, declared, at)
        ]
        return struct_of(type, missing, converted)
    inner, counts = elements(array)
    if pa.types.is_map(type):
        converted = [
            _converted(child, part.type, declared, (*at, part.name))
            for child, part in zip(inner.flatten(), fields, strict=True)
        ]
        pairs = struct_of(elements_type(type).type, np.zeros(len(inner), bool), converted)
        return list_of(type, missing, counts, pairs)
    return list_of(type, missing, counts, _converted(inner, fields[0].type, declared, (*at, fields[0].name)))


def _added(field: pa.Field, part: Part | None, rows: int) -> pa.Array:
    """Return a column of a new field's default. part: what is known of it."""
    default = part.default if part is not None else None if field.nullable else zero_of(field.type)
    return pa.array([default], field.type).take(pa.array(np.zeros(rows, np.int64)))


# On record


def recorded(schema: StateSchema) -> list[dict[str, Any]]:
    """Return as JSON every schema that rows in state may have, oldest first and `schema` last, with all that reading
    them takes.
    """
    return [
        {
            "schema": written.to_json(),
            "renamed": {f.name: list(f.renamed) for f in written.fields if f.renamed},
            "parts": {f.name: [_part_to_json(f, part) for part in f.parts] for f in written.fields if f.parts},
        }
        for written in (*schema.older, schema)
    ]


def from_record(record: Sequence[Mapping[str, Any]]) -> StateSchema:
    """Return the schema that a checkpoint has on record, as `recorded` gives it. Raises DamageError if it cannot be
    read."""
    chain = [_entry_schema(entry) for entry in record]
    return chain[-1].reading(chain[:-1])


def successor(was: StateSchema, new: StateSchema) -> StateSchema:
    """Return `new`, which also reads the rows that `was`, the schema on record, reads."""
    return new.reading(was.older if was == new else (*was.older, was))


def upgraded(tables: Iterable[pa.Table], chain: Iterable[StateSchema]) -> pa.Table:
    """Return the rows of each schema of a chain as rows of its last: those of the first first."""
    ordered, rows = list(chain), iter(tables)
    whole = next(rows)
    for (old, new), table in zip(pairwise(ordered), rows, strict=True):
        whole = pa.concat_tables([migrated(whole, old, new), table])
    return whole


def _part_to_json(f: Field, part: Part) -> dict[str, Any]:
    default = value_to_json(_type_at(f.type, part.path), part.default)
    return {"path": list(part.path), "default": default, "renamed": list(part.renamed)}


def _entry_schema(entry: Mapping[str, Any]) -> StateSchema:
    schema = StateSchema.from_json(entry["schema"])
    try:
        fields = []
        for f in schema.fields:
            of_field = []
            for raw in entry.get("parts", {}).get(f.name, []):
                path = tuple(raw["path"])
                default = value_from_json(_type_at(f.type, path), raw["default"])
                of_field.append(Part(path, default, tuple(raw["renamed"])))
            renamed = tuple(entry.get("renamed", {}).get(f.name, ()))
            fields.append(Field(f.name, f.type, f.nullable, f.default, renamed, tuple(of_field)))
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
