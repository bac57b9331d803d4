"""The process that runs a pipeline: its lease, requests to it, a suspension, a gate hold.

Imports `storage`.
"""
