"""Nothing outside of an operator's package asks which operator a stage has: the operator answers for itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KINDS = {path.parent.name for path in (ROOT / "weir" / "operators").glob("*/__init__.py")} - {"where"}
# Authors' functions make operators; a test of a stage begins with state that a function puts.
_MAKERS = {"weir/testing/instances.py"}


def asking(source: str) -> list[str]:
    """The places in a module's source at which it may find out which operator a stage has."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("weir.operators."):
            if str(node.module).split(".")[2] in KINDS:
                found.append(f"line {node.lineno}: imports {node.module}")
        elif isinstance(node, ast.Attribute) and node.attr in ("kind", "slot") and _is_operator(node.value):
            found.append(f"line {node.lineno}: asks for the {node.attr} of an operator")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance" and _is_operator(node.args[0]):
            found.append(f"line {node.lineno}: asks for the class of an operator")
    return found


def _is_operator(value: ast.expr) -> bool:
    return getattr(value, "attr", getattr(value, "id", "")) == "operator"


def test_no_module_outside_of_operators_asks_which_operator_it_has():
    modules = [path for room in ("weir", "state_ops") for path in (ROOT / room).rglob("*.py")]
    outside = {path: path.relative_to(ROOT).as_posix() for path in modules}
    outside = {path: name for path, name in outside.items() if not name.startswith(("weir/operators/", "weir/api/"))}
    assert len(outside) > 300
    found = {name: places for path, name in outside.items() if (places := asking(path.read_text("utf-8")))}
    found = {name: places for name, places in found.items() if name not in _MAKERS}
    assert set(found) <= {"weir/definition/fingerprint.py"}, found  # it writes what earlier releases recorded


@pytest.mark.parametrize(
    "source",
    [
        "from weir.operators.windows import Window",
        "isinstance(stage.operator, Window)",
        "if stage.operator.kind == 'window': pass",
    ],
)
def test_a_question_is_found(source):
    assert asking(source)
