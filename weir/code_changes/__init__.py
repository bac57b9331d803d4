"""The comparison of today's code with the code that a checkpoint recorded, beside a stage's own state.

Imports what the operators import.
"""
