"""Operators: a package for each, and what all of them share.

A package's `__init__` has the definition, which answers for everything that the engine asks (`OperatorKind`); the other
modules have what works on the rows of one subtask between two barriers.
"""
