"""Where rows come from: directories of files, how far they have been read, which files are bad, and slices.

Imports `definition`.
"""
