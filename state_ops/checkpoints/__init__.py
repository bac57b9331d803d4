"""Checkpoints: the coordinator that completes them, the registry that keeps them, retention.

Imports `storage`, `delta` and `coordination`. What a checkpoint records is in `records`.
"""
