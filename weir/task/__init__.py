"""What one subtask does in an epoch.

Imports `operators` and `sources`.
"""
