"""Arrow tables, frames, types and casts.

Imports no other room.
"""
