"""Parquet as every writer writes it: footers, rows, and dates by an old calendar.

Imports nothing else of `sources` but what a slice is.
"""
