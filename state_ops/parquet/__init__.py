"""Parquet below its libraries: what a file's footer says, before a library decodes it."""
