"""The distribution is `weir-state`: on PyPI, `weir` is a stranger's package, which no text of ours may tell anybody to
install."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from weir.settings.configuration import PROJECT

_TEXTS = {".cfg", ".in", ".ini", ".j2", ".lock", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", ""}
# A command or a sentence that installs it, or a requirement on it: weir, weir[extra], weir==1, "weir", but neither
# weir-state nor weir_definitions.
_NAME = r"""(?<![\w./@:-])[`'"]?weir(?=\[|[`'",;)]|\s*(?:$|[#&|\\])|\.(?:\s|$)|\s*[=~<>!]=)"""
_TELLS = re.compile(
    r"\b(?:install(?:s|ed|ing)?|uninstall|download|(?:uv|poetry|pdm|hatch|rye) add|uvx|pipx run|index"
    rf" versions)\b[^\n]*?{_NAME}"
    rf"|{_NAME}(?:\[\w+\])?\s*(?:[=~!<>]=)\s*\d"
    rf"|{_NAME}\[\w+\]",
    re.MULTILINE,
)


def texts() -> Iterator[Path]:
    """All files that people read, or whose messages they read."""
    for path in sorted(PROJECT.rglob("*")):
        parts = path.relative_to(PROJECT).parts
        hidden = any(part.startswith(".") and part not in (".ci", ".github") for part in parts)
        if (
            path.is_file()
            and path.suffix in _TEXTS
            and not hidden
            and "__pycache__" not in parts
            and "build" not in parts
        ):
            yield path


def test_the_distribution_has_a_name_of_its_own_and_the_command_is_weir():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "weir-state"
    assert list(project["scripts"]) == ["weir"]


@pytest.mark.parametrize(
    ("text", "tells"),
    [
        ("pip install weir", True),
        ("pip install 'weir[postgres]'", True),
        ("Install the extra: pip install -U weir.", True),
        ("make venv, or install weir[demo]", True),
        ("uv add weir", True),
        ('dependencies = ["weir>=0.1"]', True),
        ("weir==0.1.0", True),
        ("pip install weir-state", False),
        ("pip install 'weir-state[postgres]'", False),
        ("install it, then say `weir run flights`", False),
        ("Weir was installed like any other package", False),
        ("weir_definitions([flights])", False),
    ],
)
def test_what_would_be_found(text, tells):
    assert (_TELLS.search(text) is not None) is tells


def test_no_text_tells_anybody_to_install_a_strangers_package():
    places = [
        f"{path.relative_to(PROJECT)}: {line.strip()}"
        for path in texts()
        if path != Path(__file__)
        for line in path.read_text(errors="replace").splitlines()
        if _TELLS.search(line)
    ]
    assert places == []
