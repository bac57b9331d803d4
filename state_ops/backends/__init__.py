"""Where a subtask's entries are kept: RocksDB, memory, or several of them as one.

Imports no other room.
"""
