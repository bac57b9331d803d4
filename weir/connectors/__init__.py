"""Systems that data comes from and goes to: a package for each.

Imports `definition`, which has the protocols of sources and sinks.
"""
