"""Runs one pipeline for thousands of epochs while its coordinators are killed, frozen and stopped, and checks what is
left.

One coordinator lives at a time, except where one is frozen for so long that another takes over: that one wakes as a
zombie. What is done to whom comes from the seed; at which line of code it hits is chance. Between two lives nobody
writes, and everything is compared with the replay (`checks`).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from state_ops.coordination import lease, requests
from state_ops.coordination.requests import Request
from state_ops.storage.storage import Storage
from tests.recovery.harness import Site
from tests.soak.accounts import pipeline
from tests.soak.checks import TABLES, Sample, Verifier, log_in_order, sample
from tests.soak.children import Child, Violation, started
from tests.soak.coordinator import Order
from tests.soak.feed import Feed
from tests.soak.replay import Replay

HEARTBEAT = 0.3
_REMEMBERED = 300  # names in a file position, so that a soak goes far beyond its floor
_BACKLOG = 30
_SAMPLE_SECONDS = 1.0
_PATIENCE = 120.0


@dataclass(frozen=True)
class Life:
    """One coordinator's life. end: kill, early (killed before its first epoch is through), zombie, stop or drain;
    epochs: how many it may complete before; the rest: its settings."""

    end: str
    epochs: int
    num_retained: int = 2
    max_files: int = 2
    batch_rows: int = 65_536
    mode: str = "incremental"
    max_concurrent: int = 2
    unaligned: bool = False


def lives(chance: random.Random, long: int, unaligned: bool = False) -> Iterator[Life]:
    """Lives without end, as a soak has them: the sixth is a long one of so many epochs. unaligned: most of them stop
    stages at every batch, the long one too."""
    number = 0
    while True:
        number += 1
        end = chance.choices(["kill", "early", "zombie", "stop", "drain"], [76, 8, 8, 4, 4])[0]
        life = Life(
            end,
            1 + int(chance.expovariate(1 / 9)),
            chance.choice([1, 2, 3, 5]),
            chance.choice([1, 2, 3]),
            chance.choice([7, 65_536]),
            chance.choice(["incremental", "incremental", "full"]),
            chance.choice([1, 2, 2, 3]),
            unaligned and chance.random() < 0.8,
        )
        long_one = Life("kill", long, 2, 1, 7 if unaligned else 65_536, unaligned=unaligned)
        yield long_one if number == 6 else life


@dataclass
class Outcome:
    """What a soak has seen. waited: epochs that left rows to a later one. rss: of each long life, its resident bytes by
    its own epochs."""

    seed: int
    epochs: int = 0
    checks: int = 0
    states: int = 0
    windows: int = 0
    rows: int = 0
    waited: int = 0
    files: int = 0
    generations: int = 0
    seconds: float = 0.0
    ends: Counter = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    rss: list[list[int]] = field(default_factory=list)


def soak(
    root: Path,
    seed: int,
    epochs: int,
    plan: Iterator[Life],
    say: Callable[[str], None],
    *,
    unaligned: bool = False,
    least: int = 0,
) -> Outcome:
    """Run until so many epochs are completed and at least so many lives are over, then drain. Raises Violation as soon
    as something is wrong. unaligned: lives may be."""
    with started(root / "children") as another:
        return _Soak(root, seed, epochs, least, plan, say, another, unaligned).run()


class _Soak:
    def __init__(
        self,
        root: Path,
        seed: int,
        epochs: int,
        least: int,
        plan: Iterator[Life],
        say: Callable[[str], None],
        another: Callable[[], Child],
        unaligned: bool,
    ) -> None:
        self.site = Site(root, pipeline=pipeline, module="tests.soak.accounts")
        self.storage = Storage(str(self.site.storage))
        self.chance = random.Random(f"{seed}/hands")
        self.target, self.least, self.plan, self.say, self.another = epochs, least, plan, say, another
        self.feed = Feed(seed, self.site.landing)
        self.verifier = Verifier(self.site, Replay(seed), unaligned)
        self.outcome = Outcome(seed)
        self.hosts = ["here", "there"]
        self.spare: Child = another()
        self.newest = self.read = self.completed = 0
        self.started = self.sampled = self.spoke = time.monotonic()

    def run(self) -> Outcome:
        living: tuple[Child, Life] | None = None
        while not self._enough():
            child, life = living or self._born(next(self.plan))
            living = self._lived(child, life)
            self.least -= 1
            self.outcome.ends[life.end] += 1
            if living is None:
                self._check()
        if living is not None:
            living[0].kill()
            self.outcome.ends["kill"] += 1
            self._check()
        child, _ = self._born(Life("drain", 0))
        self._stop(child, drain=True)
        self._check()
        self._last_look()
        return self.outcome

    def _enough(self) -> bool:
        return self.completed >= self.target and self.least <= 0

    # -- a life

    def _born(self, life: Life) -> tuple[Child, Life]:
        child, self.spare = self.spare, self.another()
        env = {
            **self.site.env,
            "WEIR_LOCAL__WORK_DIR": str(self.site.root / f"work-{self.hosts[0]}"),
            "WEIR_LOCAL__OBJECTS_MB": "1",  # so little that objects are evicted
            "WEIR_LEASE__HEARTBEAT_SECONDS": str(HEARTBEAT),
            "WEIR_CHECKPOINTS__NUM_RETAINED": str(life.num_retained),
            "WEIR_CHECKPOINTS__MODE": life.mode,
            "WEIR_CHECKPOINTS__MAX_CONCURRENT": str(life.max_concurrent),
            "WEIR_EPOCH__MAX_FILES": str(life.max_files),
        }
        if life.unaligned:
            env["WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS"] = "0"
        child.go(Order(env, self.hosts[0], life.batch_rows, remembered=_REMEMBERED))
        return child, life

    def _lived(self, child: Child, life: Life) -> tuple[Child, Life] | None:
        """Let it live its life and end it; returns who lives now, if somebody does."""
        before = len(child.epochs)
        if life.end == "early":
            self._until(lambda: False, [child], patience=self.chance.uniform(0, 1), forever=True)
            child.kill()
            return self._buried(child, "kill")
        self._until(lambda: len(child.epochs) - before >= life.epochs or self._enough(), [child])
        if life.end in ("stop", "drain"):
            self._stop(child, drain=life.end == "drain")
            return None
        self._until(lambda: False, [child], patience=self.chance.uniform(0, 0.25), forever=True)
        if life.end == "kill":
            child.kill()
            return self._buried(child, "kill")
        return self._haunted(child)

    def _stop(self, child: Child, drain: bool) -> None:
        # Only a coordinator that holds the lease is asked: a stop from before is taken for stale.
        self._until(lambda: self._owns(child) or child.ended, [child])
        requests.send(self.storage, Request("stop", drain=drain, reason="the soak's plan"))
        self._until(lambda: child.ended, [child])
        self._buried(child, "done")

    def _haunted(self, zombie: Child) -> tuple[Child, Life]:
        """Freeze it, let another one take over, and wake it in the middle of whatever it was doing."""
        zombie.freeze()
        self.hosts.reverse()
        child, life = self._born(next(self.plan))
        enough = self.chance.choice([0, 1, 3])
        self._until(lambda: len(child.epochs) >= enough and self._owns(child), [child])
        zombie.wake()
        self._until(lambda: zombie.ended, [child, zombie], expected_end=[zombie])
        self._buried(zombie, "FencedError")
        self.outcome.ends["zombies fenced"] += 1
        return child, life

    def _owns(self, child: Child) -> bool:
        held = lease.read(self.storage)
        return held is not None and held.pid == child.process.pid

    def _buried(self, child: Child, how: str) -> None:
        child.kill()
        if how != "kill" and [end["kind"] for end in child.ends] != [how]:
            raise Violation(f"A coordinator should have ended with {how}, but:\n{child.complaint()}")
        if how == "kill" and child.ends:
            raise Violation(f"A coordinator ended before it was killed:\n{child.complaint()}")
        self._hear(child)
        if len(child.epochs) >= 250:
            self.outcome.rss.append([epoch["rss"] for epoch in child.epochs])

    # -- meanwhile

    def _until(self, done, children, *, patience: float = _PATIENCE, forever: bool = False, expected_end=()) -> None:
        """Feed, listen and measure until `done()`; a coordinator that ends or stands still meanwhile is a violation."""
        deadline, moved = time.monotonic() + patience, self.completed
        while True:
            for child in children:
                self._hear(child)
            if self.completed != moved and not forever:
                deadline, moved = time.monotonic() + patience, self.completed
            if done():
                return
            for child in children:
                if child.ends and child not in expected_end and child.ends[-1]["kind"] != "done":
                    raise Violation(f"A coordinator ended by itself:\n{child.complaint()}")
            if time.monotonic() > deadline:
                if forever:
                    return
                raise Violation(f"Nothing moves for {patience:g} s.\n" + "\n".join(c.complaint() for c in children))
            self._feed()
            self._measure()
            time.sleep(0.01)

    def _hear(self, child: Child) -> None:
        before = len(child.epochs)
        for epoch in child.listen().epochs[before:]:
            self.verifier.heard(epoch)
            self.newest, self.read = max(self.newest, epoch["epoch"]), max(self.read, epoch["files"])
            self.completed += 1

    def _feed(self) -> None:
        if self.feed.landed - self.read < _BACKLOG and self.chance.random() < 0.5:
            self.feed.land(self.chance.randrange(1, 12))

    def _measure(self) -> None:
        now = time.monotonic()
        if now - self.sampled >= _SAMPLE_SECONDS:
            self.sampled = now
            self.outcome.samples.append(sample(self.site, self.newest))
        if now - self.spoke >= 15:
            self.spoke = now
            ends = ", ".join(f"{number} {end}" for end, number in self.outcome.ends.items())
            self.say(f"{now - self.started:5.0f} s  {self.completed:5} epochs  {self.verifier.rows:7} rows  {ends}")

    # -- what is left

    def _check(self) -> None:
        head = self.verifier.check()
        self.outcome.checks += 1
        if head is not None:
            self.newest = max(self.newest, head.id)
            self.completed = head.totals["epochs"]
            self.read = head.offsets.get("landing", {"files": 0})["files"]
            self.feed.clean(self.read - 2 * _REMEMBERED)
            self.outcome.generations = head.generation

    def _last_look(self) -> None:
        self.site.assert_no_orphans()
        for table in TABLES:
            log_in_order(self.site.storage / "tables" / table, f"{pipeline.app_id}/{table}")
        out = self.outcome
        out.samples.append(sample(self.site, self.newest))
        out.epochs, out.rows, out.states = self.completed, self.verifier.rows, self.verifier.states
        out.windows, out.waited = self.verifier.windows, self.verifier.waited
        out.files, out.seconds = self.read, time.monotonic() - self.started
