"""Nothing outside of an operator's package asks which operator a stage has: the operator answers for itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KINDS = {path.parent.name for path in (ROOT / "weir" / "operators").glob("*/__init__.py")} - {"where"}
_MAY_ASK = (
    "weir/operators/",
    *("weir/api/", "weir/testing/instances.py"),  # authors' functions make operators; a test's state is put by one
    "weir/definition/fingerprint.py",  # it writes what earlier releases recorded
)


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


def places() -> list[str]:
    """Return the places outside of the operators' packages at which a module may ask which operator it has."""
    modules = {
        path.relative_to(ROOT).as_posix(): path
        for room in ("weir", "state_ops")
        for path in (ROOT / room).rglob("*.py")
    }
    outside = {name: path for name, path in modules.items() if not name.startswith(_MAY_ASK)}
    assert len(outside) > 300
    return [f"{name}: {place}" for name, path in sorted(outside.items()) for place in asking(path.read_text("utf-8"))]


def test_no_module_outside_of_operators_asks_which_operator_it_has():
    assert places() == []


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
