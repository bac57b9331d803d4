"""Looking into state: views, SQL, differences, exports.

Imports `ownership` and below.
"""
