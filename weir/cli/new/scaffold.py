"""The files that `weir new pipeline` writes; the project's template includes the same files (`copier.yml`)."""

from __future__ import annotations

import builtins
import keyword
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader

import weir.api
from state_ops.errors import ConfigurationError
from weir.settings.configuration import PROJECT, configuration_file

SOURCES = ("parquet", "csv", "json", "avro", "delta", "kafka", "postgres", "generator")
SINKS = ("append", "upsert", "kafka", "postgres", "foreach")
# What the module and its test call something else; a function of one of these names would take its place.
_NAMES = ("pipeline", "pl", "pa", "deliver", "testing", "datetime", "timedelta", "run", "rows", *dir(builtins))
_ASSETS = ("incoming", "checkpoint", "restore_drill", "backfill", "tables")  # beside the stage's in Dagster
_TEMPLATES = Path(__file__).with_name("templates")


def begin(name: str, source: str, sink: str, package: str | None = None) -> list[str]:
    """Write a pipeline's module, its test and its settings.

    Returns:
        The paths of what was written, relative to the project if they are in it.

    Raises:
        ConfigurationError: A name, a source or a sink is none, or one of the files is there; then nothing is written.
    """
    _check(name, source, sink)
    package = package or configured_package(PROJECT)
    if not package.isidentifier():
        raise ConfigurationError(f"{package} is no name of a package.", next="Say --package NAME.")
    config = configuration_file(os.environ)
    values = {"pipeline": name, "package": package, "source": source, "sink": sink}
    texts = {
        PROJECT / package / f"{name}.py": render("pipeline.py.j2", values),
        PROJECT / "tests" / f"test_{name}.py": render("test.py.j2", values),
    }
    for path in texts:
        if path.exists():
            raise ConfigurationError(
                f"{path.relative_to(PROJECT)} is there already.", where=str(path), next="Choose another name."
            )
    settings = _settings(config, values)
    if not (PROJECT / package / "__init__.py").exists():
        texts[PROJECT / package / "__init__.py"] = ""
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    config.write_text(settings, "utf-8")  # last: what it names is there
    return [str(path.relative_to(PROJECT) if path.is_relative_to(PROJECT) else path) for path in (*texts, config)]


def configured_package(project: Path) -> str:
    """Return the package of a project's pipelines: what `[tool.weir]` in pyproject.toml says, else `pipelines`."""
    file = project / "pyproject.toml"
    tool = tomllib.loads(file.read_text("utf-8")).get("tool", {}) if file.is_file() else {}
    return str(tool.get("weir", {}).get("package", "pipelines"))


def render(template: str, values: dict[str, str]) -> str:
    """Fill one of the templates."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template(template).render(values)


def _check(name: str, source: str, sink: str) -> None:
    taken = {*weir.api.__all__, *_NAMES, *_ASSETS}
    state = "".join(map(str.capitalize, name.split("_"))) + "State"  # as the template calls its class
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) or keyword.iskeyword(name) or taken & {name, state}:
        raise ConfigurationError(
            f"A pipeline's module cannot be called {name!r}.",
            next="Choose small letters, digits and underscores, a letter first, and no name that Python or Weir has"
            " already: e.g. daily_orders.",
        )
    for option, value, choices in (("source", source, SOURCES), ("sink", sink, SINKS)):
        if value not in choices:
            raise ConfigurationError(
                f"There is no {option} {value!r} to begin with.", next=f"Say one of: {', '.join(choices)}."
            )


def _settings(config: Path, values: dict[str, str]) -> str:
    """Return the text of the configuration with the pipeline in it, and the connection that it names."""
    if not config.is_file():
        raise ConfigurationError(f"There is no configuration {config.name}.", where=str(config), next="Set WEIR_ENV.")
    name, text = values["pipeline"], config.read_text("utf-8")
    if name in _section(text, "pipelines"):
        raise ConfigurationError(
            f"The configuration has a pipeline {name!r} already.", where=str(config), next="Choose another name."
        )
    before = yaml.safe_load(text) or {}
    text = _added(text, config, "pipelines", render("settings.yaml.j2", values))
    if "postgres" in (values["source"], values["sink"]) and "postgres" not in _section(text, "connections"):
        text = _added(text, config, "connections", render("connections.yaml.j2", values))
    after = yaml.safe_load(text)
    assert all(after[key] == value for key, value in before.items() if key not in ("pipelines", "connections"))
    return text


def _section(text: str, section: str) -> dict[str, Any]:
    return (yaml.safe_load(text) or {}).get(section) or {}


def _added(text: str, config: Path, section: str, entry: str) -> str:
    """Return the text with an entry at the beginning of a section. Its other lines stay as they are, comments too."""
    block = "".join(f"  {line}\n" for line in entry.rstrip().splitlines())
    if section not in (yaml.safe_load(text) or {}):
        return f"{text.rstrip()}\n\n{section}:\n{block}"
    header = re.search(rf"^{section}:[ ]*(\{{\s*\}})?[ ]*(#.*)?\n", text, re.MULTILINE)
    if header is None:
        raise ConfigurationError(
            f"The section {section} is written in one line, to which nothing is added.",
            where=str(config),
            next=f"Write it over several lines, or add yourself:\n{block}",
        )
    comment = f"   {header[2]}" if header[2] and not header[1] else ""
    return f"{text[: header.start()]}{section}:{comment}\n{block}{text[header.end() :]}"
