"""Which key an entry belongs to, and states with the entries of some keys alone."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import pyarrow as pa
import pytest

from state_ops.backends.base import BEYOND, BackendOptions
from state_ops.backends.loader import named
from state_ops.errors import DamageError
from state_ops.keyed.owners import OfKeys, owner_of, owners_of
from state_ops.schema.descriptors import LIST_STATE, VALUE_STATE, WINDOW_STATE
from state_ops.schema.key_codec import encode_int64, encode_keys
from state_ops.schema.key_groups import key_groups

TYPES = [pa.string(), pa.decimal128(9, 2), pa.binary(), pa.bool_(), pa.date32()]
KEYS = [
    pa.array(["a", "a\0b", "", "ab\0"]),
    pa.array([Decimal("1.50"), Decimal("-2.25"), Decimal("0.00"), Decimal("1.50")], TYPES[1]),
    pa.array([b"\0", b"\0\xff", b"", b"\0\0"]),
    pa.array([True, False, True, False]),
    pa.array([date(2026, 5, 1)] * 4),
]


def entries() -> dict[bytes, bytes]:
    """A row, an element of a list and a window of each key."""
    groups = key_groups(KEYS, 8)
    some = {}
    for number, key in enumerate(encode_keys(KEYS, groups, 0)):
        group, columns = key[:2], key[3:]
        some[group + bytes([VALUE_STATE]) + columns] = b"row %d" % number
        some[group + bytes([LIST_STATE]) + b"tag." + columns + encode_int64(-1)] = b"element %d" % number
        some[group + bytes([WINDOW_STATE]) + encode_int64(number) + columns] = b"window %d" % number
    return some


def test_every_entry_of_a_key_says_whose_it_is():
    owners = owners_of(KEYS, 8)
    for key, value in entries().items():
        assert owner_of(key, TYPES) == owners[int(value.split()[1])]
    with pytest.raises(DamageError, match="kind 99"):
        owner_of(b"\0\0\x63more", TYPES)


@pytest.mark.parametrize("kind", [None, VALUE_STATE, LIST_STATE, WINDOW_STATE])
def test_a_scan_gives_the_entries_of_these_keys_alone(tmp_path, kind):
    backend = named("memory").open(tmp_path, BackendOptions())
    backend.write(sorted(entries().items()))
    owners = owners_of(KEYS, 8)
    only = OfKeys(backend, owners[1:3], TYPES)
    given = []
    if kind is None:
        given += only.scan(b"", BEYOND)
    for group in range(8) if kind is not None else ():
        start = group.to_bytes(2, "big") + bytes([kind]) + (b"tag." if kind == LIST_STATE else b"")
        given += only.scan(start, start[:-1] + bytes([start[-1] + 1]))
    wanted = {key: value for key, value in entries().items() if int(value.split()[1]) in (1, 2)}
    assert dict(given) == {key: value for key, value in wanted.items() if kind in (None, key[2])}
    backend.close()
