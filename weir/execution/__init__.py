"""Running subtasks: on Spark, or in this process.

Imports `task` and below.
"""
