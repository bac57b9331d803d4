-- The highest bid of each auction while it was open; of equal ones the earliest. q4, q6 and q9 read it.
SELECT a.id, a.seller, a.category, b.bidder, b.price, b.date_time AS bid_date_time, b.extra AS bid_extra, b.seq AS bid_seq
FROM auction a JOIN bid b ON b.auction = a.id AND b.date_time BETWEEN a.date_time AND a.expires
QUALIFY row_number() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.date_time, b.seq) = 1
