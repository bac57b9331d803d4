"""Operations on a pipeline: fork, compare, promote, backfill, plan, edit, import, drill, try a pull request.

Imports `run` and below.
"""
