"""An epoch that was, played again in this process for who looks into it, and where a table's row came from.

Storage is only read.
"""
