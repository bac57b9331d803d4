"""Where rows come from: files, their footers and slices.

Imports `definition`.
"""
