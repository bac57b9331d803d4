"""The pictures of `weir report --html`: of each a drawing in SVG that follows the page's colours, and the table behind it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from state_ops import extras
from weir.cli.watching.figures import PHASES, EpochFigures, short_number, size

_SERIES = 8  # as many as the page has colours for
_TICKS = 4
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))
_INK = "#010203"  # stands for the page's own colour of text, and #01ff00 to #01ff07 for those of series


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture, with what it shows in numbers.

    Attributes:
        series: By name, a value for each epoch; None: there is none.
        shown: How a value is written.
        stacked: Whether the values of all series of an epoch add up.
    """

    title: str
    about: str
    series: Mapping[str, Sequence[float | None]]
    shown: Callable[[float], str]
    stacked: bool = False

    @property
    def colours(self) -> dict[str, int]:
        """The number of each series' colour on the page."""
        return {name: number % _SERIES for number, name in enumerate(self.series)}

    def table(self) -> list[list[str]]:
        """Return the values of each epoch as text, in the order of the series."""
        columns = [["-" if value is None else self.shown(value) for value in values] for values in self.series.values()]
        return [list(row) for row in zip(*columns, strict=True)]


def plots(epochs: Sequence[EpochFigures]) -> list[Plot]:
    """Return what is drawn of a pipeline's epochs, oldest first. A plot for which no epoch has values is left out."""
    stages = list(dict.fromkeys(uid for epoch in epochs for uid in epoch.state))
    late = list(dict.fromkeys(uid for epoch in epochs for uid in epoch.late))
    phases = [phase for phase in dict.fromkeys(PHASES.values()) if any(epoch.phases.get(phase) for epoch in epochs)]
    drawn = [
        Plot(
            "Rows in and out",
            "Rows that an epoch read, and that it handed to sinks",
            {"in": [epoch.rows_in for epoch in epochs], "out": [epoch.rows_out for epoch in epochs]},
            short_number,
        ),
        _lasting(
            "How long input waited",
            "From the change of an epoch's oldest input file, or message, to the commit: the lag of that epoch",
            {"waited": [epoch.waited_seconds for epoch in epochs]},
        ),
        _lasting(
            "Duration by phase",
            "Phases overlap with those of other epochs; commit, publish and prune are those of the epoch before",
            {phase: [epoch.phases.get(phase, 0.0) / 1000 for epoch in epochs] for phase in phases},
            stacked=True,
        ),
        _lasting("From trigger to commit", "How long an epoch took", {"took": [epoch.seconds for epoch in epochs]}),
        Plot(
            "State by stage",
            "Bytes of state that a checkpoint names",
            {uid: [float(epoch.state.get(uid, 0)) for epoch in epochs] for uid in stages},
            size,
            stacked=True,
        ),
        Plot(
            "Uploaded",
            "Bytes of state that an epoch uploaded",
            {"uploaded": [epoch.bytes_new for epoch in epochs]},
            size,
        ),
        Plot(
            "Size of checkpoints",
            "Files that a checkpoint names, of state and of staged rows",
            {"files": [epoch.files for epoch in epochs]},
            short_number,
        ),
        Plot(
            "Late rows",
            "Rows that came behind the watermark, by stage",
            {uid: [float(epoch.late.get(uid, 0)) for epoch in epochs] for uid in late},
            short_number,
            stacked=True,
        ),
    ]
    return [plot for plot in drawn if any(value is not None for values in plot.series.values() for value in values)]


def _lasting(title: str, about: str, series: Mapping[str, Sequence[float | None]], *, stacked: bool = False) -> Plot:
    """Return a plot of seconds, in the unit that fits the longest of them."""
    longest = max((value or 0.0 for values in series.values() for value in values), default=0.0)
    unit, length = next(((unit, length) for unit, length in _UNITS if longest >= 2 * length), ("s", 1))
    scaled = {name: [None if value is None else value / length for value in values] for name, values in series.items()}
    return Plot(title, about, scaled, lambda value: f"{value:.3g} {unit}", stacked)


def svg(plot: Plot, epochs: Sequence[EpochFigures]) -> str | None:
    """Return a plot as SVG for a page that has its colours; None: matplotlib is not installed."""
    if not extras.is_installed("matplotlib"):
        return None
    # It takes half a second to import, so it is imported where a picture is asked for.
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    settings: Any = {
        "svg.fonttype": "none",  # text stays text: small, selectable, in the page's font
        "svg.hashsalt": plot.title,  # so that names in one drawing are not those in another
        "text.parse_math": False,
        "font.size": 9,
        **{f"{part}.color": _INK for part in ("text", "xtick", "ytick")},
        **{f"axes.{part}": _INK for part in ("edgecolor", "labelcolor")},
    }
    with rc_context(settings):
        figure = Figure(figsize=(4.4, 2.3))
        FigureCanvasSVG(figure)
        axis = figure.subplots()
        figure.subplots_adjust(left=0.16, right=0.94, top=0.95, bottom=0.22)
        places, beneath = range(len(epochs)), [0.0] * len(epochs)
        for name, values in plot.series.items():
            colour = f"#01ff0{plot.colours[name]}"
            if plot.stacked:
                heights = [value or 0.0 for value in values]
                axis.bar(places, heights, bottom=beneath, color=colour, width=0.8)
                beneath = [low + high for low, high in zip(beneath, heights, strict=True)]
            else:
                line = "--" if plot.colours[name] else "-"  # so that of two equal lines both are seen
                drawn = [float("nan") if value is None else value for value in values]
                axis.plot(places, drawn, color=colour, marker=".", linestyle=line)
        highest = max([*beneath, *(value or 0.0 for values in plot.series.values() for value in values)])
        axis.set_ylim(0, highest * 1.08 or 1)
        axis.yaxis.set_major_locator(MaxNLocator(5))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plot.shown(value)))
        ticks = sorted({round(part * (len(epochs) - 1) / _TICKS) for part in range(_TICKS + 1)})
        axis.set_xticks(ticks, _moments(epochs, ticks))
        axis.grid(axis="y", color=_INK, alpha=0.15)
        axis.spines[["top", "right"]].set_visible(False)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return _in_page(written.getvalue())


def _moments(epochs: Sequence[EpochFigures], ticks: Sequence[int]) -> list[str]:
    """Return the labels of the axis: when an epoch was committed, and its number."""
    passed = epochs[-1].completed_at - epochs[0].completed_at
    form = "%H:%M:%S" if passed < timedelta(hours=1) else "%H:%M" if passed < timedelta(days=1) else "%m-%d %H:%M"
    return [f"{epochs[tick].completed_at:{form}}\n#{epochs[tick].id}" for tick in ticks]


def _in_page(drawn: str) -> str:
    """Return the drawing without the header of an SVG file, in the colours of the page."""
    drawn = drawn[drawn.index("<svg") :].replace(_INK, "currentColor")
    drawn = re.sub(r"#01ff0(\d)", r"var(--series-\1)", drawn)
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    tag, _, rest = drawn.partition(">")
    tag = re.sub(r'\s(?:width|height)="[^"]*"', "", tag)
    return f'{tag} role="img">{rest}'
