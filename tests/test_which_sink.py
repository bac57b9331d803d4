"""Code asks what a sink can do (`Capabilities`), never which sink it has. The counts here only go down."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from weir.settings.configuration import PROJECT

SINKS = PROJECT / "weir" / "connectors"  # the packages of sinks, which know their own
ROOMS = ("assets", "infra", "pipelines", "state_ops", "weir")
TESTS = ("isinstance", "issubclass")


def test_no_code_asks_which_sink_it_has():
    assert places() == []


def test_a_test_of_which_sink_is_found():
    """The rules of this file find what they are for."""
    text = "isinstance(sink, Sink | DeltaSink)\ntype(sink) is KafkaSink\nsink.kind == 'delta'\nother.sink.kind != kind"
    assert [line for line, _ in _tests_in(ast.parse(text), _classes())] == [1, 2, 3, 4]
    text = "isinstance(sink, Sink)\nfile.kind == OUTPUT\nDeltaSink(name='a')\nsink.kind"
    assert list(_tests_in(ast.parse(text), _classes())) == []


def places() -> list[str]:
    """Return the places in the code at which it asks which sink it has."""
    classes, outside = _classes(), (path for room in ROOMS for path in sorted((PROJECT / room).rglob("*.py")))
    return [
        f"{path.relative_to(PROJECT)}:{line}: {what}"
        for path in outside
        if not path.is_relative_to(SINKS)
        for line, what in _tests_in(ast.parse(path.read_text()), classes)
    ]


def _classes() -> set[str]:
    """The names of the classes of sinks, without `Sink` itself."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for path in sorted(Path(SINKS).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found, names = set[str](), {"Sink"}
    while names:
        names = {name for name, of in bases.items() if of & names} - found
        found |= names
    assert {"DeltaSink", "UpsertSink", "ReplaceSink", "KafkaSink", "PostgresSink", "ForeachSink"} <= found
    return found


def _tests_in(module: ast.Module, classes: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TESTS:
            asked = node.args[1:]
        elif isinstance(node, ast.Compare):
            asked = node.comparators
            if any(_is_kind(side) for side in (node.left, *node.comparators)):
                yield node.lineno, ast.unparse(node)
                continue
            if not (isinstance(node.left, ast.Call) and ast.unparse(node.left.func) == "type"):
                continue
        else:
            continue
        if any(isinstance(part, ast.Name) and part.id in classes for side in asked for part in ast.walk(side)):
            yield node.lineno, ast.unparse(node)


def _is_kind(node: ast.expr) -> bool:
    """Return whether this is the kind of a sink."""
    return isinstance(node, ast.Attribute) and node.attr == "kind" and ast.unparse(node.value).endswith("sink")
