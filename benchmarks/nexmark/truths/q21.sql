-- Bids with the id of their channel, of those that have one.
WITH known AS (
    SELECT *, CASE lower(channel)
        WHEN 'apple' THEN '0'
        WHEN 'google' THEN '1'
        WHEN 'facebook' THEN '2'
        WHEN 'baidu' THEN '3'
        ELSE CASE
            WHEN regexp_matches(url, '(&|^)channel_id=[^&]*') THEN regexp_extract(url, '(&|^)channel_id=([^&]*)', 2)
        END
    END AS channel_id
    FROM bid
)
SELECT auction, bidder, price, channel, channel_id, seq
FROM known
WHERE channel_id IS NOT NULL
