"""Records that the rooms of the engine hand to each other: checkpoints with their files, sinks, publications and names,
acks, figures of operators, results of restores. Nothing here reads or writes.
"""
