"""What is read at one go fits on a few pages: classes of at most 300 lines, functions of at most 60, folders of at most
14 files."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

from configs.settings import PROJECT

ROOMS = ("assets", "benchmarks", "configs", "infra", "pipelines", "state_ops")
LONG_CLASSES = {
    "Coordinator": "the protocol's rules of barriers, acks and commits, which are proven as one model",
    "Parser": "a method for each rule of a grammar",
    "PartsReader": "all that a reader of a source is asked, and what a connector answers",
    "PlanBuilder": "one walk through a pipeline, with what it has found so far",
    "Registry": "the only writer of four tables, whose order of writing is the protocol's",
    "Storage": "what is done to an object: put, get, list, delete, with retries and mounts",
}
LONG_FUNCTIONS = {
    "pipelines/api/__init__.py: stage": "as long as its arguments, like all that authors call",
    "pipelines/api/operators.py: window": "the same",
    "pipelines/api/operators.py: join": "the same",
    "benchmarks/state/flink_process.py: run": "Flink's classes can be named only where a JVM runs",
}


@cache
def modules() -> list[tuple[Path, ast.Module]]:
    paths = [path for room in ROOMS for path in sorted((PROJECT / room).rglob("*.py"))]
    return [(path, ast.parse(path.read_text())) for path in paths]


def lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Of a function without its docstring, which is as long as what it says."""
    said = node.body[0] if ast.get_docstring(node) is not None and not isinstance(node, ast.ClassDef) else None
    spoken = 0 if said is None else (said.end_lineno or 0) - said.lineno + 1
    return (node.end_lineno or 0) - node.lineno + 1 - spoken


def test_classes_and_functions_are_short():
    long_classes, long_functions = set[str](), set[str]()
    for path, module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef) and lines(node) > 300:
                long_classes.add(node.name)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines(node) > 60:
                long_functions.add(f"{path.relative_to(PROJECT)}: {node.name}")
    assert long_functions == LONG_FUNCTIONS.keys()
    assert long_classes == LONG_CLASSES.keys(), "split it where it has a seam; a reason that has gone is taken out"


def test_folders_have_few_files():
    folders = Counter(path.parent.relative_to(PROJECT).as_posix() for path, _ in modules())
    assert {name: number for name, number in folders.items() if number > 14} == {"benchmarks/nexmark/queries": 24}
