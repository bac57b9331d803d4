"""Import PySpark and Great Expectations, whichever thread needs them first.

Both take long to import, so commands that need neither do without, and functions import them where they are used.
Importing a part of a package takes the part's lock and then the package's. Importing the package takes them the other
way round, if the package imports that part itself. Two threads that do both at once wait for each other, and Python
ends one of them with `_DeadlockError`. So a function that imports one of these libraries calls a `load_...` first: one
thread at a time imports here all that Weir uses of it.
"""

from __future__ import annotations

import importlib
import threading

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
    """Import PySpark. Safe from any thread."""
    _load(*_PYSPARK)


def load_connect() -> None:
    """Import PySpark with the client of Spark Connect. Safe from any thread.

    Raises:
        ImportError: A package that the client needs is not installed.
    """
    _load(*_PYSPARK, *_CONNECT)


def load_great_expectations() -> None:
    """Import Great Expectations, which imports parts of PySpark. Safe from any thread.

    Raises:
        ImportError: It is not installed.
    """
    _load("great_expectations")


def _load(*modules: str) -> None:
    if _loaded.issuperset(modules):  # no wait for another library
        return
    with _one_at_a_time:
        for module in modules:
            importlib.import_module(module)
        _loaded.update(modules)
