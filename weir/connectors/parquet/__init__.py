"""Rows of Parquet files, wherever they lie: which values of them cannot be handed on, and how much is decoded at once.

Imports nothing of the systems that such files are read from.
"""
