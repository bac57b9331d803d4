"""Import PySpark and Great Expectations, whichever thread needs them first.

Both take long to import, so commands that need neither do without, and functions import them where they are used.
Importing a part of a package takes the part's lock and then the package's. Importing the package takes them the other
way round, if the package imports that part itself. Two threads that do both at once wait for each other, and Python
ends one of them with `_DeadlockError`. So a function that imports one of these libraries calls a `load_...` first: one
thread at a time imports here all that Weir uses of it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import sys
import threading
from importlib.machinery import ModuleSpec
from typing import Any

from state_ops import extras
from state_ops.errors import ConfigurationError, first_line

SERIES = "4.2"  # the PySpark that Weir is written for, as pyproject.toml has it
_PYSPARK = (  # `pyspark` imports most of them; PySpark imports the others at the first use of a feature
    "pyspark",
    "pyspark.errors",
    "pyspark.sql",
    "pyspark.sql.functions",
    "pyspark.sql.types",
    "pyspark.sql.utils",
    "pyspark.sql.window",
    "pyspark.sql.pandas.conversion",
    "pyspark.sql.pandas.functions",
    "pyspark.sql.pandas.map_ops",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.pandas.typehints",
    "pyspark.sql.pandas.types",
    "pyspark.sql.pandas.utils",
)
_CONNECT = (
    "pyspark.sql.connect",
    "pyspark.sql.connect.client",
    "pyspark.sql.connect.client.retries",
    "pyspark.sql.connect.session",
)
_one_at_a_time = threading.RLock()
_loaded: set[str] = set()


def load_pyspark() -> None:
    """Import PySpark. Safe from any thread.

    Raises:
        ConfigurationError: Python finds another PySpark first, as by PYTHONPATH, or one that cannot be imported.
    """
    if _loaded.issuperset(_PYSPARK):
        return
    try:
        _load(*_PYSPARK)
    except ImportError as error:
        raise ConfigurationError(
            f"PySpark cannot be imported: {first_line(error)}",
            where=_found_at(),
            next=f"Unset PYTHONPATH if it names that directory; else install pyspark {SERIES} again.",
        ) from error
    version = str(sys.modules["pyspark"].__version__)
    if not f"{version}.".startswith(f"{SERIES}."):
        raise ConfigurationError(
            f"Weir needs PySpark {SERIES}, and Python finds PySpark {version}.",
            where=_found_at(),
            next="Unset PYTHONPATH if it names that directory; else run weir in the project's environment.",
        )


def load_connect() -> None:
    """Import PySpark with the client of Spark Connect. Safe from any thread.

    Raises:
        ImportError: A package that the client needs is not installed.
        ConfigurationError: As `load_pyspark`.
    """
    load_pyspark()
    _load(*_CONNECT)


def load_great_expectations() -> tuple[Any, Any]:
    """Return Great Expectations, and the batch definition that gates are evaluated on. Takes seconds, once a process.

    Safe from any thread.
    """
    with _one_at_a_time:
        return _great_expectations()


def load_great_expectations_meanwhile() -> None:
    """Start to load Great Expectations beside a Spark job.

    It does not begin earlier: Great Expectations imports PySpark too, so Spark would start seconds later.
    """
    if not _great_expectations.cache_info().currsize:
        threading.Thread(target=load_great_expectations, name="weir-gates", daemon=True).start()


@functools.cache
def _great_expectations() -> tuple[Any, Any]:
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    name_main_module()
    with extras.needed_for("A quality gate"):
        import great_expectations as gx

    # This module of theirs sets its own level, and then says where it would put pages that are never made.
    logging.getLogger("great_expectations.data_context.types.base").setLevel(logging.WARNING)

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}  # type: ignore[assignment]
    asset = context.data_sources.add_pandas("weir").add_dataframe_asset("epoch")
    return gx, asset.add_batch_definition_whole_dataframe("epoch")


def name_main_module() -> None:
    """Give a main module without file and name a name, as processes have that multiprocessing spawned (Dagster's runs).

    PySpark's Connect client, which Great Expectations imports too, takes such a process for doctests and ends it
    (`pyspark.sql.connect.utils.check_dependencies`).
    """
    main = sys.modules["__main__"]
    if main.__spec__ is None and not hasattr(main, "__file__"):
        main.__spec__ = ModuleSpec("__main__", None)


def _found_at() -> str:
    """Return the file of the PySpark that Python finds first."""
    spec = importlib.util.find_spec("pyspark")
    return spec.origin if spec is not None and spec.origin else "no pyspark is installed"


def _load(*modules: str) -> None:
    if _loaded.issuperset(modules):  # no wait for another library
        return
    with _one_at_a_time:
        for module in modules:
            importlib.import_module(module)
        _loaded.update(modules)
