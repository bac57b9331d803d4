"""The component gives what `weir_definitions` gives, from YAML and from Python, as `dg` loads it."""

from __future__ import annotations

import json

import dagster as dg
import pytest
import yaml
from dagster.components.testing import create_defs_folder_sandbox

from pipelines import flights
from weir.dagster.component import WeirPipelineComponent
from weir.dagster.factory import weir_definitions
from weir.settings.configuration import load


def keys(defs: dg.Definitions) -> set[dg.AssetKey]:
    return set(defs.resolve_all_asset_keys())


@pytest.mark.parametrize("form", ["yaml", "python"])
def test_what_is_scaffolded_loads(landing, form):
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            component_cls=WeirPipelineComponent, scaffold_params={"pipeline": "flights"}, scaffold_format=form
        )
        with sandbox.build_all_defs() as defs:
            assert keys(defs) == keys(weir_definitions([flights.pipeline], load()))
            assert {job.name for job in defs.resolve_all_job_defs()} >= {"flights_job", "flights_restore_job"}
            assert {sensor.name for sensor in defs.sensors or ()} >= {"flights_checkpoint_sensor"}
    assert path.name


def test_it_may_have_a_configuration_of_its_own(tmp_path):
    attributes = {"pipeline": "small", "configuration": "weir.yaml"}
    ours = {"pipelines": {"small": {"object": "tests.recovery.small:pipeline", "params": {"landing": str(tmp_path)}}}}
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            component_cls=WeirPipelineComponent,
            scaffold_params={"pipeline": "small"},
            defs_yaml_contents={"type": "weir.dagster.component.WeirPipelineComponent", "attributes": attributes},
        )
        (path / "weir.yaml").write_text(yaml.safe_dump(ours))
        with sandbox.build_all_defs() as defs:
            assert dg.AssetKey(["small", "checkpoint"]) in keys(defs)


def test_its_schema_describes_what_it_takes():
    schema = WeirPipelineComponent.get_model_cls().model_json_schema()
    assert schema["required"] == ["pipeline"]
    assert all("description" in field for field in schema["properties"].values())
    assert json.dumps(schema)
