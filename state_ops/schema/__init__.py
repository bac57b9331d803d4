"""State classes and what is stored of them: descriptors, evolution, codecs of rows and keys, key groups.

Imports `arrow`.
"""
