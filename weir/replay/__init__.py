"""Play an old epoch again, and find where a row of a table came from. The pipeline's storage is only read.

`replayer` says which parts there are. Imports `run` and below.
"""
