"""`make demo`: a year of real flights through the flights pipeline, with Dagster's sensor asking for the epochs.

    days prepared -> 350 land -> sensor asks for a run -> 35 epochs -> 5 land -> sensor asks for a barrier -> ... ->
    summary

It picks up where an earlier one was, also one that was interrupted. `--clean` removes all that it made.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import polars as pl
import pyarrow.compute as pc
import pyarrow.dataset as ds
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infra import flights_input
from pipelines.flights import aircraft_rotation, pipeline
from state_ops.coordination import lease, requests, suspension
from state_ops.coordination.requests import Request
from state_ops.errors import BusyError, DamageError, TransientError, WeirError
from state_ops.records.checkpoint import Checkpoint
from weir.connectors.delta.table_commit import table_path
from weir.dagster.names import REASON
from weir.inspection import state_reader
from weir.local import dagster_home
from weir.local.patience import SILENCE_SECONDS, Patience, doing, processor_seconds
from weir.ownership import backlog
from weir.run import progress
from weir.run import run as runtime
from weir.settings.configuration import PROJECT, Settings, load

if TYPE_CHECKING:
    from dagster import DagsterInstance, DagsterRun

DEMO = PROJECT / ".weir" / "demo"
DAYS, LOG = DEMO / "days", DEMO / "dagster.log"

FIRST, MORE, TIMES = 350, 5, 2
_POLL_SECONDS = 0.3

out = Console(highlight=False, emoji=False, soft_wrap=True)


@dataclass
class Watch:
    """Prints each checkpoint as it appears in the registry. Pruning may be faster than we look, which is said."""

    settings: Settings
    last: int = 0
    shown: list[Checkpoint] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.storage, self.registry = runtime.open_storage(pipeline, self.settings)
        head = self.registry.head()
        self.last = head.id if head else 0

    def look(self) -> bool:
        """Return whether there was something new."""
        fresh = [row for row in self.registry.checkpoints() if row.id > self.last]
        for row in fresh:
            if self.shown and row.parent_id != self.shown[-1].id:
                out.print("    ... more epochs, pruned before they could be shown")
            out.print("  " + _line(row))
            self.shown.append(row)
            self.last = row.id
        return bool(fresh)

    def signs(self, holder: lease.Lease | None) -> tuple[object, ...]:
        """Return what changes only as a run gets on: which run it is, its newest epoch, and Spark's log."""
        log = self.settings.work_dir / "spark.log"
        logged = log.stat().st_size if log.exists() else 0
        return (holder and (holder.process, holder.generation, holder.last_id, holder.stopped), logged)

    def waiting(self) -> int:
        return sum(backlog.lag(pipeline, self.settings, self.registry.head()).values())


def main(clean: Annotated[bool, typer.Option("--clean", help="Remove what the demo made.")] = False) -> None:
    """Run the flights pipeline on real data, driven by Dagster."""
    os.environ["WEIR_ENV"] = "demo"
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore the first
        signal.signal(number, _interrupt)
    try:
        _clean() if clean else _demo()
    except KeyboardInterrupt:
        out.print("Interrupted. Everything committed stays; `make demo` picks up there.")
        raise typer.Exit(130) from None
    except WeirError as error:
        out.print(f"[bold red]error:[/] {escape(str(error))}")
        raise typer.Exit(error.exit_code) from None


def _demo() -> None:
    begun = time.monotonic()
    settings = load()
    landing = Path(settings.resolve(pipeline.name, "{landing}"))
    days = flights_input.prepare(DAYS)
    _step(f"{len(days)} daily files with the flights of 2013 are in {_short(DAYS)}")
    watch = Watch(settings)
    before = len(list(landing.glob("*.parquet")))
    if watch.last:
        _step(f"Picking up at checkpoint {watch.last}: {before} of {len(days)} days have landed before")
    if before < FIRST:
        _land(landing, FIRST - before)
    if watch.waiting() or len(list(landing.glob("*.parquet"))) < len(days):
        with _dagster(watch) as still_well:
            if watch.waiting():
                _follow(watch, still_well)
            for _ in range(TIMES):
                _settle(watch)
                if not _land(landing, MORE):
                    break
                _follow(watch, still_well)
            _stop(settings, watch, still_well)
    else:
        _step(f"All {len(days)} days are processed; nothing is left to do")
    _summary(settings, landing, watch, begun)


def _land(landing: Path, count: int) -> int:
    landed = flights_input.land(DAYS, landing, count=count)
    if landed:
        first, last = (path.stem.removeprefix("flights-") for path in (landed[0], landed[-1]))
        _step(f"{len(landed)} days land, {first} to {last}; now the sensor has to notice")
    return len(landed)


# -- Dagster


@contextmanager
def _dagster(watch: Watch) -> Iterator[Callable[[], None]]:
    """Run a daemon for as long as the block lasts; yields a check that raises when something has gone wrong."""
    dagster_home.prepare()
    os.environ["DAGSTER_HOME"] = str(dagster_home.HOME)
    running = dagster_home.holder()
    with dagster_home.instance() as instance:
        if running is not None:
            _step(f"Dagster is running here already (process {running}): its sensor will do")
            daemon: AbstractContextManager[subprocess.Popen[bytes] | None] = nullcontext()
        else:
            holder = lease.read(watch.storage)
            lost = dagster_home.end_lost_runs(instance, holder.run_id if holder and lease.alive(holder) else None)
            if lost:
                _step(
                    "A run was cut off last time: it is marked as failed, the next one resumes from its last checkpoint"
                )
            LOG.unlink(missing_ok=True)
            command = [dagster_home.program("dagster-daemon"), "run", "-w", str(dagster_home.WORKSPACE)]
            daemon = dagster_home.started(command, LOG)
        with daemon as process:
            if process is not None:
                dagster_home.claim(process.pid)
                _step(
                    f"Dagster's daemon starts (process {process.pid}, log {_short(LOG)}); the first epoch takes some"
                    " 30 s"
                )
            runs = DemoRuns(instance, datetime.now(UTC))

            def still_well() -> None:
                if process is not None and process.poll() is not None:
                    raise TransientError(
                        f"Dagster's daemon ended with {process.returncode}.\n{_tail(LOG)}", where=str(LOG)
                    )
                runs.look()

            yield still_well


@dataclass
class DemoRuns:
    """Says how Dagster's runs get on, and raises when one failed."""

    instance: DagsterInstance
    since: datetime
    statuses: dict[str, str] = field(default_factory=dict)

    def look(self) -> None:
        from dagster import DagsterRunStatus, RunsFilter

        for run in self.instance.get_runs(RunsFilter(updated_after=self.since), limit=5):
            why = self._why(run.run_id) if run.status is DagsterRunStatus.FAILURE else None
            if why is not None:
                raise TransientError(
                    f"The Dagster run {run.run_id} failed: {why}",
                    where=_short(LOG),
                    next="make ui shows the whole run; `make demo` tries again from the last checkpoint.",
                )
            if run.run_id not in self.statuses:
                asked = (
                    f"the sensor asked for it: {run.tags[REASON]}" if REASON in run.tags else "somebody asked for it"
                )
                _step(f"Dagster run {run.run_id[:8]} is {_word(run)}; {asked}")
            elif run.status.value != self.statuses[run.run_id]:
                died = "; its process died" if run.status is DagsterRunStatus.FAILURE else ""
                _step(f"Dagster run {run.run_id[:8]} is {_word(run)}{died}")
            self.statuses[run.run_id] = run.status.value

    def _why(self, run_id: str) -> str | None:
        """Return the error that failed the run's step; None if its process died, from which the sensor recovers."""
        from dagster import DagsterEventType

        for record in self.instance.get_records_for_run(run_id, of_type=DagsterEventType.STEP_FAILURE).records:
            event = record.event_log_entry.dagster_event
            data = event.step_failure_data if event else None
            if data is not None and data.user_failure_data is not None:
                return data.user_failure_data.description or ""
            if data is not None and data.error is not None:
                return data.error.to_string()
        return None


def _follow(watch: Watch, still_well: Callable[[], None]) -> None:
    """Print epochs until no file waits. Without epochs, wait for as long as the run gets on, and say what it does."""
    checked = time.monotonic()
    patience = Patience(checked)
    while True:
        now = time.monotonic()
        if now - checked > 2:
            still_well()
            checked = now
            holder = lease.read(watch.storage)
            patience.look(now, watch.signs(holder), processor_seconds(holder))
        if watch.look():
            patience.checkpoint(now)
        elif not watch.waiting():
            watch.look()
            _step(f"Caught up at checkpoint {watch.last}")
            return
        if patience.speaks(now):
            _step(f"No checkpoint for {now - patience.heard:.0f} s: {doing(lease.read(watch.storage), watch.last)}")
        if patience.ends(now):
            raise TransientError(
                f"Nothing has moved for {SILENCE_SECONDS:.0f} s: {doing(lease.read(watch.storage), watch.last)}.\n"
                f"{_tail(LOG)}",
                where=str(LOG),
                next="Read the log; `make demo` tries again from the last checkpoint, `make demo-clean` starts over.",
            )
        time.sleep(_POLL_SECONDS)


def _settle(watch: Watch) -> None:
    """Wait until the coordinator is idle: what lands before belongs to its catching up, for which nobody has to ask."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and lease.alive(lease.read(watch.storage)):
        published = {row.checkpoint_id for row in watch.registry.publications()}
        if watch.last in published and not requests.pending(watch.storage):
            time.sleep(3 * watch.settings.run.poll_seconds)
            return
        time.sleep(_POLL_SECONDS)


def _stop(settings: Settings, watch: Watch, still_well: Callable[[], None]) -> None:
    """Ask the coordinator to end at its barrier, and wait for it."""
    if lease.alive(lease.read(watch.storage)):
        requests.send(watch.storage, Request("stop", reason="the demo is over"))
    deadline = time.monotonic() + 60
    while lease.alive(lease.read(watch.storage)) and time.monotonic() < deadline:
        time.sleep(settings.run.poll_seconds)
    while _unfinished() and time.monotonic() < deadline:
        still_well()
        time.sleep(settings.run.poll_seconds)
    suspension.clear(
        watch.storage
    )  # it was the demo that stopped it, not a person: `make ui` shows a pipeline that goes on
    _step("The coordinator stopped at a barrier, its Dagster run has ended")


def _unfinished() -> bool:
    from dagster import DagsterRunStatus, RunsFilter

    with dagster_home.instance() as instance:
        return bool(
            instance.get_runs(RunsFilter(statuses=[DagsterRunStatus.STARTING, DagsterRunStatus.STARTED]), limit=1)
        )


# -- the summary


def _summary(settings: Settings, landing: Path, watch: Watch, begun: float) -> None:
    head = watch.registry.head()
    assert head is not None
    counts = _tables(settings, watch, landing)
    totals = head.totals
    out.print()
    _fact("epochs", f"{totals['epochs']}, of which {len(watch.shown)} shown now; the newest checkpoint is {head.id}")
    _fact("rows read", f"{totals['rows_read']:,} from {head.offsets['landing']['files']} files")
    files = sum(stats.files_total for stats in head.operators.values())
    _fact("state", f"{head.bytes_total / 1024:,.0f} KiB in {files} files")
    _fact("uploaded", _uploaded(head))
    for name, count in counts.items():
        _fact(name, count)
    out.print()
    out.print(_most_delayed(settings))
    out.print()
    _fact("registry and state", _short(Path(watch.storage.uri)))
    for sink in pipeline.tables:
        _fact(f"table {sink.name}", _short(Path(watch.storage.full(table_path(sink.name)))))
    _fact("Dagster's home", _short(dagster_home.HOME))
    _fact("Dagster's log", _short(LOG))
    out.print()
    for command, does in (
        ("make ui", "every epoch in Dagster"),
        ("WEIR_ENV=demo .venv/bin/weir status flights", "where it stands"),
        ("WEIR_ENV=demo .venv/bin/weir checkpoints flights", "what can be restored"),
        ("WEIR_ENV=demo .venv/bin/weir state get flights aircraft_rotation --key N725MQ", "one aircraft"),
        ("make demo", "the next days"),
        ("make demo-clean", "removes all this"),
    ):
        out.print(f"  {command:<78}  {does}")
    _step(f"Done in {time.monotonic() - begun:.0f} s")


def _fact(name: str, value: str) -> None:
    out.print(f"{name:<27}{escape(value)}")


def _uploaded(head: Checkpoint) -> str:
    """Describe how much all epochs uploaded, against a full snapshot each, which Dagster's observations add up."""
    from dagster import AssetKey

    totals: dict[int, int] = {}
    if dagster_home.HOME.exists():
        with dagster_home.instance() as instance:
            observations = instance.fetch_observations(AssetKey([pipeline.name, "checkpoint"]), limit=1000)
            for record in observations.records:
                shown: Mapping[str, Any] = record.asset_observation.metadata if record.asset_observation else {}
                totals[shown["checkpoint"].value] = shown["state bytes"].value
    new = head.totals["bytes_new"]
    uploaded = f"{new / 2**20:,.1f} MiB"
    if len(totals) == head.totals["epochs"]:
        full = sum(totals.values())
        uploaded += (
            f"; a full snapshot each epoch would have been {full / 2**20:,.1f} MiB, {full / new:.1f} times as much"
        )
    return uploaded


def _most_delayed(settings: Settings) -> Table:
    """Return the most delayed from the state itself: the newest snapshot, read without Spark."""
    state = pl.concat([pl.DataFrame(table) for table in state_reader.scan(pipeline, settings, aircraft_rotation.uid)])
    shown = Table(
        title=f"The three most delayed of {len(state):,} aircraft", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    for name in ("tailnum", "legs", "minutes late in all", "last destination"):
        shown.add_column(name, justify="left" if name in ("tailnum", "last destination") else "right")
    for row in state.top_k(3, by="arr_delay_min").iter_rows(named=True):
        shown.add_row(row["tailnum"], f"{row['legs']:,}", f"{row['arr_delay_min']:,.0f}", row["last_dest"])
    return shown


def _tables(settings: Settings, watch: Watch, landing: Path) -> dict[str, str]:
    """Row counts as Spark sees them, against what they must be."""
    from weir.execution.spark import spark_session as sessions

    _step("Reading the tables with Spark and Delta, as anyone would")
    spark = sessions.session(settings, app="weir demo", delta=True)
    try:
        legs, hours = (
            spark.read.format("delta").load(watch.storage.full(table_path(name)))
            for name in ("aircraft_legs", "airport_hourly")
        )
        flown = legs.count()
        windows, distinct = hours.count(), hours.select("origin", "window_start").distinct().count()
    finally:
        spark.stop()
    is_leg = ~pc.field("dep_time").is_null() & ~pc.field("tailnum").is_null()
    arrived = ds.dataset(landing, format="parquet").count_rows(filter=is_leg)
    if flown != arrived or windows != distinct:
        raise DamageError(
            f"{arrived:,} legs arrived and {flown:,} are in the table; {windows:,} windows, {distinct:,} distinct.",
            where=watch.storage.uri,
            next="This must not happen: keep the storage, and report it.",
        )
    return {
        "aircraft_legs": f"{flown:,} rows, one for each flown leg that landed: none lost, none doubled",
        "airport_hourly": f"{windows:,} rows, one for each airport and closed hour",
    }


# -- words


def _line(row: Checkpoint) -> str:
    return escape(progress.line(row, None, 6) + (f"  {row.reason}" if row.trigger == "sensor" else ""))


def _word(run: DagsterRun) -> str:
    return run.status.value.lower().replace("_", " ")


def _step(text: str) -> None:
    out.print(f"[bold cyan]>[/] {escape(text)}")


def _short(path: Path) -> str:
    return str(path.relative_to(PROJECT)) if path.is_relative_to(PROJECT) else str(path)


def _tail(log: Path, lines: int = 15) -> str:
    """Return the log's last errors, else its last lines."""
    if not log.exists():
        return ""
    text = log.read_text(errors="replace").splitlines()
    errors = [number for number, line in enumerate(text) if " ERROR " in line or "Error:" in line]
    start = max(0, errors[-1] - lines // 2) if errors else max(0, len(text) - lines)
    return "\n".join(text[start : start + lines])


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _clean() -> None:
    holder = dagster_home.holder()
    if holder is not None:
        raise BusyError(
            "Dagster is running on the demo's data.", where=f"process {holder}", next="End make ui or make demo first."
        )
    if not DEMO.exists() and not dagster_home.HOME.exists():
        out.print("There is nothing to remove.")
        return
    for directory in (DEMO, dagster_home.HOME):
        shutil.rmtree(directory, ignore_errors=True)
        out.print(f"removed {_short(directory)}")


if __name__ == "__main__":
    typer.run(main)
