"""A spread sample of the crash matrix: every operation dies before one of its calls and after another one, and fails,
lies, tears or hangs in others. `make matrix` plays all of it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from tests.recovery.matrix import checks, matrix, plan, replay, trials
from tests.recovery.matrix.checks import Stored
from tests.recovery.matrix.matrix import Played, Zygote
from tests.recovery.matrix.pipeline import pipeline
from tests.recovery.matrix.points import Disturbance, Point
from tests.recovery.matrix.trials import Site, Trial
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run


@pytest.fixture(scope="module")
def zygotes() -> Iterator[list[Zygote]]:
    with matrix.zygotes(2) as started:
        yield started


def _deviations(played: list[Played]) -> str:
    wrong = [trial for trial in played if trial.outcome.problems]
    return "\n\n".join("\n".join([str(trial.trial), *trial.outcome.problems]) for trial in wrong)


@pytest.mark.long
def test_whatever_call_is_cut_off_or_fails_the_next_run_is_exact_and_nothing_is_left_over(zygotes):
    sample = plan.sample(zygotes[0].points)
    for kill in ("kill before", "kill after"):
        died = {_operation(trial) for trial in sample if trial.disturbance.fault == kill}
        assert died == {point.operation for point in zygotes[0].points}

    played = matrix.play(zygotes, sample, lambda _: None)

    assert len(played) == len(sample)
    assert not _deviations(played)


def _operation(trial: Trial) -> str:
    assert isinstance(trial.disturbance.at, Point)
    return trial.disturbance.at.operation


@pytest.mark.long
def test_what_storage_raises_outside_of_an_epoch_ends_the_run_with_a_typed_error(zygotes):
    blows = [
        ("EIO", "Storage.read_bytes coordinator/lease.json"),
        ("EIO", "Storage.put_bytes coordinator/lease.json"),
        ("DeltaError", "delta_log.commit registry/state_files"),
        ("DeltaError", "delta_log.commit registry/publications"),
        ("DeltaError", "delta_log.commit tables/hourly"),
    ]

    played = matrix.play(
        zygotes, [Trial(Disturbance(fault, Point(label, 1))) for fault, label in blows], lambda _: None
    )

    assert [trial.outcome.ended for trial in played] == ["TransientError"] * len(blows)
    assert not _deviations(played)


def test_half_a_file_that_a_killed_coordinator_left_is_removed_by_the_next():
    torn = []
    with matrix.zygotes(1) as (zygote,):
        for path in ("coordinator/lease.json", "registry/checkpoints/data", "registry/publications/data"):
            label = f"Storage.put_bytes {path}"
            torn.append(next(point for point in zygote.points if point.label.startswith(label)))
        played = matrix.play([zygote], [Trial(Disturbance("torn, killed", point)) for point in torn], lambda _: None)

    assert [trial.outcome.ended for trial in played] == ["killed"] * len(torn)
    assert not _deviations(played)


# -- the matrix notices


@pytest.fixture(scope="module")
def drained(tmp_path_factory) -> Site:
    """A pipeline that has read all of its input and is drained."""
    root = tmp_path_factory.mktemp("drained")
    site = Site(root / "site", root / "landing")
    replay.land(site.landing, 0, replay.FILES)
    options = RunOptions(until_caught_up=True, drain=True)
    reports = list(run(pipeline, site.settings(), options, InMemoryExecutor()))
    assert [report.checkpoint.id for report in reports] == [1, 2, 3, 4]
    return site


def _first(site: Site, pattern: str) -> Path:
    return min(site.storage.glob(pattern))


def _double_rows(site: Site) -> None:
    write_deltalake(
        site.storage / "tables" / "peaks", pq.read_table(_first(site, "tables/peaks/data/*/*")), mode="append"
    )


def _lose_rows(site: Site) -> None:
    _first(site, "tables/hourly/_delta_log/*2.json").unlink()
    for later in sorted(site.storage.glob("tables/hourly/_delta_log/*.json"))[2:]:
        later.unlink()


def _flip_a_byte(site: Site) -> None:
    file = _first(site, "state/meters/*/*/*.sst")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _lose_an_object(site: Site) -> None:
    _first(site, "state/peaks/*/*/CURRENT").unlink()


def _forget_an_object(site: Site) -> None:
    shutil.copy(_first(site, "state/peaks/*/*/CURRENT"), _first(site, "state/peaks/*/*") / "000099.sst")


def _forget_half_a_lease(site: Site) -> None:
    (site.storage / "coordinator" / ".tmp-1-lease.json").write_text('{"genera')


@pytest.mark.parametrize(
    ("tamper", "noticed"),
    [
        (_double_rows, "table peaks: .* too many"),
        (_lose_rows, "table hourly: .* missing"),
        (_flip_a_byte, "is not what was recorded"),
        (_lose_an_object, "CURRENT is named and gone"),
        (_forget_an_object, "000099.sst"),
        (_forget_half_a_lease, "lease.json"),
    ],
    ids=lambda value: getattr(value, "__name__", "").removeprefix("_").replace("_", "-"),
)
def test_the_checks_notice_what_must_not_be(
    drained: Site, tmp_path: Path, tamper: Callable[[Site], None], noticed: str
):
    site = Site(tmp_path / "site", drained.landing)
    shutil.copytree(drained.root, site.root)
    assert trials.checked(site, strict=True)["problems"] == []

    tamper(site)

    stored = Stored(site.storage)
    problems = checks.tables(stored, replay.expected().tables) + checks.registry(stored, 1) + checks.sinks(stored)
    problems += checks.unnamed(stored)
    assert any(re.search(noticed, problem) for problem in problems), problems
