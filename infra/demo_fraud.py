"""`make demo-fraud`: payments, confirmations, a table of cards, and the card_fraud pipeline on Spark; then its alerts.

    files of an hour -> epochs -> files of another one -> epochs -> tables, compared with DuckDB

Everything is below `.weir/demo-fraud` and made anew each time.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import duckdb
import polars as pl
from rich.console import Console
from rich.markup import escape

from infra.card_fraud_input import by_minutes, cards, confirmations, payments
from pipelines.card_fraud import pipeline
from weir.run import progress
from weir.run.run import RunOptions, run
from weir.settings.configuration import PROJECT, load

DEMO = PROJECT / ".weir" / "demo-fraud"
PAYMENTS, CARDS, MINUTES = 60_000, 2_000, 10

ALERTS = """
WITH traced AS (
    SELECT *, coalesce(country <> lag(country) OVER w AND "at" - lag("at") OVER w < INTERVAL 1 HOUR, false) AS travelled
    FROM payments WINDOW w AS (PARTITION BY card ORDER BY "at", payment)
)
SELECT traced.payment, CASE
    WHEN home IS NULL THEN 'no such card'
    WHEN travelled THEN 'two countries within an hour'
    WHEN country <> home AND amount > 100 THEN 'abroad'
    WHEN amount > "limit" THEN 'above its limit'
END AS reason
FROM traced
LEFT JOIN cards USING (card)
LEFT JOIN confirmations ON confirmations.payment = traced.payment
    AND confirmed_at BETWEEN "at" AND "at" + INTERVAL 5 MINUTE
WHERE confirmed_at IS NULL AND reason IS NOT NULL
"""
"""What is to be alerted of the tables payments, confirmations and cards, by DuckDB."""

out = Console(highlight=False, emoji=False, soft_wrap=True)


def land(frame: pl.DataFrame, directory: Path, time: str) -> list[tuple[Path, pl.DataFrame]]:
    """Land the files of a stream that are to arrive one after the other."""
    directory.mkdir(parents=True, exist_ok=True)
    return [(directory / f"{n:04}.parquet", part) for n, part in enumerate(by_minutes(frame, time, MINUTES))]


def main() -> None:
    """Run the demo. Needs no arguments."""
    started = time.monotonic()
    shutil.rmtree(DEMO, ignore_errors=True)
    table_of_cards = cards(CARDS)
    paid = payments(PAYMENTS, table_of_cards)
    confirmed = confirmations(paid)
    table_of_cards.write_delta(str(DEMO / "cards"))
    arriving = sorted([*land(paid, DEMO / "payments", "at"), *land(confirmed, DEMO / "confirmations", "confirmed_at")])
    settings = load(
        {
            "WEIR_STORAGE__ROOT": str(DEMO / "storage"),
            "WEIR_LOCAL__WORK_DIR": str(DEMO / "work"),
            "WEIR_PIPELINES__CARD_FRAUD__OBJECT": "pipelines.card_fraud:pipeline",
            "WEIR_PIPELINES__CARD_FRAUD__PARAMS": json.dumps({"landing": str(DEMO), "cards": str(DEMO / "cards")}),
            "WEIR_EPOCH__MAX_FILES": "4",
        }
    )
    names = sorted({file.name for file, _ in arriving})
    half = names[len(names) // 2]
    for drain in (False, True):
        files = [(file, part) for file, part in arriving if (file.name >= half) == drain]
        for file, part in files:
            part.write_parquet(file)
        out.print(f"{len(files)} files have arrived. Epochs:")
        for report in run(pipeline, settings, RunOptions(until_caught_up=True, drain=drain)):
            out.print("  " + escape(progress.line(report.checkpoint, None, 6)))
    _show(paid, confirmed, table_of_cards)
    out.print(f"{time.monotonic() - started:.0f} s, all below {DEMO.relative_to(PROJECT)}.")


def _show(paid: pl.DataFrame, confirmed: pl.DataFrame, table_of_cards: pl.DataFrame) -> None:
    tables = DEMO / "storage" / "card_fraud" / "tables"
    alerts, alerted = (pl.read_delta(str(tables / name)) for name in ("alerts", "alerted_cards"))
    out.print(
        f"{len(alerts):,} alerts on {len(alerted):,} of {len(table_of_cards):,} cards, in {len(paid):,} payments."
    )
    out.print(alerts.group_by("reason").len("alerts").sort("alerts", descending=True))
    with duckdb.connect() as base:
        for name, frame in (("payments", paid), ("confirmations", confirmed), ("cards", table_of_cards)):
            base.register(name, frame)
        wanted = base.sql(ALERTS).pl()
    if set(alerts.select("payment", "reason").iter_rows()) != set(wanted.iter_rows()) or len(alerts) != len(wanted):
        raise SystemExit(f"DuckDB says {len(wanted):,} alerts of the same input.")
    out.print("They are those that DuckDB says of the whole input.")


if __name__ == "__main__":
    main()
