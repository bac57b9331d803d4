"""The input: an endless row of small files, each of which is a function of the seed and its number alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

START = datetime(2024, 5, 1, tzinfo=UTC)
SCHEMA = pa.schema(
    [
        ("seq", pa.int64()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("account", pa.string()),
        ("branch", pa.string()),
        ("amount", pa.int64()),
        ("closes", pa.bool_()),
    ]
)
_MOST_ROWS = 1000
_ACCOUNTS = 60


def rows_of(seed: int, number: int) -> list[dict[str, Any]]:
    """The rows of one file: a minute of event time, much of it of one account, some of it late by up to 40 minutes."""
    chance = random.Random(f"{seed}/{number}")
    size = chance.choice([0, 1, 5, 10, 20, 20, 30, 60]) if chance.random() < 0.99 else _MOST_ROWS // 2
    rows = []
    for index in range(size):
        account = "hot" if chance.random() < 0.3 else f"k{int(chance.triangular(0, _ACCOUNTS, 0))}-ü"
        behind = chance.choice([0, 0, 0, 0, chance.randrange(300), chance.randrange(2400)])
        rows.append(
            {
                "seq": number * _MOST_ROWS + index,
                "at": START + timedelta(minutes=number, seconds=chance.randrange(60) - behind),
                "account": account,
                "branch": f"b{hash_of(account) % 4}",
                "amount": chance.randrange(-50, 100),
                "closes": chance.random() < 0.03,
            }
        )
    return rows


def hash_of(text: str) -> int:
    """The same in every process, unlike `hash`."""
    return sum(text.encode())


def number_of(seq: int) -> int:
    """The file that a row came in."""
    return seq // _MOST_ROWS


@dataclass
class Feed:
    """Lands files in their order. landed: how many there are; gone: how many of the oldest were cleaned away again."""

    seed: int
    directory: Path
    landed: int = 0
    gone: int = 0

    def land(self, files: int) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for number in range(self.landed, self.landed + files):
            table = pa.Table.from_pylist(rows_of(self.seed, number), SCHEMA)
            staged = self.directory / f".{number:08d}"
            pq.write_table(table, staged)
            staged.rename(self._file(number))
        self.landed += files

    def clean(self, below: int) -> None:
        """Take files away that were read long ago."""
        for number in range(self.gone, below):
            self._file(number).unlink()
        self.gone = max(self.gone, below)

    def _file(self, number: int) -> Path:
        return self.directory / f"{number:08d}.parquet"
