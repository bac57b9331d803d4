"""Object stores and the local disk: conditional writes, retries, transfers, paths, temporary directories.

Imports nothing of `state_ops` but `errors`, `ids` and `durations`.
"""
