"""`make soak`: thousands of epochs with a coordinator that is killed, frozen and stopped at random; exit 1 on any
violation.

python -m tests.soak [--epochs 2000] [--long 600] [--unaligned] [--seed N] [--root DIRECTORY]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.soak.bounds import growing, settled, swelling
from tests.soak.checks import Sample
from tests.soak.children import Violation
from tests.soak.driver import Outcome, lives, soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--epochs", type=int, default=int(os.environ.get("EPOCHS") or 2000))
    parser.add_argument("--long", type=int, default=600, help="epochs of the one coordinator that lives long")
    parser.add_argument("--unaligned", action="store_true", help="checkpoints that do not wait for the second stage")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SEED") or random.randrange(10**6)))
    parser.add_argument("--root", type=Path, help="where; kept. Default: a temporary directory, kept on a violation")
    given = parser.parse_args()
    root = given.root or Path(tempfile.mkdtemp(prefix="weir-soak-"))
    print(f"{given.epochs} epochs, seed {given.seed}; SEED={given.seed} repeats input and plan. In {root}", flush=True)
    chance = random.Random(given.seed)
    try:
        plan = lives(chance, given.long, given.unaligned)
        outcome = soak(
            root, given.seed, given.epochs, plan, lambda line: print(line, flush=True), unaligned=given.unaligned
        )
        problems = growing(outcome.samples) + list(filter(None, map(swelling, outcome.rss)))
    except Violation as error:
        print(f"VIOLATION, with SEED={given.seed}; all is left in {root}\n{error}", file=sys.stderr)
        return 1
    _show(outcome)
    if problems:
        print(f"VIOLATION, with SEED={given.seed}; all is left in {root}\n" + "\n".join(problems), file=sys.stderr)
        return 1
    if given.root is None:
        shutil.rmtree(root)
    return 0


def _show(outcome: Outcome) -> None:
    table = Table(title=f"soak, seed {outcome.seed}: nothing lost, nothing doubled", show_header=False)
    for name, value in (
        ("epochs", outcome.epochs),
        ("minutes", f"{outcome.seconds / 60:.1f}"),
        ("coordinators", f"{outcome.generations} generations"),
        *[(f"  {name}", number) for name, number in sorted(outcome.ends.items())],
        ("files read", outcome.files),
        ("rows compared", outcome.rows),
        ("epochs that left rows to a later one", outcome.waited),
        ("checks of all tables, of accounts, of windows", f"{outcome.checks}, {outcome.states}, {outcome.windows}"),
        *[_extent(outcome.samples, *measure) for measure in _MEASURES],
        *[("resident MiB of a long life", _memory(rss)) for rss in outcome.rss],
    ):
        table.add_row(name, str(value))
    Console(width=120).print(table)


_MEASURES = (
    ("state bytes", "state_bytes"),
    ("state objects", "state_objects"),
    ("bytes of waiting rows", "channel_bytes"),
    ("files of waiting rows", "channel_objects"),
    ("registry bytes", "registry_bytes"),
    ("registry objects", "registry_objects"),
    ("registry log files", "registry_log"),
    ("work directory bytes", "work_bytes"),
    ("work directory files", "work_objects"),
    ("sinks' log files", "sink_log"),
)


def _extent(samples: list[Sample], title: str, name: str) -> tuple[str, str]:
    """The maximum in each quarter of the epochs."""
    last = max(sample.epoch for sample in samples) or 1
    quarters: list[int] = [0, 0, 0, 0]
    for sample in samples:
        quarter = min(3, 4 * sample.epoch // last)
        quarters[quarter] = max(quarters[quarter], getattr(sample, name))
    return f"most {title}, by quarter", ", ".join(f"{most:,}" for most in quarters)


def _memory(rss: list[int]) -> str:
    every = " ".join(str(size >> 20) for size in rss[::100])
    first, last = settled(rss)
    return f"{first >> 20} then {last >> 20} over {len(rss)} epochs; at every hundredth: {every}"


if __name__ == "__main__":
    sys.exit(main())
