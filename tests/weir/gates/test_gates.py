"""Gates that hold and gates that warn, on rows, figures and state; the note that a gate holds; gates from the
configuration."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from state_ops.coordination import gate_hold
from state_ops.errors import ConfigurationError, GateError, PipelineError
from tests.recovery.harness import Site
from tests.recovery.small import Apart, Bank, accounts, pipeline
from weir import Pipeline, Stage, agg, aggregate, delta, expect, files, loading, on_table
from weir.cli.status import status_of
from weir.definition import Gate
from weir.execution.in_process import InMemoryExecutor
from weir.gates import epoch_gates, evaluation
from weir.gates.evaluation import GateVerdict
from weir.run.run import open_storage
from weir.run.sensor import observe
from weir.settings import configuration as settings
from weir.sinks.open_sinks import Sinks


def between(column: str, low: float, high: float, **more) -> Gate:
    return expect("ExpectColumnValuesToBeBetween", column=column, min_value=low, max_value=high, **more)


def gated(root: Path, *asked: Gate, stage: Stage = accounts, **options: str) -> Bank:
    """The small pipeline, each file an epoch, whose file n books n for ten keys; with gates."""
    bank = Bank.at(root / "site", **options)
    checked = replace(pipeline, stages=(replace(stage, gates=asked),))
    return Bank(replace(bank.site, pipeline=checked))


def storage_of(bank: Bank):
    return open_storage(bank.site.pipeline, bank.site.settings)[0]


# -- policies


def test_a_gate_that_warns_lets_the_epoch_go_on_and_its_verdict_is_recorded(tmp_path):
    bank = gated(tmp_path, between("amount", 0, 1, on_failure="warn"), between("amount", 0, 2))
    first, second = bank.epochs(1, 2)
    assert [verdict.passed for verdict in first.verdicts] == [True, True]
    warned, passed = second.verdicts
    assert (warned.passed, warned.on_failure, warned.of, warned.rows, warned.unexpected) == (
        False,
        "warn",
        "rows",
        10,
        10,
    )
    assert passed.passed and passed.on_failure == "hold"
    bank.assert_exact(1, 2)
    recorded = bank.registry.head().operators["accounts"].gates
    assert recorded == [
        {
            "title": 'ExpectColumnValuesToBeBetween(column="amount", max_value=1, min_value=0)',
            "of": "rows",
            "on_failure": "warn",
            "passed": False,
            "rows": 10,
            "unexpected": 10,
            "sample": [2, 2, 2],
            "keys": [{"id": "k1"}, {"id": "k2"}, {"id": "k3"}],
        },
        passed.recorded(),
    ]
    assert gate_hold.read(storage_of(bank), None) is None


def test_a_gate_that_holds_says_all_verdicts_of_its_stage(tmp_path):
    bank = gated(tmp_path, between("amount", 0, 1), between("at", 0, 99), between("amount", 0, 1.5, on_failure="warn"))
    with pytest.raises(
        GateError, match=r'10 of 10 rows, e\.g\. 2 \(id = "k1"\), 2 \(id = "k2"\), 2 \(id = "k3"\)'
    ) as raised:
        bank.epochs(1, 2, 3)
    assert [(verdict["stage"], verdict["passed"], verdict["on_failure"]) for verdict in raised.value.verdicts] == [
        ("accounts", False, "hold"),
        ("accounts", True, "hold"),
        ("accounts", False, "warn"),
    ]
    assert bank.ids() == [1]
    bank.assert_exact(1)
    bank.site.assert_no_orphans()


def test_arguments_may_be_lists(tmp_path):
    bank = gated(tmp_path, expect("ExpectColumnValuesToBeInSet", column="amount", value_set=[1], on_failure="warn"))
    assert [report.verdicts[0].passed for report in bank.epochs(1, 2)] == [True, False]


def test_a_gates_title_has_its_arguments_as_json_and_what_checkpoints_of_before_call_it_is_known():
    gate = expect("ExpectColumnValuesToBeInSet", column="day", value_set=(date(2026, 1, 2), None))
    assert gate.title == 'ExpectColumnValuesToBeInSet(column="day", value_set=["2026-01-02", null])'
    before = "ExpectColumnValuesToBeInSet(column='day', value_set=(datetime.date(2026, 1, 2), None))"
    assert gate.is_titled(gate.title) and gate.is_titled(before) and not gate.is_titled(before.upper())


def test_a_verdict_says_values_as_json():
    failed = GateVerdict("s", "g", False, 1200, 0, ({"quantiles": [0.5], "values": [None]},))
    assert str(failed) == 'g: found {"quantiles": [0.5], "values": [null]}, in 1,200 rows'
    assert str(replace(failed, sample=())) == "g: found something else, in 1,200 rows"
    assert replace(failed, unexpected=1100, sample=("it's",)).outcome == '1,100 of 1,200 rows, e.g. "it\'s"'


def test_gates_that_ask_the_same_each_have_their_verdict(tmp_path):
    low = between("amount", 0, 1, on_failure="warn")
    bank = gated(tmp_path, low, low, between("amount", 0, 1, on_failure="warn", mostly=0.5), between("amount", 0, 2))
    report = bank.epochs(1, 2)[-1]
    assert [(verdict.passed, verdict.unexpected) for verdict in report.verdicts] == [(False, 10)] * 3 + [(True, 0)]


def test_a_sample_says_whose_rows_it_shows():
    rows = pa.table({"k": list("abcdefgh"), "v": [1, 2, 30, 4, 50, None, 70, 80]})
    by_row, by_column = evaluation.evaluated(
        "w", "s", [between("v", 0, 10), expect("ExpectColumnMeanToBeBetween", column="v", max_value=10)], rows
    )
    verdict, mean = evaluation.with_keys([by_row, by_column], ("k", "gone"), lambda: rows)
    assert verdict.sample == (30, 50, 70)
    assert verdict.keys == ({"k": "c"}, {"k": "e"}, {"k": "g"})
    assert str(verdict).endswith('4 of 8 rows, e.g. 30 (k = "c"), 50 (k = "e"), 70 (k = "g")')
    assert mean.keys == () and not mean.passed
    recorded = verdict.recorded()
    assert evaluation.GateVerdict.from_dict("s", recorded).keys == verdict.keys
    assert (
        evaluation.GateVerdict.from_dict("s", {name: recorded[name] for name in recorded if name != "keys"}).keys == ()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_failure": "ignore"}, 'on_failure="ignore"'),
        ({"of": "offsets"}, 'of="offsets"'),
    ],
)
def test_an_unknown_policy_is_refused_where_it_is_written(arguments, message):
    with pytest.raises(PipelineError, match=message) as raised:
        expect("ExpectColumnValuesToNotBeNull", column="id", **arguments)
    assert "Say one of" in raised.value.next


def test_on_restore_refuses_what_gates_alone_can_look_at():
    with pytest.raises(PipelineError, match='of="figures"'):
        replace(pipeline, on_restore=(on_table("booked", between("amount", 0, 1, of="figures")),))


# -- held


def test_a_hold_is_noted_until_the_next_checkpoint(tmp_path, weir):
    bank = gated(tmp_path, between("amount", 0, 3))
    with pytest.raises(GateError):
        bank.epochs(1, 2, 7, run_id="r-1")
    note = gate_hold.read(storage_of(bank), None)
    assert note is not None
    assert (note.stage, note.run_id, note.files) == ("accounts", "r-1", {"landing": ("00007.parquet",)})
    assert (
        note.epoch > 2
        and [verdict["passed"] for verdict in note.verdicts] == [False]
        and "10 of 10 rows" in note.message
    )

    shown = weir(bank.site, "status", "small", "--json")
    assert json.loads(shown.out)["held"] == json.loads(json.dumps(note.to_dict()))
    output = weir(bank.site, "status", "small").out
    row, below = output.split("\n\n")
    assert "by a gate of accounts: see below" in row and "next:" not in row, "the table stays narrow"
    assert '10 of 10 rows, e.g. 7 (id = "k1")' in below
    assert f"files: 1 file in {bank.site.landing}: 00007.parquet" in below

    (bank.site.landing / "00007.parquet").unlink()
    bank.epochs()
    assert gate_hold.read(storage_of(bank), None) == note, "nothing was committed"
    bank.epochs(3)
    assert gate_hold.read(storage_of(bank), None) is None
    bank.assert_exact(1, 2, 3)
    assert json.loads(weir(bank.site, "status", "small", "--json").out)["held"] is None
    bank.site.assert_no_orphans()
    assert weir(bank.site, "fsck", "small").code == 0


def test_a_note_that_a_run_could_not_remove_before_it_was_ended_holds_nobody(tmp_path, monkeypatch):
    """Cancelled between the commit of the first epoch after the hold and its end: the sensor must not wait for a person
    for ever."""
    bank = gated(tmp_path, between("amount", 0, 3))
    with pytest.raises(GateError):
        bank.epochs(1, 7)
    assert observe(bank.site.pipeline, bank.site.settings).held is not None
    (bank.site.landing / "00007.parquet").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(gate_hold, "clear", lambda _: False)
        bank.epochs(2)
    assert gate_hold.read(storage_of(bank), None) is not None, "the note is there"
    assert observe(bank.site.pipeline, bank.site.settings).held is None
    assert status_of(bank.site.pipeline, bank.site.settings)["held"] is None
    bank.epochs(3)
    assert gate_hold.read(storage_of(bank), None) is None


def test_a_note_that_cannot_be_written_or_read_changes_nothing_else(tmp_path):
    bank = gated(tmp_path, between("amount", 0, 3))
    (bank.site.storage / gate_hold.PATH).mkdir(parents=True)
    with pytest.raises(GateError):
        bank.epochs(1, 7)
    (bank.site.landing / "00007.parquet").unlink()
    bank.epochs(2)
    bank.assert_exact(1, 2)
    (bank.site.storage / gate_hold.PATH).rmdir()
    (bank.site.storage / gate_hold.PATH).write_text("{half")
    assert gate_hold.read(storage_of(bank), None) is None
    bank.epochs(3)
    assert not (bank.site.storage / gate_hold.PATH).exists(), "what cannot be read is outdated after a commit too"


# -- figures and state


def test_figures_are_looked_at_as_the_checkpoint_records_them(tmp_path):
    asked = between("rows_in", 10, 10, of="figures"), between("rows_out", 11, 99, of="figures", on_failure="warn")
    bank = gated(tmp_path, *asked)
    (report,) = bank.epochs(1)
    assert [
        (verdict.of, verdict.passed, verdict.rows, verdict.unexpected, verdict.sample) for verdict in report.verdicts
    ] == [
        ("figures", True, 1, 0, ()),
        ("figures", False, 1, 1, (10,)),
    ]
    assert [verdict["of"] for verdict in report.checkpoint.operators["accounts"].gates] == ["figures", "figures"]
    (drained,) = bank.epochs(drain=True)
    assert not drained.verdicts, "no rows came"


def test_tables_are_looked_at_once_more_after_gates_on_the_whole(tmp_path, monkeypatch):
    judged, verdicts = [], epoch_gates.verdicts

    def judging(*asked):
        judged.extend(results := verdicts(*asked))
        return results

    monkeypatch.setattr(epoch_gates, "verdicts", judging)
    # Somebody alters the table in the meantime.
    monkeypatch.setattr(Sinks, "fits", lambda *_: not judged)
    bank = gated(tmp_path, between("rows_in", 10, 10, of="figures"))
    bank.epochs(1)
    assert judged
    bank.assert_exact(1)


def test_figures_that_a_gate_refuses_hold_the_epoch_and_leave_nothing(tmp_path):
    bank = gated(tmp_path, between("rows_out", 0, 9, of="figures"))
    with pytest.raises(GateError, match="1 of 1 row,"):
        bank.epochs(1)
    assert not bank.ids() and not (bank.site.storage / "tables").exists()
    assert gate_hold.read(storage_of(bank), None) is not None
    assert not (bank.site.storage / "state").exists(), "what was uploaded is discarded"


@pytest.mark.parametrize("executor", [InMemoryExecutor, Apart])
def test_state_is_looked_at_as_it_would_be_committed(tmp_path, executor):
    bank = gated(tmp_path, between("total", 0, 3, of="state"), WEIR_SPARK__PARALLELISM="2")
    for number in (1, 2):
        (report,) = bank.epochs(number, executor=executor())
        assert [(verdict.of, verdict.passed, verdict.rows) for verdict in report.verdicts] == [
            ("state", True, 8 + 2 * number)
        ]
    with pytest.raises(GateError, match="8 of 14 rows") as raised:
        bank.epochs(3, executor=executor())
    assert raised.value.verdicts[0]["sample"] == [6, 6, 6]
    assert bank.ids() == [2]
    bank.assert_exact(1, 2)
    bank.site.assert_no_orphans()
    assert not list((bank.site.root / "work").rglob(".gates-*"))


def test_a_look_at_state_that_was_killed_leaves_nothing_for_long(tmp_path):
    bank = gated(tmp_path, between("total", 0, 3, of="state"))
    bank.epochs(1)
    (home,) = (path for path in (bank.site.root / "work").iterdir() if path.name.startswith("small-"))
    left = home / ".gates-999999999-abc"
    left.mkdir()
    bank.epochs(2)
    assert not left.exists()


@pytest.mark.long
def test_of_a_large_state_every_subtask_shows_its_share_and_other_groups_have_their_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(epoch_gates, "SAMPLE_ROWS", 8)
    seen: list[set[str]] = []
    evaluated = epoch_gates.evaluation.evaluated

    def noted(where, name, asked, rows):
        assert rows.num_rows <= 8
        seen.append(set(rows.column("id").to_pylist()))
        return evaluated(where, name, asked, rows)

    monkeypatch.setattr(epoch_gates.evaluation, "evaluated", noted)
    bank = gated(tmp_path, between("rows", 0, 99, of="state"), WEIR_SPARK__PARALLELISM="2")
    bank.epochs(*range(1, 9))
    assert all(len(sample) == 8 for sample in seen)
    assert len(set.union(*seen)) > 16, "one after the other all are seen"


def test_open_windows_and_aggregates_have_state_too(tmp_path):
    source = files("{landing}/*.parquet", name="landing")
    totals = aggregate("accounts", source, key="id", total=agg.sum("amount"), sink=delta.append("booked"))
    bank = gated(tmp_path, between("total", 0, 2, of="state"), stage=totals)
    bank.epochs(1)
    with pytest.raises(GateError, match="8 of 12 rows"):
        bank.epochs(2)


def test_a_gate_that_cannot_be_evaluated_is_an_error_of_the_pipeline(tmp_path):
    for number, wrong in enumerate((between("nowhere", 0, 1), between("nowhere", 0, 1, of="state"))):
        with pytest.raises(PipelineError, match="nowhere"):
            gated(tmp_path / str(number), replace(wrong, on_failure="warn")).epochs(1)


def test_gates_read_the_columns_that_they_name_alone(tmp_path, monkeypatch):
    read: list[list[str]] = []
    staged_table = evaluation.staged_table

    def noted(*file):
        table = staged_table(*file)
        read.append(table.column_names)
        return table

    monkeypatch.setattr(evaluation, "staged_table", noted)
    gated(tmp_path / "one", between("amount", 0, 9)).epochs(1)
    assert read and all(names == ["amount"] for names in read)
    read.clear()
    gated(tmp_path / "all", expect("ExpectTableColumnCountToEqual", value=3)).epochs(1)
    assert read and all(len(names) == 3 for names in read)


# -- from the configuration


def _loaded(site: Site, **more: str) -> Pipeline:
    return loading.load_pipeline("small", settings.load({**site.env, **more}))


def test_the_configuration_adds_gates_behind_those_in_the_code(tmp_path):
    bank = Bank.at(tmp_path / "site")
    asked = {
        "accounts": [
            {"expect": "ExpectColumnValuesToBeBetween", "column": "amount", "max_value": 1, "on_failure": "warn"}
        ]
    }
    restored = [{"expect": "ExpectColumnValuesToNotBeNull", "column": "amount", "table": "booked"}]
    more = {
        "WEIR_PIPELINES__SMALL__GATES": json.dumps(asked),
        "WEIR_PIPELINES__SMALL__ON_RESTORE": json.dumps(restored),
    }
    loaded = _loaded(bank.site, **more)
    assert loaded.stages[0].gates == (
        expect("ExpectColumnValuesToBeBetween", column="amount", max_value=1, on_failure="warn"),
    )
    assert loaded.on_restore == (on_table("booked", expect("ExpectColumnValuesToNotBeNull", column="amount")),)
    assert _loaded(bank.site) is pipeline
    bank = Bank(replace(bank.site, pipeline=loaded))
    report = bank.epochs(1, 2)[-1]
    assert [verdict.passed for verdict in report.verdicts] == [False]


def test_gates_of_the_configuration_reach_the_stages_behind(tmp_path):
    env = {**Site(tmp_path / "site").env}
    env["WEIR_PIPELINES__FLIGHTS__GATES"] = json.dumps(
        {"aircraft_rotation": [{"expect": "ExpectColumnValuesToNotBeNull", "column": "dest"}]}
    )
    flights = loading.load_pipeline("flights", settings.load(env))
    first, second = flights.stages
    assert [gate.expectation for gate in first.gates] == [
        "ExpectColumnValuesToBeBetween",
        "ExpectColumnValuesToNotBeNull",
    ]
    assert second.inputs[0].origin is first


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("GATES", {"nowhere": []}, "pipelines.small.gates.nowhere"),
        ("GATES", {"accounts": [{"expect": "Nothing"}]}, "pipelines.small.gates.accounts.0"),
        ("GATES", {"accounts": [{"expect": "ExpectX", "on_failure": "shout"}]}, "pipelines.small.gates.accounts.0"),
        ("ON_RESTORE", [{"expect": "ExpectX", "table": "nowhere"}], "pipelines.small.on_restore"),
    ],
)
def test_what_is_wrong_with_a_gate_of_the_configuration_names_its_key(tmp_path, key, value, where):
    with pytest.raises(ConfigurationError) as raised:
        _loaded(Bank.at(tmp_path / "site").site, **{f"WEIR_PIPELINES__SMALL__{key}": json.dumps(value)})
    assert raised.value.where == where


def test_a_restore_expectation_names_one_thing_to_look_at(tmp_path):
    value = json.dumps([{"expect": "ExpectX", "table": "booked", "state": "accounts"}])
    with pytest.raises(ConfigurationError, match="name either a state or a table"):
        _loaded(Bank.at(tmp_path / "site").site, WEIR_PIPELINES__SMALL__ON_RESTORE=value)


# -- numbers are what they are, with nulls and without

BIG = 2**60
IDS = [BIG + 1, BIG + 2, None, BIG + 4]


def asked_of(rows: dict[str, pa.Array], expectation: str, **arguments) -> tuple:
    """Whether the gate passes, and the rows that it would set aside, where it looks at rows."""
    of_rows = "Values" in expectation and "Distinct" not in expectation and "OfType" not in expectation
    gate = expect(expectation, on_failure="quarantine" if of_rows else "hold", **arguments)
    (verdict,) = evaluation.check(replace(accounts, gates=(gate,)), pa.table(rows))
    return verdict.passed, verdict.unexpected_rows


@pytest.mark.parametrize("type", [pa.int64(), pa.uint64(), pa.decimal128(38, 0)], ids=str)
@pytest.mark.parametrize(
    ("expectation", "arguments", "passed", "aside"),
    [
        ("ExpectColumnValuesToBeUnique", {}, True, ()),
        ("ExpectColumnValuesToBeInSet", {"value_set": [BIG + 1, BIG + 2]}, False, (3,)),
        ("ExpectColumnValuesToNotBeInSet", {"value_set": [BIG + 2]}, False, (1,)),
        ("ExpectColumnValuesToBeBetween", {"max_value": BIG}, False, (0, 1, 3)),
        ("ExpectColumnValuesToBeBetween", {"max_value": BIG + 2}, False, (3,)),
        ("ExpectColumnValuesToBeBetween", {"min_value": BIG + 2}, False, (0,)),
        ("ExpectColumnValuesToNotBeNull", {}, False, (2,)),
        ("ExpectColumnDistinctValuesToBeInSet", {"value_set": [BIG + 1, BIG + 2, BIG + 4]}, True, ()),
        ("ExpectColumnUniqueValueCountToBeBetween", {"min_value": 3}, True, ()),
        ("ExpectColumnMaxToBeBetween", {"max_value": BIG}, False, ()),
        ("ExpectColumnMinToBeBetween", {"max_value": BIG}, False, ()),
        ("ExpectColumnMinToBeBetween", {"min_value": BIG + 1, "max_value": BIG + 1}, True, ()),
    ],
)
@pytest.mark.parametrize("nulls", [True, False])
def test_large_numbers_are_judged_exactly_also_beside_a_null(type, expectation, arguments, passed, aside, nulls):
    if not nulls:
        kept, passed = tuple(row for row in aside if row != 2), passed or aside == (2,)
        rows, aside = [id for id in IDS if id is not None], tuple(2 if row == 3 else row for row in kept)
    else:
        rows = IDS
    assert asked_of({"id": pa.array(rows, type)}, expectation, column="id", **arguments) == (passed, aside)


@pytest.mark.parametrize("type", [pa.int64(), pa.uint64()], ids=str)
def test_figures_and_pairs_of_large_numbers_are_exact_also_beside_a_null(type):
    ids, others = pa.array(IDS, type), pa.array([BIG, None, 5, BIG + 4], type)
    rows = {"id": ids, "other": others}
    total = 3 * BIG + 7
    assert asked_of(rows, "ExpectColumnSumToBeBetween", column="id", min_value=total, max_value=total) == (True, ())
    assert asked_of(rows, "ExpectColumnSumToBeBetween", column="id", max_value=total - 1) == (False, ())
    summed = expect("ExpectMulticolumnSumToEqual", column_list=["id", "other"], sum_total=2 * BIG + 1)
    (verdict,) = evaluation.check(replace(accounts, gates=(summed,)), pa.table(rows))
    assert (verdict.unexpected, verdict.sample_rows) == (3, (1, 2, 3))
    pair = {"column_A": "id", "column_B": "other"}
    greater = "ExpectColumnPairValuesAToBeGreaterThanB"
    assert asked_of(rows, greater, **pair, ignore_row_if="either_value_is_missing") == (False, (3,))
    assert asked_of(rows, greater, **pair, or_equal=True) == (False, (1, 2))
    assert asked_of(rows, "ExpectColumnPairValuesToBeEqual", **pair) == (False, (0, 1, 2))
    compound = {"id": pa.array([BIG, BIG + 1, None], type), "other": pa.array([None, None, 1], type)}
    assert asked_of(compound, "ExpectCompoundColumnsToBeUnique", column_list=["id", "other"]) == (True, ())


def test_a_sum_beyond_64_bits_is_no_negative_number():
    rows = {"id": pa.array([2**62, 2**62, 2**62], pa.int64())}
    assert asked_of(rows, "ExpectColumnSumToBeBetween", column="id", min_value=3 * 2**62) == (True, ())
    many = {"id": pa.array([2**52] * 4096, pa.int64())}
    assert asked_of(many, "ExpectColumnSumToBeBetween", column="id", min_value=2**64) == (True, ())


def test_a_null_changes_no_type():
    for values, kind, name in (
        ([1, None], pa.int64(), "int64"),
        ([2, None], pa.uint64(), "uint64"),
        ([True, None], pa.bool_(), "bool"),
    ):
        for rows in (values, values[:1]):
            column = {"x": pa.array(rows, kind)}
            assert asked_of(column, "ExpectColumnValuesToBeOfType", column="x", type_=name) == (True, ())
    assert asked_of(
        {"x": pa.array([True, None, False])}, "ExpectColumnValuesToBeInSet", column="x", value_set=[True]
    ) == (False, (2,))


@pytest.mark.parametrize("name", ["Mean", "Median", "Stdev", "Sum"])
def test_figures_of_decimals_with_nulls_can_be_asked_for(name):
    rows = {"x": pa.array([Decimal("1.5"), None, Decimal("2.5")])}
    assert asked_of(rows, f"ExpectColumn{name}ToBeBetween", column="x", min_value=0.5, max_value=4) == (True, ())
    assert asked_of(rows, "ExpectColumnValueZScoresToBeLessThan", column="x", threshold=3, double_sided=True) == (
        True,
        (),
    )
