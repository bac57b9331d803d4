"""Runs that are killed three times, over files of many sizes that come out of order, hand out what DuckDB says.

`make nexmark` plays every query at parallelism 1, 2 and 5 over a million events, `make test-long` some of them over
fewer.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.nexmark.generate import STREAMS, Options
from benchmarks.nexmark.run import available
from tests.nexmark.generated import House
from weir.settings.configuration import PROJECT

pytestmark = pytest.mark.long

EVENTS = int(os.environ.get("WEIR_NEXMARK", "0"))
PARALLELISM = (1, 2, 5)
KILLS, FILES, MOST_FILES, LEAST_EPOCHS = 3, 60, 3, 20
_SECONDS = 660  # of event time; three files of at most 1.5 times the mean are 50 s, and rows may be a minute late
_SOME = {"q0": 1, "q9": 2, "q11": 5, "q19": 5}  # with their parallelism; a query takes a minute or more


def cases() -> list[tuple[str, int]]:
    """Some queries once, or every query at each parallelism."""
    if not EVENTS:
        return [*_SOME.items()]
    turns = range(len(PARALLELISM))
    return [(query, PARALLELISM[(at + turn) % 3]) for turn in turns for at, query in enumerate(available())]


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> House:
    events = EVENTS or 200_000
    house = House(tmp_path_factory.mktemp("nexmark"), Options(events, files=FILES, rate=events / _SECONDS, uneven=True))
    for name in STREAMS:
        shuffle(house.input / name, random.Random(name))
    return house


def shuffle(folder: Path, draw: random.Random) -> None:
    """Give files, three by three, each other's names, whose order is that in which they are read."""
    files = sorted(folder.iterdir())
    for first in range(0, FILES, 3):
        names = files[first : first + 3]
        contents = [file.read_bytes() for file in draw.sample(names, len(names))]
        for file, content in zip(names, contents, strict=True):
            file.write_bytes(content)


@pytest.mark.parametrize(("query", "parallelism"), cases())
def test_a_run_that_is_killed_again_and_again_hands_out_each_row_once(house, tmp_path, query, parallelism):
    draw, kills, work = random.Random(f"{query} {parallelism}"), 0, tmp_path / "work"
    checkpoints = work / "storage" / query / "registry" / "checkpoints" / "_delta_log"
    in_process = draw.random() < 0.8
    words = ["--input", house.input, "--out", tmp_path / "out", "--work", work, "--queries", query]
    words += ["--parallelism", parallelism, *(["--in-process"] if in_process else []), "--files"]
    command = [sys.executable, "-m", "benchmarks.nexmark.run", *map(str, words)]
    while True:
        files = str(draw.randint(1, MOST_FILES))
        process = subprocess.Popen(
            [*command, files], cwd=PROJECT, start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        if kills == KILLS:
            printed, _ = process.communicate(timeout=900)
            break
        enough = max(_entries(checkpoints), 1) + draw.randint(1, 4)
        while process.poll() is None and _entries(checkpoints) < enough:
            time.sleep(0.02)
        time.sleep(draw.random() * 0.5)
        assert process.poll() is None, "the run has ended before it was killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
    assert process.returncode == 0, printed
    house.assert_equal(query, tmp_path / "out")
    assert _entries(checkpoints) >= LEAST_EPOCHS


def _entries(log: Path) -> int:
    return len(list(log.glob("*.json"))) if log.exists() else 0
