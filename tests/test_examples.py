"""Examples in docstrings give what they show, and each public name has one."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import weir
from weir import agg, api, testing
from weir.settings.configuration import PROJECT

STEP = ">>> "


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield each docstring with an example, by its place."""
    for path in (path for room in ("weir", "state_ops") for path in sorted((PROJECT / room).rglob("*.py"))):
        if STEP not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docstring = ast.get_docstring(node) or ""
                if STEP in docstring:
                    line = node.body[0].lineno
                    yield f"{path.relative_to(PROJECT)}:{getattr(node, 'name', line)}", docstring


EXAMPLES = dict(docstrings())


@pytest.mark.parametrize("place", EXAMPLES)
def test_an_example_gives_what_it_shows(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(EXAMPLES[place], {"__name__": "example"}, place, None, 0)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.REPORT_ONLY_FIRST_FAILURE).run(example, out=said.append)
    assert result.attempted
    assert not result.failed, "".join(said)


def public() -> dict[str, Any]:
    """Return what people import, by name."""
    given = {name: getattr(weir, name) for name in api.__all__}
    return given | {f"testing.{name}": getattr(testing, name) for name in testing.__all__}


def is_alias(value: Any) -> bool:
    """Return whether a name stands for a type that has no docstring."""
    return value is Any or typing.get_origin(value) is not None


def documented(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a public name with the object that has its docstring, and so the functions that it stands for."""
    plain = inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)
    yield name, value if plain else type(value).__call__  # kafka and postgres are objects
    if value is api.delta or not plain:
        functions = inspect.getmembers(value, inspect.isroutine)
        yield from ((f"{name}.{part}", function) for part, function in functions if not part.startswith("_"))


def test_each_public_name_has_an_example():
    for name, value in public().items():
        for place, of in documented(name, value) if not is_alias(value) else ():
            assert STEP in (of.__doc__ or ""), f"{place} has no example in its docstring"


def test_types_without_a_docstring_are_in_an_example_of_another_name():
    code = "\n".join(
        line for text in EXAMPLES.values() for line in text.splitlines() if re.match(r" *(>>>|\.\.\.) ", line)
    )
    aliases = [name for name, value in public().items() if is_alias(value)]
    assert aliases
    assert [name for name in aliases if not re.search(rf"\b{name}\b", code)] == []


def test_every_aggregate_is_in_the_example_of_all():
    functions = [
        name
        for name, function in inspect.getmembers(agg, inspect.isfunction)
        if typing.get_type_hints(function).get("return") is agg.Agg
    ]
    assert len(functions) > 8
    assert [name for name in functions if f"agg.{name}(" not in (agg.__doc__ or "")] == []
