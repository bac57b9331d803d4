-- For each won auction the mean of its winning price and of the ten before it by the same seller.
SELECT seller, id AS auction, avg(price) OVER (
    PARTITION BY seller ORDER BY bid_date_time, bid_seq ROWS BETWEEN 10 PRECEDING AND CURRENT ROW
) AS avg_price
FROM winning_bid
