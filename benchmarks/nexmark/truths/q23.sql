-- Bids of persons who also sell, with all auctions that they sell.
SELECT b.bidder, b.price, b.seq AS bid_seq, p.name, a.id AS auction, a.item_name
FROM bid b JOIN person p ON p.id = b.bidder JOIN auction a ON a.seller = b.bidder
