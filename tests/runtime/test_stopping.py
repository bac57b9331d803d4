from __future__ import annotations

import pytest

from pipelines.runtime.stopping import ask_to_stop
from pipelines.runtime.tenure import open_storage
from pipelines.runtime.upkeep import STOP
from state_ops import lease
from state_ops.ids import CheckpointId, Generation
from state_ops.lease import Heartbeat, Request
from tests.recovery.small import Bank


@pytest.mark.parametrize("outcome", ["stopped", "ended"])
def test_a_coordinator_that_ends_between_two_looks_has_not_died(tmp_path, monkeypatch, outcome):
    site = Bank.at(tmp_path / "site").site
    storage, _ = open_storage(site.pipeline, site.settings)
    with Heartbeat(storage, Generation(1), CheckpointId(0), 60.0, None) as heartbeat:

        def watch(_: object) -> bool:
            """The lease has been read as a living one's; now the coordinator carries the request out, or not, and ends."""
            for request in lease.pending(storage) if outcome == "stopped" else []:
                lease.take(storage, request)
            heartbeat._write(stopped=True, outcome=outcome)
            return False

        monkeypatch.setattr(lease, "watch", watch)
        assert ask_to_stop(site.pipeline, site.settings, Request(STOP)) is (outcome == "stopped")
    assert lease.pending(storage) == []
