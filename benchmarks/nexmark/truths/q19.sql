-- The ten highest bids of each auction.
SELECT auction, bidder, price, date_time, seq,
    row_number() OVER (PARTITION BY auction ORDER BY price DESC, seq) AS rank_number
FROM bid
QUALIFY rank_number <= 10
