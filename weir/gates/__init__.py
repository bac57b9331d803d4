"""Quality gates on rows, epochs and restores, and the quarantine of rows.

Imports `inspection` and below.
"""
