-- Sessions of each bidder: a pause of 10 s ends one.
WITH marked AS (
    SELECT bidder, date_time, seq, coalesce(
        epoch_us(date_time) - epoch_us(lag(date_time) OVER (PARTITION BY bidder ORDER BY date_time, seq)) >= 10000000,
        true
    ) AS begins
    FROM bid
),
numbered AS (
    SELECT bidder, date_time, count(*) FILTER (begins) OVER (PARTITION BY bidder ORDER BY date_time, seq) AS session
    FROM marked
)
SELECT bidder, count(*) AS bid_count, min(date_time) AS starttime, max(date_time) + INTERVAL 10 SECONDS AS endtime
FROM numbered
GROUP BY bidder, session
