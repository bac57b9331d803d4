"""A coordinator is killed with SIGKILL, its JVM and workers with it, at six points of an epoch. The next run resumes.

Each child builds on the same two epochs, made once, and dies in epoch 3. Two children run at a time, ahead of the
tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.recovery.harness import Site, child
from tests.tools.sampling import sampled

_DAYS, _EPOCH = 30, 3


@dataclass(frozen=True)
class Point:
    """committed: whether epoch 3 stands after the kill. legs, hours: whether its rows are visible in that table then.

    leftovers: whether there is surely something in storage that nothing names.
    """

    name: str
    committed: bool
    legs: bool
    hours: bool
    leftovers: bool = True


POINTS = [
    Point("in a stage", committed=False, legs=False, hours=False, leftovers=False),
    Point("in an upload", committed=False, legs=False, hours=False),
    Point("before the row", committed=False, legs=False, hours=False),
    Point("after the row", committed=True, legs=False, hours=False),
    Point("between two sinks", committed=True, legs=True, hours=False),
    Point("in pruning", committed=True, legs=True, hours=True),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory, spark, days) -> Site:
    """Two epochs of ten days, and ten more days that wait."""
    site = Site(
        tmp_path_factory.mktemp("kills") / "base",
        {"WEIR_EPOCH__MAX_FILES": "10", "WEIR_CHECKPOINTS__NUM_RETAINED": "1"},
    )
    site.land(days[:20])
    site.run()
    site.land(days[20:_DAYS])
    return site


@pytest.fixture(scope="module")
def killed(base, request) -> Iterator[dict[str, Future[Site]]]:
    """For each point that a test asks for, a site whose coordinator was killed there."""
    asked = [item.callspec.params["point"] for item in request.session.items if _asks(item)]
    with ThreadPoolExecutor(2) as pool:
        yield {point.name: pool.submit(_killed_at, base, point) for point in asked}


def _asks(item: pytest.Item) -> bool:
    return item.module.__name__ == __name__ and "point" in getattr(getattr(item, "callspec", None), "params", {})


def _killed_at(base: Site, point: Point) -> Site:
    site = base.copied_to(base.root.with_name(point.name.replace(" ", "-")))
    with child(site, point.name, _EPOCH) as coordinator:
        coordinator.wait_until_held()
        coordinator.kill()
    return site


@pytest.mark.parametrize("point", sampled(POINTS), ids=lambda point: point.name.replace(" ", "-"))
def test_the_next_run_resumes_and_the_results_are_exact(killed, base, point):
    site = killed[point.name].result()

    assert site.head() == (_EPOCH if point.committed else _EPOCH - 1)
    grown = {name: len(site.table(name)) > len(base.table(name)) for name in ("aircraft_legs", "airport_hourly")}
    assert grown == {"aircraft_legs": point.legs, "airport_hourly": point.hours}
    if point.leftovers:
        with pytest.raises(AssertionError):
            site.assert_no_orphans()

    resumed = site.run(drain=True)

    expected = [_EPOCH + 1] if point.committed else [_EPOCH + 1, _EPOCH + 2]
    assert [report.checkpoint.id for report in resumed] == expected, "the id of the epoch that died is never used again"
    site.assert_exact(_DAYS)
    site.assert_no_orphans()
