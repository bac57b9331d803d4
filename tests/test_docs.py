"""Generated pages are current, and what the docs say of the registry's columns is what the tables have."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import tomllib
from collections import Counter
from importlib.util import find_spec

import pytest

from state_ops.checkpoints.registry import CHECKPOINTS, PINS, PUBLICATIONS, STATE_FILES
from state_ops.checkpoints.restore_log import SCHEMA as RESTORES
from state_ops.extras import version
from weir import api
from weir.settings import reference
from weir.settings.configuration import PROJECT, load


def test_the_configuration_page_is_current():
    assert reference.PAGE.read_text() == reference.page(), "run `python -m weir.settings.reference`"


def test_the_settings_that_the_configuration_page_shows_load(tmp_path):
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", reference.PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "shown.yaml").write_text(shown)
    settings = load({"WEIR_CONFIG": str(tmp_path / "shown.yaml")})
    assert settings.checkpoints.num_retained == 3 and list(settings.pipelines) == ["flights"]


def test_every_column_of_the_registry_is_documented_with_its_type():
    page = (PROJECT / "docs" / "reference" / "registry.md").read_text()
    tables = {
        "checkpoints": CHECKPOINTS,
        "state_files": STATE_FILES,
        "publications": PUBLICATIONS,
        "pins": PINS,
        "restores": RESTORES,
    }
    types = {"int64": {"long"}, "string": {"string", "JSON"}, "bool": {"boolean"}, "double": {"double"}}
    for title, schema in tables.items():
        section = page.split(f"## registry/{title}\n")[1].split("\n## ")[0]
        documented: dict[str, str] = {}
        for names, kinds in re.findall(r"^\| ([a-z][^|]*) \| ([^|]*) \|", section, re.MULTILINE)[1:]:
            columns, of = names.split(", "), kinds.split(", ")
            documented |= zip(columns, of * len(columns) if len(of) == 1 else of, strict=True)
        assert sorted(documented) == sorted(schema.names), title
        for field in schema:
            assert documented[field.name] in types.get(str(field.type), {"timestamp"}), (title, field.name)


def _anchor(heading: str) -> str:
    """The fragment of a link to a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def test_every_function_that_the_architecture_names_is_in_the_file_that_it_links_to():
    page = PROJECT / "docs" / "architecture.md"
    links = re.findall(r"\[(`?)([^\]`]+)`?\]\(([^)]+)\)", page.read_text())
    assert len(links) > 40
    for quoted, name, target in links:
        path, _, section = target.partition("#")
        file = page.parent / (path or page.name)
        assert file.exists(), target
        if section and file == page:
            assert section in {_anchor(line) for line in page.read_text().splitlines() if line.startswith("## ")}, (
                target
            )
        if quoted and not name.endswith("/") and file.suffix == ".py" and "/" not in name and name != file.stem:
            assert re.search(rf"(?:def|class) {name}\b", file.read_text()), (name, target)


def test_the_architecture_draws_every_room():
    page = (PROJECT / "docs" / "architecture.md").read_text().split("```mermaid")[1].split("```")[0]
    for package in ("state_ops", "weir"):
        for room in (PROJECT / package).iterdir():
            if room.is_dir() and (room / "__init__.py").exists():
                assert re.search(rf"\b{room.name}\b", page), f"{package}/{room.name}"


def test_every_decision_is_in_the_index_once():
    index = (PROJECT / "docs" / "adr" / "README.md").read_text()
    decisions = sorted((PROJECT / "docs" / "adr").glob("0*.md"))
    for decision in decisions:
        assert index.count(f"({decision.name})") == 1, decision.name
    numbers = [decision.name[:4] for decision in decisions]
    assert len(set(numbers)) == len(numbers)


def test_every_name_that_authors_import_is_in_the_reference_once():
    pages = "".join(page.read_text() for page in (PROJECT / "docs" / "site" / "api").glob("*.md"))
    headings = re.findall(r"^### `?(\w+)`?$|^## `?(\w+)`?$", pages, flags=re.MULTILINE)
    described = sorted(name for pair in headings for name in pair if name and name != "API")
    assert described == sorted(set(api.__all__) - {"Position"})


_WITH_CODE = [
    page
    for folder in ("how-to", "reference", "reference/operators")
    for page in sorted((PROJECT / "docs" / folder).glob("*.md"))
]


@pytest.mark.parametrize("page", _WITH_CODE, ids=lambda page: page.stem)
def test_code_of_a_page_imports_what_is_there_and_its_pipelines_are_defined(page):
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for module, names in re.findall(
            r"^from ((?:weir|pipelines|assets)[\w.]*) import ([\w, ]+|\([^)]*\))", code, re.M
        ):
            for name in re.findall(r"\w+", names):
                there = hasattr(importlib.import_module(module), name) or find_spec(f"{module}.{name}")
                assert there, f"{module} has no {name}"
        authors = re.search(r"^from weir import (?!debugging|state_reader|state_writer|testing)", code, re.M)
        if authors and "..." not in code and "Producer" not in code:
            defined: dict[str, object] = {}
            exec(compile(code, page.name, "exec"), defined)
            stages = tuple(value for value in defined.values() if isinstance(value, api.Stage))
            if stages and "pipeline" not in defined:
                assert api.Pipeline("page", stages).stages == stages


def test_the_page_on_sources_says_which_of_them_take_an_argument():
    page = (PROJECT / "docs" / "how-to" / "sources.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page.split("| argument | of |")[1].split("\n\n")[0], re.MULTILINE)
    sources = {
        "files": api.files,
        "delta.table": api.delta.table,
        "kafka": api.kafka.__call__,
        "postgres": api.postgres.__call__,
        "generator": api.generator,
    }
    assert len(rows) > 8
    for argument, of in rows:
        taking = {name for name, source in sources.items() if argument in inspect.signature(source).parameters}
        assert taking == (set(sources) if of == "all" else set(re.findall(r"`([\w.]+)`", of))), argument


def test_the_page_on_projects_names_every_extra():
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    offered = re.search(r"\[(.*)\]", extras["all"][0])
    assert offered is not None
    table = (PROJECT / "docs" / "how-to" / "project.md").read_text().split("| extra | brings |")[1].split("\n\n")[0]
    named = {
        name for cell in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    }
    assert named == {*offered[1].split(","), "all"}


def test_the_changelog_says_nothing_twice():
    """Two branches that word an entry anew leave both wordings behind."""
    released = (PROJECT / "CHANGELOG.md").read_text("utf-8").splitlines()
    begins = Counter(line[:100] for line in released if line.startswith("- "))
    assert [begin for begin, count in begins.items() if count > 1] == []


def test_a_release_is_told_in_two_pages():
    """What came before 0.1.0 had no release, so it has no history."""
    sections = re.split(r"^## ", (PROJECT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
    assert [section.split("]")[0] for section in sections][:1] == ["[Unreleased"]
    assert f"[{version()}]" in (PROJECT / "CHANGELOG.md").read_text("utf-8")
    for section in sections:
        assert len(section.splitlines()) <= 120, f"{section.splitlines()[0]}: say what people can do now"


def test_every_diagram_is_drawn():
    diagrams = runpy.run_path(str(PROJECT / "docs" / "site" / "diagrams.py"))
    drawn = {picture.name for picture in diagrams["PICTURES"].glob("*.svg")}
    assert drawn == set(diagrams["of_pages"]()), "run `python docs/site/diagrams.py`"


@pytest.mark.parametrize("page", ["cost", "limits"])
def test_figures_are_those_of_the_results_that_they_link_to(page):
    figures = 0
    for line in (PROJECT / "docs" / f"{page}.md").read_text().splitlines():
        results = re.findall(r"\(\.\./(benchmarks/results/[\w-]+\.md)\)", line)
        measured = "".join((PROJECT / result).read_text() for result in results)
        for figure in re.findall(r"\d{1,3}(?:,\d{3})+", line) if results else ():
            assert figure in measured, (figure, results)
            figures += 1
    assert figures > 2


_PROSE = [
    page
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "benchmarks/README.md",
        "docs/**/*.md",
    )
    for page in sorted(PROJECT.glob(pattern))
]


def _blocks(text: str) -> list[list[str]]:
    """The lines of each paragraph and of each item of a list; code, tables, headings and comments are none."""
    blocks: list[list[str]] = [[]]
    code = False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        code ^= fence
        if code or fence or not line.strip() or re.match(r"\s*(\||#|<!--)", line):
            blocks.append([])
        elif re.match(r"\s*([-*>]|\d+\.) ", line):
            blocks.append([line])
        else:
            blocks[-1].append(line)
    return [block for block in blocks if block]


def _sentences(block: list[str]) -> int:
    text = re.sub(r"`[^`]*`", "x", " ".join(map(str.strip, block)))  # a full stop within code ends nothing
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return len(re.findall(r"[.!?][)\]*_\"]*(?=\s+[\[(*_\"]*[A-Zx0-9]|$)", text))


def test_lines_of_prose_have_at_most_120_characters():
    long = [
        f"{page.relative_to(PROJECT)}: {line[:60]}"
        for page in _PROSE
        for block in _blocks(page.read_text())
        for line in block
        if len(line) > 120
    ]
    assert long == []


def test_paragraphs_have_at_most_five_sentences():
    """Decisions are left out: their text stays as it was."""
    long = [
        f"{page.relative_to(PROJECT)}: {block[0][:60]}"
        for page in _PROSE
        if "adr" not in page.parts
        for block in _blocks(page.read_text())
        if _sentences(block) > 5
    ]
    assert long == [], "cut the paragraph where its subject changes"


def test_sentences_and_blocks_are_counted_as_people_do():
    page = 'A `x.y`. B\n([C](d.md). D)\n- E e.g. f. G?\n\n```\nH. I.\n```\n| J. | K. |\n"L." **M.**'
    assert [(block[0][:3], _sentences(block)) for block in _blocks(page)] == [("A `", 2), ("- E", 2), ('"L.', 2)]


def test_the_readme_is_read_in_a_few_minutes():
    assert len((PROJECT / "README.md").read_text().splitlines()) <= 110
