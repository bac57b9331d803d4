-- Bids on the auctions of one category.
SELECT b.auction, b.bidder, b.price, b.seq AS bid_seq, a.item_name, a.seller, a.category
FROM bid b JOIN auction a ON a.id = b.auction
WHERE a.category = 10
