"""A file that was read and is delivered again under its name is not read, and whoever looks is told so."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs

from tests.recovery.small import Bank


@pytest.fixture
def bank(tmp_path) -> Bank:
    """Of two files that were read, the first was empty then and is full now."""
    bank = Bank.at(tmp_path / "site")
    bank.site.landing.mkdir(parents=True)
    empty = pa.table(
        {"id": pa.array([], pa.string()), "at": pa.array([], pa.int64()), "amount": pa.array([], pa.int64())}
    )
    pq.write_table(empty, bank.site.landing / "00001.parquet")
    bank.epochs(2)
    bank.land(1)
    return bank


def test_status_plan_and_fsck_name_it(bank, weir):
    shown = weir(bank.site, "status", "small")
    assert "1 file in" in shown.out and "delivered again after being read: 00001.parquet" in shown.out
    assert json.loads(weir(bank.site, "status", "small", "--json").out)["delivered_again"] == {
        "landing": ["00001.parquet"]
    }

    planned = weir(bank.site, "plan", "small")
    assert planned.code == 0 and "1 file: 00001.parquet: delivered again after being read" in planned.out
    findings = [
        finding
        for finding in json.loads(weir(bank.site, "plan", "small", "--json").out)["findings"]
        if finding["kind"] == "source"
    ]
    assert [(finding["aspect"], finding["verdict"]) for finding in findings] == [("files", "compatible")]

    checked = weir(bank.site, "fsck", "small")
    assert checked.code == 0 and "file delivered again (foreign): 1" in checked.out and "00001.parquet" in checked.out


def test_a_run_says_so_once_and_reads_on(bank):
    with capture_logs() as logs:
        bank.epochs(3, 4)
    warnings = [entry for entry in logs if "delivered again" in entry["event"]]
    assert [entry["files"] for entry in warnings] == ["1 file: 00001.parquet"]
    bank.assert_exact(2, 3, 4)


def test_nothing_is_said_where_nothing_was_delivered_again(tmp_path, weir):
    bank = Bank.at(tmp_path / "site")
    bank.epochs(1, 2)
    bank.land(3)
    assert "delivered again" not in weir(bank.site, "status", "small").out + weir(bank.site, "plan", "small").out
    assert json.loads(weir(bank.site, "fsck", "small", "--json").out)["findings"] == []
