"""Dagster's jobs made from operations that are declared (`weir.operations.operation`)."""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import dagster as dg
import yaml
from pydantic import Field, create_model

from state_ops.errors import WeirError
from state_ops.facts import in_json_types
from weir.dagster.coordination import failure
from weir.dagster.names import BESIDE
from weir.definition import Pipeline
from weir.operations.operation import JOB, Done, Here, Labelled, Operation, Plan, Rows, Words, does
from weir.settings.configuration import Settings

After = Callable[[dg.OpExecutionContext, dict[str, Any], Done], None]


def job(pipeline: Pipeline, settings: Settings, operation: Operation, after: After | None = None) -> dg.JobDefinition:
    """Return the job of an operation, launched from the Launchpad with its options as typed configuration.

    Args:
        after: Shows on Dagster's pages what was done, given the options.
    """
    Config = config_of(operation)

    @dg.op(name=f"{pipeline.name}_{operation.name}", out=dg.Out(dg.Nothing))
    def run(context: dg.OpExecutionContext, config: Config) -> None:  # type: ignore[valid-type]
        options: dict[str, Any] = dict(config)
        try:
            done = _carried_out(context, operation, pipeline, settings, **options)
        except WeirError as error:
            raise failure(error) from None
        if after is not None and done is not None:
            after(context, options, done)

    return job_of(pipeline, f"{pipeline.name}_{operation.name}_job", run, operation.job or "")


def config_of(operation: Operation) -> type[dg.Config]:
    """Return the configuration of an operation's job: its options, and those that all have."""
    fields: dict[str, Any] = {}
    for of in operation.options:
        if of.is_of(JOB):
            is_required = of.option.required or of.default is inspect.Parameter.empty
            is_reason = of.name == "reason" and not of.default
            default = ... if is_required else f"{operation.name} job" if is_reason else of.default
            kind = str if of.option.required else of.type
            fields[of.name] = (kind, Field(default, description=of.option.in_job or of.option.about))
    if operation.plans:
        fields["dry_run"] = (bool, Field(True, description="Only show what would change."))
    if operation.accepts:
        about = (
            "Obstacles to go on despite, word for word as a dry run has shown them. Any other obstacle ends the run."
        )
        fields["accept"] = (list[str], Field([], description=about))
    return create_model(f"{operation.name.title()}Config", __base__=dg.Config, **fields)


def _carried_out(
    context: dg.OpExecutionContext,
    operation: Operation,
    pipeline: Pipeline,
    settings: Settings,
    *,
    dry_run: bool = False,
    accept: Sequence[str] = (),
    **options: Any,
) -> Done | None:
    """Carry an operation out, and say in the log what it sees and does. Returns None after a dry run."""
    here = Here(pipeline, settings, JOB, f"{operation.name} job", lambda _: contextlib.nullcontext(), dry_run)
    steps = operation.steps(here, **options)
    step = next(steps)
    if step.result is not None:
        context.add_output_metadata(
            {"plan" if operation.plans else "result": dg.MetadataValue.json(in_json_types(step.result))}
        )
    if isinstance(step, Plan):
        _log(context, step.words)
        if dry_run:
            if step.obstacles:
                context.log.info(f"to {step.ask} in spite of these: {to_accept(step.obstacles)}")
            context.log.info("nothing was changed: dry_run")
            return None
        step.check(accept)
        step = steps.send(accept)
    for done in does(step, steps):
        _log(context, done.words)
    return done


def _log(context: dg.OpExecutionContext, words: Words) -> None:
    for word in words:
        match word:
            case Rows(rows):
                for *subject, text in rows:
                    context.log.info(f"{' '.join(subject)}: {text}")
            case Labelled(label, text):
                context.log.warning(f"{label}: {text}")
            case str():
                context.log.info(word)


def to_accept(obstacles: Sequence[str]) -> str:
    """Obstacles as the Launchpad takes them: a line of YAML to copy."""
    listed = yaml.safe_dump(
        list(obstacles), default_flow_style=True, default_style='"', allow_unicode=True, width=float("inf")
    )
    return f"accept: {listed.strip()}"


def job_of(pipeline: Pipeline, name: str, op: dg.OpDefinition, description: str) -> dg.JobDefinition:
    """Return the job of one op that may run while epochs do."""
    return dg.GraphDefinition(name=name, node_defs=[op], description=description).to_job(
        executor_def=dg.in_process_executor, tags={BESIDE: pipeline.name}
    )
