"""Loading the definitions is cheap and touches nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pytest
from dagster._core.storage.tags import TagType, get_tag_type
from dagster._core.workspace.load_target import WorkspaceFileTarget

from pipelines import card_fraud, flights
from state_ops.errors import PipelineError
from state_ops.storage.storage import Storage
from tests.tools.stages import with_input
from weir import (
    Pipeline,
    Stage,
    State,
    agg,
    aggregate,
    as_of,
    delta,
    desc,
    expect,
    files,
    join,
    lookup,
    select,
    side,
    stage,
    top_n,
    union,
    window,
)
from weir.dagster import checks, names
from weir.dagster.factory import weir_definitions
from weir.definition.fingerprint import fingerprint_of_stage
from weir.gates.evaluation import GateVerdict
from weir.settings.configuration import PROJECT, Settings, load

PROBE = """
import json, sys
import assets.definitions as loaded
heavy = [name for name in ("pyspark", "py4j", "great_expectations") if name in sys.modules]
keys = sorted(key.to_user_string() for key in loaded.defs.resolve_all_asset_keys())
print(json.dumps({"heavy": heavy, "keys": keys}))
"""


class Count(State):
    n: int = 0


def counting(uid: str) -> Stage:
    def counts(rows: pa.Table, _state, _epoch):
        return rows

    return stage(uid, source=files("{landing}/*.parquet", name="landing"), key="k", state=Count)(counts)


def settings(root: Path, **of_flights: object) -> Settings:
    flights = {"object": "pipelines.flights:pipeline", "params": {"landing": str(root / "landing")}}
    return Settings.model_validate(
        {
            "storage": {"root": str(root / "storage")},
            "pipelines": {
                "flights": {**flights, **of_flights},
                "other": {"object": "somewhere:pipeline", "params": {"landing": str(root / "other")}},
            },
        }
    )


def test_loading_imports_no_spark_and_no_expectations_and_leaves_storage_alone(tmp_path):
    overrides = {"WEIR_STORAGE__ROOT": str(tmp_path / "storage"), "WEIR_LOCAL__WORK_DIR": str(tmp_path / "work")}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=clean | overrides, cwd=PROJECT, capture_output=True, text=True, check=True
    )
    imported = json.loads(done.stdout.splitlines()[-1])
    assert imported == {
        "heavy": [],
        "keys": [
            "flights/aircraft_rotation_stage",
            "flights/airport_hourly_stage",
            "flights/checkpoint",
            "flights/landing",
            "flights/restore_drill",
            "flights/tables/aircraft_legs",
            "flights/tables/airport_hourly",
            "flights/tables/airport_hourly_late",
        ],
    }
    assert list(tmp_path.iterdir()) == []


def test_the_graph_is_sources_then_stages_then_the_checkpoint(tmp_path):
    graph = weir_definitions([flights.pipeline], settings(tmp_path)).resolve_asset_graph()
    parents = {
        "/".join(key.path[1:]): {"/".join(parent.path[1:]) for parent in graph.get(key).parent_keys}
        for key in graph.get_all_asset_keys()
    }
    assert parents == {
        "landing": set(),
        "aircraft_rotation_stage": {"landing"},
        "airport_hourly_stage": {"aircraft_rotation_stage"},
        "tables/aircraft_legs": {"aircraft_rotation_stage"},
        "tables/airport_hourly": {"airport_hourly_stage"},
        "tables/airport_hourly_late": {"airport_hourly_stage"},
        "checkpoint": {"aircraft_rotation_stage", "airport_hourly_stage"},
        "restore_drill": {"checkpoint"},
    }
    assert {"/".join(key.path[1:]) for key in graph.executable_asset_keys} == set(parents) - {
        "landing",
        "restore_drill",
    }


def test_materialize_all_takes_the_pipeline_and_no_maintenance(tmp_path):
    """What a newcomer clicks first: Dagster's pages launch all that can be materialized, with the checks of it."""
    defs = weir_definitions([flights.pipeline], settings(tmp_path))
    graph = defs.resolve_asset_graph()
    everything = defs.resolve_implicit_global_asset_job_def()  # of which the pages launch a part
    taken = everything.get_subset(asset_selection=graph.materializable_asset_keys)
    assert {node.name for node in taken.nodes} == {"flights_epochs", "flights_checks"}, (
        "and the checks of what it makes"
    )
    maintenance = {"restore_drill_job", "retention_and_fsck", "data_docs", "savepoint_job", "rewind_job", "stop_job"}
    maintenance |= {"resume_job"}
    jobs = {job.name for job in defs.resolve_all_job_defs()}
    assert {f"flights_{name}" for name in maintenance} <= jobs
    drill = defs.resolve_job_def("flights_restore_drill_job")
    assert {node.name for node in drill.nodes} == {"flights_restore_drill"}


def test_pipelines_live_side_by_side_and_merge_into_a_project_of_ones_own(tmp_path):
    @dg.asset
    def report():
        return 1

    ours = weir_definitions([flights.pipeline, Pipeline("other", (counting("counts"),))], settings(tmp_path))
    merged = dg.Definitions.merge(dg.Definitions(assets=[report]), ours)
    assert {job.name for job in merged.resolve_all_job_defs()} >= {"flights_job", "other_job"}
    assert {sensor.name for sensor in merged.sensors or ()} == {
        f"{pipeline}_{sensor}"
        for pipeline in ("flights", "other")
        for sensor in ("checkpoint_sensor", "run_failure_sensor", "lease_watchdog", "tables_sensor")
    }
    assert dg.AssetKey(["other", "counts_stage"]) in merged.resolve_all_asset_keys()


@pytest.mark.parametrize(
    ("name", "other"), [("checkpoint", "the checkpoint"), ("counts_stage", "the stage counts")], ids=str
)
def test_a_source_that_would_be_another_asset_is_refused(tmp_path, name, other):
    source = replace(counting("counts").inputs[0].origin, name=name)
    with pytest.raises(PipelineError, match=f"same asset as {other}"):
        weir_definitions([Pipeline("other", (with_input(counting("counts"), source),))], settings(tmp_path))


def test_each_asset_has_a_name_of_its_own_in_the_graph(tmp_path):
    """The graph shows the last part of a key. A stage and its table have one name in the pipeline."""
    days = {"start": "2013-01-01"}
    defs = weir_definitions([flights.pipeline], settings(tmp_path, partitions=days, backfill=days))
    names = [key.path[-1] for key in defs.resolve_all_asset_keys()]
    assert {"airport_hourly", "airport_hourly_stage", "airport_hourly_days"} <= set(names)
    assert len(names) == len(set(names))


def test_a_gate_on_rows_is_a_check_of_what_gets_them_and_others_are_of_their_stage(tmp_path):
    on_rows = expect("ExpectColumnValuesToBeInSet", column="k", value_set=["a", None, date(2026, 1, 2)])
    on_state = expect("ExpectColumnValuesToNotBeNull", column="n", of="state")
    gated = replace(counting("counts"), gates=(on_rows, on_state))
    both = Pipeline("other", (replace(gated, sink=delta.append("counted")), replace(gated, uid="kept_nowhere")))
    graph = weir_definitions([both], settings(tmp_path)).resolve_asset_graph()
    gates = {
        (key.asset_key.path[-1], key.name): graph.get_check_spec(key).description
        for key in graph.asset_check_keys
        if key.name.startswith("column")
    }
    assert set(gates) == {
        ("counted", "column_values_to_be_in_set_k"),
        ("counts_stage", "column_values_to_not_be_null_n"),
        ("kept_nowhere_stage", "column_values_to_be_in_set_k"),
        ("kept_nowhere_stage", "column_values_to_not_be_null_n"),
    }
    assert gates["counted", "column_values_to_be_in_set_k"] == (
        '`ExpectColumnValuesToBeInSet(column="k", value_set=["a", null, "2026-01-02"])`: a gate of counts on rows, before'
        " each commit."
    )


def test_gates_on_columns_of_any_name_are_checks_of_their_own(tmp_path):
    columns = ["amount_2", "amount", "größe", "gräße", "名前", "amount 2"]
    gates = tuple(expect("ExpectColumnValuesToNotBeNull", column=column) for column in columns)
    pipeline = Pipeline("other", (replace(counting("counts"), gates=gates),))
    graph = weir_definitions([pipeline], settings(tmp_path)).resolve_asset_graph()
    named = [key.name.removeprefix("column_values_to_not_be_null_") for key in graph.asset_check_keys]
    assert {"amount_2", "amount_3", "gr_e", "gr_e_2", "_", "amount_2_2"} <= set(named)


def test_a_source_may_have_any_name_that_is_no_other_sources(tmp_path):
    def of(*names: str) -> Pipeline:
        stages = [
            (f"counts{number}", replace(counting("counts").inputs[0].origin, name=name))
            for number, name in enumerate(names)
        ]
        return Pipeline("other", tuple(with_input(counting(uid), source) for uid, source in stages))

    graph = weir_definitions([of("Meine Größen (neu)")], settings(tmp_path)).resolve_asset_graph()
    read = dg.AssetKey(["other", "Meine_Gr__en__neu_"])
    assert graph.get(dg.AssetKey(["other", "counts0_stage"])).parent_keys == {read}
    with pytest.raises(PipelineError, match="same asset as the source new rows"):
        weir_definitions([of("new rows", "new/rows")], settings(tmp_path))


def test_a_verdict_that_an_earlier_release_has_recorded_is_shown():
    gate = expect("ExpectColumnValuesToNotBeNull", column="n")
    stage = replace(counting("counts"), gates=(gate,))
    before = GateVerdict("counts", "ExpectColumnValuesToNotBeNull(column='n')", False, 3, 1, (None,))
    (shown,) = checks.of_gates(Pipeline("other", (stage,)), stage, [before])
    assert not shown.passed and shown.description.startswith("1 of 3 rows, e.g. null; the epoch is declined")


def test_tags_that_are_for_sensors_and_runs_alone_are_not_shown():
    shown = {names.PIPELINE, names.BESIDE, names.REASON}
    hidden = {names.TRIGGER, names.COORDINATES, names.PROCESS, names.ANSWERED_BY}
    assert {get_tag_type(tag) for tag in hidden} == {TagType.HIDDEN}
    assert {get_tag_type(tag) for tag in shown} == {TagType.USER_PROVIDED}


def test_stages_and_tables_have_owners_and_the_version_of_their_code(tmp_path):
    graph = weir_definitions([flights.pipeline], settings(tmp_path)).resolve_asset_graph()
    stage_key, of_table = (
        dg.AssetKey(["flights", *name]) for name in (["airport_hourly_stage"], ["tables", "airport_hourly"])
    )
    assert tuple(graph.get(stage_key).owners) == ("team:air-traffic",)
    version = graph.get(stage_key).code_version
    assert version is not None
    assert graph.get(of_table).code_version == version
    hourly, daily = flights.airport_hourly, replace(flights.airport_hourly, description="Said otherwise.")
    assert fingerprint_of_stage(daily) == fingerprint_of_stage(hourly), "words for people are no code"


def test_the_instances_configuration_is_accepted_as_it_is(tmp_path):
    (tmp_path / "dagster.yaml").write_text((PROJECT / "weir" / "local" / "dagster.yaml").read_text())
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert not instance.telemetry_enabled
        assert instance.run_monitoring_enabled
        assert instance.run_monitoring_settings["free_slots_after_run_end_seconds"] == 30
        pools = instance.get_concurrency_config().pool_config
        assert (pools.default_pool_limit, pools.pool_granularity.value) == (1, "run")


def test_the_workspace_names_the_definitions():
    (origin,) = WorkspaceFileTarget([str(PROJECT / "workspace.yaml")]).create_origins()
    assert origin.loadable_target_origin.module_name == "assets.definitions"


def test_lineage_is_what_operators_say_and_for_functions_columns_of_the_same_name(tmp_path):
    from weir.dagster.metadata import lineage, of_definition

    hourly = flights.airport_hourly
    columns = ["origin", "window_start", "window_end", "departures", "mean_dep_delay", "inherited"]
    inputs = ["origin", "scheduled", "dep_delay", "inherited", "tailnum"]
    assert lineage(hourly, columns, [inputs]) == {
        "origin": [(0, "origin")],
        "window_start": [(0, "scheduled")],
        "window_end": [(0, "scheduled")],
        "mean_dep_delay": [(0, "dep_delay")],
        "inherited": [(0, "inherited")],
    }
    assert lineage(flights.aircraft_rotation, ["tailnum", "gap"], [inputs]) == {"tailnum": [(0, "tailnum")]}
    busiest = top_n("busiest", hourly, key="window_start", by=[desc("departures"), "origin"], n=3, until="window_end")
    assert lineage(busiest, ["origin", "rank_number"], [columns]) == {
        "origin": [(0, "origin")],
        "rank_number": [(0, "departures"), (0, "origin")],
    }
    cities = lookup("known", hourly, table="airports", on={"origin": "iata"}, columns=["city", "departures"])
    of_known = lineage(cities, [*columns[:4], "city", "departures_table"], [columns[:4]])
    assert of_known == {
        **{name: [(0, name)] for name in columns[:4]},
        "city": [(1, "city")],
        "departures_table": [(1, "departures")],
    }
    rated = as_of("rated", hourly, hourly, on="origin")
    assert lineage(rated, ["origin", "departures", "departures_right"], [columns, columns]) == {
        "origin": [(0, "origin"), (1, "origin")],
        "departures": [(0, "departures")],
        "departures_right": [(1, "departures")],
    }
    flown = join("flown", hourly, flights.aircraft_rotation, on={"origin": "tailnum"}, ttl=None)
    both = [["origin", "departures", "gap"], ["tailnum", "gap"]]
    assert lineage(flown, ["origin", "departures", "gap", "gap_right"], both) == {
        "origin": [(0, "origin"), (1, "tailnum")],
        "departures": [(0, "departures")],
        "gap": [(0, "gap")],
        "gap_right": [(1, "gap")],
    }
    sides = (
        side(hourly, select=["upper(origin) AS place", "departures + gap AS most"]),
        side(flights.aircraft_rotation, select=["tailnum AS place", "gap AS most", "1 AS one"]),
    )
    met = join("met", *sides, on="place", ttl=None)
    assert lineage(met, ["place", "most", "most_right", "one"], both) == {
        "place": [(0, "origin"), (1, "tailnum")],
        "most": [(0, "departures"), (0, "gap")],
        "most_right": [(1, "gap")],
    }
    renamed = lookup("renamed", hourly, select=["origin AS code"], table="airports", on="code", columns=["city"])
    assert lineage(renamed, ["code", "city"], [["origin"]]) == {"code": [(0, "origin")], "city": [(1, "city")]}
    named = lookup("named", hourly, table="{warehouse}/airports", on={"origin": "code"}, columns=["city"])
    assert lineage(named, ["origin", "city"], [["origin"]]) == {"origin": [(0, "origin")], "city": [(1, "city")]}
    chosen = select("chosen", hourly, "origin", "departures * 2 AS twice", "concat(origin, 'gap') AS told")
    assert lineage(chosen, ["origin", "twice", "told"], [["origin", "departures", "gap"]]) == {
        "origin": [(0, "origin")],
        "twice": [(0, "departures")],
        "told": [(0, "origin")],
    }
    told = aggregate(
        "told", hourly, select=["origin", "departures * 2 AS twice", "gap"], key="origin", most=agg.max("twice")
    )
    assert lineage(told, ["origin", "most", "departures"], [["origin", "departures", "gap"]]) == {
        "origin": [(0, "origin")],
        "most": [(0, "departures")],
    }
    others = select("others", hourly, "* EXCEPT (gap)", "concat(`gap in h`, 'gap') AS `gap in words`")
    assert lineage(others, ["origin", "gap in words", "gap"], [["origin", "gap", "gap in h"]]) == {
        "origin": [(0, "origin")],
        "gap in words": [(0, "gap in h")],
    }
    late = window("late", hourly, select=["origin", "gap AS at"], key="origin", on="at", every="1h", n=agg.count())
    assert lineage(late, ["origin", "at"], [["origin", "gap"]], "late") == {
        "origin": [(0, "origin")],
        "at": [(0, "gap")],
    }
    too_late = lineage(rated, ["origin", "side", "departures_right"], [columns, columns], "late")
    assert too_late == {"origin": [(0, "origin"), (1, "origin")], "departures_right": [(1, "departures")]}
    storage = Storage(str(tmp_path))
    assert of_definition(told, storage)["columns"].text == "origin, departures * 2 AS twice, gap"
    assert of_definition(met, storage)["columns"].text == (
        "upper(origin) AS place, departures + gap AS most; tailnum AS place, gap AS most, 1 AS one"
    )
    assert lineage(union("all", chosen, hourly), ["origin"], [["origin"], ["origin"]]) == {
        "origin": [(0, "origin"), (1, "origin")]
    }


def test_a_table_that_rows_are_looked_up_in_is_an_asset_of_its_own(tmp_path):
    given = {
        "WEIR_STORAGE__ROOT": str(tmp_path),
        "WEIR_PIPELINES__CARD_FRAUD__OBJECT": "pipelines.card_fraud:pipeline",
        "WEIR_PIPELINES__CARD_FRAUD__PARAMS": '{"landing": "/landing", "cards": "/warehouse/cards"}',
    }
    settings = load(given)
    graph = weir_definitions([card_fraud.pipeline], settings).resolve_asset_graph()
    cardholders, cards = (dg.AssetKey(["card_fraud", *name]) for name in (["known_stage"], ["lookups", "cards"]))
    assert cards in graph.get(cardholders).parent_keys
    assert graph.get(cards).metadata["dagster/uri"] == "/warehouse/cards"
    assert graph.get(cardholders).kinds == {"pyspark"}
    of_cards = graph.get(dg.AssetKey(["card_fraud", "tables", "alerted_cards"]))
    assert of_cards.description == "The newest row of each key that alerted_cards hands out."


def test_two_tables_of_one_name_that_rows_are_looked_up_in_are_two_assets(tmp_path):
    hourly = flights.airport_hourly
    named = tuple(
        lookup(area, hourly, table=f"{{landing}}/{area}/airports", on={"origin": "code"}, columns=["city"])
        for area in ("eu", "us")
    )
    pipeline = Pipeline("flights", (*flights.pipeline.stages, *named))
    graph = weir_definitions([pipeline], settings(tmp_path)).resolve_asset_graph()
    for area in ("eu", "us"):
        read = dg.AssetKey(["flights", "lookups", "_landing_", area, "airports"])
        assert graph.get(read).metadata["dagster/uri"] == str(tmp_path / "landing" / area / "airports")
        above = dg.AssetKey(["flights", "airport_hourly_stage"])
        assert graph.get(dg.AssetKey(["flights", f"{area}_stage"])).parent_keys == {above, read}
