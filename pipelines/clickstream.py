"""What visitors of a shop do, from Kafka: their sessions, and a table with one row for each of them.

    topic clicks -> sessions -> table sessions (appended, once a session is over)
                 -> visitors -> table visitors (one row per visitor, as of now)

`make demo-kafka` runs it on a broker of its own. Input: JSON with a visitor, a page, a price where something was
bought, and the time. What cannot be decoded goes to the quarantine tables with offset and reason.
"""

import pyarrow as pa

from weir import Pipeline, agg, aggregate, delta, kafka, window

clicks = kafka(
    "{topic}",
    name="clicks",
    servers="{servers}",
    schema=pa.schema(
        [
            ("visitor", pa.string()),
            ("page", pa.string()),
            ("price", pa.float64()),
            ("at", pa.timestamp("us", "UTC")),
        ]
    ),
    event_time="at",
    idle_after="10s",
    max_future="1d",
    on_bad="quarantine",
)

sessions = window(
    "sessions",
    clicks,
    key="visitor",
    on="at",
    gap="30m",
    lateness="1m",
    where="visitor IS NOT NULL",
    clicks=agg.count(),
    spent=agg.sum("price"),
    landed_on=agg.first("page"),
    left_from=agg.last("page"),
    sink=delta.append("sessions"),
    late=delta.append("late_clicks"),
)

visitors = aggregate(
    "visitors",
    clicks,
    key="visitor",
    where="visitor IS NOT NULL",
    clicks=agg.count(),
    spent=agg.sum("price"),
    first_seen=agg.min("at"),
    last_seen=agg.max("at"),
    sink=delta.upsert("visitors", key="visitor"),
)

pipeline = Pipeline(
    "clickstream",
    (sessions, visitors),
    max_parallelism=128,
    description="Sessions of a shop's visitors, and what each of them has done and spent.",
)
