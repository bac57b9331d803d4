"""The operations that are declared once, a module each. A command, its `--json` and Dagster's job are made from it.

An operation is added by a module in this folder, with a function of the same name, or by another package with an entry
point of the group `weir.operations`.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weir.operations.operation import Operation

GROUP = "weir.operations"
MODULES = {module.name: f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)}
"""The modules of Weir's own, by command. Nothing of them is imported before it is asked for."""


@cache
def others() -> dict[str, Any]:
    """Return the entry points of other packages, by command."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP) if point.name not in MODULES}


def declared(name: str) -> Operation:
    """Return the operation of a command.

    Raises:
        ConfigurationError: The entry point of another package names no operation.
    """
    from state_ops.errors import ConfigurationError
    from weir.operations.operation import Operation

    found = pkgutil.resolve_name(f"{MODULES[name]}:{name}") if name in MODULES else others()[name].load()
    if not isinstance(found, Operation) or found.name != name:
        raise ConfigurationError(
            f"The entry point {name} names no operation {name}.",
            where=f"{others()[name].value}, in the group {GROUP}",
            next="Name a function of this name that is decorated with `operation` of `weir.operations.operation`.",
        )
    return found


def every() -> list[Operation]:
    """Return all operations, those of other packages last."""
    return [declared(name) for name in (*MODULES, *others())]
