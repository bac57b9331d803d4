-- The auctions with most bids in each window of 10 s, one of which begins every 2 s.
WITH counted AS (
    SELECT auction, to_timestamp((epoch_us(date_time) // 2000000 - step) * 2) AS window_start, count(*) AS num
    FROM bid, range(5) AS steps(step)
    GROUP BY ALL
)
SELECT auction, num, window_start
FROM counted
QUALIFY num = max(num) OVER (PARTITION BY window_start)
