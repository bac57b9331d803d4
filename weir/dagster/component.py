"""A pipeline as a component of a Dagster project: the result of `weir_definitions`, from a few lines of YAML.

type: weir.dagster.component.WeirPipelineComponent
attributes:
  pipeline: flights
"""

import inspect
import os
from typing import Annotated

import dagster as dg
from pydantic import Field

from weir.dagster.factory import weir_definitions
from weir.loading import load_pipeline
from weir.settings.configuration import load


class ScaffoldParams(dg.Model):
    """The parameters of `dg scaffold defs`."""

    pipeline: str = Field(description="The pipeline's name in the configuration.")


class WeirPipelineScaffolder(dg.Scaffolder[ScaffoldParams]):
    """The writer of a pipeline's YAML or Python, for `dg scaffold defs`."""

    @classmethod
    def get_scaffold_params(cls) -> type[ScaffoldParams]:
        """Return the parameters of `dg scaffold defs`."""
        return ScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[ScaffoldParams]) -> None:
        """Write the YAML or Python of one pipeline."""
        pipeline = request.params.pipeline
        if request.scaffold_format == "yaml":
            dg.scaffold_component(request, {"pipeline": pipeline})
            return
        (request.target_path / "component.py").write_text(
            "import dagster as dg\n\n"
            "from weir.dagster.component import WeirPipelineComponent\n\n\n"
            "@dg.component_instance\n"
            "def load(context: dg.ComponentLoadContext) -> WeirPipelineComponent:\n"
            f'    return WeirPipelineComponent(pipeline="{pipeline}")\n'
        )


@dg.scaffold_with(WeirPipelineScaffolder)
class WeirPipelineComponent(dg.Component, dg.Model, dg.Resolvable):
    """One Weir pipeline: its sources, stages, tables and checkpoint as assets, with checks, jobs and sensors.

    Attributes:
        pipeline: The pipeline's name in the configuration, below `pipelines`.
        configuration: The configuration file, relative to the component's folder; by default the one that `WEIR_CONFIG`
            or `WEIR_ENV` chooses.

    Example:
        The configuration has a pipeline `shop`.

        >>> import dagster as dg
        >>> from weir.dagster.component import WeirPipelineComponent
        >>> shop = dg.build_defs_for_component(WeirPipelineComponent(pipeline="shop"))
        >>> shop.resolve_job_def("shop_job").name
        'shop_job'
    """

    pipeline: Annotated[
        str,
        dg.Resolver.default(
            description="The pipeline's name in the configuration, below `pipelines`.", examples=["flights"]
        ),
    ]
    configuration: Annotated[
        str | None,
        dg.Resolver.default(
            description=(
                "The configuration file, relative to the component's folder; by default WEIR_CONFIG or WEIR_ENV."
            ),
            examples=["weir.yaml"],
        ),
    ] = None

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Return the description and tags for `dg list components` and the documentation."""
        return dg.ComponentTypeSpec(
            description=inspect.cleandoc(cls.__doc__ or "").splitlines()[0], tags=["weir", "streaming", "pyspark"]
        )

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the pipeline's definitions. Nothing is read from storage, and nothing is started."""
        file = {} if self.configuration is None else {"WEIR_CONFIG": str(context.path / self.configuration)}
        settings = load({**os.environ, **file})
        return weir_definitions([load_pipeline(self.pipeline, settings)], settings)
