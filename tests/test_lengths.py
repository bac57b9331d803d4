"""What is read at one go fits on a few pages: classes of at most 300 lines, functions of at most 60, folders of at most
14 files."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

from weir.settings.configuration import PROJECT

ROOMS = ("assets", "benchmarks", "infra", "pipelines", "state_ops", "weir")
LONG_FUNCTIONS = {
    "weir/api/stages.py: stage": "as long as its arguments, like all that authors call",
    "weir/api/operators.py: window": "the same",
    "weir/api/operators.py: join": "the same",
    "benchmarks/state/flink_process.py: run": "Flink's classes can be named only where a JVM runs",
}


@cache
def modules() -> list[tuple[Path, ast.Module]]:
    paths = [path for room in ROOMS for path in sorted((PROJECT / room).rglob("*.py"))]
    return [(path, ast.parse(path.read_text())) for path in paths]


def lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the length without docstrings, which are as long as their content."""
    documented = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    inner = [part for part in ast.walk(node) if isinstance(part, documented) and ast.get_docstring(part) is not None]
    docstrings = sum((part.body[0].end_lineno or 0) - part.body[0].lineno + 1 for part in inner)
    return (node.end_lineno or 0) - node.lineno + 1 - docstrings


def says_why_it_is_long(node: ast.ClassDef) -> bool:
    return "; long because " in (ast.get_docstring(node) or "").split("\n")[0]


def test_classes_and_functions_are_short():
    misjudged, long_functions = set[str](), set[str]()
    for path, module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef) and (lines(node) > 300) != says_why_it_is_long(node):
                misjudged.add(node.name)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines(node) > 60:
                long_functions.add(f"{path.relative_to(PROJECT)}: {node.name}")
    assert long_functions == LONG_FUNCTIONS.keys()
    assert not misjudged, (
        "split it where it has a seam, or say in its first line: ...; long because ...; if it is short, take that out"
    )


def test_folders_have_few_files():
    folders = Counter(path.parent.relative_to(PROJECT).as_posix() for path, _ in modules())
    many = {"benchmarks/nexmark/queries": 24, "state_ops": 16, "weir/api": 15}  # a query, a word, a call each
    assert {name: number for name, number in folders.items() if number > 14} == many
