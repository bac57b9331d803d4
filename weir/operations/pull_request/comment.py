"""The comment of a pull request, in the Markdown of GitHub: the verdict first, then what it is made of.

Values of rows come from production, and a comment is read by many. Nothing in them becomes markup, a mention or a link,
and credentials are taken out wherever they stand. GitHub takes 65,536 characters: samples get shorter until the rest
fits.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from state_ops.counts import agrees, counted
from state_ops.redaction import redacted
from state_ops.value_text import text_of
from weir.inspection.comparison.states import StateDiff, by_field
from weir.inspection.comparison.tables import KINDS, TableDiff
from weir.markdown import as_code
from weir.operations.pull_request.replaying import to_commit_seconds
from weir.operations.pull_request.review import (
    CODE,
    GATES,
    INPUT,
    MAIN,
    PLAN,
    ROWS,
    STATE,
    Review,
)
from weir.operations.pull_request.taking import in_words

LIMIT: Final = 65_536
_SHOWN: Final = 20  # findings, gates, days and lines of a trace
_VALUE: Final = 120  # characters of a value
_ERROR: Final = 4_000  # characters of an error, and of a trace
_SPECIAL = re.compile(r"([\\`*_\[\]#~!|])")
_LINKED = re.compile(r"@(?=\w)|#(?=\d)|\bGH-(?=\d)|\bwww(?=\.)|\b(?:mailto|xmpp)(?=:)", re.IGNORECASE)
_INVISIBLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff"
    r"\U000e0000-\U000e01ef]+"
)


def markdown(review: Review, sample: int = 10) -> str:
    """Return the comment, of at most `LIMIT` characters.

    Args:
        sample: How many rows and keys that differ are shown of each table and stage; 0: none, and no values of those
            that failed a gate either.
    """
    for shown in _fewer(sample):
        paragraphs = list(_paragraphs(review, shown))
        text = redacted("\n\n".join(paragraphs)) + "\n"
        if len(text) <= LIMIT:
            return text
    note = "\n\n... the rest does not fit into a comment: `weir ci --json` has all of it.\n"
    while len(text) + len(note) > LIMIT:  # whole paragraphs go: a part of one may leave a table or a fence open
        paragraphs.pop()
        text = redacted("\n\n".join(paragraphs))
    return text + note


def _fewer(sample: int) -> Iterator[int]:
    while sample > 0:
        yield sample
        sample //= 2
    yield 0


def verdict(review: Review) -> str:
    """Return the verdict on one line."""
    named = f"weir ci {review.pipeline}"
    verdicts = [_SAYS[kind](review) for kind in review.found]
    if verdicts:
        return f"{named}: {'; '.join(verdicts)}"
    if not review.played:
        return f"{named}: no epoch could be replayed"
    if review.not_compared:
        rest = counted(len(review.not_compared), "table")
        return f"{named}: nothing differs of what could be compared; {rest} could not"
    return f"{named}: nothing differs"


def _rows_say(review: Review) -> str:
    count = review.rows_differing
    if not count:
        return "other columns"
    return f"{counted(count, 'row', 'differs', 'differ')}"


def _states_say(review: Review) -> str:
    count = review.keys_differing
    if count:
        return f"{counted(count, 'key')} of state {agrees(count, 'differs', 'differ')}"
    return "other timers" if all(state.same or state.timers for state in review.states) else "other state"


def _gates_say(review: Review) -> str:
    holding, failed = sum(outcome.holds for outcome in review.gates), review.failed
    phrases = [f"{counted(holding, 'gate')} would hold it"] if holding else []
    phrases += [f"a gate would hold epoch {failed.epoch}"] if failed is not None and failed.cause == GATES else []
    return "; ".join(phrases)


_SAYS: Mapping[str, Callable[[Review], str]] = {
    PLAN: lambda _: "a run would be refused",
    CODE: lambda review: (
        "the code fails" + (f" in epoch {review.failed.epoch}" if review.failed and review.failed.epoch else "")
    ),
    INPUT: lambda _: "the input of an epoch cannot be read again",
    GATES: _gates_say,
    ROWS: _rows_say,
    STATE: _states_say,
}


def _paragraphs(review: Review, shown: int) -> Iterator[str]:
    yield f"**{verdict(review)}**"
    yield _where(review)
    if review.failed is not None:
        yield from _failure(review, shown)
    if review.plan is not None:
        yield from _plan(review)
    if review.played:
        yield from _tables(review, shown)
        yield from _states(review, shown)
        yield from _gates(review, shown)
        yield from _cost(review)
    if notes := (*review.not_compared, *review.notes):
        yield "### Notes"
        yield "\n".join(f"- {_plain(note)}" for note in notes)


def _where(review: Review) -> str:
    chosen = review.chosen
    if chosen is None:
        return "Nothing was tried: the code cannot be imported."
    of = "" if review.origin == MAIN else f" (its branch `{review.origin}`)"
    newest = f"Production{of} is at checkpoint {chosen.newest.id} of {chosen.newest.completed_at:%Y-%m-%d %H:%M} UTC"
    if review.plan is not None and review.plan.stops:
        return f"{newest}. No epoch was replayed, since a run would not begin."
    if not chosen.epochs:
        return f"{newest}. It was only read."
    ended = ""
    if len(review.played) < len(chosen.epochs):
        ended = f", of which {len(review.played)} came to the end"
    return f"{newest}. {in_words(chosen)} with this code{ended}. Production was only read."


def _failure(review: Review, shown: int) -> Iterator[str]:
    failed = review.failed
    assert failed is not None
    yield "### What ended it"
    yield _code(failed.in_words(values=bool(shown)))
    if failed.traceback and shown:
        lines = failed.traceback.rstrip().splitlines()[-_SHOWN:]
        yield _details("The trace", _code("\n".join(lines)))


def _plan(review: Review) -> Iterator[str]:
    plan = review.plan
    assert plan is not None
    yield "### Plan"
    state = "starts empty" if plan.checkpoint is None else f"goes on from checkpoint {plan.checkpoint.id}"
    if plan.stops:
        yield f"**A run is refused**: `weir plan {review.pipeline}` ends with exit code 1."
    else:
        yield f"A run {state}: `weir plan {review.pipeline}` ends with exit code 0."
    if plan.findings:
        rows = [
            (finding.verdict.value, f"{finding.kind} {finding.name}", finding.aspect, finding.what)
            for finding in sorted(plan.findings, key=lambda finding: not finding.verdict.stops)
        ]
        yield _table(("", "", "", ""), rows, "finding")
    advice = [f"- {_plain(finding.name)}: {_plain(finding.next)}" for finding in plan.findings if finding.next]
    if advice:
        yield "\n".join(advice[:_SHOWN])


def _tables(review: Review, shown: int) -> Iterator[str]:
    yield "### Rows"
    if not review.tables:
        yield "The epochs handed out none."
        return
    numbers = ("production", "this code", *KINDS)
    yield _table(
        ("table", *numbers),
        [
            (table.table, *(f"{count:,}" for count in (*table.rows, *(table.counts[kind] for kind in KINDS))))
            for table in review.tables
        ],
        "table",
        right=numbers,
    )
    yield from (f"{_plain(table.table)}: {_plain(table.columns)}." for table in review.tables if table.columns)
    yield from _left_out((f"the table {table.table}", table.left_out) for table in review.tables)
    for table in review.tables:
        if not table.same:
            yield _details(f"{table.table}: {_some(table, shown)}", *_table_in_detail(table, shown))


def _some(table: TableDiff, shown: int) -> str:
    differs = counted(sum(table.counts.values()), "row", "differs", "differ")
    return f"{differs}" + (", with samples" if shown and table.sample else "")


def _table_in_detail(table: TableDiff, shown: int) -> Iterator[str]:
    if any(table.days):
        days = [(day, *(f"{counts[kind]:,}" for kind in KINDS)) for day, counts in table.days.items()]
        yield _table(("day", *KINDS), days, "day", right=KINDS)
    yield from _sample(table.sample, shown, sum(table.counts.values()) + table.counts["changed"], "row")


def _states(review: Review, shown: int) -> Iterator[str]:
    if not review.states:
        if review.failed is not None and review.played:
            yield "### State"
            yield "It is not compared, since the replay did not come to its end."
        return
    yield "### State"
    yield _table(
        ("stage", *KINDS, ""),
        [
            (
                state.stage,
                *(("", "", "") if state.counts is None else (f"{state.counts[kind]:,}" for kind in KINDS)),
                "; ".join(filter(None, (state.why, state.timers))),
            )
            for state in review.states
        ],
        "stage",
        right=KINDS,
    )
    yield from _left_out((f"the state of {state.stage}", state.left_out) for state in review.states)
    for state in review.states:
        if state.sample and shown:
            yield _details(
                f"State of {state.stage}: {counted(_keys(state), 'key', 'differs', 'differ')}",
                *_state_in_detail(state, shown),
            )


def _keys(state: StateDiff) -> int:
    return sum(state.counts.values()) if state.counts is not None else 0


def _state_in_detail(state: StateDiff, shown: int) -> Iterator[str]:
    few = list(by_field(state, shown, "production", "this code"))
    yield _table(list(few[0]), [tuple(map(text_of, row.values())) for row in few], "row", most=len(few))
    if (more := _keys(state) - min(shown, len(state.sample))) > 0:
        yield f"... and {more:,} more {agrees(more, 'key', 'keys')}."


def _sample(rows: Sequence[Mapping[str, Any]], shown: int, count: int, what: str) -> Iterator[str]:
    if not rows or not shown:
        return
    few = list(islice(rows, shown))
    yield _table(list(few[0]), [tuple(map(text_of, row.values())) for row in few], what, most=len(few))
    if (more := count - len(few)) > 0:
        yield f"... and {more:,} more {agrees(more, 'line', 'lines')}; a changed row has two."


def _gates(review: Review, shown: int) -> Iterator[str]:
    aside = sum(epoch.now.rows_quarantined for epoch in review.played)
    before = sum(epoch.recorded.rows_quarantined for epoch in review.played)
    if not review.gates and not aside and not before:
        return
    yield "### Gates"
    if review.gates:
        yield _table(
            ("", "gate", "", "in production", *(("example",) if shown else ())),
            [
                (
                    outcome.of,
                    outcome.gate,
                    outcome.does,
                    "" if outcome.before is None else f"failed in {outcome.before}" if outcome.before else "passed",
                    *((outcome.example.removeprefix(f"{outcome.gate}: "),) if shown else ()),
                )
                for outcome in sorted(review.gates, key=lambda outcome: (not outcome.holds, not outcome.failed))
            ],
            "gate",
        )
    if aside or before:
        yield f"{counted(aside, 'row', 'was', 'were')} set aside; in production {before:,}."
    if any(outcome.holds for outcome in review.gates):
        yield "A gate that would hold an epoch was only asked, so that the epochs after it could be compared."


def _cost(review: Review) -> Iterator[str]:
    yield "### Time and bytes"
    numbers = ("rows read", "s in production", "s here", "new state in production", "new state here")
    yield _table(
        ("epoch", *numbers),
        [
            (
                str(epoch.recorded.id),
                f"{epoch.recorded.rows_read:,}",
                _seconds(to_commit_seconds(epoch.recorded)),
                _seconds(to_commit_seconds(epoch.now)),
                _size(epoch.recorded.bytes_new),
                _size(epoch.now.bytes_new),
            )
            for epoch in review.played
        ],
        "epoch",
        right=numbers,
    )
    last = review.played[-1]
    then = max((stats.parallelism or 0 for stats in last.recorded.operators.values()), default=0)
    yield (
        f"Seconds from barrier to commit, on this machine with {counted(review.parallelism, 'subtask')} and in "
        f"production with {then:,}: others take other times. State is {_size(last.now.bytes_total)} at the end, "
        f"{_size(last.recorded.bytes_total)} in production. {_size(review.bytes_copied)} were copied from production; "
        f"{_phases(review.seconds)}."
    )


def _phases(seconds: Mapping[str, float]) -> str:
    named = {name: value for name, value in seconds.items() if name != "all"}
    return ", ".join(f"{name} {value:.1f} s" for name, value in named.items())


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _size(bytes: int) -> str:
    return f"{bytes / 2**20:,.1f} MiB" if bytes >= 2**20 else f"{bytes / 2**10:,.1f} KiB"


def _left_out(of: Iterable[tuple[str, Sequence[str]]]) -> Iterator[str]:
    for where, names in of:
        if names:
            yield f"Left out of {_plain(where)}: {_plain(', '.join(names))}."


# -- Markdown


def _table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    what: str,
    *,
    right: Sequence[str] = (),
    most: int = _SHOWN,
) -> str:
    """Return a table, whose first rows are shown. what: a row is, for people."""
    lines = [
        f"| {' | '.join(map(_plain, titles))} |",
        f"|{''.join('---:|' if name in right else '---|' for name in titles)}",
    ]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in islice(rows, most)]
    if (more := len(rows) - most) > 0:
        lines.append(f"| ... {counted(more, f'more {what}')} |{' |' * (len(titles) - 1)}")
    return "\n".join(lines)


def _cell(value: str) -> str:
    shown = redacted(value)  # before it is cut, and before a name that is looked for is escaped
    return _plain(shown if len(shown) <= _VALUE else f"{shown[:_VALUE]}...")


def _plain(text: str) -> str:
    """Return a text of which nothing becomes markup, a mention or a link."""
    text = _INVISIBLE.sub(" ", redacted(text)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _SPECIAL.sub(r"\\\1", _apart(text)).replace("@", "&#64;").replace("://", ":&#47;&#47;")
    return text.replace("$", "<span>$</span>")  # two of them would be a formula


def _html(text: str) -> str:
    """Return a text for a place where Markdown is not looked at."""
    return html.escape(_apart(_INVISIBLE.sub(" ", redacted(text)))).replace("@", "&#64;")


def _apart(text: str) -> str:
    """Return a text with an invisible space in what GitHub looks for in what people get to see, however it is escaped:
    mentions, addresses, issues."""
    return _LINKED.sub("\\g<0>\u200b", text)


def _code(text: str) -> str:
    """Return a block of code, whatever fences the text has itself, and however long it is."""
    text = redacted(text)
    text = text if len(text) <= _ERROR else f"{text[:_ERROR]}..."
    return as_code(text)


def _details(title: str, *paragraphs: str) -> str:
    inside = "\n\n".join(paragraphs)
    return f"<details><summary>{_html(title)}</summary>\n\n{inside}\n\n</details>"
