"""Dagster's code server is killed under a real daemon: what runs goes on, ticks come back by themselves, nothing is
done twice.

Sensors tick in the code server, and the processes of runs are its children.
"""

from __future__ import annotations

import psutil
import pytest

from state_ops.coordination import lease, requests
from state_ops.records.triggers import Trigger
from tests.weir.dagster.dagster_daemon import Served


def in_an_epoch(served: Served) -> lease.Lease:
    """Two epochs are over and a third, which a barrier has cut, is held; whose run that is."""
    served.bank.land(1, 2)
    served.until(lambda: served.head() == 2, "the first epochs")
    served.hold()
    served.bank.land(3)
    served.until(served.held, "an epoch that a barrier cut")
    return served.lease


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("served", [False], indirect=True)
def test_a_run_goes_on_without_its_code_server_and_ticks_come_back(served):
    holder = in_an_epoch(served)

    served.kill_code_servers()
    served.let_go()
    served.until(lambda: served.head() == 3, "the epoch that was under way")
    served.submit("small_retention_and_fsck")

    def away() -> bool:
        served.kill_code_servers()
        assert served.runs().get("retention_and_fsck") != ["FAILURE"], "it was to wait"
        return served.requeued("small_retention_and_fsck")

    served.until(away, "a run that no code server could start")
    served.bank.land(4)

    served.until(lambda: served.head() == 4, "the barrier of a tick that came back")
    assert served.bank.registry.head().trigger == Trigger.SENSOR
    served.until(lambda: served.runs().get("retention_and_fsck") == ["SUCCESS"], "the run that was queued meanwhile")
    assert lease.alive(served.lease) and served.lease.generation == holder.generation
    assert served.runs()["job"] == ["STARTED"]
    requests.send(served.storage, requests.Request("stop"))
    served.until(lambda: served.runs()["job"] == ["SUCCESS"], "the end of the run")
    assert "restore_job" not in served.runs()
    assert [(row.id, row.run_id) for row in served.bank.registry.checkpoints()] == [
        (number, holder.run_id) for number in (1, 2, 3, 4)
    ]
    served.bank.assert_exact(1, 2, 3, 4)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("served", [True], indirect=True)
def test_a_run_that_dies_with_its_code_server_is_resumed_once_that_is_kept_up(served):
    holder = in_an_epoch(served)

    served.kill_code_servers()
    psutil.Process(holder.pid).kill()
    served.bank.land(4)
    served.let_go()
    served.serve()

    served.until(lambda: served.head() == 5, "what was resumed, under ids of its own")
    requests.send(served.storage, requests.Request("stop"))
    served.until(lambda: served.runs().get("restore_job") == ["SUCCESS"], "the end of the restore")
    assert served.runs()["job"] == ["FAILURE"]
    assert served.lease.generation == holder.generation + 1
    assert [(row.id, row.generation) for row in served.bank.registry.checkpoints()] == [(1, 1), (2, 1), (4, 2), (5, 2)]
    served.bank.assert_exact(1, 2, 3, 4)
