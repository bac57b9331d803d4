"""The sections of the settings: every key with its default, its limits, what it means and what to choose."""

from __future__ import annotations

import os
import re
from datetime import date
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from state_ops.errors import ConfigurationError
from state_ops.redaction import redacted, remember_value, remember_variable
from state_ops.s3_options import S3Defaults

# A name, and no key's id that was put there by mistake.
_VARIABLE = re.compile(r"(?!A[KS]IA[A-Z0-9]{16}$)[A-Z_][A-Z0-9_]{0,99}")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def _advice(text: str) -> dict[str, JsonValue]:
    """Return the advice on a key's value, for the reference page.

    The advice on checkpoints and caches is the experience of Flink's users.
    """
    return {"advice": text}


# Options of clients that are secrets, beside those whose name redaction knows.
_SECRET_OPTION = re.compile(
    r"user\.info$|jaas\.config$|(?:^|\.)(?:ssl\.)?key(?:store)?\.pem$|^scram_(?:client|server)_key$|^pass(?:wd)?$",
    re.IGNORECASE,
)
_VALUE = "a-value-0123"  # that nothing but its name makes a secret


class SecretReference(Section):
    """The place of a secret: the name of an environment variable. The secret itself never stands in settings."""

    env: str = Field(description="Name of the environment variable.")

    @model_validator(mode="before")
    @classmethod
    def _is_reference(cls, value: Any) -> Any:
        # Checked before pydantic looks, whose own messages repeat what they refuse.
        if isinstance(value, cls):
            return value
        name = value.get("env") if isinstance(value, dict) and len(value) == 1 else None
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise ValueError(
                "must be a reference to an environment variable, {env: NAME} in capitals; the secret itself never "
                "stands in a configuration"
            )
        return value

    def secret(self, where: str) -> str:
        """Return the value of the variable, and redact it from now on. Raises ConfigurationError.

        Args:
            where: The settings key, for the error.
        """
        remember_variable(self.env)
        value = os.environ.get(self.env)
        if not value:
            raise ConfigurationError(
                f"The environment variable {self.env} is not set in this process.",
                where=where,
                next="Set it where this runs; on a cluster that is each executor's environment too.",
            )
        return value


class S3Settings(Section):
    """S3 and stores that speak its protocol, for everything that opens them: Weir itself, delta-rs, pyarrow, Spark."""

    endpoint: str | None = Field(None, description="URL of the service; not set: AWS's own for the region.")
    region: str | None = Field(None, description="Region; not set: what AWS_REGION says, else us-east-1.")
    access_key_id: SecretReference | None = Field(
        None, description="`{env: NAME}`: the variable with the key's id; not set: each library's own credential chain."
    )
    secret_access_key: SecretReference | None = Field(None, description="`{env: NAME}`: the variable with the secret.")
    session_token: SecretReference | None = Field(
        None, description="`{env: NAME}`: the token of temporary credentials."
    )
    allow_http: bool = Field(False, description="Allow an endpoint without TLS.")
    connect_timeout_seconds: float = Field(
        S3Defaults.connect_timeout_seconds, gt=0, le=600, description="Longest wait for a connection."
    )
    request_timeout_seconds: float = Field(
        S3Defaults.request_timeout_seconds,
        gt=0,
        le=3600,
        description="Longest silence within one request (of at most 8 MiB to send).",
    )
    max_attempts: int = Field(
        S3Defaults.max_attempts, ge=1, le=20, description="Tries of a request that is throttled or times out."
    )
    transfers: int = Field(S3Defaults.transfers, ge=1, le=64, description="Files that one subtask transfers at a time.")

    @model_validator(mode="before")
    @classmethod
    def _is_block(cls, value: Any) -> Any:
        if not isinstance(value, (dict, cls)):
            raise ValueError("must be a mapping, such as {region: eu-central-1}")
        if isinstance(value, dict) and "@" in str(value.get("endpoint")):
            raise ValueError("endpoint must not hold credentials: use access_key_id and secret_access_key")
        return value

    @model_validator(mode="after")
    def _whole(self) -> S3Settings:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key go together")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token needs access_key_id and secret_access_key")
        if self.endpoint and self.endpoint.startswith("http://") and not self.allow_http:
            raise ValueError("endpoint has no TLS: write https://, or set allow_http: true")
        return self


class StorageSettings(Section):
    """The place of everything durable."""

    root: str = Field(
        ".weir/storage", min_length=1, description="Directory or URI; registry, state and tables of every pipeline."
    )
    s3: S3Settings = Field(S3Settings(), description="How s3:// is reached, for the root and for sources.")

    @model_validator(mode="before")
    @classmethod
    def _no_secret_in_root(cls, value: Any) -> Any:
        if not isinstance(value, (dict, cls)):
            raise ValueError("must be a mapping, such as {root: s3://bucket/prefix}")
        root = value.get("root") if isinstance(value, dict) else None
        if isinstance(root, str) and "://" in root and ("@" in root or "?" in root):
            raise ValueError("root must be a plain URI such as s3://bucket/prefix: keys and options go to storage.s3")
        return value


class LocalSettings(Section):
    """Directories on each machine; everything in them can be lost at any time."""

    work_dir: str = Field(
        ".weir/work",
        min_length=1,
        description="Working copies of state; a fast local disk. Without hard links each epoch copies its state.",
    )
    cache_dir: str = Field(".weir/cache", min_length=1, description="Fetched jars and the like.")
    objects_mb: int = Field(
        4096,
        ge=0,
        description=(
            "Fetched state files in MiB that each host keeps below `local.work_dir`, for the next restore, rescale or"
            " look into a checkpoint; 0: none."
        ),
        json_schema_extra=_advice(
            "What a host's share of the state takes, if the disk has it: a restore then fetches only what is new. They"
            " are hard links of what is in use anyway, so the room is only taken for what no state uses any more."
        ),
    )


class CheckpointSettings(Section):
    """The moments at which epochs are cut, and the number of checkpoints that stay."""

    interval_seconds: float = Field(
        60,
        gt=0,
        description="A run cuts a barrier this often when data is waiting; in Dagster the sensor asks for one sooner.",
        json_schema_extra=_advice(
            "1 to 10 minutes. Longer leaves more to replay after a failure, and rows reach the tables later; much"
            " shorter pays for requests and small files although little has changed. Below a minute only where readers"
            " wait for the rows."
        ),
    )
    min_pause_seconds: float = Field(
        0,
        ge=0,
        description="Least time between two checkpoints of an idle pipeline.",
        json_schema_extra=_advice(
            "0 while checkpoints are short beside the interval. Where large state makes them take most of it, a pause"
            " of a tenth to a half of the interval leaves time for the work between them, so that they do not queue up."
            " It does not slow a run that catches up, and how many overlap is `max_concurrent`'s business."
        ),
    )
    timeout_seconds: float = Field(
        600,
        gt=0,
        description=(
            "An epoch that takes longer is aborted and replayed; the time in which state is fetched does not count."
        ),
        json_schema_extra=_advice(
            "Usually left at 10 minutes. At least the interval; at most the longest time between two checkpoints that"
            " you can bear. A replay takes as long again: if epochs exceed it without a fault, cut smaller slices first"
            " (`epoch`)."
        ),
    )
    tolerable_failures: int = Field(
        0,
        ge=0,
        description="Consecutive failed epochs that do not fail the run.",
        json_schema_extra=_advice(
            "0 while you develop, so that every failure is seen; 2 or so in production, where a store may be away for a"
            " moment. Errors that a replay would only repeat end the run at once, whatever it says."
        ),
    )
    max_concurrent: int = Field(
        2,
        ge=1,
        le=8,
        description=(
            "Epochs between their trigger and their commit, beside which three more may be publishing or pruning, or"
            " wait for that; with 1 nothing overlaps."
        ),
        json_schema_extra=_advice(
            "2: the upload of one epoch beside the work of the next. 3 or 4 where upload and commit together take"
            " longer than an epoch's work, as on a store that answers after 50 ms; rows that land then wait a little"
            " longer. More hides no more: a store that is too slow for the rate stays so, and a failure replays all"
            " that are under way."
        ),
    )
    max_pending_mb: int = Field(
        2048,
        ge=1,
        description=(
            "Bytes in MiB that wait on the coordinator's disk: to be uploaded, or as rows for a stage that has not"
            " applied them; above it only the oldest epoch goes on."
        ),
        json_schema_extra=_advice(
            "What the disk below `local.work_dir` can spare, and at least what the largest epoch uploads (`weir"
            " checkpoints`: its new bytes) and hands from stage to stage. A full checkpoint, or one after a large"
            " merge, uploads up to the whole state."
        ),
    )
    alignment_timeout_seconds: float | None = Field(
        None,
        ge=0,
        description=(
            "Unaligned checkpoints: how long a stage that reads another one applies rows before the checkpoint goes on"
            " without it; what it has not applied becomes part of the checkpoint and comes first in the next. null:"
            " aligned, a checkpoint waits until every stage has applied all."
        ),
        json_schema_extra=_advice(
            "null while every stage keeps up: aligned checkpoints are smaller and simpler. A few seconds where one"
            " stage is now and then much slower than the others, so that checkpoints of the others do not wait for it."
            " 0 stops after each batch. It makes no stage faster: what waits is read and written once more."
        ),
    )
    max_waiting_epochs: int = Field(
        2,
        ge=1,
        description="Unaligned checkpoints: with rows of so many epochs in front of a stage, no further slice is read.",
        json_schema_extra=_advice(
            "2: the stage always has work, and little waits. More evens out longer bursts, and makes checkpoints larger"
            " by what waits."
        ),
    )
    num_retained: int = Field(
        1,
        ge=1,
        description="Completed checkpoints to keep, besides savepoints.",
        json_schema_extra=_advice(
            "1 is enough to recover; 3 in production, so that there is something to go back to when the newest turns"
            " out bad. More lets you run a longer past again, and costs storage alone. For a release, take a savepoint."
        ),
    )
    on_cancel: Literal["retain", "delete"] = Field(
        "retain",
        description="What `weir cancel` does with the checkpoints that have no name.",
        json_schema_extra=_advice(
            "`retain`: after a change of the logic you may want to start from one of them. Clean up by hand then, all"
            " the more with many retained ones (`weir prune`, `weir cancel --delete`): nothing else frees their"
            " storage. `delete` for what is made again anyway."
        ),
    )
    mode: Literal["incremental", "full"] = Field(
        "incremental",
        description=(
            "incremental: upload only new state files and re-reference the rest; full: upload all of them, so that a"
            " checkpoint depends on no other. Restore works from either, and it can be changed between runs."
        ),
        json_schema_extra=_advice(
            "`incremental`; the larger the state and the less of it changes, the more it saves. `full` for small state"
            " whose checkpoints are copied away or kept for long, one by one."
        ),
    )


class RestoreSettings(Section):
    """The treatment of the newest checkpoint before a run goes on from it."""

    on_invalid: Literal["fail", "rewind"] = Field(
        "fail",
        description=(
            "When a file of the newest checkpoint is missing or altered: fail, and say which and what can be done; or"
            " rewind to the newest one that is whole, with a warning and a row in registry/restores. Never silently."
        ),
        json_schema_extra=_advice(
            "`fail` where somebody can look: state that was lost says that something is wrong with the storage."
            " `rewind` where running on unattended matters more, and the input that is read again is still there; it"
            " needs `checkpoints.num_retained` of 2 or more, better 3."
        ),
    )
    recovery_time_objective_seconds: float | None = Field(
        600,
        gt=0,
        description=(
            "How long recovery may take on a host that has nothing: the restore, and the first epoch. A drill that"
            " takes longer fails its check. null: not judged."
        ),
        json_schema_extra=_advice(
            "What those who read the tables can bear. Look at what `weir drill` measures, and leave room for a state"
            " that grows."
        ),
    )
    recovery_point_objective_seconds: float | None = Field(
        3600,
        gt=0,
        description=(
            "How long a file may have waited without being in a checkpoint: what would be lost with the source. A drill"
            " that finds an older one fails its check; rows of connectors do not say since when they wait. null: not"
            " judged."
        ),
        json_schema_extra=_advice(
            "null where the source keeps its input anyway: a restore reads it again, and nothing is lost."
        ),
    )


class EpochSettings(Section):
    """Slice limits: a barrier falls where one is reached."""

    max_files: int = Field(
        100,
        ge=1,
        description="Files of one source in one epoch.",
        json_schema_extra=_advice(
            "Above what lands in an interval: the limits are for catching up. Raise it for many tiny files, whose"
            " footers cost more than their rows."
        ),
    )
    max_rows: int = Field(
        5_000_000,
        ge=1,
        description="Rows of one source in one epoch; at least one file is taken.",
        json_schema_extra=_advice(
            "So many that an epoch ends well within `checkpoints.timeout_seconds`: a slice that is too large is"
            " aborted, and replayed just as large. Smaller slices mean less to replay and less lag; larger ones spread"
            " an epoch's fixed cost over more rows."
        ),
    )
    max_bytes: int = Field(
        1 << 30,
        ge=1,
        description="Bytes of one source in one epoch; at least one file is taken.",
        json_schema_extra=_advice(
            "For wide rows, where a number of rows says little; otherwise let `max_rows` decide."
        ),
    )


class RunSettings(Section):
    """The length of one run of the coordinator."""

    max_run_seconds: float = Field(
        3600,
        gt=0,
        description=(
            "A run started by Dagster ends at the first barrier after this time, so that the next one runs the code"
            " deployed then."
        ),
    )
    linger_seconds: float = Field(30, ge=0, description="A caught-up run started by Dagster waits this long for more.")
    poll_seconds: float = Field(0.5, gt=0, le=60, description="How often an idle coordinator looks for work.")


class LeaseSettings(Section):
    """The sign by which others see that a coordinator lives."""

    heartbeat_seconds: float = Field(5, gt=0, le=60, description="A coordinator silent for three of these is dead.")


class SparkSettings(Section):
    """The Spark session, and the parallelism of keyed stages."""

    master: str = Field(
        "local[2]",
        description=(
            "Spark master URL: local[N], spark://, yarn, k8s://, or sc:// for Spark Connect; docs/how-to/clusters.md."
        ),
    )
    python: str | None = Field(
        None,
        min_length=1,
        description=(
            "Python that runs the stages on the workers: its path there, or a name on their PATH. null: the variable"
            " PYSPARK_PYTHON; without it, the run's own Python on a local master, and python3 on any other. A Spark"
            " Connect server decides by itself."
        ),
        json_schema_extra=_advice(
            "Left at null on one machine. On a cluster, the Python whose packages are those of requirements.lock; its"
            " minor version is the run's own."
        ),
    )
    parallelism: int = Field(2, ge=1, le=32768, description="Subtasks of every keyed stage.")
    batch_rows: int = Field(65_536, ge=1, description="Largest Arrow batch that a stage function gets, in rows.")
    direct_read_mb: int = Field(
        32,
        ge=0,
        description=(
            "Slices of up to so many MiB of files are read by every subtask itself, each for its own keys, instead of"
            " through Spark's shuffle: where there are at most 8 subtasks, no transform=, no SQL that Spark alone"
            " can evaluate, columns of plain types, and files on disks or S3. 0: none."
        ),
        json_schema_extra=_advice("Left at 32; `exchange` says what becomes of larger ones."),
    )
    exchange: Literal["auto", "blocks", "rows"] = Field(
        "auto",
        description=(
            "How rows that subtasks do not read by themselves reach them: in blocks of columns, or as rows of Spark's"
            " shuffle. auto: blocks, but for wide rows, and of those that Spark has to transform only narrow ones."
        ),
        json_schema_extra=_advice("Left at auto, which takes what costs less; `rows` also lets Spark sort."),
    )
    second_hop: Literal["auto", "on", "off"] = Field(
        "auto",
        description=(
            "On a classic master of several hosts, whether blocks of columns go through storage instead of Spark's"
            " shuffle, so that a subtask reads its own where its state is. auto: where the state that would move is"
            " larger than twice the rows' files and 128 KiB for each request; on: whenever rows are not read directly"
            " and `exchange` is not rows."
        ),
        json_schema_extra=_advice("Left at auto. on: for a directory that all hosts share, where requests are free."),
    )
    driver_memory: str = Field("2g", pattern=r"^\d+[kmgt]$", description="Heap of the driver's JVM.")
    conf: dict[str, str] = Field(default_factory=dict, description="Further Spark properties, as they are.")


class CacheSettings(Section):
    """A state cache of one subtask, above its backend; docs/how-to/per-key.md helps to choose."""

    l1: int = Field(
        ge=1,
        description="Entries that are written back at the barrier, or when others push them out.",
        json_schema_extra=_advice(
            "One layer: the keys that are active between two barriers. With a second layer a tenth of that, for the"
            " barrier waits for the flush of what is dirty in `l1`, and of nothing in `l2`."
        ),
    )
    l2: int = Field(
        0,
        ge=0,
        description="Entries of the second layer, which are written when they enter it; 0: one layer.",
        json_schema_extra=_advice(
            "Ten times `l1` and more, as far as memory goes: size shortens no barrier here. In a production of large"
            " values and sessions, 2,000 + 23,000 in place of 20,000 in one layer took 61 % off the highest latency and"
            " 78 % off the average sync phase, for checkpoints 25 % larger. 0 where values are cheap to encode or"
            " barriers may wait: a second layer writes an entry more often."
        ),
    )


class StateSettings(Section):
    """The backend and memory of keyed stages' state; docs/reference/backends.md helps to choose."""

    backend: str = Field(
        "rocksdb",
        description=(
            "rocksdb: state of any size, on disk; filesystem: in memory, a file per subtask and checkpoint; memory: the"
            " same up to a limit; the name of an installed backend, or `package.module:factory`."
        ),
        json_schema_extra=_advice(
            "`rocksdb`, the only one for state beyond memory and for incremental checkpoints. `filesystem` for state"
            " that surely fits and is mostly rewritten each epoch. `memory` to debug and to try things, not in"
            " production."
        ),
    )
    memory_mb: int = Field(
        128,
        ge=16,
        description=(
            "Memory of a worker process for RocksDB in MiB, shared by all its databases: block cache with index and"
            " filters, memtables, merges, open files."
        ),
        json_schema_extra=_advice(
            "What the machine can spare for each worker process. More where the keys of an epoch are read from all over"
            " a large state."
        ),
    )
    lookup_mb: int = Field(
        512,
        ge=1,
        description=(
            "What the tables of `lookup` may take in the memory of a worker process, in MiB. A table, or the part of it"
            " that belongs to a subtask, has to fit."
        ),
    )
    resident_mb: int = Field(
        64,
        ge=0,
        description=(
            "Rows of a subtask's state in MiB that are kept beside its local snapshot as one mapped table, where an"
            " epoch touches a good part of them: found ten times faster than in RocksDB. 0 keeps none."
        ),
        json_schema_extra=_advice(
            "Above the size of a subtask's rows where an epoch touches a tenth of them and more; 0 where it touches"
            " few, or memory is short."
        ),
    )
    warm_mb: int = Field(
        256,
        ge=0,
        description=(
            "Entries of state caches in MiB that a worker process keeps from one epoch to the next, of all its subtasks"
            " together; and states of asynchronous snapshots, likewise. 0 keeps none."
        ),
        json_schema_extra=_advice(
            "Above what the caches of the subtasks that one worker runs take, or they begin empty; less where memory is"
            " short. Without `caches` and `asynchronous_snapshots` nothing is kept."
        ),
    )
    asynchronous_snapshots: bool = Field(
        False,
        description=(
            "Whether `filesystem` and `memory`, and other backends that can, hold the state at the barrier"
            " (copy-on-write) and write it afterwards, in a thread of the worker, while the next stage and the next"
            " epoch run. A state that takes more than `warm_mb` in memory is written at the barrier, and so is one"
            " whose worker does not share the coordinator's disk."
        ),
        json_schema_extra=_advice(
            "Left off where all cores are busy: the thread takes turns with the epoch that runs beside it in the same"
            " process. On where barriers are to be short, the state is large, and cores are idle;"
            " docs/adr/0039-asynchronous-snapshots.md has figures."
        ),
    )
    compression: Literal["lz4", "zstd"] = Field(
        "lz4",
        description=(
            "How RocksDB packs the files that it writes from now on; those that there are stay as they are and are read"
            " all the same."
        ),
        json_schema_extra=_advice(
            "`lz4`, the faster one to read. `zstd` where the link to storage, or the storage itself, is what costs:"
            " checkpoints take 30 to 40 % fewer bytes, and reads of keys from all over a large state nearly twice the"
            " processor time."
        ),
    )
    max_state_size_mb: float = Field(
        5,
        gt=0,
        description="Keys and values in MiB that one subtask may have in the memory backend.",
        json_schema_extra=_advice("Left at 5: state that outgrows it belongs in another backend."),
    )
    options: dict[str, str] = Field(default_factory=dict, description="Given to a backend that is not Weir's own.")
    caches: dict[str, CacheSettings] = Field(
        default_factory=dict,
        description="By uid of a stage with a per-key function: its state cache. None by default.",
        json_schema_extra=_advice(
            "For per-key functions with many rows per key between two barriers, or with large values. Keep one only if"
            " its hit rate in `weir checkpoints --json` and the epoch's time say so."
        ),
    )


class GateSettings(BaseModel):
    """One expectation; every key that is not listed here is an argument of it."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    expect: str = Field(description="Great Expectations' class name, e.g. `ExpectColumnValuesToNotBeNull`.")
    on_failure: str = Field("hold", description="What a failure does: `hold`, `warn`, `quarantine`.")
    quarantine_at_most: float | None = Field(
        None, description="Share of a slice's rows that it may set aside; null: 0.1."
    )
    of: str = Field("rows", description="What it looks at: `rows`, `state`, `figures`.")

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class RestoreGateSettings(BaseModel):
    """One expectation of a restored checkpoint; every key that is not listed here is an argument of it."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    expect: str = Field(description="Great Expectations' class name.")
    on_failure: str = Field("hold", description="What a failure does: `hold`, `warn`.")
    state: str | None = Field(None, description="Uid of the stage whose state it looks at; or else")
    table: str | None = Field(None, description="the table whose newest rows it looks at.")

    @model_validator(mode="after")
    def _one_of(self) -> RestoreGateSettings:
        if (self.state is None) == (self.table is None):
            raise ValueError("name either a state or a table")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


_CRON = r"^(\S+\s+){4}\S+$"
_ENDPOINT = r"^https?://[^\s@]+$"


class PartitionSettings(Section):
    """Days or hours of event time, in UTC, as Dagster shows them of each table: which there are."""

    start: date = Field(description="The first day, in event time, e.g. 2026-01-01.")
    end: date | None = Field(
        None,
        description="The first day after the last one, where event times come to an end; null: they go on up to now.",
    )
    every: Literal["day", "hour"] = Field("day", description="What a partition is.")

    @model_validator(mode="after")
    def _end_after_start(self) -> PartitionSettings:
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"end ({self.end}) has to be after start ({self.start})")
        return self


class BackfillSettings(PartitionSettings):
    """Backfills of one pipeline by days or hours of event time: which there are, and what becomes of them."""

    keep: int = Field(
        4,
        ge=0,
        description=(
            "Of so many newest days (hours) of event time, the newest checkpoint before each is retained, to backfill"
            " from."
        ),
        json_schema_extra=_advice(
            "one more than `last`. A backfill from before the oldest retained checkpoint is refused; savepoints serve"
            " too."
        ),
    )
    replaces: Literal["since", "range"] = Field(
        "since",
        description=(
            "What a promotion replaces: state and all rows `since` the range began, or the rows of the `range` alone;"
            " state then stays."
        ),
    )
    promote: Literal["approval", "automatic"] = Field(
        "approval",
        description=(
            "Whether a replay that its gates let through waits for `weir promote` or the promote job, or is promoted at"
            " once."
        ),
    )
    cron: str | None = Field(
        None,
        pattern=_CRON,
        description="When the newest days are backfilled, in UTC, as cron says it. null: when asked to.",
    )
    last: int = Field(3, ge=1, description="How many days (hours) that is, up to the last full one.")


class PipelineSettings(Section):
    """One pipeline: where its code is, and the values of its placeholders."""

    object: str = Field(description="`module:attribute` of the Pipeline, e.g. pipelines.flights:pipeline.")
    params: dict[str, str] = Field(default_factory=dict, description="Values for {placeholders} in its sources.")
    epoch: EpochSettings | None = Field(
        None, description="Its own slice limits, key by key; what is not said here is as in `epoch`."
    )
    checkpoints: CheckpointSettings | None = Field(
        None, description="Its own checkpoints, key by key; what is not said here is as in `checkpoints`."
    )
    gates: dict[str, list[GateSettings]] = Field(
        default_factory=dict, description="By stage, gates beside those in the code; docs/how-to/gates.md."
    )
    on_restore: list[RestoreGateSettings] = Field(
        default_factory=list, description="What must hold of a restored checkpoint, beside what the code says."
    )
    partitions: PartitionSettings | None = Field(
        None,
        description="Days or hours of each table that Dagster shows once they are complete; null: none.",
    )
    backfill: BackfillSettings | None = Field(
        None,
        description=(
            "Backfills by days or hours of event time; null: none from Dagster, and no checkpoint is kept for them."
        ),
    )


class ConnectionSettings(Section):
    """The access to one server, for the sources and sinks that name it with `connection=`."""

    options: dict[str, str | int | float | bool | SecretReference] = Field(
        default_factory=dict,
        repr=False,
        description=(
            "The client library's own options, e.g. `sasl.username`; write what is secret as `{env: NAME}`. They are "
            "handed to the client as they are, and never recorded or shown. A secret that stands here itself is taken, "
            "and removed from every text that is shown."
        ),
    )

    @field_validator("options")
    @classmethod
    def _never_shown(
        cls, options: dict[str, str | int | float | bool | SecretReference]
    ) -> dict[str, str | int | float | bool | SecretReference]:
        for name, option in options.items():
            if not isinstance(option, str) or not option:
                continue
            by_name = _SECRET_OPTION.search(name) or _VALUE not in redacted(f'{name}="{_VALUE}"')
            if by_name or redacted(option) != option:
                remember_value(option)
        return options


class LoggingSettings(Section):
    """The form of log lines."""

    format: Literal["console", "json"] = Field(
        "console",
        description=(
            "console: for people; json: each line of each process is one JSON object: docs/how-to/monitoring.md."
        ),
    )


class TelemetrySettings(Section):
    """Traces of epochs by OpenTelemetry; needs the extra `otel`."""

    traces: bool = Field(
        False, description="Whether each epoch is sent as a trace, with a span for each phase, stage and subtask."
    )
    otlp_endpoint: str | None = Field(
        None,
        pattern=_ENDPOINT,
        description=(
            "Where a collector takes OTLP over HTTP, such as `http://collector:4318`, with or without `/v1/traces`."
            " null: as OTEL_EXPORTER_OTLP_ENDPOINT says, else `http://localhost:4318`. What is secret goes into"
            " OTEL_EXPORTER_OTLP_HEADERS."
        ),
    )

    @field_validator("otlp_endpoint", mode="before")
    @classmethod
    def _has_no_user(cls, value: object) -> object:
        # In words: redaction takes a part of the pattern for a user in a URL.
        if isinstance(value, str) and not re.fullmatch(_ENDPOINT, value):
            raise ValueError(
                "must be the address of a collector, such as http://collector:4318, without a user or a password"
            )
        return value


class DagsterSettings(Section):
    """Sensors, schedules, and how much of an epoch Dagster gets to see."""

    sensor_seconds: int = Field(
        10, ge=5, description="Seconds between the checkpoint sensor's ticks (Dagster's least is 5)."
    )
    max_lag_files: int = Field(
        0, ge=0, description="Backlog in files that a tick lets wait without asking for a barrier."
    )
    observe_seconds: float = Field(
        10,
        ge=0,
        description=(
            "Epochs that complete within this time of the last observation share the next one, and so do the"
            " materializations of the tables that they write to; stages are observed once a minute."
        ),
        json_schema_extra=_advice(
            "10: every epoch is seen one by one where they are rarer than that. Higher where Dagster's database is to"
            " grow less: with two stages an epoch that is shown takes 16 KB of its SQLite files, and each table 9 KB."
        ),
    )
    overdue_seconds: float = Field(
        900,
        gt=0,
        description="Input that has waited longer without a checkpoint turns the check `on_time` red.",
    )
    freshness_hours: float | None = Field(
        24,
        gt=0,
        description=(
            "A table is stale in Dagster when no epoch has written to it for so long, and the checkpoint when no run"
            " has ended; above `run.max_run_seconds`. null: no policy."
        ),
    )
    drill_cron: str | None = Field(
        "30 3 * * *",
        pattern=_CRON,
        description="When a restore drill runs, in UTC, as cron says it. null: never by itself.",
    )
    upkeep_cron: str | None = Field(
        "30 4 * * *",
        pattern=_CRON,
        description=(
            "When checkpoints are pruned and all storage is checked (`weir prune`, `weir fsck`). null: never by itself."
        ),
    )
    data_docs_cron: str | None = Field(
        None,
        pattern=_CRON,
        description="When Great Expectations' pages of all gates are made (`weir report`). null: when somebody asks.",
    )
