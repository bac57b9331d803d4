"""One trial: a run of the coordinator is disturbed at one call, the next run recovers, and everything is checked.

Every step works in a process of its own, forked by the zygote. All of them start from the same site: one completed
epoch, an empty work directory or not, and files that wait.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from state_ops.coordination import lease
from state_ops.errors import BusyError, WeirError
from state_ops.fsck.findings import Report
from state_ops.fsck.repair import plan_repair
from tests.recovery.matrix import checks, replay
from tests.recovery.matrix.checks import Stored
from tests.recovery.matrix.pipeline import before_deploy, pipeline
from tests.recovery.matrix.points import Disturbance, Wrapped, one_by_one
from weir.definition import Pipeline
from weir.epoch.step_runner import Ended
from weir.epoch.step_runner import run as run_step
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.operations import forks, promotion
from weir.ownership.ownership import claimed
from weir.ownership.pipeline_storage import open_storage
from weir.run import fsck, maintenance
from weir.run.run import RunOptions, run
from weir.settings import configuration as settings
from weir.settings.configuration import Settings

RETAINED = 1
IN_FLIGHT = 2
BASE_FILES = 1
UNALIGNED = "WEIR_MATRIX_UNALIGNED"
REWINDS = "WEIR_MATRIX_REWINDS"
PROMOTIONS = "WEIR_MATRIX_PROMOTIONS"
DEPLOYS = "WEIR_MATRIX_DEPLOYS"
DEADLY = ("kill before", "kill after", "torn, killed", "hang")


def unaligned() -> bool:
    """Whether stages stop after a batch, and leave rows to the next epoch. In the environment: children inherit it."""
    return bool(os.environ.get(UNALIGNED))


def rewinds() -> bool:
    """Whether each run first goes back to checkpoint 1, unless one before it did. In the environment: children inherit
    it."""
    return bool(os.environ.get(REWINDS))


def promotions() -> bool:
    """Whether each run first forks checkpoint 1, promotes and drops that branch, unless one before it did. In the
    environment."""
    return bool(os.environ.get(PROMOTIONS))


def deploys() -> bool:
    """Whether the table `peaks` is appended to by all runs behind the first blow, and has a row per site before. In the
    environment."""
    return bool(os.environ.get(DEPLOYS))


def code(site: Site) -> Pipeline:
    """The pipeline as a run has it at this moment."""
    return before_deploy if deploys() and not site.deployed.exists() else pipeline


def deploy(site: Site) -> None:
    """Let the other sink count from now on, and keep how many epochs have been committed by now."""
    if deploys() and not site.deployed.exists():
        head = open_storage(before_deploy, site.settings())[1].head()
        site.deployed.write_text(str(int(head.totals["epochs"]) if head is not None else 0))


def base_files() -> int:
    """How many files, and epochs, there are before the run that is disturbed."""
    return BASE_FILES + 2 if rewinds() or promotions() else BASE_FILES


def retained() -> int:
    return RETAINED + 2 if rewinds() or promotions() else RETAINED


def most() -> int:
    """How many checkpoints there may be at the end: what a promotion has abandoned is kept while that is among the
    newest."""
    return retained() + 2 if promotions() else retained()


@dataclass(frozen=True)
class Site:
    """One pipeline's storage and work directory below `root`, which stays the same: Weir's local copies hang on that.

    landing: where its files arrive, shared by all trials.
    """

    root: Path
    landing: Path

    @property
    def storage(self) -> Path:
        return self.root / "storage" / pipeline.name

    @property
    def marker(self) -> Path:
        return self.root / "held"

    @property
    def release(self) -> Path:
        return self.root / "release"

    @property
    def deployed(self) -> Path:
        return self.root / "deployed"

    def env(self, work: str = "work") -> dict[str, str]:
        return {
            "WEIR_STORAGE__ROOT": str(self.root / "storage"),
            "WEIR_LOCAL__WORK_DIR": str(self.root / work),
            "WEIR_PIPELINES__METERS__OBJECT": "tests.recovery.matrix.pipeline:pipeline",
            "WEIR_PIPELINES__METERS__PARAMS": json.dumps({"landing": str(self.landing)}),
            "WEIR_EPOCH__MAX_FILES": "1",
            "WEIR_CHECKPOINTS__NUM_RETAINED": str(retained()),
            "WEIR_CHECKPOINTS__MAX_CONCURRENT": str(IN_FLIGHT),
            "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "2",
            "WEIR_LEASE__HEARTBEAT_SECONDS": "60",
            "WEIR_RUN__POLL_SECONDS": "0.01",
            "WEIR_SPARK__PARALLELISM": "2",
            "WEIR_STATE__MEMORY_MB": "16",
            **({"WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS": "0"} if unaligned() else {}),
        }

    def settings(self, work: str = "work") -> Settings:
        return settings.load(self.env(work))


# -- what a child does: each returns plain data


def undisturbed(site: Site, *, drain: bool, journal: Path | None = None) -> dict[str, Any]:
    """A whole run; with a journal, every call is noted there."""
    one_by_one()
    Wrapped(site.root, None, journal).install()
    return _run(site, drain=drain)


def disturbed(site: Site, disturbance: Disturbance, *, again: bool = False) -> dict[str, Any]:
    """A run in which one call goes wrong; the answer, if it comes to that, says how the run ended.

    Args:
        again: It is the recovery from another blow.
    """
    if again:
        deploy(site)
    wrapped = Wrapped(site.root, disturbance)
    one_by_one()
    wrapped.install()
    return {**_run(site, drain=True), "hit": wrapped.hit}


def recovered(site: Site, *, alone: bool = False, strict: bool = True) -> dict[str, Any]:
    """The run that comes after, then the checks. strict: as `checked`.

    alone: it runs on another host, which sees nothing of the process that holds the lease, and has waited long enough.
    """
    deploy(site)
    one_by_one()
    if alone:
        lease.watch = lambda storage: False  # noqa: ARG005  the signature is Weir's
    answer = _run(site, drain=True, work="elsewhere" if alone else "work")
    return {**answer, "problems": _resumed(answer) or checked(site, strict=strict)["problems"]}


def rival(site: Site) -> dict[str, Any]:
    """A second coordinator on the same host, while the first one hangs: refused, once the first one holds the lease."""
    raw = site.storage / "coordinator" / "lease.json"
    held = json.loads(raw.read_text()) if raw.is_file() else {"stopped": True}
    if held["stopped"] or not lease.alive(lease.Lease(**held)):
        return {"problems": []}
    before = _listing(site)
    result = _run(site, drain=True)
    problems = [] if result["error"] == BusyError.__name__ else [f"a second coordinator was not refused: {result}"]
    if _listing(site) != before:
        problems.append("a second coordinator changed storage while the first one lived")
    return {"problems": problems}


def checked(site: Site, *, strict: bool) -> dict[str, Any]:
    """Whether everything is exact. strict: and nothing lies in storage that nothing names."""
    before = int(site.deployed.read_text()) if site.deployed.exists() else replay.FILES + 1
    wanted, stored = replay.expected(deployed=before if deploys() else None), Stored(site.storage)
    problems = checks.tables(stored, wanted.tables)
    for uid, rows in wanted.states.items():
        actual = checks.rows(state_reader.scan(code(site), site.settings(), uid))
        problems += checks.differences(actual, rows, f"state of {uid}")
    problems += checks.registry(stored, most())
    problems += checks.sinks(stored)
    if strict and (left := checks.unnamed(stored)):
        problems += [f"left over: {name}" for name in left if not checks.is_true_orphan(name)]
        problems += repaired(site)["problems"]
    return {"problems": problems}


def repaired(site: Site, *, again: bool = False) -> dict[str, Any]:
    """`weir fsck --repair`: nothing is damaged, whatever happened; and afterwards nothing is left that nothing names.

    But for commits to published tables that were cut off: those it names and leaves, since others may commit there too.
    """
    if again:
        deploy(site)
    report = fsck.examine(code(site), site.settings())
    problems = _damage(report)
    with claimed(code(site), site.settings(), InMemoryExecutor()) as owner:
        fsck.repair(owner.context, plan_repair(report))
    stored, after = Stored(site.storage), fsck.examine(code(site), site.settings(), quick=True)
    reported, left = {finding.path for finding in after.findings}, set(checks.unnamed(stored))
    problems += [f"fsck has left over: {name}" for name in sorted(left) if not checks.is_cut_off_commit(name)]
    problems += [f"fsck does not find: {name}" for name in sorted(left - reported)]
    problems += [
        f"fsck still finds: {finding.kind}: {finding.what}" for finding in after.findings if finding.path not in left
    ]
    # Nothing was pruned yet. When the run died, an epoch in flight could need one checkpoint more, pruning could have
    # waited once, and a newer one had completed.
    return {"problems": problems + checks.registry(stored, most() + IN_FLIGHT + 1)}


def _damage(report: Report) -> list[str]:
    return [f"fsck says {finding.kind}: {finding.path}: {finding.what}" for finding in report.damage]


def _run(site: Site, *, drain: bool, work: str = "work") -> dict[str, Any]:
    begun = checks.ids_begun(Stored(site.storage))
    ids: list[int] = []
    options = RunOptions(until_caught_up=True, drain=drain)
    try:
        if rewinds() and begun and (head := _head(site)) is not None and head == base_files():
            maintenance.rewind(pipeline, site.settings(work), 1)
        if promotions() and begun:
            _promote(site.settings(work), _head(site))
        executor = InMemoryExecutor(12) if unaligned() else InMemoryExecutor()
        for report in run(code(site), site.settings(work), options, executor, InTurn()):
            ids.append(int(report.checkpoint.id))
    except WeirError as error:
        return {"ids": ids, "begun": begun, "error": type(error).__name__, "said": str(error), "typed": True}
    except Exception as error:  # what the matrix is there to find
        trace = "".join(traceback.format_exception(error))
        return {"ids": ids, "begun": begun, "error": type(error).__name__, "said": trace, "typed": False}
    return {"ids": ids, "begun": begun, "error": None, "said": "", "typed": True}


def _promote(settings: Settings, head: int | None) -> None:
    """Fork, replay, promote, drop: what of it is not done yet."""
    there = {fork.branch.name: fork.head for fork in forks.forks(pipeline, settings)}
    if head == base_files():
        if there.get("fix") is None:
            forks.fork(pipeline, settings, "fix", 1)
        promotion.promote(pipeline, settings, "fix", executor=InMemoryExecutor(), runner=InTurn())
        there["fix"] = None
    if "fix" in there:
        forks.drop(pipeline, settings, "fix")


def _head(site: Site) -> int | None:
    head = open_storage(code(site), site.settings())[1].head()
    return int(head.id) if head is not None else None


class InTurn:
    """Lanes whose steps run one at a time in the order in which they were started: two runs make the same calls. Epochs
    overlap all the same: while one is to be uploaded and committed, the stages of the next come in between."""

    def __init__(self) -> None:
        self._steps: deque[tuple[str, Callable[[], object]]] = deque()

    def start(self, slot: str, step: Callable[[], object]) -> None:
        self._steps.append((slot, step))

    def next(self, seconds: float) -> Ended | None:  # noqa: ARG002 - nothing is waited for
        return run_step(*self._steps.popleft()) if self._steps else None


def _listing(site: Site) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in site.storage.rglob("*") if path.is_file()}


# -- a trial, step by step


@dataclass(frozen=True)
class Trial:
    """at: the call of the disturbed run; again: the number of the call in the next run, where that is disturbed too.

    lost: the host's work directory is gone afterwards. repair: fsck repairs before the next run recovers.
    """

    disturbance: Disturbance
    again: Disturbance | None = None
    lost: bool = False
    repair: bool = False

    def __str__(self) -> str:
        second = f", then {self.again.fault} at call {self.again.at} of the recovery" if self.again else ""
        return (
            f"{self.disturbance.fault} at"
            f" {self.disturbance.at}{second}{', work directory lost' if self.lost else ''}{', then fsck' if self.repair else ''}"
        )


@dataclass
class Outcome:
    """ended: how the disturbed run did: killed, done, or the name of its error. problems: what must not be."""

    ended: str
    problems: list[str]
    seconds: float = 0.0


Step = Callable[..., "dict[str, Any] | None"]


def conduct(site: Site, base: Path, trial: Trial, fork: Step) -> Outcome:
    """Play one trial. fork: runs a function in a child and returns its answer, None if it was killed."""
    started = time.monotonic()
    shutil.rmtree(site.root, ignore_errors=True)
    shutil.copytree(base, site.root)
    problems: list[str] = []
    disturbance = _with_files(trial.disturbance, site)
    first = fork(disturbed, site, disturbance, during=_during(site, disturbance, fork, problems))
    ended = "killed" if first is None else first["error"] or "done"
    if first is not None:
        if not first["typed"]:
            problems.append(f"an untyped error: {first['said']}")
        if not first["hit"]:
            problems.append("the run never got to that call")
        elif disturbance.fault in DEADLY:
            problems.append(f"it was not killed, but ended: {ended}")
        if first["error"] is None and not disturbance.fault.startswith("zombie"):
            problems += [
                f"after it went on by itself: {problem}" for problem in fork(checked, site, strict=False)["problems"]
            ]
    elif disturbance.fault not in DEADLY:
        problems.append("the process died")
    if trial.lost:
        shutil.rmtree(site.root / "work", ignore_errors=True)
    if trial.repair:
        problems += _problems(fork(repaired, site, again=True))
    if trial.again is not None:
        second = fork(disturbed, site, trial.again, again=True)
        if second is not None and not second["typed"]:
            problems.append(f"an untyped error in the recovery: {second['said']}")
    problems += _problems(fork(recovered, site))
    return Outcome(ended, problems, time.monotonic() - started)


def resume(site: Site, fork: Step) -> Outcome:
    """Recover and check a site that was disturbed elsewhere."""
    started = time.monotonic()
    return Outcome("done", _problems(fork(recovered, site)), time.monotonic() - started)


def _with_files(disturbance: Disturbance, site: Site) -> Disturbance:
    return Disturbance(disturbance.fault, disturbance.at, site.marker, site.release)


def _during(site: Site, disturbance: Disturbance, fork: Step, problems: list[str]) -> Callable[[int], bool] | None:
    """What happens while the call hangs; returns whether it is then let go (else it is killed)."""
    if disturbance.fault == "hang":

        def watchdog(pid: int) -> bool:
            problems.extend(fork(rival, site)["problems"])
            return False

        return watchdog
    if disturbance.fault.startswith("zombie"):

        def successor(pid: int) -> bool:
            problems_found = _problems(fork(recovered, site, alone=True, strict=False))
            problems.extend(f"while a zombie hangs: {problem}" for problem in problems_found)
            site.release.touch()
            return True

        return successor
    return None


def _problems(answer: dict[str, Any] | None) -> list[str]:
    return ["the next run died"] if answer is None else answer["problems"]


def _resumed(answer: dict[str, Any]) -> list[str]:
    if answer["error"]:
        return [f"the next run failed: {answer['error']}: {answer['said']}"]
    if not answer["ids"] or min(answer["ids"]) <= answer["begun"] or answer["ids"] != sorted(set(answer["ids"])):
        return [f"ids are used again: {answer['ids']}, but {answer['begun']} was begun before"]
    return []


def prepare(site: Site, base: Path, fork: Step) -> None:
    """Make the site that every trial starts from: one epoch done, the other files waiting."""
    shutil.rmtree(site.root, ignore_errors=True)
    shutil.rmtree(site.landing, ignore_errors=True)
    replay.land(site.landing, 0, base_files())
    answer = fork(recovered_without_drain, site)
    assert answer is not None and answer["ids"][0] == 1 and answer["error"] is None, answer
    replay.land(site.landing, base_files(), replay.FILES)
    shutil.rmtree(base, ignore_errors=True)
    site.root.rename(base)


def recovered_without_drain(site: Site) -> dict[str, Any]:
    one_by_one()
    return _run(site, drain=False)


def answer_to(result: Path, log: Path, step: Step, *args: Any, **kwargs: Any) -> None:
    """What a forked child does: one step, its answer in a file, its words in another; then the end, without
    teardown."""
    with log.open("ab", buffering=0) as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    status = 1
    try:
        answer = step(*args, **kwargs)
        staging = result.with_suffix(".part")
        staging.write_text(json.dumps(answer))
        staging.rename(result)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
