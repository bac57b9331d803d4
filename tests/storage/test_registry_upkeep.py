"""The registry's upkeep where listings, conditional puts and deletes are those of an object store."""

from __future__ import annotations

import pytest

from state_ops.checkpoints.registry import Registry
from state_ops.delta import log_cleanup
from state_ops.errors import FencedError
from tests.state_ops.checkpoints.test_registry import APP, a_file, put
from tests.state_ops.checkpoints.test_registry_maintenance import TABLES, epochs, log_of, taken


@pytest.mark.long
def test_short_logs_mislead_neither_readers_nor_zombies(anywhere, monkeypatch):
    monkeypatch.setattr(log_cleanup, "INTERVAL", 4)
    zombie, reader = taken(anywhere()), Registry(anywhere(), APP)
    epochs(zombie, 1, 4)
    assert reader.head().id == 4
    successor = taken(anywhere())
    epochs(successor, 5, 14, generation=2)
    assert max(len(log_of(anywhere(), table)) for table in TABLES) <= 2 * log_cleanup.INTERVAL + 5
    assert [row.id for row in reader.checkpoints()] == [12, 13, 14]
    assert {file.name for file in reader.files(reader.head())} == {"1.sst", "14.sst"}
    with pytest.raises(FencedError, match=r"generation 1, but .* belongs to generation 2"):
        put(zombie, 5, 4, [a_file("zombie.sst")])
    assert Registry(anywhere(), APP).generation() == 2
    put(successor, 15, 14, generation=2)
