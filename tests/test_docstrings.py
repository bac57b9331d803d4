"""Examples in docstrings give what they show, each public name has one, and first lines say what a function does."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import weir
from weir import agg, api, debugging, state_reader, state_writer, testing
from weir.dagster import definitions
from weir.dagster.component import WeirPipelineComponent
from weir.execution.in_process import InMemoryExecutor
from weir.loading import load_pipeline
from weir.run.run import RunOptions, run
from weir.settings.configuration import PROJECT, load

STEP = ">>> "
NO_VERBS = re.compile(
    r"(A|After|All|An|As|At|Before|Beside|By|Each|Every|For|From|How|If|In|It|Its|No|Not|Nothing|Of|On|One|Some|That"
    r"|The|Their|Those|To|What|When|Where|Whether|Which|Who|Whoever|Whose|With|Without|None|True|False)\b"
    r"|[a-z]|\w+Error\b"
)
"""Beginnings of a function's first line that are no imperative. Ruff's D401 finds some others."""
NO_NOUNS = re.compile(r"(What|Whether|Who|Whoever|Whose|How|When|Where)\b|The same\b")
"""Beginnings of other first lines that do not name what it is."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(*rooms: str) -> Iterator[tuple[Path, Documented, str]]:
    """Yield each docstring below some rooms, with its file and what it is of."""
    for path in (path for room in rooms for path in sorted((PROJECT / room).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Documented) and (docstring := ast.get_docstring(node)) is not None:
                yield path.relative_to(PROJECT), node, docstring


def examples() -> Iterator[tuple[str, str]]:
    """Yield each docstring with an example, by its place."""
    for path, node, docstring in docstrings("weir", "state_ops"):
        if STEP in docstring:
            yield f"{path}:{getattr(node, 'name', node.body[0].lineno)}", docstring


EXAMPLES = dict(examples())
ON_SPARK = "weir/state_reader.py:dataframe"
IN_A_PROJECT = ("weir/debugging.py:", "weir/state_writer.py:", "weir/dagster/", ON_SPARK)
"""The beginnings of places whose examples are about a pipeline that has run."""


def check(place: str, **given: Any) -> None:
    """Run an example. It imports all that it needs but what is given."""
    example = doctest.DocTestParser().get_doctest(EXAMPLES[place], {"__name__": "example", **given}, place, None, 0)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.REPORT_ONLY_FIRST_FAILURE).run(example, out=said.append)
    assert result.attempted
    assert not result.failed, "".join(said)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """A project whose pipeline `shop` has run two epochs. For reading only."""
    root = tmp_path_factory.mktemp("shop")
    module = """
        from weir import Pipeline, agg, aggregate, delta, files

        orders = files("{landing}/*.parquet", name="orders")
        totals = aggregate("totals", orders, key="customer", spent=agg.sum("price"), sink=delta.append("totals"))
        pipeline = Pipeline("shop", (totals,), max_parallelism=8)
    """
    configuration = f"""
        storage: {{root: {root}/storage}}
        local: {{work_dir: {root}/work}}
        checkpoints: {{num_retained: 2}}
        spark: {{parallelism: 1}}
        pipelines: {{shop: {{object: "shop:pipeline", params: {{landing: {root}/landing}}}}}}
    """
    (root / "shop.py").write_text(textwrap.dedent(module))
    (root / "weir.yaml").write_text(textwrap.dedent(configuration))
    (root / "landing").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        settings = load({"WEIR_CONFIG": str(root / "weir.yaml")})
        for epoch, rows in enumerate(([("ann", 20), ("bob", 7)], [("ann", 5)])):
            orders = pl.DataFrame(rows, ["customer", "price"], orient="row")
            orders.write_parquet(root / "landing" / f"orders-{epoch}.parquet")
            pipeline = load_pipeline("shop", settings)
            list(run(pipeline, settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    return root


@pytest.fixture
def project(ran, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ran)
    monkeypatch.setenv("WEIR_CONFIG", str(ran / "weir.yaml"))


@pytest.mark.parametrize("place", [place for place in EXAMPLES if not place.startswith(IN_A_PROJECT)])
def test_an_example_gives_what_it_shows(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(place)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("place", [place for place in EXAMPLES if place.startswith(IN_A_PROJECT[:-1])])
def test_an_example_about_a_pipeline_that_has_run_gives_what_it_shows(place):
    check(place)


@pytest.mark.usefixtures("project")
def test_the_example_on_spark_gives_what_it_shows(spark):
    check(ON_SPARK, spark=spark)


def public() -> dict[str, Any]:
    """Return what people import, by name."""
    given = {name: getattr(weir, name) for name in api.__all__}
    given |= {f"testing.{name}": getattr(testing, name) for name in testing.__all__}
    return given | {
        "dagster.definitions": definitions,
        "dagster.component.WeirPipelineComponent": WeirPipelineComponent,
        "debugging.debug": debugging.debug,
        "debugging.explain": debugging.explain,
        "state_reader.dataframe": state_reader.dataframe,
        "state_writer.write": state_writer.write,
    }


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


def test_first_lines_say_what_a_function_does_and_what_all_else_is():
    """Those of tests, and of rules about settings, state facts."""
    found = []
    for path, node, docstring in docstrings("weir", "state_ops", "assets", "infra"):
        is_property = any("property" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ()))
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property
        if getattr(node, "name", "").startswith("test_"):
            continue
        if (NO_VERBS if is_function else NO_NOUNS).match(docstring):
            found.append(f"{path}:{getattr(node, 'name', 1)}: {docstring.splitlines()[0]}")
    assert found == []
