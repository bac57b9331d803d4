"""State for functions that are called once a key: its handle, its lists and maps, the cache between epochs."""
