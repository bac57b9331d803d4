"""Lets stages of runs that Dagster starts run in their own process: Python imports this wherever its directory is on
PYTHONPATH."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys

_MODULE = "weir.ownership.ownership"


class _WithoutSpark(importlib.abc.MetaPathFinder):
    """Imports the module as everyone does, then puts the executor without a JVM in the other's place."""

    def find_spec(self, fullname, path=None, target=None):  # noqa: ARG002  the signature is Python's
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def executed(module) -> None:
            from weir.execution.in_process import InMemoryExecutor

            execute(module)
            module.SparkExecutor = lambda *_, **__: InMemoryExecutor()

        spec.loader.exec_module = executed
        return spec


sys.meta_path.insert(0, _WithoutSpark())
