"""The report of a pipeline's expectations: pages by Great Expectations, and the same verdicts for programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import ConfigurationError
from tests.recovery.small import Bank
from tests.tools.servers import needs
from tests.tools.stages import altered
from tests.weir.gates.test_gates import between, gated
from weir import Epoch, ValueState, agg, expect, on_state, on_table, postgres
from weir.gates import data_docs, restore_gates


@pytest.fixture
def bank(tmp_path) -> Bank:
    """Two epochs; all kinds of gates, which the epochs passed or were warned of."""
    asked = (
        between("amount", 0, 9),
        between("total", 0, 1, of="state", on_failure="warn"),
        between("rows_out", 0, 10, of="figures"),
        expect("ExpectColumnToExist", column="at"),
    )
    bank = gated(tmp_path, *asked, WEIR_CHECKPOINTS__NUM_RETAINED="5")
    restored = (
        on_table("booked", between("amount", 0, 1)),
        on_table("booked", between("amount", 0, 9)),  # the very expectation of a gate
        on_state("accounts", between("rows", 1, 9)),
    )
    bank = Bank(replace(bank.site, pipeline=replace(bank.site.pipeline, on_restore=restored)))
    bank.epochs(1, 2)
    return bank


def test_every_expectation_is_asked_and_shown(bank, monkeypatch):
    report = data_docs.build(bank.site.pipeline, bank.site.settings)
    outcomes = {
        (verdict.of, verdict.stage, verdict.gate.partition("(")[2]): (verdict.passed, verdict.rows)
        for verdict in report.verdicts
    }
    assert outcomes == {
        ("rows", "booked", 'column="amount", max_value=9, min_value=0)'): (True, 20),
        ("rows", "booked", 'column="amount", max_value=1, min_value=0)'): (False, 20),
        ("rows", "booked", 'column="at")'): (True, 20),
        ("state", "accounts", 'column="total", max_value=1, min_value=0)'): (False, 12),
        ("state", "accounts", 'column="rows", max_value=9, min_value=1)'): (True, 12),
        ("figures", "accounts", 'column="rows_out", max_value=10, min_value=0)'): (True, 2),
    }
    assert len(report.verdicts) == 7 and not report.passed and not report.left_out
    assert report.index == bank.site.settings.work_dir / "data_docs" / "small" / "index.html"
    pages = {page.stem: page.read_text() for page in report.index.parent.glob("expectations/*.html")}
    assert pages.keys() == {"table booked", "state accounts", "figures accounts"}
    assert "rows_out" in pages["figures accounts"]
    results = list(report.index.parent.glob("validations/**/*.html"))
    assert len(results) == 3 and all(
        "Failed" in page.read_text() or "Succeeded" in page.read_text() for page in results
    )
    assert report.index.read_text().count("table booked") >= 1

    again = data_docs.build(bank.site.pipeline, bank.site.settings)
    assert len(list(again.index.parent.glob("validations/**/*.html"))) == 3, "pages of earlier reports are gone"
    assert [path.name for path in again.index.parent.parent.iterdir()] == ["small"]
    bank.epochs(3)
    assert bank.registry.head().operators["accounts"].gates[0]["passed"], "gates of runs are as they were"

    monkeypatch.setattr(restore_gates, "SAMPLE_ROWS", 5)
    few = data_docs.build(bank.site.pipeline, bank.site.settings)
    assert {verdict.rows for verdict in few.verdicts if verdict.of != "figures"} == {5}


def test_the_command_says_what_failed_and_where_the_pages_are(bank, weir, tmp_path):
    gates = {
        "accounts": [
            {"expect": "ExpectColumnValuesToBeBetween", "column": "amount", "max_value": 1, "on_failure": "warn"}
        ]
    }
    env = {"WEIR_PIPELINES__SMALL__GATES": json.dumps(gates)}
    ended = weir(bank.site, "report", "small", "--to", str(tmp_path / "docs"), **env)
    assert ended.code == 0 and "failed" in ended.out and "10 of 20 rows" in ended.out.replace("\n", " ")
    assert (tmp_path / "docs" / "index.html").is_file()
    facts = json.loads(weir(bank.site, "report", "small", "--to", str(tmp_path / "docs"), "--json", **env).out)
    assert facts["passed"] is False and facts["verdicts"][0]["unexpected"] == 10


def test_nothing_of_others_is_replaced(bank, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigurationError, match="something else"):
        data_docs.build(bank.site.pipeline, bank.site.settings, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


@pytest.mark.long
def test_what_cannot_be_looked_at_is_said(tmp_path: Path):
    bank = gated(tmp_path, between("nowhere", 0, 9, on_failure="warn"), between("total", 0, 9, of="state"))
    early = data_docs.build(bank.site.pipeline, bank.site.settings)
    assert not early.verdicts and len(early.left_out) == 2 and early.index.is_file()
    sound = Bank(replace(bank.site, pipeline=gated(tmp_path / "other").site.pipeline))
    sound.epochs(1)
    report = data_docs.build(bank.site.pipeline, bank.site.settings)
    assert [verdict.of for verdict in report.verdicts] == ["state"]
    assert len(report.left_out) == 1 and "nowhere" in report.left_out[0]
    for sink in (None, postgres.sink("booked")):  # of the name of a table that is there
        stages = (replace(bank.site.pipeline.stages[0], sink=sink),)
        nowhere = data_docs.build(replace(bank.site.pipeline, stages=stages), bank.site.settings)
        assert "kept in no table" in nowhere.left_out[0]


def test_pages_judge_large_numbers_exactly_beside_a_null(tmp_path):
    big = 2**60
    bank = gated(
        tmp_path,
        expect("ExpectColumnValuesToBeInSet", column="amount", value_set=[big + 1]),
        between("amount", 0, 2**61),
    )
    bank.site.landing.mkdir(parents=True)
    rows = {"id": ["a", "b", "c"], "at": [1, 2, 3], "amount": pa.array([big + 1, None, big + 1], pa.int64())}
    pq.write_table(pa.table(rows), bank.site.landing / "00001.parquet")
    restored = (
        on_table(
            "booked",
            expect("ExpectColumnSumToBeBetween", column="amount", min_value=2 * big + 2, max_value=2 * big + 2),
        ),
        on_table("booked", expect("ExpectColumnValuesToBeInSet", column="amount", value_set=[big])),
    )
    bank = Bank(replace(bank.site, pipeline=replace(bank.site.pipeline, on_restore=restored)))
    assert len(bank.epochs()) == 1
    report = data_docs.build(bank.site.pipeline, bank.site.settings)
    assert [verdict.passed for verdict in sorted(report.verdicts, key=lambda verdict: verdict.gate)] == [
        True,
        True,
        False,
        True,
    ]
    assert not report.left_out


OUTSIDE = re.compile(
    r"""(?:src|href|action)\s*=\s*["']?\s*(?:https?:)?//|url\(\s*["']?(?:https?:)?//|@import[^;]*//""", re.IGNORECASE
)


def test_the_pages_load_nothing_from_elsewhere_and_what_they_load_is_there(bank):
    site = data_docs.build(bank.site.pipeline, bank.site.settings).index.parent
    pages = list(site.rglob("*.html"))
    assert len(pages) >= 7
    for page in pages:
        text = page.read_text()
        assert not OUTSIDE.search(text), page
        loaded = re.findall(r"""<(?:script|img|link)\b[^>]*?\b(?:src|href)=["']([^"'#]+)["']""", text)
        assert sum(name.endswith(".js") for name in loaded) >= 9 and sum(name.endswith(".css") for name in loaded) >= 6
        assert [name for name in loaded if not (page.parent / name).is_file()] == []
        assert "integrity=" not in text and "crossorigin=" not in text
    for style in site.rglob("*.css"):
        assert not OUTSIDE.search(style.read_text()), style
    assert (site / "static/vendor/licenses/jquery.txt").is_file()


SCRIPT = "<script>document.documentElement.setAttribute('data-pwned','ran')</script>"
COLUMN = "<script>1</script>"
IMAGE = """'"><img src=x onerror="document.documentElement.setAttribute('data-pwned','ran')">"""


def books_html(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """As the small pipeline does, with a column whose name is HTML."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    return rows.select("id", "at", "amount", (pl.col("id") + IMAGE).alias(COLUMN))


@pytest.fixture
def hostile(tmp_path) -> data_docs.DataDocs:
    """Pages about rows of which a value, a key and the name of a column are HTML."""
    asked = [
        expect("ExpectColumnValuesToBeInSet", column="id", value_set=["ok", SCRIPT], on_failure="warn"),
        expect("ExpectColumnDistinctValuesToBeInSet", column="id", value_set=["ok"], on_failure="warn"),
        expect("ExpectColumnPairValuesToBeEqual", column_A="id", column_B=COLUMN, on_failure="warn"),
        expect("ExpectTableColumnsToMatchSet", column_set=["a"], on_failure="warn"),
        expect("ExpectColumnValuesToBeNull", column=COLUMN, on_failure="warn"),
    ]
    bank = gated(tmp_path, *asked)
    stages = (altered(bank.site.pipeline.stages[0], function=books_html),)
    state = on_state("accounts", expect("ExpectColumnValuesToBeInSet", column="id", value_set=["ok"]))
    bank = Bank(replace(bank.site, pipeline=replace(bank.site.pipeline, stages=stages, on_restore=(state,))))
    bank.site.landing.mkdir(parents=True)
    rows = pa.table({"id": [SCRIPT, IMAGE, "ok"], "at": [1, 2, 3], "amount": [4, 5, 6]})
    pq.write_table(rows, bank.site.landing / "1.parquet")
    bank.epochs()
    return data_docs.build(bank.site.pipeline, bank.site.settings)


def test_a_value_is_a_text_on_the_pages(hostile):
    shown = 0
    for page in hostile.index.parent.rglob("*.html"):
        text = page.read_text()
        assert SCRIPT not in text and COLUMN not in text and "<img src=x" not in text
        assert "&amp;lt;" not in text, "it is escaped once"
        (policy,) = re.findall(r'<head><meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
        (nonce,) = re.findall(r"script-src 'nonce-([\w-]{20,})'", policy)
        assert re.findall(r"<script(?! nonce=\"" + nonce + '")', text) == []
        shown += text.count("&lt;script&gt;")
    assert shown >= 5


def test_no_script_of_a_value_runs_in_a_browser(hostile):
    browser = needs("chromium", "chromium")
    for page in hostile.index.parent.rglob("*.html"):
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"]
        seen = subprocess.run(
            [browser, *options, page.as_uri()], capture_output=True, text=True, timeout=300, check=True
        )
        assert "</html>" in seen.stdout and 'data-pwned="ran"' not in seen.stdout, page
    # Were a value not escaped, the page's policy would not let it run.
    page.write_text(page.read_text().replace("<body", f"<div>{SCRIPT}{IMAGE}</div><body"))
    seen = subprocess.run([browser, *options, page.as_uri()], capture_output=True, text=True, timeout=300, check=True)
    assert "<div><script>" in seen.stdout and 'data-pwned="ran"' not in seen.stdout


@pytest.mark.long
def test_the_pages_can_be_read_without_a_network(bank):
    """In a browser that has none: tables, styles and icons are there, and nothing is asked of anybody."""
    from playwright.sync_api import sync_playwright

    report = data_docs.build(bank.site.pipeline, bank.site.settings)
    asked: list[str] = []
    errors: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(needs("chromium", "chromium")), args=["--no-sandbox", "--disable-gpu"]
        )
        context = browser.new_context(offline=True)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("requestfailed", lambda request: errors.append(f"failed: {request.url}"))
        page.goto(report.index.as_uri())
        page.get_by_role("link", name="table booked").first.wait_for()
        assert page.evaluate("getComputedStyle(document.querySelector('.navbar')).display") == "flex"
        shoot(page, "index")
        for result in sorted(report.index.parent.glob("validations/**/*.html")):
            page.goto(result.as_uri())
            assert page.get_by_text("Expectation").first.is_visible()
            assert page.evaluate("typeof $ === 'function' && typeof vegaEmbed === 'function'")
            shoot(page, f"result-{len(asked)}")
        browser.close()
    assert errors == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def shoot(page, name: str) -> None:
    """Keep a picture of a page where PAGES_SHOTS names a directory."""
    if directory := os.environ.get("PAGES_SHOTS"):
        page.screenshot(path=str(Path(directory) / f"{name}.png"), full_page=True)
