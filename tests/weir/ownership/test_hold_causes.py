"""Bad input and damage hold the pipeline as a gate does: nobody tries for ever, and what has been mended lets it go
on."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.coordination import gate_hold
from state_ops.errors import (
    DamageError,
    HoldingError,
    InputError,
    MissingError,
    VanishedError,
    WeirError,
    from_report,
    to_report,
)
from tests.recovery.small import Bank, accounts, pipeline
from tests.tools.sampling import sampled
from tests.tools.stages import with_input
from weir.cli.prometheus import Watched
from weir.connectors.delta import append
from weir.execution.in_process import InMemoryExecutor
from weir.operations.forks import branched, fork
from weir.ownership import hold_causes
from weir.ownership.pipeline_storage import open_storage
from weir.run.run import RunOptions, run
from weir.run.sensor import Action, SensorMemory, Sight, decide, observe


@pytest.fixture
def bank(tmp_path) -> Bank:
    """Two files are read."""
    bank = Bank.at(tmp_path, WEIR_CHECKPOINTS__NUM_RETAINED="3")
    bank.epochs(1, 2)
    return bank


def seen(bank: Bank) -> Sight:
    return observe(bank.site.pipeline, bank.site.settings)


def ticks(bank: Bank, count: int) -> list[Action]:
    """What so many ticks of a sensor ask for, if no run comes of it."""
    memory, asked = SensorMemory(), []
    for _ in range(count):
        decision = decide(seen(bank), memory, 0)
        memory = decision.memory
        asked.append(decision.action)
    return asked


def rubbish(bank: Bank, number: int) -> Path:
    file = bank.site.landing / f"{number:05}.parquet"
    file.write_bytes(b"no parquet")
    return file


def newest_object(bank: Bank) -> Path:
    storage = open_storage(bank.site.pipeline, bank.site.settings)[0]
    (listed,) = [file for file in bank.registry.files(bank.registry.head()) if file.path.endswith("/CURRENT")][:1]
    return Path(storage.full(listed.path))


def noted(bank: Bank, error: WeirError) -> None:
    """As when a run of the newest generation has ended over it."""
    assert isinstance(error, HoldingError)
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    hold_causes.note(storage, registry.head(), registry.generation(), None, error)


def held_by_a_file(bank: Bank) -> Path:
    file = rubbish(bank, 3)
    with pytest.raises(InputError):
        bank.epochs()
    return file


def held_by_damage(bank: Bank) -> Path:
    victim = newest_object(bank)
    victim.rename(victim.with_name("kept"))
    with pytest.raises(DamageError):
        bank.epochs(3)
    return victim


# -- what sensors and people are told


@pytest.mark.parametrize(("causes", "error"), [(held_by_a_file, "InputError"), (held_by_damage, "DamageError")])
def test_sensors_wait_and_name_error_and_file_first(bank, weir, causes, error):
    file = causes(bank)
    assert set(ticks(bank, 40)) == {Action.WAIT}
    reason = decide(seen(bank), SensorMemory(), 0).reason
    assert reason.startswith(f"held: {error}, {file}")
    assert "weir run" in reason and "goes on by itself" in reason

    first, *_ = weir(bank.site, "status", "small").out.splitlines()
    assert first.startswith("held") and error in first and str(file) in first
    note = json.loads(weir(bank.site, "status", "small", "--json").out)["held"]
    assert note["error"] == error and str(file) in note["where"]
    assert Watched("small", bank.site.settings).look().hold


def test_a_file_that_is_moved_away_or_repaired_lets_the_pipeline_go_on(bank):
    file = held_by_a_file(bank)
    good = bank.site.landing / ".good"
    bank.land(4)  # what arrives meanwhile changes nothing about the bad one
    assert ticks(bank, 1) == [Action.WAIT]
    file.rename(bank.site.root / "aside")
    assert ticks(bank, 1) == [Action.RUN]
    (bank.site.root / "aside").rename(file)
    assert ticks(bank, 1) == [Action.WAIT], "it is the very same again"
    ids = [f"k{key}" for key in range(8)] + [f"only-3-{key}" for key in range(2)]
    pq.write_table(pa.table({"id": ids, "at": list(range(10)), "amount": [3] * 10}), good)
    good.rename(file)
    assert ticks(bank, 1) == [Action.RUN]
    bank.epochs()
    assert seen(bank).held is None
    bank.assert_exact(1, 2, 3, 4)


@pytest.mark.parametrize("again", [shutil.copy2, Path.replace], ids=["copied", "moved"])
def test_an_object_that_is_put_back_lets_the_pipeline_go_on(bank, again):
    victim = held_by_damage(bank)
    again(victim.with_name("kept"), victim)
    assert ticks(bank, 1) == [Action.RUN]
    bank.epochs()
    bank.assert_exact(1, 2, 3)
    assert not (bank.site.storage / gate_hold.PATH).exists()


def test_an_altered_object_that_is_put_back_as_it_was_with_size_and_time_lets_it_go_on(bank):
    victim = next(file for file in newest_object(bank).parent.iterdir() if file.suffix == ".sst")
    shutil.copy2(victim, bank.site.root / "backup")
    before, data = victim.stat(), bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
    shutil.rmtree(bank.site.root / "work")  # the next host fetches it
    with pytest.raises(DamageError, match="sha256"):
        bank.epochs(3)
    assert ticks(bank, 3) == [Action.WAIT] * 3
    shutil.copy2(bank.site.root / "backup", victim)
    assert ticks(bank, 1) == [Action.RUN]
    bank.epochs()
    bank.assert_exact(1, 2, 3)


def test_a_table_that_is_put_back_lets_the_pipeline_go_on(bank):
    table = bank.site.storage / "tables" / "booked"
    table.rename(bank.site.root / "table")
    with pytest.raises(DamageError, match="sink table"):
        bank.epochs(3)
    assert ticks(bank, 3) == [Action.WAIT] * 3
    (bank.site.root / "table").rename(table)
    assert ticks(bank, 1) == [Action.RUN]
    bank.epochs()
    bank.assert_exact(1, 2, 3)


def test_a_landing_directory_that_comes_back_lets_the_pipeline_go_on(bank):
    bank.land(3)
    bank.site.landing.rename(bank.site.root / "unmounted")
    with pytest.raises(InputError, match="landing directory is gone"):
        list(run(bank.site.pipeline, bank.site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    assert ticks(bank, 3) == [Action.WAIT] * 3
    (bank.site.root / "unmounted").rename(bank.site.landing)
    assert ticks(bank, 1) == [Action.RUN]
    bank.epochs()
    bank.assert_exact(1, 2, 3)


def test_rows_that_no_epoch_can_read_hold_with_the_files_that_it_had_read(bank):
    rows = pa.table({"id": ["k0", None], "at": [0, 1], "amount": [3, 3]})
    pq.write_table(rows, bank.site.landing / "00003.parquet")
    with pytest.raises(InputError, match="has no 'id'"):
        bank.epochs()
    reason = decide(seen(bank), SensorMemory(), 0).reason
    assert reason.startswith("held: InputError, stage accounts") and "00003.parquet" in reason
    assert ticks(bank, 3) == [Action.WAIT] * 3
    (bank.site.landing / "00003.parquet").unlink()
    bank.epochs(4)
    bank.assert_exact(1, 2, 4)


# -- what nothing recorded can end holds nobody


@pytest.mark.parametrize(
    "where",
    sampled(
        [
            "/work/on/one/host/accounts/0/state.arrow",
            "checkpoint 2, channels/g1-e2/rows.parquet",
            "epoch 3",
            "stage accounts",
            "state/parking/g1-e1/state.arrow",
            None,
        ],
        2,
    ),
)
def test_damage_that_names_no_object_in_storage_holds_nothing(bank, where):
    noted(bank, DamageError("Something is wrong.", where=where))
    bank.land(3)
    assert ticks(bank, 40).count(Action.RUN) > 1, "ever more rarely, as before"


def test_a_staged_file_that_has_vanished_holds_nothing(bank, monkeypatch):
    """The next run stages anew, under another name: what is gone never comes back."""
    checking = append.check

    def check_too_late(storage, files, schemas):
        for file in files:
            storage.delete(file.path)
        checking(storage, files, schemas)

    with monkeypatch.context() as patched:
        patched.setattr(append, "check", check_too_late)
        with pytest.raises(DamageError, match="A staged file is gone"):
            bank.epochs(3)
    assert ticks(bank, 1) == [Action.RUN]
    bank.epochs()
    bank.assert_exact(1, 2, 3)


def test_rows_of_an_epoch_that_have_vanished_hold_nothing(bank):
    noted(bank, VanishedError("It is gone.", where=f"{bank.site.storage}/channels/g1-e3/rows.parquet"))
    assert seen(bank).held is None


class Unmounted(InMemoryExecutor):
    """Its executors see neither the landing directory nor what is stored, which lie on a disk that is the coordinator's
    alone."""

    def __init__(self, hidden: Path) -> None:
        super().__init__()
        self._hidden = hidden

    def run(self, task, rows, columns, deadline):
        aside = self._hidden.with_name("unmounted")
        self._hidden.rename(aside)
        try:
            return super().run(task, rows, columns, deadline)
        finally:
            aside.rename(self._hidden)


@pytest.mark.parametrize("on_bad", ["fail", "quarantine"])
def test_a_file_that_executors_alone_do_not_see_holds_nothing_and_is_not_set_aside(tmp_path, on_bad):
    source = replace(accounts.inputs[0].origin, on_bad=on_bad)
    site = Bank.at(tmp_path).site
    bank = Bank(replace(site, pipeline=replace(pipeline, stages=(with_input(accounts, source),))))
    bank.epochs(1)
    with pytest.raises(InputError, match="vanished"):
        bank.epochs(2, executor=Unmounted(bank.site.landing))
    assert ticks(bank, 1) == [Action.RUN]
    bank.epochs()
    bank.assert_exact(1, 2)


def test_an_object_that_executors_alone_do_not_see_holds_nothing(bank):
    path = newest_object(bank)
    noted(bank, from_report(to_report(MissingError("A file is missing.", where=str(path)))))
    bank.land(3)
    assert ticks(bank, 1) == [Action.RUN]
    path.rename(path.with_name("kept"))
    noted(bank, from_report(to_report(MissingError("A file is missing.", where=str(path)))))
    assert ticks(bank, 1) == [Action.WAIT], "it is gone for everybody"
    path.with_name("kept").rename(path)
    assert ticks(bank, 1) == [Action.RUN]


def test_an_epoch_that_has_read_no_file_holds_nothing(bank):
    error = InputError("2 rows have no event time in 'at'.", where="stage accounts")
    error.epoch, error.files = 3, {"landing": {}}
    noted(bank, error)
    assert seen(bank).held is None


def test_input_of_a_source_that_the_pipeline_has_no_more_holds_nothing(bank):
    error = InputError("It is no Parquet file.", where=f"{bank.site.landing}/00003.parquet")
    error.files = {"another": {"00003.parquet": (1, 2)}}
    noted(bank, error)
    assert seen(bank).held is None


def test_an_object_that_a_branch_has_inherited_is_looked_at_where_it_lies(bank):
    bank.epochs(3)
    fork(bank.site.pipeline, bank.site.settings, "what-if", 2)
    branch = Bank(replace(bank.site, pipeline=branched(bank.site.pipeline, bank.site.settings, "what-if")))
    (listed,) = [file for file in branch.registry.files(branch.registry.head()) if file.path.endswith("/CURRENT")][:1]
    victim = bank.site.storage / listed.path.removeprefix("parent/")
    victim.rename(victim.with_name("kept"))
    with pytest.raises(DamageError):
        branch.epochs()
    assert ticks(branch, 3) == [Action.WAIT] * 3
    victim.with_name("kept").rename(victim)
    assert ticks(branch, 1) == [Action.RUN]


def test_what_holds_no_more_takes_the_note_of_an_earlier_run_along(bank):
    held_by_a_file(bank)
    noted(bank, DamageError("Something else is wrong.", where="epoch 3"))
    assert seen(bank).held is None


# -- what it does not do


def test_a_person_tries_again_and_a_correction_of_the_code_clears_it(bank):
    rows = pa.table({"id": ["only-3-0", None], "at": [0, 1], "amount": [3, 3]})
    pq.write_table(rows, bank.site.landing / "00003.parquet")
    with pytest.raises(InputError):
        bank.epochs()
    with pytest.raises(InputError):
        bank.epochs()
    assert ticks(bank, 1) == [Action.WAIT]
    corrected = replace(pipeline, stages=(replace(accounts, null_keys="drop"),))
    Bank(replace(bank.site, pipeline=corrected)).epochs()
    bank.land(4)
    assert ticks(bank, 1) == [Action.RUN]


def test_a_rewind_away_from_the_damage_lets_the_pipeline_go_on(bank, weir):
    held_by_damage(bank)
    assert weir(bank.site, "rewind", "small", "--to", "1", "--yes").code == 0
    assert ticks(bank, 1) == [Action.RUN]
    bank.epochs()
    bank.assert_exact(1, 2, 3)


def test_a_coordinator_that_died_after_the_hold_is_restored(bank):
    """The hold speaks of the generation that noted it; what a later one left is to be recovered."""
    held_by_a_file(bank)
    sight = seen(bank)
    died = replace(sight, alive=False, holder=replace(sight.holder, stopped=False))
    assert decide(died, SensorMemory(), 0).action is Action.WAIT, "it died while it noted the hold"
    later = replace(died, holder=replace(died.holder, generation=sight.holder.generation + 1), held_since=False)
    assert decide(later, SensorMemory(), 0).action is Action.RESTORE


def test_notes_of_earlier_releases_are_those_of_gates(bank):
    written = {
        "when": "2026-01-01T00:00:00+00:00",
        "run_id": None,
        "epoch": 9,
        "stage": "accounts",
        "message": "A gate.\nx",
    }
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    written |= {"verdicts": [], "files": {"landing": ["00002.parquet"]}}
    storage.put_bytes(gate_hold.PATH, json.dumps(written).encode())
    note = gate_hold.read(storage, head.id if (head := registry.head()) else None)
    assert note is not None and note.error == "GateError"
    assert decide(seen(bank), SensorMemory(), 0).reason.startswith("held: A gate.")
