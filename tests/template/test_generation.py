"""What Copier makes of this repository: a whole project, in all variants."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import copier
import jinja2
import polars as pl
import pytest
import yaml
from copier.errors import UserMessageError

from tests.template.projects import generate, git, passes, repository, run
from weir.settings.configuration import PROJECT

FILES = {
    ".copier-answers.yml",
    ".gitignore",
    "Makefile",
    "README.md",
    "assets/__init__.py",
    "assets/definitions.py",
    "configs/dev.yaml",
    "configs/prod.yaml",
    "infra/__init__.py",
    "infra/demo.py",
    "pipelines/__init__.py",
    "pipelines/orders.py",
    "pyproject.toml",
    "tests/test_orders.py",
    "tests/test_project.py",
    "workspace.yaml",
}


@pytest.fixture(scope="module")
def project(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(template, tmp_path_factory.mktemp("made") / "Shop Events")


def files_of(project: Path) -> set[str]:
    return {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}


def test_a_project_is_named_by_its_folder_and_has_its_own_files_alone(project: Path, template: Path):
    answers = yaml.safe_load((project / ".copier-answers.yml").read_text())
    assert (answers["name"], answers["package"]) == ("shop-events", "pipelines")
    assert (answers["_commit"], answers["example"]) == ("v0.0.1", True)
    assert files_of(project) == FILES
    pyproject = tomllib.loads((project / "pyproject.toml").read_text())
    assert pyproject["project"]["name"] == "shop-events"
    assert pyproject["tool"]["weir"]["package"] == "pipelines"
    assert pyproject["project"]["dependencies"] == [
        f"weir-state[gates,java,plots,sql,ui] @ git+file://{template}@v0.0.1"
    ]


_ADDRESSES = [
    ({"_src_path": "gh:acme/weir", "_commit": "v0.1.0"}, "git+https://github.com/acme/weir.git@v0.1.0"),
    ({"_src_path": "gl:acme/weir.git", "_commit": "v0.1.0"}, "git+https://gitlab.com/acme/weir.git@v0.1.0"),
    ({"_src_path": "https://git.example.com/weir.git", "_commit": "0.2"}, "git+https://git.example.com/weir.git@0.2"),
    (
        {"_src_path": "git+https://git.example.com/weir", "_commit": "v1.0rc1"},
        "git+https://git.example.com/weir@v1.0rc1",
    ),
    (
        {"_src_path": "git@example.com:acme/weir.git", "_commit": "v0.1.0"},
        "git+ssh://git@example.com/acme/weir.git@v0.1.0",
    ),
    ({"_src_path": "/srv/weir", "_commit": "v0.1.0-3-gabcdef0"}, "git+file:///srv/weir@abcdef0123"),
    ({"_src_path": "/srv/weir", "_commit": "abcdef0"}, "git+file:///srv/weir@abcdef0123"),
    ({"_src_path": "/srv/weir"}, "file:///srv/weir"),
]


@pytest.mark.parametrize(("answers", "address"), _ADDRESSES, ids=lambda value: value if isinstance(value, str) else "")
def test_weir_is_installed_from_where_copier_was_called_with(answers: dict[str, str], address: str):
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PROJECT), extensions=["jinja2_ansible_filters.AnsibleCoreFiltersExtension"]
    )
    macros: Any = environment.get_template("answers.j2").module
    commit = {"vcs_ref_hash": "abcdef0123"} if "_commit" in answers else {}
    assert macros.requirement(answers, commit) == address


def test_a_project_passes_its_own_tests_and_checks(project: Path):
    passes(project, "pytest", "tests")
    passes(project, "ruff", "check", ".")
    passes(project, "ruff", "format", "--check", ".")
    passes(project, "mypy", "pipelines", "assets", "infra")
    assert "everything starts empty" in passes(project, "weir.cli.main", "plan", "orders")


_DEMOS = [(source, "append") for source in ("csv", "json", "avro", "delta", "generator")] + [("parquet", "upsert")]


@pytest.mark.long
@pytest.mark.parametrize(("source", "sink"), _DEMOS)
def test_the_demo_delivers_what_the_example_reads(template: Path, tmp_path: Path, source: str, sink: str):
    project = generate(template, tmp_path / "shop", {"sources": [source], "sinks": [sink]})
    printed = passes(project, "infra.demo")
    assert "weir new pipeline NAME" in printed
    rows = pl.read_delta(str(project / ".weir" / "storage" / "orders" / "tables" / "orders"))
    assert rows.height == {"append": 100_000 if source == "generator" else 9, "upsert": 3}[sink]
    assert passes(project, "infra.demo") and rows.height  # again: nothing is delivered twice


@pytest.mark.long
def test_an_empty_project_has_a_package_and_no_pipeline(template: Path, tmp_path: Path):
    answers = {"name": "lab", "package": "research", "example": False, "storage": "s3", "bucket": "lab/x"}
    project = generate(template, tmp_path / "lab", answers)
    assert sorted(path.name for path in (project / "research").iterdir()) == ["__init__.py"]
    assert sorted(path.name for path in (project / "tests").iterdir()) == ["test_project.py"]
    production = yaml.safe_load((project / "configs" / "prod.yaml").read_text())
    assert production["storage"] == {"root": "s3://lab/x", "s3": {"region": "eu-central-1"}}
    passes(project, "pytest", "tests")


_WRONG = [
    ("name", ["Shop", "", "1a", "shop-", "a\nb"]),
    ("package", ["configs", "a-b", "class", "polars", ""]),
    ("storage", ["gcs", "", "[s3]"]),
    ("bucket", ["", "a: b", "Shop"]),
    ("region", ["", "eu central"]),
    ("sources", ["ftp", "parquet", "[]", [], "[csv, ftp]", "{a: b}", ["ftp"], None, "[7]"]),
    ("sinks", ["mongo", "[append, mongo]", 7]),
    ("example", ["maybe", "", "7"]),
    ("nme", ["shop"]),
]


@pytest.mark.parametrize(("question", "given"), _WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_answer_is_refused_by_question_and_what_it_may_be(
    template: Path, tmp_path: Path, question: str, given: list[object]
):
    for value in given:
        data = {"storage": "s3", question: value}
        with pytest.raises(UserMessageError) as refused:
            copier.run_copy(
                str(template), tmp_path / "shop", data=data, defaults=True, quiet=True, vcs_ref="HEAD", pretend=True
            )
        said = str(refused.value)
        shown = "none of the questions" if question == "nme" else f"{question} is "
        assert shown in said and ("which is" in said or "which are" in said), said
    assert not (tmp_path / "shop").exists()


def test_copier_prints_each_wrong_answer_in_a_line(template: Path, tmp_path: Path):
    command = [sys.executable, "-m", "copier", "copy", "--defaults", "-d", "sources=[csv, ftp]", "-d", "nme=1"]
    refused = subprocess.run(
        [*command, str(template), str(tmp_path / "shop")], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    lines = refused.stderr.strip().splitlines()
    assert "sources is [csv, ftp]" in lines[0] and "avro" in lines[0] and "nme is none" in lines[1]
    assert lines[2:] == ["'right_answers' is undefined"]


def test_an_update_keeps_a_packages_name_that_an_older_release_has_taken(tmp_path: Path):
    """Neither is it asked for anew, nor does the package get another name without a word."""
    template = repository(tmp_path / "weir")
    rules = template / "answers.j2"
    now = rules.read_text()
    rules.write_text(now.replace(" calendar ", " "))
    git(template, "commit", "-qam", "An older release")
    git(template, "tag", "v0.0.2")
    project = generate(template, tmp_path / "shop", {"package": "calendar", "example": False}, commits=True)
    for version, text in (("v0.0.3", now), ("v0.0.4", now + "{# Newer. #}\n")):
        rules.write_text(text)
        git(template, "commit", "-qam", "A release")
        git(template, "tag", version)
        copier.run_update(project, defaults=True, overwrite=True, quiet=True)
        answers = yaml.safe_load((project / ".copier-answers.yml").read_text())
        assert (answers["package"], answers["_commit"]) == ("calendar", version)
        assert (project / "calendar" / "__init__.py").exists() and not (project / "calendar_project").exists()
        git(project, "commit", "-qam", version)
    with pytest.raises(UserMessageError, match="package is csv"):
        copier.run_update(project, data={"package": "csv"}, defaults=True, overwrite=True, quiet=True, pretend=True)


@pytest.mark.parametrize("sources", ["[kafka, csv]", ["kafka", "csv"]], ids=["text", "list"])
def test_the_example_has_the_first_source_and_sink_that_the_answers_name(
    template: Path, tmp_path: Path, sources: object
):
    project = generate(template, tmp_path / "shop", {"sources": sources, "sinks": "[upsert, append]"})
    code = (project / "pipelines" / "orders.py").read_text()
    assert "source=kafka(" in code and "sink=delta.upsert(" in code
    assert "--source kafka --sink upsert" in (project / "README.md").read_text()
    answers = yaml.safe_load((project / ".copier-answers.yml").read_text())
    assert sorted(answers["sources"]) == ["csv", "kafka"] and "first_source" not in answers


def test_the_page_on_projects_has_every_question():
    page = (PROJECT / "docs" / "how-to" / "project.md").read_text()
    rows = re.findall(r"^\| `(\w+)`: [^|]+ \| (\w+) \| ([^|]+) \| ([^|]+) \| `'?(\w+)=([^|`]+?)'?` \|$", page, re.M)
    asked = {
        name: question
        for name, question in yaml.safe_load((PROJECT / "copier.yml").read_text()).items()
        if not name.startswith("_") and question.get("help")
    }
    assert [row[0] for row in rows] == list(asked)
    chosen = (
        jinja2.Environment()
        .from_string((PROJECT / "answers.j2").read_text().split("{# What an update")[0])
        .module.CHOICES
    )
    for name, kind, default, allowed, example, value in rows:
        question = asked[name]
        assert example == name and kind == ("list" if question.get("multiselect") else question["type"])
        if "{{" not in str(question["default"]):
            assert yaml.safe_load(default.strip("`")) == question["default"], name
        if "choices" in question:
            choices = list(chosen[name].values())
            assert re.findall(r"`(\w+)`", allowed) == choices
            assert all(item in choices for item in re.findall(r"\w+", value))


def test_settings_are_found_from_the_working_directory(project: Path, tmp_path: Path):
    """Only in a folder that says it is a project of Weir's, which may say where its settings are."""
    code = "from weir.settings.configuration import PROJECT; print(PROJECT)"
    other = tmp_path / "other"
    (other / "deep").mkdir(parents=True)
    (other / "configs").mkdir()
    (other / "configs" / "dev.yaml").write_text("pipelines: {}")
    (other / "pyproject.toml").write_text("[tool.theirs]\n")

    def folder() -> str:
        command = [sys.executable, "-c", code]
        environment = {"PYTHONSAFEPATH": "1", "PATH": "/usr/bin:/bin"}
        return subprocess.run(
            command, cwd=other / "deep", env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert folder() == str(PROJECT)
    (other / "pyproject.toml").write_text("[tool.weir]\n")
    assert folder() == str(other)
    assert run(project, "weir.cli.main", "plan", "nothing").returncode == 2
    (other / "configs" / "dev.yaml").write_text("theirs: true")
    assert "there is no such key" in run(other, "weir.cli.main", "plan", "nothing").stderr
    (other / "settings").mkdir()
    (other / "settings" / "dev.yaml").write_text("pipelines: {}")
    (other / "pyproject.toml").write_text('[tool.weir]\nconfigs = "settings"\n')
    assert "There is no pipeline 'nothing'" in run(other, "weir.cli.main", "plan", "nothing").stderr
