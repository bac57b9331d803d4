"""The stores of a subtask's entries: RocksDB, memory, or several stores as one.

Imports no other room.
"""
