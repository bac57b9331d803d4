-- Auctions of one category whose seller lives in one of three states.
SELECT p.name, p.city, p.state, a.id
FROM auction a JOIN person p ON p.id = a.seller
WHERE a.category = 10 AND lower(p.state) IN ('or', 'id', 'ca')
