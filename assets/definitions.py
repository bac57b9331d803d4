"""The definitions that `workspace.yaml` loads: every pipeline of the configuration."""

import dagster as dg

from weir.dagster.factory import weir_definitions
from weir.loading import load_pipeline
from weir.settings.configuration import load

settings = load()

# One process and one warm Spark session for all epochs of a run, also when a person materializes an asset.
defs = dg.Definitions.merge(
    weir_definitions([load_pipeline(name, settings) for name in settings.pipelines], settings),
    dg.Definitions(executor=dg.in_process_executor),
)
