"""What the owner of a pipeline does beyond one epoch: fencing, publishing, pruning, leftovers.

Imports `execution` and below.
"""
