"""Quality gates: Great Expectations on what a stage hands out in one epoch, before the commit.

Great Expectations takes seconds to import, so it is imported at the first gate. A failed expectation is a GateError; an
expectation that could not be evaluated (a missing column, wrong arguments) is a PipelineError: failed is not errored.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipelines.runtime.definition import Gate, Stage
from pipelines.runtime.executor import staged_table
from pipelines.runtime.spark import name_main_module
from state_ops.checkpoint import StagedFile, StateFile
from state_ops.errors import GateError, PipelineError
from state_ops.storage import Storage


@dataclass(frozen=True, slots=True)
class Verdict:
    """One expectation on one epoch's output. rows: how many were looked at; unexpected: how many failed."""

    stage: str
    gate: str
    passed: bool
    rows: int
    unexpected: int
    sample: tuple[Any, ...]


def check(storage: Storage, stage: Stage, files: Sequence[StagedFile | StateFile]) -> list[Verdict]:
    """Evaluate a stage's gates on its staged rows. Raises GateError if one fails, PipelineError if one cannot be evaluated."""
    if not stage.gates or not files:
        return []
    tables = [staged_table(storage, file) for file in files]
    verdicts = evaluated(f"stage {stage.uid}", stage.uid, stage.gates, pa.concat_tables(tables))
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if failed:
        lines = [f"{v.gate}: {v.unexpected} of {v.rows} rows, e.g. {list(v.sample)}" for v in failed]
        raise GateError(
            f"A quality gate of the stage {stage.uid} failed: " + "; ".join(lines),
            where=f"stage {stage.uid}",
            next="The epoch was declined; state, offsets and tables are as they were. Repair the input or correct the gate.",
        )
    return verdicts


def evaluated(where: str, name: str, gates: Sequence[Gate], rows: pa.Table) -> list[Verdict]:
    """What expectations say of rows, without raising where one fails. name: whose rows these are; where: the same, for messages.

    Raises PipelineError for one that cannot be evaluated.
    """
    batch = _batch(rows.to_pandas(use_threads=False))
    return [_evaluate(where, name, gate, batch) for gate in gates]


_loading = threading.Lock()


def load():
    """Import Great Expectations and make its in-memory context; takes seconds, once a process. Safe from any thread."""
    with _loading:
        return _loaded()


def load_meanwhile() -> None:
    """Start loading beside a Spark job. Not earlier: Great Expectations imports PySpark too, and two threads that import
    PySpark at once find it half-made."""
    if not _loaded.cache_info().currsize:
        threading.Thread(target=load, name="weir-gates", daemon=True).start()


@functools.cache
def _loaded():
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    name_main_module()
    import great_expectations as gx

    # This module of theirs sets its own level, and then says where it would put pages that are never made.
    logging.getLogger("great_expectations.data_context.types.base").setLevel(logging.WARNING)

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}  # type: ignore[assignment]
    asset = context.data_sources.add_pandas("weir").add_dataframe_asset("epoch")
    return gx, asset.add_batch_definition_whole_dataframe("epoch")


def _batch(frame):
    _, definition = load()
    return definition.get_batch({"dataframe": frame})


def _evaluate(where: str, name: str, gate: Gate, batch) -> Verdict:
    gx, _ = load()
    where = f"{where}, gate {gate.title}"
    kind = getattr(gx.expectations, gate.expectation, None)
    if kind is None:
        raise PipelineError(
            f"Great Expectations has no {gate.expectation}.", where=where, next="Look its class name up in its gallery."
        )
    try:
        outcome = batch.validate(kind(**dict(gate.arguments)), result_format="SUMMARY")
    except Exception as error:  # whatever the library raises here is about the gate's arguments
        raise PipelineError(
            f"The gate cannot be evaluated: {error}", where=where, next="Correct its arguments."
        ) from error
    raised = outcome.exception_info or {}
    details = raised.values() if all(isinstance(value, dict) for value in raised.values()) else [raised]
    messages = [str(item.get("exception_message")) for item in details if item.get("raised_exception")]
    if messages:
        raise PipelineError(f"The gate cannot be evaluated: {messages[0]}", where=where, next="Correct its arguments.")
    result = outcome.result or {}
    return Verdict(
        name,
        gate.title,
        bool(outcome.success),
        int(result.get("element_count") or 0),
        int(result.get("unexpected_count") or 0),
        tuple(result.get("partial_unexpected_list") or ())[:3],
    )
