"""A backend by the name that the settings give it: one of Weir's own, an installed one, or `package.module:factory`.

A distribution offers one as an entry point of the group `weir.backends`:

    [project.entry-points."weir.backends"]
    sqlite = "weir_sqlite:FACTORY"
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from importlib.metadata import entry_points

from state_ops.backends.base import BackendFactory
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
