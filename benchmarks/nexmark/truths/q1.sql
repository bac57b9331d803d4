-- Bids with their price in another currency.
SELECT auction, bidder, price * 0.908::DOUBLE AS price, date_time, extra
FROM bid
