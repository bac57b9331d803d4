"""`make mutants`, `make mutants-changed`: break the code on purpose, one place at a time, and see that a test notices.

`mutants.toml` lists the mutants. Each one is applied to a copy of the tree: its test must pass there before it, and
fail after it. Exit status 1 means that a mutant survived, or that its function or pattern is no longer there.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
_TREES = 2  # in which mutants are tried side by side


@dataclass(frozen=True)
class Mutant:
    """One sabotage.

    Attributes:
        name: What the sabotaged code does wrong.
        function: Where it is: `module:Class.method`, the same for a class or a constant, `module:` for a whole module.
            A file that is not Python is named by its path.
        pattern: Text that stands there exactly once.
        replacement: What it becomes. Where nothing is put in place of whole lines, the lines go.
        test: pytest's id of the test that must fail.
    """

    name: str
    function: str
    pattern: str
    replacement: str
    test: str

    @property
    def file(self) -> str:
        """The path of the file, from the root of the tree."""
        module, colon, _ = self.function.partition(":")
        return f"{module.replace('.', '/')}.py" if colon else module

    def apply(self, source: str) -> str:
        """Break a file's source.

        Raises:
            LookupError: The function is not there, or the pattern does not stand in it exactly once.
        """
        spans = function_spans(source, self.function)
        if not spans:
            raise LookupError(f"there is no {self.function}")
        places = [start + at for start, end in spans for at in _occurrences(source[start:end], self.pattern)]
        if len(places) != 1:
            raise LookupError(f"{self.pattern!r} stands {len(places)} times in {self.function}")
        start, end = places[0], places[0] + len(self.pattern)
        if not self.replacement:
            indent = source.rfind("\n", 0, start) + 1
            if not source[indent:start].strip() and source[end : end + 1] == "\n":
                start, end = indent, end + 1
        return source[:start] + self.replacement + source[end:]


def function_spans(source: str, function: str) -> list[tuple[int, int]]:
    """Find a function, class or constant in a file's source.

    Returns:
        Where its text, decorators included, begins and ends. A property with a setter has two such places.
    """
    _, colon, name = function.partition(":")
    return definitions(source).get(name, []) if colon and name else [(0, len(source))]


@cache
def definitions(source: str) -> dict[str, list[tuple[int, int]]]:
    """Where each function, class and constant of a file stands, by its qualified name."""
    starts = [0]
    for line in source.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    spans: dict[str, list[tuple[int, int]]] = {}
    for name, node in _named_nodes(ast.parse(source), ""):
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        spans.setdefault(name, []).append((starts[first - 1], starts[node.end_lineno]))
    return spans


def _named_nodes(parent: ast.AST, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            yield from _named_nodes(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(parent, ast.Module | ast.ClassDef):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((prefix + target.id, node) for target in targets if isinstance(target, ast.Name))
        else:
            yield from _named_nodes(node, prefix)


def _occurrences(text: str, pattern: str) -> list[int]:
    return [at for at in range(len(text)) if text.startswith(pattern, at)]


MUTANTS = [
    Mutant(name, function, *texts)
    for function, mutants in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
    for name, texts in mutants.items()
]


def main() -> int:
    parser = argparse.ArgumentParser(description="Break the code on purpose and see that the tests notice.")
    parser.add_argument("words", nargs="*", help="only mutants whose name has any of these words")
    parser.add_argument(
        "--changed", action="store_true", help="only mutants of functions, or killed by tests in files, that differ"
    )
    parser.add_argument(
        "--since", default="HEAD~1", help="from this commit (default: the last one and what is not committed)"
    )
    asked = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not asked.words or any(word in mutant.name for word in asked.words)]
    if asked.changed:
        files = _changed_files(asked.since)
        chosen = [mutant for mutant in chosen if _is_changed(mutant, files, asked.since)]
    if not chosen:
        print("There is no such mutant.", file=sys.stderr)
        return 0 if asked.changed else 2
    with tempfile.TemporaryDirectory(prefix="weir-mutants-") as scratch, ThreadPoolExecutor(_TREES) as pool:
        trees = SimpleQueue[Path]()
        for number in range(_TREES):
            _copy(tree := Path(scratch) / f"tree-{number}")
            trees.put(tree)
        tests = sorted({mutant.test for mutant in chosen})
        print(f"{len(tests)} named tests on the unbroken tree")
        if not _passes(tree, tests, shown=True):
            print("they do not pass as they are: nothing can be learned from mutants", file=sys.stderr)
            return 1
        killed = list(pool.map(partial(_killed_in_a_free, trees), chosen))
    survivors = [mutant.name for mutant, is_killed in zip(chosen, killed, strict=True) if not is_killed]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    for name in survivors:
        print(f"  survived: {name}", file=sys.stderr)
    return 1 if survivors else 0


def _changed_files(since: str) -> set[str]:
    """Files that differ from a commit, new ones too."""
    commands = (["git", "diff", "--name-only", since], ["git", "ls-files", "--others", "--exclude-standard"])
    listings = [subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True) for command in commands]
    return {name for listing in listings for name in listing.stdout.splitlines()}


def _is_changed(mutant: Mutant, files: set[str], since: str) -> bool:
    """Whether the mutant's function, or the file of its test, differs from a commit."""
    if mutant.test.split("::")[0] in files:
        return True
    return mutant.file in files and _function_texts(_text_at(since, mutant.file), mutant.function) != _function_texts(
        (ROOT / mutant.file).read_text(), mutant.function
    )


def _function_texts(source: str, function: str) -> list[str]:
    return [source[start:end] for start, end in function_spans(source, function)]


@cache
def _text_at(commit: str, file: str) -> str:
    """A file's text in a commit, which is empty if the commit does not have it."""
    return subprocess.run(["git", "show", f"{commit}:{file}"], cwd=ROOT, capture_output=True, text=True).stdout


def _killed_in_a_free(trees: SimpleQueue[Path], mutant: Mutant) -> bool:
    tree = trees.get()
    try:
        return _is_killed(tree, mutant)
    finally:
        trees.put(tree)


def _copy(tree: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def _is_killed(tree: Path, mutant: Mutant) -> bool:
    file = tree / mutant.file
    text = file.read_text()
    try:
        broken = mutant.apply(text)
    except LookupError as error:
        print(f"  ?  {mutant.name}: {error}", file=sys.stderr)
        return False
    started = time.monotonic()
    file.write_text(broken)
    try:
        killed = not _passes(tree, [mutant.test])
    finally:
        file.write_text(text)
    print(
        f"  {'killed  ' if killed else 'SURVIVED'}  {time.monotonic() - started:5.1f} s  {mutant.name}  [{mutant.test}]"
    )
    return killed


def _passes(tree: Path, tests: list[str], *, shown: bool = False) -> bool:
    """Exit 0 is a pass and 1 a failing test; anything else (no such test, a broken import) says nothing about the
    tests."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "--no-header", *tests]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=900)
    if done.returncode not in (0, 1):
        raise SystemExit(
            f"pytest could not run {tests} (exit {done.returncode}):\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
        )
    if shown and done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
