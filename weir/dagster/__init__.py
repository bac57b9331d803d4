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
    """Return the assets, checks, jobs, sensors and schedules of pipelines.

    Nothing is read from storage, and nothing is started.

    Args:
        *names: Names of pipelines in the configuration; by default all of them.
        settings: The configuration; by default the one that `WEIR_CONFIG` or `WEIR_ENV` chooses.

    Raises:
        ConfigurationError: The configuration is wrong, or has no such pipeline.
        PipelineError: The code of a pipeline is wrong.

    Example:
        The configuration has a pipeline `shop` with the sink `totals`.

        >>> import weir.dagster
        >>> shop = weir.dagster.definitions("shop")
        >>> [job.name for job in shop.jobs][:3]
        ['shop_job', 'shop_restore_job', 'shop_restore_drill_job']
        >>> [key.to_user_string() for key in shop.resolve_all_asset_keys() if key.path[-1] == "totals"]
        ['shop/tables/totals']
    """
    from weir.dagster.factory import weir_definitions
    from weir.loading import load_pipeline
    from weir.settings.configuration import load

    chosen = load() if settings is None else settings
    return weir_definitions([load_pipeline(name, chosen) for name in names or chosen.pipelines], chosen)
