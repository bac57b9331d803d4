"""What a stage's function is called with and hands out: whole batches, or key by key, and the timers that it sets."""
