"""The command, as the tests of recovery call it; and a pipeline whose past is looked into."""

from __future__ import annotations

import pytest

from tests.recovery.conftest import weir as weir
from tests.weir.rides import Rides
from weir.run import maintenance


@pytest.fixture(scope="session")
def rides_run(tmp_path_factory) -> Rides:
    """Eight epochs, of which 1 (the savepoint first-day) and 4 to 8 are retained. For reading only."""
    rides_run = Rides(tmp_path_factory.mktemp("rides") / "site")
    rides_run.epochs(1)
    maintenance.savepoint(rides_run.site.pipeline, rides_run.site.settings, "first-day", "a test", 5)
    rides_run.epochs(7)
    assert [row.id for row in rides_run.registry.checkpoints()] == [1, 4, 5, 6, 7, 8]
    return rides_run
