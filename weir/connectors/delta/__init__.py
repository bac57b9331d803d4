"""Delta tables that Weir writes: append, upsert, replace and replace where, and what all of them commit by."""
