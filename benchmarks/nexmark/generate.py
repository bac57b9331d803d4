"""The events of Nexmark's auction house, as Parquet files of persons, auctions and bids.

    python -m benchmarks.nexmark.generate --events 10000000 --out DIR

    DIR/person/part-00000.parquet    DIR/auction/...    DIR/bid/...    DIR/side_input.parquet

Of 50 events in a row the first is a person, three are auctions and 46 are bids, numbered through by `seq`. Ids, hot
keys, prices, texts and channels are drawn as Apache Beam's generator and nexmark/nexmark's draw them: three of four
auctions are by the first person of the last hundred, three of four bids by the second one, every other bid is on the
first auction of the last hundred, and others are on one of the last hundred auctions or of the next ten, which do not
exist yet. An auction is open for a second and up to twice as long as a hundred auctions take to begin.

Events are drawn in blocks with a seed each, so the same seed gives the same events in any number of files, and memory
is bounded by the block.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

STREAMS = ("person", "auction", "bid")
SIDE_INPUT_KEYS = 10_000

_TIME = pa.timestamp("us", tz="UTC")
_START_MS = 1_767_225_480_000  # 2025-12-31 23:58 UTC: a day ends soon, also for a few events
_GRAIN_MS = 3  # no two times are ten seconds apart, which some engines take for one session and others for two
_BLOCK = 50_000
_PERSONS, _AUCTIONS, _BIDS = 1, 3, 46
_ALL = _PERSONS + _AUCTIONS + _BIDS
_FIRST_ID, _FIRST_CATEGORY, _CATEGORIES = 1_000, 10, 5
_HOT = 100  # one person or auction of so many is hot
_ACTIVE_PERSONS, _ACTIVE_AUCTIONS, _LEAD = 1_000, 100, 10
_CHANNELS = 10_000
_HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
_DELAYED = 0.1  # the share of events that come late, if any do
_STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
_CITIES = (
    "Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond", "Seattle", "Kent", "Cheyenne",
)  # fmt: skip
_FIRST_NAMES = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter")
_LAST_NAMES = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")

Numbers = np.ndarray


@dataclass(frozen=True, slots=True)
class Options:
    """What is generated.

    Attributes:
        events: Of all three kinds together.
        seed: The same seed gives the same events.
        files: How many files each kind has; each has the events of one range of `seq`.
        rate: Events in a second of event time.
        out_of_order: One event of ten is up to so many seconds older than its neighbours.
        uneven: Whether files differ in size, from half of the mean to half as much again.
    """

    events: int
    seed: int = 1
    files: int = 10
    rate: float = 50.0
    out_of_order: float = 3.0
    uneven: bool = False


def generate(options: Options, out: Path) -> None:
    """Write the events and the side input.

    Args:
        options: What is generated.
        out: A directory, which is created. It must have no events yet.

    Raises:
        FileExistsError: There are events in the directory.
    """
    for name in STREAMS:
        (out / name).mkdir(parents=True)
    bounds = _bounds(options)
    channels = _channel_urls(np.random.default_rng([options.seed, 0]))
    for number, (first, end) in enumerate(pairwise(bounds)):
        with ExitStack() as stack:
            writers: dict[str, pq.ParquetWriter] = {}
            for name, rows in _range(options, channels, first, end):
                if name not in writers:
                    file = out / name / f"part-{number:05}.parquet"
                    writers[name] = stack.enter_context(pq.ParquetWriter(file, rows.schema, compression="zstd"))
                writers[name].write_table(rows)
    pq.write_table(side_input(), out / "side_input.parquet")


def _bounds(options: Options) -> list[int]:
    """Where each file begins, and the end of the last one."""
    bounds = np.arange(options.files + 1) * options.events / options.files
    if options.uneven:
        moved = np.random.default_rng([options.seed, 2]).uniform(-0.25, 0.25, options.files - 1)
        bounds[1:-1] = [
            at + part * options.events / options.files for at, part in zip(bounds[1:-1], moved, strict=True)
        ]
    return [int(at) for at in bounds]


def side_input() -> pa.Table:
    """A text for each of the keys 0 to 9999."""
    keys = np.arange(SIDE_INPUT_KEYS)
    return pa.table({"key": pa.array(keys), "value": _joined("value-", _text_of(keys))})


def _range(options: Options, channels: pa.Array, first: int, end: int) -> Iterator[tuple[str, pa.Table]]:
    """The events with `seq` from `first` to before `end`, block by block."""
    for block in range(first // _BLOCK, -(-end // _BLOCK)):
        for name, rows in _block(options, channels, block):
            seq = rows["seq"].to_numpy()
            part = rows.slice(int(np.searchsorted(seq, first)), int(((seq >= first) & (seq < end)).sum()))
            yield name, part


def _block(options: Options, channels: pa.Array, block: int) -> Iterator[tuple[str, pa.Table]]:
    rng = np.random.default_rng([options.seed, 1, block])
    seq = np.arange(block * _BLOCK, (block + 1) * _BLOCK)
    due = _due_ms(seq, options)
    late = (rng.random(len(seq)) < _DELAYED) * rng.random(len(seq)) * options.out_of_order
    at = (due - (late * 1_000).astype(np.int64)) // _GRAIN_MS * _GRAIN_MS
    place = seq % _ALL
    person, auction = place < _PERSONS, (place >= _PERSONS) & (place < _PERSONS + _AUCTIONS)
    bid = ~person & ~auction
    yield "person", _persons(rng, seq[person], at[person])
    yield "auction", _auctions(rng, options, seq[auction], at[auction])
    yield "bid", _bids(rng, channels, seq[bid], at[bid])


def _due_ms(seq: Numbers, options: Options) -> Numbers:
    return _START_MS + (seq * (1_000 / options.rate)).astype(np.int64)


def _persons(rng: np.random.Generator, seq: Numbers, at: Numbers) -> pa.Table:
    rows = len(seq)
    card = [pc.utf8_lpad(_text_of(rng.integers(0, 10_000, rows)), 4, "0") for _ in range(4)]
    columns = {
        "id": pa.array(_last_person(seq) + _FIRST_ID),
        "name": _joined(_one_of(rng, _FIRST_NAMES, rows), " ", _one_of(rng, _LAST_NAMES, rows)),
        "email_address": _joined(_words(rng, rows, 7), "@", _words(rng, rows, 5), ".com"),
        "credit_card": pc.binary_join_element_wise(*card, " "),
        "city": _one_of(rng, _CITIES, rows),
        "state": _one_of(rng, _STATES, rows),
        "date_time": _times(at),
    }
    return _with_extra(rng, columns, seq, average=200)


def _auctions(rng: np.random.Generator, options: Options, seq: Numbers, at: Numbers) -> pa.Table:
    rows = len(seq)
    hot = rng.integers(0, 4, rows) > 0
    seller = np.where(hot, _last_person(seq) // _HOT * _HOT, _any_person(rng, seq))
    initial = _prices(rng, rows)
    horizon = int(_ACTIVE_AUCTIONS * _ALL / _AUCTIONS / options.rate * 1_000)
    expires = at + 1_000 + rng.integers(0, max(2 * horizon, 1), rows)
    columns = {
        "id": pa.array(_last_auction(seq) + _FIRST_ID),
        "item_name": _words(rng, rows, 20),
        "description": _words(rng, rows, 100),
        "initial_bid": pa.array(initial),
        "reserve": pa.array(initial + _prices(rng, rows)),
        "date_time": _times(at),
        "expires": _times(expires),
        "seller": pa.array(seller + _FIRST_ID),
        "category": pa.array(_FIRST_CATEGORY + rng.integers(0, _CATEGORIES, rows)),
    }
    return _with_extra(rng, columns, seq, average=500)


def _bids(rng: np.random.Generator, channels: pa.Array, seq: Numbers, at: Numbers) -> pa.Table:
    rows = len(seq)
    newest = _last_auction(seq)
    oldest = np.maximum(newest - _ACTIVE_AUCTIONS, 0)
    auction = np.where(rng.integers(0, 2, rows) > 0, newest // _HOT * _HOT, rng.integers(oldest, newest + 1 + _LEAD))
    bidder = np.where(rng.integers(0, 4, rows) > 0, _last_person(seq) // _HOT * _HOT + 1, _any_person(rng, seq))
    hot_channel = _CHANNELS + rng.integers(0, len(_HOT_CHANNELS), rows)
    channel = np.where(rng.integers(0, 2, rows) > 0, hot_channel, rng.integers(0, _CHANNELS, rows))
    columns = {
        "auction": pa.array(auction + _FIRST_ID),
        "bidder": pa.array(bidder + _FIRST_ID),
        "price": pa.array(_prices(rng, rows)),
        "channel": _channel_names().take(pa.array(channel)),
        "url": channels.take(pa.array(channel)),
        "date_time": _times(at),
    }
    return _with_extra(rng, columns, seq, average=100, fixed=32)


def _with_extra(
    rng: np.random.Generator, columns: dict[str, pa.Array], seq: Numbers, *, average: int, fixed: int | None = None
) -> pa.Table:
    """The columns with `extra`, letters that bring a row to some average size, and `seq`.

    Args:
        average: Bytes of a row.
        fixed: Bytes of the other columns, where all rows are taken to have as many.
    """
    size = np.full(len(seq), fixed or 0)
    if fixed is None:
        texts = [column for column in columns.values() if pa.types.is_string(column.type)]
        size += 8 * (len(columns) - len(texts))
        for column in texts:
            size += pc.binary_length(column).to_numpy(zero_copy_only=False)
    missing = np.maximum(average - size, 0)
    spread = np.rint(missing * 0.2).astype(np.int64)
    length = missing - spread + rng.integers(0, np.maximum(2 * spread, 1))
    return pa.table({**columns, "extra": _letters(rng, length), "seq": pa.array(seq)})


# Ids


def _last_person(seq: Numbers) -> Numbers:
    """The newest person at each event, counted from 0."""
    return seq // _ALL * _PERSONS + np.minimum(seq % _ALL, _PERSONS - 1)


def _last_auction(seq: Numbers) -> Numbers:
    """The newest auction at each event, counted from 0; -1 before the first."""
    return seq // _ALL * _AUCTIONS + np.clip(seq % _ALL - _PERSONS, -1, _AUCTIONS - 1)


def _any_person(rng: np.random.Generator, seq: Numbers) -> Numbers:
    """One of the last thousand persons, or of the next ten."""
    persons = _last_person(seq) + 1
    active = np.minimum(persons, _ACTIVE_PERSONS)
    return persons - active + rng.integers(0, active + _LEAD)


# Values


def _prices(rng: np.random.Generator, rows: int) -> Numbers:
    """From 100 to 100,000,000, their logarithms evenly spread."""
    return np.rint(10.0 ** (rng.random(rows) * 6) * 100).astype(np.int64)


def _times(ms: Numbers) -> pa.Array:
    return pa.array(ms * 1_000).cast(_TIME)


def _one_of(rng: np.random.Generator, texts: Sequence[str], rows: int) -> pa.Array:
    return pa.array(texts).take(pa.array(rng.integers(0, len(texts), rows)))


def _words(rng: np.random.Generator, rows: int, most: int, blank: str = " ") -> pa.Array:
    """Texts of 3 to before `most` letters, one of thirteen of which is a blank."""
    text = _letters(rng, rng.integers(3, most, rows), blank)
    return pc.utf8_trim(text, " ")


def _letters(rng: np.random.Generator, lengths: Numbers, blank: str | None = None) -> pa.Array:
    """A text of random letters for each length."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    letters = rng.integers(97, 123, int(offsets[-1]), dtype=np.uint8)
    if blank is not None:
        letters[rng.integers(0, 13, len(letters), dtype=np.uint8) == 0] = ord(blank)
    return pa.StringArray.from_buffers(len(lengths), pa.py_buffer(offsets), pa.py_buffer(letters))


def _text_of(numbers: Numbers) -> pa.Array:
    return pa.array(numbers).cast(pa.string())


def _joined(*parts: pa.Array | str) -> pa.Array:
    return pc.binary_join_element_wise(*parts, "")


def _channel_names() -> pa.Array:
    return pa.concat_arrays([_joined("channel-", _text_of(np.arange(_CHANNELS))), pa.array(_HOT_CHANNELS)])


def _channel_urls(rng: np.random.Generator) -> pa.Array:
    """The url of each channel, hot ones last: three directories, and for nine of ten other channels the id."""
    everything = _CHANNELS + len(_HOT_CHANNELS)
    directories = [_words(rng, everything, 5, "_") for _ in range(3)]
    base = _joined("https://www.nexmark.com/", *(part for text in directories for part in (text, "/")))
    reversed_bits = [int(f"{number:032b}"[::-1], 2) for number in range(_CHANNELS)]
    ids = np.abs(np.array(reversed_bits, dtype=np.uint32).view(np.int32).astype(np.int64))
    shown = np.concatenate([rng.integers(0, 10, _CHANNELS) > 0, np.zeros(len(_HOT_CHANNELS), bool)])
    ids = np.concatenate([ids, np.zeros(len(_HOT_CHANNELS), np.int64)])
    with_id = pc.if_else(pa.array(shown), _joined("&channel_id=", _text_of(ids)), "")
    return _joined(base, "item.htm?query=1", with_id)


def main() -> None:
    defaults = Options(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, required=True, help="how many, of all three kinds together")
    parser.add_argument("--out", type=Path, required=True, help="a directory without events")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--files", type=int, default=defaults.files, help="of each kind")
    parser.add_argument("--rate", type=float, default=defaults.rate, help="events in a second of event time")
    parser.add_argument(
        "--out-of-order",
        type=float,
        default=defaults.out_of_order,
        metavar="SECONDS",
        help="by how much one event of ten may be late; 0: none is",
    )
    parser.add_argument("--uneven", action="store_true", help="files differ in size")
    given = parser.parse_args()
    options = Options(given.events, given.seed, given.files, given.rate, given.out_of_order, given.uneven)
    generate(options, given.out)


if __name__ == "__main__":
    main()
