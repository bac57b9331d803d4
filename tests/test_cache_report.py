"""What the cache's benchmark keeps: enough to say later how it was made, and medians where it was made several
times."""

from __future__ import annotations

import json

import pytest
import typer

from benchmarks import cache, harness
from benchmarks.cache import Load

TINY = Load(users=60, active=10, one=12, l1=3, l2=12, events=80, warm=1, epochs=2)


def lines(keys: int, root) -> list[dict]:
    """As `cache.vectorised` gives them, without the minutes."""
    return [{"bytes": 16, "keys": keys, "batches": 1, "direct_us": 2.0, "cached_us": 1.0}]


@pytest.mark.parametrize(
    ("asked", "command", "often"),
    [
        (["--quick"], "python -m benchmarks.cache --quick", "one repetition"),
        (["--quick", "--reps", "2"], "python -m benchmarks.cache --quick --reps 2", "medians over 2 repetitions"),
    ],
)
def test_a_run_leaves_how_it_was_made(tmp_path, monkeypatch, asked, command, often):
    monkeypatch.setattr(cache, "QUICK", TINY)
    monkeypatch.setattr(cache, "vectorised", lines)
    monkeypatch.setattr("sys.argv", ["cache", *asked, "--results", str(tmp_path / "tiny")])
    with pytest.raises(SystemExit) as ended:
        typer.run(cache.main)
    assert not ended.value.code
    facts = json.loads((tmp_path / "tiny.json").read_text())
    assert facts["command"] == command
    assert set(facts["versions"]) == {"rocksdict", "pyarrow", "numpy", "python"}
    assert (facts["settings"]["memory_mb"], facts["settings"]["compression"]) == (128, "lz4")
    assert "GiB of memory" in facts["machine"]
    assert len(facts["repetitions"]) == (2 if "--reps" in asked else 1)
    both = [repetition["figures"]["two layers"]["event_us_mean"] for repetition in facts["repetitions"]]
    assert facts["figures"]["two layers"]["event_us_mean"] == pytest.approx(sum(both) / len(both))
    page = (tmp_path / "tiny.md").read_text()
    assert f"{facts['machine']}. Made by `{command}` in " in page
    assert often in page
    assert f"rocksdict {facts['versions']['rocksdict']}" in page
    assert "(tiny.png)" in page
    assert (tmp_path / "tiny.png").exists()


def test_figures_are_medians_over_repetitions():
    repetitions = [
        {"figures": {"none": {"ms": ms, "entries": 4}}, "vectorised": [{"bytes": 16, "direct_us": ms / 2}]}
        for ms in (10.0, 20.0, 90.0)
    ]
    assert cache.summary(repetitions) == {
        "figures": {"none": {"ms": 20.0, "entries": 4}},
        "vectorised": [{"bytes": 16, "direct_us": 10.0}],
    }
    assert cache.summary(repetitions[:1])["figures"] == repetitions[0]["figures"]


def test_the_command_is_what_was_asked(monkeypatch):
    monkeypatch.setattr("sys.argv", ["cache", "--results", "/tmp/elsewhere", "--again"])
    assert harness.command("benchmarks.cache", "bench-cache") == "make bench-cache"
    monkeypatch.setattr("sys.argv", ["cache", "--reps", "5"])
    assert harness.command("benchmarks.cache", "bench-cache") == "python -m benchmarks.cache --reps 5"


def test_no_repetition_at_all_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cache", "--reps", "0"])
    with pytest.raises(SystemExit):
        typer.run(cache.main)
    assert "--reps" in capsys.readouterr().err
