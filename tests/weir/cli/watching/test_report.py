"""`weir report --html`: one file about an incident, from a pipeline to which real things have happened."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import polars as pl
import pytest

from state_ops import extras
from state_ops.errors import GateError, StageError
from tests.recovery.small import Bank
from tests.tools.servers import needs
from tests.tools.stages import altered
from tests.weir.gates.test_gates import between, gated
from tests.weir.replay.test_debug import digests
from weir import Epoch, ValueState, agg
from weir.cli.watching import timeline
from weir.cli.watching.monitor import Watched
from weir.execution.in_process import InMemoryExecutor
from weir.run import maintenance

EVIL = "<script>alert('owned')</script> & <img src=x>"
SECRET = "s3cr3t-of-the-server"
_VOID = {"meta", "br", "hr", "img", "link", "input"}


class Failing(InMemoryExecutor):
    """Whose stages raise what an author's code may raise."""

    def run(self, *_: object, **__: object):
        raise StageError(
            f"accounts raised ValueError: {EVIL}", where="password=" + SECRET, next="Correct the function."
        )


class Page(HTMLParser):
    """A page's tags, attributes and text; what is not closed in order fails the test."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "action")]
        assert not [name for name, _ in attrs if name.startswith("on")], "no script in attributes either"
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] != "style":
            self.words += data + "\n"


@pytest.fixture(scope="module")
def bank(tmp_path_factory) -> Bank:
    """Six epochs of three coordinators, a savepoint, a rewind, and a run that failed."""
    bank = Bank.at(tmp_path_factory.mktemp("incident"), WEIR_CHECKPOINTS__NUM_RETAINED="20")
    bank.epochs(1, 2, 3)
    maintenance.savepoint(bank.site.pipeline, bank.site.settings, "before-upgrade", "test", 60)
    bank.epochs(4, 5)
    with pytest.raises(StageError):
        bank.epochs(6, executor=Failing())
    return bank


def test_the_page_says_what_is_wrong_and_what_happened_and_shows_it(bank, weir, tmp_path):
    before = digests(bank.site.root)
    file = tmp_path / "incident.html"
    code, said, _ = weir(f"report small --html {file}")
    assert code == 0 and str(file) in said and "the last run failed" in said
    page = Page(file.read_text())
    assert "StageError: accounts raised ValueError" in page.words and "weir run small" in page.words
    for event in ("run failed", "restart", "savepoint", "goes on after generation 1"):
        assert event in page.words, event
    for part in ("Rows in and out", "How long input waited", "Duration by phase", "State by stage", "Uploaded"):
        assert part in page.words, part
    assert page.tags.count("svg") == page.tags.count("figure") >= 7
    assert "before-upgrade" in page.words and "booked" in page.words and "as on this host" in page.words
    assert digests(bank.site.root) == before, "it wrote something"


def test_what_others_have_said_is_escaped_and_secrets_are_left_out(bank, weir, tmp_path, monkeypatch):
    file = tmp_path / "incident.html"
    params = {"landing": str(bank.site.landing), "password": SECRET}  # where none belongs, and some people have them
    monkeypatch.setenv("WEIR_PIPELINES__SMALL__PARAMS", json.dumps(params))
    assert weir(f"report small --html {file}")[0] == 0
    text = file.read_text()
    page = Page(text)
    assert "script" not in page.tags and "img" not in page.tags
    assert "&lt;script&gt;alert" in text and EVIL in page.words
    assert SECRET not in text and "password=***" in page.words
    # It needs nothing from elsewhere.
    assert [link for link in page.links if not link.startswith("#")] == []
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert "url(http" not in text and "@import" not in text


def test_without_matplotlib_the_tables_are_there(weir, tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda library: library != "matplotlib")
    file = tmp_path / "incident.html"
    assert weir(f"report small --html {file}")[0] == 0
    page = Page(file.read_text())
    assert "svg" not in page.tags and "Pictures need matplotlib" in page.words
    assert page.tags.count("figure") >= 7 and page.tags.count("table") >= 11


def test_what_was_before_is_left_out(weir, tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda _: False)  # drawing takes a second
    file = tmp_path / "incident.html"
    facts = json.loads(weir(f"report small --html {file} --last 2 --json")[1])
    assert [epoch["id"] for epoch in facts["epochs"]] == [4, 5]
    assert "savepoint" not in {event["kind"] for event in facts["events"]}
    facts = json.loads(weir(f"report small --html {file} --since 2h --json")[1])
    assert len(facts["epochs"]) == 5 and facts["events"][0]["kind"] == "run failed"
    facts = json.loads(weir(f"report small --html {file} --since 2100-01-01 --json")[1])
    assert facts["epochs"] == [] and facts["events"] == [] and facts["problems"]
    assert "There is no epoch in this time" in Page(file.read_text()).words


def hands_on(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Other code than the stage had."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    return rows.select("id", "at", "amount").sort("at")


def test_a_stage_with_other_code_is_an_event(tmp_path):
    bank = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="9")
    bank.epochs(1)
    bank.epochs(2)
    other = replace(bank.site.pipeline, stages=(altered(bank.site.pipeline.stages[0], function=hands_on),))
    Bank(replace(bank.site, pipeline=other)).epochs(3)
    look = Watched("small", bank.site.settings, closely=True).look()
    assert [event.what for event in timeline.events(look, [], []) if event.kind == "code"] == [
        "epoch 3, after epoch 2: other code in accounts"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--html a.html --since yesterday", "is no time"),
        ("--html a.html --since 99999999999d", "is no time"),
        ("--html a.html --to docs", "Give one of them"),
        ("--since 6h", "Add --html FILE"),
        ("--html no/such/folder/a.html", "cannot be written"),
    ],
)
def test_what_cannot_be_made_is_refused(weir, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extras, "is_installed", lambda _: False)  # drawing takes a second
    code, _, said = weir(f"report small {arguments}")
    assert code == 2 and message in said
    assert list(tmp_path.iterdir()) == []


def test_of_a_pipeline_that_never_ran(tmp_path, weir, monkeypatch):
    fresh = Bank.at(tmp_path / "fresh")
    fresh.land(1)
    for name, value in fresh.site.env.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "incident.html"
    assert weir(f"report small --html {file}")[0] == 0
    page = Page(file.read_text())
    assert "nobody runs it, and 1 file waits" in page.words and "There is no epoch in this time" in page.words


@pytest.mark.long  # Great Expectations is loaded
def test_rows_and_keys_that_a_gate_refused_are_counted_and_not_shown(tmp_path, weir, monkeypatch):
    held = gated(tmp_path, between("amount", 0, 1))
    with pytest.raises(GateError, match="k1"):  # the run's own error shows them
        held.epochs(1, 2)
    for name, value in held.site.env.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "incident.html"
    assert weir(f"report small --html {file}")[0] == 0
    page = Page(file.read_text())
    assert "(10 of 10 rows)" in page.words and "held" in page.words
    assert "k1" not in page.words and "only-2" not in page.words


def test_values_that_a_restore_did_not_expect_are_not_shown(tmp_path, weir, monkeypatch):
    odd = Bank.at(tmp_path / "site")
    odd.epochs(987_654)
    expected = [{"state": "accounts", "expect": "ExpectColumnMaxToBeBetween", "column": "total", "max_value": 2}]
    for name, value in {**odd.site.env, "WEIR_PIPELINES__SMALL__ON_RESTORE": json.dumps(expected)}.items():
        monkeypatch.setenv(name, value)
    code, _, said = weir("restore small")
    assert code == 1 and "987654" in said
    file = tmp_path / "incident.html"
    assert weir(f"report small --html {file}")[0] == 0
    page = Page(file.read_text())
    assert page.words.count("It does not hold what is expected of it") == 2 and "987654" not in page.words


@pytest.mark.long
def test_in_a_browser_it_is_readable_light_and_dark_and_at_the_width_of_a_phone(weir, tmp_path):
    """Without a network and without scripts; REPORT_SHOTS names a directory in which pictures are kept."""
    from playwright.sync_api import sync_playwright

    file = tmp_path / "incident.html"
    weir(f"report small --html {file}")
    asked: list[str] = []
    with sync_playwright() as playwright:
        chromium = str(needs("chromium", "chromium"))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, width, scheme in (("light", 1280, "light"), ("dark", 1280, "dark"), ("phone", 375, "light")):
            context = browser.new_context(
                offline=True, java_script_enabled=False, color_scheme=scheme, viewport={"width": width, "height": 900}
            )
            page = context.new_page()
            page.on("request", lambda request: asked.append(request.url))
            page.goto(file.as_uri())
            assert page.get_by_role("heading", name="What is wrong").is_visible()
            boxes = [box for box in (each.bounding_box() for each in page.locator("figure").all()) if box is not None]
            assert boxes and all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
            body = page.locator("body").bounding_box()
            assert body is not None and body["width"] <= width
            if directory := os.environ.get("REPORT_SHOTS"):
                page.screenshot(path=str(Path(directory) / f"{name}.png"), full_page=True)
            context.close()
        browser.close()
    assert asked and all(url.startswith("file:") for url in asked)
