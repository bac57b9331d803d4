"""Operators of several inputs: how rows of each reach a stage in one table (`sides`), and joins of two (`join`)."""
