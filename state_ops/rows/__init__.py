"""State as rows in a backend: the row store, tables in memory, aggregation, spilling, the time index.

Imports `backends`, `arrow` and `schema`.
"""
