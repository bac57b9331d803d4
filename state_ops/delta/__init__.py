"""Delta tables with fenced commits, the entries of their logs, and the removal of old log files.

Imports `storage`.
"""
