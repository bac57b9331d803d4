"""A pipeline that goes on with another number of subtasks: every key's state is where its subtask looks for it, and
nowhere else."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from state_ops.backends import composite
from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.errors import StageError
from state_ops.records.checkpoint import WITH_PARTS, Checkpoint
from state_ops.records.snapshot_files import STATE
from state_ops.storage.storage import Storage
from tests.recovery import test_unaligned as every
from tests.recovery.harness import Site
from tests.recovery.small import Bank
from tests.tools.reading import keys_of
from tests.tools.sampling import sampled
from weir.definition import Pipeline
from weir.execution.in_process import InMemoryExecutor
from weir.ownership.pipeline_storage import open_storage
from weir.task.run_task import KeyedTask

GROUPS = 6
pipeline = replace(every.pipeline, name="rescaled", max_parallelism=GROUPS)
few = replace(pipeline, stages=(every.passed, every.timed, every.sessions))
UP_AND_DOWN = (2, 5, 3, 1, GROUPS, 2)


def site_at(root: Path, backend: str, alignment: float | None = None, pipeline: Pipeline = pipeline) -> Site:
    site = every.site_at(root, alignment, pipeline, WEIR_STATE__BACKEND=backend, WEIR_EPOCH__MAX_FILES="1")
    return replace(site, module="tests.recovery.test_rescale")


def at(site: Site, parallelism: int, **options: str) -> Site:
    return replace(site, options={**site.options, "WEIR_SPARK__PARALLELISM": str(parallelism), **options})


def landed_one_by_one(site: Site, parallelisms: tuple[int, ...], seed: int) -> list[Checkpoint]:
    """A run for each parallelism, which reads one file; then a drain."""
    aside = replace(site, root=site.root / "aside")
    every.land(aside, seed, count=len(parallelisms))
    site.landing.mkdir(parents=True)
    history = []
    for number, parallelism in zip(sorted(aside.landing.iterdir()), parallelisms, strict=True):
        shutil.move(number, site.landing)
        history += every.epochs(at(site, parallelism))
    return history + every.epochs(at(site, parallelisms[-1]), drain=True)


@pytest.fixture(params=sampled(["side by side", "folded"]))
def databases(request, monkeypatch) -> str:
    """Whether small databases stay beside each other, as large ones do."""
    if request.param == "side by side":
        monkeypatch.setattr(composite, "SMALL_BYTES", 0)
    return request.param


@pytest.mark.parametrize(
    ("backend", "alignment", "pipeline"),
    sampled(
        [
            pytest.param("rocksdb", None, few),
            pytest.param("memory", None, pipeline),
            pytest.param("filesystem", 0.0, few),
        ]
    ),
)
def test_every_operator_gives_what_it_gives_at_one_parallelism(backend, alignment, pipeline, databases, tmp_path):
    changing = site_at(tmp_path / "changing", backend, alignment, pipeline)
    constant = site_at(tmp_path / "constant", "memory", None, pipeline)
    history = landed_one_by_one(changing, UP_AND_DOWN, seed=3)
    landed_one_by_one(constant, (2,) * len(UP_AND_DOWN), seed=3)
    for name in {sink.name for sink in pipeline.sinks} & every.TABLES.keys():
        was, now = (
            site.table(name)[every.TABLES[name]].sort_values(every.TABLES[name], ignore_index=True)
            for site in (constant, changing)
        )
        pd.testing.assert_frame_equal(now, was, check_dtype=False, obj=name)
    assert every.state_of(changing) == every.state_of(constant)
    assert (max(row.format_version for row in history) == WITH_PARTS) or databases == "folded"
    changing.assert_no_orphans()


def owners(site: Site, checkpoint: Checkpoint) -> dict[str, list[tuple[int, int]]]:
    """Subtask and key group of every entry of state, by stage, read by the backends alone."""
    storage, registry = open_storage(site.pipeline, site.settings)
    files = {}
    for stage in site.pipeline.stages:
        files[stage.uid] = [
            (subtask, int.from_bytes(key[:2], "big"))
            for subtask, key in keys_of(storage, registry, checkpoint, stage.uid)
        ]
        assert checkpoint.operators[stage.uid].parallelism == int(site.options["WEIR_SPARK__PARALLELISM"])
    return files


@pytest.mark.long
def test_a_subtask_has_its_own_key_groups_and_no_others(databases, tmp_path):
    site = site_at(tmp_path, "rocksdb", pipeline=few)
    every.land(site, 5, count=1)
    for number, parallelism in enumerate((4, GROUPS, 3, 1, 5)):
        changed = at(site, parallelism)
        every.land(changed, 5, count=number + 1)
        checkpoint = every.epochs(changed)[-1]
        groups = owners(changed, checkpoint)
        assert sum(map(len, groups.values())) > 10
        for owned in groups.values():
            assert {subtask for subtask, group in owned} == {group * parallelism // GROUPS for _, group in owned}
            assert all(subtask == group * parallelism // GROUPS for subtask, group in owned)


class Counting(InMemoryExecutor):
    """Its first run of a stage fails, after `failures` of them."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__()
        self.failures, self.tasks = failures, list[KeyedTask]()

    def run(self, task, rows, columns, deadline):
        self.tasks.append(task)
        acks = super().run(task, rows, columns, deadline)
        if self.failures:
            self.failures -= 1
            raise StageError("The stage failed on purpose.", traceback="")
        return acks


def test_what_is_there_is_named_again_and_not_uploaded(tmp_path, monkeypatch):
    monkeypatch.setattr(composite, "SMALL_BYTES", 0)
    bank = Bank.at(tmp_path, WEIR_SPARK__PARALLELISM="2")
    before = bank.epochs(1, 2, 3)[-1].checkpoint
    tables = {file.path: file.digest for file in bank.registry.files(before) if file.name.endswith(".sst")}
    for parallelism in (5, 2, 1, 8):
        bank.site = at(bank.site, parallelism)
        after = bank.epochs(10 + parallelism)[-1].checkpoint
        listed = [file for file in bank.registry.files(after) if file.kind == STATE and file.name.endswith(".sst")]
        again = {file.path: file.digest for file in listed if not file.new}
        assert tables.items() <= again.items(), "every table that was there is named"
        assert len([file for file in listed if file.new]) <= 2 * len({file.name for file in listed})
        tables = again
    bank.assert_exact(1, 2, 3, 15, 12, 11, 18)


def test_the_first_epoch_leaves_merges_to_the_one_after(tmp_path, monkeypatch):
    monkeypatch.setattr(composite, "SMALL_BYTES", 0)
    bank = Bank.at(tmp_path, WEIR_SPARK__PARALLELISM="7")
    bank.epochs(1, 2, 3)
    asked: list[Path] = []
    merge = RocksDBBackend._merge
    monkeypatch.setattr(RocksDBBackend, "_merge", lambda self: asked.append(self.path) or merge(self))
    bank.site = at(bank.site, 3)
    bank.epochs(4)
    assert asked == [], "also of databases in the middle, of which nothing is clipped"
    bank.epochs(5)
    assert len(asked) > 3
    bank.assert_exact(1, 2, 3, 4, 5)


def test_one_copy_of_an_object_serves_all_subtasks_of_a_host(tmp_path, monkeypatch):
    bank = Bank.at(tmp_path, WEIR_SPARK__PARALLELISM="1")
    bank.epochs(1, 2)
    shutil.rmtree(tmp_path / "work")
    fetched: list[str] = []
    get_file = Storage.get_file
    monkeypatch.setattr(
        Storage, "get_file", lambda self, path, *a, **k: (fetched.append(path), get_file(self, path, *a, **k))
    )
    bank.site = at(bank.site, 8)
    bank.epochs(3)
    tables = [path for path in fetched if path.endswith(".sst")]
    assert tables and len(tables) == len(set(tables)), "eight subtasks need the same tables"
    bank.assert_exact(1, 2, 3)


def test_local_snapshots_serve_subtasks_that_were_not_there(tmp_path, monkeypatch):
    bank = Bank.at(tmp_path, WEIR_SPARK__PARALLELISM="8", WEIR_LOCAL__OBJECTS_MB="0")
    bank.epochs(1, 2)
    fetched: list[str] = []
    get_file = Storage.get_file
    monkeypatch.setattr(
        Storage, "get_file", lambda self, path, *a, **k: (fetched.append(path), get_file(self, path, *a, **k))
    )
    bank.site = at(bank.site, 3)
    bank.epochs(3)
    assert [path for path in fetched if path.endswith(".sst")] == []
    bank.assert_exact(1, 2, 3)


def test_an_epoch_that_fails_after_a_change_is_replayed_from_the_same_state(tmp_path):
    bank = Bank.at(tmp_path, WEIR_SPARK__PARALLELISM="3")
    bank.epochs(1, 2)
    bank.site = at(bank.site, 2)
    with pytest.raises(StageError):
        bank.epochs(3, executor=Counting(failures=1))
    bank.epochs(executor=Counting())
    bank.site = at(bank.site, 7)
    bank.epochs(4)
    bank.assert_exact(1, 2, 3, 4)


def test_databases_that_are_too_many_are_folded(tmp_path, monkeypatch):
    monkeypatch.setattr(composite, "SMALL_BYTES", 0)
    monkeypatch.setattr(composite, "MOST", 3)
    bank = Bank.at(tmp_path, WEIR_SPARK__PARALLELISM="8")
    bank.epochs(1, 2)
    bank.site = at(bank.site, 1)
    head = bank.epochs(3)[-1].checkpoint
    names = {composite.parted(file.name)[0] for file in bank.registry.files(head) if file.kind == STATE}
    assert len(names) == 3
    bank.assert_exact(1, 2, 3)


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_the_flights_state_at_two_seven_three_one_and_sixteen_subtasks(site, days):
    flights = site(max_files=2)
    for number, parallelism in enumerate((2, 7, 3, 1, 16)):
        flights = at(flights, parallelism)
        flights.land(days[2 * number : 2 * number + 2])
        flights.run()
    flights.run(drain=True)
    flights.assert_exact(10)
    flights.assert_no_orphans()
