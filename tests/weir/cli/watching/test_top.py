"""`weir top` on a real terminal, beside a real coordinator that is killed; and what it asks of storage."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from state_ops.coordination import lease
from tests.recovery.small import Bank, until
from tests.tools.sampling import sampled
from tests.tools.terminal import Terminal
from tests.weir.replay.test_debug import digests
from weir.cli.watching import figures, screen
from weir.cli.watching.monitor import Monitor, Row, seen
from weir.cli.watching.pipeline_look import PipelineLook, Watched
from weir.cli.watching.problems import WRONG, Problem
from weir.cli.watching.screen import ScreenChoice
from weir.operations import forks
from weir.settings import configuration as settings
from weir.settings.configuration import PROJECT

COORDINATOR = """
import sys
from pathlib import Path
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run
from tests.recovery.small import Bank
bank = Bank.at(Path(sys.argv[1]), WEIR_CHECKPOINTS__NUM_RETAINED="5")
for report in run(bank.site.pipeline, bank.site.settings, RunOptions(interval=0.2), InMemoryExecutor()):
    pass
"""


@pytest.fixture
def bank(tmp_path: Path) -> Bank:
    return Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="5")


def environment(bank: Bank, **more: str) -> dict[str, str]:
    return {**os.environ, **bank.site.env, "PYTHONPATH": str(PROJECT), **more}


@pytest.fixture
def coordinator(bank: Bank) -> Iterator[subprocess.Popen[bytes]]:
    """A coordinator in a process of its own, which lives until it is killed."""
    bank.land(1, 2)
    command = [sys.executable, "-c", COORDINATOR, str(bank.site.root)]
    process = subprocess.Popen(command, cwd=PROJECT, env=environment(bank))
    yield process
    process.kill()
    process.wait(30)


def test_a_page_of_a_terminal_shows_a_coordinator_that_lives_and_that_it_was_killed(bank, coordinator):
    command = [sys.executable, "-m", "weir.cli.main", "top", "small", "--every", "0.5"]
    terminal = Terminal(command, environment(bank, NO_COLOR="1"))
    try:
        terminal.until(lambda page: " running " in page and " 2 " in page)
        bank.land(3)
        terminal.until(lambda page: "> small" in page and " 3 " in page)  # the epoch that followed, by itself
        coordinator.send_signal(signal.SIGKILL)
        coordinator.wait(30)
        page = terminal.until(lambda page: "DEAD" in page)
        before = digests(bank.site.root)
        assert f"!! small: its coordinator died: process {coordinator.pid}" in page
        assert "next: weir run small" in page and "1 wrong" in page
        assert len(page.splitlines()) <= 24 and max(map(len, page.splitlines())) <= 80

        terminal.press("\r")
        page = terminal.until(lambda page: "SINK" in page)
        assert all(word in page for word in ("EPOCH", "STAGE", "accounts", "booked", "esc back"))
        terminal.press("\x1b", "[", "B")  # an arrow whose bytes come one by one is no escape
        terminal.press(" ")
        page = terminal.until(lambda page: "PAUSED" in page)
        assert "STAGE" in page
        terminal.press("\x1b")
        terminal.until(lambda page: "STATE" in page and "STAGE" not in page)
        terminal.press("q")
        assert terminal.ended() == 0
    finally:
        terminal.close()
    assert terminal.written.rstrip().endswith("\x1b[?25h") or "\x1b[?1049l" in terminal.written[-200:]
    assert "\x1b[31m" not in terminal.written and ";31m" not in terminal.written, "NO_COLOR"
    assert digests(bank.site.root) == before, "it wrote something"


@pytest.mark.parametrize("how", ["ctrl-c", pytest.param("sigterm", marks=pytest.mark.long)])
def test_it_ends_cleanly_when_it_is_interrupted(bank, how):
    bank.epochs(1)
    terminal = Terminal([sys.executable, "-m", "weir.cli.main", "top"], environment(bank))
    try:
        terminal.until(lambda page: "small" in page)
        if how == "ctrl-c":
            terminal.press("\x03")
        else:
            terminal.signal(signal.SIGTERM)
        assert terminal.ended() == 0
        assert "\x1b[?1049l" in terminal.written and "Traceback" not in terminal.written
        assert "interrupted" not in terminal.written, "no epoch was in flight here"
    finally:
        terminal.close()


# -- without a terminal


def test_without_a_terminal_the_page_is_printed_once(bank, weir):
    bank.epochs(1, 2)
    code, page, hint = weir("top small")
    assert code == 0 and "idle" in page and "accounts" in page and "--once" in hint
    assert "\x1b" not in page
    assert weir("top small --once")[2] == ""


def test_a_pipeline_that_cannot_be_read_is_named_and_the_others_are_shown(bank, weir, monkeypatch):
    bank.epochs(1)
    monkeypatch.setenv("WEIR_PIPELINES__LOST__OBJECT", "no.such.module:pipeline")
    code, printed, _ = weir("top lost small --json")
    lost, small = json.loads(printed)["pipelines"]
    assert code == 0 and lost["state"] == "UNREAD" and "no.such.module" in lost["error"]
    assert small["checkpoint"]["id"] == 1 and small["lag"] == {"landing": 0} and small["problems"] == []
    assert [epoch["rows_in"] for epoch in small["epochs"]] == [10]
    assert [(stage["uid"], stage["rows_out"]) for stage in small["stages"]] == [("accounts", 10)]
    assert [(sink["name"], sink["newest"], sink["behind"]) for sink in small["sinks"]] == [("booked", 1, 0)]


def test_a_name_that_is_not_configured_is_refused(bank, weir):
    code, _, message = weir("top smal")
    assert code == 2 and "'smal'" in message


# -- what is asked of storage


def asked(watched: Watched) -> int:
    """How many requests a look makes."""
    watched.open().storage.request_counts.take()
    watched.look()
    counts = watched.open().storage.request_counts.take()
    return sum(number for name, number in counts.items() if name.startswith("requests_"))


@pytest.mark.parametrize("retained", sampled([2, 14]))
def test_a_look_asks_for_a_dozen_objects_however_many_checkpoints_are_retained(tmp_path, retained):
    bank = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED=str(retained))
    bank.epochs(*range(1, retained + 2))
    watched = Watched("small", bank.site.settings, closely=True)
    watched.look()
    assert asked(watched) <= 12
    bank.epochs(retained + 2)
    assert asked(watched) <= 24, "with what a run of one epoch has committed"
    assert asked(watched) <= 12


def test_sources_rest_for_twenty_times_as_long_as_it_took_to_look_at_them(bank, monkeypatch):
    bank.epochs(1)
    watched = Watched("small", bank.site.settings, closely=True)
    (reader,) = watched.open().sources.values()
    looks, clock = [], [0.0]
    look = reader.look
    monkeypatch.setattr(reader, "look", lambda position: looks.append(clock[0]) or time.sleep(0.05) or look(position))
    for clock[0] in (0.0, 0.5, 0.9, 100.0, 100.5):
        watched.look(lambda: clock[0])
    assert looks == [0.0, 100.0]


def test_storage_that_does_not_answer_leaves_the_last_values_and_holds_up_no_other(bank, monkeypatch):
    both = settings.load({
        **bank.site.env,
        "WEIR_PIPELINES__SUCCESSOR__OBJECT": "tests.recovery.small:successor",
        "WEIR_PIPELINES__SUCCESSOR__PARAMS": bank.site.env["WEIR_PIPELINES__SMALL__PARAMS"],
    })  # fmt: skip
    bank.epochs(1)
    monitor = Monitor(["small", "successor"], both)

    def refresh(patience: float, seconds: float) -> None:
        monitor.begin()
        monitor.wait(seconds)
        monitor.collect(patience)

    refresh(10, 30)
    assert monitor.rows["small"].state == "idle" and monitor.rows["small"].error is None
    place = bank.site.storage / lease.LEASE
    held = place.read_bytes()
    place.unlink()
    os.mkfifo(place)  # whoever reads it waits until somebody writes
    refresh(0.0, 0.5)
    small, successor = monitor.rows["small"], monitor.rows["successor"]
    assert small.look is not None and small.look.head is not None and small.look.head.id == 1
    assert "has not answered" in small.problems[0].what and small.problems[0].severity == WRONG
    assert successor.error is None
    released = os.open(place, os.O_WRONLY)
    place.unlink()
    place.write_bytes(held)
    os.close(released)

    def well() -> bool:
        refresh(10, 1)
        return monitor.rows["small"].error is None

    until(well)
    assert monitor.rows["small"].problems == []


def test_pipelines_appear_and_vanish_with_the_configuration(bank, monkeypatch):
    for name, value in bank.site.env.items():
        monkeypatch.setenv(name, value)
    monitor = Monitor([], bank.site.settings)
    monitor.begin()
    assert "small" in monitor.rows and "successor" not in monitor.rows
    monkeypatch.setenv("WEIR_PIPELINES__SUCCESSOR__OBJECT", "tests.recovery.small:successor")
    monitor.begin()
    assert "successor" in monitor.rows and monitor.trouble is None
    monkeypatch.setenv("WEIR_EPOCH__MAX_FILES", "none")  # somebody is editing it
    monitor.begin()
    assert "successor" in monitor.rows and "configuration" in str(monitor.trouble)
    monkeypatch.setenv("WEIR_EPOCH__MAX_FILES", "1")
    monkeypatch.delenv("WEIR_PIPELINES__SUCCESSOR__OBJECT")
    monitor.begin()
    monitor.wait(30)
    monitor.collect(10)
    assert "successor" not in monitor.rows and monitor.rows["small"].error is None


def test_a_branch_of_the_same_name_as_one_that_was_dropped_has_its_epochs_alone(bank):
    bank.epochs(1, 2, 3)
    pipeline, of = bank.site.pipeline, bank.site.settings
    monitor = Monitor(["small@try"], of)
    for base, expected in ((1, [1, 2, 3]), (3, [3])):
        forks.fork(pipeline, of, "try", base)
        Bank(replace(bank.site, pipeline=forks.branched(pipeline, of, "try"))).epochs()
        monitor.begin()
        monitor.wait(30)
        monitor.collect(10)
        assert [epoch.id for epoch in monitor.rows["small@try"].epochs] == expected
        forks.drop(pipeline, of, "try")


# -- how it looks


def drawn(rows: list[Row], page: ScreenChoice, width: int = 80, height: int = 24) -> list[str]:
    console = screen.console(file=io.StringIO(), width=width, height=height, force_terminal=True)
    console.print(screen.shown(rows, page, width, height, 5.0, None))
    return io.StringIO(console.file.getvalue()).read().splitlines()  # type: ignore[attr-defined]


def plain(lines: list[str]) -> list[str]:
    from rich.text import Text

    return [Text.from_ansi(line).plain for line in lines]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 12), (132, 43), (40, 8)])
def test_a_page_fits_the_terminal_and_the_chosen_pipeline_is_on_it(width, height):
    problems = [Problem(WRONG, "it is broken " * 20, "mend it " * 30, "docs/playbooks/disk-full.md")]
    rows = [
        Row(f"pipeline_with_a_long_name_{number:02}", PipelineLook(60.0), problems=problems) for number in range(30)
    ]
    for selected in (None, rows[0].name, rows[17].name, rows[29].name):
        page = ScreenChoice(selected)
        lines = plain(drawn(rows, page, width, height))
        assert len(lines) <= height and max(map(len, lines)) <= width
        assert sum(line.startswith("> ") for line in lines) == 1
    lines = plain(drawn(rows, ScreenChoice(rows[3].name, detail=True), width, height))
    assert len(lines) <= height and max(map(len, lines)) <= width


def test_what_an_error_says_cannot_write_to_the_terminal():
    evil = Problem(WRONG, "it said \x1b[2J\x1b]0;owned\x07 and [bold]more[/]\r\nthan that", "", None)
    text = "\n".join(drawn([Row("small", PipelineLook(60.0), problems=[evil])], ScreenChoice()))
    assert "\x1b[2J" not in text and "\x1b]" not in text and "\x07" not in text
    assert "[bold]more[/]" in text


@pytest.mark.parametrize("name", ["[red]", "a[/b]", ":red_heart:"])
def test_brackets_and_colons_in_names_are_shown_as_they_are(bank, name):
    bank.epochs(1)
    row = seen(Watched("small", bank.site.settings, closely=True))
    evil = replace(
        row,
        name=name,
        epochs=[replace(row.epochs[0], trigger=name)],
        stages=[replace(row.stages[0], uid=name)],
        sinks=[replace(row.sinks[0], name=name, kind=name)],
    )
    assert "\n".join(plain(drawn([evil], ScreenChoice(name, detail=True), 120, 40))).count(name) == 5


def test_a_pipeline_whose_figures_make_no_sense_takes_no_other_from_the_page(bank, monkeypatch):
    bank.epochs(1)
    monitor = Monitor(["small"], bank.site.settings)
    monkeypatch.setattr(figures, "of_stages", lambda *_: 1 / 0)
    monitor.begin()
    monitor.wait(30)
    monitor.collect(10)
    assert monitor.rows["small"].state == "UNREAD" and "division" in monitor.rows["small"].problems[0].what


def test_keys_choose_what_is_shown(bank):
    bank.epochs(1)
    row = Row("b", replace(Watched("small", bank.site.settings, closely=True).look(), at=datetime.now(UTC)))
    rows = {"b": row, "a": Row("a"), "c": Row("c")}
    page, listed = ScreenChoice(), screen.in_order(rows, "name")
    assert [row.name for row in listed] == ["a", "b", "c"]
    for key, expected in [("down", "b"), ("down", "c"), ("down", "c"), ("up", "b"), ("x", "b")]:
        page = page.pressed(key, listed)
        assert (page.selected, page.detail) == (expected, False)
    page = page.pressed("enter", listed)
    assert page.detail and not page.pressed("back", listed).detail
    assert [page.pressed(key, listed).by for key in "slnt"] == ["lag", "lag", "name", "state"]
    assert screen.in_order(rows, "state")[0].name == "b"
    assert page.pressed(" ", listed).paused and page.pressed("q", listed).ended
    assert ScreenChoice().pressed("enter", []) == ScreenChoice(), "there is nothing to show"
