"""The protocol of operators. What a stage does with its rows is one value of one class, and the engine asks that value.

`OperatorKind` is the frozen definition that an author's call makes. It answers for everything that the engine wants to
know: which columns follow from which, what state means, how far event time is held back, what people see. `Operator` is
what it builds for each subtask and epoch. Nothing outside of an operator's own package asks which operator a stage has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from state_ops.ids import CheckpointId
from state_ops.outputs import MAIN
from weir.definition.names import ROW

if TYPE_CHECKING:
    import pyarrow as pa

    from state_ops.backends.base import Backend
    from state_ops.keyed.per_key.key_state import OpenCache
    from state_ops.keyed.ttl import Forgotten, Ttl
    from state_ops.records.acks import Ack
    from state_ops.records.operator_stats import OperatorStats
    from state_ops.rows.aggregates import Agg
    from state_ops.rows.resident_table import Residence
    from state_ops.rows.row_store import RowStore
    from state_ops.schema.descriptors import Collection
    from state_ops.schema.state_class import State
    from state_ops.schema.state_schema import StateSchema
    from weir.definition.findings import Finding
    from weir.definition.input import Input
    from weir.definition.sink import Sink
    from weir.definition.stage import Stage


@dataclass(frozen=True, slots=True)
class Epoch:
    """The facts about an epoch that a stage's function may use. They are the same when the epoch is replayed.

    Attributes:
        id: The checkpoint's id.
        now: Processing time in UTC, fixed by the coordinator. It never decreases.
        watermark: Event time before this epoch in UTC, by which lateness is judged; None before the first. A watermark
            beyond Python's years is `datetime.min` or `datetime.max`.
        subtask: The number of the subtask that calls the function, from 0.
        parallelism: The number of the stage's subtasks.

    Example:
        >>> import polars as pl
        >>> from weir import Epoch, files, stage, testing
        >>> @stage("stamped", source=files("{landing}/*.parquet"), key=None)
        ... def stamped(rows: pl.DataFrame, epoch: Epoch) -> pl.DataFrame:
        ...     return rows.with_columns(epoch=pl.lit(epoch.id))
        >>> testing.run(stamped).epoch([{"order": 7}]).to_dicts()
        [{'order': 7, 'epoch': 1}]
    """

    id: CheckpointId
    now: datetime
    watermark: datetime | None
    subtask: int
    parallelism: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The event time of a stage in this epoch, in microseconds since 1970 UTC.

    For windows by processing time it is that.

    Attributes:
        before: The watermark after the previous epoch, which judges lateness.
        now: The watermark that is known for this epoch, which closes windows.
        drain: Close every window.
    """

    before: int | None
    now: int | None
    drain: bool


@dataclass(frozen=True, slots=True)
class Shapes:
    """The schemas of a stage, fixed before its first row.

    Attributes:
        keys: The key columns.
        state: The fields of a key's row.
        outputs: By output name.
        collections: Lists and maps.
        tracked: Beside the columns of its output, the stage hands on where each row comes from, as `ROW`.
        sketched: By aggregate, the type of the values that a sketch in its state counts: its bytes do not tell it.

    Example:
        >>> import pyarrow as pa
        >>> from weir import Shapes, State
        >>> class Total(State):
        ...     amount: int = 0
        >>> rows = pa.schema([("key", pa.string()), ("amount", pa.int64())])
        >>> Shapes.of(pa.schema([rows.field("key")]), Total, rows).outputs["main"].names
        ['key', 'amount']
    """

    keys: pa.Schema
    state: StateSchema
    outputs: dict[str, pa.Schema]
    collections: tuple[Collection, ...] = ()
    tracked: bool = False
    sketched: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, keys: pa.Schema, state: type[State], main: pa.Schema) -> Shapes:
        """Return the schemas of an operator that keeps one row a key, as a class of state has it, and hands out rows
        with the columns `main`."""
        from state_ops.schema.state_schema import StateSchema

        return cls(keys, StateSchema.of(state), {MAIN: main})

    @property
    def handed_out(self) -> Shapes:
        """These schemas with the main output as the operator hands it out."""
        if not self.tracked:
            return self
        import pyarrow as pa

        main = pa.schema([*self.outputs[MAIN], pa.field(ROW, pa.int64())])
        return replace(self, outputs={**self.outputs, MAIN: main})

    @property
    def with_stamps(self) -> Shapes:
        """These schemas with a time of the last touch in each row, as a stage with a TTL has already."""
        from state_ops.keyed.ttl import stamped

        collections = tuple(replace(collection, schema=stamped(collection.schema)) for collection in self.collections)
        return replace(self, state=stamped(self.state), collections=collections)


@dataclass(frozen=True, slots=True)
class Subtask:
    """One subtask of a stage in one epoch, as its operator is built for it.

    Attributes:
        stage: The stage.
        shapes: The stage's schemas.
        epoch: The epoch whose rows come.
        progress: The stage's event time.
        groups: The subtask's key groups; none, of a stage without a key.
        max_parallelism: The number of all key groups.
        state: Where it keeps its state; None, of a stage without a key.
        swept: Where its sweep of expired state goes on, as a key in hex; None: at the beginning.
        open_cache: Opens the cache of state that is used key by key; None: there is none.
        resident: Where tables of its rows come from and go to, and what does not fit into memory; None: nowhere.
        checkpoint: The checkpoint that its state will be part of: a later one than the epoch whose rows have waited.
        forgotten: What a TTL has let expire before this epoch.

    Example:
        >>> from weir import OperatorKind, Subtask
        >>> class Idle(OperatorKind):
        ...     def build(self, subtask: Subtask):
        ...         raise NotImplementedError(subtask.stage.uid)
        >>> Idle().kind
        'operator'
    """

    stage: Stage
    shapes: Shapes
    epoch: Epoch
    progress: Progress
    groups: range = range(0)
    max_parallelism: int = 0
    state: Backend | None = None
    swept: str | None = None
    open_cache: OpenCache | None = None
    resident: Residence | None = None
    checkpoint: CheckpointId | None = None
    forgotten: Forgotten | None = None

    @property
    def backend(self) -> Backend:
        """The state of a stage with a key."""
        assert self.state is not None, f"{self.stage.uid} has no key, so it keeps nothing"
        return self.state

    @property
    def by(self) -> list[str]:
        """The columns of its rows by which state is found: the key group and the key."""
        from state_ops.schema.descriptors import GROUP

        return [GROUP, *self.stage.key]

    def rows(self) -> RowStore:
        """Return the state as rows, one for each key: `get` and `put` them by the columns `by`."""
        from state_ops.rows.row_store import RowStore
        from state_ops.schema.descriptors import VALUE_STATE

        return RowStore(self.backend, self.shapes.state, self.shapes.keys, VALUE_STATE, self.resident)

    @property
    def residence(self) -> Residence:
        """The place of tables of a keyed stage's rows."""
        assert self.resident is not None, f"{self.stage.uid} has no key, so it keeps nothing"
        return self.resident


class Operator(Protocol):
    """The part of an operator that works on the rows of one subtask in one epoch: docs/how-to/operators.md has one.

    Attributes:
        rows_late: How many rows were late.
        rows_deferred: How many of its rows it can only apply once it has seen all of them.
        closed_upto: The newest end of a window that has closed.
        due: The processing time in microseconds at which it has something to do without rows; None: there is none.
        swept: As of `Subtask`, for the next epoch.
        has_timers: Whether timers are set when the epoch ends; None: it has none to set.

    Example:
        >>> from weir import Operator
        >>> sorted(name for name in vars(Operator) if name in ("process", "barrier", "pause"))
        ['barrier', 'pause', 'process']
    """

    rows_late: int
    rows_deferred: int
    closed_upto: int | None
    due: int | None
    swept: str | None
    has_timers: bool | None

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        """Apply one batch: canonical columns plus the key group; yields (output name, rows)."""
        ...

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        """Yield what is due once the epoch's rows have all been applied. Once more without rows, it does
        nothing."""
        ...

    def pause(self) -> Iterator[tuple[str, pa.Table]]:
        """Stop after a part of the epoch's rows, the others come in a later one: write to state all that will not be
        looked at again. Yields rows, those of its input too that it cannot apply yet, as the output
        `REST`."""
        ...


@dataclass(frozen=True, slots=True)
class TableBeside:
    """A table beside a stage's rows.

    Attributes:
        place: A Delta table's directory or URI, or one of a file that ends with .parquet.
        keys: The table's key columns.
        columns: The columns of it that are handed out; None: all that it has when it is first looked at.
        on_lost: What to do about a version that is gone: "fail", or "newest".
    """

    place: str
    keys: tuple[str, ...]
    columns: tuple[str, ...] | None
    on_lost: str


class OperatorKind:
    """The definition of an operator: a frozen dataclass that derives from this one.

    `shapes` and `build` are what every operator has. Everything else has an answer here, that of an operator which
    keeps a row of state per key, acts on rows alone, and whose rows are none of its input's. A class says what differs.

    Attributes:
        kind: What it is called where errors name a stage: "window", say.
        rules: What its meaning is called in `weir plan`: "its windows were ..., are ...".
        slot: Its place in the fingerprint of a stage, which earlier releases have recorded.
        sooner: What a shorter lateness means for rows, in words.
        longer: What a longer one means.

    Example:
        >>> from weir import agg, aggregate, files
        >>> totals = aggregate("totals", files("{landing}/*.parquet"), key="k", n=agg.count())
        >>> totals.operator.meaning()
        {'aggregates': [['n', 'count', None]]}
    """

    kind: ClassVar[str] = "operator"
    rules: ClassVar[str] = "rules"
    slot: ClassVar[str] = "operator"
    sooner: ClassVar[str] = "what waits for it waits that much less, and rows that are older are late from then on"
    longer: ClassVar[str] = "what waits for it waits that much longer, and rows that are older than it stay late"

    # -- what runs

    def shapes(self, stage: Stage, rows: pa.Schema, keys: pa.Schema) -> Shapes:
        """Return a stage's schemas.

        Args:
            rows: The columns of its input; of several inputs, as `operators.sides` lays them out.
            keys: The key columns of these.

        Raises:
            PipelineError: The rows do not fit.
        """
        raise NotImplementedError

    def build(self, subtask: Subtask) -> Operator:
        """Return what runs on one subtask in one epoch."""
        raise NotImplementedError

    def given_to_polars(self, stage: Stage, rows: pa.Schema) -> Iterable[str]:
        """Return the columns of the input that Polars works on, so that their types must be Polars' too."""
        return stage.order_by

    def selected_by_polars(self, stage: Stage, rows: pa.Schema) -> Iterable[str]:
        """Return the columns of the input that Polars selects by name, so that none may look like a pattern."""
        return stage.key

    # -- the author's code

    @property
    def function(self) -> Callable[..., Any] | None:
        """The author's function; None: the operator has none."""
        return None

    @property
    def on_timer(self) -> Callable[..., Any] | None:
        """The author's function for timers that fire."""
        return None

    def wrapped(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Self:
        """Return the same operator with its author's functions inside of others."""
        return self

    # -- state

    @property
    def needs_key(self) -> bool:
        """True if it can do nothing without a key."""
        return True

    @property
    def has_state(self) -> bool:
        """True if a stage with a key keeps anything from row to row."""
        return True

    @property
    def state(self) -> type[State] | None:
        """The author's class of state."""
        return None

    @property
    def lifetime(self) -> Ttl | None:
        """The time after which state is forgotten that was not touched; None: never."""
        return None

    @property
    def per_key(self) -> bool:
        """True if the author's functions are called key by key, so that a cache of open state helps."""
        return False

    @property
    def forgets(self) -> int | None:
        """The microseconds after which keys or rows are forgotten; None: never, or by another rule."""
        return None

    @property
    def indexes_keys(self) -> bool:
        """True if state has an index of keys by the moment at which they are forgotten (`operators.deduplication`)."""
        return False

    @property
    def is_arrival_in_state(self) -> bool:
        """True if what state has depends on the order in which rows came, as numbers of rows do."""
        return False

    def meaning(self) -> dict[str, Any] | None:
        """Return the meaning of stored state, as checkpoints record it; None: its schema says all.

        State of another meaning, such as another window size or aggregate, must not be merged into it. A class adds
        what its state goes by to `OperatorKind.meaning(self)`, by which `recognizes` knows it.
        """
        return {"operator": self.kind}

    @classmethod
    def recognizes(cls, meaning: Mapping[str, Any]) -> bool:
        """Return whether a meaning in a checkpoint is one of this kind."""
        return meaning.get("operator") == cls.kind

    @classmethod
    def of_meaning(cls, meaning: Mapping[str, Any]) -> Self | None:
        """Return the operator that a checkpoint recorded, as far as reading its state needs it; None: its state is a
        row per key, which its schema says."""
        return None

    @classmethod
    def shown(cls, meaning: Mapping[str, Any]) -> str:
        """Return a meaning in words, for `weir plan`."""
        return ", ".join(f"{name} {value}" for name, value in meaning.items() if name != "operator")

    def changed(self, stage: Stage, recorded: OperatorStats, shapes: Shapes) -> Iterator[Finding]:
        """Yield what a change of the definition means beside the meaning of state and its schemas."""
        return iter(())

    # -- open state: what closes at a moment of event time

    @property
    def closes(self) -> bool:
        """True if state has windows or ranks, each of which closes at a moment of event time."""
        return False

    def opened(
        self, stage: Stage, keys: pa.Schema, state: StateSchema, backend: Backend, groups: range
    ) -> Iterator[pa.Table]:
        """Yield what is still open in some key groups, as people see it. Of an operator that `closes`."""
        raise NotImplementedError

    def opened_schema(self, stage: Stage, keys: pa.Schema, state: StateSchema) -> pa.Schema:
        """Return the columns of `opened`, whether or not anything is open."""
        raise NotImplementedError

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns of `opened` that tell two rows of one key apart."""
        return ()

    @property
    def is_opened_as_output(self) -> bool:
        """True if `opened` has the columns of the main output."""
        return False

    # -- time

    @property
    def time_column(self) -> str | None:
        """The column of the input that has its rows' event times; None: it goes by none, or by those of its source."""
        return None

    @property
    def by_clock(self) -> bool:
        """True if it goes by processing time, which all texts about the stage's event time then mean."""
        return False

    @property
    def lateness(self) -> int:
        """The microseconds that the stage's watermark stays behind the newest event time."""
        return 0

    @property
    def behind(self) -> int:
        """The microseconds that the event time of a row may be behind the watermark when the row is handed out."""
        return 0

    @property
    def goes_by_watermark(self) -> bool:
        """True if the watermark decides what leaves state, and which rows are late."""
        return self.closes

    @property
    def acts_on_rows_alone(self) -> bool:
        """True if time that passes without rows neither changes state nor lets rows out."""
        return False

    @property
    def late(self) -> Sink | None:
        """The sink of rows that come too late."""
        return None

    def times_in(self, output: str) -> tuple[str, ...] | None:
        """Return the columns of an output that may have its rows' event times, the best first; None: as the input."""
        return None

    # -- rows that are changes, and rows as a whole

    @property
    def hands_on(self) -> bool:
        """True if its rows are its input's rows, as its stage's SQL makes them."""
        return False

    def hands_out_changes(self, stage: Stage, output: str) -> bool:
        """Return whether rows of an output say by `_change_type` what became of a row, as far as the code tells."""
        return False

    def no_changes(self, stage: Stage, input: Input) -> str | None:
        """Return why it cannot read rows of an input that are changes; None: it can."""
        return "what it made of a row cannot be taken back"

    @property
    def takes_back(self) -> bool:
        """True if it takes rows that are taken back out of what it has counted."""
        return False

    def remembered(self, stage: Stage, recorded: OperatorStats, changes: bool) -> frozenset[str] | None:
        """Return the columns of changes that state remembers; "*" among them: all; None: it remembers none.

        Args:
            recorded: The stage in a checkpoint.
            changes: Whether the stage reads changes, by today's definition.
        """
        return None

    @property
    def moments_of_changes(self) -> frozenset[str]:
        """The columns of its output that say when a change was, and are no part of the row."""
        return frozenset()

    def mixes_rows(self) -> str | None:
        """Return why its rows cannot be traced to one row of its source; None: they can."""
        return None

    @property
    def goes_by_epochs(self) -> bool:
        """True if its rows depend on how the input is cut into epochs, as the author has said."""
        return False

    @property
    def keeps_null_keys(self) -> bool:
        """True if rows without a key are rows like others."""
        return False

    @property
    def suffix(self) -> str | None:
        """The end of the names of another input's columns that the first one has too."""
        return None

    @property
    def tells_inputs_apart(self) -> bool:
        """True if state or rows depend on which of several inputs is which."""
        return False

    @property
    def inputs_handed_out(self) -> int | None:
        """The number of its inputs, the first ones, whose rows it hands out; None: all of them."""
        return None

    def reads(self, stage: Stage) -> frozenset[str] | None:
        """Return the columns that it looks at of its source's rows; None: all."""
        return None

    @property
    def aggregates(self) -> tuple[tuple[str, Agg], ...]:
        """The aggregates among its columns, by name."""
        return ()

    def rows_duplicate(self, acks: Iterable[Ack]) -> int:
        """Return how many rows it dropped as duplicates."""
        return 0

    # -- replays

    def clocked_state(self, stage: Stage) -> tuple[str, ...]:
        """Return the fields of state that say when it was processed, by the epoch's clock: they differ wherever the
        same rows are read again. A part of what lists hold is called LIST.PART."""
        return ()

    def clocked_output(self, stage: Stage) -> tuple[str, ...]:
        """Return the columns of its rows that say in which epoch they were handed out, or when."""
        return ()

    @property
    def newest_by(self) -> str | None:
        """The column by which the last of a key's rows is found, if that one alone counts; None: each row counts."""
        return None

    def span(self, row: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
        """Return the column of the input, and from when to when it lies in the input rows that made a row; None: the
        row does not tell."""
        return None

    def as_it_came(self, stage: Stage, late: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
        """Return which input a late row came from, and the row in that input's columns; None: it is as it came."""
        return None

    # -- a table beside the rows

    @property
    def beside(self) -> TableBeside | None:
        """The table that rows are joined with, as of the version that the plan of their epoch has."""
        return None

    def with_table(self, pinned: Any) -> Self:
        """Return the same operator with its table as of a version, a `Pinned` of weir.connectors.lookups."""
        raise NotImplementedError

    # -- for people

    def lineage(
        self, stage: Stage, columns: Sequence[str], inputs: Sequence[Sequence[str]], output: str
    ) -> dict[str, list[tuple[int, str]]]:
        """Return by column of an output the inputs' numbers and columns from which it is made.

        Args:
            columns: Of the output.
            inputs: Of each input, the columns that the operator sees; of the table beside the rows, the last of all.
        """
        origins: dict[str, list[tuple[int, str]]] = {}
        for side, names in enumerate(inputs[: len(stage.inputs)]):
            for name in columns:
                if name in names:
                    origins.setdefault(name, []).append((side, name))
        return origins

    def texts(self) -> dict[str, str]:
        """Return by column of its main output what it is, in words."""
        return {}
