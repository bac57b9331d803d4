"""Each truth of Nexmark on a few rows that were thought out by hand: its columns, what ties, and which bounds count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from benchmarks.nexmark import truth
from benchmarks.nexmark.content import schema_of
from tests.nexmark.house import at, auction, bid, person, write


def rows(root: Path, query: str, *columns: str, **streams: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What a query hands out of an input, sorted; of it these columns, all by default."""
    truth.write(write(root / "input", **streams), root / "out", [query])
    table = pq.read_table(root / "out" / f"{query}.parquet")
    table = table.select(list(columns)) if columns else table
    return sorted(tuple(row.values()) for row in table.to_pylist())


@pytest.mark.parametrize("query", truth.QUERIES)
def test_columns_have_the_names_the_order_and_the_types_of_the_suite(tmp_path, query):
    truth.write(write(tmp_path / "input"), tmp_path / "out", [query])
    schema = pq.read_schema(tmp_path / "out" / f"{query}.parquet")
    assert list(zip(schema.names, schema.types, strict=True)) == [
        (field.name, field.type) for field in schema_of(query)
    ]


def test_stateless_queries(tmp_path):
    bids = [bid(1, auction=123, price=1000), bid(2, auction=124)]
    assert rows(tmp_path / "0", "q0", bids=bids)[0] == (123, 1, 1000, at(0), "extra 1")
    assert [row[2] for row in rows(tmp_path / "1", "q1", bids=bids)] == pytest.approx([908.0, 90.8])
    assert rows(tmp_path / "2", "q2", bids=bids) == [(123, 1000)]
    bids = [bid(1, auction=10_003)]
    assert rows(tmp_path / "13", "q13", bids=bids) == [(10_003, 1, 100, at(0), "value-3")]


def test_q3_takes_any_case_of_three_states_and_one_category(tmp_path):
    persons = [person(1, 1, "or"), person(2, 2, "Id"), person(3, 3, "CA"), person(4, 4, "WA")]
    auctions = [auction(9 + seller, 100 + seller, seller) for seller in (1, 2, 3, 4, 5)] + [auction(20, 200, 1, 11)]
    auctions.append(auction(21, 201, 1))
    assert rows(tmp_path, "q3", persons=persons, auctions=auctions) == [
        ("name 1", "Bend", "or", 101),
        ("name 1", "Bend", "or", 201),
        ("name 2", "Bend", "Id", 102),
        ("name 3", "Bend", "CA", 103),
    ]


def test_a_winning_bid_lies_between_both_bounds_and_the_earliest_of_equal_ones_wins(tmp_path):
    auctions = [auction(1, 1, seconds=5, length=10), auction(2, 2), auction(3, 3), auction(4, 4, seconds=5)]
    bids = [
        bid(10, 1, 1, 500, seconds=4.999), bid(11, 1, 2, 500, seconds=15.001),  # outside
        bid(12, 1, 3, 400, seconds=15), bid(13, 1, 4, 400, seconds=5), bid(14, 1, 5, 400, seconds=5),  # the first of 5 s
        bid(16, 2, 6, 300, seconds=1), bid(15, 2, 7, 300, seconds=1), bid(17, 2, 8, 200, seconds=0),  # the lower seq
        bid(18, 4, 9, 100, seconds=4), bid(19, 99, 9, 100, seconds=4),
    ]  # fmt: skip
    streams = {"auctions": auctions, "bids": bids}
    assert rows(tmp_path / "9", "q9", **streams) == [
        (1, 1, 10, 4, 400, at(5), "extra 13"),
        (2, 1, 10, 7, 300, at(1), "extra 15"),
    ]
    assert rows(tmp_path / "4", "q4", **streams) == [(10, 350.0)]


def test_q4_is_a_mean_for_each_category(tmp_path):
    auctions = [auction(1, 1, category=10), auction(2, 2, category=10), auction(3, 3, category=11)]
    bids = [bid(4, 1, price=1), bid(5, 2, price=2), bid(6, 3, price=7)]
    assert rows(tmp_path, "q4", auctions=auctions, bids=bids) == [(10, 1.5), (11, 7.0)]


def test_q5_a_bid_is_in_five_windows_and_ties_are_kept(tmp_path):
    bids = [bid(1, 1, seconds=10), bid(2, 1, seconds=11.9), bid(3, 2, seconds=12), bid(4, 2, seconds=12)]
    result = rows(tmp_path, "q5", "window_start", "auction", "num", bids=bids)
    assert result == [
        (at(2), 1, 2),
        *((at(start), auction, 2) for start in (4, 6, 8, 10) for auction in (1, 2)),
        (at(12), 2, 2),
    ]


def test_q6_takes_up_to_ten_before_by_the_winning_bids_time_and_seq(tmp_path):
    auctions = [auction(number, number, seller=7, length=100) for number in range(1, 14)]
    auctions.append(auction(50, 50, seller=8))
    # The auctions are won in the reverse order of their ids, 12 and 13 at one time, of which 12 has the lower seq.
    bids = [bid(100 - number, number, price=number, seconds=20 - number) for number in range(1, 12)]
    bids += [bid(70, 12, price=12, seconds=1), bid(71, 13, price=13, seconds=1), bid(72, 50, price=5)]
    prices = [12, 13, *range(11, 0, -1)]
    means = {
        price: sum(prices[max(0, place - 10) : place + 1]) / min(place + 1, 11) for place, price in enumerate(prices)
    }
    assert means[12] == 12
    result = rows(tmp_path, "q6", auctions=auctions, bids=bids)
    assert result == [*((7, number, pytest.approx(means[number])) for number in range(1, 14)), (8, 50, 5.0)]


def test_q7_keeps_ties_and_ends_windows_at_ten_seconds(tmp_path):
    bids = [
        bid(1, price=9, seconds=0), bid(2, price=9, seconds=9.999), bid(3, price=8, seconds=5),
        bid(4, price=3, seconds=10),
    ]  # fmt: skip
    assert [row[4] for row in rows(tmp_path, "q7", bids=bids)] == ["extra 4", "extra 1", "extra 2"]


def test_q8_has_a_person_once_and_only_if_both_lie_in_one_window(tmp_path):
    persons = [person(1, 1, seconds=9), person(2, 2, seconds=9.999), person(3, 3, seconds=10)]
    auctions = [auction(4, 1, 1, seconds=0), auction(5, 2, 1, seconds=9), auction(6, 3, 2, seconds=10)]
    auctions.append(auction(7, 4, 3, seconds=19.999))
    assert rows(tmp_path, "q8", persons=persons, auctions=auctions) == [(1, "name 1", at(0)), (3, "name 3", at(10))]


def test_q10_and_q22_and_q14_make_texts(tmp_path):
    bids = [bid(1, seconds=-12 * 3600 + 61)]
    assert rows(tmp_path / "10", "q10", "dt", "hm", bids=bids) == [("2026-01-01", "00:01")]
    assert rows(tmp_path / "22", "q22", bids=bids) == [(1, 1, 100, "Google", "one", "two", "three", 1)]
    hours = {
        0: "nightTime",
        6: "nightTime",
        7: "otherTime",
        8: "dayTime",
        18: "dayTime",
        19: "otherTime",
        20: "nightTime",
    }
    bids = [bid(hour, bidder=hour, price=2_000_000, seconds=3600 * (hour - 12) + 3599) for hour in hours]
    bids += [bid(30, price=1_101_321), bid(31, price=55_066_080)]  # just below and above
    bids += [bid(32, bidder=30, price=1_101_322), bid(33, bidder=31, price=55_066_079, extra="cacao Cc")]
    result = rows(tmp_path / "14", "q14", "bidder", "bid_time_type", "price", "c_counts", bids=bids)
    assert [row[:2] for row in result[:-2]] == sorted(hours.items())
    assert result[0][2:] == (pytest.approx(1_816_000.0), 0)
    assert [row[0] for row in result[-2:]] == [30, 31]
    assert result[-1][3] == 3


def test_q11_ten_seconds_without_a_bid_end_a_session(tmp_path):
    bids = [bid(1, seconds=0), bid(2, seconds=9.999), bid(3, seconds=19.999), bid(4, seconds=19.999)]
    bids += [bid(6, bidder=2, seconds=3), bid(5, bidder=2, seconds=3)]
    assert rows(tmp_path, "q11", bids=bids) == [
        (1, 2, at(0), at(19.999)),
        (1, 2, at(19.999), at(29.999)),
        (2, 2, at(3), at(13)),
    ]


def test_q12_counts(tmp_path):
    assert rows(tmp_path, "q12", bids=[bid(1), bid(2, bidder=2), bid(3)]) == [(1, 2), (2, 1)]


def test_ranks_by_day_by_channel_and_by_auction(tmp_path):
    prices = [9_999, 10_000, 999_999, 1_000_000, 5_000_000]
    bids = [bid(number, number % 2, number % 3, price, 60 * number) for number, price in enumerate(prices)]
    bids.append(bid(9, 1, 1, 7, seconds=12 * 3600))
    ranks = (5, 1, 2, 2, 3, 1, 2, 2, 2, 1, 2, 2)
    other = (1, 1, 0, 0) * 3
    assert rows(tmp_path / "15", "q15", bids=bids) == [("2026-01-01", *ranks), ("2026-01-02", *other)]
    bids.append(bid(10, channel="x", seconds=30))
    assert rows(tmp_path / "16", "q16", bids=bids) == [
        ("Google", "2026-01-01", "12:04", *ranks),
        ("Google", "2026-01-02", "00:00", *other),
        ("x", "2026-01-01", "12:00", *other),
    ]
    assert rows(tmp_path / "17", "q17", bids=bids[:6]) == [
        (0, "2026-01-01", 3, 1, 1, 1, 9_999, 5_000_000, pytest.approx(6_009_998 / 3), 6_009_998),
        (1, "2026-01-01", 2, 0, 1, 1, 10_000, 1_000_000, 505_000.0, 1_010_000),
        (1, "2026-01-02", 1, 1, 0, 0, 7, 7, 7.0, 7),
    ]


def test_q18_of_equal_times_the_highest_seq_is_last(tmp_path):
    bids = [bid(3, seconds=5), bid(2, seconds=5), bid(4, seconds=4), bid(5, auction=2), bid(6, bidder=2)]
    assert rows(tmp_path, "q18", "auction", "bidder", "extra", bids=bids) == [
        (1, 1, "extra 3"), (1, 2, "extra 6"), (2, 1, "extra 5"),
    ]  # fmt: skip


def test_q19_ranks_ten_and_the_lower_seq_comes_first(tmp_path):
    bids = [bid(number, price=100 - number // 2) for number in range(12)] + [bid(20, auction=2)]
    result = rows(tmp_path, "q19", "auction", "seq", "rank_number", bids=bids)
    assert result == [*((1, number, number + 1) for number in range(10)), (2, 20, 1)]


def test_q20_and_q23_join(tmp_path):
    auctions = [auction(1, 1, seller=1), auction(2, 2, seller=1, category=11), auction(3, 3, seller=2)]
    bids = [bid(4, 1, bidder=2), bid(5, 2, bidder=1), bid(6, 9, bidder=1)]
    persons = [person(7, 1)]
    assert rows(tmp_path / "20", "q20", auctions=auctions, bids=bids) == [(1, 2, 100, 4, "item 1", 1, 10)]
    assert rows(tmp_path / "23", "q23", persons=persons, auctions=auctions, bids=bids) == [
        (1, 100, seq, "name 1", sold, f"item {sold}") for seq in (5, 6) for sold in (1, 2)
    ]


def test_q21_leaves_out_bids_with_no_channel_id(tmp_path):
    channels = ["Apple", "GOOGLE", "facebook", "baidu", "channel-1", "channel-2"]
    bids = [bid(number, channel=channel) for number, channel in enumerate(channels)]
    bids[4]["url"] += "&channel_id=77&more=1"
    bids[0]["url"] += "&channel_id=5"
    assert rows(tmp_path, "q21", "seq", "channel_id", bids=bids) == [(0, "0"), (1, "1"), (2, "2"), (3, "3"), (4, "77")]
