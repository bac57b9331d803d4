"""The clickstream example on a real broker: what its tables have is what the clicks say, whatever happens meanwhile."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from infra.clickstream_input import Click, clicks
from pipelines import clickstream
from state_ops.errors import TransientError
from tests.recovery.harness import Site
from tests.tools.kafka import KafkaTopics
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run


def run_it(site: Site, *, drain: bool = False, executor: InMemoryExecutor | None = None) -> int:
    options = RunOptions(until_caught_up=True, drain=drain)
    return len(list(run(site.pipeline, site.settings, options, executor=executor or InMemoryExecutor())))


def sessions_of(rows: list[Click]) -> list[tuple[str, int, float, str, str]]:
    """An independent count: visitor, clicks, what was spent, first and last page."""
    by_visitor = defaultdict(list)
    for click in rows:
        by_visitor[click.visitor].append(click)
    sessions = []
    for visitor, visits in by_visitor.items():
        visits.sort(key=lambda click: click.at)
        session: list[Click] = []
        for click in [*visits, None]:
            if session and (click is None or (click.at - session[-1].at).total_seconds() > 30 * 60):
                prices = [click.price for click in session if click.price is not None]
                sessions.append((visitor, len(session), sum(prices), session[0].page, session[-1].page))
                session = []
            if click is not None:
                session.append(click)
    return sorted(sessions, key=repr)


def test_sessions_and_visitors_are_what_the_clicks_say(kafka: KafkaTopics, tmp_path: Path):
    topic = kafka.create(3)
    site = Site(
        tmp_path,
        {
            "WEIR_PIPELINES__CLICKSTREAM__PARAMS": json.dumps({"topic": topic, "servers": kafka.servers}),
            "WEIR_EPOCH__MAX_ROWS": "1500",
            "WEIR_SPARK__PARALLELISM": "2",
            "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "0",
        },
        clickstream.pipeline,
        "pipelines.clickstream",
    )
    rows = list(clicks(6000))
    produce(kafka, topic, rows[:3000])
    kafka.send(topic, [b"no click"], 1)

    class Failing(InMemoryExecutor):
        def run(self, *_: object) -> None:
            raise TransientError("The cluster is away.")

    with pytest.raises(TransientError):
        run_it(site, executor=Failing())
    assert run_it(site) >= 2
    kafka.broker.kill()
    kafka.broker.start()
    produce(kafka, topic, rows[3000:])
    run_it(site, drain=True)

    sessions = site.table("sessions")
    columns = ["visitor", "clicks", "spent", "landed_on", "left_from"]
    assert sorted(map(tuple, sessions[columns].values.tolist()), key=repr) == sessions_of(rows)
    visitors = site.table("visitors").set_index("visitor")
    assert len(visitors) == len({click.visitor for click in rows})
    assert visitors["clicks"].sum() == len(rows)
    (bad,) = site.table("sessions_quarantine").to_dict("records")
    assert "JSON" in str(bad)


def produce(kafka: KafkaTopics, topic: str, rows: list[Click]) -> None:
    producer = kafka.producer()
    for click in rows:
        producer.produce(topic, click.value, partition=click.partition)
    assert producer.flush(30) == 0
