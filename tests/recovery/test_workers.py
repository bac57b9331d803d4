"""A Python worker dies in the middle of an epoch; the coordinator lives."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import TransientError
from tests.recovery import mortal
from tests.recovery.harness import Site

_KEYS = 100


@pytest.fixture
def site(tmp_path, spark):
    """Makes a site with one epoch read and one that waits, in which a worker will die."""

    def make_site(**options: str) -> Site:
        site = Site(tmp_path / "site", options, mortal.pipeline, "tests.recovery.mortal")
        site.landing.mkdir(parents=True)
        ids = pa.array(range(_KEYS))
        pq.write_table(pa.table({"id": ids, "fuse": pa.nulls(_KEYS, pa.string())}), site.landing / "1.parquet")
        site.run()
        fuse = tmp_path / "fuse"
        fuse.touch()
        fuses = pa.array([str(fuse)] + [None] * (_KEYS - 1), pa.string())
        pq.write_table(pa.table({"id": ids, "fuse": fuses}), site.landing / "2.parquet")
        return site

    return make_site


def _assert_exact(site: Site) -> None:
    assert sorted(site.table("counted")["id"]) == sorted([*range(_KEYS), *range(_KEYS)])
    assert dict(site.state("counts").itertuples(index=False, name=None)) == dict.fromkeys(range(_KEYS), 2)
    site.assert_no_orphans()


def test_an_epoch_whose_worker_dies_is_replayed_if_failures_are_tolerated(site):
    pipeline = site(WEIR_CHECKPOINTS__TOLERABLE_FAILURES="1")

    replayed = pipeline.run()

    assert [report.checkpoint.id for report in replayed] == [3], "the id of the epoch that failed is never used again"
    pipeline.run()  # takes over, and sweeps what the dead worker's neighbours uploaded after the epoch was discarded
    _assert_exact(pipeline)


@pytest.mark.long
def test_else_the_run_ends_and_the_next_one_is_exact(site):
    pipeline = site()

    with pytest.raises(TransientError, match="The Spark job of counts failed: "):
        pipeline.run()

    assert [report.checkpoint.id for report in pipeline.run()] == [3]
    pipeline.run()
    _assert_exact(pipeline)
