"""The command, as the tests of recovery call it; and a pipeline whose past is looked into."""

from __future__ import annotations

import pytest

from pipelines.runtime.run import maintenance
from tests.recovery.conftest import weir as weir
from tests.runtime.rides import Rides


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Rides:
    """Eight epochs, of which 1 (the savepoint first-day) and 4 to 8 are retained. For reading only."""
    made = Rides(tmp_path_factory.mktemp("rides") / "site")
    made.epochs(1)
    maintenance.savepoint(made.site.pipeline, made.site.settings, "first-day", "a test", 5)
    made.epochs(7)
    assert [row.id for row in made.registry.checkpoints()] == [1, 4, 5, 6, 7, 8]
    return made
