"""Checkpoints: their records, the coordinator that completes them, the registry, retention.

Imports `storage`, `delta` and `coordination`.
"""
