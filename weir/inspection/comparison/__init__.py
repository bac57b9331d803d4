"""Comparisons of two states of a stage, and of the rows of two sides. Every command that compares does it here.

    entries   states byte by byte, whatever their parallelism; of equal entries nothing is decoded
    states    states row by row, in a database on disk
    tables    the rows of a sink, as multisets, in a database on disk
    rows      a few rows, in memory
    floats    the rule by which two floats count as equal

`weir debug` and `weir drill` compare entries first, and rows where entries differ. `weir ci`, `weir diff` and
`weir backfill` compare rows alone, since other code may store the same rows otherwise.
"""
