"""Tables of a Postgres server as source and as sink, by ADBC: Arrow all the way."""
