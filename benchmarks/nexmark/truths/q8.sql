-- Persons who opened an auction in the window of 10 s in which they joined.
SELECT DISTINCT p.id, p.name, to_timestamp(epoch_us(p.date_time) // 10000000 * 10) AS starttime
FROM person p JOIN auction a
ON a.seller = p.id AND epoch_us(a.date_time) // 10000000 = epoch_us(p.date_time) // 10000000
