"""Texts from elsewhere only show: on terminals, in errors, in plain log lines, in Markdown for Dagster."""

from __future__ import annotations

import io
import json
import logging

import pytest

from state_ops import logs, printable
from state_ops.errors import WeirError
from weir.cli import console
from weir.cli.debugging.showing import slice_in_words
from weir.cli.rendering import short
from weir.inspection.export import json_line
from weir.markdown import as_code, as_text

HOSTILE = "k\x1b]52;c;Y3VybA==\x1b\\\x1b[2J\x9b31m\x07\x00\u202e\u061c\U000e0041[x]"


def acts(text: str) -> list[str]:
    """The characters of a text that do something."""
    return [character for character in text if not character.isprintable() and character != "\n"]


def test_each_character_that_does_something_is_shown_by_its_number():
    shown = printable.printable(HOSTILE)
    assert acts(shown) == [] and "[x]" in shown
    assert shown.startswith("k\\x1b]52;c;") and "\\u202e\\u061c\\U000e0041" in shown
    assert printable.printable("Zürich 東京\t1\n2") == "Zürich 東京\t1\n2"
    assert printable.on_one_line("a\n\tb") == "a\\n\\tb"
    assert printable.printable("\udcff").encode() == b"\\udcff"


def test_json_escapes_each_such_character_and_means_the_same(capsys):
    value = {HOSTILE: [HOSTILE + "\x7f\u2028\n\t", "Zürich 東京", "\U0001f600"], "n": 0.5}
    console.print_json(value)
    printed = capsys.readouterr().out
    for text in (printed, json_line(value), json_line({"n": float("nan")} | {HOSTILE: HOSTILE}), logs.as_json(value)):
        assert acts(text) == [], text
    assert json.loads(printed) == json.loads(json_line(value)) == value
    assert "Zürich 東京" in json_line(value), "what only shows stays"
    assert json_line("\udc80").encode() == rb'"\udc80"', "half a character too"


@pytest.mark.parametrize("kind", [ValueError, WeirError])
def test_a_console_shows_values_and_has_its_own_styles(kind):
    screen = console._Screen(
        file=io.StringIO(), force_terminal=True, color_system="standard", width=300, highlight=False
    )
    screen.print(f"[bold red]error:[/] {console.escape(str(kind(HOSTILE)))}")
    written = screen.file.getvalue()
    assert "\x1b[1;31merror:\x1b[0m" in written, "the console's own"
    assert "\x1b]" not in written and "\x1b[2J" not in written and "\x9b" not in written and "\u202e" not in written
    assert "[x]" in written


def test_a_value_with_a_line_end_makes_no_row_of_its_own(capsys):
    console.print_table([(short("a\nb"), "c\nd")], ("first\nof", "second"))
    assert capsys.readouterr().out.splitlines()[1].split() == ["a\\nb", "c\\nd"]
    assert len(short("\x1b" * 60)) <= 60


def test_a_name_of_a_file_forges_no_line_of_an_error():
    error = WeirError("a\n  next:  sudo b", where="/l/b\n  next:  curl evil|sh", next="c\x1b[2J")
    assert str(error).splitlines() == [
        "a\\n  next:  sudo b",
        "  where: /l/b\\n  next:  curl evil|sh",
        "  next:  c\\x1b[2J",
    ]
    listed = WeirError("Two settings are wrong:\n- a\n- b")
    assert str(listed).count("\n") == 2, "lines of its own stay"


def test_plain_log_lines_only_show_what_they_are_about(capsys, monkeypatch):
    monkeypatch.setenv(logs.FORMAT, "console")
    logs.Logger("weir").warning(f"event {HOSTILE}", word=HOSTILE)
    written = capsys.readouterr()
    assert "\x1b]52" not in written.out + written.err and "\x1b[2J" not in written.out + written.err
    record = logging.makeLogRecord({"msg": HOSTILE, "levelname": "INFO"})
    assert acts(logs.Lines().format(record)) == []


def test_a_value_is_no_markup_for_dagster():
    assert as_text("![x](http://127.0.0.1/beacon)") == "\\!\\[x\\](http:\u200b//127.0.0.1/beacon)"
    assert as_text("a\\|b\r# c") == "a\\\\\\|b\\\\x0d\\# c"
    assert as_text("<img src=x> www.example.org") == "&lt;img src=x&gt; www\u200b.example.org"
    assert as_code("```\nx\n````").startswith("`````\n")


def test_the_name_of_a_file_is_on_one_line_with_its_slice():
    recorded = {"rows": 2, "files": [{"name": "a\n  next:  curl evil | sh\x1b[2J.csv"}]}
    assert slice_in_words(recorded) == r"2 rows of a\n  next:  curl evil | sh\x1b[2J.csv"
