"""State in a vault: a directory to which a backend uploads by itself. Its snapshots are references.

    <root>/<hash of the key>/key        the key under which the snapshot is made
                             part       the entries that its epoch has changed
                             manifest   written last: the parts of the snapshot, with their digests, oldest first

Parts are shared. A part stays as long as a manifest names it, whatever becomes of the snapshot that it was made for.
"""

import hashlib
import json
import pickle
from bisect import bisect_left, insort
from pathlib import Path
from urllib.parse import quote, unquote

from state_ops.backends.base import REFERENCE
from state_ops.errors import ConfigurationError, DamageError


class Vault:
    def __init__(self, options):
        if "root" not in options.own:
            raise ConfigurationError("The vault has no root.", next="Set state.options.root to a directory.")
        self.root = Path(options.own["root"])

    def place(self, key):
        return self.root / hashlib.sha256(key.encode()).hexdigest()

    def begin(self, key):
        place = self.place(key)
        staging = place.with_name(f".{place.name}")
        staging.mkdir(parents=True)
        (staging / "key").write_text(key)
        staging.rename(place)

    def begun(self):
        return [file.read_text() for file in self.root.glob("[!.]*/key")]

    def parts(self, key):
        """The parts of a snapshot, as (name, digest); DamageError if it is gone."""
        try:
            return [tuple(part) for part in json.loads((self.place(key) / "manifest").read_text())]
        except (OSError, ValueError) as error:
            raise DamageError("The vault has no such snapshot.", where=f"{self.root}: {key}") from error

    def read(self, key):
        entries = {}
        for name, digest in self.parts(key):
            part = self.root / name / "part"
            content = part.read_bytes() if part.exists() else b""
            if hashlib.sha256(content).hexdigest() != digest:
                raise DamageError("A part of the vault is gone or damaged.", where=f"{self.root}: {name}, of {key}")
            puts, gone = pickle.loads(content)
            for each in gone:
                entries.pop(each, None)
            entries.update(puts)
        return entries

    def add(self, key, base, puts, gone):
        content = pickle.dumps((puts, gone))
        (self.place(key) / "part").write_bytes(content)
        parts = [*base, (self.place(key).name, hashlib.sha256(content).hexdigest())]
        staging = self.place(key) / ".manifest"
        staging.write_text(json.dumps(parts))
        staging.rename(self.place(key) / "manifest")

    def delete(self, key):
        for name in ("key", "manifest"):
            (self.place(key) / name).unlink(missing_ok=True)

    def tidy(self):
        """Remove the parts that no manifest names and no attempt has begun."""
        named = {name for file in self.root.glob("*/manifest") for name, _ in json.loads(file.read_text())}
        for place in list(self.root.glob("[!.]*")):
            if place.name not in named and not (place / "key").exists():
                (place / "part").unlink(missing_ok=True)
                place.rmdir()


class VaultBackend:
    def __init__(self, vault, base, key):
        self.written = False
        self._vault, self._key = vault, key
        self._base = vault.parts(base) if base else []
        self._entries = vault.read(base) if base else {}
        self._order = sorted(self._entries)
        self._changed = set()

    def multi_get(self, keys):
        return [self._entries.get(key) for key in keys]

    def write(self, puts, deletes=()):
        if (puts or deletes) and not self.written:
            self.written = True
            if self._key:
                self._vault.begin(self._key)
        for key in deletes:
            if self._entries.pop(key, None) is not None:
                del self._order[bisect_left(self._order, key)]
            self._changed.add(key)
        for key, value in puts:
            if key not in self._entries:
                insort(self._order, key)
            self._entries[key] = value
            self._changed.add(key)

    def scan(self, start, end):
        keys = self._order[bisect_left(self._order, start) : bisect_left(self._order, end)]
        return ((key, self._entries[key]) for key in keys)

    def approximate_entries(self):
        return len(self._entries)

    def snapshot(self, target):
        if not self.written:
            self._vault.begin(self._key)
        puts = {key: self._entries[key] for key in self._changed if key in self._entries}
        self._vault.add(self._key, self._base, puts, self._changed - puts.keys())
        target.mkdir()
        (target / REFERENCE).write_text(f"vault:{quote(self._key)}")
        return [target / REFERENCE]

    def close(self):
        self._entries, self._order = {}, []


class VaultFactory:
    format = "vault-1"

    def is_immutable(self, name):
        return name != REFERENCE

    def open(self, directory, options):
        file = directory / REFERENCE
        return VaultBackend(Vault(options), _key(file.read_text()) if file.exists() else None, options.key)

    def kept(self, below, options):
        return [key for key in Vault(options).begun() if key.startswith(below)]

    def delete(self, keys, options):
        vault = Vault(options)
        for key in keys:
            vault.delete(key)
        if vault.root.exists():
            vault.tidy()

    def problem(self, reference, options):
        try:
            Vault(options).read(_key(reference))
        except DamageError as error:
            return error.what
        return None


def _key(reference):
    return unquote(reference.removeprefix("vault:"))


FACTORY = VaultFactory()
