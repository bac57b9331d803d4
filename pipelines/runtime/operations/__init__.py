"""What a person does with a pipeline: fork, compare, promote, backfill, plan, edit, import, drill.

Imports `run` and below.
"""
