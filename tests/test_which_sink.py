"""Code asks what a sink can do (`Capabilities`), never which sink it has. The counts here only go down."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from weir.settings.configuration import PROJECT

CONNECTORS = PROJECT / "weir" / "connectors"  # the packages of sources and sinks, which know their own
ROOMS = ("assets", "infra", "pipelines", "state_ops", "weir")
TESTS = ("isinstance", "issubclass")


def test_no_code_asks_which_sink_it_has():
    assert places("Sink") == []


def test_a_test_of_which_sink_is_found():
    """The rules of this file find what they are for."""
    sinks = classes("Sink")
    assert {"DeltaSink", "UpsertSink", "ReplaceSink", "KafkaSink", "PostgresSink", "ForeachSink"} <= sinks
    text = "isinstance(sink, Sink | DeltaSink)\ntype(sink) is KafkaSink\nsink.kind == 'delta'\nother.sink.kind != kind"
    assert [line for line, _ in questions_in(ast.parse(text), "Sink", sinks)] == [1, 2, 3, 4]
    text = "isinstance(sink, Sink)\nfile.kind == OUTPUT\nDeltaSink(name='a')\nsink.kind"
    assert list(questions_in(ast.parse(text), "Sink", sinks)) == []


def places(base: str) -> list[str]:
    """Return the places outside of connectors where code asks which subclass of a definition's class it has."""
    derived, outside = classes(base), (path for room in ROOMS for path in sorted((PROJECT / room).rglob("*.py")))
    return [
        f"{path.relative_to(PROJECT)}:{line}: {what}"
        for path in outside
        if not path.is_relative_to(CONNECTORS)
        for line, what in questions_in(ast.parse(path.read_text()), base, derived)
    ]


def classes(base: str) -> set[str]:
    """Return the names of the classes of sources or of sinks, without `Source` or `Sink` itself."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for room in (CONNECTORS, PROJECT / "weir" / "definition")
        for path in sorted(room.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    derived, names = set[str](), {base}
    while names:
        names = {name for name, of in bases.items() if of & names} - derived
        derived |= names
    return derived


def questions_in(module: ast.Module, base: str, derived: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the questions which subclass a value has: by line, and as they are written."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TESTS:
            asked = node.args[1:]
        elif isinstance(node, ast.Compare):
            asked = node.comparators
            if any(_is_kind(side, base.lower()) for side in (node.left, *node.comparators)):
                yield node.lineno, ast.unparse(node)
                continue
            if not (isinstance(node.left, ast.Call) and ast.unparse(node.left.func) == "type"):
                continue
        else:
            continue
        if any(isinstance(part, ast.Name) and part.id in derived for side in asked for part in ast.walk(side)):
            yield node.lineno, ast.unparse(node)


def _is_kind(node: ast.expr, of: str) -> bool:
    """Return whether this is the kind of a source or a sink."""
    return isinstance(node, ast.Attribute) and node.attr == "kind" and ast.unparse(node.value).endswith(of)
