"""The generator's events: their proportions, their keys, and the same ones however many files they are in."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from benchmarks.nexmark.generate import STREAMS, Options, generate

EVENTS = 120_000  # more than one block


@pytest.fixture(scope="module")
def events(tmp_path_factory) -> dict[str, pl.DataFrame]:
    root = tmp_path_factory.mktemp("nexmark")
    generate(Options(EVENTS, seed=7, files=3), root / "events")
    return everything(root / "events")


def everything(root: Path) -> dict[str, pl.DataFrame]:
    return {name: pl.concat(pl.read_parquet(file) for file in sorted((root / name).iterdir())) for name in STREAMS}


def test_of_fifty_events_one_is_a_person_three_are_auctions_and_seq_numbers_all(events):
    assert [events[name].height for name in STREAMS] == [EVENTS // 50, EVENTS // 50 * 3, EVENTS // 50 * 46]
    assert all(events[name]["seq"].is_sorted() for name in STREAMS)
    assert pl.concat([events[name]["seq"] for name in STREAMS]).sort().to_list() == list(range(EVENTS))
    assert all(events[name].null_count().sum_horizontal().sum() == 0 for name in STREAMS)


@pytest.mark.long
def test_the_seed_tells_the_events_and_the_number_of_files_does_not(events, tmp_path):
    generate(Options(EVENTS, seed=7, files=8, uneven=True), tmp_path / "more")
    generate(Options(EVENTS, seed=8, files=3), tmp_path / "others")
    for name, rows in everything(tmp_path / "more").items():
        assert_frame_equal(rows, events[name])
    sizes = [pl.read_parquet(file).height for file in sorted((tmp_path / "more" / "bid").iterdir())]
    assert len(sizes) == 8
    assert max(sizes) > 1.2 * min(sizes)
    assert not everything(tmp_path / "others")["bid"].equals(events["bid"])


def test_ids_grow_and_keys_are_hot(events):
    person, auction, bid = (events[name] for name in STREAMS)
    assert person["id"].to_list() == list(range(1_000, 1_000 + person.height))
    assert auction["id"].to_list() == list(range(1_000, 1_000 + auction.height))
    assert 0.74 < (auction["seller"] % 100 == 0).mean() < 0.78
    assert 0.74 < (bid["bidder"] % 100 == 1).mean() < 0.78
    assert 0.49 < (bid["auction"] % 100 == 0).mean() < 0.53
    newest = bid["seq"] // 50 * 3 + 1_002
    assert (bid["auction"] - newest).max() == 10
    assert ((bid["auction"] - newest).abs() <= 100).all()


def test_values(events):
    auction, bid = events["auction"], events["bid"]
    assert bid["price"].min() >= 100
    assert bid["price"].max() <= 100_000_000
    below = [(bid["price"] < limit).mean() for limit in (1_000, 10_000, 100_000, 1_000_000, 10_000_000)]
    assert below == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6], abs=0.01)
    length = (auction["expires"] - auction["date_time"]).dt.total_milliseconds()
    assert 1_000 <= length.min() < 2_000
    assert 60_000 < length.max() < 70_000
    assert set(auction["category"]) == set(range(10, 15))
    hot = bid.filter(pl.col("channel").is_in(["Google", "Facebook", "Baidu", "Apple"]))
    assert 0.49 < hot.height / bid.height < 0.51
    assert not hot["url"].str.contains("channel_id").any()
    others = bid.filter(pl.col("channel").str.contains(r"^channel-\d{1,4}$"))
    assert others.height + hot.height == bid.height
    assert 0.88 < others["url"].str.contains(r"&channel_id=\d+$").mean() < 0.92
    assert (
        bid["url"]
        .str.contains(r"^https://www\.nexmark\.com/[a-z_]{3,4}/[a-z_]{3,4}/[a-z_]{3,4}/item\.htm\?query=1")
        .all()
    )
    assert bid["extra"].str.len_bytes().mean() == pytest.approx(68, abs=1)


@pytest.mark.long
def test_one_event_of_ten_is_late_if_asked_for(tmp_path):
    generate(Options(20_000, out_of_order=0, rate=1_000), tmp_path / "ordered")
    bid = everything(tmp_path / "ordered")["bid"]
    assert bid["date_time"].is_sorted()
    assert (bid["date_time"].max() - bid["date_time"].min()).total_seconds() == pytest.approx(20, abs=0.1)
    generate(Options(20_000, out_of_order=2.5, rate=1_000), tmp_path / "late")
    late = everything(tmp_path / "late")["bid"]["date_time"]
    behind = (bid["date_time"] - late).dt.total_milliseconds()
    assert 2_000 < behind.max() <= 2_500
    assert 0.08 < (behind > 0).mean() < 0.12


def test_events_are_never_added_to_others(tmp_path):
    generate(Options(100), tmp_path)
    with pytest.raises(FileExistsError):
        generate(Options(100), tmp_path)
