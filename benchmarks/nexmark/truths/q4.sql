-- The mean winning price of each category.
SELECT category, avg(price) AS avg_final
FROM winning_bid
GROUP BY category
