"""Avro: the types of a schema, and the rows of container files, in bounded memory.

schema     the Arrow types of a schema, for files and messages alike
bounds     what a block of rows takes in memory
values     what Polars reads, as the file's own schema has it
casts      values in the types that are declared
avro_files START HERE: a file's blocks
"""
