"""Each playbook page is done as it stands there: its commands are run, what it shows is compared, the tables are
replayed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
import yaml

from tests.playbooks import page as reading
from tests.playbooks.actions import act
from tests.playbooks.project import Project
from tests.tools.sampling import sampled
from weir.cli.main import app
from weir.settings.configuration import PROJECT

_SHORT = {"disk-full"}
_SAID_BY_OTHERS = {"Unable to reach the user code server", "file is not a database", "No space left on device"}


@pytest.mark.parametrize("page", sampled(reading.pages(), lambda page: page.stem in _SHORT), ids=lambda page: page.stem)
def test_a_page_does_what_it_says(page: Path, project: Project):
    before, steps = "", list(reading.steps(page))
    if not steps:  # a page about programs of others
        return
    for step in steps:
        where = f"{page.name}:{step.line}"
        elsewhere = before if step.kind == "text" else ""
        before = step.text if step.kind == "act" and step.text.startswith("by ") else ""
        if before or elsewhere:  # compared by a test of its own
            continue
        if step.kind == "act":
            act(project, step.text)
        elif step.kind == "bash":
            code, shown = project.bash(step.text)
            assert code == step.code, f"{where}: exit code {code}, not {step.code}, of\n{step.text}\n{shown}"
        elif step.kind == "text":
            lacking = reading.missing(step.text, project.shown)
            assert lacking is None, f"{where}: it was not said: {lacking}\nSaid was:\n{project.shown}"
        else:
            project.configure(yaml.safe_load(step.text))
    project.assert_exact()


@pytest.mark.parametrize("page", reading.pages(), ids=lambda page: page.stem)
def test_all_pages_have_the_same_headings_and_fit_two_screens(page: Path):
    text = page.read_text()
    assert tuple(re.findall(r"^## (.*)$", text, flags=re.MULTILINE)) == reading.HEADINGS
    seen = re.sub(r"^<!--.*-->\n", "", text, flags=re.MULTILINE)
    assert len(seen.splitlines()) <= 120
    why = text.split("## Why this works")[1].strip()
    assert 1 <= len(re.findall(r"[.!?](?:\s|$)", why)) <= 3, "two sentences"


def test_every_page_is_in_the_index_and_every_alert_leads_to_one():
    text = reading.INDEX.read_text()
    linked = re.findall(r"\]\((?!\.\.)([\w-]+\.md)\)", text)
    assert sorted(linked) == [page.name for page in reading.pages()]
    rules = yaml.safe_load((PROJECT / "infra" / "prometheus" / "alerts.yml").read_text())
    alerts = {rule["alert"]: rule["annotations"]["runbook"] for group in rules["groups"] for rule in group["rules"]}
    everywhere = "\n".join(page.read_text() for page in [reading.INDEX, *reading.pages()])
    named = set(re.findall(r"\bWeir[A-Z]\w+", everywhere))
    assert named <= alerts.keys(), "alerts that there are not"
    assert alerts.keys() <= set(re.findall(r"\bWeir[A-Z]\w+", text)), "alerts that the index does not know"
    for alert, page in alerts.items():
        assert alert in (PROJECT / page).read_text(), f"{alert} leads to {page}, which does not know it"


@pytest.mark.parametrize("page", [reading.INDEX, *reading.pages()], ids=lambda page: page.stem)
def test_links_lead_somewhere_and_commands_in_the_text_exist(page: Path):
    text = page.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    command_group = typer.main.get_command(app)
    for words in re.findall(r"`(?:WEIR_\w+=\S+ )?weir ([^`]+)`", text):
        command, *more = words.split()
        assert command in command_group.commands, words
        options = {
            option
            for param in command_group.commands[command].params
            for option in (*param.opts, *param.secondary_opts)
        }
        if command != "state":
            assert {word for word in more if word.startswith("--")} <= options, words


def test_commands_that_a_page_only_mentions_are_run_on_some_page():
    run = "\n".join(step.text for page in reading.pages() for step in reading.steps(page) if step.kind == "bash")
    for page in reading.pages():
        for words in re.findall(r"`weir ([^`]+)`", page.read_text()):
            command = " ".join(["weir", *words.split()[:1]])
            assert command in run, f"{page.name}: {words}"


def test_what_pages_quote_in_passing_is_said_by_the_code():
    """Messages in italics, with `...` for what differs; those in blocks are compared with what was really said."""
    folders = ("assets", "pipelines", "weir", "state_ops")
    code = "\n".join(path.read_text() for folder in folders for path in sorted((PROJECT / folder).rglob("*.py")))
    code = re.sub(r'"\s*\n\s*(?:else )?f?"', "", code)  # texts that stand in several lines
    code = re.sub(r"\{[^{}\n]*\}", "\0", code)  # what is filled in
    quotes = 0
    for page in [reading.INDEX, *reading.pages()]:
        for quote in re.findall(r"(?<![*\w])\*([^*\n][^*]*)\*(?![*\w])", page.read_text()):
            for part in filter(None, (" ".join(part.split()).strip(" .") for part in quote.split("..."))):
                assert part in code or part in _SAID_BY_OTHERS, f"{page.name}: {part}"
                quotes += 1
    assert quotes > 15
