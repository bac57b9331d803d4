"""A pull request tried on production's newest epochs: they are taken, replayed with its code, and compared. `review` is
where it begins.
"""
