"""Two processes that write one table at once, and are killed at random points: each row is there once.

One and the other are two pipelines that append to one table elsewhere, or the promotions of two branches. A third
writer restores the table meanwhile, which is met before anything is committed over it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from state_ops.delta import log_entries
from state_ops.errors import DamageError, WeirError
from state_ops.storage.storage import Storage
from tests.recovery import small
from tests.recovery.small import Bank
from tests.recovery.test_forks import Branched
from tests.recovery.test_two_branches import code
from tests.tools.sampling import sampled
from weir import Pipeline, delta
from weir.connectors.delta import table_commit
from weir.execution.in_process import InMemoryExecutor
from weir.operations import promotion
from weir.run import fsck

RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "8"}
STEPS = 150  # requests of a process, of which one may be its last


def die_at(step: int) -> None:
    """Let this process be killed at one of its requests to storage; 0: at none."""
    left = [step]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any, **named: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given, **named)

        return counting

    for name in ("put_bytes", "put_file", "delete", "read_bytes", "size", "list"):
        setattr(Storage, name, counted(getattr(Storage, name)))
    for module, name in ((log_entries, "append"), (table_commit, "mark")):
        setattr(module, name, counted(getattr(module, name)))


def writing(root: Path, name: str) -> Bank:
    """A pipeline that appends to the table that another one appends to as well."""
    stage = replace(small.accounts, sink=delta.append(str(root / "lake" / "booked")))
    site = Bank.at(root / name, **RETAINED).site
    return Bank(replace(site, pipeline=Pipeline(name, (stage,), max_parallelism=8)))


def forked(root: Path) -> Branched:
    plain = Bank.at(root, **RETAINED)
    return Branched(replace(plain.site, pipeline=code("main")))


def child(what: str, root: str, name: str, step: str) -> None:
    """What one of the processes does."""
    die_at(int(step))
    if what == "append":
        writing(Path(root), name).epochs()
    else:
        settings = forked(Path(root)).site.settings
        with suppress(WeirError):  # the other was faster
            promotion.promote(code(name), settings, name, executor=InMemoryExecutor(), reason=f"for {name}")


def at_once(what: str, root: Path, steps: dict[str, int]) -> None:
    """Run a process for each name, and wait for all. Each dies at its step, or ends well."""
    run = "import sys; from tests.recovery.test_two_processes import child; child(*sys.argv[1:])"
    running = [
        subprocess.Popen([sys.executable, "-c", run, what, str(root), name, str(step)], env=os.environ)
        for name, step in steps.items()
    ]
    for process in running:
        assert process.wait(300) in (0, -signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("seed", sampled(range(8), keep=1))
def test_two_pipelines_append_to_one_table_and_are_killed(tmp_path, seed):
    chance = random.Random(seed)
    banks = {name: writing(tmp_path, name) for name in ("one", "other")}
    for bank in banks.values():
        bank.epochs(1)
    for number in (2, 3):
        for bank in banks.values():
            bank.land(number)
        at_once("append", tmp_path, {name: chance.randint(1, STEPS) for name in banks})
    at_once("append", tmp_path, dict.fromkeys(banks, 0))
    for bank in banks.values():
        bank.epochs()
    rows = DeltaTable(str(tmp_path / "lake" / "booked")).to_pyarrow_table().to_pylist()
    wanted = Counter(
        (key, number)
        for number in (1, 2, 3)
        for key in [*(f"k{key}" for key in range(8)), *(f"only-{number}-{key}" for key in range(2))]
        for _ in banks
    )
    assert Counter((row["id"], row["amount"]) for row in rows) == wanted
    for bank in banks.values():
        assert not fsck.examine(bank.site.pipeline, bank.site.settings).findings


@pytest.mark.long
@pytest.mark.parametrize("seed", sampled(range(8), keep=1))
def test_two_branches_are_promoted_at_once_by_processes_that_are_killed(tmp_path, seed):
    chance = random.Random(seed)
    bank = forked(tmp_path)
    bank.epochs(1, 2, 3)
    for name in ("a", "b"):
        bank.fork(name, 1)
    for _ in range(2):
        at_once("promote", tmp_path, {name: chance.randint(1, 3 * STEPS) for name in ("a", "b")})
    at_once("promote", tmp_path, {"a": 0, "b": 0})
    bank.epochs(4)
    bank.assert_exact(1, 2, 3, 4)
    tags = Counter(zip(bank.site.table("booked")["tag"], bank.site.table("booked")["amount"], strict=True))
    assert len(tags) == 4 and set(tags.values()) == {10}
    assert len({tag for tag, amount in tags if amount in (2, 3)}) == 1, "they are of one code alone"
    assert {tag for tag, amount in tags if amount == 2} <= {"a", "b"}, "one has won"
    assert not fsck.examine(bank.site.pipeline, bank.site.settings).damage


def restored(table: Path) -> None:
    DeltaTable(str(table)).restore(1)


def restored_by_spark(table: Path) -> None:
    """Spark says in the entry what the table is only if that changes: the entry has files alone."""
    now, then = DeltaTable(str(table)), DeltaTable(str(table), version=1)
    gone, back = (set(of.file_uris()) - set(other.file_uris()) for of, other in ((now, then), (then, now)))

    def action(uri: str, **more: Any) -> dict[str, Any]:
        return {"path": os.path.relpath(uri.removeprefix("file://"), table), "dataChange": True, **more}

    actions: list[dict[str, Any]] = [{"commitInfo": {"timestamp": 1, "operation": "RESTORE"}}]
    actions += [{"remove": action(uri, deletionTimestamp=1)} for uri in sorted(gone)]
    actions += [
        {
            "add": action(
                uri, partitionValues={}, size=Path(uri.removeprefix("file://")).stat().st_size, modificationTime=1
            )
        }
        for uri in sorted(back)
    ]
    entry = table / "_delta_log" / f"{now.version() + 1:020}.json"
    entry.write_text("".join(json.dumps(each) + "\n" for each in actions))


@pytest.mark.parametrize(
    "sink", [delta.append("booked"), delta.upsert("booked", "id"), delta.replace("booked", by="amount")]
)
@pytest.mark.parametrize("how", ["before the rows", "of the rows"])
@pytest.mark.parametrize("restore", [restored, restored_by_spark])
def test_a_restore_between_the_check_and_the_commit_is_met(tmp_path, monkeypatch, sink, how, restore):
    """It is a commit that the publish has not seen: the publish looks again, and refuses what lacks rows."""
    plain = Bank.at(tmp_path, **RETAINED)
    stage = replace(small.accounts, sink=sink)
    bank = Bank(replace(plain.site, pipeline=Pipeline("small", (stage,), max_parallelism=8)))
    bank.epochs(1, 2)
    table = tmp_path / "storage" / "small" / "tables" / "booked"
    real, done = table_commit.set_back, list[int]()

    def checked(*given: Any) -> Any:
        found = real(*given)
        if not done and how == "of the rows" and given[1] == "tables/booked":
            done.append(DeltaTable(str(table)).version())
            restore(table)
        return found

    monkeypatch.setattr(table_commit, "set_back", checked)
    if how == "before the rows":
        put = log_entries.append

        def putting(version: Any, *given: Any, **named: Any) -> Any:
            if not done and str(version.path).endswith("booked"):
                done.append(DeltaTable(str(table)).version())
                restore(table)
            return put(version, *given, **named)

        monkeypatch.setattr(log_entries, "append", putting)
    with pytest.raises(DamageError, match="RESTORE"):
        bank.epochs(3, 4)
    monkeypatch.undo()
    with pytest.raises(DamageError, match="RESTORE"):
        bank.epochs()
    DeltaTable(str(table)).restore(done[0])
    bank.epochs()
    amounts = Counter(bank.site.table("booked")["amount"])
    last = Counter({1: 2, 2: 2, 3: 2, 4: 10})
    assert amounts == (last if sink == delta.upsert("booked", "id") else Counter(dict.fromkeys((1, 2, 3, 4), 10)))
