"""A stage's function: how it is called, with whole batches or key by key, the rows it returns, the timers it sets."""
