"""What of today's code is compared with what a checkpoint recorded, beside a stage's own state.

Imports what the operators import.
"""
