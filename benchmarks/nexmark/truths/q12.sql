-- Bids of each bidder: those of all windows of processing time together.
SELECT bidder, count(*) AS bid_count
FROM bid
GROUP BY bidder
