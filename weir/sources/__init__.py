"""Sources: directories of files, how far they have been read, bad files, and slices.

Imports `definition`.
"""
