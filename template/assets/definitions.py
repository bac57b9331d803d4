"""What Dagster loads: the assets, jobs and sensors of every pipeline in the configuration, and your own beside them."""

import dagster as dg
import weir.dagster

defs = dg.Definitions.merge(
    weir.dagster.definitions(),
    dg.Definitions(
        assets=[],  # your own assets, schedules and sensors
        executor=dg.in_process_executor,  # one process and one Spark session for all epochs of a run
    ),
)
