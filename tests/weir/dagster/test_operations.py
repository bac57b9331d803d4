"""An operation of another package, in one module, is a command with its JSON and schema, and a job of Dagster."""

from __future__ import annotations

import importlib
import json
import sys

import jsonschema
import pytest

from state_ops.errors import ConfigurationError
from tests.tools.distributions import describe
from tests.weir.dagster.without_spark import House
from weir.cli import main
from weir.cli.schemas import schema
from weir.operations import declared

MODULE = '''
"""Forgets what was noted of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from state_ops.errors import WeirError
from state_ops.facts import HIDDEN, Facts
from weir.operations.operation import Argument, Done, Here, Labelled, Option, Plan, Reason, Rows, Steps, operation
from weir.ownership.pipeline_storage import open_storage


@dataclass(frozen=True, slots=True)
class Tidied(Facts):
    """The result of a removal.

    Attributes:
        note: The name of the note.
        removed: Whether it was removed; None: a dry run.
    """

    note: str
    path: Annotated[str, HIDDEN]
    removed: bool | None = None
    reason: str = ""


@operation(Tidied, job="Removes a note.", plans=True, asks=True, accepts=True)
def tidy(
    here: Here,
    note: Annotated[str, Argument("The note.", metavar="NOTE")],
    careful: Annotated[bool, Option("Refuse to remove what is there.", ("--careful",))] = False,
    reason: Reason = "",
) -> Steps:
    """Remove a note from a pipeline's storage.

    Nothing else is
    touched.
    """
    storage, _ = open_storage(here.pipeline, here.settings)
    plan = Tidied(note, f"notes/{note}")
    is_there = storage.read_bytes(plan.path) is not None
    obstacles = ("the note is there",) if careful and is_there else ()

    def check(accepted):
        if set(obstacles) - set(accepted):
            raise WeirError("The note is there.", next="Accept that.")

    words = [f"{here.name} loses a note.", Rows([("note", note, "goes")]), *(Labelled("obstacle", o) for o in obstacles)]
    accepted = yield Plan(plan, words, "tidy", obstacles, check)
    assert accepted or not obstacles
    storage.delete(plan.path)
    yield Done(replace(plan, removed=is_there, reason=reason), [f"{here.by}: the note {note} is gone [for ever]."])
'''


@pytest.fixture
def tidy(tmp_path, monkeypatch, house: House):
    """The package with the operation is installed, and the settings are those of the house."""
    describe(tmp_path, "weir-tidy", "weir.operations", {"tidy": "weir_tidy:tidy"})
    (tmp_path / "weir_tidy.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, value in house.bank.site.env.items():
        monkeypatch.setenv(name, value)
    forget()
    yield
    sys.modules.pop("weir_tidy", None)
    forget()


def forget() -> None:
    importlib.invalidate_caches()
    declared.others.cache_clear()
    main._command.cache_clear()
    schema.printed.cache_clear()


@pytest.fixture
def weir(monkeypatch, capsys):
    """Runs a command in this process, and returns its exit code and what it prints."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weir", *words])
        code = main._guarded(main.app, debug=False)
        return code, *capsys.readouterr()

    return run


def noted(house: House, note: str) -> None:
    house.storage.put_bytes(f"notes/{note}", b"...")


def test_the_command_shows_its_plan_asks_and_says_what_it_did(house, tidy, weir):
    noted(house, "old")
    assert "Remove a note from a pipeline's storage." in weir("--help")[1]
    about = " ".join(weir("tidy", "--help")[1].replace("│", "").split())
    assert "Nothing else is touched." in about and "A note that `weir checkpoints` shows." in about
    code, out, _ = weir("tidy", "small", "old", "--dry-run")
    assert (code, out) == (0, "small loses a note.\nnote  old  goes  \n")
    code, _, refused = weir("tidy", "small", "old")
    assert code == 2 and "Give --yes to tidy without a question." in refused
    assert house.storage.read_bytes("notes/old") is not None
    code, out, _ = weir("tidy", "small", "old", "--yes")
    assert (code, out.splitlines()[-1]) == (0, "weir tidy: the note old is gone [for ever].")
    assert house.storage.read_bytes("notes/old") is None


def test_the_command_goes_on_despite_obstacles_only_by_force(house, tidy, weir):
    noted(house, "old")
    code, out, err = weir("tidy", "small", "old", "--careful", "--yes")
    assert code == 1 and "obstacle  the note is there" in out and "Accept that." in err
    assert house.storage.read_bytes("notes/old") is not None
    assert weir("tidy", "small", "old", "--careful", "--yes", "--force")[0] == 0
    assert house.storage.read_bytes("notes/old") is None


def test_its_json_is_its_results_and_the_schema_describes_it(house, tidy, weir):
    noted(house, "old")
    described = json.loads(weir("schema", "tidy")[1])
    assert described["title"] == "weir tidy --json"
    assert described["properties"]["removed"]["description"] == "Whether it was removed; None: a dry run."
    shown = [json.loads(weir("tidy", "small", "old", *more, "--json")[1]) for more in (("--dry-run",), ("--yes",))]
    assert shown == [{"note": "old", "removed": None, "reason": ""}, {"note": "old", "removed": True, "reason": ""}]
    for facts in shown:
        jsonschema.Draft202012Validator(described).validate(facts)


def test_the_job_only_shows_unless_it_is_told_to_do_it(house, tidy):
    noted(house, "old")
    shown = house.execute("small_tidy_job", {"note": "old"})
    assert shown.success and house.storage.read_bytes("notes/old") is not None
    (event,) = [event for event in shown.all_events if event.event_type_value == "STEP_OUTPUT"]
    assert event.event_specific_data.metadata["plan"].value == {"note": "old", "removed": None, "reason": ""}
    assert "note old: goes" in lines(house, shown) and "nothing was changed: dry_run" in lines(house, shown)

    asked = {"note": "old", "careful": True, "dry_run": False}
    assert not house.execute("small_tidy_job", asked).success
    assert not house.execute("small_tidy_job", {**asked, "accept": ["another"]}).success
    done = house.execute("small_tidy_job", {**asked, "accept": ["the note is there"]})
    assert done.success and house.storage.read_bytes("notes/old") is None
    assert "tidy job: the note old is gone [for ever]." in lines(house, done)


def lines(house: House, done) -> list[str]:
    return [entry.user_message for entry in house.instance.all_logs(done.run_id)]


def test_an_entry_point_that_names_no_operation_is_refused(tmp_path, monkeypatch, weir):
    describe(tmp_path, "weir-tidy", "weir.operations", {"tidy": "json:dumps"})
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    try:
        with pytest.raises(ConfigurationError, match="names no operation tidy"):
            declared.declared("tidy")
        code, _, err = weir("tidy", "small")
        assert code == 2 and "json:dumps, in the group weir.operations" in err
    finally:
        forget()


@pytest.mark.parametrize("name", declared.MODULES)
def test_each_of_weirs_own_is_a_command_whose_help_has_every_option(name, weir):
    operation = declared.declared(name)
    code, shown, _ = weir(name, "--help")
    assert code == 0
    for of in operation.options:
        if of.option.only in (None, "command") and not of.option.hidden:
            assert of.option.about.split()[0] in shown
