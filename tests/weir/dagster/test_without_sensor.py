"""A run that Dagster started, and no sensor: what lands while it lives is read all the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from state_ops.coordination import requests
from state_ops.coordination.requests import Request
from state_ops.records.triggers import Trigger
from tests.recovery.small import Bank, until
from tests.weir.dagster.without_spark import RETAINED, House, in_this_process


@pytest.fixture
def house(tmp_path, monkeypatch, instance) -> House:
    """One epoch of the small pipeline; its runs live on for long after they have caught up."""
    in_this_process(monkeypatch)
    lingers = {"WEIR_RUN__LINGER_SECONDS": "300", "WEIR_CHECKPOINTS__INTERVAL_SECONDS": "0.3"}
    house = House(Bank.at(tmp_path / "site", **RETAINED | lingers), instance)
    house.bank.land(1)
    return house


def newest_trigger(house: House) -> str | None:
    head = house.bank.registry.head()
    return head.trigger if head is not None else None


@pytest.mark.parametrize("job", ["small_job", "small_restore_job"])
def test_a_run_reads_what_lands_while_no_sensor_ticks(house, job):
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(house.execute, job)
        try:
            until(lambda: house.bank.ids() == [1])
            # It answers a sensor's last request once there is nothing to read: from now on it does not catch up any
            # more.
            requests.send(house.storage, Request("barrier", trigger="sensor"))
            until(lambda: requests.pending(house.storage) == [])
            house.bank.land(2)
            until(lambda: house.bank.ids() == [1, 2])
            assert newest_trigger(house) == Trigger.INTERVAL
        finally:
            requests.send(house.storage, Request("stop"))
        assert run.result(60).success
    house.bank.assert_exact(1, 2)


def test_a_sensor_makes_it_sooner(house):
    long = House(
        Bank.at(house.bank.site.root, **house.bank.site.options | {"WEIR_CHECKPOINTS__INTERVAL_SECONDS": "600"}),
        house.instance,
    )
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(long.execute, "small_job")
        try:
            until(lambda: long.bank.ids() == [1])
            requests.send(long.storage, Request("barrier", trigger="sensor"))
            until(lambda: requests.pending(long.storage) == [])
            long.bank.land(2)
            assert "asked the running coordinator for a barrier" in long.tick("checkpoint_sensor")[1]
            until(lambda: long.bank.ids() == [1, 2])
            assert newest_trigger(long) == Trigger.SENSOR
        finally:
            requests.send(long.storage, Request("stop"))
        assert run.result(60).success
    long.bank.assert_exact(1, 2)
