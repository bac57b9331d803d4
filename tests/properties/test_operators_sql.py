"""aggregate, window and deduplicate are what SQL over all of the input says, computed by DuckDB, however it is sliced.

Which rows are late depends on the slices, so a plain model of the watermark (and, for sessions, of what is open) says
that; all values, and all else, are SQL.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from datetime import datetime, timedelta
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from state_ops.backends.base import BEYOND
from state_ops.rows import key_aggregation, row_store
from state_ops.rows.resident_table import Residence
from tests.properties.events import CUTS, DISTINCT_COUNTS, SCHEMA, aggregates, database, events, watermarks
from tests.tools.sampling import rounds
from weir import agg, aggregate, deduplicate, delta, files, testing, window
from weir.operators.aggregation import running as aggregation
from weir.operators.deduplication import running as deduplication
from weir.operators.windows import sessions
from weir.operators.windows import sized as windows

EVENTS = files("{landing}/*.parquet", event_time="ts", name="landing")
WANTED = {
    "n": agg.count(), "total": agg.sum("i"), "exact": agg.sum("d"), "mean": agg.mean("f"), "low_text": agg.min("s"),
    "high_decimal": agg.max("d"), "some": agg.max("b"), "since": agg.min("ts"), "opened": agg.first("f"),
    "closed": agg.last("f"), "positive": agg.count(where="i > 0"), "of_some": agg.sum("d", where="b AND s <> 'a'"),
    "mean_of_some": agg.mean("f", where="b"), "newest_of_some": agg.last("f", where="NOT b OR `s` IS NULL"),
}  # fmt: skip
DISTINCT = {
    "floats": agg.count_distinct("f"), "texts": agg.count_distinct("s", where="b IS NOT NULL"),
    "decimals": agg.count_distinct("d"), "moments": agg.count_distinct("ts"), "flags": agg.count_distinct("b"),
}  # fmt: skip
MINUTES = st.integers(1, 200).map(lambda minutes: f"{minutes}m")
quick = settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.generate],  # rows come from a seed: a smaller one is no simpler, and shrinking takes minutes
    suppress_health_check=list(HealthCheck),
)
quicker = settings(quick, max_examples=4)


def alike(rows: list[tuple]) -> Counter:
    return Counter(tuple(round(value, 9) if isinstance(value, float) else value for value in row) for row in rows)


def cramped(few: bool) -> ExitStack:
    """With `few`, operators that keep next to nothing in memory: they go to state in the middle of an epoch."""
    stack = ExitStack()
    if few:
        stack.enter_context(mock.patch.object(key_aggregation, "_WAITING_BYTES", 1))
        for module in (aggregation, windows, sessions):
            stack.enter_context(mock.patch.object(module, "_PARTIAL_ROWS", 4))
        stack.enter_context(mock.patch.object(aggregation, "_OUT_ROWS", 3))
        stack.enter_context(mock.patch.object(windows, "_FIRE_ROWS", 2))
        stack.enter_context(mock.patch.object(sessions, "_FIRE_KEYS", 2))
        stack.enter_context(mock.patch.object(deduplication, "_SWEPT", 128))
        stack.enter_context(mock.patch.object(row_store, "_PENDING_BYTES", 1))
        stack.enter_context(mock.patch.object(Residence, "load", lambda *_: None))
        stack.enter_context(mock.patch.object(row_store.RowStore, "_worth_a_scan", lambda *_: False))
    return stack


def minutes(text: str) -> timedelta:
    return timedelta(minutes=int(text[:-1]))


# -- aggregate


@rounds(3)
@given(few=st.booleans(), **CUTS)
@quicker
def test_running_aggregates(round_, sizes, seed, few, parallelism, batch_rows):
    cut = events(sizes, seed)
    totals = aggregate("totals", EVENTS, key="k", order_by=["ts", "seq"], **WANTED, **DISTINCT)
    run = testing.run(totals, parallelism=parallelism, batch_rows=batch_rows, schema=SCHEMA)
    rows_out = []
    with cramped(few):
        for rows in cut:
            rows_out += run.epoch(rows).rows()
    expected = database(cut).sql(f"""
        SELECT k, {aggregates("ts", "seq")}, {DISTINCT_COUNTS}, number AS epoch
        FROM events, (SELECT DISTINCT slice AS number, k AS touched FROM events)
        WHERE slice <= number AND k = touched GROUP BY k, number
    """)
    assert alike(rows_out) == alike(expected.fetchall())
    assert set(run.state) == {row["k"] for rows in cut for row in rows}
    run.close()


# -- tumbling and hopping windows


@rounds(3)
@given(few=st.booleans(), every=MINUTES, more=st.integers(0, 5), lateness=st.integers(0, 300), data=st.data(), **CUTS)
@quicker
def test_tumbling_and_hopping_windows(round_, sizes, seed, few, every, more, lateness, data, parallelism, batch_rows):
    slide = int(every[:-1])
    size = slide + (more and data.draw(st.integers(0, more * slide)))
    offset = data.draw(st.integers(0, slide - 1))
    cut = events(sizes, seed)
    windowed = window(
        "sized", EVENTS, key="k", on="ts", every=every, size=f"{size}m", offset=f"{offset}m", lateness=f"{lateness}m",
        order_by=["ts", "seq"], late=delta.append("late"), **WANTED, **DISTINCT,
    )  # fmt: skip
    run = testing.run(windowed, parallelism=parallelism, batch_rows=batch_rows, schema=SCHEMA)
    fired, late = [], []
    with cramped(few):
        for number, rows in enumerate([*cut, []], 1):
            out = run.epoch(rows, drain=number > len(cut))
            fired += [(number, *row) for row in out.rows()]
            late += run.late["seq"].to_list() if run.late.width else []
    behind = timedelta(minutes=lateness)
    connection = database(cut, behind)
    marks = watermarks(cut, behind)
    connection.execute("CREATE TABLE marks (number BIGINT, mark TIMESTAMPTZ)")
    connection.executemany(
        "INSERT INTO marks VALUES (?, ?)", [[n, mark] for n, mark in enumerate(marks) if n] + [[0, None]]
    )
    connection.execute(f"""
        CREATE TABLE placed AS SELECT e.*, to_timestamp(60 * ({offset} + nth * {slide} + {size})) AS ending
        FROM (SELECT *, (epoch(ts) // 60)::BIGINT AS minute FROM events) e,
             LATERAL (SELECT unnest(range(
                ((minute - {offset} - {size}) // {slide} - 2)::BIGINT, ((minute - {offset}) // {slide} + 2)::BIGINT
             )) AS nth)
        WHERE minute >= {offset} + nth * {slide} AND minute < {offset} + nth * {slide} + {size}
          AND (before IS NULL OR to_timestamp(60 * ({offset} + nth * {slide} + {size})) > before)
    """)
    expected = connection.sql(f"""
        SELECT coalesce((SELECT min(number) FROM marks WHERE mark >= ending), {len(cut) + 1}),
               k, ending - INTERVAL {size} MINUTE, ending, {aggregates("ts", "seq")}, {DISTINCT_COUNTS}
        FROM placed GROUP BY k, ending
    """)
    assert alike(fired) == alike(expected.fetchall())
    assert sorted(late) == [
        row[0]
        for row in connection.sql(
            "SELECT seq FROM events WHERE seq NOT IN (SELECT seq FROM placed) ORDER BY 1"
        ).fetchall()
    ]
    assert run.open_windows.is_empty()
    assert not any(list(backend.scan(b"", BEYOND)) for _, backend in run.backends())
    run.close()


# -- sessions


def placed_in_sessions(
    cut: list[list[dict]], gap: timedelta, lateness: timedelta
) -> tuple[dict[int, int], dict[int, int]]:
    """Of each row's number, its session and, by session, the epoch in which that closes; rows that are late are
    missing.

    Row by row, in plain Python: of all rows of an epoch and the sessions that are open, what is closer than the gap
    hangs together.
    """
    marks = watermarks(cut, lateness)
    open_: list[list[dict]] = []
    session: dict[int, int] = {}
    closing: dict[int, int] = {}
    for number, rows in enumerate(cut, 1):
        before, now = marks[number - 1], marks[number]
        for row in rows:
            near = [
                session
                for session in open_
                if session[0]["k"] == row["k"] and any(_near(row, other, gap) for other in session)
            ]
            open_ = [session for session in open_ if session not in near] + [
                [row, *(other for session in near for other in session)]
            ]
        kept = []
        for events_of_session in open_:
            if (
                before is None
                or _end(events_of_session, gap) > before
                or any(row["seq"] in session for row in events_of_session)
            ):
                kept.append(events_of_session)
                session |= {row["seq"]: 0 for row in events_of_session}
        open_ = []
        for events_of_session in kept:
            if now is not None and _end(events_of_session, gap) <= now:
                identity = len(closing)
                closing[identity] = number
                session |= {row["seq"]: identity for row in events_of_session}
            else:
                open_.append(events_of_session)
    for events_of_session in open_:
        identity = len(closing)
        closing[identity] = len(cut) + 1
        session |= {row["seq"]: identity for row in events_of_session}
    return session, closing


def _near(event: dict, other: dict, gap: timedelta) -> bool:
    return abs(event["ts"] - other["ts"]) < gap


def _end(rows: list[dict], gap: timedelta) -> datetime:
    return max(row["ts"] for row in rows) + gap


@rounds(3)
@given(few=st.booleans(), gap=MINUTES, lateness=st.integers(0, 300), **CUTS)
@quicker
def test_sessions(round_, sizes, seed, few, gap, lateness, parallelism, batch_rows):
    cut = events(sizes, seed)
    fired, late = sessions_of(cut, gap, lateness, few, parallelism, batch_rows)
    session, closing = placed_in_sessions(cut, minutes(gap), timedelta(minutes=lateness))
    connection = database(cut, session=[session.get(row["seq"]) for rows in cut for row in rows])
    expected = connection.sql(f"""
        SELECT session, k, min(ts), max(ts) + INTERVAL {gap[:-1]} MINUTE, {aggregates("ts", "seq")},
               {DISTINCT_COUNTS}
        FROM events WHERE session IS NOT NULL GROUP BY session, k
    """)
    assert alike(fired) == alike([(closing[row[0]], *row[1:]) for row in expected.fetchall()])
    assert sorted(late) == sorted(row["seq"] for rows in cut for row in rows if row["seq"] not in session)


@pytest.mark.long
@given(gap=MINUTES, **CUTS)
@quick
def test_sessions_that_nothing_is_too_late_for_are_islands_of_all_rows(sizes, seed, gap, parallelism, batch_rows):
    cut = events(sizes, seed)
    fired, late = sessions_of(cut, gap, 10_000, False, parallelism, batch_rows)
    expected = database(cut).sql(f"""
        SELECT {len(cut) + 1}, k, min(ts), max(ts) + INTERVAL {gap[:-1]} MINUTE, {aggregates("ts", "seq")},
               {DISTINCT_COUNTS}
        FROM (SELECT *, sum(begins) OVER (PARTITION BY k ORDER BY ts, seq) AS island
              FROM (SELECT *, coalesce(ts - lag(ts) OVER (PARTITION BY k ORDER BY ts, seq) >= INTERVAL {gap[:-1]} MINUTE,
                                       true)::INT AS begins FROM events))
        GROUP BY k, island
    """)
    assert not late
    assert alike(fired) == alike(expected.fetchall())


def sessions_of(
    cut: list[list[dict]], gap: str, lateness: int, few: bool, parallelism: int, batch_rows: int
) -> tuple[list[tuple], list[int]]:
    """The sessions with the epoch in which each came, and the late rows' numbers."""
    sessions = window(
        "visits", EVENTS, key="k", on="ts", gap=gap, lateness=f"{lateness}m", order_by=["ts", "seq"],
        late=delta.append("late"), **WANTED, **DISTINCT,
    )  # fmt: skip
    run = testing.run(sessions, parallelism=parallelism, batch_rows=batch_rows, schema=SCHEMA)
    fired, late = [], []
    with cramped(few):
        for number, rows in enumerate([*cut, []], 1):
            out = run.epoch(rows, drain=number > len(cut))
            fired += [(number, *row) for row in out.rows()]
            late += run.late["seq"].to_list() if run.late.width else []
    assert run.open_windows.is_empty()
    run.close()
    return fired, late


# -- deduplicate


@given(**CUTS)
@quick
def test_the_first_row_of_each_key(sizes, seed, parallelism, batch_rows):
    cut = events(sizes, seed)
    unique = deduplicate("unique", EVENTS, key=["k", "b"], order_by=["ts", "seq"], where="b IS NOT NULL")
    run = testing.run(unique, parallelism=parallelism, batch_rows=batch_rows, schema=SCHEMA)
    rows_out = [row for rows in cut for row in run.epoch(rows).rows()]
    expected = database(cut).sql(f"""
        SELECT {", ".join(SCHEMA.names)} FROM events WHERE b IS NOT NULL
        QUALIFY row_number() OVER (PARTITION BY k, b ORDER BY slice, ts, seq) = 1
    """)
    assert alike(rows_out) == alike(expected.fetchall())
    run.close()


def remembered(
    cut: list[list[dict]], ttl: timedelta, key: str = "k"
) -> tuple[list[int], list[int], list[datetime | None]]:
    """The numbers of the rows that are handed out and of the late ones, in plain Python, row by row."""
    marks, until, out, late = watermarks(cut), {}, [], []
    for number, rows in enumerate(cut, 1):
        before = marks[number - 1]
        for row in sorted(rows, key=lambda row: (row["ts"], row["seq"])):
            if before is not None and row["ts"] + ttl <= before:
                late.append(row["seq"])
            elif row[key] not in until or (before is not None and until[row[key]] <= before):
                until[row[key]] = row["ts"] + ttl
                out.append(row["seq"])
    return out, late, list(until.values())


@pytest.mark.long
@given(few=st.booleans(), ttl=MINUTES, **CUTS)
@quick
def test_the_first_row_of_each_key_within_a_while_of_event_time(sizes, seed, few, ttl, parallelism, batch_rows):
    cut = events(sizes, seed)
    unique = deduplicate("unique", EVENTS, key="k", on="ts", ttl=ttl, order_by=["ts", "seq"], late=delta.append("late"))
    run = testing.run(unique, parallelism=parallelism, batch_rows=batch_rows, schema=SCHEMA)
    out, late, duplicates = [], [], 0
    with cramped(few):
        for rows in cut:
            out += run.epoch(rows)["seq"].to_list()
            late += run.late["seq"].to_list() if run.late.width else []
            duplicates += sum(ack.rows_in - ack.rows_out - ack.rows_late for ack in run.acks)
    expected, too_late, until = remembered(cut, minutes(ttl))
    assert (sorted(out), sorted(late)) == (sorted(expected), sorted(too_late))
    assert duplicates == sum(map(len, cut)) - len(out) - len(late)
    mark = watermarks(cut)[-1]
    if not few and mark is not None:  # all that is over has been swept away, and nothing else
        assert len(run.state) == sum(end > mark for end in until)
    run.close()


@given(few=st.booleans(), ttl=st.integers(1, 5), **CUTS)
@quick
def test_the_first_row_of_each_key_within_a_while_of_processing_time(sizes, seed, few, ttl, parallelism, batch_rows):
    cut = events(sizes, seed)
    unique = deduplicate("unique", EVENTS, key="k", ttl=f"{ttl}m", order_by=["ts", "seq"])
    run = testing.run(unique, parallelism=parallelism, batch_rows=batch_rows, schema=SCHEMA)
    seen, expected, out = {}, [], []
    with cramped(few):
        for number, rows in enumerate(cut):  # an epoch is a minute in these tests
            out += run.epoch(rows)["seq"].to_list()
            for row in sorted(rows, key=lambda row: (row["ts"], row["seq"])):
                if row["k"] not in seen or seen[row["k"]] + ttl <= number:
                    seen[row["k"]] = number
                    expected.append(row["seq"])
    assert sorted(out) == sorted(expected)
    run.close()


@pytest.mark.parametrize("kind", ["aggregate", "sessions", "deduplicate"])
def test_an_epoch_without_rows_changes_nothing(kind):
    stages = {
        "aggregate": aggregate("one", EVENTS, key="k", n=agg.count()),
        "sessions": window("one", EVENTS, key="k", on="ts", gap="30m", n=agg.count()),
        "deduplicate": deduplicate("one", EVENTS, key="k", on="ts", ttl="1h"),
    }[kind]
    run = testing.run(stages, parallelism=2, schema=SCHEMA)

    def files_of_state() -> set[str]:
        """What the next epoch builds on, whether a job ran in this one or none had to."""
        return {file.path for base in run.epochs.progress["one"].bases.values() for file in base.files}

    run.epoch(events([20], 1)[0])
    named = {file.path for ack in run.acks for file in ack.files if file.kind == "state"}
    assert named and files_of_state() == named
    assert run.epoch([]).is_empty()
    assert files_of_state() == named
