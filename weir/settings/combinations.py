"""Settings that are right by themselves and make no sense together. Each rule's docstring stands on the reference page.

What is only unusual is not refused: more epochs at a time beside a pause (the pause counts from the last begin or end,
so epochs overlap all the same), a linger as long as the run, one retained checkpoint that a cancel deletes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from weir.settings.configuration import Settings

OWN_BACKENDS = ("rocksdb", "filesystem", "memory")


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Settings that make no sense together.

    Attributes:
        keys: Paths of the settings that contradict each other.
        message: With their values, why, and what to do.
    """

    keys: tuple[str, ...]
    message: str


class ContradictionsError(ValueError):
    """All contradictions of one configuration."""

    def __init__(self, contradictions: list[Contradiction]) -> None:
        super().__init__("\n".join(contradiction.message for contradiction in contradictions))
        self.contradictions = contradictions


def min_pause_beyond_interval(settings: Settings) -> Iterator[Contradiction]:
    """`checkpoints.min_pause_seconds` above `checkpoints.interval_seconds`: the pause alone would decide."""
    pause, interval = settings.checkpoints.min_pause_seconds, settings.checkpoints.interval_seconds
    if pause > interval:
        yield Contradiction(
            ("checkpoints.min_pause_seconds", "checkpoints.interval_seconds"),
            f"checkpoints.min_pause_seconds ({pause:g}) is longer than checkpoints.interval_seconds ({interval:g}): no"
            f" barrier could keep the interval; set interval_seconds to {pause:g} or more, or shorten the pause",
        )


def timeout_within_interval(settings: Settings) -> Iterator[Contradiction]:
    """`checkpoints.timeout_seconds` below `checkpoints.interval_seconds`: an epoch would be aborted before anything
    waits for it."""
    timeout, interval = settings.checkpoints.timeout_seconds, settings.checkpoints.interval_seconds
    if timeout < interval:
        yield Contradiction(
            ("checkpoints.timeout_seconds", "checkpoints.interval_seconds"),
            f"checkpoints.timeout_seconds ({timeout:g}) is shorter than checkpoints.interval_seconds ({interval:g}): an"
            " epoch would be aborted, and replayed, before the next one is due; set timeout_seconds to"
            f" {interval:g} or more, or interval_seconds to {timeout:g} or less",
        )


def poll_beyond_interval(settings: Settings) -> Iterator[Contradiction]:
    """`run.poll_seconds` above `checkpoints.interval_seconds`: nobody would look when a barrier is due."""
    poll, interval = settings.run.poll_seconds, settings.checkpoints.interval_seconds
    if poll > interval:
        yield Contradiction(
            ("run.poll_seconds", "checkpoints.interval_seconds"),
            f"run.poll_seconds ({poll:g}) is longer than checkpoints.interval_seconds ({interval:g}): an idle"
            f" coordinator looks too seldom to keep the interval; set poll_seconds to {interval:g} or less, or lengthen"
            " the interval",
        )


def request_beyond_timeout(settings: Settings) -> Iterator[Contradiction]:
    """`storage.s3.request_timeout_seconds` on S3 not below `checkpoints.timeout_seconds`: no request could be tried
    again.
    """
    request, timeout = settings.storage.s3.request_timeout_seconds, settings.checkpoints.timeout_seconds
    if settings.storage.root.startswith(("s3://", "s3a://")) and request >= timeout:
        yield Contradiction(
            ("storage.s3.request_timeout_seconds", "checkpoints.timeout_seconds"),
            f"storage.s3.request_timeout_seconds ({request:g}) is not shorter than checkpoints.timeout_seconds"
            f" ({timeout:g}): a request that hangs would cost the epoch before it is tried again; shorten"
            " request_timeout_seconds to a fraction of the timeout",
        )


def second_layer_below_first(settings: Settings) -> Iterator[Contradiction]:
    """`l2` of a cache below its `l1`: the barrier waits for the flush of `l1`, which is what a second layer is there to
    shorten."""
    for uid, cache in settings.state.caches.items():
        if 0 < cache.l2 < cache.l1:
            keys = f"state.caches.{uid}.l2", f"state.caches.{uid}.l1"
            yield Contradiction(
                keys,
                f"{keys[0]} ({cache.l2}) is smaller than {keys[1]} ({cache.l1}): the barrier waits for the flush of all"
                " of l1, which a second layer is there to shorten; make l1 the small one, or leave l2 out",
            )


def alignment_beyond_timeout(settings: Settings) -> Iterator[Contradiction]:
    """`checkpoints.alignment_timeout_seconds` not below `checkpoints.timeout_seconds`: the epoch would be aborted
    before a stage stops."""
    alignment, timeout = settings.checkpoints.alignment_timeout_seconds, settings.checkpoints.timeout_seconds
    if alignment is not None and alignment >= timeout:
        yield Contradiction(
            ("checkpoints.alignment_timeout_seconds", "checkpoints.timeout_seconds"),
            f"checkpoints.alignment_timeout_seconds ({alignment:g}) is not shorter than checkpoints.timeout_seconds"
            f" ({timeout:g}): an epoch would be aborted before a slow stage stops; make it a few seconds, or null to"
            " align",
        )


def waiting_epochs_without_alignment(settings: Settings) -> Iterator[Contradiction]:
    """`checkpoints.max_waiting_epochs` without `checkpoints.alignment_timeout_seconds`: checkpoints would leave no rows
    in front of a stage."""
    checkpoints = settings.checkpoints
    if checkpoints.alignment_timeout_seconds is None and _is_changed(checkpoints, "max_waiting_epochs"):
        yield Contradiction(
            ("checkpoints.max_waiting_epochs", "checkpoints.alignment_timeout_seconds"),
            f"checkpoints.max_waiting_epochs ({checkpoints.max_waiting_epochs}) bounds what unaligned checkpoints leave"
            " in front of a stage, and checkpoints.alignment_timeout_seconds is null, so that every checkpoint is"
            " aligned; take it out, or set alignment_timeout_seconds to a few seconds",
        )


def limit_of_memory_backend(settings: Settings) -> Iterator[Contradiction]:
    """`state.max_state_size_mb` with `rocksdb` or `filesystem` as `state.backend`: of Weir's own backends, `memory`
    alone has a limit."""
    state = settings.state
    if state.backend in OWN_BACKENDS and state.backend != "memory" and _is_changed(state, "max_state_size_mb"):
        yield Contradiction(
            ("state.max_state_size_mb", "state.backend"),
            f"state.max_state_size_mb ({state.max_state_size_mb:g}) is the limit of the memory backend, and"
            f" state.backend is {state.backend!r}, which has none; take it out, or set state.backend to memory",
        )


def asynchronous_snapshots_of_rocksdb(settings: Settings) -> Iterator[Contradiction]:
    """`state.asynchronous_snapshots` with `rocksdb` as `state.backend`: its snapshots are hard links, which nothing
    waits for."""
    state = settings.state
    if state.asynchronous_snapshots and state.backend == "rocksdb":
        yield Contradiction(
            ("state.asynchronous_snapshots", "state.backend"),
            "state.asynchronous_snapshots is for backends that keep state in memory, and state.backend is 'rocksdb',"
            " whose snapshots are hard links: what is slow, the upload, goes on after the barrier anyway; take it out",
        )


def asynchronous_snapshots_in_memory(settings: Settings) -> Iterator[Contradiction]:
    """`state.asynchronous_snapshots` with `state.warm_mb` of 0, or with `spark.python.worker.reuse` or
    `spark.python.use.daemon` false: nothing could outlive its task."""
    if not settings.state.asynchronous_snapshots:
        return
    if settings.state.warm_mb == 0:
        yield Contradiction(
            ("state.asynchronous_snapshots", "state.warm_mb"),
            "state.asynchronous_snapshots holds states of up to state.warm_mb in memory, and state.warm_mb is 0; raise"
            " it, or write snapshots at the barrier (false)",
        )
    for name in ("spark.python.worker.reuse", "spark.python.use.daemon"):
        if settings.spark.conf.get(name, "true").strip().lower() == "false":
            yield Contradiction(
                ("state.asynchronous_snapshots", "spark.conf"),
                f"state.asynchronous_snapshots lets a worker's process write after its task, and {name} is false in"
                " spark.conf, which ends the process with the task; take one of them out",
            )


def options_of_own_backend(settings: Settings) -> Iterator[Contradiction]:
    """`state.options` with one of Weir's own backends as `state.backend`: nobody would read them."""
    backend, options = settings.state.backend, settings.state.options
    if options and backend in OWN_BACKENDS:
        yield Contradiction(
            ("state.options", "state.backend"),
            f"state.options ({', '.join(sorted(options))}) are for backends that are not Weir's own, and state.backend"
            f" is {backend!r}, which reads none of them; take them out, or name the backend that they are for",
        )


def rewind_without_earlier(settings: Settings) -> Iterator[Contradiction]:
    """`restore.on_invalid: rewind` with `checkpoints.num_retained` of 1: there would be nothing to go back to."""
    if settings.restore.on_invalid == "rewind" and settings.checkpoints.num_retained < 2:
        yield Contradiction(
            ("restore.on_invalid", "checkpoints.num_retained"),
            "restore.on_invalid (rewind) goes back to an earlier checkpoint, and checkpoints.num_retained (1) keeps"
            " none; set num_retained to 2 or more, better 3, or on_invalid to fail",
        )


def stale_within_a_run(settings: Settings) -> Iterator[Contradiction]:
    """`dagster.freshness_hours` not above `run.max_run_seconds`: assets would be stale while a run that does well goes
    on."""
    hours, seconds = settings.dagster.freshness_hours, settings.run.max_run_seconds
    if hours is not None and hours * 3600 <= seconds:
        yield Contradiction(
            ("dagster.freshness_hours", "run.max_run_seconds"),
            f"dagster.freshness_hours ({hours:g}) is not longer than run.max_run_seconds ({seconds:g}): assets are"
            " materialized when a run ends, so they would be stale while one goes on; lengthen it, shorten the run, or"
            " say null",
        )


def _is_changed(section: BaseModel, key: str) -> bool:
    """Return whether a setting differs from its default.

    A setting that is written down with its default is not refused.
    """
    return bool(getattr(section, key) != type(section).model_fields[key].default)


RULES: tuple[Callable[[Settings], Iterator[Contradiction]], ...] = (
    min_pause_beyond_interval,
    timeout_within_interval,
    poll_beyond_interval,
    request_beyond_timeout,
    second_layer_below_first,
    alignment_beyond_timeout,
    waiting_epochs_without_alignment,
    limit_of_memory_backend,
    asynchronous_snapshots_of_rocksdb,
    asynchronous_snapshots_in_memory,
    options_of_own_backend,
    rewind_without_earlier,
    stale_within_a_run,
)


def contradictions(settings: Settings) -> list[Contradiction]:
    """Return the contradictions between settings, in the order of the rules."""
    return [contradiction for rule in RULES for contradiction in rule(settings)]
