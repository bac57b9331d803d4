"""`make soak-doors`: each source and each sink on Spark, killed at random requests, run after run, each compared with
its input; exit 1 on any difference.

python -m tests.soak.doors [--runs 20] [--seed N]
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.recovery.test_doors import ON_SPARK, assert_exactly_once, door_at, expected


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.doors", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="of each pair of a source and a sink")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    chance, deaths = random.Random(given.seed), 0
    print(f"{given.runs} runs of {len(ON_SPARK)} doors, seed {given.seed}", flush=True)
    for number in range(given.runs):
        for source, sink in ON_SPARK:
            root = Path(tempfile.mkdtemp(prefix="weir-doors-"))
            door = replace(door_at(root, source, sink), spark=True, epoch_rows=200)
            wanted = expected(door)
            deaths += not door.run(chance.randint(1, 60))
            assert door.run(0)
            try:
                assert_exactly_once(door, wanted)
            except AssertionError as error:
                print(
                    f"run {number} of {source} to {sink}, seed {given.seed}: {error}; left in {root}", file=sys.stderr
                )
                return 1
            shutil.rmtree(root)
        print(f"run {number}: all doors exact, {deaths} deaths so far", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
