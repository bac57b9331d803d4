"""The configuration: every error at once, each with its key and where that was said; nothing is started with a wrong
one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import get_args

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from state_ops import redaction
from state_ops.backends import loader
from state_ops.errors import ConfigurationError
from state_ops.redaction import redacted
from weir.settings import combinations, reference
from weir.settings import configuration as settings
from weir.settings.configuration import PROJECT
from weir.settings.sections import ConnectionSettings


@pytest.fixture
def config(tmp_path):
    """Writes a configuration file; `config("spark: {parallelism: 4}", WEIR_X="...")` loads it."""

    def load(text: str, **env: str) -> settings.Settings:
        file = tmp_path / "test.yaml"
        file.write_text(text)
        return settings.load({"WEIR_CONFIG": str(file), **env})

    return load


def _refused(load, *arguments, **env) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as refused:
        load(*arguments, **env)
    assert refused.value.exit_code == 2
    return refused.value


def test_every_error_at_once_with_its_key_and_origin(config):
    error = _refused(
        config,
        "spark: {parallelism: 0, driver_memory: lots}\ncheckpoints: {num_retained: many}\nstorage: {roots: /data}\n",
        WEIR_EPOCH__MAX_FILES="-1",
        WEIR_LEASE__HEARTBEAT="3",
    )

    title, *lines = error.what.splitlines()
    assert title == "The configuration has 6 errors:"
    origins = {line.split(":")[0].strip(): line.rsplit("[", 1)[1].rstrip("]") for line in lines}
    assert origins == {
        "spark.parallelism": "test.yaml",
        "spark.driver_memory": "test.yaml",
        "checkpoints.num_retained": "test.yaml",
        "storage.roots": "test.yaml",
        "epoch.max_files": "WEIR_EPOCH__MAX_FILES",
        "lease.heartbeat": "WEIR_LEASE__HEARTBEAT",
    }
    by_key = {line.split(":")[0].strip(): line for line in lines}
    assert "greater than or equal to 1 (got 0)" in by_key["spark.parallelism"]
    assert "(got 'lots')" in by_key["spark.driver_memory"]
    assert "integer" in by_key["checkpoints.num_retained"] and "'many'" in by_key["checkpoints.num_retained"]
    assert "there is no such key; did you mean 'root'?" in by_key["storage.roots"]
    assert "did you mean 'heartbeat_seconds'?" in by_key["lease.heartbeat"]
    assert error.where.endswith("test.yaml") and "docs/reference/configuration.md" in error.next


@pytest.mark.parametrize(
    ("variable", "close"),
    [
        ("WEIR_STORAGE__ROT", "root"),
        ("WEIR_STORGE__ROOT", "storage"),
        ("WEIR_PIPELINES__FLIGHTS__PARAM", "params"),
        ("WEIR_SPARK__PARALELISM", "parallelism"),
    ],
)
def test_an_unknown_variable_is_refused_with_what_was_meant(config, variable, close):
    error = _refused(config, "pipelines: {flights: {object: a.b:c}}", **{variable: "1"})
    assert f"[{variable}]" in error.what and f"did you mean {close!r}?" in error.what


@pytest.mark.parametrize("address", ["http://user:geheimnis99@collector:4318", "collector:4318", "http://a b"])
def test_an_address_of_a_collector_that_is_none_is_refused_in_words(config, address):
    error = _refused(config, "telemetry: {traces: true}", WEIR_TELEMETRY__OTLP_ENDPOINT=address)
    assert "such as http://collector:4318, without a user or a password  [WEIR_TELEMETRY__OTLP_ENDPOINT]" in error.what
    assert "geheimnis99" not in str(error)


def test_a_missing_key_of_a_pipeline_names_the_pipeline(config):
    error = _refused(config, "pipelines: {orders: {params: {landing: /x}}}")
    assert "pipelines.orders.object: Field required" in error.what


_CACHE = "state: {caches: {riders: {l1: %d, l2: %d}}}"


@pytest.mark.parametrize(
    ("text", "first", "second", "next"),
    [
        (
            "checkpoints: {interval_seconds: 5, min_pause_seconds: 6}",
            "checkpoints.min_pause_seconds (6)",
            "checkpoints.interval_seconds (5)",
            "interval_seconds to 6 or more",
        ),
        (
            "checkpoints: {interval_seconds: 60, timeout_seconds: 59.5}",
            "checkpoints.timeout_seconds (59.5)",
            "checkpoints.interval_seconds (60)",
            "set timeout_seconds to 60 or more",
        ),
        (
            "{run: {poll_seconds: 3}, checkpoints: {interval_seconds: 2}}",
            "run.poll_seconds (3)",
            "checkpoints.interval_seconds (2)",
            "set poll_seconds to 2 or less",
        ),
        (
            "{storage: {root: 's3://b/w', s3: {request_timeout_seconds: 90}}, checkpoints: {timeout_seconds: 90}}",
            "storage.s3.request_timeout_seconds (90)",
            "checkpoints.timeout_seconds (90)",
            "shorten request_timeout_seconds",
        ),
        (
            "checkpoints: {alignment_timeout_seconds: 600}",
            "checkpoints.alignment_timeout_seconds (600)",
            "checkpoints.timeout_seconds (600)",
            "make it a few seconds",
        ),
        (_CACHE % (20, 19), "state.caches.riders.l2 (19)", "state.caches.riders.l1 (20)", "leave l2 out"),
        (
            "checkpoints: {max_waiting_epochs: 3}",
            "checkpoints.max_waiting_epochs (3)",
            "checkpoints.alignment_timeout_seconds is null",
            "take it out",
        ),
        (
            "state: {max_state_size_mb: 64}",
            "state.max_state_size_mb (64)",
            "state.backend is 'rocksdb'",
            "set state.backend to memory",
        ),
        (
            "state: {backend: memory, options: {path: x}}",
            "state.options (path)",
            "state.backend is 'memory'",
            "name the backend",
        ),
        (
            "state: {asynchronous_snapshots: true}",
            "state.asynchronous_snapshots",
            "state.backend is 'rocksdb'",
            "take it out",
        ),
        (
            "state: {backend: memory, asynchronous_snapshots: true, warm_mb: 0}",
            "state.asynchronous_snapshots",
            "state.warm_mb is 0",
            "raise it",
        ),
        (
            (
                "{state: {backend: memory, asynchronous_snapshots: true}, spark: {conf: {spark.python.worker.reuse:"
                " 'False'}}}"
            ),
            "state.asynchronous_snapshots",
            "spark.python.worker.reuse is false",
            "take one of them out",
        ),
        (
            (
                "{state: {backend: memory, asynchronous_snapshots: true}, spark: {conf: {spark.python.use.daemon:"
                " 'false'}}}"
            ),
            "state.asynchronous_snapshots",
            "spark.python.use.daemon is false",
            "take one of them out",
        ),
        (
            "{dagster: {freshness_hours: 0.5}, run: {max_run_seconds: 1800}}",
            "dagster.freshness_hours (0.5)",
            "run.max_run_seconds (1800)",
            "say null",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_named_with_their_values_and_what_to_do(
    config, text, first, second, next
):
    title, line = _refused(config, text).what.splitlines()
    assert title == "The configuration has 1 error:"
    assert first in line and second in line and next in line


@pytest.mark.parametrize(
    "text",
    [
        "checkpoints: {interval_seconds: 5, min_pause_seconds: 5, timeout_seconds: 5}",
        "{checkpoints: {interval_seconds: 2}, run: {poll_seconds: 2}}",
        "{storage: {s3: {request_timeout_seconds: 90}}, checkpoints: {timeout_seconds: 60}}",  # nothing is on S3
        _CACHE % (20, 20),
        _CACHE % (20, 0),
        "state: {backend: 'sqlite', options: {path: x}}",
        "state: {backend: 'sqlite', max_state_size_mb: 64}",  # it is given the limit too
        "state: {backend: memory, max_state_size_mb: 64}",
        "state: {backend: memory, asynchronous_snapshots: true}",
        "state: {backend: 'sqlite', asynchronous_snapshots: true}",  # it may offer them
        "{state: {warm_mb: 0}, spark: {conf: {spark.python.worker.reuse: 'false'}}}",
        "state: {backend: filesystem, max_state_size_mb: 5}",  # what holds anyway
        "checkpoints: {max_waiting_epochs: 2}",
        "checkpoints: {max_waiting_epochs: 3, alignment_timeout_seconds: 0}",
        "checkpoints: {min_pause_seconds: 10, max_concurrent: 8, on_cancel: delete, num_retained: 9}",
        "{run: {linger_seconds: 99, max_run_seconds: 1}}",
    ],
)
def test_what_is_only_unusual_is_allowed(config, text):
    config(text)


def test_contradictions_come_all_at_once_with_where_both_sides_were_said(config):
    error = _refused(
        config, "checkpoints: {min_pause_seconds: 1000}\n" + _CACHE % (2, 1), WEIR_CHECKPOINTS__INTERVAL_SECONDS="900"
    )
    title, *lines = error.what.splitlines()
    assert title == "The configuration has 3 errors:"
    assert [line.rsplit("  [", 1)[1] for line in lines] == [
        "test.yaml, WEIR_CHECKPOINTS__INTERVAL_SECONDS]",
        "default, WEIR_CHECKPOINTS__INTERVAL_SECONDS]",
        "test.yaml]",
    ]


def test_the_page_advises_on_every_key_of_checkpoints_slices_and_caches():
    page = reference.page()
    for title, model in (
        ("checkpoints", settings.CheckpointSettings),
        ("epoch", settings.EpochSettings),
        ("state.caches.<uid>", settings.CacheSettings),
    ):
        section = page.split(f"## {title}\n")[1].split("\n## ")[0]
        for key in model.model_fields:
            assert f"\n- `{key}`: " in section, (title, key)
    refused = page.split("## Refused together\n")[1]
    assert refused.count("\n- ") == len(combinations.RULES)


def _models(kind: object) -> Iterator[type[BaseModel]]:
    """The sections that an annotation names, and those within them."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
        for field in kind.model_fields.values():
            yield from _models(field.annotation)
    for argument in get_args(kind):
        yield from _models(argument)


def test_the_page_has_every_section_of_the_settings():
    page = reference.page()
    for section in set(_models(settings.Settings)) - {settings.Settings, settings.SecretReference}:
        assert (section.__doc__ or "").strip() in page, section
        for key in section.model_fields:
            assert f"\n| `{key}` |" in page, (section, key)
    assert "`None`" not in page and "`False`" not in page, "the page has defaults as YAML has them"


def test_the_schema_for_editors_is_that_of_the_settings():
    written, made = (json.loads(text) for text in (reference.SCHEMA.read_text(), reference.schema()))
    assert written == made, "run python -m weir.settings.reference"


@pytest.mark.parametrize("name", sorted(path.name for path in (PROJECT / "configs").glob("*.yaml")))
def test_a_file_of_settings_names_the_schema_and_fits_it(name):
    path = PROJECT / "configs" / name
    named = path.read_text().splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named) == reference.SCHEMA
    read = json.loads(json.dumps(yaml.safe_load(path.read_text()), default=str))  # an editor takes a date for its text
    assert problems(read) == []


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("epoch: {max_file: 1}", "max_file"),
        ("epoch: {max_files: none}", "none"),
        ("checkpoint: {}", "checkpoint"),
        ("pipelines: {visits: {params: {}}}", "object"),
        ("connections: {bus: {options: {password: {env: [A]}}}}", "env"),
    ],
)
def test_the_schema_marks_what_a_run_would_refuse(text, key):
    (problem,) = problems(yaml.safe_load(text))
    assert key in problem


def problems(values: object) -> list[str]:
    """What an editor marks in a file of settings."""
    checker = jsonschema.Draft202012Validator(json.loads(reference.SCHEMA.read_text()))
    return [error.message for error in checker.iter_errors(values)]


def test_own_backends_are_those_that_the_engine_names():
    assert set(combinations.OWN_BACKENDS) == set(loader._OWN)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spark: {parallelism: 2", "not valid YAML"),
        ("spark:\n\tparallelism: 2\n", "not valid YAML"),
        ("- spark\n- storage\n", "must be a mapping"),
        ("just words", "must be a mapping"),
        ("spark: 3", "spark: "),
    ],
)
def test_what_is_no_configuration_names_the_file(config, text, message):
    error = _refused(config, text)
    assert message in error.what and error.where.endswith("test.yaml")


def test_yaml_errors_name_line_and_column(config):
    error = _refused(config, "storage: {root: /data}\nspark: [1, 2\n")
    assert "line 3, column 1" in error.next


def test_a_missing_file_names_those_that_there_are():
    error = _refused(settings.load, {"WEIR_ENV": "stage"})
    assert "stage.yaml" in error.what and error.next == "Set WEIR_ENV to one of: demo, dev, prod."
    assert "nowhere.yaml" in _refused(settings.load, {"WEIR_CONFIG": "/nowhere.yaml"}).what


@pytest.mark.parametrize("name", ["demo", "dev", "prod"])
def test_the_files_that_weir_comes_with_are_valid(name):
    assert "flights" in settings.load({"WEIR_ENV": name}).pipelines


def test_an_empty_file_is_all_defaults(config):
    assert config("") == settings.Settings()


def test_variables_override_the_file_at_any_depth(config):
    loaded = config(
        "epoch: {max_files: 5, max_rows: 10}\npipelines: {flights: {object: a.b:c, params: {landing: /x}}}",
        WEIR_EPOCH__MAX_FILES="7",
        WEIR_PIPELINES__FLIGHTS__PARAMS="{landing: /y}",
        WEIR_SPARK__CONF='{spark.executor.memory: "1g"}',
        WEIR_STORAGE__ROOT="2024",
    )
    assert (loaded.epoch.max_files, loaded.epoch.max_rows) == (7, 10)
    assert loaded.pipelines["flights"].object == "a.b:c"
    assert loaded.spark.conf == {"spark.executor.memory": "1g"}
    assert loaded.storage.root == "2024", "a path that looks like a number stays a path"


def test_a_variable_names_what_the_file_calls_with_two_underscores_in_a_row(config):
    names = ("a", "a__b", "a__b__c", "a_")
    pipelines = ", ".join(f"{name}: {{object: 'm:{name}', params: {{x__y: '0'}}}}" for name in names)
    loaded = config(
        f"pipelines: {{{pipelines}}}",
        WEIR_PIPELINES__A__PARAMS="{x: '1'}",
        WEIR_PIPELINES__A__B__PARAMS__X__Y="2",
        WEIR_PIPELINES__A__B__C__PARAMS__Z="3",
        WEIR_PIPELINES__A___OBJECT="other:a_",
    ).pipelines
    params = {"a": {"x": "1"}, "a__b": {"x__y": "2"}, "a__b__c": {"x__y": "0", "z": "3"}, "a_": {"x__y": "0"}}
    assert {name: of.params for name, of in loaded.items()} == params
    assert [loaded[name].object for name in names] == ["m:a", "m:a__b", "m:a__b__c", "other:a_"]


def test_a_variable_says_null_where_the_file_may(config):
    loaded = config(
        "spark: {python: python3.12}\nrestore: {recovery_time_objective_seconds: 60}",
        WEIR_SPARK__PYTHON="null",
        WEIR_DAGSTER__DRILL_CRON="null",
        WEIR_RESTORE__RECOVERY_TIME_OBJECTIVE_SECONDS="null",
    )
    assert loaded.spark.python is None
    assert loaded.dagster.drill_cron is None
    assert loaded.restore.recovery_time_objective_seconds is None
    error = _refused(config, "", WEIR_STORAGE__ROOT="null")
    assert "storage.root: " in error.what and "[WEIR_STORAGE__ROOT]" in error.what


def test_a_variable_that_a_connection_names_is_a_secret_and_no_setting(config, monkeypatch):
    monkeypatch.setenv("WEIR_ORDERS_PASSWORD", "hunter2")
    text = "connections: {orders: {options: {user: weir, password: {env: WEIR_ORDERS_PASSWORD}}}}"
    loaded = config(text, WEIR_ORDERS_PASSWORD="hunter2")
    assert loaded.connection("orders") == {"user": "weir", "password": "hunter2"}
    options = "{sasl.password: {env: WEIR_KAFKA_PASSWORD}}"
    config("", WEIR_CONNECTIONS__EVENTS__OPTIONS=options, WEIR_KAFKA_PASSWORD="hunter3")


def test_a_variable_that_holds_a_mapping_is_named_for_what_is_wrong_in_it(config):
    pipelines = "pipelines: {flights: {object: a.b:c}}"
    error = _refused(config, pipelines, WEIR_PIPELINES__FLIGHTS__PARAMS="{day: 2013-01-01}")
    assert "pipelines.flights.params.day: " in error.what and "[WEIR_PIPELINES__FLIGHTS__PARAMS]" in error.what
    error = _refused(config, pipelines, WEIR_PIPELINES__FLIGHTS__PARAMS="{landing: s3cret")
    assert "WEIR_PIPELINES__FLIGHTS__PARAMS" in error.what and "line 1" in error.what
    assert "s3cret" not in str(error)


@pytest.mark.parametrize("wrong", ["5", "text", "[1]", "true"])
@pytest.mark.parametrize(
    "section", [*settings.Settings.model_fields, "storage.s3", "pipelines.orders", "pipelines.orders.params"]
)
def test_a_variable_hides_no_section_of_a_wrong_type(config, section, wrong):
    text = f"{section.replace('.', ': {')}: {wrong}{'}' * section.count('.')}"
    below = {"pipelines": "PIPELINES__ORDERS__PARAMS__DAY", "connections": "CONNECTIONS__C__OPTIONS__HOST"}
    variable = below.get(section.partition(".")[0], f"{section.upper().replace('.', '__')}__WHATEVER")
    error = _refused(config, text, **{f"WEIR_{variable}": "2024"})
    (line,) = (line for line in error.what.splitlines() if line.startswith(f"  {section}: "))
    assert line.endswith("[test.yaml]")


def test_a_variable_hides_no_wrong_type_of_another_variable(config):
    error = _refused(config, "", WEIR_EPOCH="5", WEIR_EPOCH__MAX_FILES="3")
    assert error.what.splitlines()[1:] == [
        "  epoch: Input should be a valid dictionary or instance of EpochSettings (got '5')  [WEIR_EPOCH]"
    ]


def test_a_variable_may_say_of_a_literal_where_the_secret_is_and_fill_a_section_without_keys(config):
    text = "connections: {c: {options: {password: literal}}}\npipelines:\n"
    variables = {"WEIR_CONNECTIONS__C__OPTIONS__PASSWORD__ENV": "SECRET", "WEIR_PIPELINES__X__OBJECT": "a.b:c"}
    loaded = config(text, **variables)
    assert loaded.connections["c"].options["password"].env == "SECRET"
    assert loaded.pipelines["x"].object == "a.b:c"


@pytest.mark.parametrize("text", ["@data", "a: b: c", "%scratch", "'quoted"])
def test_a_variable_that_holds_text_is_not_read_as_yaml(config, text):
    assert config("", WEIR_STORAGE__ROOT=text).storage.root == text


def test_relative_paths_mean_the_project_and_uris_stay():
    local = settings.Settings()
    assert local.storage_uri("flights") == str(PROJECT / ".weir/storage/flights")
    assert local.work_dir == PROJECT / ".weir/work"
    bucket = settings.Settings.model_validate({"storage": {"root": "s3://bucket/weir/"}})
    assert bucket.storage_uri("flights") == "s3://bucket/weir/flights"


def test_a_placeholder_without_a_value_names_the_variable_that_gives_it(config):
    loaded = config("pipelines: {flights: {object: a.b:c, params: {landing: in}}}")
    assert loaded.resolve("flights", "{landing}/*.parquet") == str(PROJECT / "in/*.parquet")
    assert loaded.resolve("flights", "s3://in/*.parquet") == "s3://in/*.parquet"
    with pytest.raises(ConfigurationError) as refused:
        loaded.resolve("flights", "{arrivals}/*.parquet")
    assert "'arrivals'" in refused.value.what and "WEIR_PIPELINES__FLIGHTS__PARAMS" in refused.value.next


@pytest.mark.parametrize("pattern", ["{landing}/part-{/*.csv", "{landing:x}/*.csv", "{landing.day}/*.csv", "a}/*.csv"])
def test_braces_that_are_no_placeholder_are_refused_and_doubled_ones_are_braces(config, pattern):
    loaded = config("pipelines: {flights: {object: a.b:c, params: {landing: /in}}}")
    assert loaded.resolve("flights", "{landing}/{{today}}/*.csv") == "/in/{today}/*.csv"
    with pytest.raises(ConfigurationError, match="no placeholders") as refused:
        loaded.resolve("flights", pattern)
    assert "{{ and }}" in refused.value.next


def test_every_key_is_described():
    """The reference page, where an operator looks a key up, is made of the descriptions."""
    for section in settings.Settings.model_fields.values():
        for name, field in getattr(section.annotation, "model_fields", {}).items():
            assert field.description, name


def test_a_weir_that_is_installed_is_no_project_whose_settings_are_read(monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "PROJECT", tmp_path / "site-packages")
    with pytest.raises(ConfigurationError, match="No project is here") as refused:
        settings.load({})
    assert "[tool.weir]" in str(refused.value)


OF_ONE = """
epoch: {max_files: 50, max_rows: 1000}
checkpoints: {interval_seconds: 30}
pipelines:
  clicks: {object: "x:y", epoch: {max_files: 1}, checkpoints: {num_retained: 9}}
  orders: {object: "x:z"}
"""


def test_one_pipeline_has_slices_and_checkpoints_of_its_own_key_by_key(config):
    common = config(OF_ONE, WEIR_PIPELINES__CLICKS__CHECKPOINTS__INTERVAL_SECONDS="5")
    of = common.of("clicks")
    assert (of.epoch.max_files, of.epoch.max_rows) == (1, 1000)
    assert (of.checkpoints.num_retained, of.checkpoints.interval_seconds) == (9, 5)
    assert of.of("clicks") is of and of.pipelines["clicks"].object == "x:y"
    assert common.of("orders") is common and common.of("unknown") is common
    assert (common.epoch.max_files, common.checkpoints.interval_seconds) == (50, 30)


def test_what_one_pipeline_says_may_contradict_what_is_common(config):
    text = OF_ONE.replace("num_retained: 9", "timeout_seconds: 10")
    said = _refused(config, text).what
    assert "pipelines.clicks: checkpoints.timeout_seconds (10) is shorter than" in said
    assert said.count("is shorter than") == 1


SECRETS = {
    "password": "Literal-4711",
    "sasl.password": "Literal-4711",
    "sasl.jaas.config": 'required username="u" password="Literal-4711";',
    "basic.auth.user.info": "u:Literal-4711",
    "schema.registry.basic.auth.user.info": "u:Literal-4711",
    "ssl.key.pem": "Literal-4711",
    "ssl.keystore.pem": "Literal-4711",
    "ssl.key.password": "Literal-4711",
    "scram_client_key": "Literal-4711",
    "pass": "Literal-4711",
    "schema.registry.url": "https://u:Literal-4711@registry:8081",
}


@pytest.mark.parametrize("option", SECRETS)
def test_a_secret_that_stands_in_a_connection_is_taken_and_never_shown(option, monkeypatch):
    monkeypatch.setattr(redaction, "_values", set())
    made = ConnectionSettings.model_validate({"options": {option: SECRETS[option]}})
    assert made.options == {option: SECRETS[option]}
    assert "Literal-4711" not in str(made)
    assert "Literal-4711" not in redacted(f"The server says: {SECRETS[option]} was refused.")


def test_options_of_a_connection_that_are_no_secrets_are_shown(monkeypatch):
    monkeypatch.setattr(redaction, "_values", set())
    plain = {"host": "database-1", "user": "weir-user", "ssl.key.location": "/keys/k.pem", "passfile": "/home/passes"}
    ConnectionSettings.model_validate({"options": plain})
    assert all(value in redacted(f"Cannot connect: {value}.") for value in plain.values())
