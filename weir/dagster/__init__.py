"""Pipelines as Dagster assets, checks, jobs, sensors and schedules.

    import dagster as dg
    import weir.dagster

    defs = dg.Definitions.merge(weir.dagster.definitions("orders"), dg.Definitions(assets=[...]))

`weir.dagster.component` has the same as a component, for `dg scaffold defs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import dagster as dg

    from weir.settings.configuration import Settings


def definitions(*names: str, settings: Settings | None = None) -> dg.Definitions:
    """Return the assets, checks, jobs, sensors and schedules of pipelines. Nothing is read from storage or started.

    Args:
        names: Pipelines of the configuration; none: all of them.
        settings: The configuration; None: the one that `WEIR_CONFIG` or `WEIR_ENV` chooses.

    Raises:
        ConfigurationError: The configuration is wrong, or has no such pipeline.
        PipelineError: The code of a pipeline is wrong.
    """
    from weir.dagster.factory import weir_definitions
    from weir.loading import load_pipeline
    from weir.settings.configuration import load

    chosen = load() if settings is None else settings
    return weir_definitions([load_pipeline(name, chosen) for name in names or chosen.pipelines], chosen)
