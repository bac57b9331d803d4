"""All settings: pydantic models over `configs/<env>.yaml` with `WEIR_` environment overrides, parsed once.

`WEIR_ENV` chooses the file (default `dev`), `WEIR_CONFIG` names another file. `WEIR_STORAGE__ROOT=...` overrides
`storage.root`, and so on, two underscores a level; a key that the file has may itself have two in a row. Relative paths
are relative to the project, the folder above `configs/`, found from the working directory.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from state_ops import logs
from state_ops.errors import ConfigurationError, plainly
from weir.settings.combinations import Contradiction, ContradictionsError, contradictions
from weir.settings.project import is_installed, project, settings_folder
from weir.settings.sections import (
    BackfillSettings,
    CacheSettings,
    CheckpointSettings,
    ConnectionSettings,
    DagsterSettings,
    EpochSettings,
    GateSettings,
    LeaseSettings,
    LocalSettings,
    LoggingSettings,
    PartitionSettings,
    PipelineSettings,
    RestoreGateSettings,
    RestoreSettings,
    RunSettings,
    S3Settings,
    SecretReference,
    Section,
    SparkSettings,
    StateSettings,
    StorageSettings,
    TelemetrySettings,
)

__all__ = [  # what the rest of the house imports from here
    "PROJECT",
    "BackfillSettings",
    "CacheSettings",
    "CheckpointSettings",
    "ConnectionSettings",
    "DagsterSettings",
    "EpochSettings",
    "GateSettings",
    "LeaseSettings",
    "LocalSettings",
    "LoggingSettings",
    "PartitionSettings",
    "PipelineSettings",
    "RestoreGateSettings",
    "RestoreSettings",
    "RunSettings",
    "S3Settings",
    "SecretReference",
    "Settings",
    "SparkSettings",
    "StateSettings",
    "StorageSettings",
    "TelemetrySettings",
    "load",
]

try:  # a tenth of the time, where PyYAML was built with it
    from yaml import CSafeLoader as _SafeLoader
except ImportError:
    from yaml import SafeLoader as _SafeLoader

PROJECT = project()
_REFERRING = ("WEIR_STORAGE__", "WEIR_CONNECTIONS__")
_NOT_SETTINGS = {"WEIR_ENV", "WEIR_CONFIG", "WEIR_DAGSTER_INSTANCE", "WEIR_REQUIRE_SERVERS"}


def log_format() -> str:
    """Return `logging.format` of the settings that the environment chooses. Raises ConfigurationError."""
    return load().logging.format


logs.follow(log_format)


class _UniqueKeys:
    """YAML takes the last of two equal keys without a word; here that is an error."""

    def construct_mapping(self: Any, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if key in seen:
                raise yaml.YAMLError(
                    f"the key {key!r} stands there twice, in lines {seen[key]} and {line}: merge the two"
                )
            seen[key] = line
        return super().construct_mapping(node, deep)  # type: ignore[misc,no-any-return]  # that of the loader


class _QuickUniqueKeys(_UniqueKeys, _SafeLoader):  # type: ignore[misc]
    pass


class _ExactUniqueKeys(_UniqueKeys, yaml.SafeLoader):  # type: ignore[misc]
    pass


def _parsed(text: str, quick: Any = _SafeLoader, exact: Any = yaml.SafeLoader) -> Any:
    """Parse a text of YAML.

    The loader in Python reports errors better, with the place and an excerpt.

    Raises yaml.YAMLError.
    """
    try:
        return yaml.load(text, quick)
    except yaml.YAMLError:
        return yaml.load(text, exact)


Kind = TypeVar("Kind", bound=BaseModel)


class Settings(Section):
    """Everything; see the sections."""

    storage: StorageSettings = StorageSettings()
    local: LocalSettings = LocalSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    restore: RestoreSettings = RestoreSettings()
    epoch: EpochSettings = EpochSettings()
    run: RunSettings = RunSettings()
    lease: LeaseSettings = LeaseSettings()
    spark: SparkSettings = SparkSettings()
    state: StateSettings = StateSettings()
    logging: LoggingSettings = LoggingSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    dagster: DagsterSettings = DagsterSettings()
    pipelines: dict[str, PipelineSettings] = Field(default_factory=dict)
    connections: dict[str, ConnectionSettings] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _combinations(self) -> Settings:
        contradicting = contradictions(self)
        common = {contradiction.message for contradiction in contradicting}
        for name in self.pipelines:
            contradicting += [
                Contradiction(
                    tuple(self._said_by(name, key) for key in found.keys), f"pipelines.{name}: {found.message}"
                )
                for found in contradictions(self.of(name))
                if found.message not in common
            ]
        if contradicting:
            raise ContradictionsError(contradicting)
        return self

    def _said_by(self, pipeline: str, key: str) -> str:
        """Return the path of a setting as one pipeline has it: its own, or the common one."""
        section, _, name = key.partition(".")
        own = getattr(self.pipelines[pipeline], section, None) if section in ("epoch", "checkpoints") else None
        return f"pipelines.{pipeline}.{key}" if own is not None and name in own.model_fields_set else key

    def of(self, pipeline: str) -> Settings:
        """Return the settings that hold for one pipeline: its own `epoch` and `checkpoints` in place of the common
        ones, key by key."""
        own = self.pipelines.get(pipeline)
        if own is None or (own.epoch is None and own.checkpoints is None):
            return self
        rest = own.model_copy(update={"epoch": None, "checkpoints": None})
        return self.model_copy(
            update={
                "epoch": _with(self.epoch, own.epoch),
                "checkpoints": _with(self.checkpoints, own.checkpoints),
                "pipelines": {**self.pipelines, pipeline: rest},
            }
        )

    @property
    def work_dir(self) -> Path:
        return _absolute(self.local.work_dir)

    @property
    def cache_dir(self) -> Path:
        return _absolute(self.local.cache_dir)

    def storage_uri(self, pipeline: str) -> str:
        """Root of one pipeline's storage."""
        root = self.storage.root if "://" in self.storage.root else str(_absolute(self.storage.root))
        return f"{root.rstrip('/')}/{pipeline}"

    def resolve(self, pipeline: str, template: str) -> str:
        """Fill the {placeholders} of a source pattern from the pipeline's params; relative paths become absolute."""
        filled = self.filled(pipeline, template)
        return filled if "://" in filled else str(_absolute(filled))

    def filled(self, pipeline: str, template: str) -> str:
        """Fill the {placeholders} of a text from the pipeline's params. Raises ConfigurationError for one without a
        value, and for braces that are none."""
        params = self.pipelines[pipeline].params if pipeline in self.pipelines else {}
        try:
            return template.format(**params)
        except (KeyError, IndexError) as error:
            raise ConfigurationError(
                f"The pattern {template!r} needs a value for {error}.",
                where=f"pipelines.{pipeline}.params",
                next=f"Add it to the configuration, or set WEIR_PIPELINES__{pipeline.upper()}__PARAMS.",
            ) from error
        except (ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"The braces of the pattern {template!r} are no placeholders: {error}.",
                where=f"pipeline {pipeline}",
                next="Say {name} for a param of that name, and {{ and }} for braces themselves.",
            ) from error

    def connection(self, name: str | None) -> dict[str, str]:
        """Return the options of a connection, as texts, with its secrets. None: none.

        Raises:
            ConfigurationError: There is no such connection, or a variable that it refers to is not set.
        """
        if name is None:
            return {}
        if name not in self.connections:
            raise ConfigurationError(
                f"There is no connection {name!r} in the configuration.",
                where=f"connections.{name}",
                next=f"Add it, e.g. connections: {{{name}: {{options: {{...}}}}}}"
                + (f"; there are: {', '.join(self.connections)}." if self.connections else "."),
            )
        options = self.connections[name].options
        return {key: _text(value, f"connections.{name}.options.{key}") for key, value in options.items()}


def _with(common: Kind, own: Kind | None) -> Kind:
    """Return a section with the keys that another one sets."""
    if own is None:
        return common
    return common.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})


def _text(value: str | int | float | bool | SecretReference, where: str) -> str:
    if isinstance(value, SecretReference):
        return value.secret(where)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _absolute(path: str) -> Path:
    return PROJECT / Path(path).expanduser()


def load(env: Mapping[str, str] | None = None) -> Settings:
    """Read the configuration file that the environment names, apply its overrides, and check everything at once.

    Raises ConfigurationError that lists every wrong key with its file or variable.
    """
    env = os.environ if env is None else env
    if "WEIR_CONFIG" not in env and is_installed(PROJECT):
        raise ConfigurationError(
            "No project is here, whose configuration could be read.",
            where=str(Path.cwd()),
            next="Go to the project's folder, whose pyproject.toml has [tool.weir]; or name a file: WEIR_CONFIG.",
        )
    file = configuration_file(env)
    if not file.is_file():
        names = ", ".join(sorted(path.stem for path in settings_folder(PROJECT).glob("*.yaml") if path.is_file()))
        raise ConfigurationError(
            f"There is no configuration {file.name}.",
            where=str(file),
            next=f"Set WEIR_ENV to one of: {names}." if names else "Make it a file of settings, in YAML.",
        )
    try:
        raw = _parsed(file.read_text("utf-8"), _QuickUniqueKeys, _ExactUniqueKeys) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"The configuration cannot be read: {plainly(error)}.",
            where=str(file),
            next="Make it a file in UTF-8 that this user may read.",
        ) from error
    except yaml.YAMLError as error:
        raise ConfigurationError("The configuration is not valid YAML.", where=str(file), next=str(error)) from error
    if not isinstance(raw, dict):
        raise ConfigurationError("The configuration must be a mapping of sections.", where=str(file))
    origin: dict[str, str] = {}
    replaced: list[_Replaced] = []
    # Where the secrets are is known once the variables of what refers to them have been read; a secret is no setting.
    for variable, text in sorted(env.items()):
        if variable.startswith(_REFERRING):
            replaced += _override(raw, variable, text, origin)
    no_settings = _NOT_SETTINGS | set(_references(raw.get("storage"))) | set(_references(raw.get("connections")))
    for variable, text in sorted(env.items()):
        if variable.startswith("WEIR_") and not variable.startswith(_REFERRING) and variable not in no_settings:
            replaced += _override(raw, variable, text, origin)
    lines, wrong = [line for part in replaced for line in _wrong_before(raw, part, file)], None
    try:
        settings = Settings.model_validate(raw)
        if not lines:
            return settings
    except ValidationError as error:
        lines += [line for item in error.errors() for line in _explained(item, file, raw, origin)]
        wrong = error
    raise ConfigurationError(
        f"The configuration has {len(lines)} error{'s' if len(lines) > 1 else ''}:\n" + "\n".join(lines),
        where=str(file),
        next="Correct the keys above; docs/reference/configuration.md describes every one.",
    ) from wrong


def configuration_file(env: Mapping[str, str]) -> Path:
    """Return the file of settings that the environment chooses, there or not."""
    chosen = settings_folder(PROJECT) / f"{env.get('WEIR_ENV', 'dev')}.yaml"
    return Path(env["WEIR_CONFIG"]) if "WEIR_CONFIG" in env else chosen


def _references(node: Any) -> Iterator[str]:
    """Return the names of the environment variables that hold secrets, by the references to them in a part of the
    settings."""
    if isinstance(node, dict):
        if node.keys() == {"env"} and isinstance(node["env"], str):
            yield node["env"]
        for value in node.values():
            yield from _references(value)


@dataclass(frozen=True, slots=True)
class _Replaced:
    """A value that is no mapping and has given way to one, since a variable sets a key below it.

    Attributes:
        origin: The variable that set it; None: the file has it.
    """

    keys: tuple[str, ...]
    value: Any
    origin: str | None


def _wrong_before(raw: dict[str, Any], part: _Replaced, file: Path) -> list[str]:
    """Return the errors of a value that a variable has replaced, as they would be without that variable."""
    tried = node = dict(raw)
    for key in part.keys[:-1]:
        node[key] = dict(node[key])
        node = node[key]
    node[part.keys[-1]] = part.value
    try:
        Settings.model_validate(tried)
    except ValidationError as error:
        origin = {".".join(part.keys): part.origin} if part.origin is not None else {}
        return [_explain(item, file, origin) for item in error.errors() if item["loc"][: len(part.keys)] == part.keys]
    return []


def _override(raw: dict[str, Any], variable: str, text: str, origin: dict[str, str]) -> list[_Replaced]:
    """Set what a variable sets, and return the value that is no mapping and had to give way, if there is one."""
    replaced = list[_Replaced]()
    rest, keys = variable.removeprefix("WEIR_").lower(), list[str]()
    node = raw
    while True:
        key = _first_key(rest, node)
        keys.append(key)
        if key == rest:
            break
        rest = rest[len(key) + 2 :]
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            if child is not None:  # a section without keys is none
                replaced.append(_Replaced(tuple(keys), child, origin.get(".".join(keys))))
            child = node[key] = {}
        node = child
    node[key] = _value(variable, text)
    origin[".".join(keys)] = variable
    return replaced


def _first_key(path: str, node: Mapping[Any, Any]) -> str:
    """Return the first key of a variable's path: the longest that is there, whose name may have two underscores in a
    row, as that of a pipeline may; else what comes before the first two."""
    there = (key for key in node if isinstance(key, str) and f"{path}__".startswith(f"{key}__"))
    return max(there, key=len, default=path.partition("__")[0])


def _value(variable: str, text: str) -> Any:
    # A path such as 2024 or a date stays text: pydantic turns text into numbers, not the other way round.
    if text != "null" and not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return _parsed(text)
    except yaml.YAMLError as error:
        # The text itself may hold a secret, and so may the excerpt in the parser's message.
        mark = getattr(error, "problem_mark", None)
        at = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigurationError(
            f"The value of {variable} is neither YAML nor JSON{at}.",
            where=variable,
            next="Close its brackets and quotes.",
        ) from None


def _explained(item: Any, file: Path, raw: dict[str, Any], origin: dict[str, str]) -> list[str]:
    cause = item.get("ctx", {}).get("error")
    if not isinstance(cause, ContradictionsError):
        return [_explain(item, file, origin)]
    lines = []
    for contradiction in cause.contradictions:
        sources = dict.fromkeys(_said_in(key, file, raw, origin) for key in contradiction.keys)
        lines.append(f"  {contradiction.message}  [{', '.join(sources)}]")
    return lines


def _said_in(key: str, file: Path, raw: dict[str, Any], origin: dict[str, str]) -> str:
    """Return the origin of a valid setting's value: a variable, the file, or the default."""
    node: Any = raw
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return "default"
        node = node[part]
    return next((origin[name] for name in origin if f"{key}.".startswith(f"{name}.")), file.name)


_MAY_BE_SECRET = ("connections.", "storage.s3.", "spark.conf.")  # the beginnings of keys whose values are not repeated


def _explain(item: Any, file: Path, origin: dict[str, str]) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "(combination)"
    # The variable may have set the key, a part of it, or a mapping around it.
    named = (origin[name] for name in origin if f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}."))
    source = next(named, file.name)
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        model: Any = Settings
        for part in item["loc"][:-1]:
            annotation = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
            model = (
                annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else PipelineSettings
            )
        close = difflib.get_close_matches(str(item["loc"][-1]), model.model_fields, n=1)
        message = "there is no such key" + (f"; did you mean {close[0]!r}?" if close else "")
    untold = item["type"] in ("extra_forbidden", "missing", "value_error") or f"{key}.".startswith(_MAY_BE_SECRET)
    got = "" if untold else f" (got {item['input']!r})"
    return f"  {key}: {message}{got}  [{source}]"
