"""Formats other than Parquet: the bytes of CSV, JSON lines and Avro become Arrow rows, and bad rows with reasons.

stream       a file's bytes: decompressed, in blocks of whole lines
texts        text to values, exactly as Spark reads it or not at all
csv_rows     json_lines     avro     a block of lines, or of rows, to Arrow
hive         columns that stand in a file's directories
decoding     START HERE: `decode` and `infer` for all formats
"""
