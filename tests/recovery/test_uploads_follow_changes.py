"""What an epoch uploads follows what changed in it, not what is there, compactions included."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tests.recovery import counters
from tests.recovery.harness import Site
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run

_KEYS, _EPOCHS = 500_000, 10


def test_uploads_follow_changes(tmp_path):
    site = Site(tmp_path, {"WEIR_EPOCH__MAX_FILES": "1"}, counters.pipeline, "tests.recovery.counters")
    site.landing.mkdir()
    chance = np.random.default_rng(7)
    few, many = _KEYS // 1000, _KEYS // 100
    arrivals = [_readings(chance, number) for number in [_KEYS, *[few] * _EPOCHS, *[many] * _EPOCHS]]
    for index, rows in enumerate(arrivals):
        pq.write_table(pa.Table.from_pandas(rows, preserve_index=False), site.landing / f"{index:03}.parquet")

    options = RunOptions(until_caught_up=True)
    load, *changed = [report.checkpoint for report in run(site.pipeline, site.settings, options, InMemoryExecutor())]

    assert load.bytes_new == load.bytes_total > _KEYS * 20
    shares = [checkpoint.bytes_new / checkpoint.bytes_total for checkpoint in changed]
    few_shares, many_shares = shares[:_EPOCHS], shares[_EPOCHS:]
    # Twice what changed pays for rewriting it in compactions; the worst epoch is the one of a compaction.
    assert np.mean(few_shares) < 0.004 and max(few_shares) < 0.01, few_shares
    assert np.mean(many_shares) < 0.03 and max(many_shares) < 0.10, many_shares
    assert changed[-1].bytes_total < 1.3 * load.bytes_total, "compactions keep the state from growing with its changes"
    _assert_state(site, arrivals)
    site.assert_no_orphans()


def _readings(chance: np.random.Generator, number: int) -> pd.DataFrame:
    ids = chance.choice(_KEYS, size=number, replace=False)
    labels = np.char.add("label ", (ids % 1000).astype(str))
    return pd.DataFrame({"id": ids, "reading": chance.normal(size=number), "label": labels})


def _assert_state(site: Site, arrivals: list[pd.DataFrame]) -> None:
    rows = pd.concat(arrivals)
    wanted = rows.drop_duplicates("id", keep="last").set_index("id")
    wanted.insert(0, "changes", rows.groupby("id").size())
    counters = site.state("counters").set_index("id")
    pd.testing.assert_frame_equal(counters.sort_index(), wanted.sort_index(), check_exact=True)
