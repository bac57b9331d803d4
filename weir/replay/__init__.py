"""Play an old epoch again in this process, and find where a row of a table came from.

Storage is only read.
"""
