-- The last bid of each bidder on each auction.
SELECT auction, bidder, price, channel, url, date_time, extra
FROM bid
QUALIFY row_number() OVER (PARTITION BY bidder, auction ORDER BY date_time DESC, seq DESC) = 1
