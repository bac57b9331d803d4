"""Sinks as a pipeline reaches them: opened as the code or a checkpoint says, and what checkpoints record of them.

Imports `definition` and `connectors`, where the sinks themselves are.
"""
