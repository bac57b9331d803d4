"""Print how large the code is, a row for each folder, and how often it asks what it should not.

    python -m tests.tools.counts

`tests/test_counts.py` holds the bounds.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import test_which_operator, test_which_sink

ROOT = Path(__file__).parents[2]
PRODUCT = ("weir", "state_ops", "assets", "infra", "pipelines")
FOLDERS = (*PRODUCT, "benchmarks", "tests")


@dataclass(frozen=True, slots=True)
class Size:
    """The size of modules.

    Attributes:
        lines: Lines of the files, empty ones among them.
        statements: Statements, without docstrings.
        docstrings: Lines of docstrings.
    """

    files: int = 0
    lines: int = 0
    statements: int = 0
    docstrings: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(
            self.files + other.files,
            self.lines + other.lines,
            self.statements + other.statements,
            self.docstrings + other.docstrings,
        )


def size_of(source: str) -> Size:
    """Return the size of one module.

    Example:
        >>> size_of('"Two lines of code."\\nx = 1\\n')
        Size(files=1, lines=2, statements=1, docstrings=1)
    """
    nodes = list(ast.walk(ast.parse(source)))
    texts = [text for node in nodes if (text := _docstring(node)) is not None]
    statements = sum(isinstance(node, ast.stmt) for node in nodes) - len(texts)
    return Size(1, source.count("\n"), statements, sum((text.end_lineno or 0) - text.lineno + 1 for text in texts))


def _docstring(node: ast.AST) -> ast.Expr | None:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    first: Any = node.body[0] if node.body and ast.get_docstring(node, clean=False) is not None else None
    return first


def modules(*folders: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the source of every module below these folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")


def sizes() -> dict[str, Size]:
    """Return the size of every folder of code, and of each folder right below it."""
    found: dict[str, Size] = defaultdict(Size)
    for path, source in modules(*FOLDERS):
        size, parts = size_of(source), path.split("/")
        for depth in {1, min(2, len(parts) - 1)}:
            found["/".join(parts[:depth])] += size
    return dict(found)


def importers(package: str) -> list[str]:
    """Return the modules of the product that import a package or a module of it."""
    return [path for path, source in modules(*PRODUCT) if any(_imports(node, package) for node in _nodes(source))]


def _nodes(source: str) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(source))


def _imports(node: ast.AST, package: str) -> bool:
    if isinstance(node, ast.ImportFrom):
        names = [str(node.module), *(f"{node.module}.{name.name}" for name in node.names)]
    elif isinstance(node, ast.Import):
        names = [name.name for name in node.names]
    else:
        return False
    return any(f"{name}.".startswith(f"{package}.") for name in names)


def main() -> None:
    print(f"{'':28}{'files':>8}{'lines':>10}{'statements':>12}{'docstrings':>12}")
    found = sizes()
    for name, size in found.items():
        _print(name if "/" not in name else f"  {name}", size)
    _print("product", sum((found[name] for name in PRODUCT), Size()))
    print()
    for what, places in (
        ("places that ask which operator", test_which_operator.places()),
        ("places that ask which sink", test_which_sink.places("Sink")),
        ("places that ask which source", test_which_sink.places("Source")),
        ("modules that import state_ops.checkpoints", importers("state_ops.checkpoints")),
    ):
        print(f"{what}: {len(places)}")


def _print(name: str, size: Size) -> None:
    print(f"{name:28}{size.files:8,}{size.lines:10,}{size.statements:12,}{size.docstrings:12,}")


if __name__ == "__main__":
    main()
