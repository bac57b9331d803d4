"""Payments by card, what their owners confirm, and the table of cards: for `make demo-fraud` and the tests."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import polars as pl

FIRST = datetime(2026, 1, 5, 8, tzinfo=UTC)
COUNTRIES = ("AT", "BE", "CH", "DE", "ES", "FR")
_MOMENT = pl.Datetime("us", "UTC")


def cards(count: int, seed: int = 1) -> pl.DataFrame:
    """Return the table of cards: card, home and limit."""
    chance = np.random.default_rng(seed)
    return pl.DataFrame(
        {
            "card": [f"c{number:05}" for number in range(count)],
            "home": chance.choice(COUNTRIES, count),
            "limit": chance.integers(2, 20, count) * 100,
        }
    )


def payments(count: int, of: pl.DataFrame, seed: int = 1) -> pl.DataFrame:
    """Payments in the order of their times, ten a second; most are made at home, one in a thousand by no known card.

    Args:
        of: The table of cards.
    """
    chance = np.random.default_rng(seed)
    card = chance.integers(0, len(of), count)
    abroad, unknown = chance.random(count) < 0.03, chance.random(count) < 0.001
    country = np.where(abroad, chance.choice(COUNTRIES, count), of["home"].to_numpy()[card])
    return pl.DataFrame(
        {
            "payment": np.arange(count),
            "card": np.where(unknown, "c-gone", of["card"].to_numpy()[card]),
            "amount": np.round(chance.lognormal(3.5, 1.2, count), 2),
            "country": country,
            "at": _moments(np.cumsum(chance.exponential(0.1, count))),
        }
    )


def confirmations(of: pl.DataFrame, seed: int = 1) -> pl.DataFrame:
    """Return confirmations of half of all payments, up to six minutes later; in the sixth minute they are too late.

    of: The payments.
    """
    chance = np.random.default_rng(seed + 1)
    some = of.filter(pl.Series(chance.random(len(of)) < 0.5))
    later = pl.Series(chance.integers(0, 360, len(some)) * 1_000_000, dtype=pl.Int64).cast(pl.Duration("us"))
    return some.select("payment", confirmed_at=pl.col("at") + later).sort("confirmed_at")


def by_minutes(rows: pl.DataFrame, time: str, minutes: int) -> list[pl.DataFrame]:
    """Yield rows as they arrive, those of so many minutes at a time.

    time: The column with the time.
    """
    return rows.with_columns(__part=pl.col(time).dt.truncate(f"{minutes}m")).partition_by(
        "__part", maintain_order=True, include_key=False
    )


def _moments(seconds: np.ndarray) -> pl.Series:
    micros = int(FIRST.timestamp()) * 1_000_000 + (seconds * 1_000_000).astype(np.int64)
    return pl.Series(micros).cast(_MOMENT)
