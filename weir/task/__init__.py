"""The work of one subtask in an epoch.

Imports `operators` and `sources`.
"""
