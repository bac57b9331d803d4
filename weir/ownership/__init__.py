"""The work of a pipeline's owner beyond one epoch: fencing, publishing, pruning, and removing leftovers.

Imports `execution` and below.
"""
