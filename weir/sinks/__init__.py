"""Sinks: Delta tables, to which rows are appended, in which rows are replaced, and from which they are taken back.

Imports `sources` and `definition`.
"""
