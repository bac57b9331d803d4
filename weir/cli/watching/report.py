"""`weir report --html`: all that storage tells of a pipeline, as one file that can be passed on.

The file needs no network and no script. Everything in it passes through redaction, and is escaped where it is written. Rows and keys are
left out: what a gate refused is counted, not shown. What an author's own error says is in it as it was said.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import yaml
from jinja2 import Environment, FileSystemLoader

from state_ops import durations, extras
from state_ops.checkpoints import restore_log
from state_ops.coordination import lease
from state_ops.coordination.gate_hold import GateHold
from state_ops.counts import counted
from state_ops.errors import ConfigurationError, PipelineError
from state_ops.extras import version
from state_ops.facts import HIDDEN, Facts, Named, fact
from state_ops.records.checkpoint import stats_of
from state_ops.redaction import redacted
from weir.cli.watching import figures, plots, timeline
from weir.cli.watching.figures import EpochFigures
from weir.cli.watching.monitor import Row, seen
from weir.cli.watching.pipeline_look import PipelineLook, Watched
from weir.cli.watching.problems import Problem, problems
from weir.cli.watching.timeline import Event
from weir.definition import Pipeline
from weir.definition.fingerprint import fingerprint_of_stage
from weir.gates.restore_gates import NOT_HELD
from weir.settings.configuration import Settings

_TEMPLATES = Path(__file__).with_name("templates")
_UNEXPECTED = re.compile(rf"({NOT_HELD}): .*")


@dataclass(frozen=True, slots=True)
class Incident(Facts):
    """The content of a report.

    Attributes:
        row: The pipeline as it is now.
        epochs: Those that the report is about, oldest first.
        events: What happened, the newest first.
        problems: The worst first.
        file: Where the page is; None: nowhere yet.
    """

    row: Annotated[Row, HIDDEN]
    pipeline: Annotated[Pipeline, HIDDEN]
    look: Annotated[PipelineLook, HIDDEN]
    settings: Annotated[Settings, HIDDEN]
    epochs: Sequence[EpochFigures]
    problems: Sequence[Problem]
    events: Sequence[Event]
    made_at: datetime
    file: Path | None = None

    @property
    @fact
    def title(self) -> Annotated[str, Named("pipeline")]:
        """The pipeline's name."""
        return self.pipeline.title

    @property
    @fact
    def storage(self) -> str | None:
        """The address of the pipeline's storage."""
        return self.row.storage


def moment(text: str, now: datetime) -> datetime:
    """Parse `--since`: a time, or how long ago.

    Raises:
        ConfigurationError: It is neither.
    """
    try:
        if re.fullmatch(r"\d+[a-z]+", text):
            return now - timedelta(microseconds=durations.micros(text, "weir report", "since"))
        since = datetime.fromisoformat(text)
    except (ValueError, OverflowError, PipelineError) as error:
        raise ConfigurationError(
            f"--since {text!r} is no time.",
            next="Say how long ago, such as 90m, 6h or 2d, or a time: 2026-05-01T03:00Z.",
        ) from error
    return since if since.tzinfo is not None else since.replace(tzinfo=UTC)


def incident(name: str, settings: Settings, last: int, since: datetime | None) -> Incident:
    """Read all that a report says of a pipeline.

    Args:
        name: As the configuration has it, or PIPELINE@BRANCH.
        last: Of how many epochs at most.
        since: Leave out epochs and events before; None: nothing.
    """
    watched = Watched(name, settings, closely=True)
    watched.with_files = True
    row = seen(watched)
    opened, look = watched.open(), row.look
    assert look is not None, "a look that failed was raised"
    if look.alive is None:  # only watching its counter can tell
        look = replace(look, alive=lease.watch(opened.storage))
    look = replace(look, hold=_without_rows(look))
    epochs = [epoch for epoch in row.epochs if since is None or epoch.completed_at >= since][-last:]
    begin = since or (epochs[0].triggered_at if len(epochs) < len(row.epochs) else None)
    events = timeline.events(look, epochs, restore_log.recorded(opened.storage), begin)
    return Incident(row, opened.pipeline, look, settings, epochs, problems(name, look, row.epochs), events, look.at)


def _without_rows(look: PipelineLook) -> GateHold | None:
    """Return the hold, with counts in place of the rows and keys that a gate names."""
    if look.hold is None or not look.hold.verdicts:
        return look.hold
    refused = [
        f"{verdict.get('title', 'a gate')} ({verdict.get('unexpected', 0):,} of {counted(verdict.get('rows', 0), 'row')})"
        for verdict in look.hold.verdicts
    ]
    of = f" of the stage {look.hold.stage}" if look.hold.stage else ""
    advice = look.hold.message.partition("next:")[2].strip()
    message = f"A quality gate{of} failed: {'; '.join(refused)}; `weir status` shows samples.\n  next:  {advice}"
    return replace(look.hold, message=message)


def page(shown: Incident) -> str:
    """Return the report as HTML."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_redacted
    )
    drawn = plots.plots(shown.epochs)
    return environment.get_template("incident.html.j2").render(
        incident=shown,
        look=shown.look,
        head=shown.look.head,
        row=shown.row,
        plots=[(plot, plots.svg(plot, shown.epochs)) for plot in drawn],
        no_pictures=None if extras.is_installed("matplotlib") else extras.install("plots"),
        stages=_stages(shown),
        settings=_settings_text(shown),
        version=version(),
        size=figures.size,
        ago=figures.ago,
        waiting=figures.waiting(shown.look.arrived),
        pace=figures.rows_per_second(shown.epochs) if shown.epochs else None,
        growth=figures.growth_per_hour(shown.epochs),
        restarts=figures.restarts(shown.epochs, shown.look),
    )


def _redacted(value: Any) -> Any:
    """Return a text without secrets and without the values that a restore did not expect. A drawing stays as it is: its
    only text from outside are names of stages."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return _UNEXPECTED.sub(r"\1; `weir restore` shows samples", redacted(value))


def _stages(shown: Incident) -> list[dict[str, Any]]:
    """Return the stages as they were defined at the newest checkpoint, and whether their code is that of today."""
    today = {stage.uid: fingerprint_of_stage(stage) for stage in shown.pipeline.stages}
    listed = []
    for stage in shown.row.stages:
        code = stats_of(shown.look.head, stage.uid).code
        if stage.uid not in today:
            now = "the stage is gone"
        elif code is None:
            now = "not known"
        else:
            now = "as on this host" if code == today[stage.uid] else "other code than on this host"
        listed.append({"figures": stage, "code": (code or "-")[:12], "now": now})
    return listed


def _settings_text(shown: Incident) -> str:
    """Return the settings that differ from the defaults, as YAML. Secrets are named and not shown."""
    chosen = shown.settings.model_dump(mode="json", exclude_defaults=True)
    name = shown.pipeline.name
    chosen["pipelines"] = {name: chosen.get("pipelines", {}).get(name)}
    used = {getattr(of, "connection", None) for of in (*shown.pipeline.sources, *shown.pipeline.sinks)}
    chosen["connections"] = {
        key: {"options": {option: _option(of) for option, of in value.get("options", {}).items()}}
        for key, value in chosen.get("connections", {}).items()
        if key in used
    }
    chosen = {key: value for key, value in chosen.items() if value}
    return str(yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True))


def _option(value: Any) -> Any:
    """Return an option of a connection as the report may show it: the variable that it refers to, and nothing of a
    text."""
    return "***" if isinstance(value, str) else value
