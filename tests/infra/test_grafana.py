"""The Grafana dashboard: Prometheus takes its expressions, what they name is really exported, and what is exported can be
seen."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.infra.test_alerts import FROM_PROMETHEUS, promtool
from tests.recovery.small import Bank
from tests.weir.operators.functions import test_per_key_runs
from tests.weir.operators.functions.test_per_key_runs import COLUMNS, _dicts, a_pipeline, landed
from weir.cli.prometheus import FAMILIES, Exporter
from weir.execution.in_process import InMemoryExecutor
from weir.operations import drill
from weir.run import fsck
from weir.run.run import RunOptions, run
from weir.settings.configuration import PROJECT, Settings

DASHBOARD = PROJECT / "infra" / "grafana" / "weir.json"
PROVISIONING = PROJECT / "infra" / "grafana" / "provisioning"
# Of the configuration: only alerts ask whether something is to come by itself.
NOT_SHOWN = {"weir_fsck_scheduled", "weir_drill_scheduled"}
OF_ALERTS = {"ALERTS": {"alertname", "alertstate", "pipeline", "severity"}}
# By the end of a metric's name, the units that fit it: as it is, or as an age or a rate.
UNITS = {
    "_timestamp_seconds": {"s"},
    "_seconds": {"s"},
    "_bytes": {"bytes"},
    "_bytes_waiting": {"bytes"},
    "_bytes_total": {"Bps"},
    "_requests_total": {"reqps"},
    "_files_total": {"suffix: files/s"},
    "_epochs_total": {"suffix: /min"},
    "_rows_read_total": {"suffix: rows/s"},
}


@cache
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> list[tuple[str, str]]:
    """Each with the title of its panel, its variables replaced as Grafana does it."""
    written = [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]
    filled = [(title, expr.replace("$__rate_interval", "5m").replace("$pipeline", "a|b")) for title, expr in written]
    assert not [expr for _, expr in filled if "$" in expr], "a variable that nobody fills"
    return filled


def matchers(expr: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Each metric with its matchers: label, operator, value."""
    return [
        (metric, re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', inner or ""))
        for metric, inner in re.findall(r"\b(weir_\w+|ALERTS)\b(?:\{([^}]*)\})?", expr)
    ]


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, list[dict[str, str]]]:
    """Of two pipelines that have run, with a restore, a check and a drill, state caches and event time: by metric, the
    labels of its samples."""
    root = tmp_path_factory.mktemp("scraped")
    bank = Bank.at(root / "site", WEIR_CHECKPOINTS__NUM_RETAINED="2")
    bank.epochs(1, 2)
    (bank.site.root / "work").rename(bank.site.root / "another-host")
    bank.epochs(3)
    bank.land(4)
    orphan = bank.site.storage / "of-somebody-else"
    orphan.write_text("x")
    fsck.examine_and_note(bank.site.pipeline, bank.site.settings)
    drill.drill(bank.site.pipeline, bank.site.settings, InMemoryExecutor())
    pipeline, configured = a_pipeline(root, landed(_dicts, output=COLUMNS), {"totals": {"l1": 100}})
    list(run(pipeline, configured, RunOptions(until_caught_up=True), InMemoryExecutor()))
    samples: dict[str, list[dict[str, str]]] = defaultdict(list)
    for name, settings in (("small", bank.site.settings), ("totals", _known(configured, pipeline))):
        registry = CollectorRegistry()
        registry.register(Exporter([name], settings))
        for family in text_string_to_metric_families(generate_latest(registry).decode()):
            for sample in family.samples:
                samples[sample.name].append(sample.labels)
    return samples


def _known(configured: Settings, pipeline: Any) -> Settings:
    """The settings, with a module that the exporter can import the pipeline from."""
    test_per_key_runs.scraped = pipeline  # type: ignore[attr-defined]
    entry = configured.pipelines["totals"].model_copy(update={"object": f"{test_per_key_runs.__name__}:scraped"})
    return configured.model_copy(update={"pipelines": {"totals": entry}})


def test_prometheus_takes_every_expression(tmp_path: Path):
    rules = [{"record": f"dashboard:{number}", "expr": expr} for number, (_, expr) in enumerate(expressions())]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_every_metric_label_and_value_that_is_named_is_exported(exported):
    labels = {family.name: {"pipeline", *family.labels} for family in FAMILIES} | OF_ALERTS
    for title, expr in expressions():
        assert matchers(expr), f"{title} names no metric"
        for metric, conditions in matchers(expr):
            assert metric in exported or metric in OF_ALERTS, (title, metric)
            assert "pipeline" in {label for label, _, _ in conditions}, f"{title}: {metric} of all pipelines"
            for label, operator, value in conditions:
                assert label in labels[metric], (title, metric, label)
                values = {sample.get(label, "") for sample in exported.get(metric, ())}
                if operator == "=" and metric not in OF_ALERTS:
                    assert value in values, (title, metric, label, value)
        named = {metric for metric, _ in matchers(expr)}
        of_them = set().union(*(labels[metric] for metric in named))
        grouped = re.findall(r"\b(?:by|on|ignoring|group_left|without) ?\(([^)]*)\)", expr)
        used = {label.strip() for group in grouped for label in group.split(",") if label.strip()}
        assert used <= of_them, (title, used - of_them)


def test_legends_name_labels_of_their_expression():
    labels = {family.name: {"pipeline", *family.labels} for family in FAMILIES} | OF_ALERTS
    for panel in panels():
        for target in panel["targets"]:
            of_them = set().union(*(labels[metric] for metric, _ in matchers(target["expr"])))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= of_them, panel["title"]


def test_what_is_exported_can_be_seen():
    shown = {metric for _, expr in expressions() for metric, _ in matchers(expr)} - FROM_PROMETHEUS
    assert {family.name for family in FAMILIES} - shown == NOT_SHOWN, "show it, or say here why not"


def test_units_fit_the_names_of_the_metrics():
    for panel in panels():
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for metric in {metric for target in panel["targets"] for metric, _ in matchers(target["expr"])}:
            fitting = next((units for end, units in UNITS.items() if metric.endswith(end)), None)
            assert unit in (fitting or {"none", "short", "percentunit", "suffix: entries/s"}), (panel["title"], metric)
        if unit in ("Bps", "reqps") or unit.startswith("suffix: "):
            assert all("rate(" in target["expr"] for target in panel["targets"]), panel["title"]


def test_a_grafana_takes_its_shape():
    board = dashboard()
    assert board["uid"] and board["schemaVersion"] >= 39 and "id" not in board and "__inputs" not in board
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    assert variables["pipeline"]["multi"] and variables["pipeline"]["includeAll"]
    assert variables["pipeline"]["query"]["query"] == "label_values(weir_up, pipeline)"
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels():
        assert panel["datasource"] == variables["pipeline"]["datasource"] == source
        assert panel["title"] and panel["type"] in ("stat", "timeseries", "table", "state-timeline"), panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(references) == len(set(references)), panel["title"]
        assert all(target["datasource"] == source for target in panel["targets"])
        assert all(target["instant"] != target["range"] for target in panel["targets"])


def test_no_panel_lies_on_another_and_none_beside_the_grid():
    cells = set[tuple[int, int]]()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        assert at["x"] >= 0 and at["x"] + at["w"] <= 24 and at["w"] > 0 and at["h"] > 0, panel["title"]
        its = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert not its & cells, panel["title"]
        cells |= its


def test_what_provisions_it_fits():
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "weir.yaml").read_text())["providers"]
    assert provider["type"] == "file" and provider["options"]["path"].startswith("/")
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
