"""Beginning from a checkpoint: restore, rewind, start from a savepoint, recovery.

Imports `gates` and below.
"""
