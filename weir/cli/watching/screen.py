"""The screens of `weir top`: all pipelines, one to a line, or one pipeline with its last epochs, stages and sinks.

Everything is text of a terminal's eighty columns, and of more where there are more. Colours only repeat what words say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from state_ops.counts import counted
from state_ops.moments import to_the_second
from weir.cli.watching import figures
from weir.cli.watching.figures import EpochFigures, ago, short_number, size
from weir.cli.watching.keys import BACK, DOWN, ENTER, UP
from weir.cli.watching.monitor import Row
from weir.cli.watching.problems import LOOK, NOTE, WRONG, Problem, kind_of, last_failure

_LETTERS = {
    "stages": ("s", "green"),
    "gates": ("g", "magenta"),
    "deliver": ("d", "blue"),
    "upload": ("u", "cyan"),
    "seal": ("e", "yellow"),
    "commit": ("c", "red"),
    "publish": ("p", "blue"),
    "prune": ("r", "bright_black"),
}
_STYLES = {WRONG: "bold red", LOOK: "yellow", NOTE: "cyan"}
_MARKS = {WRONG: "!!", LOOK: "! ", NOTE: "- "}
_STATES = {"running": "green", **dict.fromkeys(("HELD", "DEAD", "HANGS", "FAILED", "UNREAD"), "bold red")}
_ORDERS = ("name", "lag", "state")
_WIDE, _NARROW = 110, 78


@dataclass(frozen=True, slots=True)
class ScreenChoice:
    """The choice of what is shown, made by keys.

    Attributes:
        selected: The pipeline whose line is marked.
        detail: Whether that one alone is shown.
        by: What pipelines are sorted by, one of "name", "lag" and "state".
    """

    selected: str | None = None
    detail: bool = False
    paused: bool = False
    by: str = "name"
    ended: bool = False

    def pressed(self, key: str, rows: Sequence[Row]) -> ScreenChoice:
        """Return the page after a key was pressed.

        Args:
            rows: As they are shown, from top to bottom.
        """
        if key in ("q", "Q"):
            return replace(self, ended=True)
        if key == " ":
            return replace(self, paused=not self.paused)
        if key in ("s", "n", "l", "t"):
            after = _ORDERS[(_ORDERS.index(self.by) + 1) % len(_ORDERS)]
            return replace(self, by={"n": "name", "l": "lag", "t": "state"}.get(key, after))
        if key == BACK:
            return replace(self, detail=False)
        names = [row.name for row in rows]
        if not names:
            return self
        at = names.index(self.selected) if self.selected in names else 0
        if key == ENTER:
            return replace(self, selected=names[at], detail=True)
        step = {UP: -1, DOWN: 1}.get(key, 0)
        return replace(self, selected=names[min(max(at + step, 0), len(names) - 1)])


def console(**options: Any) -> Console:
    """Return a console that shows a text as it is, whatever rich would take brackets and colons for."""
    return Console(highlight=False, markup=False, emoji=False, **options)


def in_order(rows: Mapping[str, Row], by: str) -> list[Row]:
    """Return the rows by name, or those with most lag or state first."""
    listed = sorted(rows.values(), key=lambda row: row.name)
    if by == "lag":
        return sorted(listed, key=lambda row: -figures.number_waiting(row.look.arrived if row.look else {}))
    if by == "state":
        return sorted(listed, key=lambda row: -(row.look.head.bytes_total if row.look and row.look.head else 0))
    return listed


def shown(
    rows: Sequence[Row], page: ScreenChoice, width: int, height: int, every: float, trouble: str | None
) -> RenderableType:
    """Return a page that is no higher than the terminal."""
    row = next((row for row in rows if row.name == page.selected), rows[0] if rows else None)
    title = _title(rows, page, every, width)
    if page.detail and row is not None:
        keys = "esc back   up/down other pipeline   space pause   q quit"
        body: RenderableType = detail(row, width, height - 2)
    else:
        keys = f"up/down, enter: one pipeline   s sort (by {page.by})   space pause   q quit"
        body = _all(rows, row, width, height - 2, trouble)
    return Group(title, body, Text(keys[: width - 1], style="reverse"))


def plain(rows: Sequence[Row], width: int) -> RenderableType:
    """Return all pipelines as a page without end, for `--once`. A pipeline that is alone is shown in detail, too."""
    parts: list[RenderableType] = [overview(rows, None, width), Text()]
    parts += [line for row in rows for problem in row.problems for line in _said(problem, width, f"{row.name}: ")]
    if len(rows) == 1 and rows[0].look is not None and rows[0].look.head is not None:
        row = rows[0]
        parts += [Text(), epoch_table(row.epochs, width), Text(), stage_table(row), Text(), sink_table(row)]
    return Group(*parts)


def _title(rows: Sequence[Row], page: ScreenChoice, every: float, width: int) -> Text:
    worst = [min((problem.severity for problem in row.problems), key=_rank, default=NOTE) for row in rows]
    wrong, look = worst.count(WRONG), worst.count(LOOK)
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("weir top ", style="bold")
    text.append(f" {counted(len(rows), 'pipeline')}")
    text.append(f", {wrong} wrong" if wrong else "", style=_STYLES[WRONG])
    text.append(f", {look} to look at" if look else "", style=_STYLES[LOOK])
    text.append("" if wrong or look else ", all well", style="green")
    text.append("   PAUSED" if page.paused else f"   every {every:g} s", style="bold" if page.paused else "dim")
    clock = f"{datetime.now(UTC):%H:%M:%S} UTC"
    text.append(" " * max(2, width - 1 - len(text) - len(clock)) + clock)
    return text


def _rank(severity: str) -> int:
    return (WRONG, LOOK, NOTE).index(severity)


def _all(rows: Sequence[Row], selected: Row | None, width: int, height: int, trouble: str | None) -> RenderableType:
    room = max(3, height - 2)
    listed = [(row, problem) for row in rows for problem in row.problems]
    listed.sort(key=lambda pair: _rank(pair[1].severity))
    lines = [line for row, problem in listed for line in _said(problem, width, f"{row.name}: ")]
    if trouble is not None:
        lines = [Text(clean(trouble), style=_STYLES[LOOK]), *lines]
    for_rows = min(len(rows), max(room - len(lines) - 1, room // 2))
    first = 0
    if selected is not None:  # its line is always there
        first = max(0, min(rows.index(selected) - for_rows + 1, len(rows) - for_rows))
    parts: list[RenderableType] = [overview(rows[first : first + for_rows], selected, width)]
    more = len(rows) - for_rows
    if more:
        parts.append(Text(f"... and {more} more", style="dim"))
    left = room - for_rows - bool(more)
    return _filled(
        [*parts, Text(), *_cut(lines, left - 1)],
        height,
        used=1 + for_rows + bool(more) + 1 + min(len(lines), max(left - 1, 0)),
    )


def _cut(lines: Sequence[Text], room: int) -> list[Text]:
    """Return the first lines, and a line that says how many more there are."""
    if len(lines) <= room:
        return list(lines)
    return [
        *lines[: max(room - 1, 0)],
        *([Text("... more: enter shows one pipeline", style="dim")] if room > 0 else []),
    ]


def _filled(parts: Sequence[RenderableType], height: int, used: int) -> Group:
    """Return the parts, and empty lines down to the last line but one."""
    return Group(*parts, *[Text()] * max(0, height - used))


def overview(rows: Sequence[Row], selected: Row | None, width: int) -> Table:
    """Return a table of all pipelines, one a line."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    wide, narrow = width >= _WIDE, width < _NARROW
    table.add_column("  PIPELINE", no_wrap=True, overflow="ellipsis", max_width=40 if wide else 16)
    table.add_column("STATE", no_wrap=True)
    for title in ("EPOCH", "AGE", "LAG", "ROWS/S", "TOOK", "SIZE", *(() if narrow else ("PER HOUR",))):
        table.add_column(title, justify="right", no_wrap=True, overflow="ellipsis")
    if wide:
        table.add_column("PHASES OF THE NEWEST EPOCH", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row, row is selected, wide, narrow), style="dim" if row.error is not None else "")
    return table


def _cells(row: Row, selected: bool, wide: bool, narrow: bool) -> Iterator[Text]:
    yield Text(f"{'>' if selected else ' '} {clean(row.name)}", style="bold" if selected else "")
    yield Text(row.state, style=_STATES.get(row.state, ""))
    look, epochs = row.look, row.epochs
    head = look.head if look is not None else None
    if look is None or head is None:
        yield from (Text("-"), Text("-"), Text(figures.waiting(look.arrived) if look else "-"))
        yield from [Text("-")] * (3 if narrow else 4)
        yield from [Text()] * wide
        return
    yield Text(f"{head.id}" + (f"+{look.in_flight}" if look.in_flight else ""))
    yield Text(ago(max(0.0, (datetime.now(UTC) - head.completed_at).total_seconds())))
    yield Text(figures.waiting(look.arrived))
    pace, growth = figures.rows_per_second(epochs), figures.growth_per_hour(epochs)
    yield Text("-" if pace is None else short_number(pace))
    yield Text(ago(epochs[-1].seconds))
    yield Text(size(head.bytes_total))
    if not narrow:
        yield Text("-" if growth is None else f"{'+' if growth >= 0 else ''}{size(growth)}")
    if wide:
        yield bar(epochs[-1].phases, 24)


def bar(phases: Mapping[str, float], width: int) -> Text:
    """Phases as a bar of letters, each as long as its share: `ssssssuup`."""
    text, total, before = Text(), sum(phases.values()), 0.0
    for phase, took in phases.items():
        letter, colour = _LETTERS[phase]
        cells = round((before + took) / total * width) - round(before / total * width) if total else 0
        text.append(letter * cells, style=colour)
        before += took
    return text


def detail(row: Row, width: int, height: int) -> RenderableType:
    """Return one pipeline in detail: who runs it, what is wrong, its last epochs, its stages and its sinks."""
    look = row.look
    lines = list(_about(row, width))
    lines += _cut([line for problem in row.problems for line in _said(problem, width, "")], max(4, height // 4))
    lines = lines[:height]
    if look is None or look.head is None:
        return _filled(lines, height, used=len(lines))
    stages, sinks = stage_table(row), sink_table(row)
    left = height - len(lines) - 2  # an empty line, and the titles of the epochs
    room = max(min(left, 3), left - (stages.row_count + 2) - (sinks.row_count + 2))
    if room < 1:
        return _filled(lines, height, used=len(lines))
    epochs = epoch_table(row.epochs[-room:], width)
    parts: list[RenderableType] = [*lines, Text(), epochs]
    used = len(lines) + 2 + epochs.row_count
    for table in (stages, sinks):
        if used + table.row_count + 2 <= height:
            parts += [Text(), table]
            used += table.row_count + 2
    return _filled(parts, height, used)


def _about(row: Row, width: int) -> Iterator[Text]:
    look = row.look
    first = Text(no_wrap=True, overflow="ellipsis")
    first.append(clean(row.name), style="bold")
    first.append("  ")
    first.append(row.state, style=_STATES.get(row.state, ""))
    if look is not None and look.holder is not None:
        who = look.holder
        run = f", run {who.run_id}" if who.run_id and width >= _WIDE else ""
        first.append(clean(f"  process {who.pid} on {who.host}, generation {look.generation}{run}"))
    yield first
    if look is None:
        return
    retained = f"{counted(len(look.retained), 'checkpoint')} retained"
    changes = figures.restarts(row.epochs, look)
    again = f", {counted(changes, 'restart')} among the epochs below" if changes else ""
    flight = f", {counted(look.in_flight, 'epoch')} in flight" if look.in_flight else ""
    yield Text(f"{retained}{flight}{again}", no_wrap=True, overflow="ellipsis")
    for name, arrivals in look.arrived.items():
        waits = "unknown" if arrivals.problem else counted(arrivals.waiting, arrivals.unit)
        yield Text(clean(f"waiting in {name}: {waits}"), no_wrap=True, overflow="ellipsis")
    results = [
        *(
            f"{kind_of(checked)} {_since(checked.at)}: {checked.damaged or 'nothing'} damaged"
            for checked in look.checked
        ),
        *(
            [f"drill {_since(look.drilled.at)}: {'passed' if look.drilled.comes_back else 'failed'}"]
            if look.drilled
            else []
        ),
    ]
    if results:
        yield Text(clean(f"last {', '.join(results)}"), no_wrap=True, overflow="ellipsis")
    failure = last_failure(look.holder)
    if failure is not None:
        text = f"last failure: {failure.get('how')} {to_the_second(failure['when'])} {failure.get('message') or ''}"
        yield Text(clean(text), no_wrap=True, overflow="ellipsis")


def epoch_table(epochs: Sequence[EpochFigures], width: int) -> Table:
    """Epochs, the newest last."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for title in ("EPOCH", "DONE", "BY"):
        table.add_column(title, no_wrap=True, justify="right" if title == "EPOCH" else "left")
    for title in ("IN", "OUT", "LATE", "TOOK", "UPLOADED", "STATE"):
        table.add_column(title, justify="right", no_wrap=True)
    cells = max(6, min(40, width - 66))
    table.add_column(
        " ".join(f"{letter}={phase}" for phase, (letter, _) in _LETTERS.items()) if width >= 140 else "PHASES",
        no_wrap=True,
    )
    for epoch in epochs:
        table.add_row(
            str(epoch.id),
            f"{epoch.completed_at:%H:%M:%S}",
            epoch.trigger if epoch.kind == "checkpoint" else epoch.kind,
            short_number(epoch.rows_in),
            short_number(epoch.rows_out),
            short_number(sum(epoch.late.values())),
            ago(epoch.seconds),
            size(epoch.bytes_new),
            size(epoch.bytes_total),
            bar(epoch.phases, cells),
        )
    return table


def stage_table(row: Row) -> Table:
    """Return a table of the stages in the newest checkpoint."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("STAGE", no_wrap=True, overflow="ellipsis", max_width=30)
    for title in ("TASKS", "IN", "OUT", "LATE", "WAITING", "MS", "STATE", "LARGEST TASK"):
        table.add_column(title, justify="right", no_wrap=True)
    for stage in row.stages:
        table.add_row(
            clean(stage.uid),
            str(stage.parallelism),
            short_number(stage.rows_in),
            short_number(stage.rows_out),
            short_number(stage.rows_late),
            short_number(stage.rows_waiting),
            f"{stage.ms:,.0f}",
            size(stage.bytes_total),
            "-" if stage.skew is None else f"{stage.largest}: {stage.skew:.1f} x mean",
        )
    return table


def sink_table(row: Row) -> Table:
    """Return a table of the sinks, and how far each is behind."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("SINK", no_wrap=True, overflow="ellipsis", max_width=30)
    for title in ("KIND", "NEWEST", "BEHIND", "PUBLISHED"):
        table.add_column(title, no_wrap=True, justify="left" if title == "KIND" else "right")
    for sink in row.sinks:
        since = "-" if sink.published_at is None else _since(sink.published_at)
        said = f"{sink.behind} since {sink.lacks_since}" if sink.behind else "0"
        behind = Text(said, style=_STYLES[LOOK] if sink.behind else "")
        table.add_row(clean(sink.name), sink.kind, str(sink.newest or "-"), behind, since)
    return table


def _said(problem: Problem, width: int, whose: str) -> list[Text]:
    """Return a problem as lines of the terminal: what it is, and what a person does about it."""
    text = Text(f"{_MARKS[problem.severity]} ")
    text.append(clean(whose), style="bold")
    text.append(clean(problem.what), style=_STYLES[problem.severity])
    more = clean(" ".join(filter(None, [problem.next, f"({problem.page})" if problem.page else ""])))
    lines = [*_wrapped(text, width - 1)]
    return lines + [Text("   ") + line for line in _wrapped(Text(f"next: {more}"), width - 4)] if more else lines


def _wrapped(text: Text, width: int) -> list[Text]:
    return list(text.wrap(Console(width=width), width))


def _since(moment: datetime) -> str:
    return f"{ago(max(0.0, (datetime.now(UTC) - moment).total_seconds()))} ago"


def clean(text: str) -> str:
    """Return a text from elsewhere on one line, without what a terminal would obey."""
    return "".join(character if character.isprintable() else " " for character in text)
