"""Every command and option that a page or a message tells people to type is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from weir.cli import main
from weir.settings.configuration import PROJECT

_PAGES = [
    PROJECT / "README.md",
    *sorted(page for page in (PROJECT / "docs").rglob("*.md") if "adr" not in page.parts),
]
_CODE = [
    file
    for folder in ("assets", "infra", "pipelines", "state_ops", "weir")
    for pattern in ("*.py", "*.yml", "*.yaml")
    for file in sorted((PROJECT / folder).rglob(pattern))
]
_OF_ALL = {"--help", "--debug", "--install-completion", "--show-completion"}
_TYPED = re.compile(r"(?<![\w./-])weir ([a-z]+)(?: ([a-z]+))?([^\n`;|]*)")
_IN_CODE = re.compile(r"`weir ([a-z]+)")


def texts(file: Path) -> Iterator[str]:
    """What people read of a file: of code its strings, put together as they are when it runs."""
    if file.suffix != ".py":
        yield re.sub(r"\\\n\s*", "", file.read_text())
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "NAME" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def named(text: str) -> Iterator[tuple[str, set[str]]]:
    """The commands in a text, each with the options that follow it up to the end of its sentence or code."""
    for first, second, rest in _TYPED.findall(text):
        name = f"{first} {second}" if first in ("state", "new") else first
        line = f"{second} {rest}" if name == first else rest
        yield name, set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", re.split(r"\. |weir |, (?!--)", line)[0]))


def test_every_option_that_is_named_with_a_command_is_one_of_it():
    known = {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in main.commands().items()
    }
    wrong = [
        f"{file.relative_to(PROJECT)}: weir {name} {option}"
        for file in (*_PAGES, *_CODE)
        for text in texts(file)
        for name, options in named(text)
        for option in options - _OF_ALL - known.get(name, options)
    ]
    assert wrong == []


@pytest.mark.parametrize("files", [_PAGES, _CODE], ids=["pages", "messages"])
def test_every_command_that_is_named_is_there(files):
    first_words = {name.partition(" ")[0] for name in main.commands()}
    words = {word for file in files for text in texts(file) for word in _IN_CODE.findall(text)}
    assert len(words) > 10 and words <= first_words, words - first_words
