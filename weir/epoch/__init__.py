"""One epoch, from its barrier to its last step, and several of them in flight. Read `steps` first.

Imports `gates` and below.
"""
