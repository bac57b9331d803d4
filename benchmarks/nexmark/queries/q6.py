"""For each won auction the mean of its winning price and of the ten that its seller got before it."""

from weir import Epoch, KeyState, Pipeline, State, delta, desc, files, join, select, side, stage, top_n

auctions = files("{input}/auction/*.parquet", name="auction", event_time="date_time")
bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")
WON = ["date_time_of_bid", "seq"]

# No auction is open for longer than an hour, so what follows on an auction's end is later than the bids of an hour ago.
bids_on_auctions = join(
    "bids_on_auctions", side(auctions, select=["id", "seller", "date_time", "expires"]),
    side(bids, select=["auction", "price", "date_time", "seq"]), on={"id": "auction"}, within=("0s", "1h"),
    lateness="1m", suffix="_of_bid",
)  # fmt: skip
best, still_open = [desc("price"), *WON], "date_time_of_bid <= expires"
won = top_n("won", bids_on_auctions, key="id", by=best, n=1, rank=None, until="expires", where=still_open)
hour_later = "timestamp_micros(unix_micros(date_time_of_bid) + 3600000000) AS settled"
settling = select("settling", won, "id", "seller", "price", *WON, hour_later)
in_order = top_n("in_order", settling, key="id", by="seq", n=1, rank=None, until="settled")


class Seller(State):
    prices: list[int] = []  # noqa: RUF012 - the last ten


@stage(
    "means", source=in_order, key="seller", state=Seller, order_by=WON, per_key=True,
    output={"seller": int, "auction": int, "avg_price": float}, sink=delta.append("q6"),
)  # fmt: skip
def means(seller: int, rows: list[dict], state: KeyState, _: Epoch) -> list[dict]:
    prices, out = state.get().prices, []
    for row in rows:
        prices = [*prices[-10:], row["price"]]
        out.append({"seller": seller, "auction": row["id"], "avg_price": sum(prices) / len(prices)})
    state.update(Seller(prices=prices[-10:]))
    return out


pipeline = Pipeline("q6", (bids_on_auctions, won, settling, in_order, means))
