"""Records that the rooms of the engine hand to each other: files of a checkpoint, acks, and figures of operators."""
