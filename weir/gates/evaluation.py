"""Quality gates: Great Expectations on what one epoch makes of a stage, before the commit.

Great Expectations takes seconds to import, so it is imported at the first gate. A failed expectation is a verdict, of
which one that holds is a GateError; an expectation that could not be evaluated (a missing column, wrong arguments) is a
PipelineError: failed is not errored.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc

from state_ops import extras
from state_ops.arrow import frames
from state_ops.counts import counted
from state_ops.errors import GateError, PipelineError
from state_ops.facts import HIDDEN, Facts, Named
from state_ops.logs import Logger
from state_ops.records.snapshot_files import StagedFile, StateFile
from state_ops.storage.storage import Storage
from state_ops.value_text import literal, plain
from weir.definition import HOLD, QUARANTINE, ROWS, Gate, Pipeline, Stage
from weir.execution.executor import staged_table
from weir.execution.spark.imports import load_great_expectations as load

if TYPE_CHECKING:
    import pandas as pd

log = Logger("weir.epoch")
_COLUMNS = ("column", "column_A", "column_B", "column_list")  # arguments of expectations that look at no other columns
_SAMPLE = 3
_MOST_IN_FLOAT = 1 << 53  # up to which a float has every whole number
_NULLABLE = {
    pa.int8(): "Int8", pa.int16(): "Int16", pa.int32(): "Int32", pa.int64(): "Int64",
    pa.uint8(): "UInt8", pa.uint16(): "UInt16", pa.uint32(): "UInt32", pa.uint64(): "UInt64",
    pa.bool_(): "boolean",
}  # fmt: skip
_ENTRY = "weir"  # an entry of a suite, in its meta


@dataclass(frozen=True, slots=True)
class GateVerdict(Facts):
    """The verdict of one expectation in one epoch.

    Attributes:
        rows: How many were looked at.
        unexpected: How many of them failed it.
        sample: At most three of these values, or the figure that an expectation on all rows has found; JSON-ready.
        on_failure, of: The gate's.
        unexpected_rows: All of them, by their number among those looked at, where a gate quarantines.
        sample_rows: The same of the sample's, where an expectation looks at each row by itself.
        keys: Theirs, by column, where they are known.
    """

    stage: Annotated[str, Named("name")]
    gate: Annotated[str, Named("title")]
    passed: bool
    rows: int
    unexpected: int
    sample: tuple[Any, ...]
    on_failure: str = HOLD
    of: str = ROWS
    unexpected_rows: Annotated[tuple[int, ...], HIDDEN] = ()
    sample_rows: Annotated[tuple[int, ...], HIDDEN] = ()
    keys: tuple[Mapping[str, Any], ...] = ()

    @property
    def quarantines(self) -> bool:
        """True if rows are to be set aside."""
        return not self.passed and self.on_failure == QUARANTINE

    @property
    def holds(self) -> bool:
        """True if the epoch must not be committed."""
        return not self.passed and self.on_failure == HOLD

    def recorded(self) -> dict[str, Any]:
        """Return the verdict as a checkpoint's row records it below its stage; JSON-ready."""
        return {
            "title": self.gate,
            "of": self.of,
            "on_failure": self.on_failure,
            "passed": self.passed,
            "rows": self.rows,
            "unexpected": self.unexpected,
            "sample": list(self.sample),
            "keys": [dict(key) for key in self.keys],
        }

    @classmethod
    def from_dict(cls, stage: str, raw: Mapping[str, Any]) -> GateVerdict:
        """Return the verdict that a checkpoint's row has.

        Args:
            stage: The uid below which it stands there.
        """
        figures = {name: raw[name] for name in ("passed", "rows", "unexpected", "on_failure", "of")}
        keys = tuple(raw.get("keys", ()))  # older rows have none
        return cls(stage, raw["title"], sample=tuple(raw["sample"]), keys=keys, **figures)

    def __str__(self) -> str:
        return f"{self.gate}: {self.outcome}"

    @property
    def in_counts(self) -> str:
        """The gate's result without a value: for log lines, which more people read than may see rows."""
        return f"{self.gate}: {f'{self.unexpected:,} of ' if self.unexpected else ''}{counted(self.rows, 'row')}"

    @property
    def outcome(self) -> str:
        """The gate's result, for people."""
        rows, sample = counted(self.rows, "row"), self._sample_in_words()
        if self.unexpected:
            return f"{self.unexpected:,} of {rows}{', e.g. ' if sample else ''}{sample}"
        return f"found {sample or 'something else'}, in {rows}"

    def _sample_in_words(self) -> str:
        keys = [f" ({', '.join(f'{name} = {literal(value)}' for name, value in key.items())})" for key in self.keys]
        shown = zip(self.sample, keys or [""] * len(self.sample), strict=True)
        return ", ".join(f"{literal(value)}{key}" for value, key in shown)


def check_installed(pipeline: Pipeline) -> None:
    """Raise ConfigurationError if the pipeline has gates, and what evaluates them is not installed."""
    if pipeline.on_restore or any(stage.gates for stage in pipeline.stages):
        extras.check("great_expectations", "A quality gate", f"pipeline {pipeline.name}")


def of_rows(stage: Stage) -> tuple[Gate, ...]:
    """Return a stage's gates on the rows that it hands out."""
    return tuple(gate for gate in stage.gates if gate.of == ROWS)


def looked_at(storage: Storage, stage: Stage, files: Sequence[StagedFile | StateFile]) -> pa.Table:
    """Return what a stage's gates look at of its staged rows, of which there are some."""
    return staged(storage, files, columns_of(of_rows(stage)))


def staged(storage: Storage, files: Sequence[StagedFile | StateFile], columns: Sequence[str] | None) -> pa.Table:
    """Staged rows, of which there are some.

    Args:
        columns: Only those of them that are there.
    """
    return pa.concat_tables([staged_table(storage, file, columns) for file in files])


def check(stage: Stage, rows: pa.Table) -> list[GateVerdict]:
    """Return what a stage's gates on rows say of them. Raises PipelineError if one cannot be evaluated."""
    return evaluated(f"stage {stage.uid}", stage.uid, of_rows(stage), rows)


def with_keys(verdicts: Sequence[GateVerdict], key: Sequence[str], rows: Callable[[], pa.Table]) -> list[GateVerdict]:
    """Verdicts whose samples say whose rows they are.

    Args:
        rows: Those looked at, with the key's columns if they have any; asked for only where some failed.
    """
    if not any(verdict.sample_rows for verdict in verdicts):
        return list(verdicts)
    table = rows()
    columns = {name: table.column(name) for name in key if name in table.column_names}
    if not columns:
        return list(verdicts)

    def keys(verdict: GateVerdict) -> tuple[Mapping[str, Any], ...]:
        return tuple(
            {name: plain(*frames.python_values(values.slice(row, 1))) for name, values in columns.items()}
            for row in verdict.sample_rows
        )

    return [replace(verdict, keys=keys(verdict)) for verdict in verdicts]


def refuse(uid: str, verdicts: Sequence[GateVerdict]) -> None:
    """Raise GateError if one of a stage's verdicts holds the epoch; those that only warn are logged."""
    failed = [verdict for verdict in verdicts if verdict.holds]
    if failed:
        raise refusal(uid, verdicts, "; ".join(map(str, failed)))
    for verdict in verdicts:
        if not verdict.passed:
            log.warning("a gate failed, and only warns", stage=uid, of=verdict.of, verdict=verdict.in_counts)


def refusal(uid: str, verdicts: Sequence[GateVerdict], why: str) -> GateError:
    """Return the error of an epoch that a gate of a stage holds."""
    return GateError(
        f"A quality gate of the stage {uid} failed: {why}",
        where=f"stage {uid}",
        next=(
            "The epoch was declined; state, offsets and tables are as they were. Repair the input or correct the gate."
        ),
        verdicts=[{"stage": uid, **verdict.recorded()} for verdict in verdicts],
    )


def columns_of(asked: Sequence[Gate]) -> list[str] | None:
    """Return the columns that gates look at; None: one of them may look at any."""
    columns: list[str] = []
    for gate in asked:
        arguments = dict(gate.arguments)
        named = [arguments[argument] for argument in _COLUMNS if argument in arguments]
        if not named or arguments.get("row_condition"):
            return None
        for name in named:
            columns += [name] if isinstance(name, str) else list(name)
    return list(dict.fromkeys(columns))


class Form(StrEnum):
    """The form in which an expectation gets whole numbers, decimals and booleans of a column with nulls.

    Pandas makes floats or objects of them.

    Attributes:
        NULLABLE: pandas' nullable types, for what looks at each value, or at the type.
        OBJECTS: Python's own numbers and NaN, where floats would not be exact: for figures of a column, and for several
            columns of a row, which Great Expectations cannot compare where one of the nullable types has a null.
        FLOATS: as pandas has it, for distributions.
    """

    NULLABLE = "each value"
    OBJECTS = "figures and several columns"
    FLOATS = "distributions"


def form_of(asked: Any) -> Form:
    """Return the form of an expectation, as Great Expectations has it."""
    from great_expectations.expectations import expectation as kinds

    if type(asked).__name__ == "ExpectColumnKLDivergenceToBeLessThan":
        return Form.FLOATS
    others = kinds.ColumnAggregateExpectation | kinds.ColumnPairMapExpectation | kinds.MulticolumnMapExpectation
    scores = type(asked).__name__ == "ExpectColumnValueZScoresToBeLessThan"  # looks at each value, but by figures
    return Form.OBJECTS if scores or isinstance(asked, others) else Form.NULLABLE


def pandas(rows: pa.Table, form: Form) -> pd.DataFrame:
    """Return rows as Great Expectations sees them, every number exact whether or not there are nulls."""
    import pandas as pd

    nulls = {column.type for column in rows.columns if column.null_count}
    dtypes = {type: pd.api.types.pandas_dtype(name) for type, name in _NULLABLE.items() if type in nulls}
    nullable = dtypes.get if form is Form.NULLABLE else None
    frame: pd.DataFrame = rows.to_pandas(use_threads=False, types_mapper=nullable)
    if form is Form.OBJECTS:
        for name, column in zip(rows.column_names, rows.columns, strict=True):
            if _needs_objects(column):
                values = [math.nan if value is None else value for value in column.to_pylist()]
                frame[name] = pd.Series(values, dtype=object)
    return frame


def _needs_objects(column: pa.ChunkedArray) -> bool:
    """Return whether a float or a sum in 64 bits may not be exact; and decimals with nulls, which pandas has as objects
    that it cannot add."""
    if pa.types.is_decimal(column.type):
        return bool(column.null_count)
    if not pa.types.is_integer(column.type) or column.null_count == len(column):
        return False
    ends = pc.min_max(column).as_py()
    greatest = max(abs(ends["min"]), abs(ends["max"]))
    return bool(greatest * max(len(column), (1 << 63) // _MOST_IN_FLOAT) >= 1 << 63)


_evaluating = threading.Lock()  # its context is one for all slots, and is not made for threads


def evaluated(where: str, name: str, gates: Sequence[Gate], rows: pa.Table) -> list[GateVerdict]:
    """Return what expectations say of rows, without raising where one fails.

    Args:
        name: Whose rows these are.
        where: The same, for messages.

    Raises:
        PipelineError: For one that cannot be evaluated.
    """
    gx, definition = load()
    asked = [(number, gate, expectation(f"{where}, gate {gate.title}", gate)) for number, gate in enumerate(gates)]
    for _, gate, expected in asked:
        if gate.on_failure == QUARANTINE:
            _check_by_row(f"{where}, gate {gate.title}", expected)
    # Of each frame Great Expectations takes copies, of all its columns. To say which rows fail takes more than how
    # many.
    groups: dict[tuple[tuple[str, ...], str, Form], list[Asked]] = {}
    for expected in asked:
        named, aside = columns_of([expected[1]]), expected[1].on_failure == QUARANTINE
        columns = tuple(column for column in rows.column_names if named is None or column in named)
        groups.setdefault((columns, "COMPLETE" if aside else "SUMMARY", form_of(expected[2])), []).append(expected)
    outcomes: dict[int, Any] = {}
    with _evaluating, _unhashed():
        for (columns, result_format, form), members in groups.items():
            frame = pandas(rows.select(columns or rows.column_names), form)
            batch = definition.get_batch({"dataframe": frame})
            outcomes |= _validated(gx, where, batch, members, result_format)
    return [verdict_of(f"{where}, gate {gate.title}", name, gate, outcomes[n], rows.num_rows) for n, gate, _ in asked]


Asked = tuple[int, Gate, Any]


def _validated(gx: Any, where: str, batch: Any, asked: Sequence[Asked], result_format: str) -> dict[int, Any]:
    """Return the outcomes of gates by their numbers."""
    suite = gx.ExpectationSuite(name="epoch")
    entries = enter(suite, asked)
    try:
        results = batch.validate(suite, result_format=result_format).results
    except Exception as error:  # whatever the library raises here is about the gates' arguments
        raise _wrong(f"{where}, gates {', '.join(gate.title for _, gate, _ in asked)}", error) from error
    return dict(by_number(entries, results))


def enter(suite: Any, asked: Sequence[Asked]) -> list[list[int]]:
    """Enter gates into a suite, those that ask the same once, as it would drop the others; returns which numbers each
    entry is for."""
    entries: list[list[int]] = []
    entered: list[Gate] = []
    for number, gate, expected in asked:
        twin = next(
            (n for n, e in enumerate(entered) if (e.expectation, e.arguments) == (gate.expectation, gate.arguments)),
            None,
        )
        if twin is not None:
            entries[twin].append(number)
            continue
        expected.meta = {_ENTRY: len(entries)}
        suite.add_expectation(expected)
        entries.append([number])
        entered.append(gate)
    return entries


def by_number(entries: Sequence[Sequence[int]], results: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Return each gate's number with its outcome.

    Args:
        entries: As `enter` returned them.
    """
    for outcome in results:
        for number in entries[outcome.expectation_config.meta[_ENTRY]]:
            yield number, outcome


@contextmanager
def _unhashed() -> Iterator[None]:
    """Let Great Expectations take no fingerprint of a frame, which nobody looks at: it takes as long as an expectation,
    and is taken several times. It takes none of large frames by itself."""
    from great_expectations.execution_engine import pandas_execution_engine as engine

    before = engine.HASH_THRESHOLD
    engine.HASH_THRESHOLD = 0
    try:
        yield
    finally:
        engine.HASH_THRESHOLD = before


@contextmanager
def apart() -> Iterator[tuple[Any, Any]]:
    """Great Expectations, and a context that is nobody else's for as long as the `with` block lasts; no gate is
    evaluated meanwhile."""
    gx, _ = load()
    from great_expectations.data_context.data_context.context_factory import project_manager

    with _evaluating:
        gates_own = project_manager.get_project()  # theirs is global to the process
        try:
            context = gx.get_context(mode="ephemeral")
            context.variables.progress_bars = {"globally": False}
            yield gx, context
        finally:
            project_manager.set_project(gates_own)


def expectation(where: str, gate: Gate) -> Any:
    """Return a gate as Great Expectations has it. Raises PipelineError where it has no such thing, or not with these
    arguments."""
    gx, _ = load()
    kind = getattr(gx.expectations, gate.expectation, None)
    if kind is None:
        raise PipelineError(
            f"Great Expectations has no {gate.expectation}.", where=where, next="Look its class name up in its gallery."
        )
    _take_whole_numbers(kind)
    try:
        return kind(**dict(gate.arguments))
    except Exception as error:  # whatever the library raises here is about the gate's arguments
        raise _wrong(where, error) from error


class _Whole:
    """A whole number of which a float would be another: Great Expectations takes bounds for floats."""

    @classmethod
    def __get_validators__(cls) -> Iterator[Callable[[Any], int]]:
        yield cls._checked

    @staticmethod
    def _checked(value: Any) -> int:
        if type(value) is not int or abs(value) <= _MOST_IN_FLOAT:
            raise TypeError("it may as well be a float")
        return value


def _take_whole_numbers(kind: Any) -> None:
    """Have a class of expectations take large whole numbers as they are, where it takes floats among others."""
    for field in kind.__fields__.values():
        choices = field.sub_fields or []
        if any(choice.type_ is float for choice in choices) and choices[0].type_ is not _Whole:
            config = field.model_config
            choices.insert(0, type(field)(name=field.name, type_=_Whole, class_validators=None, model_config=config))


def _wrong(where: str, problem: object) -> PipelineError:
    return PipelineError(f"The gate cannot be evaluated: {problem}", where=where, next="Correct its arguments.")


def verdict_of(where: str, name: str, gate: Gate, outcome: Any, rows: int, of: str | None = None) -> GateVerdict:
    """Return what Great Expectations says of a gate, on so many rows. Raises PipelineError where it could not evaluate
    it."""
    raised = outcome.exception_info or {}
    details = raised.values() if all(isinstance(value, dict) for value in raised.values()) else [raised]
    messages = [str(item.get("exception_message")) for item in details if item.get("raised_exception")]
    if messages:
        raise _wrong(where, messages[0])
    result = outcome.result or {}
    unexpected = int(result.get("unexpected_count") or 0)
    if unexpected or result.get("observed_value") is None:
        sample = result.get("partial_unexpected_list") or ()
    else:
        sample = (result["observed_value"],)
    shown = tuple(plain(value) for value in sample[:_SAMPLE])
    aside = gate.on_failure == QUARANTINE and not outcome.success
    numbers = tuple(map(int, result.get("unexpected_index_list") or ())) if aside else ()
    policy, looked = gate.on_failure, of or gate.of
    at = () if outcome.success else tuple(map(int, result.get("partial_unexpected_index_list") or ()))[: len(shown)]
    at = at if len(at) == len(shown) else ()  # then it is not known which value is whose
    return GateVerdict(name, gate.title, bool(outcome.success), rows, unexpected, shown, policy, looked, numbers, at)


def _check_by_row(where: str, asked: Any) -> None:
    from great_expectations.expectations import expectation as kinds

    if not isinstance(
        asked, kinds.ColumnMapExpectation | kinds.ColumnPairMapExpectation | kinds.MulticolumnMapExpectation
    ):
        raise PipelineError(
            "An expectation that does not look at each row by itself cannot say which rows to set aside.",
            where=where,
            next=(
                "Take one on a column's values (ExpectColumnValues..., pairs, compound columns), or let it hold or"
                " warn."
            ),
        )
