"""Tells whether everything that a pipeline has stored is whole, and which files nothing needs.

findings -> what can be wrong, and what a person does about it
survey   -> one reading of the registry, and how its tables fit each other
sinks    -> the published tables against the chain of checkpoints
objects  -> everything in storage against what the registry and the tables name
check    -> the whole, twice: a finding counts only if it holds before and after
repair   -> a plan of what nothing live references, and its execution by the generation's owner
"""
