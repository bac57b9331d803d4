"""What bash completes in a command's line: a real bash on a terminal of its own, at which TAB is pressed."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.recovery.small import Bank
from tests.tools.sampling import sampled
from weir.cli.shell import completion
from weir.operations import forks
from weir.settings.configuration import PROJECT

BIN = Path(sys.executable).parent
PROMPT = "ready>"


class Terminal:
    """An interactive bash that has Weir's completion, as `weir --install-completion` has it read at its start."""

    def __init__(self, environment: dict[str, str], rc: Path) -> None:
        path = os.pathsep.join([str(BIN), os.environ["PATH"]])
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            shown = {"PATH": path, "PS1": PROMPT, "TERM": "dumb", "COLUMNS": "200"}
            os.execvpe("bash", ["bash", "--noprofile", "--rcfile", str(rc), "-i"], {**environment, **shown})
        self.until(PROMPT)

    def until(self, text: str, seconds: float = 60) -> str:
        """All that appears up to a text."""
        seen, end = "", time.monotonic() + seconds
        while text not in seen:
            readable, _, _ = select.select([self._fd], [], [], max(0.0, end - time.monotonic()))
            assert readable, f"{text!r} never came, only {seen!r}"
            seen += os.read(self._fd, 65_536).decode()
        return seen

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def close(self) -> None:
        self.type("\x03exit\n")
        os.close(self._fd)
        os.waitpid(self._pid, 0)


@pytest.fixture(scope="module")
def bank(tmp_path_factory) -> Bank:
    bank = Bank.at(tmp_path_factory.mktemp("completion"), WEIR_CHECKPOINTS__NUM_RETAINED="2")
    bank.epochs(1, 2)
    return bank


@pytest.fixture(scope="module")
def environment(bank) -> dict[str, str]:
    return {**os.environ, **bank.site.env, "PYTHONPATH": str(PROJECT)}


@pytest.fixture(scope="module")
def terminal(environment, tmp_path_factory) -> Iterator[Terminal]:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    rc = tmp_path_factory.mktemp("home") / ".bashrc"
    # It is that of the shell which calls it.
    command = ["bash", "-c", f"'{BIN / 'weir'}' --show-completion && true"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    rc.write_text(f"PS1='{PROMPT}'\n{shown.stdout}")
    terminal = Terminal(environment, rc)
    yield terminal
    terminal.close()


@pytest.mark.parametrize(
    ("line", "completed"),
    sampled(
        [
            ("weir checkp", "weir checkpoints "),
            ("weir state count small acc", "weir state count small accounts "),
            ("weir status sm", "weir status small "),
            ("weir rewind small --to 1", "weir rewind small --to 1 "),
        ],
        2,
    ),
)
def test_tab_completes(terminal, line, completed):
    terminal.type(f"{line}\t")
    terminal.until(completed)
    terminal.type("\x15\n")  # clear the line
    terminal.until(PROMPT)


def complete(line: str, environment: dict[str, str]) -> tuple[list[str], str]:
    """What a shell is offered at the end of a line, and what stands on stderr."""
    asked = {"_WEIR_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = subprocess.run([BIN / "weir"], env={**environment, **asked}, capture_output=True, text=True, cwd=PROJECT)
    return done.stdout.split(), done.stderr


def test_checkpoints_are_offered_the_newest_first(environment):
    assert complete("weir restore small --checkpoint ", environment) == (["2", "1"], "")
    assert complete("weir debug small --epoch ", environment) == (["2", "1"], "")


@pytest.mark.long
def test_the_commands_that_play_epochs_again_complete_stages_and_tables(environment):
    assert complete("weir debug small --stage ", environment) == (["accounts"], "")
    tables, message = complete("weir explain small ", environment)
    assert "booked" in tables and not message


@pytest.fixture(scope="module")
def fix(bank) -> None:
    """A branch."""
    forks.fork(bank.site.pipeline, bank.site.settings, "fix", 1)
    branch = forks.branched(bank.site.pipeline, bank.site.settings, "fix")
    Bank(replace(bank.site, pipeline=branch)).epochs()


@pytest.mark.usefixtures("fix")
def test_names_of_a_branch_are_offered_behind_the_at(bank, environment):
    assert complete("weir status small@", environment) == (["small@fix"], "")
    tables, said = complete("weir explain small@fix ", environment)
    assert "booked" in tables and not said
    (newest, *_), _ = complete("weir debug small@fix --epoch ", environment)
    assert newest == str(forks.forks(bank.site.pipeline, bank.site.settings)[0].head.id)


@pytest.mark.long
@pytest.mark.usefixtures("fix")
@pytest.mark.parametrize(
    ("line", "completed"), [("weir status small@f", "fix "), ("weir explain small@fix boo", "booked ")]
)
def test_tab_completes_names_of_a_branch(terminal, line, completed):
    test_tab_completes(terminal, line, completed)


def test_where_nothing_can_be_read_nothing_is_offered_or_said(environment, tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("pipelines: [")
    assert complete("weir status ", {**environment, "WEIR_CONFIG": str(broken)}) == ([], "")
    assert complete("weir state count nobody ", environment) == ([], "")


def test_what_a_completion_reads_is_the_registry_alone():
    """The author's module, which may import anything, is not."""
    code = """
import sys
from types import SimpleNamespace
from weir.cli.shell import completion
print(completion.stages(SimpleNamespace(params={"pipeline": "small"}), ""))
print({"polars", "pyspark", "pandas"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\nset()\n"
    assert completion.pipelines.__module__ == "weir.cli.shell.completion"
