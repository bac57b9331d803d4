"""A subtask's local state files: working copies, manifests, fetching, uploading, sweeping, rescaling.

Imports `storage`, `checkpoints`, `backends` and `schema`.
"""
