"""Writes docs/reference/configuration.md and configs/settings.schema.json from the settings models: `python -m
weir.settings.reference`."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from weir.settings.combinations import RULES
from weir.settings.configuration import (
    PROJECT,
    BackfillSettings,
    CacheSettings,
    ConnectionSettings,
    GateSettings,
    PartitionSettings,
    PipelineSettings,
    RestoreGateSettings,
    Settings,
)

PAGE = PROJECT / "docs" / "reference" / "configuration.md"
SCHEMA = PROJECT / "configs" / "settings.schema.json"

_HEAD = """# Configuration

<!-- Generated from weir/settings/sections.py by `python -m weir.settings.reference`. -->

Every setting, with its default and advice. It is for people who write a file of settings:

```yaml
# yaml-language-server: $schema=settings.schema.json
storage: {root: s3://company/weir}
checkpoints: {interval_seconds: 120, num_retained: 3}
pipelines:
  flights:
    object: pipelines.flights:pipeline
    params: {landing: s3://company/landing/flights}
```

- **The file** is `configs/<env>.yaml`, chosen by `WEIR_ENV` (default `dev`), or the file that `WEIR_CONFIG` names.
- **Environment variables** override every key: `WEIR_`, then the path with two underscores a level, as in
  `WEIR_EPOCH__MAX_FILES=10`. `null`, lists and mappings are written as in YAML:
  `WEIR_PIPELINES__FLIGHTS__PARAMS='{landing: /data/flights}'`. If a name has two underscores in a row itself, the
  longest name that fits is meant.
- **Relative paths** are relative to the project.
- **Errors** are reported all at once, each with its key and its origin.
- **An editor** that knows YAML completes keys, explains them and marks wrong ones by `configs/settings.schema.json`,
  which the file names in its first line.
"""

_AS_YAML = {"None": "null", "True": "true", "False": "false"}

_REFUSED = """## Refused together

Settings that are right by themselves and make no sense together; the error names both, their values and what to do.
"""


def page() -> str:
    """Return the page's text."""
    parts = [_HEAD]
    for name, field in Settings.model_fields.items():
        model = field.annotation
        if name == "pipelines":
            parts.append(_section("pipelines.<name>", PipelineSettings))
            parts.append(_section("pipelines.<name>.gates.<uid>[]", GateSettings))
            parts.append(_section("pipelines.<name>.on_restore[]", RestoreGateSettings))
            parts.append(_section("pipelines.<name>.partitions", PartitionSettings))
            parts.append(_section("pipelines.<name>.backfill", BackfillSettings))
        elif name == "connections":
            parts.append(_section("connections.<name>", ConnectionSettings))
        elif isinstance(model, type) and issubclass(model, BaseModel):
            parts.append(_section(name, model))
        if name == "state":
            parts.append(_section("state.caches.<uid>", CacheSettings))
    parts.append(_REFUSED)
    parts.append("\n".join(_item(rule.__doc__ or "") for rule in RULES) + "\n")
    return "\n".join(parts)


def _item(text: str) -> str:
    """Return an item of a list, in lines as long as those of the pages written by hand."""
    lines = textwrap.wrap(" ".join(text.split()), 118, break_on_hyphens=False, break_long_words=False)
    return textwrap.indent("\n".join(lines), "  ").replace("  ", "- ", 1)


def schema() -> str:
    """Return the JSON schema of a file of settings, by which editors complete and check it."""
    model = _without_titles(Settings.model_json_schema())
    meta = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Weir's settings"}
    return json.dumps({**meta, **model}, indent=2) + "\n"


def _without_titles(node: Any) -> Any:
    """Return a schema without the titles that pydantic makes of names, which say nothing more; and without advice,
    which the page has."""
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_titles(value)
        for key, value in node.items()
        if not (key in ("title", "advice") and isinstance(value, str))
    }


def _section(name: str, model: type[BaseModel]) -> str:
    lines = [f"## {name}", "", (model.__doc__ or "").strip(), "", "| key | default | meaning |", "|---|---|---|"]
    below, advice = [], []
    for key, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            lines.append(f"| `{key}` | see {name}.{key} | {field.description or ''} |")
            below.append(_section(f"{name}.{key}", field.annotation))
            continue
        value = (
            field.get_default(call_default_factory=True, validated_data={})
            if not field.is_required()
            else PydanticUndefined
        )
        default = "required" if value is PydanticUndefined else f"`{_AS_YAML.get(str(value), value)}`"
        lines.append(f"| `{key}` | {default} | {field.description or ''} |")
        if isinstance(field.json_schema_extra, dict):
            advice.append(_item(f"`{key}`: {field.json_schema_extra['advice']}"))
    if advice:
        lines += ["", "What to choose:", "", *advice]
    return "\n".join(["\n".join(lines) + "\n", *below])


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page())
    SCHEMA.write_text(schema())
