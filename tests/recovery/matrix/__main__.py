"""`make matrix`: every call, every kind of blow. Exit status 1 on any deviation."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time

from tests.recovery.matrix import matrix, plan, trials
from tests.recovery.matrix.matrix import Played


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="trials whose description contains this text")
    parser.add_argument("--sample", action="store_true", help="the spread sample that `make test-long` plays")
    parser.add_argument("--no-spark", action="store_true", help="leave out the part that runs on Spark")
    parser.add_argument(
        "--unaligned", action="store_true", help="checkpoints that do not wait for slow stages; in memory"
    )
    parser.add_argument("--rewinds", action="store_true", help="runs that begin with a rewind; in memory")
    parser.add_argument("--calls", type=int, help="only blows at the first so many calls")
    parser.add_argument("--minutes", type=float, help="end after this time")
    parser.add_argument("--skip", type=int, default=0, help="so many trials of the order, which another run has played")
    parser.add_argument("--seed", type=int, default=1, help="of the order in which trials are played")
    parser.add_argument("--zygotes", type=int, default=min(os.cpu_count() or 1, 8))
    parser.add_argument(
        "--promotions", action="store_true", help="runs that begin with a fork, its promotion and its drop; in memory"
    )
    parser.add_argument("--deploys", action="store_true", help="another kind of sink from the first blow on; in memory")
    arguments = parser.parse_args()
    if arguments.unaligned:
        os.environ[trials.UNALIGNED] = "1"
        arguments.no_spark = True
    if arguments.rewinds:
        os.environ[trials.REWINDS] = "1"
        arguments.no_spark = True
    if arguments.promotions:
        os.environ[trials.PROMOTIONS] = "1"
        arguments.no_spark = True
    if arguments.deploys:
        os.environ[trials.DEPLOYS] = "1"
        arguments.no_spark = True
    wrong = in_memory(arguments)
    if not arguments.no_spark and not arguments.sample and not arguments.only:
        from tests.recovery.matrix import on_spark

        wrong += on_spark.main()
    return 1 if wrong else 0


def in_memory(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    with matrix.zygotes(arguments.zygotes) as ready:
        points = ready[0].points
        chosen = plan.sample(points) if arguments.sample else plan.everything(points)
        numbers = {point: index for index, point in enumerate(points, 1)}
        chosen = [
            trial
            for trial in chosen
            if arguments.only in str(trial)
            and (not arguments.calls or numbers[trial.disturbance.at] <= arguments.calls)
        ]
        random.Random(arguments.seed).shuffle(chosen)
        del chosen[: arguments.skip]
        print(f"{len(points)} calls of {len({point.operation for point in points})} operations; {len(chosen)} trials")
        done = 0

        def seen(trial: Played) -> None:
            nonlocal done
            done += 1
            if trial.outcome.problems:
                print(f"\nDEVIATION at call {numbers[trial.trial.disturbance.at]}: {trial.trial}", flush=True)  # type: ignore[index]
                for problem in trial.outcome.problems:
                    print(f"    {problem}", flush=True)
            elif done % 50 == 0 or done == len(chosen):
                spent = time.monotonic() - started
                print(f"{done} of {len(chosen)} trials, {spent:.0f} s, {spent / done:.2f} s each", flush=True)

        until = time.monotonic() + 60 * arguments.minutes if arguments.minutes else None
        played = matrix.play(ready, chosen, seen, until)
    print(matrix.summary(played))
    return sum(bool(trial.outcome.problems) for trial in played)


if __name__ == "__main__":
    sys.exit(main())
