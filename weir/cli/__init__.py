"""The command `weir`: one module for each noun, the console, the Prometheus exporter.

Imports every room of `pipelines`.
"""
