"""`weir new pipeline`: what it writes works at once, for each source and each sink."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from tests.template.projects import generate, passes, run
from tests.tools.kafka import KafkaTopics
from tests.tools.postgres_server import PASSWORD, Postgres
from tests.tools.sampling import sampled
from weir.cli.new.scaffold import SINKS, SOURCES, render

PAIRS = [(source, sink) for source in SOURCES for sink in SINKS]
SAMPLE = [(source, SINKS[at % len(SINKS)]) for at, source in enumerate(SOURCES)][::3]


@pytest.fixture(scope="module")
def untouched(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project to be copied."""
    return generate(template, tmp_path_factory.mktemp("untouched") / "shop", {"example": False, "package": "shop"})


@pytest.fixture(scope="module")
def empty(untouched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(untouched, tmp_path_factory.mktemp("new") / "shop")


@pytest.fixture(scope="module")
def project(empty: Path) -> Path:
    """A project with a pipeline for each pair, begun in one process: the command itself takes a second each."""
    code = "import sys; from weir.cli.new.scaffold import begin\n"
    code += "".join(f"begin('{source}_to_{sink}', '{source}', '{sink}')\n" for source, sink in PAIRS)
    (empty / "begin_all.py").write_text(code)
    passes(empty, "begin_all")
    (empty / "begin_all.py").unlink()
    return empty


def test_modules_and_tests_are_clean(project: Path):
    assert len(list((project / "shop").glob("*_to_*.py"))) == len(PAIRS) == 40
    passes(project, "ruff", "check", "shop", "tests")
    passes(project, "ruff", "format", "--check", "shop", "tests")


@pytest.mark.long
def test_types_hold(project: Path):
    passes(project, "mypy", "shop", *(str(path) for path in (project / "tests").glob("test_*_to_*.py")))


@pytest.mark.parametrize("pairs", sampled([SAMPLE, PAIRS]), ids=len)
def test_their_tests_pass(project: Path, pairs: list[tuple[str, str]]):
    """And what Dagster makes of all of them loads."""
    passes(project, "pytest", "tests/test_project.py", *(f"tests/test_{source}_to_{sink}.py" for source, sink in pairs))


def planned(project: Path, names: list[str], **variables: str) -> None:
    """Fail where `weir plan` would not accept one of the pipelines."""
    code = (
        "import sys\n"
        "from weir.settings.configuration import load\n"
        "from weir.loading import load_pipeline\n"
        "from weir.operations.plan import plan\n"
        "settings = load()\n"
        "for name in sys.argv[1:]:\n"
        "    planned = plan(load_pipeline(name, settings), settings, None)\n"
        "    assert not planned.stops, (name, planned)\n"
        "    print('accepted', name)\n"
    )
    (project / "plan_all.py").write_text(code)
    printed = passes(project, "plan_all", *names, POSTGRES_PASSWORD="none", **variables)
    assert [name for name in names if f"accepted {name}\n" not in printed] == []


@pytest.mark.long
def test_plan_accepts_what_asks_no_server(project: Path):
    files = ["parquet", "csv", "json", "avro"]
    names = [f"{source}_to_{sink}" for source in files for sink in SINKS]
    planned(project, [*names, *(f"generator_to_{sink}" for sink in SINKS if sink not in ("kafka", "postgres"))])


@pytest.mark.long
def test_plan_accepts_what_asks_a_server_that_is_up(project: Path, kafka: KafkaTopics, postgres: Postgres):
    """Also Delta tables that are there. What cannot be asked is refused, by name."""
    topic = kafka.create(2)
    variables = {"WEIR_CONNECTIONS__POSTGRES__OPTIONS": json.dumps({**postgres.options, "password": {"env": "PG"}})}
    for sink in SINKS:
        params = json.dumps({"servers": kafka.servers, "topic": topic, "results": f"{topic}-results"})
        variables[f"WEIR_PIPELINES__KAFKA_TO_{sink.upper()}__PARAMS"] = params
        rows = pl.DataFrame({"customer": ["ada"], "amount": [1.0], "at": [datetime(2026, 1, 1, tzinfo=UTC)]})
        rows.write_delta(str(project / ".weir" / "landing" / f"delta_to_{sink}"))
        columns = "customer text, amount float8, at timestamptz, tx xid8 DEFAULT pg_current_xact_id()"
        postgres.rows(f"CREATE TABLE postgres_to_{sink} ({columns})")
    for source in ("delta", "postgres", "generator"):
        variables[f"WEIR_PIPELINES__{source.upper()}_TO_KAFKA__PARAMS__SERVERS"] = kafka.servers
    names = [f"{source}_to_{sink}" for source in ("kafka", "delta", "postgres") for sink in SINKS]
    planned(project, [*names, "generator_to_kafka", "generator_to_postgres"], PG=PASSWORD, **variables)


@pytest.mark.parametrize("name", ["user", "order", "end"])
def test_the_table_that_is_read_may_be_called_as_a_word_of_sql(postgres: Postgres, name: str):
    """FROM user would be who is logged in, and FROM order is no SQL."""
    values = {"pipeline": name, "package": "shop", "source": "postgres", "sink": "postgres"}
    module: dict[str, Any] = {"__name__": name}
    exec(render("pipeline.py.j2", values), module)
    postgres.rows(f'CREATE TABLE "{name}" (customer text, amount float8, at timestamptz, tx xid8)')
    postgres.rows(f"INSERT INTO \"{name}\" VALUES ('ada', 1, NULL, NULL)")
    assert postgres.rows(module["pipeline"].sources[0].query) == [("ada", 1.0, None, None)]


def test_the_command_says_what_it_wrote_and_overwrites_nothing(untouched: Path, tmp_path: Path):
    project = shutil.copytree(untouched, tmp_path / "shop")
    config = project / "configs" / "dev.yaml"
    config.write_text(
        "# first line\n\npipelines:   # mine\n  other: {object: shop.other:pipeline}\n\nlease: {ttl_seconds: 9}\n"
    )
    wrote = passes(project, "weir.cli.main", "new", "pipeline", "clicks", "--source", "kafka", "--sink", "postgres")
    assert all(name in wrote for name in ("shop/clicks.py", "tests/test_clicks.py", "configs/dev.yaml"))
    assert "python -m weir.local.kafka_broker clicks," in wrote
    text = config.read_text()
    assert text.startswith("# first line\n\npipelines:   # mine\n  clicks:\n")
    settings = yaml.safe_load(text)
    assert settings["pipelines"]["other"] == {"object": "shop.other:pipeline"}
    assert settings["pipelines"]["clicks"]["object"] == "shop.clicks:pipeline"
    assert settings["connections"]["postgres"]["options"]["password"] == {"env": "POSTGRES_PASSWORD"}
    again = run(project, "weir.cli.main", "new", "pipeline", "clicks")
    assert again.returncode == 2 and "is there already" in again.stderr
    assert config.read_text() == text


def test_settings_go_to_the_file_that_commands_read(template: Path, tmp_path: Path):
    project, config = (
        generate(template, tmp_path / "shop", {"example": False, "package": "shop"}),
        tmp_path / "mine.yaml",
    )
    before = (project / "configs" / "dev.yaml").read_text()
    config.write_text(before)
    wrote = passes(project, "weir.cli.main", "new", "pipeline", "clicks", WEIR_CONFIG=str(config))
    assert str(config) in "".join(wrote.split())
    assert yaml.safe_load(config.read_text())["pipelines"]["clicks"]["object"] == "shop.clicks:pipeline"
    assert (project / "configs" / "dev.yaml").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    sampled(
        [
            (["clicks", "--source", "ftp"], "no source 'ftp'"),
            (["Clicks"], "cannot be called"),
            (["delta"], "cannot be called"),
            (["checkpoint"], "cannot be called"),
            (["rows"], "cannot be called"),
            (["value"], "cannot be called"),
            (["print"], "cannot be called"),
            (["lambda"], "cannot be called"),
            (["clicks", "--sink", "ftp"], "no sink 'ftp'"),
            (["clicks", "--package", "a/b"], "no name of a package"),
        ]
    ),
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_begun_is_refused_and_nothing_written(empty: Path, arguments: list[str], says: str):
    before = (empty / "configs" / "dev.yaml").read_text()
    refused = run(empty, "weir.cli.main", "new", "pipeline", *arguments)
    assert refused.returncode == 2 and says in refused.stderr, refused.stderr
    assert (empty / "configs" / "dev.yaml").read_text() == before
