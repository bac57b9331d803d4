-- Winning bids with their auctions.
SELECT id, seller, category, bidder, price, bid_date_time, bid_extra
FROM winning_bid
