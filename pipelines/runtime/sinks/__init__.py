"""Where rows go: Delta tables, appended, replaced and taken back.

Imports `sources` and `definition`.
"""
