"""A backend by the name that the settings give it: one of Weir's own, an installed one, or `package.module:factory`.

A distribution offers one as an entry point of the group `weir.backends`:

    [project.entry-points."weir.backends"]
    sqlite = "weir_sqlite:FACTORY"
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points

from state_ops.backends.base import BackendFactory, BackendOptions, Keeping
from state_ops.errors import ConfigurationError

GROUP = "weir.backends"
DEFAULT = "rocksdb"  # and what wrote the checkpoints that name none

_OWN = {
    "rocksdb": "state_ops.backends.rocksdb:ROCKSDB",
    "filesystem": "state_ops.backends.memory:FILESYSTEM",
    "memory": "state_ops.backends.memory:MEMORY",
}


@lru_cache  # a look through all installed distributions takes tens of milliseconds, and every task asks
def named(name: str) -> BackendFactory:
    """Return the backend of this name. Raises ConfigurationError that says what is known, or why it cannot be
    imported."""
    target = _OWN.get(name) or _installed(name) or (name if ":" in name else None)
    if target is None:
        names = ", ".join([*_OWN, *sorted({point.name for point in entry_points(group=GROUP)} - set(_OWN))])
        raise ConfigurationError(
            f"There is no state backend {name!r}.",
            where="state.backend",
            next=f"Known are: {names}. Others are installed as entry points of the group {GROUP}, in every worker's "
            "environment too, or written as package.module:factory.",
        )
    module, _, attribute = target.partition(":")
    try:
        factory: BackendFactory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"The state backend {name!r} cannot be imported: {error}",
            where=f"state.backend = {target}",
            next="Write it as package.module:factory, and install it in every worker's environment.",
        ) from error
    lacking = [part for part in ("format", "is_immutable", "open") if not hasattr(factory, part)]
    if lacking or isinstance(factory, type):
        how = "is a class; name an instance of it" if isinstance(factory, type) else f"has no {', '.join(lacking)}"
        raise ConfigurationError(
            f"{target} is no state backend: it {how}.",
            where="state.backend",
            next="docs/reference/backends.md has the contract.",
        )
    return factory


def _installed(name: str) -> str | None:
    """Return the target of the entry point of this name. Raises ConfigurationError if distributions disagree on it."""
    targets = sorted({point.value for point in entry_points(group=GROUP, name=name)})
    if len(targets) > 1:
        raise ConfigurationError(
            f"Several distributions offer a state backend {name!r}: {', '.join(targets)}.",
            where="state.backend",
            next="Uninstall all but one of them, or write package.module:factory.",
        )
    return targets[0] if targets else None


def misfit(recorded: str, configured: str) -> str | None:
    """Return the reason why the configured backend cannot open state that `recorded` wrote; None if it can.

    Raises:
        ConfigurationError: If there is no backend of the configured name.
    """
    now = named(configured)
    if recorded == configured:
        return None
    try:
        then = named(recorded).format
    except ConfigurationError:
        return (
            f"it was written by the backend {recorded!r}, which is not known here, and state.backend is {configured!r}"
        )
    if then == now.format:
        return None
    return f"it was written by the backend {recorded!r}, and state.backend is {configured!r}, which cannot read it"


@dataclass(frozen=True, slots=True)
class KeptSnapshots:
    """The snapshots that a backend keeps, for the storage that has their references (`storage.Keeper`)."""

    backend: str
    options: BackendOptions

    def kept(self, below: str) -> Iterable[str]:
        return keeping(self.backend).kept(below, self.options)

    def delete(self, keys: Collection[str]) -> None:
        keeping(self.backend).delete(keys, self.options)

    def problem(self, reference: str) -> str | None:
        return keeping(self.backend).problem(reference, self.options)


def keeper(name: str, options: BackendOptions) -> KeptSnapshots | None:
    """Return the snapshots that the backend of this name keeps; None if it keeps none, or is not known here."""
    if name in _OWN:
        return None
    try:
        return KeptSnapshots(name, options) if isinstance(named(name), Keeping) else None
    except ConfigurationError:  # a run looks for its backend before its first row, and raises this then
        return None


def keeping(name: str) -> Keeping:
    """Return a backend that keeps its snapshots.

    Raises:
        ConfigurationError: The backend of this name keeps none.
    """
    factory = named(name)
    if not isinstance(factory, Keeping):
        raise ConfigurationError(
            f"The state backend {name!r} keeps no snapshots, and the state is in snapshots that a backend keeps.",
            where="state.backend",
            next="Set state.backend to the one that wrote the state.",
        )
    return factory
