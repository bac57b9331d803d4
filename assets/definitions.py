"""The definitions that `workspace.yaml` loads: every pipeline of the configuration."""

import dagster as dg

import weir.dagster

# One process and one warm Spark session for all epochs of a run, also when a person materializes an asset.
defs = dg.Definitions.merge(weir.dagster.definitions(), dg.Definitions(executor=dg.in_process_executor))
