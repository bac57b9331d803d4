"""A pipeline with a table and a ledger of which tests let the ledger refuse rows after the commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from state_ops.errors import PipelineError
from tests.recovery import ledger
from tests.recovery.small import Bank
from weir import Pipeline


def banks(site: Path, pipeline: Pipeline) -> Bank:
    """Return a bank that runs the pipeline and keeps all its checkpoints."""
    plain = Bank.at(site, WEIR_CHECKPOINTS__NUM_RETAINED="8")
    return Bank(replace(plain.site, pipeline=pipeline))


def refuse(monkeypatch: pytest.MonkeyPatch, is_refused: Callable[[Any], bool], rule: str) -> Callable[[], None]:
    """Let the ledger refuse rows, as a CHECK does that somebody adds after the commit.

    Args:
        is_refused: Is asked of the rows of a checkpoint.
        rule: The name of the constraint.

    Returns:
        A function after which the ledger takes all rows again.
    """
    real = ledger.Ledger.publish

    def checked(self: Any, previous: Any, checkpoint: Any, rows: Any) -> Any:
        if is_refused(rows):
            raise PipelineError(f"A row violates the constraint {rule}.", next="Leave it out.")
        return real(self, previous, checkpoint, rows)

    monkeypatch.setattr(ledger.Ledger, "publish", checked)
    return lambda: monkeypatch.setattr(ledger.Ledger, "publish", real)
