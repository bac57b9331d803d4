"""Libraries that are imported at their first use: Arrow, Polars and NumPy take longer to import than all of Weir.

Modules of definitions use them this way, since a pipeline's file imports those for every command.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Lazily:
    """A library by its name, as far as attributes are asked of it.

    Example:
        >>> from state_ops.lazily import Lazily
        >>> Lazily("math").floor(2.5)
        2
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value
