-- Bids with a value of the side input.
SELECT b.auction, b.bidder, b.price, b.date_time, s.value
FROM bid b JOIN side_input s ON s.key = b.auction % 10000
