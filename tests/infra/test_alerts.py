"""The alert rules: Prometheus' own tool plays them; what they name is really exported, and what they advise is really
there."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import typer
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from tests.recovery.small import Bank
from tests.tools.servers import needs
from weir.cli.main import app
from weir.cli.prometheus import BUILD, FAMILIES, Exporter
from weir.execution.in_process import InMemoryExecutor
from weir.operations import drill
from weir.run import fsck
from weir.settings.configuration import PROJECT

RULES = PROJECT / "infra" / "prometheus" / "alerts.yml"
PLAYED = [PROJECT / "infra" / "prometheus" / name for name in ("alerts_test.yml", "alerts_days_test.yml")]
GUIDE = PROJECT / "docs" / "how-to" / "monitoring.md"
FROM_PROMETHEUS = {"up"}


def _rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def promtool(*arguments: str, stdin: str | None = None) -> None:
    command = [str(needs("promtool", "prometheus")), *arguments]
    done = subprocess.run(command, cwd=PROJECT, input=stdin, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_rules():
    promtool("check", "rules", str(RULES))


def test_each_alert_fires_when_it_should_and_only_then():
    promtool("test", "rules", *map(str, PLAYED))


def test_every_alert_is_played_and_says_what_is_wrong_what_is_next_and_how_urgent_it_is():
    played, guide = "".join(file.read_text() for file in PLAYED), GUIDE.read_text()
    names = [rule["alert"] for rule in _rules()]
    assert len(names) == len(set(names)) == 17
    for rule in _rules():
        name, annotations = rule["alert"], rule["annotations"]
        assert f'alertname="{name}"' in played or f"alertname: {name}" in played, name
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert annotations["summary"].endswith(".") and len(annotations["description"]) > 100, name
        assert f"`{name}`" in guide, name


def test_every_command_that_an_alert_advises_exists():
    command = typer.main.get_command(app)
    for rule in _rules():
        commands = re.findall(r"`weir ([^`]+)`", rule["annotations"]["description"])
        assert commands, f"{rule['alert']} names no command"
        for words in commands:
            group: Any = command
            for word in words.split():
                if not hasattr(group, "commands"):
                    break
                assert word in group.commands, words
                group = group.commands[word]
            options = {option for parameter in group.params for option in parameter.opts}
            assert set(re.findall(r"--[a-z-]+", words)) <= options, words


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The metrics of a small pipeline that has run twice, the second time on a host without local state, so that it has a restore too,
    with a check and a drill."""
    bank = Bank.at(tmp_path_factory.mktemp("scraped") / "site", WEIR_CHECKPOINTS__NUM_RETAINED="2")
    bank.epochs(1, 2)
    (bank.site.root / "work").rename(bank.site.root / "another-host")
    bank.epochs(3)
    bank.land(4)
    fsck.examine_and_note(bank.site.pipeline, bank.site.settings)
    drill.drill(bank.site.pipeline, bank.site.settings, InMemoryExecutor())
    exported = CollectorRegistry()
    exported.register(Exporter([bank.site.pipeline.name], bank.site.settings))
    return generate_latest(exported).decode()


def test_every_metric_and_label_of_the_rules_is_exported(scraped: str):
    samples = [line for line in scraped.splitlines() if not line.startswith("#")]
    exported = {re.split(r"[ {]", line)[0] for line in samples}
    labels = {family.name: {"pipeline", *family.labels} for family in FAMILIES}
    for rule in _rules():
        named = set(re.findall(r"\b(?:weir_\w+|up)\b", rule["expr"]))
        assert named and named <= exported | FROM_PROMETHEUS, (rule["alert"], named - exported)
        for metric, matched in re.findall(r"\b(weir_\w+)\{([^}]*)\}", rule["expr"]):
            for label, value in re.findall(r'(\w+)="([^"]*)"', matched):
                assert label in labels[metric], (rule["alert"], label)
                assert any(
                    line.startswith(f"{metric}{{") and f'{label}="{value}"' in line for line in samples
                ), (rule["alert"], metric, label, value)  # fmt: skip


def test_prometheus_finds_no_fault_with_names_types_and_helps(scraped: str):
    promtool("check", "metrics", stdin=scraped)


def test_every_metric_is_documented():
    guide = GUIDE.read_text()
    names = {family.name for family in (BUILD, *FAMILIES)}
    assert [name for name in names if f"`{name}" not in guide] == []
    assert set(re.findall(r"\bweir_[a-z_]+\b", guide)) <= names | {name.removesuffix("_total") for name in names}
