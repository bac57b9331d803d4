"""The last epochs as a picture and as a table, from Dagster's observations of them."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg

from state_ops import extras
from weir.dagster.metadata import LATE_IN
from weir.run.progress import by_stage

_LAST = 60
_SHOWN = 15
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Point:
    """One observation: of one epoch, or of a few that came too fast one after the other.

    Attributes:
        late: Rows that were late, by stage. Earlier releases recorded only their sum, which is left out: one row may be
            late in several stages.
        seconds: Of the slowest epoch, to its commit.
    """

    at: datetime
    checkpoint: int
    epochs: int
    rows: int
    late: dict[str, int]
    bytes_total: int
    bytes_new: int
    seconds: float
    trigger: str


def points(instance: dg.DagsterInstance, checkpoint: dg.AssetKey, last: int = _LAST) -> list[Point]:
    """Return the last observations of a pipeline's checkpoint, oldest first."""
    points = []
    for record in instance.fetch_observations(checkpoint, limit=last).records:
        observation = record.asset_observation
        if observation is not None and "ms to commit" in observation.metadata:
            points.append(_point(record.timestamp, observation.metadata))
    return list(reversed(points))


def _point(timestamp: float, shown: Mapping[str, Any]) -> Point:
    def value(name: str, default: Any = 0) -> Any:
        return shown[name].value if name in shown else default

    return Point(
        datetime.fromtimestamp(timestamp, UTC),
        value("checkpoint"),
        value("epochs", 1),
        value("rows read"),
        {name.removeprefix(LATE_IN): value(name) for name in shown if name.startswith(LATE_IN)},
        value("state bytes"),
        value("state bytes new"),
        value("ms to commit", 0.0) / 1000,
        value("trigger", ""),
    )


def as_table(points: Sequence[Point]) -> dg.MarkdownMetadataValue:
    """Return the newest points as a Markdown table, newest first."""
    lines = [
        "| checkpoint | completed (UTC) | by | epochs | rows | late | state MiB | new MiB | s to commit |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {point.checkpoint} | {point.at:%Y-%m-%d %H:%M:%S} | {point.trigger} | {point.epochs} | {point.rows:,} "
        f"| {by_stage({uid: rows for uid, rows in point.late.items() if rows}) or 0} "
        f"| {point.bytes_total / _MIB:,.2f} | {point.bytes_new / _MIB:,.2f} | {point.seconds:.2f} |"
        for point in reversed(points[-_SHOWN:])
    ]
    return dg.MetadataValue.md("\n".join(lines))


def as_plot(points: Sequence[Point]) -> dg.MarkdownMetadataValue:
    """Rows, seconds to commit and bytes over the last epochs, as a PNG within Markdown."""
    times = [point.at for point in points]
    stages = list(dict.fromkeys(uid for point in points for uid in point.late))
    return _picture(
        times,
        [
            (
                "rows",
                [
                    ("read", [point.rows for point in points]),
                    *((f"late in {uid}", [point.late.get(uid, math.nan) for point in points]) for uid in stages),
                ],
            ),
            ("s to commit", [("", [point.seconds for point in points])]),
            (
                "state, MiB",
                [
                    ("total", [point.bytes_total / _MIB for point in points]),
                    ("new", [point.bytes_new / _MIB for point in points]),
                ],
            ),
        ],
    )


def drills_plot(
    instance: dg.DagsterInstance, drill: dg.AssetKey, now: tuple[datetime, float, float]
) -> dg.MetadataValue:
    """Plot how long recovery took in the last drills, and how old the oldest unread input was.

    Args:
        now: The point of this drill, which is not recorded yet.
    """
    drills = []
    for record in instance.fetch_materializations(drill, limit=_LAST).records:
        done = record.asset_materialization
        shown: Mapping[str, Any] = done.metadata if done is not None else {}
        if "recovery seconds" in shown:
            at = datetime.fromtimestamp(record.timestamp, UTC)
            drills.append((at, shown["recovery seconds"].value, shown["data-loss window seconds"].value))
    drills = [*reversed(drills), now]
    times = [at for at, _, _ in drills]
    return _picture(
        times,
        [
            ("s to recover", [("", [took for _, took, _ in drills])]),
            ("s of input in no checkpoint", [("", [loss for _, _, loss in drills])]),
        ],
    )


def _picture(
    times: Sequence[datetime], panels: Sequence[tuple[str, Sequence[tuple[str, Sequence[float]]]]]
) -> dg.MarkdownMetadataValue:
    if not extras.is_installed("matplotlib"):
        return dg.MetadataValue.md(f"A picture needs matplotlib, which is not installed: {extras.install('plots')}")
    # It takes half a second to import, so it is imported at the first picture, in a run, and never in the code server.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.5 * len(panels)), dpi=80)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    # A fixed layout: an automatic one draws everything twice, while a run waits.
    figure.subplots_adjust(left=0.1, right=0.98, top=1 - 0.06 / len(panels), bottom=0.25 / len(panels), hspace=0.12)
    for axis, (title, lines) in zip(axes, panels, strict=True):
        for label, values in lines:
            axis.plot(times, values, marker=".", linewidth=1, label=label or None)
        axis.set_ylabel(title, fontsize=8)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        if len(lines) > 1:
            axis.legend(fontsize=7, loc="upper left")
    if times[-1] - times[0] < timedelta(minutes=1):  # too short an axis has no ticks
        axes[-1].set_xlim(times[0] - timedelta(minutes=1), times[-1] + timedelta(minutes=1))
    locator = AutoDateLocator(maxticks=8)
    axes[-1].xaxis.set_major_locator(locator)
    axes[-1].xaxis.set_major_formatter(ConciseDateFormatter(locator))
    written = io.BytesIO()
    figure.savefig(written, format="png")
    return dg.MetadataValue.md(f"![history](data:image/png;base64,{base64.b64encode(written.getvalue()).decode()})")
