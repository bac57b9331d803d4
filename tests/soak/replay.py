"""What the soaked pipeline means, a row at a time in plain Python; it shares no code with Weir."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from tests.soak.feed import number_of, rows_of

_WINDOW, _LATENESS = timedelta(minutes=10), timedelta(minutes=3)

Row = dict[str, Any]


@dataclass(frozen=True)
class Output:
    """What one epoch must have added to each table."""

    ledger: list[Row]
    turnover: list[Row]
    turnover_late: list[Row]


@dataclass
class Replay:
    """The pipeline after some epochs. files: how many were read; accounts: by account; windows: by branch and end."""

    seed: int
    files: int = 0
    accounts: dict[str, Row] = field(default_factory=dict)
    windows: dict[tuple[str, datetime], Row] = field(default_factory=dict)
    closed_upto: datetime | None = None

    def read(self, upto: int) -> list[Row]:
        """The next files' rows, up to but without file number `upto`."""
        rows = [row for number in range(self.files, upto) for row in rows_of(self.seed, number)]
        self.files = max(self.files, upto)
        return rows

    def epoch(self, epoch: int, upto: int, *, drain: bool = False) -> Output:
        """The epoch that reads the files below number `upto`."""
        judged_by = self.closed_upto
        ledger = [self._entry(row, epoch) for row in self.read(upto)]
        late = []
        for row in ledger:
            end = _end(row["at"])
            if judged_by is not None and end <= judged_by:
                late.append(row)
                continue
            window = self.windows.setdefault(
                (row["branch"], end), {"entries": 0, "amount": 0, "highest": row["balance"]}
            )
            window["entries"] += 1
            window["amount"] += row["amount"]
            window["highest"] = max(window["highest"], row["balance"])
        if ledger:
            reached = max(row["at"] for row in ledger) - _LATENESS
            self.closed_upto = max(reached, self.closed_upto or reached)
        closing = [
            (branch, end)
            for branch, end in sorted(self.windows)
            if drain or (self.closed_upto is not None and end <= self.closed_upto)
        ]
        turnover = [
            {"branch": branch, "window_start": end - _WINDOW, "window_end": end, **self.windows.pop((branch, end))}
            for branch, end in closing
        ]
        if drain and closing:
            newest = max(end for _, end in closing)
            self.closed_upto = max(newest, self.closed_upto or newest)
        return Output(ledger, turnover, late)

    def _entry(self, row: Row, epoch: int) -> Row:
        fresh = {"entries": 0, "balance": 0, "opened_by": row["seq"]}
        now = dict(self.accounts.get(row["account"], fresh))
        now |= {"entries": now["entries"] + 1, "balance": now["balance"] + row["amount"], "last_at": row["at"]}
        if row["closes"]:
            self.accounts.pop(row["account"], None)
        else:
            self.accounts[row["account"]] = now
        return {
            **row,
            "entry": now["entries"],
            "balance": now["balance"],
            "opened_by": now["opened_by"],
            "epoch": epoch,
        }


def _end(at: datetime) -> datetime:
    return at - (at - datetime(1970, 1, 1, tzinfo=at.tzinfo)) % _WINDOW + _WINDOW


def files_of(ledger: list[Row]) -> set[int]:
    """The numbers of the files that rows of the ledger came in."""
    return {number_of(row["seq"]) for row in ledger}
