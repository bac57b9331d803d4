"""What a machine that lost its power left of the coordinator's notes: zeros, half a file, nothing; and requests that
lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import structlog

from state_ops.coordination import lease, requests, results, suspension
from state_ops.errors import DamageError
from state_ops.storage.paths import HOLDS
from tests.recovery.small import Bank, until
from tests.tools.sampling import sampled
from weir.run import fsck

TORN = {
    "zeros": b"\0" * 120,
    "half": b'{"generation": 3, "coun',
    "nothing": b"",
    "not UTF-8": b"\xff\xfe{}",
    "a list": b"[1, 2]",
    "of other types": b'{"kind": 7, "at": "noon", "generation": "x", "counter": [], "how": 1, "checkpoint_id": null}',
    "without fields": b"{}",
}


@pytest.fixture
def bank(tmp_path: Path) -> Bank:
    bank = Bank.at(tmp_path)
    bank.epochs(1)
    return bank


def left(bank: Bank, path: str, content: bytes) -> Path:
    file = Path(bank.site.settings.storage_uri("small").removeprefix("file://")) / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("content", sampled(TORN.values(), 3), ids=TORN)
def test_a_lease_or_halt_that_cannot_be_read_is_named_and_said_how_to_mend(bank, content):
    file = left(bank, lease.LEASE, content)
    with pytest.raises(DamageError, match=r"coordinator/lease\.json cannot be read") as damage:
        bank.epochs(2)
    assert str(file) in str(damage.value.where) and "delete it" in str(damage.value.next)
    file.unlink()  # as it says
    bank.epochs()
    bank.assert_exact(1, 2)

    left(bank, suspension.PATH, content)
    with pytest.raises(DamageError, match=r"coordinator/halt\.json cannot be read") as damage:
        suspension.read(bank.registry._checkpoints.storage)
    assert "halt.json" in str(damage.value.where)


@pytest.mark.parametrize("content", sampled(TORN.values(), 3), ids=TORN)
def test_a_request_that_cannot_be_read_is_dropped_and_reported(bank, content):
    before, during = (left(bank, f"{requests.REQUESTS}/{name * 32}.json", content) for name in "ab")
    with structlog.testing.capture_logs() as logged:
        bank.epochs(2)
        assert not before.exists() and not during.exists()
        with bank.coordinator():
            torn = left(bank, f"{requests.REQUESTS}/{'c' * 32}.json", content)
            until(lambda: not torn.exists())
            requests.send(bank.registry._checkpoints.storage, requests.Request("stop"))
    dropped = {line["path"] for line in logged if line["event"] == "a request that cannot be read is dropped"}
    assert dropped == {f"{requests.REQUESTS}/{name * 32}.json" for name in "abc"}
    bank.assert_exact(1, 2)


@pytest.mark.parametrize("content", sampled(TORN.values(), 3), ids=TORN)
def test_a_hold_that_cannot_be_read_ends_no_run(bank, content):
    file = left(bank, f"{HOLDS}/{'b' * 32}.json", content)
    bank.epochs(2, 3)
    bank.assert_exact(1, 2, 3)
    assert file.exists(), "it may be a restore's that runs"


def test_a_request_that_names_another_object_deletes_none_but_itself(bank):
    bank.epochs(2)
    head = bank.registry.head()
    victim = next(file.path for file in bank.registry.files(head) if file.kind == "state")
    lies = [{"kind": "barrier", "trigger": "sensor"}, {"kind": "of a newer Weir"}, {"kind": "stop"}]
    files = [
        left(bank, f"{requests.REQUESTS}/{number:032x}.json", json.dumps({**request, "name": victim}).encode())
        for number, request in enumerate(lies)
    ]
    bank.epochs()
    assert not any(file.exists() for file in files), "each was answered"
    assert fsck.examine(bank.site.pipeline, bank.site.settings).damage == ()
    bank.assert_exact(1, 2)


@pytest.mark.parametrize("content", sampled(TORN.values(), 3), ids=TORN)
def test_a_result_of_a_check_or_drill_that_cannot_be_read_is_none(bank, content):
    for path in (results.FSCK, results.FSCK_QUICK, results.DRILL):
        left(bank, path, content)
    storage = bank.registry._checkpoints.storage
    assert results.checked(storage) == [] and results.drilled(storage) is None
    fsck.examine_and_note(bank.site.pipeline, bank.site.settings)
    assert [checked.damaged for checked in results.checked(storage)] == [0]
