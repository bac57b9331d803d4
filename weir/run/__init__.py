"""The loop of a run, what sensors decide, stopping, maintenance.

Imports `epoch`, `restore` and below.
"""
